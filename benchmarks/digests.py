"""Whether a change of the code changed what a run gives: sha256 of the files of short runs, against committed ones.

    python benchmarks/digests.py            # exit 1 if a run gives other bytes than digests.json says
    python benchmarks/digests.py --write    # make digests.json anew

The runs cover every attack, aggregator and worker, on one CPU thread. The digests are those of one kind of CPU and one
version of torch: another rounds differently. So make them at the code before a change, and compare after it.

Left out of a result are its times, its checksums, and the keys of `ADDED`, which are younger than the digests.
"""

import argparse
import hashlib
import json
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

import noisegate
from noisegate import Compute, Dataset, Spec

FILE = Path(__file__).with_suffix(".json")
TIMES = ("seconds", "ms_per_round", "sha256")
"""The last is the file's own checksum, which its times change."""

SUMS = ("files",)
"""The checksums of the other files, of which rounds.jsonl and the model are looked at here. verdicts.npz may grow."""

ADDED = (
    *("byzantine_weight", "missing", "recall", "attack_success", "fallback"),
    *("balanced_accuracy", "majority_share", "confusion", "auc", "metrics", "worker_accuracy"),
)
"""Keys of a result that are younger than the digests."""

ROUNDS = 12
SIGMA = {"sigma": 2.5, "sigma_base": 2.0}


@dataclass(frozen=True)
class Case:
    """One run: settings of its spec, and data and model that are not in the catalog."""

    settings: dict[str, Any]
    inputs: dict[str, Any] = field(default_factory=dict)


def pictures(shape: tuple[int, ...], count: int = 320) -> Dataset:
    """Random pictures of four classes."""
    rng = torch.Generator().manual_seed(5)
    y = torch.arange(count) % 4
    x = torch.randn(count, *shape, generator=rng) + y.view(-1, *(1 for _ in shape)) / 4
    train = count - 40
    return Dataset("mine", x[:train], y[:train], x[train:], y[train:], classes=4)


def own_module() -> nn.Module:
    """A module without a closed form: its layer norm has parameters."""
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return nn.Sequential(nn.Flatten(), nn.Linear(36, 12), nn.LayerNorm(12), nn.ELU(), nn.Linear(12, 4))


