"""The kernels of `fortified` find what their plain twins find. Run by Triton's interpreter here, by a device there.

Without a device: `make kernels`, where Triton is installed. The interpreter of Triton 3.6 needs numpy below 2.4; that
of 3.7 takes any.
"""

import itertools
import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from devices import Unasked, needs_interpreter, on_device
from noisegate import kernels
from noisegate.aggregators import Fortified
from noisegate.aggregators.fortified import copies, doubt, trust
from noisegate.aggregators.fortified.directions import Projections
from noisegate.aggregators.fortified.evidence import SHIFTS
from noisegate.aggregators.fortified.standing import WorkerStanding
from noisegate.aggregators.fortified.state import PROBES, UPDATE_SPEEDS, FortifiedState
from noisegate.aggregators.fortified.weights import Weights
from noisegate.protocol.intake import receive
from noisegate.streams import stream
from noisegate.views import Reason, ServerView

pytestmark = needs_interpreter

NOISE_STD, BATCH = 0.1, 16

# workers, coordinates, examples of the server, classes that they are sorted by
SHAPES = [(1, 7, 2, 1), (5, 40, 6, 3), (20, 700, 20, 10), (7, 1500, 9, 9), (19, 333, 34, 2), (3, 2100, 40, 1)]
KINDS = ["first round", "some", "zeros", "nobody", "huge", "missing"]


def normal(*shape: int, seed: int = 0, name: str = "judging") -> Tensor:
    return torch.randn(*shape, generator=stream(seed, name))


def some_of(n: int, seed: int, name: str) -> Tensor:
    return torch.rand(n, generator=stream(seed, name)) < 0.7


