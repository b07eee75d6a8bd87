"""A filter built on what an honest upload is: a short signal plus fresh, independent noise of known scale."""

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from noisegate import checks
from noisegate.aggregators.fortified.copies import GROUP, find_copies, largest_product
from noisegate.aggregators.fortified.directions import Common, OwnProjections, Projections
from noisegate.aggregators.fortified.doubt import doubt_along
from noisegate.aggregators.fortified.evidence import SHIFTS
from noisegate.aggregators.fortified.first_tests import FirstTests
from noisegate.aggregators.fortified.labels import LabelDoubt, Loads
from noisegate.aggregators.fortified.mixture import ClassMeans, Mixture
from noisegate.aggregators.fortified.premise import Premise
from noisegate.aggregators.fortified.standing import WorkerStanding
from noisegate.aggregators.fortified.state import (
    PROBES,
    FortifiedState,
    unless_missing,
    update_speeds,
)
from noisegate.aggregators.fortified.trust import AGREEMENT_SPEED
from noisegate.aggregators.fortified.weights import Weights
from noisegate.aggregators.upload_lengths import honest_lengths, longest_lengths
from noisegate.errors import SpecError
from noisegate.roles import Aggregator
from noisegate.vectors import ones
from noisegate.views import ServerView, State, Verdict

TEST_COUNT = 4
"""The number of tests: length, distribution, evidence, copies. Each may refuse a fourth of the honest uploads that all
of them together may."""


@dataclass(frozen=True)
class Fortified(Aggregator):
    """Refuse what no honest worker would send, by tests that add up over the rounds; weigh the rest by earned trust.

    An honest upload is a signal of length at most about 1 plus noise that is fresh, independent of everything, and of
    known scale. Each of four tests refuses what cannot be that:

    * its length, with the exact bounds for any signal (`honest_lengths`);
    * the distribution of its coordinates (`ks_rejects`);
    * evidence over the rounds, from how far it lies along directions fixed before the round: the gradient of the
      server's examples, moving averages of past updates, and of the worker's own uploads (`directions`, `evidence`);
    * being a copy of another upload of the round (`copies`).

    Those that pass are averaged, each with its odds of being honest: the prior odds that the server believes in, times
    what agreement with the server's examples has earned it so far (`trust`), over the evidence against it, and over the
    doubt that is left (`doubt`). Trust is earned slowly, up to a limit, and never outweighs a test. Uploads that share
    more than honest ones can also share their weight. No number of workers to keep is needed, and a wrong belief about
    the share of honest ones is outweighed in time.

    A missing upload has no weight, and what is known of its worker stays as it was.

    refused: honest uploads wrongly refused, expected in 1,000. A fourth of it goes to each test.
    """

    refused: float = 1.0

    def __post_init__(self) -> None:
        checks.positive(refused=self.refused)
        if not 1e-3 <= self.refused <= 500:
            raise checks.refuse("refused", self.refused, "is out of 1,000, and must be from 0.001 to 500")

    @property
    def tests_noise(self) -> bool:
        """It takes uploads for Gaussian noise."""
        return True

    @property
    def follows_workers(self) -> bool:
        """It must know a worker again in the next round."""
        return True

    def __call__(self, view: ServerView, state: State) -> Verdict:
        chance = self.refused / 1000 / TEST_COUNT
        n, d = view.uploads.shape
        known = FortifiedState.of(state, view)
        contributions, false = _contributions(view, 1 + known.rounds % max(1, view.labels - 1))

        # 1. Test each upload alone: its length, and the distribution of its coordinates.
        made = view.noise_std, view.batch, view.largest
        shortest, longest = honest_lengths(d, *made, chance)
        lengths = longest if view.expected is None else longest_lengths(view.expected, d, *made, chance)
        first = FirstTests.of(view, shortest, lengths, chance)

        # 2. Project uploads and the server's examples on directions that were fixed before the round.
        classes, unit = ClassMeans.of(contributions, view.strata), longest / math.sqrt(d)
        common = Common.of(contributions, classes.means, known)
        own = OwnProjections.of(view, contributions, known, common, unit)
        mixture = Mixture.of(view, classes, own.along_means, known, first.passed)
        projections = Projections.of(view, (contributions, false), known, common, own, mixture)

        # 3. Add up over the rounds: the evidence against each worker, the trust in it, and how far off the server's
        # examples it lies where it cannot be refused for that.
        evidence_limit = math.log(2 * PROBES * len(SHIFTS) / chance)
        standing = WorkerStanding.of(view, known, projections, mixture, contributions, first.passed, evidence_limit)

        # 4. Where the server's examples turn out to be unlike the workers', evidence counts for nothing.
        premise = Premise.of(view, known, first.passed, standing.unrefuted)
        unrefuted = standing.unrefuted | premise.fails
        candidates = first.passed & unrefuted

        # 5. Compare the uploads with one another.
        signal = projections.momentum.signal
        product_limit = largest_product(view.noise_std, lengths, signal, chance, min(n, GROUP) - 1, view.expected)
        given = (view.uploads, candidates, product_limit, longest, standing.score, view.ties)
        copies, repeats = find_copies(*given)
        passed = candidates ^ copies  # which are among the candidates

        # 6. Find what doubt is left: where nobody could be refused, and between groups that false labels tell apart.
        usual = (first.passed & standing.unrefuted).to(contributions.dtype)
        loads = Loads.of(view, known, mixture, projections, unit, usual)
        labels = LabelDoubt.of(view, known, mixture, projections, loads, first.passed, passed)
        doubt = torch.maximum(doubt_along(projections, standing.offsets, passed, view.ties), labels.doubt)

        # 7. Average those that passed, each with its odds of being honest; what is repeated counts once.
        stages = [view.present, first.fits_length, first.passes_distribution, unrefuted, copies]
        weighed = Weights.of(view, known, standing.score, doubt, repeats, passed, stages, mixture)
        weighed = weighed.unless(premise.fails, premise.best & passed, repeats, known)
        update = weighed.weights @ view.uploads

        judged = Judged(mixture, projections, standing, premise, loads, labels, weighed)
        after = judged.after(view, known, first.passed, update)
        reason = view.mark_missing(weighed.reason)
        return Verdict(
            update, weighed.kept, reason, weighed.score, after._asdict(), weighed.weights, fell_back=premise.fails
        )


