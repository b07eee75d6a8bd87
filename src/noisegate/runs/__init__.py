"""Specs, runs, and the folders that keep them."""

from noisegate.runs.compared import Comparison, compare
from noisegate.runs.launch import noiseless, reference, run, run_together, undefended
from noisegate.runs.result import Result, load
from noisegate.runs.spec import Spec, make_spec, read_spec

__all__ = [
    "Comparison",
    "Result",
    "Spec",
    "compare",
    "load",
    "make_spec",
    "noiseless",
    "read_spec",
    "reference",
    "run",
    "run_together",
    "undefended",
]
