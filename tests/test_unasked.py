"""Aggregators and attacks never ask a CUDA device for a number, so that a round can be recorded. Tested without one.

A tensor that says it lies on a CUDA device takes the lines that are meant for one, and computes on the CPU all the
same: so these lines are also held against those for a CPU.
"""

from dataclasses import replace

import pytest
import torch

from devices import Unasked, on_device
from noisegate import kernels
from noisegate.aggregators import Mean
from noisegate.attacks import ATTACKS
from noisegate.catalog import build
from noisegate.streams import stream
from noisegate.views import ServerView, Verdict
from test_conformance import (
    BELIEVED,
    BUILDERS,
    BYZANTINE,
    HONEST,
    NOISE_STD,
    TENSORS,
    adversary_view,
    honest_uploads,
    mean_of,
    server_view,
)

# Aggregators whose docstring says that they ask: MDA, also inside of another.
ASKS = {"mda", "guerraoui"}


@pytest.fixture(autouse=True)
def no_kernels(monkeypatch):
    monkeypatch.setattr(kernels, "available", lambda: False)


def test_the_trap_snaps():
    values = on_device(torch.arange(4.0))
    for ask in (
        lambda: values.sum().item(),
        lambda: bool(values.any()),
        lambda: values[values > 1],
        lambda: values.nonzero(),
        lambda: values.masked_select(values > 1),
        lambda: int(values.argmax()),
        lambda: values + torch.tensor(1.0),
    ):
        with pytest.raises(RuntimeError, match="asks the device"), Unasked():
            ask()
    with Unasked():
        assert (values + values.sum()).is_cuda


@pytest.mark.parametrize("name", BUILDERS)
@pytest.mark.parametrize("absent", [False, True])
def test_an_aggregator_does_not_ask_and_decides_the_same(name, absent):
    """absent: with malformed and missing uploads."""
    aggregator, state, state_there = BUILDERS[name](), {}, {}
    one = torch.tensor(1)
    for seed in range(3):
        uploads = honest_uploads(seed)
        uploads[3] = 40.0
        if absent:
            uploads[1] = torch.inf
        view = server_view(uploads, seed, missing=[5 + seed] if absent else None)
        there = {each: on_device(getattr(view, each)) for each in TENSORS}
        there["missing"] = on_device(view.missing) if absent else None
        there["auxiliary"] = lambda normalized, view=view: on_device(view.auxiliary(normalized))
        there["contributions"] = lambda shift, view=view: on_device(view.contributions(one))
        plain = aggregator(view, state)
        if name in ASKS:
            verdict = aggregator(replace(view, **there), state_there)
        else:
            with Unasked():
                verdict = aggregator(replace(view, **there), state_there)
        assert torch.equal(plain.kept, verdict.kept)
        assert torch.equal(plain.reason, verdict.reason)
        for part in ("update", "score", "weights"):
            found = torch.Tensor(getattr(verdict, part))
            torch.testing.assert_close(getattr(plain, part), found, atol=1e-5, rtol=1e-4)
        state, state_there = dict(plain.state), dict(verdict.state)


@pytest.mark.parametrize("name", ATTACKS)
@pytest.mark.parametrize(("honest", "byzantine"), [(HONEST, BYZANTINE), (4, 9)])
def test_an_attack_does_not_ask_and_sends_the_same(name, honest, byzantine):
    attack = build("attack", name, ATTACKS)

    def judge(forged: torch.Tensor) -> Verdict:
        sent = torch.cat([view.see_honest(), torch.Tensor(forged)])
        present = torch.ones(len(sent), dtype=torch.bool)
        known = NOISE_STD, BELIEVED, mean_of(sent), torch.arange(len(sent))
        return Mean()(ServerView(sent, sent.norm(dim=1), present, *known), {})

    view = adversary_view(attack, 0.9, honest, byzantine)
    plain = replace(view, judge=judge)
    there = replace(
        view,
        see_honest=lambda: on_device(view.see_honest()),
        see_own=lambda: on_device(view.see_own()),
        see_gradient=lambda normalized: on_device(view.gradient(normalized)),
        params=on_device(view.params),
        judge=judge,
        stream=lambda: made,
    )
    made = stream(0, "attack")  # by the host, before a round is recorded
    expected = attack.forge(plain)
    with Unasked():
        forged = attack.forge(there)
    assert (expected is None) == (forged is None)
    if expected is not None:
        torch.testing.assert_close(expected, torch.Tensor(forged), atol=1e-5, rtol=1e-4, equal_nan=True)
