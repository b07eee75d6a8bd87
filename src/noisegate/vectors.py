"""Model and flat vector: everything that travels between workers and server is one vector of d floats."""

import copy
import functools
import hashlib
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.nn import functional

from noisegate import kernels
from noisegate.errors import NO_REGRESSION, PrivacyError, SpecError

Loss = Callable[[Tensor, Tensor], Tensor]


def cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    """One cross-entropy per example: the default loss. Of one logit per example it is the binary one."""
    return functional.cross_entropy(scores_of(outputs), targets, reduction="none")


def scores_of(outputs: Tensor) -> Tensor:
    """(N, classes), of which the highest is the answer: one logit per example, (N,) or (N, 1), stands for two classes.

    Their scores are then 0 and the logit, so the answer is class 1 where the logit is above 0.
    """
    logit = outputs[:, None] if outputs.ndim == 1 else outputs
    return torch.cat([torch.zeros_like(logit), logit], 1) if logit.ndim == 2 and logit.shape[1] == 1 else outputs


def check_outputs(outputs: Any, examples: int, classes: int | None) -> None:
    """SpecError unless these are (N, classes), or one logit for each of N examples of two classes.

    classes: None where nobody knows how many there are.
    """
    shape = tuple(outputs.shape) if isinstance(outputs, Tensor) else type(outputs).__name__
    found = tuple(scores_of(outputs).shape) if isinstance(outputs, Tensor) else ()
    if len(found) == 2 and found[0] == examples and (found[1] == classes or (classes is None and found[1] > 1)):
        return
    wanted = "(N, classes)" if classes is None else f"({examples}, {classes})"
    logit = ", or one logit if there are two classes" if classes is None else ", or one logit" if classes == 2 else ""
    raise SpecError(
        f"model: gives outputs of shape {shape} for {examples} examples; give {wanted}, one number for each class of "
        f"the data{logit}; {NO_REGRESSION}"
    )


class FlatModel:
    """A module and a loss as functions of one flat parameter vector.

    The module is copied, so the caller's stays as it is, and it runs in evaluation mode. Parameters lie in the vector
    in the order of `named_parameters()`, but for frozen ones (requires_grad=False), which stay as they are. The loss
    maps (outputs, targets) of B examples to B numbers. classes: of the data, where that is known.
    """

    def __init__(
        self,
        module: nn.Module,
        loss: Loss = cross_entropy,
        device: torch.device | str = "cpu",
        classes: int | None = None,
    ) -> None:
        try:
            self.module = copy.deepcopy(module).to(device).eval()
        except RuntimeError as error:
            raise SpecError(f"model: cannot be copied ({str(error).splitlines()[0]})") from None
        self.loss, self.classes = loss, classes
        self.lock = threading.RLock()
        """Held while the module is called: calls put parameters and hooks into it for that long."""
        trained = self._trained()
        self.names = list(trained)
        self.shapes = [tuple(value.shape) for value in trained.values()]
        self.sizes = [value.numel() for value in trained.values()]
        self.d = sum(self.sizes)
        self.shares = len(self._names()) < len(self._names(twice=True))
        """Whether a parameter has several names, which are looked for in every call only where there are any."""
        self._came_with = {name: (value, _digest(value)) for name, value in self._fixed().items()}

    def __getstate__(self) -> dict[str, Any]:
        """All but the lock, which a copy has for itself."""
        return {name: value for name, value in vars(self).items() if name != "lock"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, lock=threading.RLock())

    def _trained(self) -> dict[str, nn.Parameter]:
        return {name: value for name, value in self.module.named_parameters() if value.requires_grad}

    def _names(self, twice: bool = False) -> list[str]:
        """The names of all parameters, of shared ones the first. twice: of these all."""
        return [name for name, _ in self.module.named_parameters(remove_duplicate=not twice)]

    def initial(self) -> Tensor:
        """The module's own trained parameters as one vector."""
        return torch.cat([value.detach().flatten() for value in self._trained().values()])

    def _fixed(self) -> dict[str, Tensor]:
        """Frozen parameters and buffers themselves. A buffer that is not saved may be a memory of anything."""
        frozen = {name: value for name, value in self.module.named_parameters() if not value.requires_grad}
        saved = self.module.state_dict().keys()
        return frozen | {name: value for name, value in self.module.named_buffers() if name in saved}

    def check_kept(self) -> None:
        """PrivacyError if a call of the module wrote to what nothing trains, which leaves it beside what is trained."""
        now = self._fixed()
        for name in now.keys() | self._came_with.keys():
            value, digest = self._came_with.get(name, (None, ""))
            if now.get(name) is not value or value is None or _digest(value) != digest:
                raise PrivacyError(
                    f"model: changes {name!r} when it is called, so what it was called with, private examples, would "
                    "be in the trained model without noise; keep no state in buffers (a mere cache may be registered "
                    "with persistent=False)"
                )

    def kept(self) -> dict[str, Tensor]:
        """What nothing trains of the module's state dict: frozen parameters and buffers. As `check_kept`."""
        self.check_kept()
        again = {*self._names(twice=True)} - {*self._names()}
        left_out = again.union(self.names)
        found = self.module.state_dict()
        return {name: value for name, value in found.items() if isinstance(value, Tensor) and name not in left_out}

    def state(self, vector: Tensor) -> dict[str, Tensor]:
        """The module's state dict with the parameters `vector`. A shared parameter has its first name only."""
        return {**self.tensors(vector), **self.kept()}

    def tensors(self, vector: Tensor) -> dict[str, Tensor]:
        """Views of `vector` in the shapes of the parameters; leading dimensions are kept."""
        parts = vector.split(self.sizes, dim=-1)
        lead = vector.shape[:-1]
        return {
            name: part.unflatten(-1, shape) if shape else part.reshape(lead)
            for name, shape, part in zip(self.names, self.shapes, parts, strict=True)
        }

    def outputs(self, vector: Tensor, x: Tensor) -> Tensor:
        """What the module with the parameters `vector` says of the examples `x`."""
        with self.lock:
            result: Tensor = functional_call(self.module, self.tensors(vector), (x,), tie_weights=self.shares)
        return result

    def scores(self, vector: Tensor, x: Tensor) -> Tensor:
        """(N, classes), of which the highest is the answer: `scores_of` the outputs. SpecError if they are no such."""
        outputs = self.outputs(vector, x)
        check_outputs(outputs, len(x), self.classes)
        return scores_of(outputs)

    def losses(self, vector: Tensor, x: Tensor, y: Tensor) -> Tensor:
        """One loss per example, shape (B,)."""
        return _one_each(self.loss(self.outputs(vector, x), y), len(x))

    def own_losses(self, outputs: Tensor, y: Tensor) -> Tensor:
        """One loss per row of `outputs`, of that row and its label alone: whatever the loss is, it cannot mix rows."""
        if self.loss is cross_entropy:  # which mixes nothing, and is faster for all at once
            return cross_entropy(outputs, y)

        def loss_of_one(output: Tensor, target: Tensor) -> Tensor:
            return _one_each(self.loss(output[None], target[None]), 1)[0]

        losses: Tensor = vmap(loss_of_one)(outputs, y)
        return losses


