"""Our aggregators and attacks answer what those of ByzFL 0.0.11 answer, where both mean the same.

ByzFL itself is not needed here: its answers are in golden/byzfl.npz, which benchmarks/byzfl_golden.py wrote by

    pip install --no-deps byzfl==0.0.11
    python benchmarks/byzfl_golden.py

Where the two differ, a test below says how, and compares what is left.
"""

import math
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch

from noisegate.aggregators.bucketing import Bucketing
from noisegate.aggregators.centered_clipping import CenteredClipping
from noisegate.aggregators.geometric_median import GeometricMedian
from noisegate.aggregators.krum import Krum, MultiKrum
from noisegate.aggregators.mda import MDA
from noisegate.aggregators.mean import Mean
from noisegate.aggregators.median import Median
from noisegate.aggregators.nnm import NearestNeighborMixing
from noisegate.aggregators.ranks import mean_near_median
from noisegate.aggregators.trimmed_mean import TrimmedMean
from noisegate.attacks.a_little import ALittle
from noisegate.attacks.inner import Inner
from noisegate.attacks.mimic import Mimic
from noisegate.attacks.sign_flip import SignFlip
from noisegate.protocol.intake import receive
from noisegate.views import AdversaryView, ServerView

GOLDEN = np.load(Path(__file__).parent / "golden" / "byzfl.npz")
CASES = sorted({name.split("/")[0] for name in GOLDEN})

# Ours in float32, theirs in float64: a few units in the last place of the largest number that is added up.
ROUNDING = 1e-6


@dataclass(frozen=True)
class Case:
    """Vectors, f, and what ByzFL makes of them."""

    name: str

    @property
    def vectors(self) -> torch.Tensor:
        return torch.from_numpy(GOLDEN[f"{self.name}/vectors"])

    @property
    def f(self) -> int:
        return int(GOLDEN[f"{self.name}/f"])

    def theirs(self, what: str) -> torch.Tensor:
        return torch.from_numpy(GOLDEN[f"{self.name}/{what}"])

    def view(self) -> ServerView:
        n, d = self.vectors.shape
        rows, norms, present, _ = receive(self.vectors, n, d, self.vectors)
        return ServerView(rows, norms, present, 1.0, n - self.f, lambda normalized: torch.zeros(d), torch.arange(n))

    def agrees(self, ours: torch.Tensor, what: str) -> None:
        self.near(ours, self.theirs(what))

    def near(self, ours: torch.Tensor, theirs: torch.Tensor) -> None:
        assert theirs.dtype == torch.float64
        assert bool(theirs.any())
        largest = float(self.vectors.abs().max()) / len(self.vectors)
        torch.testing.assert_close(ours.double(), theirs, atol=ROUNDING * max(1.0, largest), rtol=ROUNDING)


@pytest.fixture(params=CASES)
def case(request):
    return Case(request.param)


def test_there_are_cases() -> None:
    assert CASES == ["close", "far", "strange", "tight"]


BUILDERS = {
    "average": lambda f: Mean(),
    "median": lambda f: Median(),
    "trimmed-mean": TrimmedMean,
    "geometric-median": lambda f: GeometricMedian(smoothing=0.1, iterations=3, tolerance=0.0),
    "centered-clipping": lambda f: CenteredClipping(radius=3.0, iterations=1),
    "centered-clipping, 3 steps": lambda f: CenteredClipping(radius=3.0, iterations=3),
    "mda": MDA,
    "nnm, trimmed-mean": lambda f: NearestNeighborMixing(f, TrimmedMean(f)),
}


@pytest.mark.parametrize("name", BUILDERS)
def test_same_aggregator_same_update(case, name) -> None:
    case.agrees(BUILDERS[name](case.f)(case.view(), {}).update, name)


def test_both_take_up_centered_clipping_where_they_left_it(case) -> None:
    aggregator, view = CenteredClipping(radius=3.0, iterations=1), case.view()
    case.agrees(aggregator(view, aggregator(view, {}).state).update, "centered-clipping, second call")


def test_mean_near_the_median(case) -> None:
    """Theirs is an aggregator of its own, and keeps n - f values; ours is the second half of Bulyan."""
    view = case.view()
    case.agrees(
        mean_near_median(view.uploads, view.present, len(view.present) - case.f, view.scratch), "mean-near-median"
    )


@pytest.mark.parametrize(("name", "ours"), [("krum", Krum), ("multi-krum", MultiKrum)])
def test_krum_counts_one_neighbor_more_than_the_paper(case, name, ours) -> None:
    """ByzFL counts an upload among its own n - f nearest, so n - f - 1 others; the paper and we count n - f - 2.

    So theirs with f Byzantine workers is ours with f - 1, but for how many Multi-Krum keeps: n - f here and there.
    """
    keep = {"keep": len(case.vectors) - case.f} if ours is MultiKrum else {}
    case.agrees(ours(byzantine=case.f - 1, **keep)(case.view(), {}).update, name)
    if case.name == "tight":  # made so that it matters
        with pytest.raises(AssertionError, match="not close"):
            case.agrees(ours(byzantine=case.f)(case.view(), {}).update, name)


def test_nearest_neighbor_mixing_alone(case) -> None:
    """Ours has no answer without an aggregator; the mean of the mixed uploads is one."""
    verdict = NearestNeighborMixing(case.f, Mean())(case.view(), {})
    case.near(verdict.update, case.theirs("nnm").mean(0))


def test_buckets_in_the_order_that_they_drew(case) -> None:
    view = replace(case.view(), ties=case.theirs("order"))
    case.near(Bucketing(0, Median(0), size=2)(view, {}).update, case.theirs("bucketing").quantile(0.5, dim=0))


def forged(case: Case, attack) -> torch.Tensor:
    """What one of two Byzantine workers sends if the honest workers send the vectors; its own would be their mean."""
    honest = case.vectors
    own = honest.mean(0).expand(2, -1)
    view = AdversaryView(2, lambda: honest, lambda: own, honest[0], 1.0, None, torch.Generator, lambda sent: None)
    sent = attack.forge(view)
    assert torch.equal(sent[0], sent[1])
    return sent[0]


def test_inner_product_manipulation(case) -> None:
    case.agrees(forged(case, Inner(scale=2.0)), "inner")


def test_mimic(case) -> None:
    case.agrees(forged(case, Mimic(worker=3)), "mimic")


def test_sign_flip_turns_the_honest_mean_around(case) -> None:
    """Theirs knows nothing but the honest vectors; ours turns around what its own data give: here, their mean."""
    case.agrees(forged(case, SignFlip()), "sign-flip")


def test_a_little_goes_down_where_theirs_goes_up(case) -> None:
    """ByzFL sends mean + tau std with n - 1 in the standard deviation; ours sends mean - z std with n."""
    n, tau = len(case.vectors), 1.5
    ours = forged(case, ALittle(deviation=tau * math.sqrt(n / (n - 1))))
    case.near(ours, 2 * case.vectors.double().mean(0) - case.theirs("a-little"))
