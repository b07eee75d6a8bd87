"""`noisegate audit`: an adversary that tries to refute the privacy claim of a configuration."""

import json

import typer

from noisegate.audit import Audit, audit, write_audit
from noisegate.checks import rounded
from noisegate.cli.bar import bar_of_rounds
from noisegate.cli.records import AuditFlags
from noisegate.cli.terminal import Console
from noisegate.compute import Compute
from noisegate.runs.spec import Spec


def audit_command(flags: AuditFlags) -> None:
    """Audit, and show what was found."""
    spec = flags.spec()
    console = Console(stderr=True, quiet=flags.as_json)
    try:
        found = _watched(spec, Compute(device=flags.device, threads=flags.threads), flags.trials, console)
    except KeyboardInterrupt:
        Console(stderr=True).print("interrupted: an audit keeps nothing; start it again", soft_wrap=True)
        raise typer.Exit(130) from None
    written = write_audit(found, flags.out) if flags.out is not None else ()
    if flags.as_json:
        print(json.dumps(found.as_dict(), indent=2))
    else:
        show(found)
        for path in written:
            print(path)
    if found.refuted:
        raise typer.Exit(1)


def show(found: Audit) -> None:
    """The findings in lines: what was claimed, what was tried, the verdict last."""
    claim = found.claim
    print(
        f"claimed: epsilon {rounded(claim.epsilon, 3)} at delta {claim.delta:.3g} for one example, "
        f"{claim.sampling.relation}, over {claim.rounds} rounds at rate {claim.rate:.4g} "
        f"with noise {claim.sigma:.3f} ({claim.accountant.upper()})"
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


def _watched(spec: Spec, compute: Compute, trials: int | None, console: Console) -> Audit:
    """Audit, and tell how far the audit is."""
    before = ""
    with bar_of_rounds(console, "audit") as bar:

        def watch(what: str, done: int, total: int) -> None:
            nonlocal before
            if what != before:
                before = what
                bar.drawn.reset(bar.task, total=total, status=what)
            bar.tell(f"{what}, {done / total:.0%}", total=total, completed=done, status=what)

        return audit(spec, trials=trials, compute=compute, watch=watch)