def cases() -> dict[str, Case]:
    """Every run by its name."""
    few, majority = {"byzantine": 0.2}, {"byzantine": 0.6}
    found = {
        "calibrated": Case({"epsilon": 2.0, "rounds": 8}),
        "no-attack": Case({**SIGMA, **majority, "attack": "none", "aggregator": "fortified"}),
        "no-byzantine": Case({**SIGMA, "byzantine": 0.0, "attack": "none", "aggregator": "mean"}),
        "no-noise": Case({"sigma": 0.0, **few, "attack": "inner", "aggregator": "median"}),
        "fixed": Case({**SIGMA, **few, "sampling": "fixed", "accountant": "rdp", "aggregator": "two-stage"}),
        "non-iid": Case({**SIGMA, **majority, "non_iid": True, "attack": "label-flip"}),
        "dirichlet": Case({**SIGMA, **majority, "dirichlet": 1.0, "batch": 4, "attack": "score-banking"}),
        "late": Case({**SIGMA, **majority, "attack": "gaussian", "attack_start": 0.5, "attack_asleep": "copy"}),
        "stage-one": Case({**SIGMA, **majority, "attack": "zero", "aggregator": {"name": "two-stage", "stages": 1}}),
        "normalized-gradient": Case(
            {
                **SIGMA,
                **majority,
                "attack": "rank-matched",
                "aggregator": {
                    "name": "two-stage",
                    "server_gradient": "normalized",
                    "server_momentum": 0.5,
                    "divisor": "workers",
                },
                "gamma": 0.3,
            }
        ),
        "cnn": Case(
            {**SIGMA, **majority, "rounds": 4, "dataset": "mine", "model": "cnn", "workers": 4, "attack": "trojan"},
            {"dataset": pictures((1, 28, 28))},
        ),
        "residual": Case(
            {**SIGMA, **few, "rounds": 3, "dataset": "mine", "model": "residual", "workers": 4, "aggregator": "krum"},
            {"dataset": pictures((3, 12, 12), 200)},
        ),
        "own-module": Case(
            {**SIGMA, **majority, "dataset": "mine", "workers": 4, "attack": "gradient-ascent"},
            {"dataset": pictures((6, 6)), "model": own_module()},
        ),
        "attack/zero-fortified": Case({**SIGMA, **majority, "attack": "zero"}),
        "attack/none": Case({**SIGMA, **few, "attack": "none", "aggregator": "two-stage"}),
    }
    attacks = (
        ("nan", "fortified"),
        ("large-norm", "two-stage"),
        ("gaussian", "two-stage"),
        ("label-flip", "fortified"),
        ("gradient-ascent", "fortified"),
        ("sign-flip", "fltrust"),
        ("mimic", "fortified"),
        ("local-poisoning", "two-stage"),
        ("a-little", "fortified"),
        ("inner", "fortified"),
        ("min-max", "centered-clipping"),
        ("min-sum", "spectral-filter"),
        ("fang-krum", "multi-krum"),
        ("fang-trimmed-mean", "trimmed-mean"),
        ("a-little-tuned", "geometric-median"),
        ("inner-tuned", "fortified"),
        ("on-off", "fortified"),
        ("dormant", "two-stage"),
    )
    for attack, aggregator in attacks:
        share = majority if aggregator in ("fortified", "two-stage", "fltrust") else few
        found[f"attack/{attack}"] = Case({**SIGMA, **share, "attack": attack, "aggregator": aggregator})
    for aggregator in ("mda", "bulyan", "median", "sign-vote", "nnm", "bucketing", "guerraoui", "sign-gaussian"):
        found[f"aggregator/{aggregator}"] = Case({**SIGMA, **few, "attack": "sign-flip", "aggregator": aggregator})
    for aggregator in ("sign-randomized", "ma-sign"):
        found[f"aggregator/{aggregator}"] = Case(
            {"sigma": 90.0, "sigma_base": 90.0, **few, "attack": "label-flip", "aggregator": aggregator}
        )
    found["worker/clipped"] = Case(
        {**SIGMA, **majority, "worker": {"name": "clipped", "threshold": 0.5, "momentum": 0.2}}
    )
    return found


def digest(case: Case, folder: Path) -> dict[str, str]:
    """sha256 of result.json (without times), rounds.jsonl and the model that a run leaves."""
    settings = {"rounds": ROUNDS, "seed": 7, "evaluate_every": 3, **case.settings}
    noisegate.run(Spec(**settings), compute=Compute(device="cpu", threads=1), out=folder, **case.inputs)
    result = json.loads((folder / "result.json").read_text())
    for key in (*TIMES, *SUMS, *ADDED):
        result.pop(key, None)
    files = {
        "result.json": json.dumps(result, sort_keys=True).encode(),
        "rounds.jsonl": (folder / "rounds.jsonl").read_bytes(),
        "model.safetensors": (folder / "model.safetensors").read_bytes(),
    }
    return {name: hashlib.sha256(data).hexdigest() for name, data in files.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="make digests.json anew instead of comparing with it")
    write = parser.parse_args().write
    known = {} if write else json.loads(FILE.read_text())
    found, wrong = {}, 0
    for name, case in cases().items():
        with tempfile.TemporaryDirectory() as folder:
            found[name] = digest(case, Path(folder) / "run")
        differ = [] if write else [file for file in found[name] if found[name][file] != known.get(name, {}).get(file)]
        wrong += bool(differ)
        print(f"{name:28} {'differs: ' + ', '.join(differ) if differ else 'written' if write else 'equal'}", flush=True)
    if write:
        FILE.write_text(json.dumps(found, indent=1) + "\n")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
