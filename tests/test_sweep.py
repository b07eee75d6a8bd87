"""Sweeps: what a grid is, what is kept, and that neither a kill nor a second sweep loses or doubles a run."""

import csv
import json
import signal
import sys
import threading
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from conftest import saved_rounds, sealed
from noisegate import Compute, Spec, run, run_together
from noisegate.sweeps import play as play_module
from noisegate.sweeps import sweep as sweep_module
from noisegate.sweeps.folder import RunLock, SweepCell, SweepFolder
from noisegate.sweeps.grid import MOST_RUNS
from noisegate.sweeps.outcome import Outcome
from noisegate.sweeps.play import BUSY, play_one, play_several
from noisegate.sweeps.sweep import _cell_after, read_sweep, sweep
from test_resume import PATIENCE, contents

CPU = Compute(device="cpu", threads=1)
FLAGS = ("--device", "cpu", "--jobs", "1")
HEAD = (
    'rounds = 3\nworkers = 4\nsigma = 2.5\nsigma_base = 2.5\nepsilon = 2.0\ndelta = "paper"\n'
    'batch = 16\nrate = 0.2\naccountant = "rdp"\n'
)
LONG = HEAD.replace("2.5", "40.0") + 'evaluate_every = 20\nattack = "zero"\n'
"""To be interrupted."""

COUNTED = '''
import os, pathlib, time
from dataclasses import dataclass
from noisegate.attacks import Honest

HERE = pathlib.Path(__file__).parent

@dataclass(frozen=True)
class Counted(Honest):
    """Leaves a line for each run that begins; fails where a file `broken` is; waits for `both` processes."""

    def check(self, honest, byzantine):
        with (HERE / "begun").open("a") as file:
            file.write(f"{os.getpid()}\\\\n")
        if (HERE / "broken").exists() and honest == 5:
            raise RuntimeError("out of luck")
        while (HERE / "both").exists() and len(set((HERE / "begun").read_text().split())) < 2:
            time.sleep(0.01)
'''.replace("\\\\n", "\\n")


@pytest.fixture
def quick(quick):
    """The same with the faster accountant."""
    return partial(quick, accountant="rdp")


@pytest.fixture
def grid(tmp_path):
    """Writes a sweep's file."""

    def write(text: str, name: str = "grid.toml") -> Path:
        path = tmp_path / name
        path.write_text(text)
        return path

    return write


@pytest.fixture
def begun(tmp_path, monkeypatch):
    """An attack that counts, and how often each process began a run."""
    place = tmp_path / "own"
    place.mkdir()
    (place / "counted_attack.py").write_text(COUNTED)
    monkeypatch.syspath_prepend(str(place))
    yield lambda: (place / "begun").read_text().split() if (place / "begun").exists() else []
    sys.modules.pop("counted_attack", None)


COUNTING = HEAD + 'attack = "counted_attack:Counted"\n'

# --- the file


def test_a_grid_has_all_combinations_the_last_setting_fastest(grid):
    path = grid(HEAD + "seed = 9\n[sweep]\nbyzantine = [0.2, 0.5]\nseed = [3, 1, 2]\n")
    specs = read_sweep(path)
    assert [(spec.byzantine, spec.seed) for spec in specs] == [(b, s) for b in (0.2, 0.5) for s in (3, 1, 2)]
    noise = {"sigma": 2.5, "sigma_base": 2.5, "epsilon": 2.0, "delta": "paper", "accountant": "rdp"}
    base = Spec(rounds=3, workers=4, batch=16, rate=0.2, **noise)
    assert specs[0] == replace(base, byzantine=0.2, seed=3)


def test_values_may_be_tables_and_equal_runs_are_one(grid):
    path = grid(
        HEAD + '[sweep]\nattack = ["zero", { name = "gaussian", scale = 2.0 }, { name = "zero" }]\n'
        "attack_start = [0.0, 0]\nbyzantine = [0.5]\n"
    )
    specs = read_sweep(path)
    assert [spec.canonical()["attack"] for spec in specs] == [{"name": "zero"}, {"name": "gaussian", "scale": 2.0}]
    assert len({spec.name() for spec in specs}) == 2


