"""An attack of your own against three aggregators.

    python examples/own_attack.py

The attack sends noise, which looks as an honest upload must, with its values in the order of a direction: that of the
honest workers at first, to earn a standing, and the opposite after a share of the run.
"""

from dataclasses import dataclass

import torch

import noisegate
from noisegate import Compute, Fortified, Mean, Spec, TwoStage
from noisegate.attacks.honest import Forger
from noisegate.views import AdversaryView


@dataclass(frozen=True)
class Ordered(Forger):
    """Send noise whose values stand in the order of a direction: with honest workers at first, then against them."""

    turn: float = 0.9

    def phase(self, progress: float) -> str:
        """All that the attack learns of the time."""
        return "earn" if progress < self.turn else "harm"

    def forge(self, view: AdversaryView) -> torch.Tensor:
        """(M, d) what its workers send: one row each."""
        honest = view.honest.mean(0)
        order = (honest if view.phase == "earn" else -honest).argsort()
        noise = torch.empty(view.workers, len(honest)).normal_(0, view.noise_std, generator=view.rng)
        forged = torch.empty_like(noise)
        forged[:, order] = noise.sort(dim=1).values
        return forged


if __name__ == "__main__":
    for aggregator in (Mean(), TwoStage(), Fortified()):
        spec = Spec(byzantine=0.6, attack=Ordered(), aggregator=aggregator)
        result = noisegate.run(spec, compute=Compute(device="cpu", threads=1))
        print(
            f"{type(aggregator).__name__:9}  accuracy {result.accuracy:.3f}, "
            f"{result.byzantine_weight:.0%} of the weight is Byzantine"
        )
