"""What a data set holds, as tables for people."""

import math
from typing import Any

from rich.table import Table

from noisegate.cli.terminal import Console

MOST_ROWS, MOST_CLASSES = 40, 8
"""Rows of a table that are shown, and classes that have a column each."""


def show_description(found: dict[str, Any]) -> None:
    """Print what `noisegate.data.describe` found."""
    console = Console()
    table = Table(box=None, pad_edge=False, show_header=False)
    for row in _facts(found):
        table.add_row(*row)
    console.print(table)
    console.print()
    console.print(_classes(found))
    if found["workers"]:
        console.print()
        console.print(_workers(found))
    for note in found["notes"]:
        console.print(f"note: {note}", soft_wrap=True, highlight=False)
    for hint in found["warnings"]:
        console.print(f"warning: {hint}", soft_wrap=True, highlight=False)


def _facts(found: dict[str, Any]) -> list[tuple[str, str]]:
    shape, workers = found["shape"], found["workers"]
    size = f"{math.prod(shape)} features" if len(shape) == 1 else f"shape {' x '.join(map(str, shape))}"
    names = ": " + ", ".join(found["features"][:12]) if found["features"] else ""
    names += f" and {len(found['features']) - 12} more" if len(found["features"]) > 12 else ""
    low, high = found["range"]
    facts = [
        ("data set", found["name"]),
        ("examples", f"{found['train']:,} to train on, {found['test']:,} to test on"),
        ("an example", size + names),
        ("range", f"{low:.4g} to {high:.4g}"),
        ("classes", f"{len(found['classes'])}"),
    ]
    if not workers:
        return [*facts, ("workers", "the data do not say; a run deals the examples out")]
    sizes = sorted(worker["train"] for worker in workers)
    middle = sizes[len(sizes) // 2]
    return [
        *facts,
        ("workers", f"{len(workers)}, with {sizes[0]:,} to {sizes[-1]:,} training examples, median {middle:,}"),
    ]


def _classes(found: dict[str, Any]) -> Table:
    table = Table("class", "name", "train", "share", "test", box=None, pad_edge=False)
    for number, entry in enumerate(found["classes"][:MOST_ROWS]):
        table.add_row(
            *(str(number), entry["name"], f"{entry['train']:,}"),
            *(f"{entry['train'] / found['train']:.1%}", f"{entry['test']:,}"),
        )
    if (more := len(found["classes"]) - MOST_ROWS) > 0:
        table.add_row("...", f"{more} more")
    return table


def _workers(found: dict[str, Any]) -> Table:
    """A row for each worker. Of many classes only how many of them it has, and which one most."""
    names = [entry["name"] for entry in found["classes"]]
    few = len(names) <= MOST_CLASSES
    table = Table("worker", "train", "test", *(names if few else ("classes", "most of")), box=None, pad_edge=False)
    for worker in found["workers"][:MOST_ROWS]:
        mix, size = worker["classes"], worker["train"]
        shares = [f"{count / size:.1%}" for count in mix]
        most = mix.index(max(mix))
        has = [f"{sum(count > 0 for count in mix)} of {len(mix)}", f"{names[most]} ({shares[most]})"]
        test = "-" if worker["test"] is None else f"{worker['test']:,}"
        table.add_row(worker["name"], f"{size:,}", test, *(shares if few else has))
    if (more := len(found["workers"]) - MOST_ROWS) > 0:
        table.add_row("...", f"{more} more; --json has all")
    return table