BAD = [
    ("seed = 1\n", "grid.toml: has no [sweep]", "noisegate run"),
    ("[sweep]\n", "grid.toml: has no [sweep]"),
    ("sweep = 3\n", "grid.toml: has no [sweep]"),
    ("[sweep]\nseed = []\n", "sweep.seed = []: must be a list of one or more values"),
    ("[sweep]\nseed = 3\n", "sweep.seed = 3: must be a list"),
    ("[sweep]\nseeds = [1]\n", "sweep.seeds = [1]: unknown setting (did you mean 'seed'?)", "choose from dataset"),
    ("[sweep]\ndevice = ['cpu']\n", "sweep.device", "--device"),
    ("sede = 1\n[sweep]\nrounds = [1]\n", "sede = 1: unknown setting (did you mean 'seed'?)"),
    ("byzantine = [0.1]\n[sweep]\nseed = [1]\n", "byzantine = [0.1]: is a list outside of [sweep]; move it there"),
    ("[sweep]\nseed = [1, 'two']\n", "seed = 'two': must be a whole number", "in the run with seed = 'two'"),
    ("[sweep]\nattack = ['zero', 'zeroo']\nseed = [1, 2]\n", "did you mean 'zero'?", "attack = 'zeroo', seed = 1"),
    (f"[sweep]\nseed = {list(range(400))}\nrounds = {list(range(1, 300))}\n", f"more than {MOST_RUNS}"),
    ("[sweep\n", "is not valid TOML"),
]


def test_a_bad_file_is_one_readable_line(cli, grid, tmp_path):
    for text, *parts in BAD:
        answer = cli("sweep", grid(text), "--out", "found")
        assert (answer.status, answer.out) == (2, ""), text
        assert answer.err.startswith("noisegate: "), text
        assert answer.err.count("\n") == 1, text
        assert all(part in answer.err for part in parts), answer.err
        assert not (tmp_path / "found").exists(), text


@pytest.mark.parametrize(
    ("flags", "part"),
    [
        (["--engine", "dask"], "engine = 'dask': unknown; choose from local, ray"),
        (["--jobs", "0"], "jobs = 0: must be a whole number"),
        (["--device", "tpu"], "device = 'tpu'"),
        (["--out", "taken"], "taken: is not empty and holds no sweep"),
        (["--out", "taken/thesis.tex"], "thesis.tex: cannot be used"),
    ],
)
def test_bad_flags_are_one_readable_line(cli, grid, tmp_path, flags, part):
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "thesis.tex").touch()
    answer = cli("sweep", grid(HEAD + "[sweep]\nseed = [1]\n"), *flags)
    assert (answer.status, answer.out) == (2, "")
    assert part in answer.err
    assert answer.err.count("\n") == 1
    assert [entry.name for entry in (tmp_path / "taken").iterdir()] == ["thesis.tex"]


# --- runs


