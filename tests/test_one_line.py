"""Whatever is given, a file, a flag, a plugin or a terminal: one line, an exit status, and never a traceback."""

import io
import os
import signal
import subprocess
import sys
import time

import pytest
from rich.table import Table

from noisegate import checks
from noisegate.cli.terminal import Console
from noisegate.settings import MOST_BYTES, read_settings
from test_cli import QUICK, one_line, refused

FLAGS = [*QUICK, "--no-baselines"]
PATIENCE = 120


# --- values


ODD = [
    ("--sigma", "1e38", "sigma = 1e+38: is too large to compute with"),
    ("--sigma", "1e300", "sigma = 1e+300: is too large to compute with"),
    ("--sigma", "1e-300", "sigma = 1e-300: is too small to compute with"),
    ("--rate", "1e308", "rate = 1e+308: is too large to compute with"),
    ("--rate", "1e-308", "rate = 1e-308: is too small"),
    ("--rate", "inf", "rate = inf: must be a finite number above 0"),
    ("--threads", "100000", "threads = 100000: must be at most 1024"),
    ("--workers", "9" * 400, "workers = a whole number of about 401 digits: is too large"),
    ("--seed", "9" * 400, "seed = a whole number of about 401 digits: is too large"),
    ("--memory", "9" * 400, "memory = a whole number of about 401 digits"),
    ("--dataset", "~nosuchuser/x.npz", "dataset = '~nosuchuser/x.npz': whose home is that?"),
    ("--dataset", "x" * 300 + ".npz", "File name too long"),
    ("--dataset", "\x1b[31mred", "dataset = '\\x1b[31mred': unknown"),
    ("--dataset", "a" * 5000, "(5002 characters)"),
    ("--attack", "sys:exit", "attack = 'sys:exit'"),
    ("--attack", "\x1b]0;title\x07:x", "\\x1b]0;title\\x07"),
    ("--out", "o" * 300, "File name too long"),
    ("--out", "/proc/nosuch/run", "cannot be written"),
]


def test_an_odd_flag_is_one_line(cli):
    for flag, value, says in ODD:
        one_line(cli(*FLAGS, f"{flag}={value}"), says)


def test_a_home_that_nobody_has(cli, monkeypatch):
    monkeypatch.setenv("NOISEGATE_DATA", "~nosuchuser/data")
    one_line(cli("run", "--dataset", "mnist"), "NOISEGATE_DATA = '~nosuchuser/data': whose home is that?")


DEEP = {
    "arrays": "x = " + "[" * 100_000,
    "tables": "attack = " + "{ a = " * 5000 + "1" + " }" * 5000,
    "keys": "attack." + "a." * 200 + "b = 1",
    "few arrays": "dataset = " + "[" * 60 + "]" * 60,
}
FILES = {
    **{f"deep {name}": (text, "nested") for name, text in DEEP.items()},
    "long": ("# " + "x" * MOST_BYTES, "is longer than"),
    "digits": ("rounds = " + "9" * 5000, "is not valid TOML"),
    "hexadecimal": ("rounds = 0x" + "f" * 5000, "rounds = a whole number of about 6021 digits: is too large"),
    "hexadecimal seed": ("seed = 0x" + "f" * 5000, "seed = a whole number of about 6021 digits: is too large"),
    "hexadecimal rate": ("rate = 0x" + "f" * 5000, "rate = a whole number of about 6021 digits: is too large"),
    "hexadecimal list": ("dataset = [0x" + "f" * 5000 + "]", "dataset"),
    "unknown": ('"\\u001b[2J" = 3', "\\x1b[2J = 3: unknown setting"),
    "escapes": ('dataset = "\\u001b[31m\\u202e\\u0085"', "dataset = '\\x1b[31m\\u202e\\x85'"),
    "zero byte": ('dataset = "a\\u0000.npz"', "a\\x00.npz: no such file"),
    "not UTF-8": (b"\xff\xfe", "is not valid TOML"),
    "inf": ("sigma = inf", "sigma = inf"),
    "date": ("rounds = 2020-01-01", "rounds = datetime.date(2020, 1, 1): must be a whole number"),
}


