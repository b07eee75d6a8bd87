"""A rare class under privacy: balanced sampling beside sampling by share, with and without attackers.

    python benchmarks/imbalance.py --out benchmarks/imbalance.csv

Two clouds in ten dimensions, of which class 1 has 5 %; 20 workers of 2,000, 10,000 test examples, epsilon 2. The data
of seed s are made by numpy's generator of seed s, and the run has seed s too. The best balanced accuracy that any model
can have is Phi(2.1 / 2) = 0.853.
"""

import argparse
import csv
import math
import warnings
from dataclasses import replace
from pathlib import Path
from statistics import fmean

import numpy as np
import torch

import noisegate
from noisegate import Compute, Dataset, Spec

WORKERS, EACH, TEST, WIDTH, GAP, SHARE = 20, 2000, 10_000, 10, 2.1, 0.05
ROUNDS = 150

HONEST = {"byzantine": 0.0, "attack": "none"}
FLIPPED = {"byzantine": 0.6, "attack": "label-flip"}
RUNS = {
    "all honest": HONEST,
    "60 % label-flip": FLIPPED,
    "60 % label-flip, plain mean": FLIPPED | {"aggregator": "mean"},
}
COLUMNS = ("workers", "sampling", "seed", "balanced_accuracy", "recall_0", "recall_1", "auc", "accuracy", "epsilon")


def rare(seed: int) -> Dataset:
    """Two clouds that lie GAP deviations apart. All numbers are divided by 4, so that they lie within about 1."""
    rng = np.random.default_rng(seed)

    def draw(count: int) -> tuple[torch.Tensor, torch.Tensor]:
        y = rng.random(count) < SHARE
        x = rng.normal(size=(count, WIDTH)) + y[:, None] * GAP / math.sqrt(WIDTH)
        return torch.tensor(x / 4, dtype=torch.float32), torch.tensor(y).long()

    (x, y), (x_test, y_test) = draw(WORKERS * EACH), draw(TEST)
    return Dataset("rare", x, y, x_test, y_test, classes=2)


def rows(seeds: list[int], rounds: int) -> list[dict[str, object]]:
    """A row for each run: the three above with either sampling, and without noise."""
    found = []
    for seed in seeds:
        data = rare(seed)
        for sampling in ("balanced", "poisson"):
            spec = Spec(dataset="rare", workers=WORKERS, rounds=rounds, seed=seed, sampling=sampling)
            each = {name: replace(spec, **settings) for name, settings in RUNS.items()}
            each["without noise"] = noisegate.noiseless(spec)
            for name, one in each.items():
                result = noisegate.run(one, dataset=data, compute=Compute(device="cpu", threads=1))
                told = {key: value for key, value in vars(result).items() if key in COLUMNS}
                recall = dict(zip(("recall_0", "recall_1"), result.recall or (), strict=True))
                found.append({**told, **recall, "workers": name, "sampling": sampling})
                print(*(found[-1][column] for column in COLUMNS[:4]), flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    warnings.simplefilter("ignore", noisegate.errors.OneClassWarning)  # the table shows it
    found = rows(args.seeds, args.rounds)
    with args.out.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        writer.writerows({column: _short(row[column]) for column in COLUMNS} for row in found)
    for name, sampling in sorted({(str(row["workers"]), str(row["sampling"])) for row in found}):
        some = [
            float(row["balanced_accuracy"]) for row in found if (row["workers"], row["sampling"]) == (name, sampling)
        ]
        print(f"{name}, {sampling}: balanced accuracy {fmean(some):.3f}, lowest {min(some):.3f}")


def _short(value: object) -> object:
    return f"{value:.4f}" if isinstance(value, float) else value


if __name__ == "__main__":
    main()