def test_a_sweep_leaves_what_run_leaves(cli, grid, tmp_path):
    text = HEAD + '[sweep]\nattack = ["zero", { name = "gaussian", scale = 2.0 }]\nseed = [1, 2]\n'
    answer = cli("sweep", grid(text, "mine.toml"), *FLAGS, "--json")
    assert (answer.status, answer.err) == (0, "")
    found = answer.json
    assert found["out"] == "runs/sweep-mine"
    assert (found["runs"], found["done"], found["failed"], found["skipped"]) == (4, 4, 0, 0)
    assert (tmp_path / "runs" / "sweep-mine" / "sweep.toml").read_text() == text
    for cell in found["cells"]:
        folder = tmp_path / cell["folder"]
        one = cli("run", folder / "spec.toml", "--device", "cpu", "--out", "one", "--no-baselines", "--json")
        assert one.json["accuracy"] == cell["accuracy"]
        assert contents(tmp_path / "one") == contents(folder)
        (tmp_path / "one").rename(tmp_path / cell["name"])
    spread = found["accuracy"]
    assert [line["settings"] for line in spread] == [
        {"attack": {"name": "zero"}},
        {"attack": {"name": "gaussian", "scale": 2.0}},
    ]
    of_zero = [cell["accuracy"] for cell in found["cells"][:2]]
    assert spread[0] | {"settings": 0} == {
        "settings": 0,
        "runs": 2,
        "done": 2,
        "mean": sum(of_zero) / 2,
        "min": min(of_zero),
        "max": max(of_zero),
    }


def test_people_see_a_table(cli, grid):
    path = grid(HEAD + '[sweep]\nattack = ["zero", { name = "gaussian", scale = 2.0 }]\nworkers = [4]\nseed = [1, 2]\n')
    answer = cli("sweep", path, *FLAGS, "--dry-run")
    assert "4 runs; nothing was run" in answer.out
    answer = cli("sweep", path, *FLAGS)
    assert answer.status == 0
    assert answer.err.startswith("sweep: 4 runs, 1 at a time, kept in runs/sweep-grid")
    lines = [line.split() for line in answer.out.splitlines()]
    assert lines[0] == ["attack", "mean", "min", "max", "seeds", "worst", "class"]
    assert lines[1][0] == "zero"
    assert lines[1][-2] == "2"
    assert lines[2][:3] == ["gaussian", "(scale", "2.0)"]
    assert lines[-1] == ["kept", "in", "runs/sweep-grid"]
    again = cli("sweep", path, *FLAGS)
    assert again.out == answer.out
    assert "4 of them done already" in again.err


def test_a_sweep_as_a_csv_file_has_a_line_for_each_run(cli, grid, tmp_path):
    lists = '[sweep]\nattack = ["zero", {name = "gaussian", scale = 2.0}]\nworkers = [4, 1]\nseed = [1]\n'
    path = grid(HEAD.replace("workers = 4\n", 'aggregator = "krum"\nbyzantine = 0.2\n') + lists)
    found = cli("sweep", path, *FLAGS, "--csv", tmp_path / "tables" / "runs.csv", "--json").json
    with (tmp_path / "tables" / "runs.csv").open(newline="") as file:
        lines = list(csv.DictReader(file))
    assert [(line["attack"], line["workers"], line["status"]) for line in lines] == [
        ("zero", "4", "done"),
        ("zero", "1", "skipped"),
        ("gaussian (scale 2.0)", "4", "done"),
        ("gaussian (scale 2.0)", "1", "skipped"),
    ]
    for line, cell in zip(lines, found["cells"], strict=True):
        assert line["folder"] == cell["folder"]
        if cell["status"] == "done":
            assert float(line["accuracy"]) == cell["accuracy"]
            assert float(line["lowest_recall"]) == min(value for value in cell["recall"] if value is not None)
            assert 0 < float(line["epsilon"]) <= 2
            assert (line["rounds"], line["message"]) == ("3", "")
        else:
            assert line["accuracy"] == line["lowest_recall"] == line["epsilon"] == ""
            assert line["message"] == " ".join(cell["message"].split())


def test_a_dry_run_writes_nothing(cli, grid, tmp_path):
    answer = cli("sweep", grid(HEAD + "[sweep]\nseed = [1, 2]\n"), "--dry-run", "--json")
    assert (answer.status, answer.err) == (0, "")
    assert [(cell["status"], cell["settings"]) for cell in answer.json["cells"]] == [
        ("waiting", {"seed": 1}),
        ("waiting", {"seed": 2}),
    ]
    assert [entry.name for entry in tmp_path.iterdir()] == ["grid.toml"]


