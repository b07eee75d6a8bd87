"""The scripts and notebooks of examples/ run. tests/test_protocol.py has threads.py."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

import notebooks

FOLDER = Path(__file__).parents[1] / "examples"


def printed_by(name: str, folder: Path) -> str:
    done = subprocess.run([sys.executable, str(FOLDER / name)], cwd=folder, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_an_attack_of_your_own_breaks_two_aggregators_and_not_the_third(tmp_path):
    found = {
        line.split()[0]: float(line.split("accuracy ")[1].split(",")[0])
        for line in printed_by("own_attack.py", tmp_path).splitlines()
    }
    assert found["Mean"] < 0.7
    assert found["TwoStage"] + 0.03 < found["Fortified"]
    assert found["Fortified"] > 0.75


def test_hospitals_of_your_own(tmp_path):
    first, *rest = printed_by("own_hospitals.py", tmp_path).splitlines()
    accuracy, epsilon = map(float, re.findall(r"\d\.\d+", first))
    assert accuracy > 0.8
    assert 1.9 < epsilon <= 2
    told = dict(re.fullmatch(r"(.+?) +(\d\.\d+) on its own test patients", line).groups() for line in rest)
    assert list(told) == ["Northfield", "St. Mary", "Lakeside", "County", "University"]
    assert all(0.5 < float(accuracy) <= 1 for accuracy in told.values())


def test_a_model_of_your_own_with_a_frozen_backbone(tmp_path):
    told = r"(.+?) +accuracy (\S+) at epsilon (\S+), (\d+) parameters trained, (\d+) frozen"
    lines = [re.fullmatch(told, line).groups() for line in printed_by("own_model.py", tmp_path).splitlines()]
    found = {name: tuple(map(float, numbers)) for name, *numbers in lines}
    (frozen, epsilon, head, left), (trained, _, everything, none) = found["frozen backbone"], found["all trained"]
    assert 1.9 < epsilon <= 2
    assert frozen > 0.85  # 0.2 is chance, and half of the workers label wrongly
    assert frozen > trained
    assert head < everything
    # A convolution of 1 x 3 x 3 and the BatchNorm behind it, with the three statistics that it holds, are frozen.
    assert left == 16 * 9 + 16 + 2 * 16 + 2 * 16 + 1
    assert none == 0


@pytest.mark.parametrize("path", notebooks.NOTEBOOKS, ids=lambda path: path.name)
def test_a_notebook_runs(path, tmp_path):
    notebook = notebooks.executed(path, tmp_path)
    assert notebooks.text_of(notebook)


def test_there_are_two_notebooks():
    assert [path.name for path in notebooks.NOTEBOOKS] == ["attacks.ipynb", "hospitals.ipynb"]


def test_a_cell_that_fails_fails_the_notebook(tmp_path):
    cell = {"cell_type": "code", "metadata": {}, "execution_count": None, "outputs": [], "source": ["1 / 0"]}
    path = tmp_path / "broken.ipynb"
    path.write_text(notebooks.written({"cells": [cell], "metadata": {}, "nbformat": 4, "nbformat_minor": 5}))
    with pytest.raises(RuntimeError, match="ZeroDivisionError"):
        notebooks.executed(path, tmp_path)
    cell["source"] = ["print('a')\n", "x = 1\n", "x + 1"]
    path.write_text(notebooks.written({"cells": [cell], "metadata": {}, "nbformat": 4, "nbformat_minor": 5}))
    assert notebooks.text_of(notebooks.executed(path, tmp_path)) == "a\n\n2"
