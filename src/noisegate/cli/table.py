"""A result for people."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.table import Table

from noisegate.aggregators import Robust
from noisegate.cli.terminal import Console
from noisegate.lab import Result, Spec
from noisegate.lab.setup import STATED


def show_result(result: Result, proportion: Mapping[str, float], out: Path) -> None:
    """The short table that ends a run."""
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(style="bold")
    table.add_column(justify="right")
    table.add_column(style="dim", overflow="fold")
    lying = (
        f"{result.byzantine_workers} of {result.workers + result.byzantine_workers} workers ({result.byzantine:.0%})"
    )
    fight = f"{_part(result.spec['aggregator'])} against {_part(result.spec['attack'])} by {lying}"
    table.add_row("accuracy", f"{result.accuracy:.3f}", fight)
    if result.believed_byzantine is not None:
        table.add_row("liars reckoned with", f"{result.believed_byzantine}", _reckoning(result))
    if proportion:
        clean, open_door = proportion["reference_accuracy"], proportion["undefended_accuracy"]
        table.add_row("reference accuracy", f"{clean:.3f}", "same private training, no attackers, plain mean")
        table.add_row("undefended", f"{open_door:.3f}", "plain mean under the same attack")
    if result.spec["worker"]["name"] != "normalized":
        brought = f"{_part(result.spec['worker'])}, batch {result.spec['batch']}, rate {result.spec['rate']:g}"
        table.add_row("worker", "", brought)
    by = "stated, not checked here" if result.accountant == STATED else result.accountant.upper()
    promise = f"delta {result.delta:.2g}, sigma {result.sigma:.3f}, {by}, each example of each worker"
    if result.epsilon is None:
        table.add_row("epsilon", "none", "sigma 0: nothing is private")
    else:
        table.add_row("epsilon", f"{result.epsilon:.3f}", promise)
    table.add_row("honest uploads refused", f"{result.honest_rejected:.1%}", "by a test, although honest")
    table.add_row("Byzantine uploads used", f"{result.byzantine_selected:.1%}", "of the uploads that made the model")
    if malformed := sum(line["rejected"].get("malformed", {"byzantine": 0})["byzantine"] for line in result.curve):
        sent = result.rounds * result.byzantine_workers
        table.add_row(
            "malformed uploads",
            f"{malformed / sent:.1%}",
            "of the Byzantine ones; a forge must give (M, d) floats, or None if needs_own",
        )
    pace = f"{result.rounds} rounds, {result.ms_per_round:.1f} ms each"
    table.add_row(
        "time", f"{result.seconds:.1f} s", f"{pace}; {result.dataset}, {result.model} ({result.parameters:,})"
    )
    console = Console()
    console.print(table)
    console.print(f"written to {out}", style="dim", soft_wrap=True)


def _reckoning(result: Result) -> str:
    """Why a rule reckons with so many liars."""
    rule = Spec(**result.spec).build_aggregator()
    if not isinstance(rule, Robust):
        return ""
    if rule.chosen() is not None:
        why = "as set"
    elif result.believed_byzantine == rule.most(result.workers + result.byzantine_workers):
        why = "as many as it admits"
    elif result.spec["gamma"] is not None:
        why = "as gamma says"
    else:
        why = "as many as there are"
    return f"{why}; it needs {rule.condition()}"


def _part(part: Any) -> str:
    """A part's name, and in parentheses the settings that were chosen."""
    if not isinstance(part, Mapping):
        return str(part)
    settings = dict(part)
    name = str(settings.pop("name"))
    chosen = ", ".join(f"{key} {_part(value)}" for key, value in settings.items())
    return f"{name} ({chosen})" if chosen else name
