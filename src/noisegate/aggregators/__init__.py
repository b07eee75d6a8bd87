"""Rules by which a server turns uploads into an update. A new one is one file and one line here."""

from collections.abc import Callable
from typing import Any

from noisegate.aggregators.mean import Mean
from noisegate.aggregators.two_stage import TwoStage

AGGREGATORS: dict[str, Callable[..., Any]] = {"mean": Mean, "two-stage": TwoStage}

__all__ = ["AGGREGATORS", "Mean", "TwoStage"]
