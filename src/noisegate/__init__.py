"""Federated learning that is differentially private for every worker and survives a majority of Byzantine workers.

>>> import noisegate
>>> result = noisegate.run(noisegate.Spec(rounds=3, sigma=2.5, sigma_base=2.5, epsilon=2.0))
>>> result.rounds, result.byzantine_workers
(3, 15)
"""

import importlib
import typing

from noisegate.version import __version__ as __version__

if typing.TYPE_CHECKING:  # for whoever reads types; the names below come when they are asked for
    from noisegate.aggregators import (
        Bucketing,
        Bulyan,
        CenteredClipping,
        FLTrust,
        Fortified,
        GeometricMedian,
        Guerraoui,
        Krum,
        MaSignVote,
        Mean,
        Median,
        MultiKrum,
        NearestNeighborMixing,
        Robust,
        SignGaussianSum,
        SignRandomizedSum,
        SignVote,
        SpectralFilter,
        TrimmedMean,
        TwoStage,
    )
    from noisegate.attacks import (
        ALittle,
        ALittleTuned,
        Backdoor,
        ClassHide,
        ClassSwap,
        Dormant,
        FangKrum,
        FangTrimmedMean,
        Gaussian,
        GradientAscent,
        Honest,
        Inner,
        InnerTuned,
        LabelFlip,
        LargeNorm,
        LocalPoisoning,
        Mimic,
        MinMax,
        MinSum,
        NotANumber,
        OnOff,
        RankMatched,
        ScoreBanking,
        SignFlip,
        Trojan,
        Zero,
    )
    from noisegate.compute import Compute
    from noisegate.data import Dataset
    from noisegate.errors import DataError, NoisegateError, PrivacyError, SpecError, StoreError
    from noisegate.privacy import Guarantee, calibrate, epsilon
    from noisegate.privacy import guarantee as guarantee  # type: ignore[no-redef]  # taken for the module of that name
    from noisegate.roles import Aggregator
    from noisegate.runs import (
        Comparison,
        Result,
        Spec,
        compare,
        load,
        noiseless,
        reference,
        run,
        run_together,
        undefended,
    )
    from noisegate.sampling import Balanced, FixedSize, Poisson
    from noisegate.streams import stream
    from noisegate.vectors import FlatModel
    from noisegate.views import Reason, ServerView, Verdict
    from noisegate.workers import Clipped, ClippedMomentum, MaSign, Normalized, SignGaussian, SignRandomized

_HOMES = {
    "noisegate.aggregators": (
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
    ),
    "noisegate.attacks": (
        "ALittle",
        "ALittleTuned",
        "Backdoor",
        "ClassHide",
        "ClassSwap",
        "Dormant",
        "FangKrum",
        "FangTrimmedMean",
        "Gaussian",
        "GradientAscent",
        "Honest",
        "Inner",
        "InnerTuned",
        "LabelFlip",
        "LargeNorm",
        "LocalPoisoning",
        "Mimic",
        "MinMax",
        "MinSum",
        "NotANumber",
        "OnOff",
        "RankMatched",
        "ScoreBanking",
        "SignFlip",
        "Trojan",
        "Zero",
    ),
    "noisegate.compute": ("Compute",),
    "noisegate.data": ("Dataset",),
    "noisegate.errors": ("DataError", "NoisegateError", "PrivacyError", "SpecError", "StoreError"),
    "noisegate.roles": ("Aggregator",),
    "noisegate.runs": (
        "Comparison",
        "Result",
        "Spec",
        "compare",
        "load",
        "noiseless",
        "reference",
        "run",
        "run_together",
        "undefended",
    ),
    "noisegate.privacy": ("Guarantee", "calibrate", "epsilon", "guarantee"),
    "noisegate.sampling": ("Balanced", "FixedSize", "Poisson"),
    "noisegate.streams": ("stream",),
    "noisegate.vectors": ("FlatModel",),
    "noisegate.views": ("Reason", "ServerView", "Verdict"),
    "noisegate.workers": ("Clipped", "ClippedMomentum", "MaSign", "Normalized", "SignGaussian", "SignRandomized"),
}
"""Where each name is. Nothing is imported before it is used: a command can be interrupted while torch is."""


def __getattr__(name: str) -> typing.Any:
    for home, names in _HOMES.items():
        if name in names:
            value = globals()[name] = getattr(importlib.import_module(home), name)
            return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


__all__ = [
    "ALittle",
    "ALittleTuned",
    "Aggregator",
    "Backdoor",
    "Balanced",
    "Bucketing",
    "Bulyan",
    "CenteredClipping",
    "ClassHide",
    "ClassSwap",
    "Clipped",
    "ClippedMomentum",
    "Comparison",
    "Compute",
    "DataError",
    "Dataset",
    "Dormant",
    "FLTrust",
    "FangKrum",
    "FangTrimmedMean",
    "FixedSize",
    "FlatModel",
    "Fortified",
    "Gaussian",
    "GeometricMedian",
    "GradientAscent",
    "Guarantee",
    "Guerraoui",
    "Honest",
    "Inner",
    "InnerTuned",
    "Krum",
    "LabelFlip",
    "LargeNorm",
    "LocalPoisoning",
    "MaSign",
    "MaSignVote",
    "Mean",
    "Median",
    "Mimic",
    "MinMax",
    "MinSum",
    "MultiKrum",
    "NearestNeighborMixing",
    "NoisegateError",
    "Normalized",
    "NotANumber",
    "OnOff",
    "Poisson",
    "PrivacyError",
    "RankMatched",
    "Reason",
    "Result",
    "Robust",
    "ScoreBanking",
    "ServerView",
    "SignFlip",
    "SignGaussian",
    "SignGaussianSum",
    "SignRandomized",
    "SignRandomizedSum",
    "SignVote",
    "Spec",
    "SpecError",
    "SpectralFilter",
    "StoreError",
    "TrimmedMean",
    "Trojan",
    "TwoStage",
    "Verdict",
    "Zero",
    "calibrate",
    "compare",
    "epsilon",
    "guarantee",
    "load",
    "noiseless",
    "reference",
    "run",
    "run_together",
    "stream",
    "undefended",
]
