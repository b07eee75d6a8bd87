"""`noisegate run`: one run, and the two that put its accuracy into proportion."""

import json
import time
import tomllib
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from noisegate.cli.privacy import read_delta
from noisegate.cli.table import show_result
from noisegate.cli.terminal import Console
from noisegate.compute import Compute
from noisegate.errors import SpecError
from noisegate.runs import Result, Spec, costs, make_spec, read_settings, reference, run, undefended
from noisegate.runs.spec import BEST, PARTS, partner_of
from noisegate.simulate import Progress as RunProgress

SILENCE = 15.0
"""Seconds without a word where there is no terminal to draw a bar on."""


def run_command(
    spec_file: Annotated[
        Path | None, typer.Argument(metavar="SPEC.toml", help="Settings; flags override them.")
    ] = None,
    dataset: Annotated[str | None, typer.Option(help="A name of `noisegate list datasets`, or a file.npz.")] = None,
    model: Annotated[str | None, typer.Option(help="A name of `noisegate list models`.")] = None,
    epsilon: Annotated[float | None, typer.Option(help="Budget of every worker over the whole run. [2]")] = None,
    delta: Annotated[
        str | None,
        typer.Option(help="A number, or paper: declared to the power -1.1. [1e-5, or 1 / (10 declared) if less]"),
    ] = None,
    sigma: Annotated[
        float | None, typer.Option(help="Noise multiplier, instead of epsilon or beside it; 0 is no privacy.")
    ] = None,
    accountant: Annotated[str | None, typer.Option(help="pld or rdp. [pld]")] = None,
    sampling: Annotated[str | None, typer.Option(help="poisson or fixed. [poisson]")] = None,
    declared: Annotated[
        int | None,
        typer.Option(help="Examples that every worker declares: its rate is batch / declared. [their mean]"),
    ] = None,
    secret: Annotated[
        bool | None,
        typer.Option("--secret", help="Noise that nobody can draw again, so that the model can be given away."),
    ] = None,
    batch: Annotated[int | None, typer.Option(help="Examples per worker and round. [16]")] = None,
    rate: Annotated[float | None, typer.Option(help="Base learning rate, scaled to the noise. [0.2]")] = None,
    workers: Annotated[int | None, typer.Option(help="Honest workers.")] = None,
    byzantine: Annotated[float | None, typer.Option(help="Byzantine share of all workers. [0.6]")] = None,
    attack: Annotated[str | None, typer.Option(help="A name of `noisegate list attacks`. [label-flip]")] = None,
    attack_start: Annotated[float | None, typer.Option(help="Share of the run before the attack begins. [0]")] = None,
    attack_asleep: Annotated[str | None, typer.Option(help="Until then: behave or copy. [behave]")] = None,
    aggregator: Annotated[
        str | None,
        typer.Option(help="A name of `noisegate list aggregators`. [fortified]"),
    ] = None,
    worker: Annotated[
        str | None,
        typer.Option(help="A name of `noisegate list workers`. [normalized, or what the aggregator goes with]"),
    ] = None,
    gamma: Annotated[float | None, typer.Option(help="Share the server believes honest. [the true one]")] = None,
    rounds: Annotated[int | None, typer.Option(help="Rounds of training.")] = None,
    non_iid: Annotated[bool | None, typer.Option("--non-iid/--iid", help="The paper's uneven partition.")] = None,
    dirichlet: Annotated[
        float | None, typer.Option(help="Uneven partition by Dirichlet of this concentration.")
    ] = None,
    auxiliary: Annotated[int | None, typer.Option(help="Examples per class that the server has. [2]")] = None,
    auxiliary_from: Annotated[str | None, typer.Option(help="The data set that these are from. [the workers']")] = None,
    seed: Annotated[int | None, typer.Option(help="Everything random follows from it. [1]")] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="PART.KEY=VALUE", help="A setting of the attack, aggregator or worker."),
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    threads: Annotated[int | None, typer.Option(help="CPU threads.")] = None,
    memory: Annotated[
        int | None, typer.Option(help="MiB beside the uploads of two rounds. [1024; 8192 on CUDA]")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Run folder. [runs/NAME]")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on where an interrupted run stopped.")] = False,
    baselines: Annotated[
        bool | None,
        typer.Option(help="Also run without attack and without defense. [yes, but not with --json]"),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the result as one JSON object and nothing else.")
    ] = False,
) -> None:
    """Train privately under attack. Without settings: digits, 10 honest workers, 60 % label flippers, epsilon 2."""
    flags = {
        name: value
        for name, value in {
            "dataset": dataset,
            "model": model,
            "epsilon": epsilon,
            "delta": read_delta(delta),
            "sigma": sigma,
            "accountant": accountant,
            "sampling": sampling,
            "declared": declared,
            "secret": secret,
            "batch": batch,
            "rate": rate,
            "workers": workers,
            "byzantine": byzantine,
            "attack": attack,
            "attack_start": attack_start,
            "attack_asleep": attack_asleep,
            "aggregator": aggregator,
            "worker": worker,
            "gamma": gamma,
            "rounds": rounds,
            "non_iid": non_iid,
            "dirichlet": dirichlet,
            "auxiliary": auxiliary,
            "auxiliary_from": auxiliary_from,
            "seed": seed,
        }.items()
        if value is not None
    }
    compute = Compute(device=device, threads=threads, memory=memory)
    spec = gather(spec_file, flags, settings or [])
    out = out or Path("runs") / spec.name()
    console = Console(stderr=True, quiet=as_json)
    try:
        compare = baselines if baselines is not None else not as_json
        result = _watched(spec, compute, out, resume, console, "run 1 of 3" if compare else "run")
        if compare:
            clean = _watched(reference(spec), compute, out / "reference", resume, console, "reference")
            open_door = _watched(undefended(spec), compute, out / "undefended", resume, console, "undefended")
            proportion = {"reference_accuracy": clean.accuracy, "undefended_accuracy": open_door.accuracy}
            trained = [result, clean, open_door]
        else:
            proportion, trained = {}, [result]
    except KeyboardInterrupt:
        begun = (out / "checkpoint.safetensors").exists() or (out / "result.json").exists()
        saved = f"state saved in {out}; go on with the same command and --resume" if begun else "nothing was begun yet"
        Console(stderr=True).print(f"interrupted: {saved}", soft_wrap=True)
        raise typer.Exit(130) from None
    cost = costs.bills(costs.training_of(one.as_dict()) for one in trained)
    if as_json:
        print(json.dumps({**result.as_dict(), **proportion, **costs.as_json(cost), "out": str(out)}, indent=2))
    else:
        show_result(result, proportion, cost[0], out)


