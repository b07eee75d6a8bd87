"""`noisegate watch`: what it says of a job at each point of its life, and when it ends."""

import io
import json
import os
import time
from dataclasses import replace

import pytest
from rich.console import Console

from conftest import sealed
from noisegate import Compute, Spec, run
from noisegate.cli import watch
from noisegate.cli.watch import spark
from noisegate.cli.watched_run import describe, read_watched, span
from noisegate.sweeps.sweep import SweepFolder, sweep

ONE = Compute(device="cpu", threads=1)
SPEC = Spec(rounds=6, sigma=2.5, sigma_base=2.5, accountant="rdp", aggregator="mean", evaluate_every=2)


@pytest.fixture
def stopped(tmp_path):
    """A run that was interrupted after round 5 of 6."""

    def stop(progress, rounds):
        if progress.rounds == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(SPEC, compute=ONE, out=tmp_path / "run", watch=stop)
    return tmp_path / "run"


def test_a_run_on_its_way(cli, stopped):
    found = read_watched(stopped)
    assert (found.played, found.total, found.over) == (5, 6, False)
    assert found.seconds > 0
    answer = cli("watch", stopped, "--once")
    assert answer.status == 0
    accuracy = json.loads((stopped / "rounds.jsonl").read_text().splitlines()[-1])["accuracy"]
    for said in ("mean against label-flip on digits", "round 5 of 6", f"accuracy {accuracy:.3f}", "ms a", "left"):
        assert said in " ".join(answer.out.split()), said


def test_the_rounds_in_all_are_those_of_the_checkpoint_if_the_spec_does_not_say(tmp_path, stopped):
    text = (stopped / "spec.toml").read_text().replace("rounds = 6\n", "")
    (stopped / "spec.toml").write_text(text)
    assert read_watched(stopped).total == 6
    (stopped / "checkpoint.safetensors").write_bytes(b"damaged")
    found = read_watched(stopped)
    assert (found.played, found.total) == (4, 0), "the last line, and no guess"
    assert "round 4," in describe(found)


def test_a_run_that_has_only_begun(cli, stopped):
    for name in ("checkpoint.safetensors", "rounds.jsonl"):
        (stopped / name).unlink()
    assert "round 0 of 6" in cli("watch", stopped, "--once").out


def test_silence_is_mentioned(stopped):
    long_ago = time.time() - 600
    for file in stopped.iterdir():
        os.utime(file, (long_ago, long_ago))
    assert "nothing written for 10 min: interrupted?" in describe(read_watched(stopped))


def test_a_finished_run_ends_the_watch(cli, stopped):
    run(SPEC, compute=ONE, out=stopped, resume=True)
    answer = cli("watch", stopped)
    assert answer.status == 0
    assert answer.out.count("\n") == 1, "one line where there is no terminal"
    assert "round 6 of 6" in answer.out
    assert answer.out.strip().endswith("done")


def test_a_failed_run_ends_the_watch_with_its_message(cli, stopped):
    (stopped / "failed.json").write_text(sealed({"status": "failed", "message": "it [red]broke[/red]\x1b[2J"}))
    assert "failed" in cli("watch", stopped).out
    assert "it [red]broke[/red]\\x1b[2J" in cli("watch", stopped, "--once").out


def test_the_watch_goes_on_until_the_run_is_done(stopped, monkeypatch, cli):
    """Every look but the last finds a run that is not done."""
    looks = []

    def sleep(seconds):
        looks.append(seconds)
        if len(looks) == 2:
            run(SPEC, compute=ONE, out=stopped, resume=True)

    monkeypatch.setattr(watch.time, "sleep", sleep)
    answer = cli("watch", stopped, "--every", 0.25)
    assert looks == [0.25, 0.25]
    assert [line.split(": ")[1].split(",")[0] for line in answer.out.splitlines()] == ["round 5 of 6", "round 6 of 6"]


