"""Federated learning that is differentially private for every worker and survives a majority of liars.

>>> import noisegate
>>> result = noisegate.run(noisegate.Spec(rounds=3, sigma=2.5, sigma_base=2.5, epsilon=2.0))
>>> result.rounds, result.byzantine_workers
(3, 15)
"""

from noisegate.aggregators import Mean, Robust, TwoStage
from noisegate.attacks import ALittle, Dormant, Gaussian, Honest, Inner, LabelFlip, LocalPoisoning
from noisegate.compute import Compute
from noisegate.data import Dataset
from noisegate.errors import DataError, NoisegateError, PrivacyError, SpecError, StoreError
from noisegate.lab import Result, Spec, reference, run, run_together, undefended
from noisegate.privacy import Guarantee, calibrate, epsilon, guarantee
from noisegate.sampling import FixedSize, Poisson
from noisegate.streams import stream
from noisegate.vectors import FlatModel
from noisegate.version import __version__ as __version__
from noisegate.views import Reason, ServerView, Verdict
from noisegate.workers import Clipped, Normalized

__all__ = [
    "ALittle",
    "Clipped",
    "Compute",
    "DataError",
    "Dataset",
    "Dormant",
    "FixedSize",
    "FlatModel",
    "Gaussian",
    "Guarantee",
    "Honest",
    "Inner",
    "LabelFlip",
    "LocalPoisoning",
    "Mean",
    "NoisegateError",
    "Normalized",
    "Poisson",
    "PrivacyError",
    "Reason",
    "Result",
    "Robust",
    "ServerView",
    "Spec",
    "SpecError",
    "StoreError",
    "TwoStage",
    "Verdict",
    "calibrate",
    "epsilon",
    "guarantee",
    "reference",
    "run",
    "run_together",
    "stream",
    "undefended",
]
