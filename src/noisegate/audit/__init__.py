"""An adversary for any configuration: it tries to refute the privacy claim of a run. See docs/audit.md."""

import json
import time
from collections.abc import Callable
from pathlib import Path

from torch import nn

from noisegate import checks
from noisegate.audit.canary import choose
from noisegate.audit.check import PARTS_LEVEL, TESTED, Check
from noisegate.audit.claim import Claim, claim_of
from noisegate.audit.clones import attack, company_of
from noisegate.audit.draws import try_sampling
from noisegate.audit.fuzz import try_bound
from noisegate.audit.grid import enough, grid_attack, try_grid
from noisegate.audit.noise import try_noise
from noisegate.audit.plot import page
from noisegate.audit.record import INCONCLUSIVE, NOT_REFUTED, REFUTED, WEAKER, Audit, decide
from noisegate.audit.signs import attack_signs
from noisegate.audit.whole import Whole, measure
from noisegate.compute import Compute
from noisegate.data import Dataset
from noisegate.errors import StoreError
from noisegate.files import write_whole
from noisegate.runs.setup import Setup, prepare
from noisegate.runs.spec import Spec
from noisegate.vectors import Loss, cross_entropy

TRIALS = 4000
WORK = 2**35
"""Floats that the trials may upload, unless their number is given: some minutes on a CPU."""

Watch = Callable[[str, int, int], None]
"""Called with what is being tried, how much of it is done, and how much there is."""

__all__ = ["INCONCLUSIVE", "NOT_REFUTED", "REFUTED", "TRIALS", "Audit", "audit", "grid_attack", "write_audit"]


def audit(
    spec: Spec | None = None,
    *,
    dataset: Dataset | None = None,
    model: nn.Module | None = None,
    loss: Loss = cross_entropy,
    trials: int | None = None,
    compute: Compute | None = None,
    watch: Watch | None = None,
) -> Audit:
    """Try to refute what a run with `spec` claims about each example of a worker.

    dataset, model, loss: your own, as `run` takes them. trials: 4,000, or what a large model leaves time for.
    """
    began = time.perf_counter()
    spec, compute, watch = spec or Spec(), compute or Compute(), watch or _nobody
    if trials is not None:
        checks.count(trials=trials)
    with compute.exact(), compute.threads_for(floats=0):
        setup = prepare(spec, compute, dataset, model, loss)
        claim, secret = claim_of(setup), spec.secret
        parts, std, notes = _parts(setup, claim, secret, watch)
        count = trials or _affordable(setup, claim)
        if not trials and count < TRIALS:
            notes.append(f"{count} trials instead of {TRIALS}: the model is large; give trials to have more")
        if claim.signs:
            notes.append("trials with a model that the server chose, under which the canary turns every sign")
        whole, power, strength = _whole(setup, claim, count, std, watch)
    verdict = decide([*parts, *whole.checks], power)
    if verdict == INCONCLUSIVE:
        notes.append(f"noise times {WEAKER} would not have been refuted: give more trials")
    return Audit(
        verdict,
        setup.dataset,
        setup.model,
        setup.federation.mechanism.model.d,
        claim,
        secret,
        tuple(parts),
        whole,
        power,
        strength,
        tuple(notes),
        spec.canonical(),
        time.perf_counter() - began,
    )


def _parts(setup: Setup, claim: Claim, secret: bool, watch: Watch) -> tuple[list[Check], float, list[str]]:
    """(checks, the noise that was found, notes)."""
    run, notes = setup.federation, []
    watch("bound", 0, 4)
    parts = try_bound(setup)
    watch("noise", 1, 4)
    found, std = try_noise(setup, claim)
    parts += found
    watch("sampling", 2, 4)
    parts += try_sampling(setup, claim)
    watch("grid", 3, 4)
    if run.workers.x.is_cuda:
        notes.append("the grid attack was not tried: it knows torch's generator on a CPU only")
    elif run.mechanism.worker.mechanism == "gaussian" and run.mechanism.worker.noisy:
        grid = try_grid(setup, claim, enough(claim))
        beaten = grid.beats(claim.sigma, PARTS_LEVEL / TESTED)
        told = (
            f"by the last bits of one upload {grid.told_drawn} of {grid.drawn} drawn examples were found, and "
            f"{grid.told_wrong} of {grid.not_drawn} others accused"
        )
        parts.append(Check("noise: grid attack", told, beaten and secret))
        if beaten and not secret:
            notes.append("research noise: not to be published; its last bits give examples away (use --secret)")
    return parts, std, notes


def _whole(setup: Setup, claim: Claim, trials: int, std: float, watch: Watch) -> tuple[Whole, Whole, float | None]:
    """(what the trials found, the same with less noise, the canary's strength). std: the noise that was found."""
    canary = None if claim.signs else choose(setup, claim, company_of(setup, claim), std)
    found = []
    for name, factor in (("trials", 1.0), (f"noise times {WEAKER}", WEAKER)):
        done, total = 0, trials * claim.rounds

        def told(clones: int, name: str = name, total: int = total) -> None:
            nonlocal done
            done += clones
            watch(name, done, total)

        if canary is None:
            held, losses = attack_signs(setup, claim, trials, factor, told)
        else:
            held, losses = attack(setup, claim, canary, trials, factor, told)
        found.append(measure(held.numpy(), losses.numpy(), claim))
    return found[0], found[1], canary.strength if canary else None


def _affordable(setup: Setup, claim: Claim) -> int:
    return max(64, min(TRIALS, WORK // (2 * claim.rounds * setup.federation.mechanism.model.d)))


def _nobody(what: str, done: int, total: int) -> None:
    """Watches nothing."""


def write_audit(found: Audit, out: Path) -> tuple[Path, Path]:
    """Leave audit.json and audit.html in the folder `out`: each is whole once it exists."""
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StoreError(f"{out}: cannot be written ({error.strerror}); choose another --out") from None
    html, record = out / "audit.html", out / "audit.json"
    write_whole(html, page(found).encode())
    write_whole(record, (json.dumps(found.as_dict(), indent=2) + "\n").encode())
    return html, record
