"""The kernels of `fortified` find what their plain twins find. Run by Triton's interpreter here, by a device there.

Without a device: TRITON_INTERPRET=1 python -m pytest tests/test_judging.py, where Triton is installed. The interpreter
of Triton 3.6 needs numpy below 2.4; that of 3.9 takes any.
"""

import math
import os
from dataclasses import replace
from importlib.util import find_spec
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from devices import Unasked, on_device
from noisegate import kernels
from noisegate.aggregators import Fortified, doubts, fortified, independence, judged
from noisegate.aggregators.evidence import SIZES
from noisegate.aggregators.fortified import Weighed
from noisegate.aggregators.judged import Judged
from noisegate.aggregators.known import PROBES, SPEEDS, TINY, Known
from noisegate.aggregators.probed import Probed
from noisegate.streams import stream
from noisegate.views import ServerView, receive

INTERPRETED = find_spec("triton") is not None and os.environ.get("TRITON_INTERPRET") == "1"

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="needs Triton, and TRITON_INTERPRET=1")

NOISE_STD, BATCH = 0.1, 16

# workers, coordinates, examples of the server, classes that they are sorted by
SHAPES = [(1, 7, 2, 1), (5, 40, 6, 3), (20, 700, 20, 10), (7, 1500, 9, 9), (19, 333, 34, 2), (3, 2100, 40, 1)]
KINDS = ["first round", "some", "zeros", "nobody", "huge"]


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
    rows, norms, present = receive(uploads, n, d, torch.zeros(d))
    ties = torch.randperm(n, generator=stream(seed, "ties"))
    known = {"batch": BATCH, "contributions": lambda: own, "strata": strata}
    known["last"] = None if kind == "first round" else last
    return ServerView(rows, norms, present, NOISE_STD, max(1, n // 2), lambda _: own.mean(0), ties, **known)


def a_past(view: ServerView, kind: str = "some", seed: int = 0) -> Known:
    """What an aggregator may remember."""
    nothing = Known.of({}, view)
    if kind in ("first round", "zeros"):
        return nothing
    n, d = view.uploads.shape
    counted = torch.zeros(n, dtype=torch.bool) if kind == "nobody" else some_of(n, seed, "counted")
    if kind == "huge":
        counted[0] = False
    return Known(
        evidence=4 * normal(*nothing.evidence.shape, seed=seed, name="evidence").clamp(min=0),
        trust=3 * normal(n, seed=seed, name="trust").clamp(-2, 2),
        agreed=0.1 * normal(n, seed=seed, name="agreed"),
        aged=torch.tensor(0.4),
        off=0.1 * normal(*nothing.off.shape, seed=seed, name="off"),
        ways=0.3 * normal(len(SPEEDS), d, seed=seed, name="ways") / math.sqrt(d),
        step=0.3 * normal(d, seed=seed, name="step") / math.sqrt(d),
        heaviest=torch.tensor([0.2, 0.3]),
        past=(0.1 * normal(n, d, seed=seed, name="past") + 0.02).half(),
        rift=functional.normalize(normal(1, d, seed=seed, name="rift")),
        counted=counted,
        clear=some_of(n, seed, "clear"),
    )


def to(device: str, given):
    """A tensor, or a named tuple of such, there."""
    return given.to(device) if isinstance(given, Tensor) else type(given)(*(to(device, each) for each in given))


def view_on(device: str, view: ServerView) -> ServerView:
    fields = {name: getattr(view, name).to(device) for name in ("uploads", "norms", "present", "ties")}
    fields["last"] = None if view.last is None else view.last.to(device)
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


def in_doubles(view: ServerView, own: Tensor, known: Known, unit: float) -> Probed:
    """The twin: of millions of numbers, a CPU's sums in single precision are off by 1e-4."""

    def wide(given: Tensor) -> Tensor:
        return given.double() if given.dtype == torch.float32 else given

    def narrow(given):
        if isinstance(given, Tensor):
            return given.float() if given.dtype == torch.float64 else given
        return type(given)(*map(narrow, given))

    fields = {name: wide(getattr(view, name)) for name in ("uploads", "norms")}
    fields["last"] = None if view.last is None else wide(view.last)
    return narrow(Probed.of(replace(view, **fields), wide(own), Known(*map(wide, known)), unit))


def check_probed(device: str, shape: tuple[int, int, int, int], kind: str, scratch: int = 2**28) -> None:
    view = replace(a_view(*shape, kind), scratch=scratch)
    own, known, unit = view.contributions(), a_past(view, kind), 0.11
    wanted = in_doubles(view, own, known, unit)
    found = Probed._by_kernels(view_on(device, view), to(device, own), to(device, known), unit)
    rows = slice(1, None) if kind == "huge" else slice(None)  # what a huge upload says, nobody asks
    close(found.found[rows], wanted.found[rows], "found", 10.0)
    if kind == "huge":
        torch.testing.assert_close(found.found[0].cpu(), wanted.found[0], rtol=1e-4, atol=1e14)
    for what in ("error", "lengths", "past_lengths"):
        close(getattr(found, what), getattr(wanted, what), what)
    for what, here, there in zip(wanted.seen._fields, found.seen, wanted.seen, strict=True):
        close(here, there, what, 3.0)
    close(found.hoped, wanted.hoped, "hoped", 3.0)
    for what, here, there in zip(wanted.lean._fields, found.lean, wanted.lean, strict=True):
        close(here, there, what, 3.0)
    if (known.counted & known.clear).sum() > 1:
        close(found.rift, wanted.rift, "rift", 3.0)
    else:  # nobody differs from anybody, and the twin makes a unit vector of what rounding leaves
        assert not found.rift.any()
    assert found.past.dtype == torch.float16
    apart = (found.past.cpu().float() - wanted.past.float()).abs()
    assert (apart <= 2**-10 * wanted.past.float().abs() + 1e-7).all(), "to the last digit of half precision"
    assert (apart == 0).float().mean() > 0.9


def check_judged(device: str, shape: tuple[int, int, int, int], kind: str) -> None:
    view = a_view(*shape, kind)
    known, count, n = a_past(view, kind), shape[2], shape[0]
    probed = Probed.of(view, view.contributions(), known, 0.11)
    counts = torch.zeros(n, dtype=torch.bool) if kind == "nobody" else some_of(n, 1, "counts")
    if kind == "huge":
        probed.found[0], counts[0] = torch.nan, n > 1
        probed.found[-1, 2:] = 1e18
    if kind == "some":
        probed = probed._replace(hoped=torch.tensor(0.3))
    most = math.log(2 * PROBES * len(SIZES) / 1e-3)
    wanted = Judged.of(view, known, probed, counts, count, most)
    there = (to(device, each) for each in (known, probed, counts))
    found = Judged._by_kernels(view_on(device, view), *there, count, most)
    for what, here, other in zip(Judged._fields, found, wanted, strict=True):
        if kind == "huge" and what in ("trust", "score", "agreed", "off"):  # of what is no number at all
            here, other = here[1:], other[1:]
        close(here, other, what, 30.0)


def check_alone(device: str, n: int, tested: bool) -> None:
    from noisegate.kernels import judging

    norms, present, rejected = 5 + normal(n), some_of(n, 0, "present"), some_of(n, 1, "rejected") & tested
    norms[0] = 4.5
    found = judging.alone(norms.to(device), present.to(device), rejected.to(device) if tested else None, 4.5, 6.0)
    fits = (norms >= 4.5) & (norms <= 6.0)
    like = ~rejected if tested else present
    for here, wanted in zip(found, (fits, like, present & fits & like), strict=True):
        close(here, wanted, "alone")


def check_best(device: str, n: int, nobody: bool = False) -> None:
    from noisegate.kernels import judging

    agreed, clear, counted = normal(n), some_of(n, 0, "clear"), some_of(n, 1, "counted") & (not nobody)
    known = SimpleNamespace(agreed=agreed, clear=clear, counted=counted)
    for place in {1, min(3, -(-n // 10)), -(-n // 10)}:
        found = judging.best(*(each.to(device) for each in (agreed, clear, counted)), place)
        close(found, judged._best(known, place), "best")


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


def check_shared(device: str, n: int, kind: str, seed: int, limit: float = 0.3, everyone: bool = False) -> None:
    from noisegate.kernels import sharing

    products = products_with(kind, n, seed)
    among = torch.ones(n, dtype=torch.bool) if everyone else some_of(n, seed, "among")
    trust = (3 * normal(n, seed=seed, name="trust")).round() if seed % 2 else torch.full((n,), -7.0)
    rank = torch.randperm(n, generator=stream(seed, "rank"))
    wanted = independence._shared(products, among, torch.tensor(limit), 1.1, trust, rank)
    limits = sharing.Sharing(
        independence.ALIKE, independence.STEP, independence.GROUP, independence.MOST_WORKERS, independence.TURNS
    )
    there = (each.to(device) for each in (products, among, torch.tensor(limit)))
    copies, others = sharing.shared(*there, 1.1, trust.to(device), rank.to(device), limits)
    close(copies, wanted.copies, "copies")
    close(others, wanted.others, "others", 10.0)


def check_doubts(device: str, n: int, K: int, kind: str, neighbors: int = 512) -> None:
    from noisegate.kernels import judging

    off, error, spread = normal(n, K), normal(K, seed=1).square(), normal(K, seed=2).abs()
    noise, passed = 0.1 * normal(K, seed=3).square() + 1e-4, some_of(n, 4, "passed")
    if kind == "zeros":
        off, error, spread, noise = off * 0, error * 0, spread * 0, torch.full((K,), 1e-32)
    if kind == "nobody":
        passed = torch.zeros_like(passed)
    if kind == "huge":
        off[0], off[-1] = 1e18, -1e18
    ties = torch.randperm(n, generator=stream(0, "ties"))
    given = (off, error, spread, noise, passed, ties)
    before, doubts.NEIGHBORS = doubts.NEIGHBORS, neighbors
    try:
        wanted = doubts.doubts(*given)
    finally:
        doubts.NEIGHBORS = before
    names = {"skew": doubts.SKEW, "width": doubts.WIDTH, "far": doubts.FAR, "most": doubts.MOST}
    found = judging.doubts(*(each.to(device) for each in given), **names, neighbors=neighbors)
    close(found, wanted, "doubts", 10.0)


def check_weighed(device: str, n: int, kind: str) -> None:
    from noisegate.kernels import judging

    view = a_view(n, 7, 2, 1)
    score, doubt, others = 3 * normal(n), normal(n, seed=1).abs().clamp(max=4), normal(n, seed=2).clamp(min=0)
    stages = [some_of(n, seed, "stages") for seed in range(4)]
    copies = ~some_of(n, 4, "stages")
    if kind == "nobody":
        stages[0] = torch.zeros_like(stages[0])
    if kind == "huge":
        score = score * 100
    if kind == "everybody":
        stages, copies = [torch.ones_like(copies) for _ in stages], torch.zeros_like(copies)
    passed = torch.stack([*stages, ~copies]).all(0)
    known = a_past(view)
    wanted = Weighed.of(view, known, score, doubt, others, passed, [*stages, copies])
    prior = view.believed_honest / (n + 1)
    there = [to(device, each) for each in (score, doubt, others, passed)]
    reasons = fortified._reasons(torch.device(device))
    last = (math.log(prior / (1 - prior)), fortified.LEAST_WEIGHT, TINY)
    tests = [each.to(device) for each in (*stages, copies)]
    found = judging.weighed(*there, tests, known.heaviest.to(device), reasons, *last)
    for what, here, other in zip(Weighed._fields, found, wanted, strict=True):
        close(here, other, what, 1.0 if kind != "huge" else 100.0)


def check_rounds(aggregator_there, rounds: int = 4, d: int = 400) -> None:
    """A round at a time from the same state; copies, silence and a liar among them."""
    aggregator, state, reasons = Fortified(), {}, set()
    for seed in range(rounds):
        view = a_view(12, d, 10, 5, "some", seed)
        uploads = view.uploads.clone()
        uploads[3], uploads[5], uploads[7] = uploads[2], 0.0, uploads[7] - 6 * view.contributions().mean(0)
        rows, norms, present = receive(uploads, 12, d, torch.zeros(d))
        view = replace(view, uploads=rows, norms=norms, present=present)
        wanted = aggregator(view, state)
        found = aggregator_there(aggregator, view, state)
        for what in ("kept", "reason"):
            close(getattr(found, what), getattr(wanted, what), what)
        for what, size in (("update", 10.0), ("score", 300.0)):
            close(getattr(found, what), getattr(wanted, what), what, size)
        assert set(found.state) == set(wanted.state)
        for name in set(wanted.state) - {"past"}:
            close(found.state[name], wanted.state[name], name, 300.0 if name == "evidence" else 30.0)
        reasons |= set(wanted.reason.tolist())
        state = wanted.state
    assert len(reasons) >= 3, "there was something to decide"


# --- without a device ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_what_lies_along_the_probes(shape, kind):
    check_probed("cpu", shape, kind)


def test_in_parts_it_is_the_same():
    """Of three workers at a time: no more fits."""
    check_probed("cpu", (8, 300, 6, 3), "some", scratch=16 * 300 * 3)


def test_of_more_columns_than_programs_have_at_once(monkeypatch):
    from noisegate.kernels import probing

    monkeypatch.setattr(probing, "PROGRAMS", 3)
    monkeypatch.setattr(probing, "PIECES", 2)
    d = 2100
    assert d > 2 * 3 * probing.COLUMNS
    assert d > 2 * 2 * probing.BLOCK
    check_probed("cpu", (4, d, 4, 2), "some")


def test_of_more_workers_than_are_read_at_once(monkeypatch):
    from noisegate.kernels import judging, probing

    monkeypatch.setattr(judging, "MANY", 16)
    monkeypatch.setattr(probing, "MANY", 16)
    check_probed("cpu", (70, 20, 4, 2), "some")
    check_doubts("cpu", 70, 2, "some")
    check_weighed("cpu", 70, "some")


def test_too_many_examples_are_left_to_the_twin():
    from noisegate.kernels import probing

    assert probing.takes(torch.empty(1000, 1), 10)
    assert probing.takes(torch.empty(2048, 1), 1)
    assert not probing.takes(torch.empty(2050, 1), 1)
    assert not probing.takes(torch.empty(33 * 33, 1), 33)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_what_that_says_of_a_worker(shape, kind):
    check_judged("cpu", shape, kind)


@pytest.mark.parametrize("n", [1, 20, 300])
@pytest.mark.parametrize("tested", [False, True])
def test_what_an_upload_alone_shows(n, tested):
    check_alone("cpu", n, tested)


@pytest.mark.parametrize("n", [1, 2, 10, 11, 200, 1024])
@pytest.mark.parametrize("nobody", [False, True])
def test_what_the_best_agree(n, nobody):
    check_best("cpu", n, nobody)


SHARING = ["none", "copies", "chain", "equal", "zeros"]


@pytest.mark.parametrize("n", [1, 2, 13, 20, 100])
@pytest.mark.parametrize("kind", SHARING)
def test_what_is_shared(n, kind):
    for seed in range(4 if n < 100 else 2):
        check_shared("cpu", n, kind, seed)
        check_shared("cpu", n, kind, seed, limit=0.05, everyone=True)


@pytest.mark.parametrize("kind", ["some", "zeros", "nobody", "huge"])
@pytest.mark.parametrize(("n", "K"), [(1, 1), (9, 4), (70, 3)])
def test_doubts(n, K, kind):
    check_doubts("cpu", n, K, kind)


def test_doubts_of_those_drawn():
    check_doubts("cpu", 90, 4, "some", neighbors=50)


@pytest.mark.parametrize("kind", ["some", "nobody", "huge", "everybody"])
@pytest.mark.parametrize("n", [1, 9, 100, 1500])
def test_weights_and_reasons(n, kind):
    check_weighed("cpu", n, kind)


def by_kernels(aggregator: Fortified, view: ServerView, state: dict) -> object:
    """As on a device, with every kernel that there is, and no question to the device."""
    fields = ("uploads", "norms", "present", "ties", "last")
    there = {name: on_device(getattr(view, name)) for name in fields}
    there["contributions"] = lambda: on_device(view.contributions())
    return aggregator(replace(view, **there), {name: on_device(value) for name, value in state.items()})


def test_a_round_by_kernels_is_a_round(monkeypatch):
    from noisegate.kernels import judging, probing, sharing

    used = []

    def noted(name, function):
        def call(*args, **named):
            used.append(name)
            return function(*args, **named)

        return call

    every = ["alone", "probed", "best", "judged", "shared", "doubts", "weighed"]
    for name in every:
        module = {"probed": probing, "shared": sharing}.get(name, judging)
        monkeypatch.setattr(module, name, noted(name, getattr(module, name)))

    def there(aggregator, view, state):
        with monkeypatch.context() as patch:
            patch.setattr(kernels, "available", lambda: True)
            return by_kernels(aggregator, view, state)

    check_rounds(there)
    assert used == 4 * every


def test_the_best_of_too_many_are_left_to_the_twin(monkeypatch):
    from noisegate.kernels import judging

    monkeypatch.setattr(judging, "MANY", 16)
    monkeypatch.setattr(kernels, "available", lambda: True)
    monkeypatch.setattr(judging, "best", None)
    everyone = torch.ones(17, dtype=torch.bool)
    known = SimpleNamespace(agreed=on_device(normal(17)), clear=on_device(everyone), counted=on_device(everyone))
    with Unasked():
        found = judged._best(known, 2)
    assert float(torch.Tensor(found)) == float(normal(17).sort().values[-2])


def test_many_workers_are_compared_in_groups(monkeypatch):
    monkeypatch.setattr(independence, "GROUP", 5)
    uploads, among = normal(19, 30), torch.ones(19, dtype=torch.bool)
    ties = torch.randperm(19, generator=stream(0, "ties"))
    uploads[ties[1]] = uploads[ties[0]]
    given = (among, torch.tensor(0.1), 1.0, torch.zeros(19), ties)
    wanted = independence.shared(uploads, *given)
    assert wanted.copies.any()
    monkeypatch.setattr(kernels, "available", lambda: True)
    there = [on_device(each) if isinstance(each, Tensor) else each for each in given]
    with Unasked():
        found = independence.shared(on_device(uploads), *there)
    close(torch.Tensor(found.copies), wanted.copies, "copies")
    close(torch.Tensor(found.others), wanted.others, "others", 10.0)
