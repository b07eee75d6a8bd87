"""The kernels of `fortified` find what their plain twins find. Run by Triton's interpreter here, by a device there.

Without a device: `make kernels`, where Triton is installed. The interpreter of Triton 3.6 needs numpy below 2.4; that
of 3.7 takes any.
"""

import itertools
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional

from devices import Unasked, needs_interpreter, on_device
from noisegate import kernels
from noisegate.aggregators import Fortified
from noisegate.aggregators.fortified import copies
from noisegate.protocol.intake import receive
from noisegate.streams import stream
from noisegate.views import Reason, ServerView

pytestmark = needs_interpreter

NOISE_STD, BATCH = 0.1, 16


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
    false = own.roll(1, 0)
    both = torch.cat([own, false])
    known = {"batch": BATCH, "contributions": lambda _: both, "strata": strata, "labels": strata, "missing": missing}
    known["last"] = None if kind == "first round" else last
    return ServerView(rows, norms, present, NOISE_STD, max(1, n // 2), lambda _: own.mean(0), ties, **known)


def own_of(view: ServerView) -> Tensor:
    """What the server's own examples would add."""
    both = view.contributions(torch.tensor(1))
    return both[: len(both) // 2]


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


def check_first_tests(device: str, n: int, tested: bool) -> None:
    from noisegate.aggregators.fortified.kernels.first_tests import first_tests

    norms, present, rejected = 5 + normal(n), some_of(n, 0, "present"), some_of(n, 1, "rejected") & tested
    norms[0] = 4.5
    found = first_tests(norms.to(device), present.to(device), rejected.to(device) if tested else None, 4.5, 6.0)
    fits = (norms >= 4.5) & (norms <= 6.0)
    distributed = ~rejected if tested else present
    for here, wanted in zip(found, (fits, distributed, present & fits & distributed), strict=True):
        close(here, wanted, "first tests")


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


def check_rounds(aggregator_there, rounds: int = 4, d: int = 400, kind: str = "some") -> None:
    """A round at a time from the same state; copies, zeros and a Byzantine worker among them, or missing uploads."""
    aggregator, state, reasons = Fortified(), {}, set()
    for seed in range(rounds):
        view = a_view(12, d, 10, 5, kind, seed)
        uploads = view.uploads.clone()
        uploads[3], uploads[5], uploads[7] = uploads[2], 0.0, uploads[7] - 6 * own_of(view).mean(0)
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


def test_the_first_tests():
    for n in (1, 20, 300):
        for tested in (False, True):
            check_first_tests("cpu", n, tested)


COPIES = ["none", "copies", "chain", "equal", "zeros"]


def test_copies_and_repeats():
    for n, kind in itertools.product((1, 2, 13, 40), COPIES):
        for seed in range(2):
            check_copies("cpu", n, kind, seed)
            check_copies("cpu", n, kind, seed, limit=0.05, everyone=True)


def by_kernels(aggregator: Fortified, view: ServerView, state: dict) -> object:
    """As on a device, with every kernel that there is, and no question to the device."""
    fields = ("uploads", "norms", "present", "ties", "last", "missing")
    there = {name: on_device(value) for name in fields if (value := getattr(view, name)) is not None}
    there["contributions"] = lambda shift: on_device(view.contributions(torch.Tensor(shift).cpu().long()))
    return aggregator(replace(view, **there), {name: on_device(value) for name, value in state.items()})


def test_a_round_by_kernels_is_a_round(monkeypatch):
    from noisegate.aggregators.fortified.kernels import copies as copies_by_kernels
    from noisegate.aggregators.fortified.kernels import first_tests

    used = []

    def noted(name, function):
        def call(*args, **named):
            used.append(name)
            return function(*args, **named)

        return call

    every = {"first_tests": first_tests, "within_group": copies_by_kernels}
    for name, module in every.items():
        monkeypatch.setattr(module, name, noted(name, getattr(module, name)))

    def there(aggregator, view, state):
        with monkeypatch.context() as patch:
            patch.setattr(kernels, "available", lambda: True)
            return by_kernels(aggregator, view, state)

    check_rounds(there)
    check_rounds(there, kind="missing")
    assert used == 8 * list(every)


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
