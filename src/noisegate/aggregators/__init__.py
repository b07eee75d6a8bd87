"""Aggregators by which a server turns uploads into an update. A new one is one file and one line here."""

from collections.abc import Callable
from typing import Any

from noisegate.aggregators.bucketing import Bucketing
from noisegate.aggregators.bulyan import Bulyan
from noisegate.aggregators.centered_clipping import CenteredClipping
from noisegate.aggregators.fltrust import FLTrust
from noisegate.aggregators.fortified import Fortified
from noisegate.aggregators.geometric_median import GeometricMedian
from noisegate.aggregators.guerraoui import Guerraoui
from noisegate.aggregators.krum import Krum, MultiKrum
from noisegate.aggregators.mda import MDA
from noisegate.aggregators.mean import Mean
from noisegate.aggregators.median import Median
from noisegate.aggregators.nnm import NearestNeighborMixing
from noisegate.aggregators.robust import Robust
from noisegate.aggregators.sign_baselines import MaSignVote, SignGaussianSum, SignRandomizedSum
from noisegate.aggregators.sign_vote import SignVote
from noisegate.aggregators.spectral_filter import SpectralFilter
from noisegate.aggregators.trimmed_mean import TrimmedMean
from noisegate.aggregators.two_stage import TwoStage

AGGREGATORS: dict[str, Callable[..., Any]] = {
    "mean": Mean,
    "two-stage": TwoStage,
    "fortified": Fortified,
    "krum": Krum,
    "multi-krum": MultiKrum,
    "mda": MDA,
    "bulyan": Bulyan,
    "median": Median,
    "trimmed-mean": TrimmedMean,
    "geometric-median": GeometricMedian,
    "centered-clipping": CenteredClipping,
    "spectral-filter": SpectralFilter,
    "sign-vote": SignVote,
    "fltrust": FLTrust,
    "nnm": NearestNeighborMixing,
    "bucketing": Bucketing,
    "guerraoui": Guerraoui,
    "sign-gaussian": SignGaussianSum,
    "sign-randomized": SignRandomizedSum,
    "ma-sign": MaSignVote,
}

__all__ = [
    "AGGREGATORS",
    "MDA",
    "Bucketing",
    "Bulyan",
    "CenteredClipping",
    "FLTrust",
    "Fortified",
    "GeometricMedian",
    "Guerraoui",
    "Krum",
    "MaSignVote",
    "Mean",
    "Median",
    "MultiKrum",
    "NearestNeighborMixing",
    "Robust",
    "SignGaussianSum",
    "SignRandomizedSum",
    "SignVote",
    "SpectralFilter",
    "TrimmedMean",
    "TwoStage",
]
