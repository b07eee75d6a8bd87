"""Accounting: what a run costs every worker's examples, and the noise that a budget asks for."""

from noisegate.privacy.composition import Cost, together
from noisegate.privacy.groups import group_epsilon
from noisegate.privacy.guarantee import Guarantee, calibrate, epsilon, guarantee, worst_sigma
from noisegate.privacy.pricing import ACCOUNTANTS, PAPER, Delta, ask_of, default_delta, delta_of, paper_delta
from noisegate.privacy.statement import IN_WORDS, Statement, statement

__all__ = [
    "ACCOUNTANTS",
    "IN_WORDS",
    "PAPER",
    "Cost",
    "Delta",
    "Guarantee",
    "Statement",
    "ask_of",
    "calibrate",
    "default_delta",
    "delta_of",
    "epsilon",
    "group_epsilon",
    "guarantee",
    "paper_delta",
    "statement",
    "together",
    "worst_sigma",
]
