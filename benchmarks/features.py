"""What features are worth: accuracy against epsilon for the paper, our defaults, features, and without privacy.

    python benchmarks/features.py --out benchmarks/features.csv
    python benchmarks/features.py --device cuda --part 1/4 --out part1.csv
    python benchmarks/features.py --tables benchmarks/features.csv
    python benchmarks/features.py --plot benchmarks/features.csv --to benchmarks/features.svg
    python benchmarks/features.py --time 60000 --device cuda

The runs are those of features.toml. What is in the file named by --out already is not run again. With --part several
processes share the work, each with a file of its own; --tables and --plot take several. --time says how long the
features of so many pictures of 28 x 28 take.
"""

import argparse
import statistics
import sys
import time
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

from features_plot import svg  # noqa: E402
from noisegate import Compute  # noqa: E402
from noisegate.features import Scattering, embed  # noqa: E402
from noisegate.runs import Spec, make_spec, reference  # noqa: E402
from noisegate.sweeps.pool import Pool, batches, left_of_part  # noqa: E402
from withstand import Row, label, measure, read  # noqa: E402

BELOW = 0.01
"""How far below its reference a run that is attacked may be."""


class Cell(NamedTuple):
    """One data set at one epsilon. own: our defaults; features: the same with features.

    attacked: with features, by attack and by aggregator.
    """

    data: str
    epsilon: float
    paper: float | None
    asked: float | None
    own: list[Spec]
    features: list[Spec]
    attacked: dict[str, dict[str, list[Spec]]]

    @property
    def under_attack(self) -> list[Spec]:
        """All runs under attack."""
        return [one for several in self.attacked.values() for some in several.values() for one in some]


def cells(path: Path) -> list[Cell]:
    """Every cell of the table."""
    content = tomllib.loads(path.read_text(encoding="utf-8"))
    found = []
    for name, data in content["data"].items():
        for epsilon in content["epsilons"]:
            key = f"{epsilon:g}"
            common = {"dataset": name, "epsilon": epsilon, "byzantine": content["byzantine"]}
            common |= {"delta": data["delta"]} if "delta" in data else {}
            common |= {"sigma": data["noise"][key], "sigma_base": data["noise"]["2"]}
            with_features = common | {"features": features_of(content, name)} | data.get("settings", {}).get(key, {})
            plain = [make_spec(common | {"seed": seed}) for seed in content["seeds"]]
            made = [make_spec(with_features | {"seed": seed}) for seed in content["seeds"]]
            attacked = {
                label(attack): {
                    label(aggregator): [
                        make_spec(one.canonical() | {"attack": attack, "aggregator": aggregator}) for one in made
                    ]
                    for aggregator in content["aggregators"]
                }
                for attack in content["attacks"]
            }
            own, features = [reference(one) for one in plain], [reference(one) for one in made]
            paper, asked = (data.get(word, {}).get(key) for word in ("paper", "asked"))
            found.append(Cell(name, epsilon, paper, asked, own, features, attacked))
    return found


def filter_of(spec: Spec) -> str:
    """The aggregator of a run, as the tables name it."""
    part = spec.canonical()["aggregator"]
    return label(part if len(part) > 1 else part["name"])


def features_of(content: Mapping[str, Any], name: str) -> str:
    """The features of a data set."""
    return str(content["data"][name].get("features", content["features"]))


def without_privacy(path: Path) -> dict[str, list[Spec]]:
    """Features without noise, by data set: what is left to gain."""
    content = tomllib.loads(path.read_text(encoding="utf-8"))
    return {
        name: [
            reference(make_spec({"dataset": name, "sigma": 0.0, "seed": seed, "features": features_of(content, name)}))
            for seed in content["seeds"]
        ]
        for name in content["data"]
    }


def wanted(path: Path) -> list[Spec]:
    """Every run once, the references first."""
    every = cells(path)
    specs = [one for cell in every for one in (*cell.features, *cell.own)]
    specs += [one for some in without_privacy(path).values() for one in some]
    specs += [one for cell in every for one in cell.under_attack]
    return list({one.name(): one for one in specs}.values())


def mean_of(specs: Sequence[Spec], rows: Mapping[str, Row]) -> float | None:
    """The mean accuracy; None if a run is missing."""
    found = [rows[one.name()]["accuracy"] for one in specs if rows.get(one.name(), {}).get("accuracy")]
    return statistics.mean(map(float, found)) if len(found) == len(specs) else None


def shown(value: float | None) -> str:
    """A mean, as people write it."""
    return "missing" if value is None else f"{value:.3f}"


def markdown(path: Path, rows: Mapping[str, Row]) -> str:
    """The table of runs without attackers."""
    lines = [
        "| data | epsilon | paper | our defaults | features | asked | |",
        "| --- | ---: | ---: | ---: | ---: | ---: | --- |",
    ]
    for cell in cells(path):
        own, features = mean_of(cell.own, rows), mean_of(cell.features, rows)
        asked = cell.asked if cell.asked is not None else own  # digits: better than our defaults
        columns = [cell.data, f"{cell.epsilon:g}", "" if cell.paper is None else f"{cell.paper:.2f}", shown(own)]
        columns += [shown(features), "" if cell.asked is None else f"{cell.asked:.2f}", reached(asked, features)]
        lines.append(f"| {' | '.join(columns)} |")
    return "\n".join(lines) + "\n"


