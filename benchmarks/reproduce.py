"""The runs behind docs/reproducing.md, on a machine that may have neither the command line nor dp-accounting.

    python benchmarks/reproduce.py --device cuda --out reproduced.csv
    python benchmarks/reproduce.py --device cuda --part 1/4 --out part1.csv
    python benchmarks/reproduce.py --merge part1.csv part2.csv --out reproduced.csv
    noisegate reproduce --from reproduced.csv --docs reproducing.md

The runs are those of reproduce.toml, or of another file (--spec), whose entries may also have `seeds` and an
`aggregator`. What is in the file named by --out or --known already is not run again. With
--part several processes share the work, each with a file of its own.
"""

import argparse
import time
import tomllib
from collections.abc import Sequence
from pathlib import Path
from uuid import uuid4

from noisegate import Compute, paper
from noisegate.paper.outcomes import Record, from_csv, needed, to_csv
from noisegate.runs import Spec, run_together
from noisegate.runs.store import environment, write_whole
from noisegate.sweeps.outcome import broken
from noisegate.sweeps.pool import SIDE_BY_SIDE, batches, halved, left_of_part

HERE = Path(__file__).parent


def wanted(path: Path) -> list[Spec]:
    """Every run once."""
    every: dict[str, Spec] = {}
    for entry in tomllib.loads(path.read_text(encoding="utf-8"))["runs"]:
        how = {key: entry.pop(key) for key in ("aggregator", "seeds") if key in entry}
        experiment = paper.load(entry.pop("experiment"), only=entry, **how)
        every |= {spec.name(): spec for spec in needed(experiment) if spec.name() not in every}
    return list(every.values())


def records(specs: Sequence[Spec], compute: Compute) -> list[Record]:
    """What comes of them, where and with what."""
    place = environment(compute.resolve())
    versions = ", ".join(f"{name} {place['packages'][name]}" for name in ("noisegate", "torch"))

    def together(some: Sequence[Spec]) -> list[Record]:
        results = run_together(some, compute=compute)
        return [
            Record(
                run=spec.name(),
                status="done",
                accuracy=result.accuracy,
                honest_rejected=result.honest_rejected,
                byzantine_selected=result.byzantine_selected,
                seconds=result.seconds,
                device=place["device"],
                versions=versions,
            )
            for spec, result in zip(some, results, strict=True)
        ]

    def one(spec: Spec) -> Record:
        try:
            return together([spec])[0]
        except Exception as error:  # noqa: BLE001  # the others go on without it
            outcome = broken(error)
            return Record(spec.name(), outcome.status, message=outcome.message)

    return halved(specs, together, one)


def write(path: Path, found: dict[str, Record]) -> None:
    write_whole(path, to_csv(found.values()).encode(), f".{path.name}.{uuid4().hex}.part")


def read(paths: Sequence[Path]) -> dict[str, Record]:
    """By the name of the run."""
    found: dict[str, Record] = {}
    for path in paths:
        for name, record in from_csv(path.read_text(encoding="utf-8"), str(path)).items():
            if name not in found or found[name].status != "done":  # what ended counts, wherever it did
                found[name] = record
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--spec", type=Path, default=HERE / "reproduce.toml")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--jobs", type=int, default=SIDE_BY_SIDE, help="runs side by side on a CUDA device")
    parser.add_argument("--part", default="1/1", help="of the runs, as 2/4")
    parser.add_argument("--minutes", type=float, default=1e9, help="start nothing new after that")
    parser.add_argument("--only", default="", help="data sets, as fashion,usps")
    parser.add_argument("--out", type=Path, default=Path("reproduced.csv"))
    parser.add_argument("--known", type=Path, nargs="*", default=[], help="files whose runs are not repeated either")
    parser.add_argument("--merge", type=Path, nargs="+", help="write the runs of these files to --out and stop")
    chosen = parser.parse_args()
    if chosen.merge:
        write(chosen.out, read(chosen.merge))
        return
    mine = read([chosen.out]) if chosen.out.exists() else {}
    done = {name for name, record in (read(chosen.known) | mine).items() if record.status != "failed"}
    specs = [spec for spec in wanted(chosen.spec) if not chosen.only or spec.dataset in chosen.only.split(",")]
    began, compute = time.perf_counter(), Compute(device=chosen.device)
    left = left_of_part(specs, chosen.part, chosen.jobs, done)
    todo = [[left[i] for i in batch] for batch in batches(left, chosen.jobs)]
    for number, batch in enumerate(todo, 1):
        if time.perf_counter() - began > 60 * chosen.minutes:
            print(f"{sum(map(len, todo[number - 1 :]))} runs are left: the time is over", flush=True)
            return
        mine |= {record.run: record for record in records(batch, compute)}
        write(chosen.out, mine)
        seconds = time.perf_counter() - began
        like = f"{batch[-1].dataset}, {batch[-1].byzantine:.0%} {paper.label(batch[-1].attack)}"
        print(f"batch {number} of {len(todo)}, {seconds:.0f} s: {len(batch)} like {like}", flush=True)


if __name__ == "__main__":
    main()
