"""What plugins send, and what plugins' code is shown: nothing of it raises, lies or reaches what is not its own."""

import functools
import itertools
import types
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from noisegate import Compute, SpecError
from noisegate.aggregators import Mean
from noisegate.attacks.honest import Forger
from noisegate.protocol.intake import as_rows, receive
from noisegate.runs.setup import prepare
from noisegate.simulate import first_state, play
from noisegate.views import AdversaryView, DataView, Reason, Verdict

N, D = 3, 4
GOOD = torch.arange(4.0)


# --- what can be sent ------------------------------------------------------------------------------------------------


class Subclass(Tensor):
    pass


class Raising(Tensor):
    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        raise RuntimeError("no")


class Leaving(Tensor):
    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        raise SystemExit(3)


class Answering(Tensor):
    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        return 3


class LyingList(list):
    def __getitem__(self, place):
        raise ValueError(place)

    def __len__(self):
        return 10**9

    def __iter__(self):
        raise ValueError("no")


class Shapeless:
    @property
    def shape(self):
        raise ValueError("no")


def escaped(how: Any, given: Tensor) -> Tensor:
    """A tensor that left the transform that made it."""
    caught = []
    how(lambda x: (caught.append(x), x.sum())[1])(given)
    return caught[0]


def fake(*shape: int) -> Tensor:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        return torch.zeros(shape)


def without_storage(tensor: Tensor) -> Tensor:
    """Reading it ends the process."""
    tensor.untyped_storage().resize_(0)
    return tensor


def with_methods(tensor: Tensor) -> Tensor:
    """Methods of its own, in place of a tensor's."""
    for name in ("detach", "to", "unbind", "stride", "is_contiguous", "is_neg", "untyped_storage", "clone", "numel"):
        setattr(tensor, name, lambda *_: 1 / 0)
    return tensor


def inference(tensor: Tensor) -> Tensor:
    with torch.inference_mode():
        return tensor + 0


KINDS = {
    "plain": lambda x: x,
    "needs grad": lambda x: x.clone().requires_grad_(),
    "parameter": torch.nn.Parameter,
    "buffer": torch.nn.Buffer,
    "subclass": lambda x: x.as_subclass(Subclass),
    "subclass that raises": lambda x: x.as_subclass(Raising),
    "subclass that exits": lambda x: x.as_subclass(Leaving),
    "subclass that answers": lambda x: x.as_subclass(Answering),
    "out of vmap": lambda x: escaped(torch.vmap, x.expand(2, *x.shape)),
    "out of grad": lambda x: escaped(torch.func.grad, x),
    "fake": lambda x: fake(*x.shape),
    "uninitialized": lambda x: torch.nn.UninitializedParameter(),
    "masked": lambda x: torch.masked.masked_tensor(x, torch.ones_like(x, dtype=torch.bool)),
    "without storage": lambda x: without_storage(x.clone()),
    "with methods": lambda x: with_methods(x.clone()),
    "float64 with methods": lambda x: with_methods(x.double()),
    "inference": inference,
    "negative bit": lambda x: torch.complex(x, -x).conj().imag,
    "expanded": lambda x: x[:1].expand(x.shape),
    "strided": lambda x: torch.stack((x, x), -1)[..., 0],
    "overlapping": lambda x: torch.arange(float(x.numel())).as_strided(x.shape, (1,) * x.ndim),
    "sparse": lambda x: x.to_sparse(),
    "mkldnn": lambda x: x.to_mkldnn(),
    "nested": lambda x: torch.nested.nested_tensor([x]),
    "jagged": lambda x: torch.nested.nested_tensor([x], layout=torch.jagged),
    "quantized": lambda x: torch.quantize_per_tensor(x, 0.1, 0, torch.qint8),
    "meta": lambda x: x.to("meta"),
    "float8": lambda x: x.to(torch.float8_e4m3fn),
    "uint16": lambda x: x.to(torch.uint16),
    "complex": lambda x: x.to(torch.complex64),
    "half": lambda x: x.half(),
    "int": lambda x: x.long(),
    "array": lambda x: x.numpy(),
    "nothing": lambda x: None,
    "shapeless": lambda x: Shapeless(),
}
READ = {
    *("plain", "needs grad", "parameter", "buffer", "with methods", "float64 with methods", "inference"),
    *("negative bit", "expanded", "strided", "overlapping", "half", "int"),
}
"""All others are malformed."""

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # torch's, of tensors that are prototypes