def a_view(n: int, d: int, A: int, strata: int, kind: str = "some", seed: int = 0) -> ServerView:
    """Uploads of noise and a signal, next to a few that are anything."""
    signal = functional.normalize(normal(d, seed=seed, name="signal"), dim=0)
    own = 0.5 * signal + 0.5 * functional.normalize(normal(A, d, seed=seed, name="own"), dim=1)
    uploads = 0.4 * signal + NOISE_STD * normal(n, d, seed=seed, name="uploads")
    last = 0.4 * signal + NOISE_STD * normal(n, d, seed=seed, name="last")
    if kind == "zeros":
        own, uploads, last = torch.zeros_like(own), torch.zeros_like(uploads), torch.zeros_like(last)
    if kind == "huge":
        uploads[0], last[0] = 1e18, -1e18
        uploads[-1] = 0.0
    missing = ~some_of(n, seed, "missing") if kind == "missing" else None
    if missing is not None:
        uploads[missing] = torch.nan
    rows, norms, present, _ = receive(uploads, n, d, torch.zeros(d))
    ties = torch.randperm(n, generator=stream(seed, "ties"))
    known = {"batch": BATCH, "contributions": lambda: own, "strata": strata, "missing": missing}
    known["last"] = None if kind == "first round" else last
    return ServerView(rows, norms, present, NOISE_STD, max(1, n // 2), lambda _: own.mean(0), ties, **known)


def a_state(view: ServerView, kind: str = "some", seed: int = 0) -> FortifiedState:
    """What an aggregator may know."""
    nothing = FortifiedState.of({}, view)
    if kind in ("first round", "zeros"):
        return nothing
    n, d = view.uploads.shape
    counted = torch.zeros(n, dtype=torch.bool) if kind == "nobody" else some_of(n, seed, "counted")
    if kind == "huge":
        counted[0] = False
    return FortifiedState(
        evidence=4 * normal(*nothing.evidence.shape, seed=seed, name="evidence").clamp(min=0),
        trust=3 * normal(n, seed=seed, name="trust").clamp(-2, 2),
        agreement=0.1 * normal(n, seed=seed, name="agreement"),
        bias_correction=0.2 + 0.4 * some_of(n, seed, "bias"),
        offsets=0.1 * normal(*nothing.offsets.shape, seed=seed, name="offsets"),
        update_averages=0.3 * normal(len(UPDATE_SPEEDS), d, seed=seed, name="updates") / math.sqrt(d),
        last_update=0.3 * normal(d, seed=seed, name="last update") / math.sqrt(d),
        largest_weights=torch.tensor([0.2, 0.3]),
        own_averages=(0.1 * normal(n, d, seed=seed, name="averages") + 0.02).half(),
        main_difference=functional.normalize(normal(1, d, seed=seed, name="difference")),
        counted=counted,
        unrefuted=some_of(n, seed, "unrefuted"),
    )


def to(device: str, given):
    """A tensor, or a named tuple of such, there."""
    return given.to(device) if isinstance(given, Tensor) else type(given)(*(to(device, each) for each in given))


def view_on(device: str, view: ServerView) -> ServerView:
    fields = {name: getattr(view, name).to(device) for name in ("uploads", "norms", "present", "ties")}
    for name in ("last", "missing"):
        fields[name] = None if getattr(view, name) is None else getattr(view, name).to(device)
    return replace(view, **fields)


def close(found: Tensor, wanted: Tensor, what: str, size: float = 1.0) -> None:
    """size: of what was added up to get there."""
    found = found.cpu()
    assert found.shape == wanted.shape, what
    assert found.dtype == wanted.dtype, what
    if wanted.dtype in (torch.bool, torch.int64):
        assert torch.equal(found, wanted), what
        return
    torch.testing.assert_close(
        found, wanted, rtol=1e-5, atol=1e-6 * size, equal_nan=True, msg=lambda text: f"{what}: {text}"
    )


# --- what both test files ask ----------------------------------------------------------------------------------------


def in_doubles(view: ServerView, contributions: Tensor, state: FortifiedState, unit: float) -> Projections:
    """The twin: of millions of numbers, a CPU's sums in single precision are off by 1e-4."""

    def wide(given: Tensor) -> Tensor:
        return given.double() if given.dtype == torch.float32 else given

    def narrow(given):
        if isinstance(given, Tensor):
            return given.float() if given.dtype == torch.float64 else given
        return type(given)(*map(narrow, given))

    fields = {name: wide(getattr(view, name)) for name in ("uploads", "norms")}
    fields["last"] = None if view.last is None else wide(view.last)
    there = replace(view, **fields), wide(contributions), FortifiedState(*map(wide, state))
    return narrow(Projections.of(*there, unit))


def check_projections(device: str, shape: tuple[int, int, int, int], kind: str, scratch: int = 2**28) -> None:
    from noisegate.aggregators.fortified.kernels import directions

    view = replace(a_view(*shape, kind), scratch=scratch)
    own, state, unit = view.contributions(), a_state(view, kind), 0.11
    wanted = in_doubles(view, own, state, unit)
    found = directions.project(view_on(device, view), to(device, own), to(device, state), unit)
    rows = slice(1, None) if kind == "huge" else slice(None)  # what a huge upload says, nothing asks
    close(found.of_uploads[rows], wanted.of_uploads[rows], "of_uploads", 10.0)
    if kind == "huge":
        torch.testing.assert_close(found.of_uploads[0].cpu(), wanted.of_uploads[0], rtol=1e-4, atol=1e14)
    for what in ("mean_variance", "lengths", "own_lengths"):
        close(getattr(found, what), getattr(wanted, what), what)
    close(found.agreement, wanted.agreement, "agreement", 3.0)
    for what in ("moments", "momentum"):
        here, there = getattr(found, what), getattr(wanted, what)
        for name in there._fields:
            close(getattr(here, name), getattr(there, name), name, 3.0)
    if (state.counted & state.unrefuted).sum() > 1:
        close(found.main_difference, wanted.main_difference, "main_difference", 3.0)
    else:  # there is no difference, and the twin makes a unit vector of what rounding leaves
        assert not found.main_difference.any()
    assert found.own_averages.dtype == torch.float16
    apart = (found.own_averages.cpu().float() - wanted.own_averages.float()).abs()
    assert (apart <= 2**-10 * wanted.own_averages.float().abs() + 1e-7).all(), "to the last digit of half precision"
    assert (apart == 0).float().mean() > 0.9
    if kind == "missing":
        assert torch.equal(found.own_averages.cpu()[view.missing], state.own_averages[view.missing])


def check_standing(device: str, shape: tuple[int, int, int, int], kind: str) -> None:
    from noisegate.aggregators.fortified.kernels import standing

    view = a_view(*shape, kind)
    state, examples, n = a_state(view, kind), shape[2], shape[0]
    projections = Projections.of(view, view.contributions(), state, 0.11)
    counts = torch.zeros(n, dtype=torch.bool) if kind == "nobody" else some_of(n, 1, "counts")
    if kind == "huge":
        projections.of_uploads[0], counts[0] = torch.nan, n > 1
        projections.of_uploads[-1, 2:] = 1e18
    if kind == "some":
        projections = projections._replace(agreement=torch.tensor(0.3))
    limit = math.log(2 * PROBES * len(SHIFTS) / 1e-3)
    wanted = WorkerStanding.of(view, state, projections, counts, examples, limit)
    best = trust.best_agreement(state, view.believed_honest)
    there = (to(device, each) for each in (state, projections, best, counts))
    found = standing.stand(*there, NOISE_STD, examples, limit)
    for what, here, other in zip(WorkerStanding._fields, found, wanted, strict=True):
        if kind == "huge" and what in ("trust", "score", "agreement", "offsets"):  # of what is no number at all
            here, other = here[1:], other[1:]
        close(here, other, what, 30.0)


def check_first_tests(device: str, n: int, tested: bool) -> None:
    from noisegate.aggregators.fortified.kernels.first_tests import first_tests

    norms, present, rejected = 5 + normal(n), some_of(n, 0, "present"), some_of(n, 1, "rejected") & tested
    norms[0] = 4.5
    found = first_tests(norms.to(device), present.to(device), rejected.to(device) if tested else None, 4.5, 6.0)
    fits = (norms >= 4.5) & (norms <= 6.0)
    distributed = ~rejected if tested else present
    for here, wanted in zip(found, (fits, distributed, present & fits & distributed), strict=True):
        close(here, wanted, "first tests")


def agreements(n: int, nobody: bool = False) -> SimpleNamespace:
    """The part of a state that says how far workers agree."""
    return SimpleNamespace(
        agreement=normal(n),
        bias_correction=0.3 + 0.2 * some_of(n, 2, "bias"),
        unrefuted=some_of(n, 0, "unrefuted"),
        counted=some_of(n, 1, "counted") & (not nobody),
    )


def check_best_agreement(device: str, n: int, nobody: bool = False) -> None:
    from noisegate.aggregators.fortified.kernels.trust import best_agreement

    state = agreements(n, nobody)
    there = SimpleNamespace(**{name: value.to(device) for name, value in vars(state).items()})
    for place in {1, min(3, -(-n // 10)), -(-n // 10)}:
        close(best_agreement(there, place), trust.best_agreement(state, place), "best agreement")


def products_with(kind: str, n: int, seed: int) -> Tensor:
    """Of uploads of length about 1, among which there are copies, or an imitated one."""
    uploads = functional.normalize(normal(n, 60, seed=seed), dim=1)
    if kind == "copies":
        uploads[n // 2 :] = uploads[: n - n // 2] + 0.2 * uploads[n // 2 :]
    if kind == "chain":  # each shares with the next
        uploads = uploads + uploads.roll(1, 0)
    if kind == "equal":
        uploads[:] = uploads[0]
    if kind == "zeros":
        uploads[:] = 0.0
    return uploads @ uploads.T


def check_copies(device: str, n: int, kind: str, seed: int, limit: float = 0.3, everyone: bool = False) -> None:
    from noisegate.aggregators.fortified.kernels.copies import within_group

    products = products_with(kind, n, seed)
    candidates = torch.ones(n, dtype=torch.bool) if everyone else some_of(n, seed, "candidates")
    score = (3 * normal(n, seed=seed, name="score")).round() if seed % 2 else torch.full((n,), -7.0)
    rank = torch.randperm(n, generator=stream(seed, "rank"))
    wanted = copies._within_group(products, candidates, torch.tensor(limit), 1.1, score, rank)
    there = (each.to(device) for each in (products, candidates, torch.tensor(limit)))
    found = within_group(*there, 1.1, score.to(device), rank.to(device))
    close(found.copies, wanted.copies, "copies")
    close(found.repeats, wanted.repeats, "repeats", 10.0)


def check_doubt(device: str, n: int, K: int, kind: str, neighbors: int = 512) -> None:
    from noisegate.aggregators.fortified.kernels.doubt import remaining_doubt

    offsets, error, spread = normal(n, K), normal(K, seed=1).square(), normal(K, seed=2).abs()
    noise, passed = 0.1 * normal(K, seed=3).square() + 1e-4, some_of(n, 4, "passed")
    if kind == "zeros":
        offsets, error, spread, noise = offsets * 0, error * 0, spread * 0, torch.full((K,), 1e-32)
    if kind == "nobody":
        passed = torch.zeros_like(passed)
    if kind == "huge":
        offsets[0], offsets[-1] = 1e18, -1e18
    ties = torch.randperm(n, generator=stream(0, "ties"))
    given = (offsets, error, spread, noise, passed, ties)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(doubt, "NEIGHBORS", neighbors)
        wanted = doubt.remaining_doubt(*given)
        found = remaining_doubt(*(each.to(device) for each in given))
    close(found, wanted, "doubt", 10.0)


def check_weights(device: str, n: int, kind: str) -> None:
    from noisegate.aggregators.fortified.kernels.weights import weigh

    view = a_view(n, 7, 2, 1)
    score, doubted, repeats = 3 * normal(n), normal(n, seed=1).abs().clamp(max=4), normal(n, seed=2).clamp(min=0)
    stages = [some_of(n, seed, "stages") for seed in range(4)]
    copied = ~some_of(n, 4, "stages")
    if kind == "nobody":
        stages[0] = torch.zeros_like(stages[0])
    if kind == "huge":
        score = score * 100
    if kind == "everybody":
        stages, copied = [torch.ones_like(copied) for _ in stages], torch.zeros_like(copied)
    passed = torch.stack([*stages, ~copied]).all(0)
    state = a_state(view)
    wanted = Weights.of(view, state, score, doubted, repeats, passed, [*stages, copied])
    prior = view.believed_honest / (n + 1)
    there = [to(device, each) for each in (state, score, doubted, repeats, passed)]
    found = weigh(math.log(prior / (1 - prior)), *there, [each.to(device) for each in (*stages, copied)])
    for what, here, other in zip(Weights._fields, found, wanted, strict=True):
        close(here, other, what, 1.0 if kind != "huge" else 100.0)


def check_rounds(aggregator_there, rounds: int = 4, d: int = 400, kind: str = "some") -> None:
    """A round at a time from the same state; copies, zeros and a Byzantine worker among them, or missing uploads."""
    aggregator, state, reasons = Fortified(), {}, set()
    for seed in range(rounds):
        view = a_view(12, d, 10, 5, kind, seed)
        uploads = view.uploads.clone()
        uploads[3], uploads[5], uploads[7] = uploads[2], 0.0, uploads[7] - 6 * view.contributions().mean(0)
        if kind == "missing":
            uploads[view.missing] = torch.nan
        rows, norms, present, _ = receive(uploads, 12, d, torch.zeros(d))
        view = replace(view, uploads=rows, norms=norms, present=present)
        wanted = aggregator(view, state)
        found = aggregator_there(aggregator, view, state)
        for what in ("kept", "reason"):
            close(getattr(found, what), getattr(wanted, what), what)
        for what, size in (("update", 10.0), ("weights", 10.0), ("score", 300.0)):
            close(getattr(found, what), getattr(wanted, what), what, size)
        assert set(found.state) == set(wanted.state)
        for name in set(wanted.state) - {"own_averages"}:
            close(found.state[name], wanted.state[name], name, 300.0 if name == "evidence" else 30.0)
        reasons |= set(wanted.reason.tolist())
        state = wanted.state
    assert len(reasons) >= 3, "there was something to decide"
    assert (Reason.MISSING in reasons) == (kind == "missing")


# --- without a device ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_what_lies_along_the_directions_and_what_that_says_of_a_worker(shape):
    for kind in KINDS:
        check_projections("cpu", shape, kind)
        check_standing("cpu", shape, kind)


def test_in_parts_it_is_the_same():
    """Of three workers at a time: no more fits."""
    check_projections("cpu", (8, 300, 6, 3), "some", scratch=16 * 300 * 3)


def test_of_more_columns_than_programs_have_at_once(monkeypatch):
    from noisegate.aggregators.fortified.kernels import directions, main_difference

    monkeypatch.setattr(directions, "PROGRAMS", 3)
    monkeypatch.setattr(main_difference, "PROGRAMS", 3)
    monkeypatch.setattr(directions, "PIECES", 2)
    d = 2100
    assert d > 2 * 3 * directions.COLUMNS
    assert d > 2 * 2 * directions.BLOCK
    check_projections("cpu", (4, d, 4, 2), "some")


def test_of_more_workers_than_are_read_at_once(monkeypatch):
    from noisegate.aggregators.fortified.kernels import doubt, main_difference, weights

    for module in (doubt, main_difference, weights):
        monkeypatch.setattr(module, "MANY", 16)
    check_projections("cpu", (70, 20, 4, 2), "some")
    check_doubt("cpu", 70, 2, "some")
    check_weights("cpu", 70, "some")


def test_too_many_examples_are_left_to_the_twin():
    from noisegate.aggregators.fortified.kernels import directions

    assert directions.takes(torch.empty(1000, 1), 10)
    assert directions.takes(torch.empty(2048, 1), 1)
    assert not directions.takes(torch.empty(2050, 1), 1)
    assert not directions.takes(torch.empty(33 * 33, 1), 33)


def test_the_first_tests():
    for n in (1, 20, 300):
        for tested in (False, True):
            check_first_tests("cpu", n, tested)


def test_the_agreement_of_the_best():
    for n in (1, 2, 10, 11, 200):
        for nobody in (False, True):
            check_best_agreement("cpu", n, nobody)
    check_best_agreement("cpu", 1024)


COPIES = ["none", "copies", "chain", "equal", "zeros"]


def test_copies_and_repeats():
    for n, kind in itertools.product((1, 2, 13, 40), COPIES):
        for seed in range(2):
            check_copies("cpu", n, kind, seed)
            check_copies("cpu", n, kind, seed, limit=0.05, everyone=True)


def test_doubt():
    for n, K in ((1, 1), (9, 4), (70, 3)):
        for kind in ("some", "zeros", "nobody", "huge"):
            check_doubt("cpu", n, K, kind)
    check_doubt("cpu", 90, 4, "some", neighbors=50)


def test_weights_and_reasons():
    for n in (1, 9, 100, 1500):
        for kind in ("some", "nobody", "huge", "everybody"):
            check_weights("cpu", n, kind)


def by_kernels(aggregator: Fortified, view: ServerView, state: dict) -> object:
    """As on a device, with every kernel that there is, and no question to the device."""
    fields = ("uploads", "norms", "present", "ties", "last", "missing")
    there = {name: on_device(value) for name in fields if (value := getattr(view, name)) is not None}
    there["contributions"] = lambda: on_device(view.contributions())
    return aggregator(replace(view, **there), {name: on_device(value) for name, value in state.items()})


def test_a_round_by_kernels_is_a_round(monkeypatch):
    from noisegate.aggregators.fortified.kernels import copies as copies_by_kernels
    from noisegate.aggregators.fortified.kernels import directions, doubt, first_tests, standing, trust, weights

    used = []

    def noted(name, function):
        def call(*args, **named):
            used.append(name)
            return function(*args, **named)

        return call

    every = {
        "first_tests": first_tests,
        "project": directions,
        "best_agreement": trust,
        "stand": standing,
        "within_group": copies_by_kernels,
        "remaining_doubt": doubt,
        "weigh": weights,
    }
    for name, module in every.items():
        monkeypatch.setattr(module, name, noted(name, getattr(module, name)))

    def there(aggregator, view, state):
        with monkeypatch.context() as patch:
            patch.setattr(kernels, "available", lambda: True)
            return by_kernels(aggregator, view, state)

    check_rounds(there)
    check_rounds(there, kind="missing")
    assert used == 8 * list(every)


def test_the_best_of_too_many_are_left_to_the_twin(monkeypatch):
    from noisegate.aggregators.fortified.kernels import trust as by_kernels

    monkeypatch.setattr(by_kernels, "MANY", 16)
    monkeypatch.setattr(kernels, "available", lambda: True)
    monkeypatch.setattr(by_kernels, "best_agreement", None)
    everyone, one = torch.ones(17, dtype=torch.bool), torch.ones(17)
    there = {"agreement": normal(17), "bias_correction": one, "unrefuted": everyone, "counted": everyone}
    state = SimpleNamespace(**{name: on_device(value) for name, value in there.items()})
    with Unasked():
        found = trust.best_agreement(state, 2)
    assert float(torch.Tensor(found)) == float(normal(17).sort().values[-2])


def test_many_workers_are_compared_in_groups(monkeypatch):
    monkeypatch.setattr(copies, "GROUP", 5)
    uploads, candidates = normal(19, 30), torch.ones(19, dtype=torch.bool)
    ties = torch.randperm(19, generator=stream(0, "ties"))
    uploads[ties[1]] = uploads[ties[0]]
    given = (candidates, torch.tensor(0.1), 1.0, torch.zeros(19), ties)
    wanted = copies.find_copies(uploads, *given)
    assert wanted.copies.any()
    monkeypatch.setattr(kernels, "available", lambda: True)
    there = [on_device(each) if isinstance(each, Tensor) else each for each in given]
    with Unasked():
        found = copies.find_copies(on_device(uploads), *there)
    close(torch.Tensor(found.copies), wanted.copies, "copies")
    close(torch.Tensor(found.repeats), wanted.repeats, "repeats", 10.0)