def test_an_odd_file_is_one_line(cli, tmp_path):
    for name, (content, says) in FILES.items():
        (tmp_path / "s.toml").write_bytes(content if isinstance(content, bytes) else content.encode())
        answer = cli("run", "s.toml")
        one_line(answer, says)
        assert answer.err.strip().isprintable(), name
        assert len(answer.err) < 1500, name


def test_what_is_no_file_of_settings_is_one_line(cli):
    for path in ("/dev/zero", "/", "/proc/self/mem"):
        one_line(cli("run", path), path)
        one_line(cli("sweep", path), path)


def test_a_deep_file_that_is_just_not_too_deep_is_read(tmp_path):
    path = tmp_path / "s.toml"
    path.write_text("x = " + "[" * 30 + "]" * 30)
    assert "x" in read_settings(path)


# --- text


TEXTS = {
    "plain, äöü, 漢字, 🙂": "plain, äöü, 漢字, 🙂",
    "\x1b[31m": "\\x1b[31m",
    "a\nb\tc\rd\x08": "a\\nb\\tc\\rd\\x08",
    "\x7f\x9b31m": "\\x7f\\x9b31m",
    "\u202eabc\u2066\u200b": "\\u202eabc\\u2066\\u200b",
    "\udcff": "\\udcff",
}


def test_plain_text_has_nothing_that_a_terminal_obeys():
    for text, safe in TEXTS.items():
        assert checks.plain(text) == safe
        assert checks.plain(safe) == safe
        one = text.replace("\n", "\\n").replace("\t", "\\t").replace("\r", "\\r")
        assert safe in checks.told(RuntimeError(one))


class Mute:
    def __repr__(self):
        raise RuntimeError("no")

    __str__ = __repr__


def test_a_value_is_shown_whatever_it_is():
    assert checks.shown(Mute()) == "<Mute>"
    assert checks.shown("x" * 1000).endswith("(1002 characters)")
    nested: list = []
    for _ in range(100_000):
        nested = [nested]
    assert checks.shown(nested) == "<list>"
    assert checks.told(type("Odd", (Exception,), {"__str__": Mute.__repr__})()) == "?"


def test_what_is_printed_is_text_and_not_markup():
    file = io.StringIO()
    console = Console(file=file, width=200, force_terminal=True, color_system="standard", highlight=False)
    table = Table("[red]head[/red]", "b\x1b[2J", title="[bold]x")
    table.add_row("[blink]a", "[/nosuch] :smile: \x1b]0;t\x07")
    console.print(table)
    console.print("[link=x]y[/link] \x1b[31m")
    printed = file.getvalue()
    for part in (
        "[red]head[/red]",
        "[blink]a",
        "[/nosuch] :smile: \\x1b]0;t\\x07",
        "[link=x]y[/link] \\x1b[31m",
        "[bold]x",
    ):
        assert part in printed
    for raw in ("\x1b[2J", "\x1b]0;", "\x07"):
        assert raw not in printed


def test_every_command_prints_through_that_console():
    from pathlib import Path

    import noisegate.cli

    for path in Path(noisegate.cli.__file__).parent.glob("*.py"):
        if path.name != "terminal.py":
            assert "rich.console import Console" not in path.read_text(), path.name


# --- plugins


PLUGINS = """
import os, sys, time
from dataclasses import dataclass
from noisegate.attacks import Honest

@dataclass(frozen=True)
class Acts(Honest):
    how: str = "raises"
    when: str = "check"

    def check(self, honest, byzantine):
        if self.when == "check":
            self.act()

    def forge(self, view):
        if self.when == "forge":
            self.act()

    def act(self):
        if self.how == "raises":
            raise ZeroDivisionError("by \\x1b[31mme")
        if self.how == "exits":
            sys.exit(0)
        if self.how == "exits hard":
            os._exit(0)
        if self.how == "interrupts":
            raise KeyboardInterrupt
        if self.how == "recurses":
            self.act()
        if self.how == "takes all memory":
            raise MemoryError
        if self.how == "base":
            raise type("Mine", (BaseException,), {})("odd")
        if self.how == "hangs":
            while True:
                try:
                    time.sleep(60)
                except BaseException:
                    pass

class Unmakable(Honest):
    def __init__(self):
        raise SystemExit(4)
"""

