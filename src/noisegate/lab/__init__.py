"""Specs, runs and where they are kept."""

from noisegate.lab.launch import Result, reference, run, run_together, undefended
from noisegate.lab.spec import Spec, make_spec, read_settings, read_spec

__all__ = [
    "Result",
    "Spec",
    "make_spec",
    "read_settings",
    "read_spec",
    "reference",
    "run",
    "run_together",
    "undefended",
]