def sound(sent: Any, well_formed: list[int]) -> Tensor:
    rows, _norms, present, _ = receive(sent, N, D, torch.zeros(D))
    raw = as_rows(sent, N, D, torch.zeros(D))
    for tensor in (rows, raw):
        assert type(tensor) is Tensor
        assert tensor.shape == (N, D)
        assert tensor.dtype == torch.float32
        assert not tensor.requires_grad
        assert not tensor.is_inference()
    assert bool(rows.isfinite().all())
    assert present.nonzero().flatten().tolist() == well_formed
    assert not bool(rows[~present].any())
    assert bool(raw[~present].isnan().all())
    torch.zeros(N, D).index_copy_(0, torch.arange(N), raw)  # as a round does
    return rows


@pytest.mark.parametrize("kind", KINDS)
def test_whatever_kind_of_tensor_is_sent_it_is_read_or_malformed(kind):
    made = GOOD.repeat(N, 1)
    rows = sound(KINDS[kind](made.clone()), [0, 1, 2] if kind in READ else [])
    if kind in READ - {"negative bit", "overlapping"}:
        assert torch.equal(rows, made)
    if kind == "negative bit":
        assert torch.equal(rows, made)  # the imaginary part, conjugated


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_in_a_list(kind):
    rows = sound([GOOD, KINDS[kind](GOOD.clone()), GOOD], [0, 1, 2] if kind in READ else [0, 2])
    assert torch.equal(rows[0], GOOD)
    assert torch.equal(rows[2], GOOD)


@pytest.mark.parametrize("kind", [list, tuple])
def test_a_list_that_lies_is_not_asked(kind):
    class Other(kind):
        def __iter__(self):
            raise SystemExit(3)

    sound(Other([GOOD] * N), [])
    sound(LyingList([GOOD] * N), [])


items = st.sampled_from(sorted(KINDS))
shapes = st.sampled_from([(D,), (D - 1,), (D + 1,), (1, D), (D, 1), (), (0,), (N, D), (N, D, 1)])
numbers = st.sampled_from([0.0, -0.0, 1.0, 3e38, 1e-45, float("inf"), float("nan")])


@settings(max_examples=300, deadline=None)
@example([("out of vmap", (0,), 0.0)], True)
@given(st.lists(st.tuples(items, shapes, numbers), max_size=5), st.booleans())
def test_receive_is_total(made, alone):
    sent = []
    for kind, shape, value in made:
        try:
            sent.append(KINDS[kind](torch.full(shape, value)))
        except (RuntimeError, ValueError, TypeError, IndexError):  # torch has no such tensor of this shape
            sent.append(None)
    given = sent[0] if alone and sent else sent
    rows, norms, present, _ = receive(given, N, D, torch.zeros(D))
    assert rows.shape == (N, D)
    assert bool(rows.isfinite().all())
    assert torch.equal(norms.isfinite(), torch.ones(N, dtype=torch.bool))
    assert not bool(rows[~present].any())


# --- what an attack is shown -----------------------------------------------------------------------------------------


@pytest.fixture
def federation(quick):
    return prepare(quick(aggregator="mean"), Compute(device="cpu")).federation


def rounds(federation: Any, count: int = 2) -> Any:
    state = first_state(federation)
    for t in range(count):
        state, _ = play(federation, state, t)
    return state


def reached(start: Any) -> Iterator[Any]:
    """Everything that ordinary attributes lead to, step by step; not what a module or a class holds.

    Of a function what it is bound to, its closure and its defaults, for its methods have methods without an end.
    """
    seen: dict[int, Any] = {}
    left = [start]
    while left:
        thing = left.pop()
        if id(thing) in seen or isinstance(thing, types.ModuleType | type | str | bytes | int | float):
            continue
        seen[id(thing)] = thing
        yield thing
        if isinstance(thing, dict):
            left += [*thing.keys(), *thing.values()]
        elif isinstance(thing, list | tuple | set | frozenset):
            left += list(thing)
        elif isinstance(thing, types.CellType):
            left.append(thing.cell_contents)
        if isinstance(thing, Tensor | torch.Generator):
            continue
        names = NAMES if callable(thing) else {*dir(thing), *NAMES}
        for name in names - {"__globals__", "__builtins__"}:  # all of the process; see SECURITY.md
            try:
                left.append(getattr(thing, name))
            except Exception:  # noqa: BLE001  # what cannot be had is not reached
                continue


