"""What can be typed: help, the version and completion come without torch, and every declaration has its work."""

import ast
import inspect
import os
import subprocess
import sys

import pytest
import typer

from noisegate import paper
from noisegate.aggregators import AGGREGATORS
from noisegate.attacks import ATTACKS
from noisegate.attacks.dormant import ASLEEP
from noisegate.cli import app
from noisegate.cli.commands import LISTED
from noisegate.cli.completion import CATALOGS, names, names_of
from noisegate.cli.late import worker_of
from noisegate.cli.listing import KINDS
from noisegate.compute import DEVICES
from noisegate.data import SOURCES
from noisegate.features import FEATURES
from noisegate.models import MODELS
from noisegate.privacy import ACCOUNTANTS
from noisegate.redteam.objectives import OBJECTIVES
from noisegate.runs.measures import NAMES
from noisegate.sampling import SAMPLINGS
from noisegate.workers import WORKERS

HEAVY = ("torch", "numpy", "scipy", "sklearn", "plotly", "dp_accounting", "grpc")
LOOK = f"""
import sys
sys.argv[:] = ["noisegate", *sys.argv[1:]]
from noisegate.cli import main
try:
    main()
finally:
    print([name for name in {HEAVY!r} if name in sys.modules], file=sys.stderr)
"""


def commands(command, *path: str):
    yield path, command
    for child, below in getattr(command, "commands", {}).items():
        yield from commands(below, *path, child)


ALL = {path: command for path, command in commands(typer.main.get_command(app)) if path}


def alone(*line: str, **env: str) -> subprocess.CompletedProcess[str]:
    """What a command prints in a process of its own, and at the end of its errors what was imported."""
    command = [sys.executable, "-c", LOOK, *line]
    return subprocess.run(command, capture_output=True, text=True, env={**os.environ, **env}, check=False)


def loaded(process: subprocess.CompletedProcess[str]) -> list[str]:
    found: list[str] = ast.literal_eval(process.stderr.strip().splitlines()[-1])
    return found


@pytest.mark.parametrize(
    "line",
    [["--help"], ["-h"], ["--version"], ["run", "--help"], ["federation", "sign", "-h"], ["ledger", "show", "-h"]],
)
def test_help_and_version_import_nothing_heavy(line):
    process = alone(*line)
    assert (process.returncode, loaded(process)) == (0, [])
    assert process.stdout


def test_that_test_can_fail():
    assert "torch" in loaded(alone("list", "attacks"))


def test_no_help_at_all_imports_anything_heavy():
    """Every command's help, in one process."""
    code = "import sys; from noisegate.cli import app; import typer, click; top = typer.main.get_command(app)\n"
    code += "def all_of(command, name):\n"
    code += "    command.get_help(click.Context(command, info_name=name))\n"
    code += "    [all_of(below, name) for name, below in getattr(command, 'commands', {}).items()]\n"
    code += f"all_of(top, 'noisegate'); print([name for name in {HEAVY!r} if name in sys.modules])"
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=os.environ)
    assert told.stdout.strip() == "[]"


@pytest.mark.parametrize("path", [path for path, command in ALL.items() if not hasattr(command, "commands")])
def test_every_declared_command_has_its_work_with_the_same_parameters(path):
    command = ALL[path]
    declared = inspect.unwrap(command.callback)
    while not hasattr(command.callback, "done_in"):
        command.callback = command.callback.__wrapped__
    work = worker_of(command.callback.done_in, declared.__name__)
    assert list(inspect.signature(work).parameters) == list(inspect.signature(declared).parameters)


def test_flags_stand_under_headings(cli):
    shown = cli("run", "-h").out
    heads = [line.removesuffix(":") for line in shown.splitlines() if line.endswith(":") and not line.startswith(" ")]
    assert heads == [
        *("Arguments", "Data and model", "Privacy", "Training", "Attack and defense", "Machine", "Output", "Options")
    ]
    attack = shown[shown.index("Attack and defense:") : shown.index("Machine:")]
    assert "--byzantine" in attack
    assert "--epsilon" not in attack
    assert "\\[" not in shown
    assert max(map(len, shown.splitlines())) <= 100
    top = cli("--help").out
    for head in ("Simulate:", "Look at results:", "Run a federation:", "Find out:"):
        assert head in top
    for name in ("run", "federation", "ledger"):
        assert f"\n  {name} " in top


CATALOG_NAMES = {
    "accountants": ACCOUNTANTS,
    "aggregators": AGGREGATORS,
    "asleep": ASLEEP,
    "attacks": ATTACKS,
    "datasets": SOURCES,
    "devices": DEVICES,
    "features": FEATURES,
    "metrics": NAMES,
    "models": MODELS,
    "objectives": OBJECTIVES,
    "samplings": SAMPLINGS,
    "workers": WORKERS,
    "experiments": [*paper.names(), paper.QUICK],
}


@pytest.mark.parametrize("kind", CATALOG_NAMES)
def test_names_read_from_source_are_those_of_the_catalog(kind):
    assert sorted(names(kind)) == sorted(CATALOG_NAMES[kind])
    assert names_of(kind)("") == names(kind)
    assert names_of(kind)("no such") == []


def test_all_catalogs_are_compared():
    assert {*CATALOGS, "experiments"} == set(CATALOG_NAMES)
    assert tuple(KINDS) == LISTED


def test_a_shell_completes_names_without_torch():
    process = alone(_NOISEGATE_COMPLETE="complete_bash", COMP_WORDS="noisegate run --attack label", COMP_CWORD="3")
    assert process.stdout.split() == ["label-flip"]
    assert loaded(process) == []
    process = alone(_NOISEGATE_COMPLETE="complete_bash", COMP_WORDS="noisegate fed", COMP_CWORD="1")
    assert process.stdout.split() == ["federation"]
