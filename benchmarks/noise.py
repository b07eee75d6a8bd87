"""How long secret noise takes beside research noise, in one run: the ratio is what counts.

    python benchmarks/noise.py [--workers 50] [--parameters 25450] [--repeats 40]

Both fill the uploads of a round; secret noise also adds the sums and rounds to the grid. One thread.
"""

import argparse
import time
from collections.abc import Callable

import torch

from noisegate.entropy import Secret


def fastest(work: Callable[[], object], repeats: int, device: torch.device) -> float:
    """Seconds of the fastest repetition."""
    best = float("inf")
    for _ in range(repeats):
        began = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize()
        best = min(best, time.perf_counter() - began)
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=50)
    parser.add_argument("--parameters", type=int, default=25_450)
    parser.add_argument("--repeats", type=int, default=40)
    parser.add_argument("--device", default="cpu")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    device = torch.device(asked.device)
    uploads = torch.zeros(asked.workers, asked.parameters, device=device)
    source = Secret(device).source("noise")
    research, secret = float("inf"), float("inf")
    for _ in range(4):  # by turns, so that both meet the same machine
        research = min(research, fastest(lambda: uploads.normal_(0.0, 0.05), asked.repeats, device))
        secret = min(secret, fastest(lambda: source.add_noise(uploads, 0.05), asked.repeats, device))
    each = 1e9 / uploads.numel()
    print(f"research {1e3 * research:.2f} ms ({research * each:.2f} ns a number)")
    print(f"secret   {1e3 * secret:.2f} ms ({secret * each:.2f} ns a number), {secret / research:.2f} times as long")


if __name__ == "__main__":
    main()
