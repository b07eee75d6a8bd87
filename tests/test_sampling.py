"""Draws: the right examples, at the right rate, independently, reproducibly; and the event of a draw."""

import subprocess
import sys

import dp_accounting
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import binom

from noisegate.errors import PrivacyError, SpecError
from noisegate.sampling import SAMPLINGS, FixedSize, Poisson
from noisegate.streams import stream

EQUAL = torch.full((50,), 3000)
UNEQUAL = torch.tensor([40, 3000, 16, 500, 17])
SCHEMES = [Poisson(16), FixedSize(16)]


def draw(
    sampling: Poisson | FixedSize, sizes: torch.Tensor, rng: torch.Generator, declared: int | None = None
) -> torch.Tensor:
    return sampling.over(sizes, declared or int(sizes.max()))(rng)


def frequencies(sampling: Poisson | FixedSize, sizes: torch.Tensor, draws: int) -> torch.Tensor:
    return sum(draw(sampling, sizes, stream(1, "batch", t)).long() for t in range(draws))


@pytest.mark.parametrize("sampling", SCHEMES)
@pytest.mark.parametrize("sizes", [EQUAL, UNEQUAL, torch.tensor([16])])
def test_a_batch_is_a_subset_of_the_workers_own_examples(sampling, sizes):
    for t in range(20):
        drawn = draw(sampling, sizes, stream(3, "batch", t))
        assert drawn.dtype == torch.bool
        assert drawn.shape == (len(sizes), int(sizes.max()))
        assert not (drawn & (torch.arange(drawn.shape[1]) >= sizes[:, None])).any()


def test_a_poisson_batch_may_be_empty():
    assert not all(draw(Poisson(1), torch.tensor([9]), stream(1, "b", t)).any() for t in range(99))


def test_poisson_with_every_example_draws_every_example():
    assert draw(Poisson(16), torch.tensor([16, 16]), stream(1, "batch")).all()


def test_fixed_draws_exactly_the_batch():
    assert draw(FixedSize(16), UNEQUAL, stream(1, "batch")).sum(1).tolist() == [16] * 5


def deviation(drawn: float, trials: int, rate: float) -> float:
    return (drawn - trials * rate) / (trials * rate * (1 - rate)) ** 0.5


def test_poisson_rate_is_batch_over_examples():
    drawn = float(frequencies(Poisson(16), EQUAL, 40).sum())
    trials = 40 * 50 * 3000
    assert abs(deviation(drawn, trials, 16 / 3000)) < 4
    assert abs(deviation(drawn, trials, 1.1 * 16 / 3000)) > 10  # the test would see a rate 1.1 times as large
    assert abs(deviation(drawn, trials, 16 / 3000 / 1.1)) > 10


def test_fixed_draws_a_batch_of_every_worker_however_many_examples_it_has():
    assert frequencies(FixedSize(16), UNEQUAL, 40).sum(1).tolist() == [40 * 16] * 5


def test_a_poisson_rate_is_the_declared_one_and_does_not_follow_the_data():
    """Who holds fewer examples than declared pads with nothing; who holds more is not drawn less often."""
    sizes = torch.tensor([40, 3000, 5, 500, 1])
    counts = sum(draw(Poisson(16), sizes, stream(1, "batch", t), declared=500).sum(1) for t in range(400))
    for size, drawn in zip(sizes.tolist(), counts.tolist(), strict=True):
        assert abs(deviation(drawn, 400 * size, 16 / 500)) < 4


def test_taking_an_example_away_changes_no_other_draw():
    """The same numbers: the neighbor without its last example draws what it drew before, but for that example."""
    more, fewer = torch.tensor([80, 60]), torch.tensor([80, 59])
    for t in range(50):
        with_it, without = (draw(Poisson(16), sizes, stream(2, "batch", t), declared=60) for sizes in (more, fewer))
        with_it[1, 59] = False
        assert torch.equal(with_it, without)


def test_what_is_priced_is_declared_or_true():
    assert Poisson(16).priced([40, 30], 500) == [500, 500]
    assert FixedSize(16).priced([40, 30], 500) == [40, 30]


@pytest.mark.parametrize("sampling", SCHEMES)
def test_every_example_is_equally_likely(sampling):
    sizes, draws = torch.full((20,), 100), 400
    by_position = frequencies(sampling, sizes, draws).sum(0).double()
    expected = 20 * draws * 0.16
    chi_square = float(((by_position - expected) ** 2).sum() / (expected * (1 - 0.16)))
    assert 50 < chi_square < 160  # 100 degrees of freedom, standard deviation 14


