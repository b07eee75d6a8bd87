"""`noisegate run`: one run, and the two that put its accuracy into proportion."""

import json
from pathlib import Path
from typing import Any

import typer

from noisegate.cli.bar import bar_of_rounds
from noisegate.cli.records import RunFlags
from noisegate.cli.table import show_result
from noisegate.cli.terminal import Console
from noisegate.compute import Compute
from noisegate.features import TELL
from noisegate.runs import Result, Spec, costs, imbalance, noiseless, reference, run, undefended
from noisegate.runs.fallback import told
from noisegate.simulate import Progress


def run_command(flags: RunFlags) -> None:
    """Run, and show what came of it."""
    compute = Compute(device=flags.device, threads=flags.threads, memory=flags.memory)
    spec = flags.spec()
    out = flags.out or Path("runs") / spec.name()
    console = Console(stderr=True, quiet=flags.as_json)
    compare = flags.baselines if flags.baselines is not None else not flags.as_json

    unprotected = noiseless(spec) if flags.price else None  # refused now, and not after the first run
    count = 1 + 2 * compare + flags.price

    def train(one: Spec, folder: Path, title: str) -> Result:
        return _watched(one, compute, folder, flags.resume, console, title)

    try:
        result = train(spec, out, f"run 1 of {count}" if count > 1 else "run")
        trained, proportion = [result], dict[str, Any]()
        if compare:
            clean = train(reference(spec), out / "reference", "reference")
            averaged = train(undefended(spec), out / "undefended", "undefended")
            trained += [clean, averaged]
            proportion = {**_beside("reference", clean), **_beside("undefended", averaged)}
        if unprotected:
            trained.append(train(unprotected, out / "noiseless", "without noise"))
            proportion |= _beside("noiseless", trained[-1])
    except KeyboardInterrupt:
        begun = (out / "checkpoint.safetensors").exists() or (out / "result.json").exists()
        saved = f"state saved in {out}; go on with the same command and --resume" if begun else "nothing was begun yet"
        Console(stderr=True).print(f"interrupted: {saved}", soft_wrap=True)
        raise typer.Exit(130) from None
    cost = costs.bills(costs.training_of(one.as_dict()) for one in trained)
    if flags.as_json:
        print(json.dumps({**result.as_dict(), **proportion, **costs.as_json(cost), "out": str(out)}, indent=2))
    else:
        show_result(result, proportion, cost[0], out)
        if fallen := told(result.aggregator, result.fallback, result.rounds - result.rounds_lost):
            console.print(fallen, soft_wrap=True, highlight=False)
    if misleading := imbalance.told(result.as_dict()):
        Console(stderr=True).print(f"warning: {misleading}", soft_wrap=True, highlight=False)


def _beside(word: str, result: Result) -> dict[str, Any]:
    """What a run is compared with, by name. Without a trigger there is no attack_success, and an AUC of two classes."""
    names = ("accuracy", "balanced_accuracy", "auc", "recall", "attack_success", "metrics", "worker_accuracy")
    return {f"{word}_{name}": value for name in names if (value := getattr(result, name)) is not None}


def _watched(spec: Spec, compute: Compute, out: Path, resume: bool, console: Console, title: str) -> Result:
    """Run, and tell how far the run is."""
    with bar_of_rounds(console, title) as bar:

        def watch(progress: Progress, rounds: int) -> None:
            accuracy = f", accuracy {progress.curve[-1]['accuracy']:.3f}" if progress.curve else ""
            status = f"round {progress.rounds} of {rounds}{accuracy}"
            bar.tell(status, total=rounds, completed=progress.rounds, status=status)

        def embedded(examples: int, of: int) -> None:
            status = f"features of {examples:,} of {of:,} examples"
            bar.tell(status, total=of, completed=examples, status=status)

        held = TELL.set(embedded)
        try:
            return run(spec, compute=compute, out=out, resume=resume, watch=watch)
        finally:
            TELL.reset(held)
