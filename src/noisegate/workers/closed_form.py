"""The fast way: weighted sums of per-example gradients without making them.

With phi_j = (1-b) g_j + b m the weight of example j depends on ||phi_j|| alone, and
||phi_j||^2 = (1-b)^2 ||g_j||^2 + 2 b (1-b) <g_j, m> + b^2 ||m||^2. Both terms with g_j come from one forward and one
backward pass over all examples of all workers (`layers.py`), and so does the weighted sum.

The expanded square loses its digits where (1-b) g_j is close to -b m, and where the numbers leave the range of the
type; a weight from it could then make a contribution longer than 1. Such examples are recomputed directly.
"""

import functools
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from noisegate import kernels
from noisegate.examples import Examples
from noisegate.roles import Worker
from noisegate.vectors import FlatModel, counting, ones
from noisegate.workers import example_gradients, layers
from noisegate.workers.direct import SHORTEST, Direct, Sums, one_thread_at_a_time
from noisegate.workers.lookups import Lookup
from noisegate.workers.owners import owners

Part = layers.Plain | layers.Spread | Lookup

CANCELLATION = 0.25
"""Below this share of (1-b)||g|| + b||m|| a length from the expanded square is not trusted. Above it, an error of e
times the square of that scale moves the length by at most 8 e: less than 2^-14 for an e of 7e-6, and e is some 1e-6."""

KEPT = 6
"""Tensors of the size of a layer's inputs and outputs that exist at once: activations, what autograd keeps, copies."""

RANGE = 1e-12, 1e12
"""Lengths outside are not trusted either: weights and their products may leave the range of float32. Without momentum
nothing cancels, and a length is good down to the shortest that counts: a sure model's examples need no other way."""


LARGEST = 1e37
"""Products up to this are in the range of float32, with a margin for what they are multiplied with."""


