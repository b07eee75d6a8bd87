"""What examples are turned into before anyone trains: public features, of each example by itself.

Features that no private example touched, and that treat every example alone, cost no privacy: they are a part of what a
worker holds (docs/features.md). So they are computed once, by whoever holds the examples, and kept on the disk.
"""

from noisegate.features.checking import check_features
from noisegate.features.embedding import TELL, Kept, cache_folder, embed
from noisegate.features.naming import FEATURES, Features, build_features, catalog_features, check_request, freeze
from noisegate.features.scattering import Scattering
from noisegate.features.texture import Texture

__all__ = [
    "FEATURES",
    "TELL",
    "Features",
    "Kept",
    "Scattering",
    "Texture",
    "build_features",
    "cache_folder",
    "catalog_features",
    "check_features",
    "check_request",
    "embed",
    "freeze",
]