def test_more_values_run_only_what_is_new(cli, grid, tmp_path):
    assert cli("sweep", grid(HEAD + "[sweep]\nseed = [1, 2]\n"), *FLAGS).status == 0
    results = (tmp_path / "runs" / "sweep-grid" / "runs").glob("*/result.json")
    before = {path: path.stat().st_mtime_ns for path in results}
    assert len(before) == 2
    answer = cli("sweep", grid(HEAD + "[sweep]\nseed = [2, 3]\n"), *FLAGS, "--json")
    assert answer.json["runs"] == answer.json["done"] == 2
    assert {path: path.stat().st_mtime_ns for path in before} == before
    folder = SweepFolder(tmp_path / "runs" / "sweep-grid")
    assert [spec.canonical()["seed"] for spec in folder.specs()] == [2, 3]
    (folder.path / "sweep.toml").unlink()
    assert {spec.canonical()["seed"] for spec in folder.specs()} == {1, 2, 3}


def test_a_failed_run_is_shown_stops_no_other_and_is_tried_again(cli, grid, begun, tmp_path):
    (tmp_path / "own" / "broken").touch()
    path = grid(COUNTING + "[sweep]\nworkers = [5, 4, 6]\n")
    answer = cli("sweep", path, *FLAGS)
    assert answer.status == 1
    assert "failed: workers 5: RuntimeError: out of luck" in answer.out
    assert "1 run failed; the same command tries again" in answer.out
    folder = SweepFolder(tmp_path / "runs" / "sweep-grid")
    five, *others = folder.specs()
    assert [cell.status for cell in folder.cells([five, *others])] == ["failed", "done", "done"]
    failed = folder.run_path(five) / "failed.json"
    told = json.loads(sealed({"status": "failed", "message": "RuntimeError: out of luck"}))
    assert json.loads(failed.read_text()) == told
    assert {spec.canonical()["workers"] for spec in (SweepFolder(folder.path).specs())} == {4, 5, 6}

    (tmp_path / "own" / "broken").unlink()
    healed = cli("sweep", path, *FLAGS, "--json")
    assert (healed.status, healed.json["done"], len(begun())) == (0, 3, 4)
    assert not failed.exists()


def test_what_cannot_exist_is_skipped(cli, grid, tmp_path):
    path = grid(HEAD + 'attack = "local-poisoning"\n[sweep]\nbyzantine = [0.2, 0.6]\n')
    answer = cli("sweep", path, *FLAGS)
    assert answer.status == 0
    assert "skipped: byzantine 0.2: attack = 'local-poisoning': needs more Byzantine workers" in answer.out
    folder = SweepFolder(tmp_path / "runs" / "sweep-grid")
    cells = folder.cells(folder.specs())
    assert [cell.status for cell in cells] == ["skipped", "done"]
    assert "square root" in cells[0].message
    only = grid(HEAD + 'attack = "local-poisoning"\n[sweep]\nbyzantine = [0.2]\n')
    assert cli("sweep", only, *FLAGS).status == 1, "nothing is done"


def test_other_data_under_the_same_name_are_refused(cli, grid, tmp_path):
    def write(seed):
        rng = np.random.default_rng(seed)
        np.savez(tmp_path / "own.npz", x=rng.random((300, 5), dtype=np.float32), y=np.arange(300) % 3)

    write(1)
    path = grid(HEAD + f'dataset = "{tmp_path / "own.npz"}"\n[sweep]\nseed = [1]\n')
    assert cli("sweep", path, *FLAGS).status == 0
    assert cli("sweep", path, *FLAGS).status == 0
    write(2)
    answer = cli("sweep", path, *FLAGS)
    assert answer.status == 2
    assert "other data" in answer.err


