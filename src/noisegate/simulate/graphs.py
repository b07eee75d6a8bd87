"""What a round is recorded in on a CUDA device: a graph, its generators, and the tensors that it reads."""

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from noisegate.simulate.federation import Federation, Streams

PROTOCOL, ADVERSARY = "protocol", ("poison", "attack")
"""Names of generators: one for all that the protocol draws, and those of the adversary."""


class Generators(Streams):
    """A round's generators by name, and which of them it used.

    What the protocol itself draws comes from one generator, in the order of the round: setting one costs the host as
    much time as a whole round of a small run may take. What an adversary draws is its own.
    """

    def __init__(self, federation: Federation, t: int) -> None:
        super().__init__(federation, t)
        self.made: dict[str, torch.Generator] = {}

    def generator(self, what: str) -> torch.Generator:
        """Made when first asked for."""
        name = what if what in ADVERSARY else PROTOCOL
        if name not in self.made:
            self.made[name] = super().generator(name)
        return self.made[name]

    def used(self) -> dict[str, torch.Generator]:
        """Those that numbers were drawn from."""
        return {name: generator for name, generator in self.made.items() if generator.get_offset()}


class Recorded:
    """A round as a CUDA graph, with the generators that it draws from."""

    def __init__(
        self,
        federation: Federation,
        graph: torch.cuda.CUDAGraph,
        generators: dict[str, torch.Generator],
        used: "UsedTensors",
    ) -> None:
        self.federation, self.graph, self.generators, self.used = federation, graph, generators, used

    def replay(self, t: int) -> None:
        """Play round `t`."""
        for what, generator in self.generators.items():
            self.federation.schedule.rewind(generator, what, t)
        begin_secret(self.federation, t)
        self.graph.replay()


def begin_secret(federation: Federation, t: int) -> None:
    """Tell the device which round secret numbers are for: not in the round itself, where a graph would record it."""
    if federation.schedule.secret:
        federation.schedule.secret.begin(t, again=True)  # it may not fit


class UsedTensors(TorchDispatchMode):
    """While a graph is recorded, notes the tensors that were there before, so that they stay.

    A graph knows addresses only. A table that an aggregator keeps in a cache could be gone when the graph reads it.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.before: dict[int, Tensor] = {}
        self._made: set[int] = set()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for tensor in tensors_in((args, kwargs)):
            address = tensor.untyped_storage().data_ptr()
            if tensor.is_cuda and address not in self._made:
                self.before.setdefault(address, tensor)
        found = function(*args, **kwargs)
        for tensor in tensors_in(found):
            self._made.add(tensor.untyped_storage().data_ptr())
        self._made.difference_update(self.before)
        return found


def tensors_in(values: Any) -> list[Tensor]:
    """Every tensor in nested lists, tuples and dicts."""
    leaves = tree_flatten(values)[0]
    return [leaf for leaf in leaves if isinstance(leaf, Tensor)]