NAMES = {"__self__", "__func__", "__closure__", "__defaults__", "__kwdefaults__", "__dict__", "__wrapped__"}
NAMES |= {"func", "args", "keywords", "_function"}


class Spy(Forger):
    """Overwrites every tensor that it can reach, and sends zeros."""

    reach: Any = None

    def poison(self, x: Tensor, y: Tensor, view: DataView) -> tuple[Tensor, Tensor]:
        self._spoil(view)
        return x, y

    def needs_own(self, phase: Any) -> bool:
        return True

    def forge(self, view: AdversaryView) -> Tensor:
        self._spoil(view)
        verdict = view.judge(torch.zeros(view.workers, len(view.params)))
        for thing in (view.honest, view.own, view.gradient(True), view.params):
            thing.fill_(torch.nan)
        self._spoil(verdict)
        return torch.zeros(view.workers, len(view.params))

    def _spoil(self, thing: Any) -> None:
        for found in reached(thing):
            if isinstance(found, Tensor) and found.is_floating_point():
                found.fill_(torch.nan)


class Blank(Spy):
    """Sends the same, and touches nothing."""

    def _spoil(self, thing: Any) -> None:
        pass

    def forge(self, view: AdversaryView) -> Tensor:
        return torch.zeros(view.workers, len(view.params))


def test_an_attack_that_overwrites_all_it_can_reach_changes_nothing(federation):
    workers, adversary = federation.workers, federation.adversary
    own = workers.x, workers.y, workers.sizes, federation.server.aux_x, adversary.imagined.aux_x, adversary.known_x
    kept = [each.clone() for each in own]
    clean, spied = (rounds(federation.change(attack=attack)) for attack in (Blank(), Spy()))
    assert torch.equal(clean.params, spied.params)
    assert torch.equal(clean.uploads, spied.uploads)
    assert all(torch.equal(before, after) for before, after in zip(kept, own, strict=True))


@dataclass(frozen=True)
class Keeper(Mean):
    """An aggregator that keeps what it is handed as its state."""

    def __call__(self, view, state):
        verdict = super().__call__(view, state)
        return replace(verdict, state={"uploads": view.uploads, "last": view.last})


def test_what_an_attack_learns_of_a_verdict_is_a_copy(federation):
    clean, spied = (rounds(federation.change(attack=attack, aggregator=Keeper())) for attack in (Blank(), Spy()))
    assert torch.equal(clean.params, spied.params)
    assert torch.equal(clean.uploads, spied.uploads)


def test_no_attribute_of_what_is_shown_leads_to_where_it_is_from(federation):
    state, looked = first_state(federation), []

    class Look(Blank):
        def forge(self, view: AdversaryView) -> Tensor:
            tensors = [found for found in reached(view) if isinstance(found, Tensor)]
            assert len(tensors) == 3  # params, honest and own, and the latter two made when asked for
            real = {state.uploads.data_ptr(), state.spare.data_ptr(), state.params.data_ptr()}
            assert not real & {each.data_ptr() for each in tensors}
            for name in ("__self__", "__closure__", "func", "args", "keywords", "_function", "__wrapped__"):
                for shown in (view.see_honest, view.see_own, view.judge, view.stream, view.see_gradient):
                    assert not hasattr(shown, name)
            looked.append(len(tensors))
            return super().forge(view)

    play(federation.change(attack=Look()), state, 0)
    assert looked


def test_a_view_can_be_made_of_a_view_and_of_plain_functions():
    view = AdversaryView(
        1, lambda: GOOD, lambda: GOOD, GOOD, 1.0, None, functools.partial(torch.Generator), lambda _: None
    )
    again = replace(view, see_own=lambda: 2 * GOOD)
    assert torch.equal(again.honest, GOOD)
    assert torch.equal(again.own, 2 * GOOD)
    assert torch.equal(again.gradient(False), torch.zeros(4))
    assert isinstance(again.rng, torch.Generator)