def test_a_damaged_result_is_a_failure_that_says_what_to_do(tmp_path, quick):
    folder, spec = SweepFolder(tmp_path), quick()
    sweep([spec], folder, compute=CPU, jobs=1)
    for content in ("{", "{}", "[]"):
        (folder.run_path(spec) / "result.json").write_text(content)
        assert folder.cell(spec).status == "failed"
        [cell] = sweep([spec], folder, compute=CPU, jobs=1)
        assert cell.status == "failed"
        assert "result.json" in cell.message
        assert "remove it" in cell.message
    (folder.run_path(spec) / "result.json").unlink()
    assert [cell.status for cell in sweep([spec], folder, compute=CPU, jobs=1)] == ["done"]
    assert not (folder.run_path(spec) / "failed.json").exists()


# --- locks


def test_a_run_has_one_owner_who_says_how_far_it_is(tmp_path, quick):
    folder, spec = SweepFolder(tmp_path), quick()
    assert folder.cell(spec) == SweepCell(spec, "waiting")
    with folder.lock(spec) as claim:
        claim.tell(3, 12)
        assert folder.cell(spec) == SweepCell(spec, "running", None, "round 3 of 12")
        claim.tell(12, 12)
        assert folder.share(spec) == 1.0
        with folder.lock(spec) as second:
            assert second is None
        assert play_one(folder, spec, CPU) is BUSY
    assert folder.cell(spec) == SweepCell(spec, "waiting")
    assert folder.share(spec) == 0.0
    with folder.lock(spec) as again:
        assert again is not None


def test_a_run_tells_how_far_it_is(tmp_path, quick, monkeypatch):
    told = []
    monkeypatch.setattr(RunLock, "tell", lambda self, rounds, of: told.append((rounds, of)))
    monkeypatch.setattr(play_module, "PULSE", 0.0)
    play_one(SweepFolder(tmp_path), quick(), CPU)
    assert told == [(1, 3), (2, 3), (3, 3)]


@pytest.mark.parametrize("end", ["done", "failed", "given up"])
def test_what_another_process_works_on_is_left_to_it_and_taken_over(tmp_path, quick, monkeypatch, end):
    monkeypatch.setattr(sweep_module, "POLL", 0.01)
    folder, theirs, ours = SweepFolder(tmp_path / "found"), quick(seed=1), quick(seed=2)
    run(theirs, compute=CPU, out=tmp_path / "elsewhere")
    order, free = [], threading.Event()

    def watch(cell: SweepCell) -> None:
        order.append((cell.spec.seed, cell.status))
        free.set()  # the other one ends only after ours has

    def other() -> None:
        with folder.lock(theirs):
            held.set()
            assert free.wait(PATIENCE)
            assert folder.cell(theirs).status == "running"
            if end == "done":
                (tmp_path / "elsewhere").rename(folder.run_path(theirs))
            if end == "failed":
                folder.fail(theirs, Outcome("failed", message="not my day"))

    held, thread = threading.Event(), threading.Thread(target=other)
    thread.start()
    assert held.wait(PATIENCE)
    cells = sweep([theirs, ours], folder, compute=CPU, jobs=1, watch=watch)
    thread.join()
    last = "failed" if end == "failed" else "done"
    assert order == [(2, "done"), (1, last)]
    assert [cell.status for cell in cells] == [last, "done"]
    if end == "failed":
        assert cells[0].message == "not my day"


def test_a_process_that_was_killed_is_a_failure_that_is_kept(tmp_path, quick):
    folder, spec = SweepFolder(tmp_path), quick()
    cell = _cell_after(folder, spec, Outcome("failed", message="its process was ended"))
    assert cell == folder.cell(spec) == SweepCell(spec, "failed", None, "its process was ended")
    with folder.lock(spec):
        assert _cell_after(folder, spec, Outcome("failed", message="late news")).status == "running"


def test_where_nothing_can_be_written_that_is_the_failure(tmp_path, quick):
    (tmp_path / "runs").touch()
    [cell] = sweep([quick()], tmp_path, compute=CPU, jobs=1)
    assert cell.status == "failed"
    assert "cannot be written" in cell.message


