"""`noisegate ledger`: what a data set was used for, and whether the record of it is whole."""

import json
import math
from pathlib import Path
from typing import Any

import typer
from rich.table import Table

from noisegate import checks
from noisegate.cli.terminal import Console
from noisegate.errors import StoreError
from noisegate.federation.ledger import repair, spendings
from noisegate.federation.ledger_folder import read_ledger
from noisegate.federation.ledger_lines import FILE, Book
from noisegate.federation.outbox import Mark, marks_in
from noisegate.federation.policy import Policy
from noisegate.federation.spending import Spending, price, price_of_choices
from noisegate.federation.worker_folder import POLICY, SETTINGS, WorkerFolder
from noisegate.privacy.pricing import LARGEST_DELTA

SHORT = 12
"""How many digits of a run's id, a key or a fingerprint are shown."""


def show_ledger(path: Path, delta: float | None, as_json: bool) -> None:
    """What each run cost an example, what all cost together, and what is left of the budget."""
    policy = Policy.read(path / POLICY) if (path / POLICY).exists() else None
    if delta is None:
        delta = policy.delta if policy else LARGEST_DELTA
    book, uncharged = read_ledger(ledger_folder(path))
    told = _told(book, uncharged, delta, policy)
    if as_json:
        print(json.dumps(_finite(told), indent=2, allow_nan=False))
    else:
        _show(told)


def verify_ledger(path: Path) -> None:
    """Check every line, their chain and the outbox; exit status 1 if anything is wrong."""
    try:
        folder = ledger_folder(path)
        book, uncharged = read_ledger(folder, messages=True)
        uploads = len(marks_in(folder))
    except StoreError as error:
        print(checks.plain(error))
        raise typer.Exit(1) from None
    charges = sum(len(entry.charges) for entry in book.runs.values())
    print(
        f"ok: {book.entries} lines in an unbroken chain, {len(book.runs)} runs, {charges} rounds charged, "
        f"{uploads} uploads in the outbox{_waiting(len(uncharged))}"
    )


def repair_ledger(path: Path) -> None:
    """Take a torn last line away, charge what lies in the outbox, and touch nothing else."""
    removed, charged = repair(ledger_folder(path))
    if not removed:
        print(f"nothing is torn; {charged} rounds of the outbox were charged")
        return
    print(f"took {removed} torn bytes away (kept in {FILE}.torn); {charged} rounds of the outbox were charged")


def ledger_folder(path: Path) -> Path:
    """The folder of the ledger: this one, or the one that a worker's folder names."""
    if (path / FILE).exists():
        return path
    if (path / SETTINGS).exists():
        return WorkerFolder.read(path).ledger
    return path / "ledger" if (path / "ledger").is_dir() else path


def _told(book: Book, uncharged: list[Mark], delta: float, policy: Policy | None) -> dict[str, Any]:
    """All that is shown, by name."""
    spent = spendings(book)
    total, (by_choices, order) = price(spent, delta), price_of_choices(spent, delta)
    alone: dict[Spending, float] = {}
    for each in spent:
        if each not in alone:
            alone[each] = price([each], delta)
    runs, priced = [], iter(spent)
    for run, entry in book.runs.items():
        terms, rounds = entry.terms, list(entry.charges)
        runs.append(
            {
                "run": run,
                "title": terms["title"],
                "server": entry.server,
                "sigma": terms["sigma"],
                "rate": terms["batch"] / terms["declared"],
                "batch": terms["batch"],
                "declared": terms["declared"],
                "parameters": terms["parameters"],
                "rounds": terms["rounds"],
                "charged": len(rounds),
                "first_round": rounds[0] if rounds else None,
                "last_round": rounds[-1] if rounds else None,
                "epsilon": alone[next(priced)] if rounds else 0.0,
            }
        )
    return {
        "lines": book.entries,
        "data": book.data,
        "runs": runs,
        "waiting": len(uncharged),
        "delta": delta,
        "epsilon": total,
        "epsilon_by_choices": by_choices,
        "order": order,
        "budget": policy.epsilon if policy else None,
        "budget_delta": policy.delta if policy else None,
        "left": max(0.0, policy.epsilon - total) if policy and policy.delta == delta else None,
    }


def _show(told: dict[str, Any]) -> None:
    """Print a line for each run, and what they cost together."""
    console = Console()
    if told["runs"]:
        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
        table.add_column("run")
        table.add_column("title", overflow="fold", max_width=30)
        table.add_column("server")
        for name in ("sigma", "rate", "charged", "rounds", "epsilon"):
            table.add_column(name, justify="right")
        for each in told["runs"]:
            span = f"{each['first_round']} to {each['last_round']}" if each["charged"] else "none"
            names = each["run"][:SHORT], each["title"], each["server"][:SHORT]
            numbers = f"{each['sigma']:g}", f"{each['rate']:.4g}", f"{each['charged']}"
            table.add_row(*names, *numbers, span, checks.rounded(each["epsilon"], 4))
        console.print(table)
    say = f"all together: epsilon {checks.rounded(told['epsilon'], 4)} at delta {told['delta']:g}, by PLD"
    if told["left"] is not None:
        say += f"; {told['left']:.4f} left of {told['budget']:g}"
    elif told["budget"] is not None:
        say += f"; the policy's budget is epsilon {told['budget']:g} at delta {told['budget_delta']:g}"
    console.print(say, soft_wrap=True, highlight=False)
    if told["epsilon"]:
        choices = (
            f"if later terms were chosen by earlier results: epsilon {checks.rounded(told['epsilon_by_choices'], 4)}"
        )
        console.print(f"{choices}, by the Renyi order {told['order']:g} alone", soft_wrap=True, highlight=False)
    changes = f", changed {len(told['data']) - 1} times" if len(told["data"]) > 1 else ""
    data = f"data {told['data'][-1][:SHORT]}{changes}; " if told["data"] else ""
    console.print(f"{data}{told['lines']} lines{_waiting(told['waiting'])}", style="dim", soft_wrap=True)


def _waiting(uploads: int) -> str:
    """What is said of uploads that lie in the outbox and are not charged."""
    return f"; {uploads} more not charged yet: the worker does so when it starts" if uploads else ""


def _finite(value: Any) -> Any:
    """The value as JSON can hold it: null where there is no finite number."""
    if isinstance(value, dict):
        return {name: _finite(entry) for name, entry in value.items()}
    if isinstance(value, list):
        return [_finite(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