IMPORTS = {
    "raises": ("raise RuntimeError('no \\x1b[31m')", "cannot be loaded (RuntimeError: no \\x1b[31m)"),
    "exits": ("import sys; sys.exit(7)", "cannot be loaded (SystemExit: 7)"),
    "base": ("raise type('Mine', (BaseException,), {})('odd')", "cannot be loaded (Mine: odd)"),
    "syntax": ("def", "cannot be loaded (SyntaxError"),
    "recursion": ("def f(): f()\nf()", "cannot be loaded (RecursionError"),
    "mute": ("class E(Exception):\n  def __str__(self): raise E\nraise E", "cannot be loaded (E: ?)"),
    "nothing": ("", "cannot be loaded (module"),
    "lazy": ("def __getattr__(name): raise OSError(name)", "cannot be loaded (OSError"),
    "number": ("Attack = 3", "is neither a function nor a class"),
}


@pytest.fixture
def plugins(tmp_path, monkeypatch):
    place = tmp_path / "own"
    place.mkdir()
    (place / "acting_plugin.py").write_text(PLUGINS)
    monkeypatch.syspath_prepend(str(place))
    yield place
    for name in [name for name in sys.modules if name.startswith(("acting_plugin", "importing_plugin"))]:
        del sys.modules[name]


def test_a_plugin_whose_import_raises_anything_is_one_line(cli, plugins):
    for number, (code, says) in enumerate(IMPORTS.values()):
        (plugins / f"importing_plugin_{number}.py").write_text(code)
        path = f"importing_plugin_{number}:Attack"
        for part in ("attack", "aggregator", "worker"):
            one_line(cli("run", f"--{part}", path), f"{part} = '{path}': ", says)


ACTS = {
    "raises": (2, "in act: ZeroDivisionError: by \\x1b[31mme; NOISEGATE_TRACEBACK=1 shows where"),
    "exits": (2, "in act: wanted to end the process (status 0)"),
    "recurses": (2, "in act: RecursionError"),
    "takes all memory": (2, "in act: MemoryError"),
    "base": (2, "in act: Mine: odd"),
    "interrupts": (130, "interrupted"),
}


@pytest.mark.parametrize("when", ["check", "forge"])
def test_a_plugin_that_raises_in_a_run_is_one_line(cli, plugins, when):
    for how, (status, says) in ACTS.items():
        settings = ("--set", f"attack.how={how}", "--set", f"attack.when={when}")
        answer = cli(*FLAGS, "--attack", "acting_plugin:Acts", *settings)
        assert answer.status == status, answer
        assert says in answer.err
        assert len(answer.err.splitlines()) == 1, answer.err


def test_a_traceback_can_be_asked_for(cli, plugins, monkeypatch):
    monkeypatch.setenv("NOISEGATE_TRACEBACK", "1")
    assert "Traceback" in cli(*FLAGS, "--attack", "acting_plugin:Acts").err


def test_a_plugin_that_cannot_be_made_is_one_line(cli, plugins):
    one_line(cli("run", "--attack", "acting_plugin:Unmakable"), "cannot be made (SystemExit: 4)")


SWEEP = """
rounds = 3
workers = 4
sigma = 2.5
sigma_base = 2.5
epsilon = 2.0
accountant = "rdp"
[sweep]
attack = [
"""
LIMIT = 10
"""Seconds that a run may take, once its process has started."""

CAME_OF_IT = {
    "hangs": ("failed", f"took longer than its time limit, {LIMIT} s, and was ended"),
    "exits": ("failed", "SystemExit: 0"),
    "recurses": ("failed", "RecursionError"),
    "exits hard": ("failed", "its process ended in the middle of it (status 0)"),
    "interrupts": ("failed", "its process "),
    "base": ("failed", "its process "),
    "nothing": ("done", ""),
}


