"""The numbers that the protocol has to reach, measured: accuracy over seeds, side by side with what is asked.

    python benchmarks/acceptance.py --seeds 1 2 3 --jobs 2 --out acceptance.jsonl
    python benchmarks/acceptance.py --table acceptance.jsonl

Runs that are in the file already are not repeated. The noise of the image sets is the paper's (RDP, epsilon 2), given
here so that a machine without dp-accounting can run them; with dp-accounting it is checked against epsilon 2. So is its
delta, |D_i|^-1.1. Made by

    noisegate privacy --samples 2999 --rounds 1500 --epsilon 2 --delta paper --accountant rdp     # mnist, fashion
    noisegate privacy --samples 727 --rounds 455 --epsilon 2 --delta paper --accountant rdp       # usps
    noisegate privacy --samples 141 --rounds 267 --epsilon 2 --delta paper --accountant rdp       # digits
"""

import argparse
import json
import multiprocessing
import os
import statistics
from pathlib import Path

SIGMA = {"mnist": 0.7924, "fashion": 0.7924, "usps": 1.082, "digits": 2.754}
ROUNDS = {"mnist": 1500, "fashion": 1500, "usps": 455, "digits": 267}
NORMALIZED = {"name": "two-stage", "server_gradient": "normalized"}


def settings(dataset: str, attack: str, aggregator: object, byzantine: float = 0.6) -> dict[str, object]:
    """A run at epsilon 2 with the paper's noise."""
    sigma = SIGMA[dataset]
    return {
        "dataset": dataset,
        "rounds": ROUNDS[dataset],
        "sigma": sigma,
        "sigma_base": sigma,
        "epsilon": 2.0,
        "delta": "paper",
        "accountant": "rdp",
        "batch": 16,
        "rate": 0.2,
        "attack": attack,
        "byzantine": byzantine,
        "aggregator": aggregator,
    }


def cases() -> dict[str, tuple[dict[str, object], str]]:
    """Name -> (settings, what is asked of the mean accuracy)."""
    asked = {}
    floors = {"fashion": 0.79, "mnist": 0.95, "usps": 0.85, "digits": 0.85}
    for dataset, floor in floors.items():
        asked[f"{dataset} reference"] = (settings(dataset, "none", "mean", 0.0), f"at least {floor}")
    for attack in ("gaussian", "local-poisoning"):
        asked[f"fashion two-stage {attack}"] = (settings("fashion", attack, "two-stage"), "reference - 0.010")
    for attack in ("a-little", "inner"):
        asked[f"fashion two-stage {attack}"] = (settings("fashion", attack, "two-stage"), "none used")
    for dataset in floors:
        flip = settings(dataset, "label-flip", "two-stage")
        asked[f"{dataset} two-stage label-flip"] = (flip, "report")
        flip = settings(dataset, "label-flip", NORMALIZED)
        goal = "reference - 0.015" if dataset in ("fashion", "mnist") else "report"
        asked[f"{dataset} two-stage normalized label-flip"] = (flip, goal)
        goal = "below 0.20" if dataset != "usps" else "report"
        asked[f"{dataset} mean label-flip"] = (settings(dataset, "label-flip", "mean"), goal)
    return asked


def measure(job: tuple[str, dict[str, object], int, int]) -> dict[str, object]:
    """One run."""
    import noisegate

    name, chosen, seed, threads = job
    spec = noisegate.Spec(**chosen, seed=seed)
    result = noisegate.run(spec, compute=noisegate.Compute(threads=threads))
    keep = (
        "accuracy",
        "best_accuracy",
        "honest_rejected",
        "byzantine_selected",
        "sigma",
        "rounds",
        "ms_per_round",
    )
    return {"case": name, "seed": seed, **{key: getattr(result, key) for key in keep}}


def verdict(goal: str, rows: list[dict], reference: float | None) -> str:
    """Whether the mean meets the goal."""
    accuracy = statistics.mean(row["accuracy"] for row in rows)
    if goal == "report":
        return ""
    if goal == "none used":
        used = max(row["byzantine_selected"] for row in rows)
        return "reached" if used == 0 else f"NOT: {used:.2%} used"
    if goal.startswith("below"):
        met = accuracy < float(goal.split()[1])
    elif goal.startswith("at least"):
        met = accuracy >= float(goal.split()[2])
    else:
        met = reference is not None and accuracy >= reference - float(goal.split()[2])
    return "reached" if met else "NOT reached"


def table(rows: list[dict]) -> str:
    """A Markdown table: mean (min to max) over seeds."""
    by_case: dict[str, list[dict]] = {}
    for row in rows:
        by_case.setdefault(row["case"], []).append(row)
    lines = [
        "| run | accuracy | seeds | asked | | honest refused | Byzantine used |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name, (_, goal) in cases().items():
        found = by_case.get(name)
        if not found:
            lines.append(f"| {name} | missing | 0 | {goal} | | | |")
            continue
        base = by_case.get(f"{name.split()[0]} reference")
        reference = statistics.mean(row["accuracy"] for row in base) if base else None
        values = [row["accuracy"] for row in found]
        spread = f"{statistics.mean(values):.3f} ({min(values):.3f} to {max(values):.3f})"
        refused = statistics.mean(row["honest_rejected"] for row in found)
        used = statistics.mean(row["byzantine_selected"] for row in found)
        outcome = verdict(goal, found, reference)
        lines.append(f"| {name} | {spread} | {len(found)} | {goal} | {outcome} | {refused:.1%} | {used:.1%} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--only", default="", help="only cases whose name contains this")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path("acceptance.jsonl"))
    parser.add_argument("--table", type=Path, help="print the table of this file and stop")
    chosen = parser.parse_args()
    if chosen.table:
        print(table([json.loads(line) for line in chosen.table.read_text().splitlines()]))
        return
    rows = [json.loads(line) for line in chosen.out.read_text().splitlines()] if chosen.out.exists() else []
    done = {(row["case"], row["seed"]) for row in rows}
    threads = max(1, (os.cpu_count() or 1) // chosen.jobs)
    jobs = [
        (name, spec, seed, threads)
        for name, (spec, _) in cases().items()
        for seed in chosen.seeds
        if chosen.only in name and (name, seed) not in done
    ]
    with multiprocessing.get_context("spawn").Pool(chosen.jobs) as pool, chosen.out.open("a") as file:
        for row in pool.imap_unordered(measure, jobs):
            file.write(json.dumps(row) + "\n")
            file.flush()
            print(row, flush=True)
            rows.append(row)
    print(table(rows))


if __name__ == "__main__":
    main()
