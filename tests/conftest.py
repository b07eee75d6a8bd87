"""What several test files share. Nothing here needs a data file or the network."""

import copy
import hashlib
import json
import os
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from noisegate import Dataset, Spec
from noisegate.cli import main

# Small problems on shared cores: one thread is the fastest, and the same bytes need the same number of threads.
torch.set_num_threads(1)

# Three rounds with this noise cost epsilon 0.12, so that the stated 2 holds and nothing has to be calibrated.
QUICK = {"rounds": 3, "batch": 16, "rate": 0.2, "sigma": 2.5, "sigma_base": 2.5, "epsilon": 2.0, "delta": "paper"}


@dataclass(frozen=True)
class Answer:
    """What a command answered."""

    status: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """Standard output as the one JSON value that it must be."""
        return json.loads(self.out)


@pytest.fixture(scope="session", autouse=True)
def digits_are_parsed_once():
    """scikit-learn reads digits from a text file, which takes as long as the three rounds of most runs here.

    Everything that noisegate makes of them is made anew for each run.
    """
    from sklearn import datasets

    found = datasets.load_digits()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(datasets, "load_digits", lambda: copy.deepcopy(found))
        yield


@pytest.fixture(scope="session", autouse=True)
def key_of_these_tests(tmp_path_factory):
    """Fingerprints of private data need a key: one of these tests, and not that of the user who runs them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NOISEGATE_KEY", str(tmp_path_factory.mktemp("key") / "key"))
        yield


def sealed(value: dict[str, Any]) -> str:
    """A JSON object with its checksum, computed here a second time."""
    bare = {key: entry for key, entry in value.items() if key != "sha256"}
    told = hashlib.sha256(json.dumps(bare, sort_keys=True).encode()).hexdigest()
    return json.dumps({**bare, "sha256": told})


def saved_rounds(path: Path) -> int:
    """How many rounds a checkpoint says were played, read by hand from the header of a safetensors file."""
    content = path.read_bytes()
    header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    return json.loads(header["__metadata__"]["noisegate"])["rounds"]


@pytest.fixture
def quick():
    """A spec of three rounds on digits, with changes."""

    def make(**changes: Any) -> Spec:
        return replace(Spec(**QUICK), **changes)

    return make


@pytest.fixture
def cli(capsys, monkeypatch, tmp_path):
    """`noisegate ARGUMENTS...` in this process, in an empty folder."""
    monkeypatch.chdir(tmp_path)

    def call(*arguments: object) -> Answer:
        monkeypatch.setattr(sys, "argv", ["noisegate", *map(str, arguments)])
        capsys.readouterr()
        status = 0
        try:
            main()
        except SystemExit as end:
            status = end.code if isinstance(end.code, int) else int(end.code is not None)
        captured = capsys.readouterr()
        return Answer(status, captured.out, captured.err)

    return call


@pytest.fixture
def spawn(tmp_path):
    """`noisegate ARGUMENTS...` in a process of its own, in an empty folder; ended with the test."""
    started = []

    def begin(*arguments: object) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-m", "noisegate", *map(str, arguments)],
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )
        started.append(process)
        return process

    yield begin
    for process in started:
        if process.poll() is None:
            process.kill()
        process.communicate()


@pytest.fixture
def toy():
    """A data set whose examples can be told apart: the first feature is the example's number."""

    def make(train: int = 300, test: int = 60, classes: int = 3) -> Dataset:
        number = torch.arange(float(train + test))
        y = torch.arange(train + test) % classes
        x = torch.stack([number, *(torch.sin(number + k) + (y == k) for k in range(4))], dim=1)
        return Dataset("toy", x[:train], y[:train], x[train:], y[train:], classes)

    return make
