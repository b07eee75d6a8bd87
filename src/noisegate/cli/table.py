"""A result for people."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from noisegate.cli.terminal import Console
from noisegate.privacy import IN_WORDS
from noisegate.privacy.statement import COMMON_DELTA
from noisegate.runs import Result, Spec
from noisegate.runs.costs import Bill
from noisegate.runs.promise import STATED


def show_result(result: Result, proportion: Mapping[str, float], cost: Bill, out: Path) -> None:
    """The short table that ends a run. cost: what all that was trained costs together."""
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
    for row in _promise(result, cost):
        table.add_row(*row)
    if result.rounds_lost:
        table.add_row("rounds lost", f"{result.rounds_lost}", "with a process that ended; paid for, never drawn again")
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
    if result.epsilon is not None and not result.secret:
        research = "for research: whoever has the seed has the noise. Train with --secret what you give away."
        console.print(research, style="dim", soft_wrap=True)


def show_costs(found: Sequence[Bill], console: Console) -> None:
    """What everything that a command trained costs together: a sentence for each data set."""
    for bill in found:
        console.print(bill.sentence(), soft_wrap=True, highlight=False, markup=False)


def _promise(result: Result, cost: Bill) -> Iterator[tuple[str, str, str]]:
    """What the run promises each example, in every way that is known; and what all that was trained costs together."""
    if result.epsilon is None:
        yield "epsilon", "none", "sigma 0: nothing is private"
    else:
        by = "stated, not checked here" if result.accountant == STATED else result.accountant.upper()
        relation = IN_WORDS[result.relation]
        yield (
            "epsilon",
            f"{result.epsilon:.3f}",
            f"delta {result.delta:.2g}, sigma {result.sigma:.3f}, {by}; {relation}",
        )
        if result.epsilon_at_1e_5 is not None and result.delta != COMMON_DELTA:
            yield "  at delta 1e-5", f"{result.epsilon_at_1e_5:.3f}", "epsilon of the same noise"
        if result.mu is not None:
            yield "  mu", f"{result.mu:.3f}", "at least as private as mu-GDP at every delta of 1e-10 or more"
    if cost.epsilon is None:
        yield "  together", "none", f"{cost.trainings} trained on this data: {cost.note}"
    elif cost.trainings > 1 or cost.epsilon != result.epsilon:
        runs = (
            "all its copies" if cost.trainings == 1 else f"all {cost.trainings} trainings of this command on this data"
        )
        all_of = f"what an example pays for {runs}"
        yield "  together", f"{cost.epsilon:.3f}", f"{all_of}, at delta {cost.delta:.2g}"


def _reckoning(result: Result) -> str:
    """Why an aggregator reckons with so many Byzantine workers."""
    aggregator = Spec(**result.spec).build_aggregator()
    if aggregator.chosen() is not None:
        why = "as set"
    elif result.believed_byzantine == aggregator.most(result.workers + result.byzantine_workers):
        why = "as many as it admits"
    elif result.spec["gamma"] is not None:
        why = "as gamma says"
    else:
        why = "as many as there are"
    return f"{why}; it needs {aggregator.condition()}"


def _part(part: Any) -> str:
    """A part's name, and in parentheses the settings that were chosen."""
    if not isinstance(part, Mapping):
        return str(part)
    settings = dict(part)
    name = str(settings.pop("name"))
    chosen = ", ".join(f"{key} {_part(value)}" for key, value in settings.items())
    return f"{name} ({chosen})" if chosen else name
