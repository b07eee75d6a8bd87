"""What `sweep` and `reproduce` tell of runs on their way: a bar on a terminal, else lines, and nothing with --json."""

import io
import json
import time
from functools import partial

import pytest
from rich.console import Console

from noisegate import Compute, paper
from noisegate.cli.progress import watched
from noisegate.cli.reproduce import QUICK_SEEDS
from noisegate.paper.outcomes import needed
from noisegate.sweeps.folder import SweepCell, SweepFolder
from noisegate.sweeps.sweep import sweep
from test_resume import PATIENCE

CPU = Compute(device="cpu", threads=1)
GRID = 'rounds = 3\nsigma = 2.5\nsigma_base = 2.5\nepsilon = 2.0\naccountant = "rdp"\n[sweep]\nseed = [1, 2]\n'
REPRODUCE = ("reproduce", "--quick", "--attack", "none", "--seeds", "1")


@pytest.fixture
def quick(quick):
    """The same with the faster accountant."""
    return partial(quick, accountant="rdp")


@pytest.fixture(params=["sweep", "reproduce"])
def command(request, tmp_path):
    """A command of two runs, into the folder `found`."""
    (tmp_path / "grid.toml").write_text(GRID)
    words = ("sweep", "grid.toml") if request.param == "sweep" else REPRODUCE
    return (*words, "--device", "cpu", "--jobs", "1", "--out", "found")


@pytest.fixture
def no_runs(monkeypatch):
    """Every run fails at once, and the last one is interrupted where `.stop` says so; a line for every run."""

    class Played:
        stop = False

        def __call__(self, specs, folder, *, watch, **how):
            print("an attack prints")
            cells = [SweepCell(spec, "failed", None, "out of luck") for spec in specs]
            for cell in cells:
                if self.stop and cell is cells[-1]:
                    raise KeyboardInterrupt
                watch(cell)
            return cells

    played = Played()
    monkeypatch.setattr("noisegate.cli.progress.sweep", played)
    monkeypatch.setattr("noisegate.cli.bar.SILENCE", -1.0)
    return played


def test_the_bar_counts_runs_and_work(tmp_path, quick, monkeypatch):
    monkeypatch.setattr("noisegate.cli.progress.LOOK", 0.01)
    folder, specs = SweepFolder(tmp_path), [quick(seed=seed) for seed in (1, 2, 3)]
    sweep(specs[:1], folder, compute=CPU, jobs=1)
    drawn = io.StringIO()
    console = Console(file=drawn, force_terminal=True, color_system=None, width=120)
    with watched("sweep", console, folder, folder.cells(specs)) as watch:
        with folder.lock(specs[1]) as claim:
            claim.tell(1, 2)
            end = time.monotonic() + PATIENCE
            while "━" * 7 not in drawn.getvalue() and time.monotonic() < end:  # 1.5 of 3 runs: half of 16 cells
                time.sleep(0.05)
            assert "━" * 7 in drawn.getvalue()
            assert "━" * 10 not in drawn.getvalue()
        watch(SweepCell(specs[2], "done", {"accuracy": 0.25}))
    assert "1 of 3 runs" in drawn.getvalue()
    assert "2 of 3 runs" in drawn.getvalue()


def test_without_a_terminal_there_is_a_line_now_and_then(tmp_path, quick, monkeypatch):
    said, now = io.StringIO(), [100.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    specs = [quick(seed=seed) for seed in (1, 2, 3)]
    cells = [SweepCell(spec, "missing") for spec in specs]
    with watched("sweep", Console(file=said, width=200), SweepFolder(tmp_path), cells) as watch:
        now[0] += 14.0
        watch(SweepCell(specs[0], "done", {"accuracy": 0.75}))
        now[0] += 2.0
        watch(SweepCell(specs[1], "failed", None, "why"))
        watch(SweepCell(specs[2], "done", {"accuracy": 0.25}))
    assert said.getvalue() == f"sweep: 2 of 3 runs; {specs[1].name()} failed\n", "15 s after the last"


def test_a_log_file_says_what_begins_and_what_has_ended(cli, command, no_runs):
    found = cli(*command)
    begun, printed, *ended = found.err.splitlines()
    assert begun == f"{command[0]}: 2 runs, 1 at a time, kept in found"
    assert printed == "an attack prints"
    assert [line.split(";")[0] for line in ended] == [f"{command[0]}: {done} of 2 runs" for done in (1, 2)]
    assert all(line.endswith(" failed") for line in ended)
    assert "an attack prints" not in found.out


def test_with_json_there_is_the_object_and_nothing_else(cli, command, no_runs):
    found = cli(*command, "--json")
    assert found.status == 1
    assert found.err == "an attack prints\n"
    assert json.loads(found.out)


def test_an_interrupted_command_says_what_is_kept(cli, command, no_runs):
    no_runs.stop = True
    found = cli(*command)
    assert (found.status, found.out) == (130, "")
    assert found.err.endswith("interrupted: 0 of 2 runs done in found; the same command goes on\n")


def test_a_mistake_is_told_before_anything_is_written(cli, command, tmp_path):
    found = cli(*command, "--jobs", "0")
    assert found.status == 2
    assert "jobs" in found.err
    assert not (tmp_path / "found").exists()


def test_the_list_shows_the_quick_subset_and_counts_it_only_where_it_is_chosen(cli, monkeypatch):
    monkeypatch.setenv("COLUMNS", "300")  # a row is a line
    monkeypatch.setattr("noisegate.runs.estimate.slowness", lambda compute: 1.0)  # which takes a second to measure

    def listed(*arguments):
        found = cli("reproduce", "--list", "--device", "cpu", *arguments)
        assert found.status == 0
        *table, total = found.out.splitlines()
        return [row for row in table if row.startswith("quick ")], total

    quick = paper.load(paper.QUICK, seeds=QUICK_SEEDS)
    runs, others = len(needed(quick)), len(needed(paper.load("guerraoui")))
    for arguments in [("--quick",), ("quick",), ("guerraoui",)]:
        (row,), total = listed(*arguments)
        assert "run by --quick" in row
        assert [str(len(quick.cells)), str(runs)] == row.split()[-4:-2], "cells, runs, about so many minutes"
        assert total.startswith(f"{others} different runs beside quick;" if "guerraoui" in arguments else f"{runs} dif")
    assert listed("clipping", "--dataset", "usps")[0] == [], "it is on digits"
