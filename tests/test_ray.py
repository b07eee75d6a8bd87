"""Sweeps on Ray: the same results, and a worker that is killed loses nothing. A real Ray, on this machine."""

import os
import signal
import sys
import threading
import time
from functools import partial

import pytest

from conftest import saved_rounds
from noisegate import Compute, SpecError, run
from noisegate.sweeps.folder import SweepFolder
from noisegate.sweeps.outcome import Outcome
from noisegate.sweeps.ray_pool import RayPool
from noisegate.sweeps.sweep import sweep
from test_resume import PATIENCE, contents

CPU = Compute(device="cpu", threads=1)


@pytest.fixture(scope="module")
def ray():
    """A Ray with two workers, which takes seconds to start."""
    found = pytest.importorskip("ray", reason="Ray is not installed here")
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("RAY_ADDRESS", raising=False)
        pool = RayPool(CPU, 2)
        try:
            pool.__enter__()
        except SpecError as error:
            pytest.skip(str(error))
        assert found.is_initialized()
        yield found
        pool.__exit__(None, None, None)
        assert not found.is_initialized()


def test_a_killed_worker_loses_nothing(ray, tmp_path, quick):
    quick = partial(quick, accountant="rdp")  # which a new process is faster with
    # The first is long enough to be caught in the middle; it goes on from its checkpoint, in another process.
    long = quick(rounds=200, evaluate_every=10, sigma=12.0, sigma_base=12.0, workers=4, attack="zero")
    lost = quick(attack="local-poisoning", byzantine=0.1)
    specs = [long, quick(), quick(seed=2), lost, quick(seed=3)]
    folder = SweepFolder(tmp_path / "found")
    checkpoint, lock = folder.run_path(long) / "checkpoint.safetensors", folder._lock_path(long)
    killed = []

    def kill() -> None:
        end = time.monotonic() + PATIENCE
        while time.monotonic() < end:
            if checkpoint.exists() and (owner := holder(lock)):
                killed.append((owner, folder.share(long)))
                os.kill(owner, signal.SIGKILL)
                return
            time.sleep(0.01)

    thread = threading.Thread(target=kill)
    thread.start()
    ended = []
    cells = sweep(specs, folder, engine="ray", compute=CPU, jobs=2, watch=lambda cell: ended.append(cell.spec.name()))
    thread.join()
    assert [cell.status for cell in cells] == ["done", "done", "done", "skipped", "done"]
    assert sorted(ended) == sorted(spec.name() for spec in specs)
    [(owner, share)] = killed
    assert owner != os.getpid()
    assert share < 1
    assert ray.is_initialized(), "a Ray that was there before stays"
    for spec in (long, specs[1]):
        run(spec, compute=CPU, out=tmp_path / "alone" / spec.name())
        assert contents(folder.run_path(spec)) == contents(tmp_path / "alone" / spec.name())
    before = {path: path.stat().st_mtime_ns for path in folder.path.rglob("result.json")}
    assert [cell.status for cell in sweep(specs[:3], folder, engine="ray", compute=CPU)] == ["done"] * 3
    assert {path: path.stat().st_mtime_ns for path in before} == before


def holder(lock) -> int | None:
    """The process that has a file open."""
    for process in os.listdir("/proc"):
        if process.isdecimal() and int(process) != os.getpid():
            try:
                names = [os.readlink(f"/proc/{process}/fd/{number}") for number in os.listdir(f"/proc/{process}/fd")]
            except OSError:
                continue
            if str(lock) in names:
                return int(process)
    return None


def test_what_dies_again_and_again_has_failed(ray, tmp_path, quick, monkeypatch):
    monkeypatch.setattr("noisegate.sweeps.ray_pool.RETRIES", 1)

    def die(spec, compute):
        with (tmp_path / "deaths").open("a") as file:
            file.write("x")
        os.kill(os.getpid(), signal.SIGKILL)

    with RayPool(CPU, 2, one=die, several=die) as pool:
        [(index, outcome)] = list(pool.play([quick()]))
    assert (index, outcome.status) == (0, "failed")
    assert "WorkerCrashedError" in outcome.message
    assert (tmp_path / "deaths").read_text() == "xx"


def test_what_is_left_is_interrupted_and_saved(ray, tmp_path, quick):
    endless = quick(rounds=200_000, evaluate_every=10_000, sigma=400.0, sigma_base=400.0, accountant="rdp")
    short, folder = quick(accountant="rdp"), SweepFolder(tmp_path)

    def interrupt(_) -> None:
        end = time.monotonic() + PATIENCE
        while not folder.told(endless) and time.monotonic() < end:
            time.sleep(0.05)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        sweep([endless, short], folder, engine="ray", compute=CPU, jobs=2, watch=interrupt)
    assert [cell.status for cell in folder.cells([endless, short])] == ["waiting", "done"]
    assert 0 < saved_rounds(folder.run_path(endless) / "checkpoint.safetensors") < 10_000


def test_the_command(ray, cli, tmp_path):
    path = tmp_path / "grid.toml"
    path.write_text('rounds = 3\nsigma = 2.5\nepsilon = 2.0\naccountant = "rdp"\nworkers = 4\n[sweep]\nseed = [1, 2]\n')
    answer = cli("sweep", path, "--engine", "ray", "--jobs", "2", "--device", "cpu")
    assert answer.status == 0, answer.err
    assert "sweep: 2 runs, 2 at a time, kept in runs/sweep-grid\n" in answer.err
    told = answer.out.splitlines()
    seeds = told[0].split().index("seeds")
    assert told[1].split()[seeds] == "2"
    assert told[-1].split()[-1] == "runs/sweep-grid"
    assert "2 trainings on digits cost an example epsilon" in told[2]


def test_without_ray_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(SpecError, match=r"Ray is not installed here; pip install 'noisegate\[ray\]'"):
        RayPool(CPU)


def test_a_cluster_that_does_not_answer_is_one_line(monkeypatch):
    found = pytest.importorskip("ray", reason="Ray is not installed here")
    monkeypatch.setattr(found, "is_initialized", lambda: False)
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    pool = RayPool(CPU)
    assert "as the cluster has room for" in pool.pace
    with pytest.raises(SpecError, match=r"RAY_ADDRESS = '127\.0\.0\.1:1': no Ray there"), pool:
        pass


def test_runs_that_share_a_gpu_are_one_task(quick, monkeypatch):
    class Pretend:
        """A Ray with GPUs: tasks are done where they are asked for."""

        def __init__(self):
            self.asked = []

        def remote(self, **needs):
            self.asked.append(needs)

            def made(function):
                def call(one, several, specs, *_):
                    self.asked.append(len(specs))
                    return tuple(several(specs, CPU))

                return type("Task", (), {"remote": staticmethod(call)})

            return made

        def wait(self, tasks, **_):
            return tasks[:1], tasks[1:]

        def get(self, task):
            return list(task)

    pool = RayPool.__new__(RayPool)
    pool.ray, pool.cuda, pool.jobs, pool._most, pool._pending = Pretend(), True, 2, 2, {}
    pool.compute, pool.one = CPU, None
    pool.several = lambda specs, _: [Outcome("done", spec.seed / 10) for spec in specs]
    specs = [quick(seed=seed) for seed in range(5)]
    assert dict(pool.play(specs)) == {i: Outcome("done", i / 10) for i in range(5)}
    assert pool.ray.asked == [{"max_retries": 5, "num_gpus": 1}, 2, 2, 1]
