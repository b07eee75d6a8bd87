"""Accounting: what a run costs every worker's examples, and the noise that a budget asks for."""

from noisegate.privacy.guarantee import Guarantee, calibrate, epsilon, guarantee, worst_sigma
from noisegate.privacy.pricing import ACCOUNTANTS, PAPER_DELTA, ask_of, default_delta, paper_delta

__all__ = [
    "ACCOUNTANTS",
    "PAPER_DELTA",
    "Guarantee",
    "ask_of",
    "calibrate",
    "default_delta",
    "epsilon",
    "guarantee",
    "paper_delta",
    "worst_sigma",
]