def test_on_a_terminal_it_draws(stopped, monkeypatch):
    run(SPEC, compute=ONE, out=stopped, resume=True)
    screen = io.StringIO()
    monkeypatch.setattr(watch, "Console", lambda: Console(file=screen, force_terminal=True, width=100))
    watch.watch_command(stopped, once=False, every=0.1)
    assert "round 6 of 6" in screen.getvalue()


def test_interrupting_leaves_quietly(stopped, monkeypatch, cli):
    def interrupt(seconds):
        raise KeyboardInterrupt

    monkeypatch.setattr(watch.time, "sleep", interrupt)
    answer = cli("watch", stopped)
    assert (answer.status, answer.err) == (0, "")
    assert answer.out.count("\n") == 1
    assert "round 5 of 6" in answer.out


def test_a_sweep(cli, tmp_path):
    specs = [replace(SPEC, rounds=2, seed=seed) for seed in (1, 2, 3)]
    sweep(specs[:1], tmp_path / "sweep", compute=ONE, jobs=1)
    lines = SPEC.to_toml().replace("seed = 1\n", "").replace("rounds = 6", "rounds = 2")
    (tmp_path / "sweep" / "sweep.toml").write_text(lines + "[sweep]\nseed = [1, 2, 3]\n")
    folder = SweepFolder(tmp_path / "sweep")
    with folder.lock(specs[1]) as claim:
        claim.tell(1, 2)
        said = cli("watch", tmp_path / "sweep", "--once").out
    assert "1 of 3 runs ended: 1 done, 1 running, 1 waiting" in said
    assert "round 1 of 2" in said
    assert f"{folder.cell(specs[0]).result['accuracy']:.3f}" in said
    assert "No process works on it" not in said
    out = folder.run_path(specs[2])
    out.mkdir()
    (out / "failed.json").write_text(sealed({"status": "failed", "message": "it broke"}))
    said = cli("watch", tmp_path / "sweep", "--once").out
    assert "`noisegate sweep` goes on." in said
    assert "1 failed: it broke" in said
    folder.run_path(specs[1]).mkdir()
    (folder.run_path(specs[1]) / "checkpoint.safetensors").touch()
    assert "goes on, 1 of the waiting runs where they stopped." in " ".join(
        cli("watch", tmp_path / "sweep", "--once").out.split()
    )
    (folder.run_path(specs[1]) / "checkpoint.safetensors").unlink()
    sweep(specs, tmp_path / "sweep", compute=ONE, jobs=1)
    answer = cli("watch", tmp_path / "sweep")
    assert (answer.status, answer.out) == (0, "3 of 3 runs ended: 3 done\n")


def test_the_time_left_grows_less_between_two_runs(monkeypatch):
    """Two of four ended in the first ten seconds."""
    seen = watch._SweepScreen.__new__(watch._SweepScreen)
    seen.over, seen.began, seen.last_end, seen.ended_first = False, 0.0, 10.0, 0
    said = []
    for now in (10.0, 12.0, 17.0, 21.0):
        monkeypatch.setattr(watch.time, "monotonic", lambda now=now: now)
        said.append(seen._left([None] * 4, 2))
    assert said == [", about 10 s left", ", about 8 s left", ", about 3 s left", ""]


def test_what_is_no_job_is_an_error(cli, tmp_path):
    for folder, says in ((tmp_path / "nowhere", "no such folder"), (tmp_path, "neither a run")):
        answer = cli("watch", folder)
        assert (answer.status, answer.out) == (2, "")
        assert says in answer.err


def test_a_row_of_bars_is_from_0_to_1():
    assert spark([0.0, 0.49, 0.5, 0.999, 1.0]) == "▁▄▅██"
    assert spark([0.0, 1.0], plain=True) == "_@"
    many = spark([i / 999 for i in range(1000)], width=10)
    assert (len(many), many[0], many[-1]) == (10, "▁", "█")
    assert spark([]) == ""


def test_small_words():
    assert [span(5), span(120), span(7200)] == ["5 s", "2 min", "2.0 h"]
