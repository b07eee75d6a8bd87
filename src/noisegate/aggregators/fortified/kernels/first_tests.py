"""Which uploads pass the first tests (twin: `FirstTests.of`)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 256  # workers to a program


def first_tests(
    norms: Tensor, present: Tensor, rejected: Tensor | None, shortest: float, longest: float
) -> tuple[Tensor, ...]:
    """(n,) bool each: fits_length, passes_distribution and passed. rejected: (n,) bool; None if there is no noise."""
    n = len(norms)
    fits_length, passes_distribution, passed = (torch.empty_like(present) for _ in range(3))
    _first_tests[(triton.cdiv(n, BLOCK),)](
        norms,
        present.view(torch.uint8),
        (present if rejected is None else rejected).view(torch.uint8),
        fits_length.view(torch.uint8),
        passes_distribution.view(torch.uint8),
        passed.view(torch.uint8),
        n,
        shortest,
        longest,
        TESTED=rejected is not None,
        BLOCK=BLOCK,
        num_warps=4,
    )
    return fits_length, passes_distribution, passed


@triton.jit(do_not_specialize=["n"])
def _first_tests(
    norms,
    present,
    rejected,
    fits_length,
    passes_distribution,
    passed,
    n,
    shortest,
    longest,
    TESTED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    exists = row < n
    norm = tl.load(norms + row, mask=exists, other=0.0)
    here = tl.load(present + row, mask=exists, other=0) != 0
    fits = (norm >= shortest) & (norm <= longest)
    distributed = here
    if TESTED:
        distributed = tl.load(rejected + row, mask=exists, other=1) == 0
    tl.store(fits_length + row, fits.to(tl.uint8), mask=exists)
    tl.store(passes_distribution + row, distributed.to(tl.uint8), mask=exists)
    tl.store(passed + row, (here & fits & distributed).to(tl.uint8), mask=exists)
