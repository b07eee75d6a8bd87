"""`noisegate data`: where the data sets are, whether they are whole, how to get them, and what is in them."""

import json
import sys
import warnings

import typer

from noisegate import checks
from noisegate.cli.data_table import show_description
from noisegate.data import SOURCES, Columns, describe, fetch, load, verify
from noisegate.errors import NoisegateWarning
from noisegate.streams import stream


def list_data(as_json: bool) -> None:
    """Every data set, whether it is here, its license."""
    found = {
        name: {"here": all(status == "ok" for _, status in verify(name)), "license": source.license}
        for name, source in SOURCES.items()
    }
    if as_json:
        print(json.dumps(found, indent=2))
        return
    for name, entry in found.items():
        print(f"{name:11} {'here' if entry['here'] else 'missing':8} {entry['license']}")


def verify_data(name: str | None, as_json: bool) -> None:
    """Check the files' sums; exit status 1 if a file is missing or damaged."""
    found = {each: dict(verify(each)) for each in _names(name)}
    if as_json:
        print(json.dumps(found, indent=2))
    else:
        for each, files in found.items():
            for file, status in files.items() or {"(embedded)": "ok"}.items():
                print(checks.plain(f"{each:11} {file:28} {status}"))
    if any(status != "ok" for files in found.values() for status in files.values()):
        raise typer.Exit(1)


def fetch_data(name: str | None, as_json: bool) -> None:
    """Download from the data sets' public homes and check the sums."""
    names = _names(name)
    if name is None:  # a name asked for is an error if it cannot be fetched; of all, the rest is still wanted
        names = [each for each in names if not SOURCES[each].by_hand]
        left_out = ", ".join(each for each in SOURCES if each not in names)
        print(f"to be made by hand: {left_out}; see `noisegate data fetch {left_out}`", file=sys.stderr)
    found = {each: [str(path) for path in fetch(each)] for each in names}
    if as_json:
        print(json.dumps(found, indent=2))
    else:
        print("\n".join(path for paths in found.values() for path in paths))


def show_data(name: str, label_column: str | None, worker_column: str | None, seed: int, as_json: bool) -> None:
    """What a run would understand of a data set: examples, classes, workers, range, test part, and what looks odd."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NoisegateWarning)  # which are among the hints below
        found = describe(load(name, stream(seed, "test-split"), Columns(label_column, worker_column)))
    if as_json:
        print(json.dumps(found, indent=2))
    else:
        show_description(found)


def _names(name: str | None) -> list[str]:
    if name is None:
        return list(SOURCES)
    checks.one_of(SOURCES, name=name)
    return [name]
