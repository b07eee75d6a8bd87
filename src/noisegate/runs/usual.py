"""The batch, worker and rate that a run has where the user gives none."""

from collections.abc import Mapping
from typing import Any

from noisegate.aggregators import AGGREGATORS
from noisegate.catalog import find
from noisegate.data import SOURCES
from noisegate.models import USUAL
from noisegate.roles import Aggregator

DEFAULTS = {"batch": 16, "worker": "normalized", "rate": 0.2}


def partner_of(aggregator: Any) -> dict[str, Any]:
    """The settings of a run that an aggregator goes with, where the user gives none."""
    if isinstance(aggregator, Aggregator):
        return dict(aggregator.goes_with)
    name = aggregator.get("name") if isinstance(aggregator, Mapping) else aggregator
    if not isinstance(name, str):
        return {}  # which `settle` will refuse
    kind: Any = find("aggregator", name, AGGREGATORS)
    declares = isinstance(kind, type) and Aggregator in kind.__mro__  # if not, it will be refused when it is built
    return dict(kind.goes_with) if declares else {}


def usual_of(dataset: Any) -> dict[str, Any]:
    """The batch and rate of a data set that has its own."""
    source = SOURCES.get(dataset) if isinstance(dataset, str) else None
    own = {"batch": source.batch, "rate": source.rate} if source else {}
    return {name: value for name, value in own.items() if value is not None}


def usual_with(model: Any) -> dict[str, Any]:
    """The settings of a run that a model goes with, where the user gives none."""
    return dict(USUAL.get(model, {})) if isinstance(model, str) else {}