# --- what an aggregator may do --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Scribbler(Mean):
    """An aggregator that writes to what it is handed."""

    where: str = "uploads"

    def __call__(self, view, state):
        verdict = super().__call__(view, state)
        if self.where == "state" and state:
            state["mine"].add_(1)
        if self.where in ("uploads", "last"):
            getattr(view, self.where).mul_(2)
        return replace(verdict, state={"mine": torch.zeros(3)})


@pytest.mark.parametrize("where", ["uploads", "last", "state"])
def test_an_aggregator_that_writes_to_what_it_is_handed_is_refused(federation, where):
    """What everyone sent last is the workers' own, and a state that was handed over may be needed again."""
    with pytest.raises(SpecError, match=f"wrote to .*{where}"):
        rounds(federation.change(aggregator=Scribbler(where=where)))


@dataclass(frozen=True)
class Odd(Mean):
    """An aggregator whose verdict is none."""

    what: str = ""

    def __call__(self, view, state):
        verdict = super().__call__(view, state)
        return {
            "number": 3,
            "update": replace(verdict, update=verdict.update[:1]),
            "wide": replace(verdict, update=verdict.update.double()),
            "kept": replace(verdict, kept=verdict.kept[:-1]),
            "reason": replace(verdict, reason=None),
            "score": replace(verdict, score=verdict.score[None]),
            "state": replace(verdict, state={"notes": [1, 2]}),
            "places": replace(verdict, kept=torch.arange(len(verdict.kept))),
            "shares": replace(verdict, weights=verdict.weights[:, None]),
            "words": replace(verdict, reason=verdict.reason.float()),
            "sooner": replace(verdict, fell_back=torch.zeros(2, dtype=torch.bool)),
            "both": replace(verdict, kept=~verdict.kept),
        }[self.what]


@pytest.mark.parametrize(
    ("what", "says"),
    [
        ("number", "must answer with a Verdict"),
        ("update", "the update of its verdict must be a tensor of shape"),
        ("wide", "float32 on cpu; Odd.* gave shape .*float64 on cpu"),
        ("kept", "the kept of its verdict"),
        ("reason", "the reason of its verdict"),
        ("score", "the score of its verdict"),
        ("state", "its state must hold tensors only"),
        ("places", "the kept of its verdict must be a tensor of shape .*, bool on cpu; Odd.* gave .*int64"),
        ("shares", "the weights of its verdict"),
        ("words", "the reason of its verdict .*gave .*float32"),
        ("sooner", "the fell_back of its verdict"),
        ("both", "kept and reason of its verdict differ"),
    ],
)
def test_a_verdict_that_is_none_is_refused(federation, what, says):
    with pytest.raises(SpecError, match=says) as caught:
        rounds(federation.change(aggregator=Odd(what=what)), 1)
    assert "\n" not in str(caught.value)


def test_what_an_aggregator_keeps_of_what_it_is_handed_stays_as_it_was(federation):
    kept = []

    @dataclass(frozen=True)
    class Remembers(Mean):
        def __call__(self, view, state):
            kept.append((dict(state), {"uploads": view.uploads.clone(), "last": view.last.clone()}))
            verdict = super().__call__(view, state)
            return replace(verdict, state={"uploads": view.uploads, "last": view.last[1:]})

    rounds(federation.change(aggregator=Remembers()), 3)
    for (_, handed), (state, _) in itertools.pairwise(kept):
        assert torch.equal(state["uploads"], handed["uploads"])
        assert torch.equal(state["last"], handed["last"][1:])


# --- what a malformed upload is remembered as ------------------------------------------------------------------------


class Garbage(Forger):
    """Sends what is no upload."""

    def forge(self, view: AdversaryView) -> Tensor:
        return torch.full((view.workers, len(view.params)), torch.nan)


def test_a_malformed_upload_is_remembered_as_zeros(federation):
    """Decision 0013: what the server received it as, by both sides; everyone else remembers what was sent."""
    federation = federation.change(attack=Garbage())
    state, verdict = play(federation, first_state(federation), 0)
    lying = federation.adversary.byzantine
    assert bool((verdict.reason[lying] == Reason.MALFORMED).all())
    assert not bool(state.uploads[lying].any())
    assert bool(state.uploads[~lying].any(1).all())
    assert isinstance(verdict, Verdict)
    _, after = play(federation.change(attack=Blank()), state, 1)
    assert bool((after.reason != Reason.MALFORMED).all())
