"""`noisegate audit`: an adversary that tries to refute the privacy claim of a configuration."""

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from noisegate.cli.privacy import read_delta
from noisegate.cli.run import SILENCE, gather
from noisegate.cli.terminal import Console
from noisegate.compute import Compute
from noisegate.runs.spec import Spec

if TYPE_CHECKING:  # it needs scipy's distributions, which take half a second to import
    from noisegate.audit import Audit


def audit_command(
    spec_file: Annotated[
        Path | None, typer.Argument(metavar="SPEC.toml", help="Settings; flags override them.")
    ] = None,
    dataset: Annotated[str | None, typer.Option(help="A name of `noisegate list datasets`, or a file.npz.")] = None,
    model: Annotated[str | None, typer.Option(help="A name of `noisegate list models`.")] = None,
    epsilon: Annotated[float | None, typer.Option(help="Budget of every worker over the whole run. [2]")] = None,
    delta: Annotated[str | None, typer.Option(help="A number, or paper: declared to the power -1.1.")] = None,
    sigma: Annotated[float | None, typer.Option(help="Noise multiplier, instead of epsilon or beside it.")] = None,
    accountant: Annotated[str | None, typer.Option(help="pld or rdp. [pld]")] = None,
    sampling: Annotated[str | None, typer.Option(help="poisson or fixed. [poisson]")] = None,
    batch: Annotated[int | None, typer.Option(help="Examples per worker and round. [16]")] = None,
    workers: Annotated[int | None, typer.Option(help="Honest workers.")] = None,
    worker: Annotated[str | None, typer.Option(help="A name of `noisegate list workers`. [normalized]")] = None,
    rounds: Annotated[int | None, typer.Option(help="Rounds of training.")] = None,
    declared: Annotated[int | None, typer.Option(help="Examples that every worker declares.")] = None,
    secret: Annotated[bool | None, typer.Option("--secret", help="Audit noise that nobody can draw again.")] = None,
    seed: Annotated[int | None, typer.Option(help="Everything random follows from it. [1]")] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="PART.KEY=VALUE", help="A setting of the attack, aggregator or worker."),
    ] = None,
    trials: Annotated[
        int | None, typer.Option(help="Workers that hold a canary or do not. [4000; fewer for a large model]")
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    threads: Annotated[int | None, typer.Option(help="CPU threads.")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for audit.json and audit.html, a plot.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
) -> None:
    """Try to refute the privacy claim. Exit status 1: refuted. An attack that fails proves nothing."""
    given = {
        "dataset": dataset,
        "model": model,
        "epsilon": epsilon,
        "delta": read_delta(delta),
        "sigma": sigma,
        "accountant": accountant,
        "sampling": sampling,
        "batch": batch,
        "workers": workers,
        "worker": worker,
        "rounds": rounds,
        "declared": declared,
        "secret": secret,
        "seed": seed,
    }
    flags = {name: value for name, value in given.items() if value is not None}
    spec = gather(spec_file, flags, settings or [])
    console = Console(stderr=True, quiet=as_json)
    try:
        found = _watched(spec, Compute(device=device, threads=threads), trials, console)
    except KeyboardInterrupt:
        Console(stderr=True).print("interrupted: an audit keeps nothing; start it again", soft_wrap=True)
        raise typer.Exit(130) from None
    written = _write(found, out) if out is not None else ()
    if as_json:
        print(json.dumps(found.as_dict(), indent=2))
    else:
        show(found)
        for path in written:
            print(path)
    if found.refuted:
        raise typer.Exit(1)


def show(found: "Audit") -> None:
    """The findings in lines: what was claimed, what was tried, the verdict last."""
    claim = found.claim
    print(
        f"claimed: epsilon {claim.epsilon:.3f} at delta {claim.delta:.3g} for one example, {claim.sampling.relation}, "
        f"over {claim.rounds} rounds at rate {claim.rate:.4g} with noise {claim.sigma:.3f} ({claim.accountant.upper()})"
    )
    for check in found.checks:
        print(f"{'REFUTED' if check.refuted else 'passed':8} {check.name}: {check.found}")
    for title, whole in (("trials", found.whole), ("trials with noise times 0.8", found.power)):
        print(
            f"{whole.trials} {title}: AUC {whole.auc:.4f} (claim allows {whole.claimed_auc:.4f}), "
            f"right {whole.right:.4f} ({whole.allowed:.4f}), mu {whole.mu:.3f}, 95 % "
            f"{whole.mu_low:.3f} to {whole.mu_high:.3f} ({whole.claimed_mu:.3f})"
        )
        for bound in whole.bounds:
            print(
                f"  at delta {bound.delta:.3g} epsilon is at least {bound.measured:.3f} (if Gaussian "
                f"{bound.gaussian:.3f}, one-run {bound.one_run:.3f}), claimed at most {bound.claimed:.3f}"
            )
        for check in whole.checks:
            if check.refuted:
                print(f"  REFUTED {check.name}: {check.found}")
    for note in found.notes:
        print(f"note: {note}")
    print(found.verdict)


def _watched(spec: Spec, compute: Compute, trials: int | None, console: Console) -> "Audit":
    """Audit with a progress bar on a terminal, and otherwise with a line now and then."""
    from noisegate.audit import audit

    bar = Progress(
        TextColumn("audit"),
        BarColumn(),
        TextColumn("{task.fields[status]}"),
        TimeRemainingColumn(),
        console=console,
        transient=True,
    )
    task = bar.add_task("audit", total=None, status="reading data, calibrating noise")
    spoke, before = time.monotonic(), ""

    def watch(what: str, done: int, total: int) -> None:
        nonlocal spoke, before
        if what != before:
            before = what
            bar.reset(task, total=total, status=what)
        bar.update(task, total=total, completed=done, status=what)
        if not console.is_terminal and time.monotonic() - spoke > SILENCE:
            spoke = time.monotonic()
            console.print(f"audit: {what}, {done / total:.0%}", soft_wrap=True)

    if console.is_terminal:
        bar.start()
    try:
        return audit(spec, trials=trials, compute=compute, watch=watch)
    finally:
        if bar.live.is_started:
            bar.stop()


def _write(found: "Audit", out: Path) -> tuple[Path, ...]:
    from noisegate.audit import write_audit

    return write_audit(found, out)