def gather(spec_file: Path | None, flags: dict[str, Any], settings: list[str]) -> Spec:
    """File, then flags, then --set; each overrides the one before."""
    gathered = read_settings(spec_file) if spec_file else {}
    gathered.update(flags)
    for entry in sorted(settings, key=lambda entry: entry.startswith("worker")):  # which may follow the aggregator
        target, equals, value = entry.partition("=")
        part, dot, key = target.partition(".")
        if not equals or not dot or part not in PARTS:
            raise SpecError(
                f"--set {entry}: must be PART.KEY=VALUE with PART one of {', '.join(PARTS)}; other settings have flags"
            )
        now = gathered.get(part, _default(part, gathered))
        if not isinstance(now, str | dict):
            raise SpecError(f"{part} = {now!r}: must be a name, or a table with name and settings")
        gathered[part] = {**({"name": now} if isinstance(now, str) else now), key: _value(value)}
    return make_spec(gathered, str(spec_file) if spec_file else "flags")


def _default(part: str, gathered: dict[str, Any]) -> Any:
    """A part that was not chosen: the worker is the one that the aggregator goes with."""
    return {**Spec().canonical(), **partner_of(gathered.get("aggregator", BEST))}[part]


def _value(text: str) -> Any:
    """A TOML value, or else a plain text; `auto`, as `noisegate list` has it, for the default."""
    if text == "auto":
        return None
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except RecursionError:
        raise SpecError("--set: a value is nested too deeply") from None
    except ValueError:  # not TOML, or a number that Python refuses to read
        return text


def _watched(spec: Spec, compute: Compute, out: Path, resume: bool, console: Console, title: str) -> Result:
    """Run with a progress bar on a terminal, and otherwise with a line now and then."""
    bar = Progress(
        TextColumn(f"{title:12}"),
        BarColumn(),
        TextColumn("{task.fields[status]}"),
        TimeRemainingColumn(),
        console=console,
        transient=True,
    )
    task = bar.add_task(title, total=None, status="reading data, calibrating noise")
    spoke = time.monotonic()

    def watch(progress: RunProgress, rounds: int) -> None:
        nonlocal spoke
        accuracy = f", accuracy {progress.curve[-1]['accuracy']:.3f}" if progress.curve else ""
        status = f"round {progress.rounds} of {rounds}{accuracy}"
        bar.update(task, total=rounds, completed=progress.rounds, status=status)
        if not console.is_terminal and time.monotonic() - spoke > SILENCE:
            spoke = time.monotonic()
            console.print(f"{title}: {status}", soft_wrap=True)

    if console.is_terminal:
        bar.start()
    try:
        return run(spec, compute=compute, out=out, resume=resume, watch=watch)
    finally:
        if bar.live.is_started:
            bar.stop()