@dataclass(frozen=True)
class ClosedForm(Sums):
    """The layers of a model whose per-example gradients have a closed form."""

    model: FlatModel
    layers: tuple[layers.Layer, ...]
    direct: Direct
    own_convolutions: bool = True  # on a CUDA device

    @classmethod
    def of(cls, model: FlatModel, chunk: int = 128) -> "ClosedForm | None":
        """The closed form of a model, or None if a parameter lies outside the layers that have one, or is shared."""
        found, why = owners(model)
        return None if why else cls(model, tuple(found), Direct(model, chunk))

    def trace(self, params: Tensor, x: Tensor, y: Tensor) -> list[tuple[Tensor, Tensor]] | None:
        """(inputs, output gradients) of every layer, or None if one was not called exactly once."""
        inputs: dict[nn.Module, Tensor] = {}
        outputs: dict[nn.Module, Tensor] = {}
        calls = 0

        def record(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
            nonlocal calls
            calls += 1
            if args:  # called by keyword otherwise: left out, so counted but not found
                inputs[module], outputs[module] = args[0].detach(), output
            return output if output.requires_grad else output.requires_grad_()

        handles = [layer.module.register_forward_hook(record) for layer in self.layers]
        try:
            with torch.enable_grad(), self._convolutions(x):
                said = self.model.outputs(params.detach(), x)
            if len(said) != len(y):
                return None
            with torch.enable_grad():  # each loss of its own row: a loss cannot mix examples here, a module still can
                losses = self.model.own_losses(said, y)
        except RuntimeError:  # an activation in place of a layer's output, say; the direct way has no such trouble
            return None
        finally:
            for handle in handles:
                handle.remove()
        if calls != len(self.layers) or len(outputs) != len(self.layers):
            return None
        wanted = [outputs[layer.module] for layer in self.layers]
        if not losses.requires_grad:
            return None
        gradients = torch.autograd.grad(
            losses, wanted, ones(len(losses), losses.dtype, losses.device), allow_unused=True
        )
        if any(gradient is None for gradient in gradients):
            return None
        traced = [(inputs[layer.module], gradient) for layer, gradient in zip(self.layers, gradients, strict=True)]
        first = len(x)  # examples must come first everywhere, each on its own
        return traced if all(len(a) == len(delta) == first for a, delta in traced) else None

    def _convolutions(self, x: Tensor) -> AbstractContextManager[Any]:
        """Our own on a CUDA device: with few channels they are several times faster, and as exact."""
        if not self.own_convolutions or not x.is_cuda or not kernels.available():
            return nullcontext()
        from noisegate.kernels.own_convolutions import OwnConvolutions

        return OwnConvolutions()

    def floats(self, x: Tensor, y: Tensor) -> int:
        """What one example leaves in every layer, and what is made of that."""
        traced = self.trace(self.model.initial(), x[:1], y[:1])
        if traced is None:
            return self.direct.floats(x, y)
        made = 0
        for layer, (a, delta) in zip(self.layers, traced, strict=True):
            made += (a.numel() + delta.numel()) * KEPT + _made(layer, a, delta)
        return x[0].numel() + made

    @one_thread_at_a_time
    def add(
        self, worker: Worker, params: Tensor, examples: Examples, last_uploads: Tensor, into: Tensor, scale: float = 1.0
    ) -> None:
        """Lengths first, then weights, then sums; what cannot be trusted goes the direct way."""
        if not len(examples):
            return
        traced = self.trace(params, examples.x, examples.y)
        if traced is None:  # the model calls its layers differently than when it was probed
            self.direct.add(worker, params, examples, last_uploads, into, scale)
            return
        if examples.capacity and into.is_cuda and kernels.available():
            self._queue(worker, traced, examples, last_uploads, into, scale)
            return
        workers, owner = len(last_uploads), examples.owner
        groups = layers.Groups.of(owner, workers, None if examples.capacity else examples.most)
        parts = [_part(layer, a, delta, groups) for layer, (a, delta) in zip(self.layers, traced, strict=True)]
        fresh, old = 1 - worker.momentum, worker.momentum

        length, reach, finite = _mixed_lengths(parts, groups, last_uploads, old / fresh)

        # Which of them can be trusted, and their weights. What is too short to count has none.
        silent = reach < SHORTEST
        low = RANGE[0] if old else SHORTEST
        trusted = (length >= (CANCELLATION * reach).clamp_(min=low)) & (reach < RANGE[1]) | silent
        length = length.masked_fill_(silent, torch.inf)
        for layer, (a, delta) in zip(self.layers, traced, strict=True):
            if _may_overflow(layer, a):
                trusted &= _fits_float32(delta, length)
        used = trusted & (owner < workers) if examples.capacity else trusted
        everyone = bool(used.all())
        if not everyone:  # a weight of zero does not silence a NaN: take them out
            parts, length = [part.without(used) for part in parts], length.masked_fill(~used, 1.0)
        weights = worker.weights(length.mul_(fresh)).mul_(scale)
        weights = (weights if everyone else weights.masked_fill_(~used, 0.0)).to(into.dtype)

        # The weighted sum of phi = (1-b) times that of g, plus b times the weights' total times m.
        of_fresh = weights * fresh
        for part in parts:
            part.add(of_fresh, into)
        if old:
            totals = groups.totals(weights * old)[:, None]
            # A last upload that is not finite belongs to a worker without a trusted example.
            into.addcmul_(totals, last_uploads if finite else torch.where(totals > 0, last_uploads, 0.0))
        if not everyone:
            doubtful = (~trusted & (owner < workers)).nonzero().flatten()
            self.direct.add(worker, params, examples.some(doubtful), last_uploads, into, scale)

    def _queue(
        self,
        worker: Worker,
        traced: list[tuple[Tensor, Tensor]],
        examples: Examples,
        last_uploads: Tensor,
        into: Tensor,
        scale: float,
    ) -> None:
        """The rest of `add` in few kernels, none of which the host waits for. What cannot be trusted does not fit."""
        from noisegate.kernels import lengths, mixing, outer, sums

        owner, capacity, most = examples.owner, examples.capacity, examples.most or len(examples)
        if capacity is None:
            raise TypeError("what is queued needs a capacity")
        workers, fresh, old = len(last_uploads), 1 - worker.momentum, worker.momentum
        starts = torch.searchsorted(owner, counting(workers + 1, owner.device))
        by_worker = outer.ByWorker(owner, starts, most)
        square = torch.empty(len(owner), dtype=torch.float64, device=owner.device)
        inner = lengths.InnerProducts(torch.empty_like(square), last_uploads) if old else None
        pairs: list[tuple[layers.Layer, Tensor, Tensor]] = []
        rows: list[tuple[slice, Tensor]] = []
        for layer, (a, delta) in zip(self.layers, traced, strict=True):
            if layer.never_made(a):
                pairs.append((layer, a.contiguous(), delta.contiguous()))
                continue
            weight, bias = example_gradients.gradients(layer, a, delta)
            rows.append((layer.weight, weight))
            if layer.bias is not None:
                rows.append((layer.bias, bias))

        first = True
        for place, values in rows:
            lengths.row_lengths(values, by_worker, place.start, square, inner, first)
            first = False
        for layer, a, delta in pairs:
            lengths.linear_lengths(a, delta, by_worker, outer.LayerPlace(*layer.begins), square, inner, first)
            first = False
        # In float32: a length below 1e-17 may come out as any below that, which against RANGE is nothing. Beside one
        # that comes out as zero, a gradient too short to count is none.
        last = torch.linalg.vector_norm(last_uploads, dim=1).double().square_() if old else None
        limits = mixing.TrustLimits(CANCELLATION, RANGE[0] if old else SHORTEST, RANGE[1], SHORTEST)
        products = None if inner is None else inner.found
        length, trusted = mixing.mix(square, products, last, by_worker, old / fresh, limits)
        capacity.need(trusted)
        for layer, a, delta in pairs:
            if _may_overflow(layer, a):
                capacity.need(_fits_float32(delta, length) | (owner >= workers))

        weights = (worker.weights(length * fresh) * scale).to(into.dtype)
        momentum = sums.Momentum(last_uploads, sums.totals(weights, starts, old)) if old else None
        of_fresh = weights * fresh
        for place, values in rows:
            sums.row_add(values, of_fresh, starts, into, place.start, momentum)
        for layer, a, delta in pairs:
            sums.linear_add(a, delta, of_fresh, starts, into, outer.LayerPlace(*layer.begins), momentum)


def _mixed_lengths(
    parts: Sequence[Part], groups: layers.Groups, last_uploads: Tensor, ratio: float
) -> tuple[Tensor, Tensor, bool]:
    """Lengths in units of 1-b: (E,) of phi = g + r m, (E,) of both terms laid end to end, whether each m is finite.

    ratio: r = b / (1-b). A length is NaN where rounding made its square negative, and then it is not trusted.
    """
    square = sum_up(part.squares() for part in parts)
    reach, length, finite = square.sqrt(), square, True
    if ratio:
        lasts = layers.squared_lengths(last_uploads)
        last, finite = groups.spread(lasts), bool((lasts < torch.inf).all())
        inner = sum_up(part.inner(last_uploads) for part in parts)
        length = square.add_(inner, alpha=2 * ratio).add_(last, alpha=ratio**2)
        reach = reach.add_(last.sqrt_(), alpha=ratio)
    return length.sqrt_(), reach, finite


def sum_up(tensors: Iterable[Tensor]) -> Tensor:
    """Their sum, in the place of the first."""
    return functools.reduce(Tensor.add_, tensors)


def _may_overflow(layer: layers.Layer, a: Tensor) -> bool:
    """Whether weight times delta may be large beside the contribution: its length is |a| |delta|, and |a| may be tiny.

    With a bias it is at least |delta|, and where T > 1 weights are multiplied with gradients that were made.
    """
    return layer.never_made(a) and layer.bias is None


def _fits_float32(delta: Tensor, length: Tensor) -> Tensor:
    """(E,) whether |delta| / length is in the range of float32."""
    return layers.squared_lengths(delta) <= (LARGEST * length).square()


def _made(layer: layers.Layer, a: Tensor, delta: Tensor) -> int:
    """Floats of the gradients that are made of one example's inputs and output gradients."""
    if layer.never_made(a):
        return 0
    if isinstance(layer.module, nn.Embedding):  # on a CUDA device whole tables, and where every position looks
        return 4 * delta.numel() + (2 * layer.size + 3 * a.numel() * len(layer.module.weight) if a.is_cuda else 0)
    return 2 * layer.size


def _part(layer: layers.Layer, a: Tensor, delta: Tensor, groups: layers.Groups) -> Part:
    if layer.never_made(a):
        return layers.Plain(layer, a, delta, groups)
    if isinstance(layer.module, nn.Embedding) and not a.is_cuda:  # where `Lookup` would add in no fixed order
        return Lookup.of(layer, a, delta, groups)
    return layers.Spread(layer, *example_gradients.gradients(layer, a, delta), groups)