def _digest(value: Tensor) -> str:
    """Of its numbers."""
    content = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
    return hashlib.blake2b(content, digest_size=16).hexdigest()


def _one_each(losses: Tensor, count: int) -> Tensor:
    """The losses if there is one per example, else SpecError."""
    if losses.shape != (count,):
        raise SpecError(
            f"loss: must give one number per example, shape ({count},), but gave shape {tuple(losses.shape)}; "
            f"use reduction='none'; {NO_REGRESSION}"
        )
    return losses


@functools.lru_cache(maxsize=256)
def counting(count: int, device: torch.device) -> Tensor:
    """0, 1, 2, ... count - 1: one tensor for all who ask, so nobody may write to it."""
    return torch.arange(count, device=device)


@functools.lru_cache(maxsize=256)
def zeros(count: int, device: torch.device) -> Tensor:
    """0, 0, 0, ... in int64: one tensor for all who ask, so nobody may write to it."""
    return torch.zeros(count, dtype=torch.int64, device=device)


@functools.lru_cache(maxsize=256)
def ones(count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """1, 1, 1, ...: one tensor for all who ask, so nobody may write to it."""
    return torch.ones(count, dtype=dtype, device=device)


def clear_rows(rows: Tensor, absent: Tensor) -> Tensor:
    """Zeros in the rows of (n, d) that `absent` (n,) marks, in place. On a CUDA device the host does not wait."""
    if kernels.fused(rows) and rows.stride(-1) == 1:
        from noisegate.kernels.rows import clear_rows as clear

        clear(rows, absent)
        return rows
    return rows.masked_fill_(absent[:, None], 0.0)


def copy_if(going: Tensor, value: Tensor, into: Tensor) -> None:
    """into = value if `going`, () bool on the device, holds."""
    plain = value.is_contiguous() and into.is_contiguous() and value.dtype == into.dtype == torch.float32
    if into.is_cuda and kernels.available() and plain and value.numel() >= 2**16:
        from noisegate.kernels.rows import copy_if as copy

        copy(going, value, into)
    else:
        torch.where(going, value, into, out=into)


def add_rows(sums: Tensor, owner: Tensor, values: Tensor) -> None:
    """sums[owner[i]] += values[i] for every i, always in the same order. `values` must be finite."""
    if sums.is_cuda:  # index_add_ adds in no fixed order there; a matrix product does
        sums += torch.nn.functional.one_hot(owner, len(sums)).to(values.dtype).T @ values
    else:
        sums.index_add_(0, owner, values)


def finite_rows(rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(n, d) -> (rows, norms, present): (n,) their lengths, and which are finite. The others become zeros, in place.

    A row whose length overflows the floating-point type counts as not finite.
    """
    norms = torch.linalg.vector_norm(rows, dim=1)
    present = norms < torch.inf  # nor is NaN
    if rows.is_cuda or not bool(present.all()):  # to look would make the host wait for the device
        absent = ~present
        rows = clear_rows(rows, absent)
        norms.masked_fill_(absent, 0.0)
    return rows, norms, present