class Judged(NamedTuple):
    """What was found in a round."""

    mixture: Mixture
    projections: Projections
    standing: WorkerStanding
    premise: Premise
    loads: Loads
    labels: LabelDoubt
    weighed: Weights

    def after(self, view: ServerView, known: FortifiedState, passed: Tensor, update: Tensor) -> FortifiedState:
        """What is known after the round. passed: (n,) the first tests."""
        one = ones(len(passed), known.bias_correction.dtype, known.bias_correction.device)
        corrected = torch.lerp(known.bias_correction, one, AGREEMENT_SPEED)
        return FortifiedState(
            evidence=self.standing.evidence,
            trust=self.standing.trust,
            agreement=self.standing.agreement,
            bias_correction=unless_missing(view, corrected, known.bias_correction),
            offsets=self.standing.offsets,
            places=self.labels.places,
            memory=self.labels.memory,
            label_doubt=self.labels.doubt,
            update_averages=moved_averages(known),
            last_update=update,
            largest_weights=self.weighed.largest_weights,
            own_averages=self.projections.own_averages,
            main_difference=self.projections.main_difference,
            label_direction=self.projections.label_direction,
            label_difference=self.projections.label_difference,
            label_loads=self.loads.held(),
            label_shares=self.projections.label_shares,
            gram=self.mixture.gram,
            products=self.mixture.products,
            mix=self.mixture.mix_after,
            seen=self.mixture.seen,
            presence=self.standing.presence,
            promised=self.standing.promised,
            credit=self.premise.credit,
            counted=unless_missing(view, passed, known.counted),
            unrefuted=self.standing.unrefuted,
            rounds=known.rounds + 1,
        )


def _contributions(view: ServerView, shift: Tensor) -> tuple[Tensor, Tensor]:
    """(A, d) what the server's own examples would add to an upload."""
    if view.contributions is None:
        raise SpecError("aggregator 'fortified': needs ServerView.contributions, which this server does not have")
    found = view.contributions(shift)
    examples = len(found) // 2
    if examples < 2:
        raise SpecError(f"aggregator 'fortified': needs two examples of the server's own or more, not {examples}")
    if found.is_cuda or not bool(found.norm() < torch.inf):  # else nothing is to replace, and a copy takes time
        found = found.nan_to_num(0.0, 0.0, 0.0)
    return found[:examples], found[examples:]


def moved_averages(known: FortifiedState) -> Tensor:
    """(UPDATE_SPEEDS, d) the moving averages with the last update. A round in which nobody was used moves none.

    Otherwise they would shrink towards zero while nothing arrives, until their directions are rounding errors.
    """
    speeds = update_speeds(known.update_averages) * (known.largest_weights[0] > 0)
    return torch.lerp(known.update_averages, known.last_update, speeds)
