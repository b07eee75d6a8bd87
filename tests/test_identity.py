"""Noise that never repeats: streams are named after all that uploads are made of."""

import copy
import functools
import importlib
import os
import random
import re
import subprocess
import sys
import threading
from dataclasses import replace
from enum import Enum
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from noisegate import Compute, Dataset, Spec
from noisegate.runs.identity import digest_of
from noisegate.runs.setup import prepare
from noisegate.simulate import first_state, play
from noisegate.workers import Direct

CPU = Compute(device="cpu", threads=1)
SPEC = Spec(dataset="mine", workers=3, byzantine=0.0, batch=6, rounds=4, sigma=4.0, sigma_base=4.0, aggregator="mean")
FACTOR = 2.0


def plain(outputs, targets):
    return functional.cross_entropy(outputs, targets, reduction="none")


def doubled(outputs, targets):
    return FACTOR * functional.cross_entropy(outputs, targets, reduction="none")


def smoothed(share: float):
    def loss(outputs, targets):
        return functional.cross_entropy(outputs, targets, reduction="none", label_smoothing=share)

    return loss


class Net(nn.Module):
    def __init__(self, flip: bool = False) -> None:
        super().__init__()
        self.layer, self.flip = nn.Linear(60, 4), flip

    def forward(self, x):
        return -self.layer(x) if self.flip else self.layer(x)


def net(seed: int = 1, **settings) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return Net(**settings)


def mine(shift: float = 0.0) -> Dataset:
    rng = torch.Generator().manual_seed(5)
    x, y = torch.randn(120, 60, generator=rng), torch.arange(120) % 4
    x[3, 0] += shift
    return Dataset("mine", x[:100], y[:100], x[100:], y[100:], classes=4)


def noises_of(spec: Spec = SPEC, data: Dataset | None = None, module: nn.Module | None = None, loss=plain, **more):
    """(3 rounds x n, d): uploads less the sums that they were made of."""
    setup = prepare(spec, CPU, data or mine(), module or net(), loss, **more)
    run = setup.federation
    state, found = first_state(run), []
    for t in range(3):
        drawn = run.mechanism.sampling.over(run.workers.sizes, run.mechanism.declared)(run.stream("batch", t))
        owner, number = drawn.nonzero(as_tuple=True)
        chosen = run.workers.holdings[owner, number]
        exact = Direct(run.mechanism.model)(
            run.mechanism.worker, state.params, run.workers.x[chosen], run.workers.y[chosen], owner, state.uploads
        )
        state, _ = play(run, state, t)
        found.append(state.uploads.double() - exact.double() / run.mechanism.batch)
    return torch.cat(found)


PAIRS = {
    "weights": ({}, {"module": net(2)}),
    "weights by a hair": ({}, {"module": net(), "nudge": 1e-6}),
    "module": ({}, {"module": net(flip=True)}),
    "loss": ({}, {"loss": doubled}),
    "closure": ({"loss": smoothed(0.1)}, {"loss": smoothed(0.2)}),
    "loss object": (
        {"loss": nn.CrossEntropyLoss(reduction="none")},
        {"loss": nn.CrossEntropyLoss(reduction="none", label_smoothing=0.1)},
    ),
    "one example": ({}, {"data": mine(shift=1e-3)}),
    "aggregator": ({}, {"spec": replace(SPEC, aggregator="median")}),
    "label": ({"label": "one"}, {"label": "two"}),
}


@pytest.mark.parametrize("pair", PAIRS.values(), ids=PAIRS)
def test_two_runs_that_differ_in_anything_share_no_noise(pair):
    """The difference of two uploads with one noise is the difference of two sums, bare."""
    noises = []
    for given in pair:
        given = dict(given)
        if nudge := given.pop("nudge", 0.0):
            given["module"] = copy.deepcopy(given["module"])
            given["module"].layer.bias.data[0] += nudge
        noises.append(noises_of(**given))
    ours, theirs = noises
    apart = (ours - theirs).norm(dim=1) / ours.norm(dim=1)
    assert apart.min() > 1  # independent: about sqrt(2); with shared noise about 1e-6
    rows = torch.corrcoef(torch.cat(noises)) - torch.eye(2 * len(ours))
    assert rows.abs().max() < 6 / ours.shape[1] ** 0.5


def test_the_same_run_has_the_same_noise():
    assert torch.equal(noises_of(module=net()), noises_of(module=net()))
    assert torch.equal(noises_of(loss=smoothed(0.1)), noises_of(loss=smoothed(0.1)))


def test_what_cannot_be_told_apart_shares_noise_with_nobody_unless_it_has_a_label():
    class Wrapped:
        def __init__(self) -> None:
            self.held = threading.Lock()  # an extension type: nothing of it can be seen

        def __call__(self, outputs, targets):
            return plain(outputs, targets)

    assert not torch.equal(noises_of(loss=Wrapped()), noises_of(loss=Wrapped()))
    assert torch.equal(noises_of(loss=Wrapped(), label="mine"), noises_of(loss=Wrapped(), label="mine"))