# --- side by side


def test_runs_side_by_side_leave_the_folders_of_runs_alone(tmp_path, quick):
    folder = SweepFolder(tmp_path / "together")
    lost = quick(attack="local-poisoning", byzantine=0.1)
    specs = [quick(), lost, quick(attack="zero"), quick(seed=7), quick(attack="inner")]
    with pytest.raises(KeyboardInterrupt):
        run(specs[2], compute=CPU, out=folder.run_path(specs[2]), watch=interrupt)
    with folder.lock(specs[3]):
        outcomes = play_several(folder, specs, CPU)
    assert [outcome.status for outcome in outcomes] == ["done", "skipped", "done", "skipped", "done"]
    assert outcomes[3] is BUSY
    assert [cell.status for cell in folder.cells(specs)] == ["done", "skipped", "done", "waiting", "done"]
    for spec in (specs[0], specs[2], specs[4]):
        run(spec, compute=CPU, out=tmp_path / "alone" / spec.name())
        assert contents(folder.run_path(spec)) == contents(tmp_path / "alone" / spec.name())


def interrupt(*_) -> None:
    raise KeyboardInterrupt


def test_what_goes_side_by_side_is_saved_and_goes_on(tmp_path, quick, monkeypatch):
    # The lines for a CUDA device, which a CPU can play too: only the question where to run is answered otherwise.
    asked = iter(())
    monkeypatch.setattr(Compute, "resolve", lambda self: next(asked, torch.device("cpu")))
    specs = [quick(rounds=6, evaluate_every=2, seed=seed) for seed in (1, 2, 3)]
    outs = [tmp_path / "together" / spec.name() for spec in specs]
    run(specs[0], compute=CPU, out=outs[0])
    untouched = (outs[0] / "result.json").stat().st_mtime_ns

    def later(progress, _) -> None:
        if progress.rounds >= 2:
            raise KeyboardInterrupt

    asked = iter([torch.device("cuda")])
    with pytest.raises(KeyboardInterrupt):
        run_together(specs, compute=CPU, outs=outs, resume=True, watch=later)
    assert [saved_rounds(out / "checkpoint.safetensors") for out in outs[1:]] == [2, 2]
    asked = iter([torch.device("cuda")])
    results = run_together(specs, compute=CPU, outs=outs, resume=True)
    assert [result.seed for result in results] == [1, 2, 3]
    assert (outs[0] / "result.json").stat().st_mtime_ns == untouched
    for spec, out in zip(specs, outs, strict=True):
        run(spec, compute=CPU, out=tmp_path / "alone" / spec.name())
        assert contents(out) == contents(tmp_path / "alone" / spec.name())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
def test_on_a_cuda_device_too(tmp_path, quick):
    cuda = Compute(device="cuda")
    specs = [quick(rounds=40, evaluate_every=10, sigma=20.0, sigma_base=20.0, seed=seed) for seed in range(4)]
    for spec in specs:
        run(spec, compute=cuda, out=tmp_path / "alone" / spec.name())
    outs = [tmp_path / "together" / spec.name() for spec in specs]

    def later(progress, _) -> None:
        if progress.rounds >= 10:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_together(specs, compute=cuda, outs=outs, watch=later)
    assert all((out / "checkpoint.safetensors").exists() for out in outs)
    run_together(specs[:2], compute=cuda, outs=outs[:2], resume=True)
    results = run_together(specs, compute=cuda, outs=outs, resume=True)
    assert [result.seed for result in results] == list(range(4))
    for spec, out in zip(specs, outs, strict=True):
        assert contents(out) == contents(tmp_path / "alone" / spec.name())
    folder = SweepFolder(tmp_path / "sweep")
    lost = quick(attack="local-poisoning", byzantine=0.1)
    cells = sweep([*specs, lost], folder, compute=cuda, jobs=3)
    assert [cell.status for cell in cells] == ["done"] * 4 + ["skipped"]
    for spec in specs:
        assert contents(folder.run_path(spec)) == contents(tmp_path / "alone" / spec.name())


