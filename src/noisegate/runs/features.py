"""The features of a run: built, named by a digest of code and weights, and put in place of the examples."""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from noisegate.catalog import is_own
from noisegate.data import Dataset
from noisegate.errors import SpecError
from noisegate.features import Features, Kept, cache_folder, embed, freeze
from noisegate.runs.identity import digest_of
from noisegate.runs.spec import Spec


@dataclass(frozen=True)
class RunFeatures:
    """name: for people. digest: of code and weights. lasting: whether equal features have an equal digest later on."""

    make: Features
    name: str
    digest: str
    lasting: bool

    def of(self, dataset: Dataset, digest: str, device: torch.device, keep: bool) -> Dataset:
        """The data set with features in place of examples. digest: of its examples. keep: also on the disk."""
        folder = cache_folder() if keep and self.lasting else None

        def features(x: Tensor) -> Tensor:
            # Rounding differs between kinds of devices, and a run must not change with what is kept.
            kept = Kept(folder, digest_of(digest, digest_of(x), self.digest, device.type)) if folder else None
            return embed(self.make, x, device, kept)

        return replace(dataset, x=features(dataset.x), x_test=features(dataset.x_test), feature_names=())


def features_of(spec: Spec, given: Features | None, label: str | None) -> RunFeatures | None:
    """The features that are given, or that the spec names; None if there are none."""
    if given is not None and spec.features is not None:
        raise SpecError(f"features = {spec.features!r}: others are given beside the spec; leave one of them out")
    made = spec.build_features() if given is None else freeze(given)
    if made is None:
        return None
    name = type(made).__name__ if isinstance(made, nn.Module) else getattr(made, "__name__", type(made).__name__)
    named = spec.canonical()["features"]["name"] if given is None else name
    digest = digest_features(made, label if given is not None else None)
    return RunFeatures(made, named, digest, digest == digest_features(made, label if given is not None else None))


def own_features(spec: Spec) -> Features | None:
    """The features that a spec names by their path; None if it names none, or those of the catalog."""
    return spec.build_features() if spec.features and is_own(spec.canonical()["features"]["name"]) else None


def digest_features(features: Features, label: str | None = None) -> str:
    """A digest of code and weights. label: takes the place of the code, where it cannot be read."""
    weights: list[Any] = list(features.state_dict().items()) if isinstance(features, nn.Module) else []
    code: Any = label if label is not None else features
    return digest_of("features", getattr(features, "key", ""), code, weights)
