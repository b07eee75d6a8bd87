"""Specs, runs and where they are kept."""

from noisegate.lab.launch import reference, run, run_together, undefended
from noisegate.lab.redteam import Findings, red_team
from noisegate.lab.result import Result
from noisegate.lab.spec import Spec, make_spec, read_settings, read_spec

__all__ = [
    "Findings",
    "Result",
    "Spec",
    "make_spec",
    "read_settings",
    "read_spec",
    "red_team",
    "reference",
    "run",
    "run_together",
    "undefended",
]