def test_poisson_sizes_vary_like_a_binomial():
    sizes = torch.cat([draw(Poisson(16), EQUAL, stream(2, "b", t)).sum(1) for t in range(60)]).double()
    assert sizes.var() == pytest.approx(16 * (1 - 16 / 3000), rel=0.12)


@pytest.mark.parametrize("sampling", SCHEMES)
def test_workers_and_rounds_draw_independently(sampling):
    sizes, rng = torch.full((2,), 200), stream(5, "batch")
    rounds = torch.stack([draw(sampling, sizes, rng).long() for _ in range(500)])
    both_workers = float((rounds[:, 0] * rounds[:, 1]).sum())
    both_rounds = float((rounds[1:, 0] * rounds[:-1, 0]).sum())
    assert abs(deviation(both_workers, 500 * 200, 0.08**2)) < 4
    assert abs(deviation(both_rounds, 499 * 200, 0.08**2)) < 4


@pytest.mark.parametrize("sampling", SCHEMES)
def test_the_generator_alone_decides(sampling):
    state = torch.random.get_rng_state()
    first, again, other = (draw(sampling, UNEQUAL, stream(seed, "batch", 3)) for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert torch.equal(torch.random.get_rng_state(), state)


def test_poisson_is_charged_as_add_or_remove_with_sensitivity_1():
    gaussian = dp_accounting.GaussianDpEvent(1.5)
    assert Poisson(16).event(3000, 1.5) == dp_accounting.PoissonSampledDpEvent(16 / 3000, gaussian)
    assert Poisson(16).neighboring() == dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE
    assert (Poisson.relation, Poisson.sensitivity) == ("add-or-remove", 1.0)


def test_fixed_is_charged_as_replace_one_with_sensitivity_2():
    halved = dp_accounting.GaussianDpEvent(1.5 / 2)
    assert FixedSize(16).event(3000, 1.5) == dp_accounting.SampledWithoutReplacementDpEvent(3000, 16, halved)
    assert FixedSize(16).neighboring() == dp_accounting.NeighboringRelation.REPLACE_ONE
    assert (FixedSize.relation, FixedSize.sensitivity) == ("replace-one", 2.0)


@settings(max_examples=50, deadline=None)
@given(examples=st.integers(2, 5000), share=st.floats(0.001, 1), tail=st.floats(1e-12, 0.5))
def test_largest_is_the_smallest_size_with_that_tail(examples, share, tail):
    batch = max(1, int(share * examples))
    size = Poisson(batch).largest(examples, tail)
    assert binom.sf(size, examples, batch / examples) <= tail * (1 + 1e-9)
    assert size == 0 or binom.sf(size - 1, examples, batch / examples) >= tail * (1 - 1e-9)


def test_largest_batches():
    assert Poisson(16).largest(3000, 1e-3) == 30
    assert FixedSize(16).largest(3000, 1e-3) == 16


@pytest.mark.parametrize("name", sorted(SAMPLINGS))
def test_bad_settings_are_refused_with_what_to_do(name):
    sampling = SAMPLINGS[name]
    too_large = r"batch = 16: a worker has only 10 examples; lower batch to 10 or less"
    with pytest.raises(SpecError, match="batch = 0: must be a whole number, 1 or more"):
        sampling(0)
    for refused in (
        lambda: sampling(16).over(torch.tensor([3000, 10]), 10),
        lambda: sampling(16).event(10, 1.0),
        lambda: sampling(16).rate(10),
        lambda: sampling(16).largest(10, 0.1),
    ):
        with pytest.raises(SpecError, match=too_large):
            refused()
    for sizes in (torch.tensor([[20]]), torch.tensor([20.0]), torch.tensor([], dtype=torch.int64)):
        with pytest.raises(SpecError, match=r"must be one int64 number of examples for each worker"):
            sampling(16).over(sizes, 20)
    with pytest.raises(SpecError, match="noise_multiplier = 0: must be a finite number above 0"):
        sampling(16).event(3000, 0)
    for tail in (0, 1, float("nan")):
        with pytest.raises(SpecError, match="must be a probability above 0 and below 1"):
            sampling(16).largest(3000, tail)


@pytest.mark.parametrize("sampling", SCHEMES)
def test_without_dp_accounting_there_is_no_event(sampling, monkeypatch):
    monkeypatch.setitem(sys.modules, "dp_accounting", None)
    assert draw(sampling, EQUAL, stream(1, "b")).any()
    with pytest.raises(PrivacyError, match=r"dp-accounting is not installed.*install it, or give sigma"):
        sampling.event(3000, 1.0)


def test_import_needs_no_dp_accounting():
    code = "import sys; import noisegate.sampling, noisegate.privacy; sys.exit('dp_accounting' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
