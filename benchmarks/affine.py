"""What trained weights in normalization layers cost: the round with them, over the round of the same model without.

    python benchmarks/affine.py                     # CPU, one thread, some three minutes
    python benchmarks/affine.py --direct            # also by way of every single gradient, as other layers go
    python benchmarks/affine.py --workers 5 --rounds 3 --device cuda

Two models of five million parameters on random pictures of 28 x 28: convolutions with GroupNorm, and wide layers with
LayerNorm. 10 honest workers and 15 that flip labels, batches of 16, momentum, `two-stage`. The rows of a model take
turns in one process, so that their ratio survives a noisy machine; numbers are medians without the first rounds.
"""

import argparse
from dataclasses import replace

import torch
from torch import nn

from common import WARM_UP, clear, in_turns, rounds_of, setup, shown, versions, wait
from noisegate import Compute
from noisegate.workers import ClosedForm

HONEST = 0.4
"""Share of the workers."""


def convolutions(affine: bool) -> nn.Module:
    """Two convolutions with GroupNorm and a wide layer."""
    return nn.Sequential(
        *(nn.Conv2d(1, 32, 3, padding=1), nn.GroupNorm(8, 32, affine=affine), nn.ReLU()),
        *(nn.Conv2d(32, 64, 3, stride=2), nn.GroupNorm(8, 64, affine=affine), nn.ReLU()),
        *(nn.Flatten(), nn.Linear(64 * 13 * 13, 460), nn.GroupNorm(4, 460, affine=affine), nn.ReLU()),
        nn.Linear(460, 10),
    )


def wide(affine: bool) -> nn.Module:
    """Three Linear layers with LayerNorm."""
    return nn.Sequential(
        *(nn.Flatten(), nn.Linear(784, 3000), nn.LayerNorm(3000, elementwise_affine=affine), nn.ReLU()),
        *(nn.Linear(3000, 860), nn.LayerNorm(860, elementwise_affine=affine), nn.ReLU(), nn.Linear(860, 10)),
    )


MODELS = {"GroupNorm": convolutions, "LayerNorm": wide}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=25)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--direct", action="store_true")
    chosen = parser.parse_args()
    honest = max(1, round(HONEST * chosen.workers))
    compute = Compute(device=chosen.device, threads=chosen.threads)
    device = compute.resolve()
    torch.set_num_threads(chosen.threads)
    print(f"{versions(device)}; {chosen.workers} workers, batch 16")
    for name, make in MODELS.items():
        ways, repeats, d = {}, {}, 0
        with compute.exact():
            for affine in (False, True):
                torch.manual_seed(1)
                ready = setup("fashion", honest, chosen.workers - honest, compute, module=make(affine))
                sums, d = ready.federation.mechanism.sums, ready.federation.d
                if not isinstance(sums, ClosedForm):
                    raise SystemExit(f"{name}: goes the direct way")
                what = "with affine parameters" if affine else "without"
                ways[what], repeats[what] = rounds_of(ready).step, chosen.rounds
                if affine and chosen.direct:
                    slow = replace(ready, federation=ready.federation.change(sums=sums.direct))
                    ways["with, the direct way"], repeats["with, the direct way"] = rounds_of(slow).step, 1
            for what, step in ways.items():
                for _ in range(WARM_UP if "direct" not in what else 0):
                    step()
            wait(device)
            found = in_turns(ways, repeats, device)
        print(f"\n{name}, {d:,} parameters")
        for what, milliseconds in found.items():
            print(f"  {what:24} {shown(milliseconds):>8} ms  {milliseconds / found['without']:.2f}")
        del ways, ready, sums
        clear()


if __name__ == "__main__":
    main()
