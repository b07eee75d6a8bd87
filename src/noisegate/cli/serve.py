"""`noisegate serve`: the server of a federation, until its run is over."""

import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import typer

from noisegate.cli.bar import bar_of_rounds
from noisegate.cli.terminal import Console
from noisegate.compute import SMALL
from noisegate.deploy.layout import server_folder
from noisegate.federation.roster import Roster
from noisegate.federation.server import Server

TOLD = ("gather", "paused", "joined", "left", "gone", "ended early", "roster not believed")
"""Events of the operators' log that are also shown."""


def serve_command(folder: Path) -> None:
    """Run a federation: wait for workers, send models, judge uploads. Started again, it goes on where it was."""
    folder, console = server_folder(folder), Console(stderr=True)
    server = Server.of(folder)
    if server.model.d * len(Roster.read(folder / "roster.toml").keys) < SMALL:
        torch.set_num_threads(1)  # for so few numbers, more threads only slow a round down
    rounds, where = server.terms.rounds, folder / "state"
    said = f"serve: {server.settings.listen}, {rounds} rounds, {server.model.d} parameters, state in {where}"
    console.print(said, soft_wrap=True, highlight=False)
    with bar_of_rounds(console, "serve") as bar:
        bar.update(total=rounds, status="waiting for workers")

        def watch(line: dict[str, Any]) -> None:
            status = f"round {line['round'] + 1} of {rounds}, {describe(line)}"
            bar.update(completed=line["round"] + 1, status=status)
            if "accuracy" in line:
                console.print(f"serve: {status}", soft_wrap=True, highlight=False)

        def hear(line: Mapping[str, Any]) -> None:
            if line["event"] in TOLD:
                who = " ".join(str(line[key]) for key in ("worker", "why") if line.get(key))
                console.print(f"serve: {line['event']}{': ' if who else ''}{who}", soft_wrap=True, highlight=False)

        server.watch, server.hear = watch, hear
        result = server.serve()
    if result is None:
        console.print(f"interrupted: state saved in {where}; go on with the same command", soft_wrap=True)
        raise typer.Exit(130 if server.signal == signal.SIGINT else 0)
    accuracy = "" if result["accuracy"] is None else f", accuracy {result['accuracy']:.3f}"
    why = f" ({result['why']})" if result["why"] else ""
    console.print(f"serve: done{why}, {result['judged']} rounds judged{accuracy}, {where}", soft_wrap=True)


def describe(line: dict[str, Any]) -> str:
    """A judged round in a few words."""
    fates = [entry["status"] for entry in line["workers"].values()]
    counts = [f"{fates.count(word)} {word}" for word in dict.fromkeys(sorted(fates))]
    accuracy = [f"accuracy {line['accuracy']:.3f}"] if "accuracy" in line else []
    return ", ".join((*accuracy, *counts))