# --- processes


def wait_until(true, process) -> None:
    end = time.monotonic() + PATIENCE
    while not true():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < end, "nothing happened"
        time.sleep(0.05)


def test_an_interrupted_sweep_loses_at_most_what_was_on_its_way(spawn, grid, tmp_path):
    path = grid(LONG + "[sweep]\nrounds = [2, 4000]\n")
    short, long = read_sweep(path)
    folder, command = SweepFolder(tmp_path / "found"), ("sweep", path, "--device", "cpu", "--out", "found", "--jobs")
    checkpoint = folder.run_path(long) / "checkpoint.safetensors"

    def stop(process, how) -> str:
        """Once there is something to lose."""
        wait_until(lambda: checkpoint.exists() and folder.told(long), process)
        process.send_signal(how)
        out, err = process.communicate(timeout=PATIENCE)
        assert (process.returncode, out) == (130 if how == signal.SIGINT else -how, "")
        assert [cell.status for cell in folder.cells([short, long])] == ["done", "waiting"], "nobody works on any more"
        return err

    stop(spawn(*command, 1), signal.SIGKILL)
    done = {file: file.stat().st_mtime_ns for file in folder.run_path(short).iterdir()}
    before = saved_rounds(checkpoint)
    assert 0 < before < 4000

    again = spawn(*command, 2)  # the run has a process of its own
    wait_until(lambda: "of 4000" in folder.told(long) and folder.cell(long).status == "running", again)
    assert int(folder.told(long).split()[1]) >= before, "it goes on from there"
    err = stop(again, signal.SIGINT)
    assert "Traceback" not in err
    assert "1 of them done already" in err
    assert "interrupted: 1 of 2 runs done in found; the same command goes on" in err
    assert saved_rounds(checkpoint) > before
    assert {file: file.stat().st_mtime_ns for file in done} == done


def test_a_run_whose_sweep_was_killed_saves_and_stops(tmp_path, quick, monkeypatch):
    class Dead:
        def is_alive(self) -> bool:
            return False

    monkeypatch.setattr("multiprocessing.parent_process", Dead)
    folder, spec = SweepFolder(tmp_path), quick()
    with pytest.raises(KeyboardInterrupt):
        play_one(folder, spec, CPU)
    assert saved_rounds(folder.run_path(spec) / "checkpoint.safetensors") == 1
    assert folder.cell(spec).status == "waiting"


def test_two_sweeps_at_once_do_every_run_once(spawn, cli, grid, begun, tmp_path):
    (tmp_path / "own" / "both").touch()  # nobody ends a run before both have begun one
    path = grid(COUNTING + "[sweep]\nseed = [1, 2, 3, 4, 5, 6]\n")
    command = ("sweep", path, *FLAGS, "--out", "found", "--json")
    other = spawn(*command)
    first = cli(*command)
    out, err = other.communicate(timeout=PATIENCE)
    assert (first.status, other.returncode) == (0, 0), (first.err, err)
    assert first.json == json.loads(out)
    assert first.json["done"] == 6
    assert len(set(begun())) == 2  # a process each, for an attack that may end its process
    assert len(begun()) == 6
    folder = SweepFolder(tmp_path / "found")
    assert not list(folder.path.rglob("*.part"))
    spec = read_sweep(path)[0]
    # In a process of its own: pytest rewrites the code of this one, and a run is named after its plugins' code.
    (tmp_path / "one.toml").write_text(spec.to_toml())
    alone = spawn("run", "one.toml", "--device", "cpu", "--threads", "1", "--no-baselines", "--out", "alone")
    assert alone.wait(PATIENCE) == 0
    assert contents(folder.run_path(spec)) == contents(tmp_path / "alone")
