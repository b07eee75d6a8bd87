import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from noisegate.data import dirichlet, iid, non_iid
from noisegate.errors import DataError, SpecError
from noisegate.streams import stream


def some_labels(examples: int, classes: int = 10) -> torch.Tensor:
    return torch.randint(classes, (examples,), generator=stream(3, "labels"))


def gentle(y, workers, rng):
    return dirichlet(y, workers, 100.0, rng, smallest=1)


WAYS = [iid, non_iid, gentle]


def distance(y: torch.Tensor, parts: list[torch.Tensor]) -> float:
    """Mean total-variation distance between a worker's classes and everybody's."""
    whole = torch.bincount(y, minlength=10) / len(y)
    each = [torch.bincount(y[part], minlength=10) / len(part) for part in parts]
    return float(torch.stack([(one - whole).abs().sum() / 2 for one in each]).mean())


@pytest.mark.parametrize("way", WAYS)
@settings(max_examples=40, deadline=None)
@given(examples=st.integers(200, 400), workers=st.integers(1, 8), seed=st.integers(0, 2**31))
def test_parts_are_disjoint_and_cover_the_pool(way, examples, workers, seed):
    y = some_labels(examples)
    parts = way(y, workers, stream(seed, "partition"))
    assert len(parts) == workers
    assert all(len(part) > 0 for part in parts)
    assert torch.equal(torch.cat(parts).sort().values, torch.arange(examples))


@pytest.mark.parametrize("way", WAYS)
def test_the_generator_decides_and_nothing_else(way):
    y = some_labels(500)
    before = torch.get_rng_state()
    first, again, other = (way(y, 7, stream(seed, "partition")) for seed in (1, 1, 2))
    assert torch.equal(before, torch.get_rng_state())
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not torch.equal(torch.cat(first), torch.cat(other))


@pytest.mark.parametrize("way", [iid, non_iid])
@pytest.mark.parametrize("examples", [11, 59, 1417])
def test_sizes_differ_by_at_most_one(way, examples):
    sizes = [len(part) for part in way(some_labels(examples), 10, stream(1, "partition"))]
    assert max(sizes) - min(sizes) <= 1


def test_non_iid_is_as_uneven_as_the_papers_and_iid_is_not():
    # Measured on the authors' partition of MNIST to 20 workers: 0.26 on average, class shares from 0 to 0.27.
    y = torch.arange(10).repeat_interleave(600)
    assert distance(y, non_iid(y, 20, stream(1, "partition"))) == pytest.approx(0.26, abs=0.04)
    assert distance(y, iid(y, 20, stream(1, "partition"))) < 0.1


def test_a_worker_alone_gets_everything():
    y = some_labels(30)
    for way in WAYS:
        assert len(way(y, 1, stream(1, "partition"))[0]) == 30


def test_as_many_workers_as_examples():
    for way in (iid, non_iid):
        assert [len(part) for part in way(some_labels(9), 9, stream(1, "partition"))] == [1] * 9


@pytest.mark.parametrize("way", WAYS)
def test_too_few_examples_are_refused(way):
    with pytest.raises(DataError, match="5 workers need at least 5 examples"):
        way(some_labels(4), 5, stream(1, "partition"))
    with pytest.raises(SpecError, match="workers = 0"):
        way(some_labels(4), 0, stream(1, "partition"))
    with pytest.raises(DataError, match="shape"):
        way(torch.zeros(4, 2), 2, stream(1, "partition"))


def test_dirichlet_is_the_more_uneven_the_lower_alpha():
    y = torch.arange(10).repeat_interleave(300)
    apart = [distance(y, dirichlet(y, 10, alpha, stream(1, "p"), smallest=1)) for alpha in (0.1, 1.0, 100.0)]
    assert apart[0] > apart[1] > apart[2]
    assert apart[2] < 0.1


@pytest.mark.parametrize("smallest", [1, 16, 50])
def test_dirichlet_keeps_to_the_smallest(smallest):
    parts = dirichlet(some_labels(2000), 10, 0.3, stream(1, "partition"), smallest=smallest)
    assert min(len(part) for part in parts) >= smallest


def test_dirichlet_gives_up_with_advice():
    with pytest.raises(DataError, match="raise alpha or lower workers"):
        dirichlet(some_labels(400), 20, 0.01, stream(1, "partition"), smallest=16)
    with pytest.raises(DataError, match="20 workers need at least 2000 examples"):
        dirichlet(some_labels(400), 20, 1.0, stream(1, "partition"), smallest=100)


@pytest.mark.parametrize("alpha", [0, -1.0, float("nan"), float("inf"), 1e308, "1"])
def test_dirichlet_refuses_a_bad_alpha(alpha):
    with pytest.raises(SpecError, match="alpha = "):
        dirichlet(some_labels(400), 4, alpha, stream(1, "partition"))