@pytest.mark.parametrize(
    ("flags", "how"),
    [
        (("--jobs", 1), ("exits hard",)),  # one job, and yet a process of its own
        (("--jobs", 2, "--time-limit", LIMIT), ("hangs", "exits", "recurses", "interrupts", "base", "nothing")),
    ],
    ids=["one job", "two jobs"],
)
def test_in_a_sweep_a_plugin_ends_its_own_run_only(cli, plugins, tmp_path, flags, how):
    lines = [f'{{ name = "acting_plugin:Acts", when = "forge", how = "{each}" }},\n' for each in how]
    (tmp_path / "grid.toml").write_text(SWEEP + "".join(lines) + "]\n")
    answer = cli("sweep", "grid.toml", "--device", "cpu", *flags, "--json")
    assert answer.status == 1
    assert [cell["settings"]["attack"]["how"] for cell in answer.json["cells"]] == list(how)
    for cell in answer.json["cells"]:
        status, message = CAME_OF_IT[cell["settings"]["attack"]["how"]]
        assert cell["status"] == status, cell
        assert cell["message"].startswith(message), cell
    assert not _processes()


def _processes() -> list[str]:
    """The children of this process, by parent and command."""
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                with open(f"/proc/{entry}/stat") as stat, open(f"/proc/{entry}/cmdline") as line:
                    parent, command = stat.read().rpartition(")")[2].split()[1], line.read()
            except OSError:
                continue
            if int(parent) == os.getpid() and "spawn_main" in command:
                found.append(f"{parent} {command}")
    return found


LIMITS = {
    ("--time-limit", "0"): "time_limit = 0.0: must be a finite number above 0",
    ("--time-limit", "nan"): "time_limit = nan",
    ("--engine", "ray", "--time-limit", "5"): "time_limit = 5.0: cannot be kept with engine = 'ray'",
    ("--engine", "rey"): "engine = 'rey': unknown (did you mean 'ray'?)",
    ("--jobs", "100000"): "jobs = 100000: must be at most 1024",
}


def test_a_limit_that_cannot_be_kept_is_refused(cli, tmp_path):
    (tmp_path / "grid.toml").write_text("[sweep]\nseed = [1, 2]\n")
    for flags, says in LIMITS.items():
        one_line(cli("sweep", "grid.toml", "--device", "cpu", *flags), says)
        one_line(cli("reproduce", "--quick", "--device", "cpu", *flags), says)
        if flags[0] == "--time-limit":
            one_line(cli("redteam", "--device", "cpu", *flags), says)


# --- the process

FORKS = """
import os, sys
from noisegate.cli import main
import noisegate.cli.commands  # once for all
for arguments, where in eval(sys.argv[1]):
    if where:
        out = os.open(where, os.O_WRONLY)
    else:
        end, out = os.pipe()
        os.close(end)
    if os.fork() == 0:
        os.dup2(out, 1)
        sys.argv[1:] = arguments
        main()
    status = os.waitstatus_to_exitcode(os.wait()[1])
    print(f"{arguments} {where} {status}", file=sys.stderr, flush=True)
"""


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_an_output_that_cannot_be_written_is_one_line_and_a_closed_pipe_none():
    """Each command runs in a process that ends as Python ends, forked from one that has imported everything."""
    table, as_json = ["list", "attacks"], ["list", "attacks", "--json"]
    cases = [(arguments, where) for where in ("/dev/full", "") for arguments in (table, as_json)]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", FORKS, repr(cases)]
    ended = subprocess.run(command, env=env, capture_output=True, text=True, timeout=PATIENCE)
    full = "noisegate: the output cannot be written (No space left on device)\n"
    expected = [f"{full if where else ''}{arguments} {where} 1\n" for arguments, where in cases]
    assert ended.stderr == "".join(expected)
    assert ended.stdout == ""


def test_an_interruption_while_importing_is_one_line(spawn, tmp_path):
    """torch takes a second to import; here it takes longer, and says so."""
    (tmp_path / "torch.py").write_text("import time\nopen('importing', 'w').close()\ntime.sleep(60)\n")
    process = spawn("list", "attacks")  # in tmp_path, which python -m puts first
    end = time.monotonic() + PATIENCE
    while not (tmp_path / "importing").exists():
        assert time.monotonic() < end
        assert process.poll() is None, process.communicate()
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=PATIENCE)
    assert (process.returncode, out, err) == (130, "", "noisegate: interrupted\n")


def test_a_page_that_cannot_be_written_is_one_line(cli, tmp_path):
    assert cli(*FLAGS, "--out", "run").status == 0
    refused(cli("report", "run", "-o", "/proc/nosuch/page.html"), "/proc/nosuch")
