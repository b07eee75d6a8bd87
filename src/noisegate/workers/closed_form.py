"""The fast way: weighted sums of per-example gradients without making them.

With phi_j = (1-b) g_j + b m the weight of example j depends on ||phi_j|| alone, and
||phi_j||^2 = (1-b)^2 ||g_j||^2 + 2 b (1-b) <g_j, m> + b^2 ||m||^2. Both terms with g_j come from one forward and one
backward pass over all examples of all workers (`layers.py`), and so does the weighted sum.

The expanded square loses its digits where (1-b) g_j is close to -b m, and where the numbers leave the range of the
type; a weight from it could then make a contribution longer than 1. Such examples are recomputed directly.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from noisegate.vectors import FlatModel
from noisegate.views import Worker
from noisegate.workers import layers
from noisegate.workers.direct import direct_sums

CANCELLATION = 0.01
"""Below this share of ((1-b)||g|| + b||m||)^2 the expanded square is not trusted: above it, rounding of a few 1e-7 of
that scale moves the length by less than 2^-14."""

RANGE = 1e-30, 1e30
"""Squared lengths outside are not trusted either: weights and their products may leave the range of float32."""


@dataclass(frozen=True)
class ClosedForm:
    """The layers of a model whose per-example gradients have a closed form."""

    model: FlatModel
    layers: tuple[layers.Layer, ...]

    @classmethod
    def of(cls, model: FlatModel) -> "ClosedForm | None":
        """The closed form of a model, or None if a parameter lies outside Linear and Conv2d or is shared."""
        start, places = 0, {}
        for name, size in zip(model.names, model.sizes, strict=True):
            places[name] = slice(start, start + size)
            start += size
        found, covered = [], 0
        for prefix, module in model.module.named_modules():
            if not list(module.parameters(recurse=False)):
                continue
            own = {name: f"{prefix}.{name}" if prefix else name for name, _ in module.named_parameters(recurse=False)}
            # A shared parameter is listed once: the second owner has a name without a place.
            if not layers.supported(module) or any(name not in places for name in own.values()):
                return None
            if own.keys() - {"weight", "bias"}:
                return None
            bias = places[own["bias"]] if "bias" in own else None
            found.append(layers.Layer(module, places[own["weight"]], bias))
            covered += len(own)
        return cls(model, tuple(found)) if found and covered == len(places) else None

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
            with torch.enable_grad():
                total = self.model.losses(params.detach(), x, y).sum()
        except RuntimeError:  # an activation in place of a layer's output, say; the direct way has no such trouble
            return None
        finally:
            for handle in handles:
                handle.remove()
        if calls != len(self.layers) or len(outputs) != len(self.layers):
            return None
        wanted = [outputs[layer.module] for layer in self.layers]
        gradients = torch.autograd.grad(total, wanted, allow_unused=True)
        if any(gradient is None for gradient in gradients):
            return None
        traced = [(inputs[layer.module], gradient) for layer, gradient in zip(self.layers, gradients, strict=True)]
        first = len(x)  # examples must come first everywhere, each on its own
        return traced if all(len(a) == len(delta) == first for a, delta in traced) else None

    def sums(
        self,
        worker: Worker,
        params: Tensor,
        x: Tensor,
        y: Tensor,
        owner: Tensor,
        last_uploads: Tensor,
        chunk: int = 128,
    ) -> Tensor:
        """(n, d): each worker's sum of contributions, before noise. As `direct_sums`; `owner` must be ascending."""
        if not len(y):
            return torch.zeros_like(last_uploads)
        traced = self.trace(params, x, y)
        if traced is None:  # the model calls its layers differently than when it was probed
            return direct_sums(worker, self.model, params, x, y, owner, last_uploads, chunk)
        groups = _groups(owner, len(last_uploads))
        fresh, old = 1 - worker.momentum, worker.momentum

        # Lengths of g and m, and their inner product.
        square = params.new_zeros(len(y), dtype=torch.float64)
        inner = params.new_zeros(len(y), dtype=torch.float64)
        for layer, (a, delta) in zip(self.layers, traced, strict=True):
            lengths = layers.plain_lengths if a.ndim == 2 else layers.spread_lengths
            more_square, more_inner = lengths(layer, a, delta, last_uploads, groups)
            square += more_square
            inner += more_inner
        last = torch.linalg.vector_norm(last_uploads, dim=1, dtype=torch.float64)[owner]
        mixed = fresh**2 * square + 2 * fresh * old * inner + old**2 * last**2

        # Which of them can be trusted, and their weights.
        scale = (fresh * square.sqrt() + old * last) ** 2
        trusted = (mixed >= CANCELLATION * scale) & (mixed > RANGE[0]) & (scale < RANGE[1])
        weights = torch.where(trusted, worker.weights(torch.where(trusted, mixed, 1.0).sqrt()), 0.0).to(params.dtype)
        doubtful = (~trusted).nonzero().flatten()
        if len(doubtful):  # a weight of zero does not silence a NaN: take the rows out
            traced = [(_without(a, trusted), _without(delta, trusted)) for a, delta in traced]

        # The weighted sum of phi = (1-b) times that of g, plus b times the weights' total times m.
        sums = torch.empty_like(last_uploads)
        for layer, (a, delta) in zip(self.layers, traced, strict=True):
            add_up = layers.plain_sum if a.ndim == 2 else layers.spread_sum
            add_up(layer, a, delta, weights * fresh, groups, sums)
        if old:
            totals = groups.pad(weights).sum(1)
            sums.addcmul_(old * totals[:, None], _without_idle(last_uploads, totals > 0))
        if len(doubtful):
            rest = (x[doubtful], y[doubtful], owner[doubtful])
            sums += direct_sums(worker, self.model, params, *rest, last_uploads, chunk)
        return sums


def _groups(owner: Tensor, workers: int) -> layers.Groups:
    counts = torch.bincount(owner, minlength=workers)
    starts = counts.cumsum(0) - counts
    slot = torch.arange(len(owner), device=owner.device) - starts[owner]
    return layers.Groups(owner, slot, workers, int(counts.max()))


def _without(values: Tensor, keep: Tensor) -> Tensor:
    return torch.where(keep.view(-1, *[1] * (values.ndim - 1)), values, 0.0)


def _without_idle(last_uploads: Tensor, active: Tensor) -> Tensor:
    """Zero the rows of workers without a trusted example: those of a last upload that is not finite are among them."""
    return last_uploads if bool(active.all()) else _without(last_uploads, active)
