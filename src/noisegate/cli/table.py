"""A result for people."""

from collections.abc import Mapping
from pathlib import Path

from rich.console import Console
from rich.table import Table

from noisegate.lab import Result


def show_result(result: Result, proportion: Mapping[str, float], out: Path) -> None:
    """The short table that ends a run."""
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(style="bold")
    table.add_column(justify="right")
    table.add_column(style="dim", overflow="fold")
    lying = (
        f"{result.byzantine_workers} of {result.workers + result.byzantine_workers} workers ({result.byzantine:.0%})"
    )
    table.add_row("accuracy", f"{result.accuracy:.3f}", f"{result.aggregator} against {result.attack} by {lying}")
    if proportion:
        clean, open_door = proportion["reference_accuracy"], proportion["undefended_accuracy"]
        table.add_row("reference accuracy", f"{clean:.3f}", "same private training, no attackers, plain mean")
        table.add_row("undefended", f"{open_door:.3f}", "plain mean under the same attack")
    promise = (
        f"delta {result.delta:.2g}, sigma {result.sigma:.3f}, {result.accountant.upper()}, each example of each worker"
    )
    table.add_row("epsilon", f"{result.epsilon:.3f}", promise)
    table.add_row("honest uploads refused", f"{result.honest_rejected:.1%}", "by a test, although honest")
    table.add_row("Byzantine uploads used", f"{result.byzantine_selected:.1%}", "of the uploads that made the model")
    pace = f"{result.rounds} rounds, {result.ms_per_round:.1f} ms each"
    table.add_row(
        "time", f"{result.seconds:.1f} s", f"{pace}; {result.dataset}, {result.model} ({result.parameters:,})"
    )
    console = Console()
    console.print(table)
    console.print(f"written to {out}", style="dim", soft_wrap=True)
