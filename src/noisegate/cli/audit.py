"""`noisegate audit`: an adversary that tries to refute the privacy claim of a configuration."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from noisegate.cli.bar import bar_of_rounds
from noisegate.cli.flags import AsJson, Device, SpecFlags, Threads, takes
from noisegate.cli.terminal import Console
from noisegate.compute import Compute
from noisegate.runs.spec import Spec

if TYPE_CHECKING:  # it needs scipy's distributions, which take half a second to import
    from noisegate.audit import Audit


@dataclass(frozen=True)
class AuditFlags(SpecFlags):
    """The flags of `noisegate audit`. It takes no others of `SpecFlags` than those in `AUDITED`."""

    secret: Annotated[bool | None, typer.Option("--secret", help="Audit noise that nobody can draw again.")] = None
    trials: Annotated[
        int | None, typer.Option(help="Workers that hold a canary or do not. [4000; fewer for a large model]")
    ] = None
    device: Device = "auto"
    threads: Threads = None
    out: Annotated[Path | None, typer.Option(help="Folder for audit.json and audit.html, a plot.")] = None
    as_json: AsJson = False


AUDITED = (
    *(
        "spec_file",
        "dataset",
        "model",
        "loss",
        "epsilon",
        "delta",
        "sigma",
        "accountant",
        "sampling",
        "batch",
        "workers",
    ),
    *("worker", "rounds", "declared", "secret", "seed", "settings"),
)
"""The flags of a spec that a privacy claim depends on, in the order of the help."""


@takes(AuditFlags, names=(*AUDITED, "trials", "device", "threads", "out", "as_json"))
def audit_command(flags: AuditFlags) -> None:
    """Try to refute the privacy claim. Exit status 1: refuted. An attack that fails proves nothing."""
    spec = flags.spec()
    console = Console(stderr=True, quiet=flags.as_json)
    try:
        found = _watched(spec, Compute(device=flags.device, threads=flags.threads), flags.trials, console)
    except KeyboardInterrupt:
        Console(stderr=True).print("interrupted: an audit keeps nothing; start it again", soft_wrap=True)
        raise typer.Exit(130) from None
    written = _write(found, flags.out) if flags.out is not None else ()
    if flags.as_json:
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
    """Audit, and tell how far the audit is."""
    from noisegate.audit import audit

    before = ""
    with bar_of_rounds(console, "audit") as bar:

        def watch(what: str, done: int, total: int) -> None:
            nonlocal before
            if what != before:
                before = what
                bar.drawn.reset(bar.task, total=total, status=what)
            bar.tell(f"{what}, {done / total:.0%}", total=total, completed=done, status=what)

        return audit(spec, trials=trials, compute=compute, watch=watch)


def _write(found: "Audit", out: Path) -> tuple[Path, ...]:
    from noisegate.audit import write_audit

    return write_audit(found, out)
