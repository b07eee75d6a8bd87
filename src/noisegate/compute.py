"""Where and how to compute. `Compute` changes speed, not meaning, and is no part of a run's name."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from noisegate import checks
from noisegate.errors import SpecError

DEVICES = ("auto", "cpu", "cuda")
SMALL = 2**19
"""Rounds of fewer uploaded floats take a few milliseconds: handing work to threads costs more than it saves."""

MOST_THREADS = 1024
"""With many thousands the system ends the process."""

DEFAULT_MEMORY = {"cpu": 1024, "cuda": 8192}
"""MiB."""


@dataclass(frozen=True)
class Compute:
    """Device and size of the work.

    device: "auto" takes a CUDA device if there is one.
    threads: CPU threads of torch; None takes torch's own choice, but one for a small run, which more only slow down.
    chunk: most per-example gradients that may exist at once where a model has no closed form.
    memory: MiB that a round may use beside the uploads of this round and the last, the drawn examples included; 1,024
        unless given, 8,192 on a CUDA device. It works on as many workers at a time as fit, and on one if none does.
    graph: repeat rounds from a recorded CUDA graph. Without it every kernel is started by itself: the same numbers,
        many times slower.
    """

    device: str = "auto"
    threads: int | None = None
    chunk: int = 128
    memory: int | None = None
    graph: bool = True

    def __post_init__(self) -> None:
        checks.one_of(DEVICES, device=self.device)
        checks.count(chunk=self.chunk)
        if self.threads is not None:
            checks.count(threads=self.threads)
            if self.threads > MOST_THREADS:
                raise checks.refuse(
                    "threads", self.threads, f"must be at most {MOST_THREADS}; more than cores only slow down"
                )
        if self.memory is not None:
            checks.count(memory=self.memory)
        if self.device == "cuda" and not torch.cuda.is_available():
            raise SpecError("device = 'cuda': torch sees no CUDA device here; use --device cpu or auto")

    def resolve(self) -> torch.device:
        """The device to use."""
        name = self.device
        if name == "auto":
            name = "cuda" if torch.cuda.is_available() else "cpu"
        return torch.device(name)

    def scratch(self) -> int:
        """`memory` in bytes."""
        return (self.memory or DEFAULT_MEMORY[self.resolve().type]) * 2**20

    @contextmanager
    def exact(self) -> Iterator[None]:
        """Full float32 and a fixed order of addition, so that a device changes a round by rounding only.

        No convolution that adds in a random order, nothing with the 10-bit mantissas of TF32. The process has its own
        settings again afterwards.
        """
        cudnn, precision = torch.backends.cudnn, torch.get_float32_matmul_precision()
        with cudnn.flags(enabled=cudnn.enabled, benchmark=False, deterministic=True, allow_tf32=False):
            torch.set_float32_matmul_precision("highest")
            try:
                yield
            finally:
                torch.set_float32_matmul_precision(precision)

    @contextmanager
    def threads_for(self, floats: int) -> Iterator[None]:
        """The thread count for rounds of so many uploaded floats; the process has its own again afterwards."""
        before = torch.get_num_threads()
        torch.set_num_threads(self.threads or (1 if floats < SMALL else before))
        try:
            yield
        finally:
            torch.set_num_threads(before)