def test_digests_tell_code_apart(monkeypatch):
    class One(nn.Module):
        def forward(self, x):
            return x

    class Two(nn.Module):
        def forward(self, x):
            return x + 1

    Two.__name__, Two.__qualname__ = One.__name__, One.__qualname__
    things = [
        One(), Two(), plain, doubled, smoothed(0.1), smoothed(0.2), functools.partial(smoothed, 0.1),
        functools.partial(smoothed, 0.2), smoothed, net(), net(2), lambda x: x + 1, lambda x: x + 2,
        {"a": 1}, {"a": 1.0}, [1], (1,), {1}, frozenset({1, 2}), b"1", "1", None, np.arange(3), torch.arange(3),
        torch.arange(3.0), Path("a"), Path("b"), re.compile("a"), re.compile("b"), random.Random(1), random.Random(2),
        Fraction(1, 2), torch.arange(3).view(1, 3), torch.float32, range(3), One, Two,
    ]  # fmt: skip
    digests = [digest_of(thing) for thing in things]
    assert len(set(digests)) == len(things)
    assert digests == [digest_of(thing) for thing in things]
    assert digest_of(net()) == digest_of(copy.deepcopy(net()))
    before = digest_of(doubled)
    monkeypatch.setitem(globals(), "FACTOR", 3.0)
    assert digest_of(doubled) != before  # a global that it names


def test_parts_of_ones_own_have_one_digest_in_every_process():
    code = (
        "import identity_plugin as own; from noisegate.runs.identity import digest_of; "
        "print(digest_of(own.Quiet(2.0), own.Loud(), own.Aggregator(), own.Quiet))"
    )
    places = [str(Path(__file__).parent), *sys.path]
    found = [
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(places), "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    ]
    assert found[0] == found[1]


def test_code_in_another_module_of_the_user_counts(tmp_path, monkeypatch):
    """The loss that is given stays the same; the helper that it calls, or the constant that it reads, does not."""
    monkeypatch.syspath_prepend(str(tmp_path))
    digests = []
    for body in ("FACTOR = 1.0", "FACTOR = 2.0", "FACTOR = 1.0\ndef helped(x):\n    return 3 * x"):
        helper = body if "def" in body else f"{body}\ndef helped(x):\n    return x"
        (tmp_path / "own_helper.py").write_text(helper)
        (tmp_path / "own_loss.py").write_text(
            "import own_helper\n"
            "def loss(outputs, targets):\n    return own_helper.helped(outputs).sum(1) * own_helper.FACTOR\n"
            "def late(outputs, targets):\n    import own_helper\n    return own_helper.helped(outputs).sum(1)\n"
        )
        for name in ("own_helper", "own_loss"):
            sys.modules.pop(name, None)
        importlib.invalidate_caches()
        own = importlib.import_module("own_loss")
        digests.append((digest_of(own.loss), digest_of(own.late)))
    for name in ("own_helper", "own_loss"):
        sys.modules.pop(name, None)
    assert len({loss for loss, _ in digests}) == 3
    assert digests[0][1] == digests[1][1] != digests[2][1]


def test_nothing_hides_behind_the_name_of_a_library():
    def wrapped(factor: float):
        @functools.wraps(functional.cross_entropy)
        def loss(outputs, targets):
            return factor * functional.cross_entropy(outputs, targets, reduction="none")

        return loss

    class Marked(torch.Tensor):
        pass

    class Sized(list):
        pass

    class Level(Enum):
        LOW = 1

    class Grade(Enum):
        LOW = 2

    Grade.__qualname__, Grade.__name__ = Level.__qualname__, Level.__name__
    first, second = Sized([1]), Sized([1])
    second.extra = 2
    noted, other = plain, lambda: None
    other.k = 3
    pairs = [
        (wrapped(1.0), wrapped(2.0)),
        (torch.ones(2).mul, torch.zeros(2).mul),
        ({1: 2}.get, {1: 3}.get),
        (first, second),
        (Level.LOW, Grade.LOW),
        (noted, other),
    ]
    for ours, theirs in pairs:
        assert digest_of(ours) != digest_of(theirs)
    assert digest_of(wrapped(1.0)) == digest_of(wrapped(1.0))
    assert digest_of(functional.cross_entropy) == digest_of(functional.cross_entropy)
    marked = torch.ones(2).as_subclass(Marked)
    assert digest_of(marked) != digest_of(torch.ones(2))
    assert digest_of(nn.utils.parametrizations.weight_norm(nn.Linear(2, 2)))  # which cannot be pickled


def test_what_a_secret_run_draws_by_name_does_not_follow_from_private_data():
    """Ties and attackers' numbers reach the model. Named after the data, they would tell a guess at an example."""
    spec = replace(SPEC, byzantine=0.5, attack="gaussian", secret=True)
    ours, theirs = (prepare(spec, CPU, mine(shift), net(), plain).federation for shift in (0.0, 1e-3))
    for what in ("ties", "attack", "poison"):
        drawn = [torch.rand(5, generator=run.stream(what, 3)) for run in (ours, theirs)]
        assert torch.equal(*drawn)


class Refusing:
    def __reduce_ex__(self, protocol):
        raise RuntimeError("no")


def test_digests_end_on_cycles_and_are_random_where_nothing_can_be_seen():
    row: list = [1]
    row.append(row)
    assert digest_of(row) == digest_of(row)
    assert digest_of(threading.Lock()) != digest_of(threading.Lock())
    assert digest_of(Refusing()) != digest_of(Refusing())
    assert digest_of(torch.zeros(3).to_sparse()) != digest_of(torch.zeros(3).to_sparse())