def attacks_markdown(path: Path, rows: Mapping[str, Row]) -> str:
    """The table of runs with features under attack: how far each aggregator is below the same without attackers.

    With fewer seeds than asked, what was run is compared with the references of the same seeds.
    """
    every = cells(path)
    aggregators = list(next(iter(every[0].attacked.values())))
    names = ["data", "epsilon", "attack", "seeds", "without attackers"]
    names += [word for name in aggregators for word in (name, "below", "")]
    lines = [f"| {' | '.join(names)} |".replace("|  |", "| |")]
    lines.append(f"| {' | '.join('---' if name in ('data', 'attack', '') else '---:' for name in names)} |")
    for cell in every:
        for attack, several in cell.attacked.items():
            run = [seed for seed in range(len(cell.features)) if any(s[seed].name() in rows for s in several.values())]
            if not run:
                lines.append(f"| {cell.data} | {cell.epsilon:g} | {attack} |{' missing |' * (len(names) - 3)}")
                continue
            clean = mean_of([cell.features[seed] for seed in run], rows)
            columns = [cell.data, f"{cell.epsilon:g}", attack, str(len(run)), shown(clean)]
            for some in several.values():
                found = mean_of([some[seed] for seed in run], rows)
                below = clean - found if clean is not None and found is not None else None
                columns += [shown(found), "missing" if below is None else f"{100 * below:.1f}"]
                columns.append(reached(below, BELOW))
            lines.append(f"| {' | '.join(columns)} |")
    return "\n".join(lines) + "\n"


def reached(least: float | None, found: float | None) -> str:
    """Whether a value is at least as large as another, rounded as the table shows them."""
    if least is None or found is None:
        return "missing"
    return "reached" if round(found, 3) >= round(least, 3) else "**not reached**"


def panels(path: Path, rows: Mapping[str, Row]) -> dict[str, dict[str, list[tuple[float, float]]]]:
    """What is plotted: for each data set with a number of the paper's the lines by name."""
    free = {name: mean_of(some, rows) for name, some in without_privacy(path).items()}
    found: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for cell in cells(path):
        if cell.paper is None:
            continue
        lines = found.setdefault(cell.data, {})
        points: dict[str, float | None] = {
            "the paper": cell.paper,
            "our defaults": mean_of(cell.own, rows),
            "features": mean_of(cell.features, rows),
            "features, no privacy": free[cell.data],
        }
        for name, value in points.items():
            if value is not None:
                lines.setdefault(name, []).append((cell.epsilon, value))
    return found


def time_features(count: int, device: str) -> None:
    """Say how long the features of so many pictures take."""
    where = Compute(device=device).resolve()
    pictures = torch.rand(count, 1, 28, 28)
    embed(Scattering(), pictures[:64], where)
    began = time.perf_counter()
    embed(Scattering(), pictures, where)
    seconds = time.perf_counter() - began
    print(f"{count} pictures on {where}, {torch.get_num_threads()} threads: {seconds:.1f} s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--spec", type=Path, default=HERE / "features.toml")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--jobs", type=int, help="runs at a time; default: as many as cores, on CUDA 16")
    parser.add_argument("--part", default="1/1", help="of the runs, as 2/4")
    parser.add_argument("--minutes", type=float, default=1e9, help="start nothing new after that")
    parser.add_argument("--only", default="", help="data sets, as fashion,usps")
    parser.add_argument("--aggregators", help="of the runs under attack only these, as fortified,two-stage")
    parser.add_argument("--references", action="store_true", help="only the runs without attackers")
    parser.add_argument("--own", action=argparse.BooleanOptionalAction, default=True, help="also our defaults")
    parser.add_argument("--out", type=Path, default=Path("features.csv"))
    parser.add_argument("--known", type=Path, nargs="*", default=[], help="files whose runs are not repeated either")
    parser.add_argument("--tables", type=Path, nargs="+", help="print the table of these files and stop")
    parser.add_argument("--plot", type=Path, nargs="+", help="plot these files and stop")
    parser.add_argument("--to", type=Path, default=Path("features.svg"), help="the file of the plot")
    parser.add_argument("--time", type=int, help="say how long so many pictures take, and stop")
    chosen = parser.parse_args()
    if chosen.tables:
        print(markdown(chosen.spec, read(chosen.tables)))
        print(attacks_markdown(chosen.spec, read(chosen.tables)))
    elif chosen.plot:
        chosen.to.write_text(svg(panels(chosen.spec, read(chosen.plot))), encoding="utf-8")
    elif chosen.time:
        time_features(chosen.time, chosen.device)
    else:
        run(chosen)


def run(chosen: Any) -> None:
    """Run what is not done yet. Runs of one data set stand together, so that its features are computed once."""
    only = chosen.only.split(",") if chosen.only else None
    specs = [one for one in wanted(chosen.spec) if only is None or one.dataset in only]
    if not chosen.own:
        specs = [one for one in specs if one.features is not None]
    if chosen.references:
        specs = [one for one in specs if one.byzantine == 0]
    if chosen.aggregators:
        asked = chosen.aggregators.split(",")
        specs = [one for one in specs if one.byzantine == 0 or filter_of(one) in asked]
    pool = Pool(Compute(device=chosen.device), chosen.jobs)
    left = left_of_part(specs, chosen.part, pool.jobs, read([chosen.out, *chosen.known]))
    order = list(dict.fromkeys((one.byzantine > 0, one.dataset) for one in left))
    alike = [[one for one in left if (one.byzantine > 0, one.dataset) == key] for key in order]
    measure(
        [[some[i] for i in batch] for some in alike for batch in batches(some, pool.jobs)],
        pool,
        chosen.out,
        chosen.minutes,
    )


if __name__ == "__main__":
    main()
