"""A hostile worker for trials: `python -m noisegate.deploy.attacker DIR NAME`.

It keeps its place in the federation as any worker does, with certificate, key and ledger, and makes its uploads by the
attack of the trial's spec. Each process plays one worker: it knows its own examples and what the server sends to all,
and no other upload of the round.
"""

import asyncio
import os
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from noisegate.checks import plain
from noisegate.deploy.trial import LocalTrial, check_trial
from noisegate.entropy import Secret
from noisegate.errors import NoisegateError, SpecError
from noisegate.federation.participation import Holder, Maker
from noisegate.federation.settings import ServerSettings
from noisegate.federation.worker import Worker
from noisegate.federation.worker_folder import WorkerFolder
from noisegate.protocol import Mechanism, upload_of_one
from noisegate.protocol.intake import as_rows
from noisegate.roles import Attack, check_classes
from noisegate.views import AdversaryView, DataView, Verdict, checked_examples
from noisegate.workers import mean_gradient

MOST_KNOWN = 256
"""Most examples by which an attacker estimates the gradient."""


class HostileMaker:
    """Makes uploads by an attack. rounds: of the run, by which the attack knows how far it is."""

    def __init__(self, holder: Holder, attack: Attack, classes: int, rounds: int) -> None:
        check_classes(attack, classes)
        self.holder, self.attack, self.classes, self.rounds = holder, attack, classes, rounds
        self.secret = Secret(holder.model.initial().device)

    def __call__(self, mechanism: Mechanism, round: int, params: Tensor, last: Tensor | None) -> Tensor:
        """(d,) what the attack sends."""
        phase = self.attack.phase(min(1.0, round / self.rounds))
        data_view = DataView(self.classes, phase, _generator)
        x, y = (each.clone() for each in self.holder.examples)
        x, y = checked_examples(*self.attack.poison(x, y, data_view), len(y), self.classes)
        own: Tensor | None = None
        if self.attack.needs_own(phase):
            sign = -1.0 if self.attack.ascends(phase) else 1.0
            self.secret.begin(round)
            before = None if last is None else sign * last
            own = sign * upload_of_one(mechanism, params, x, y, before, self.secret.source)
        forged = self.attack.forge(self._view(mechanism, params, own, phase))
        if forged is None and own is not None:
            return own
        return as_rows(forged, 1, len(params), like=params)[0]

    def _view(self, mechanism: Mechanism, params: Tensor, own: Tensor | None, phase: object) -> AdversaryView:
        x, y = (each[:MOST_KNOWN] for each in self.holder.examples)

        def gradient(normalized: bool) -> Tensor:
            return mean_gradient(mechanism.sums, params, x, y, normalized)

        return AdversaryView(
            workers=1,
            see_honest=_nothing,
            see_own=lambda: torch.zeros_like(params)[None] if own is None else own[None].clone(),
            params=params.clone(),
            noise_std=mechanism.noise_std,
            phase=phase,
            stream=_generator,
            judge=_no_verdict,
            see_gradient=gradient,
            knows=self.attack.knows,
        )


def _generator() -> torch.Generator:
    """Fresh randomness of the operating system: the attack need not be repeated."""
    return torch.Generator().manual_seed(int.from_bytes(os.urandom(8), "little") >> 1)


def _nothing() -> Tensor:
    raise SpecError("attack: asks for honest uploads, which nobody sees in a federation")


def _no_verdict(uploads: Tensor) -> Verdict:
    raise SpecError("attack: asks for the server's verdict, which nobody is told in a federation")


def hostile_worker(trial: LocalTrial, name: str) -> tuple[Worker, WorkerFolder]:
    """The worker of that name, whose uploads are made by the trial's attack, and its folder."""
    check_trial(trial.spec)
    if name not in trial.hostile:
        raise SpecError(f"{plain(name)}: is not one of the hostile workers of {plain(trial.folder)}")
    place = WorkerFolder.read(trial.worker(name))
    attack, rounds = trial.spec.build_attack(), ServerSettings.read(trial.server / "federation.toml").rounds
    examples = place.examples()
    make: Callable[[Holder], Maker] = lambda holder: HostileMaker(holder, attack, place.classes, rounds)  # noqa: E731
    return Worker(place.module(examples[0]), examples, place.policy(), make=make), place


def main(folder: Path, name: str) -> int:
    """Play the worker until the run is over. The exit status is 2 if it cannot."""
    torch.set_num_threads(1)
    try:
        worker, place = hostile_worker(LocalTrial.read(folder), name)
        outcome = asyncio.run(worker.take_part(place, tell))
    except NoisegateError as error:
        print(f"noisegate: {plain(error)}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    print(f"{name}: {outcome.ended}, {outcome.rounds} rounds", flush=True)
    return 0


def tell(event: str, /, **about: object) -> None:
    """Print what happens."""
    print(f"{event}: {plain(about)}", flush=True)


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit("usage: python -m noisegate.deploy.attacker DIR NAME")
    sys.exit(main(Path(sys.argv[1]), sys.argv[2]))
