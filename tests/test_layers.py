"""Imports point down (decision 0012), the core needs torch, numpy and scipy alone, no one breaks house rules."""

import ast
import os
import re
import subprocess
import sys
from collections import defaultdict
from graphlib import TopologicalSorter
from pathlib import Path

import numpy as np
import pytest

import noisegate

ROOT = Path(noisegate.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))

FLOORS = (
    (
        *("capacity", "chacha", "checks", "compute", "entropy", "errors", "files", "kernels", "locks", "marks"),
        *("settings", "streams", "usual", "vectors", "version"),
    ),
    ("catalog", "data", "examples", "features", "flips", "metrics", "models", "roles", "sampling", "views"),
    ("aggregators", "attacks", "privacy", "workers"),
    ("protocol",),
    ("federation", "flower", "simulate"),
    ("audit", "deploy", "paper", "redteam", "report", "runs", "sweeps"),
    ("cli",),
    ("",),  # noisegate/__init__.py and __main__.py: they may import everything, and nobody may import them
)
LAYERS = {part: layer for layer, parts in enumerate(FLOORS) for part in parts}

SAME_LAYER = {
    "checks": {"errors"},
    "compute": {"checks", "errors"},
    "entropy": {"chacha", "errors", "kernels"},
    "files": {"checks", "errors"},
    "locks": {"checks", "errors"},
    "marks": {"checks", "entropy"},
    "settings": {"checks", "errors"},
    "streams": {"errors"},
    "vectors": {"errors", "kernels"},
    "roles": {"views"},
    "examples": {"sampling"},
    "features": {"catalog"},
    "flower": {"federation"},
    "audit": {"runs"},
    "deploy": {"runs"},
    "sweeps": {"runs"},
    "paper": {"runs", "sweeps"},
    "redteam": {"runs", "sweeps"},
    "report": {"deploy", "paper", "redteam", "runs", "sweeps"},
}
"""What a part may import of its own layer. Parts that are not named here import nothing of it."""

TWICE = {"Server", "Worker"}
"""Class names with two meanings: a role of the protocol, and the process that plays it in a federation."""

MOST_LINES, MOST_FUNCTION, MOST_PARAMETERS = 300, 60, 8
"""The longest file and the longest function of src in lines, and the longest signature outside of Triton kernels."""

CORE = (
    "features",
    "simulate",
    "workers",
    "attacks",
    "aggregators",
    "views",
    "sampling",
    "vectors",
    "streams",
    "checks",
    "errors",
)
CORE_MAY_IMPORT = set(sys.stdlib_module_names) | {"torch", "numpy", "scipy", "noisegate"}
OPTIONAL = ("dp_accounting", "typer", "rich", "sklearn", "pooch", "plotly")


def place(path: Path) -> str:
    """The path within the package, for messages."""
    return str(path.relative_to(ROOT))


def part_of(path: Path) -> str:
    """checks.py -> checks; workers/direct.py -> workers; __init__.py and __main__.py -> ''."""
    name = path.relative_to(ROOT).parts[0].removesuffix(".py")
    return "" if name.startswith("__") else name


def imported(tree: ast.AST):
    """Every module named by an import, wherever it stands; `from noisegate import x` names noisegate.x."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative import"
            if node.module == "noisegate":
                yield from (f"noisegate.{alias.name}" for alias in node.names)
            else:
                yield node.module


def arrows(text: str, own: str):
    """(own part, other part) of each import of another part of noisegate; '' is the package's own __init__."""
    for name in imported(ast.parse(text)):
        top, _, rest = name.partition(".")
        if top == "noisegate":
            other = rest.split(".")[0]
            other = other if other in LAYERS else ""
            if other != own or other == "":
                yield own, other


def points_down(arrow: tuple[str, str]) -> bool:
    own, other = arrow
    return LAYERS[other] < LAYERS[own] or other in SAME_LAYER.get(own, ())


def test_every_part_has_a_layer():
    assert {part_of(path) for path in FILES} <= set(LAYERS)


def test_imports_point_down():
    found = {(place(path), *arrow) for path in FILES for arrow in arrows(path.read_text(), part_of(path))}
    wrong = [f"{path}: {own} -> {other}" for path, own, other in found if not points_down((own, other))]
    assert not wrong, "\n".join(wrong)


def test_the_arrows_within_a_layer_have_no_cycle():
    assert all(LAYERS[own] == LAYERS[other] for own, others in SAME_LAYER.items() for other in others)
    tuple(TopologicalSorter(SAME_LAYER).static_order())  # raises if there is one


def test_the_check_of_arrows_can_fail():
    for text, own, good in (
        ("from noisegate.workers import Normalized", "aggregators", False),  # siblings
        ("def f():\n    from noisegate import runs", "simulate", False),  # up, inside a function
        ("import noisegate.simulate", "flower", False),
        ("from noisegate import run", "cli", False),  # the package's own __init__
        ("import noisegate", "runs", False),
        ("from noisegate import views", "workers", True),
        ("from noisegate.workers import layers", "workers", True),
        ("from noisegate import checks", "errors", False),
        ("from noisegate.sweeps import pool", "runs", False),  # within a layer, the wrong way
        ("from noisegate.sweeps import pool", "redteam", True),
    ):
        assert all(points_down(arrow) for arrow in arrows(text, own)) is good, text


def test_the_core_needs_torch_numpy_and_scipy_only():
    wrong = {}
    for path in FILES:
        if part_of(path) in CORE and "kernels" not in path.parts:  # which need Triton
            top = [node for node in ast.parse(path.read_text()).body if not _is_definition(node)]
            found = {name.partition(".")[0] for node in top for name in imported(node)} - CORE_MAY_IMPORT
            wrong |= {place(path): found} if found else {}
    assert not wrong


def _is_definition(node: ast.AST) -> bool:
    return isinstance(node, ast.FunctionDef | ast.ClassDef)


BLOCKED_RUN = """
import sys
OPTIONAL = {optional!r}

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in OPTIONAL:
            raise ModuleNotFoundError("blocked: " + name, name=name)

# An entry of None is what Python knows as "not there": import raises and find_spec finds nothing.
sys.modules.update(dict.fromkeys(OPTIONAL))
sys.meta_path.insert(0, Blocker())
import noisegate
result = noisegate.run(
    noisegate.Spec(dataset=sys.argv[1], sigma=3.0, sigma_base=3.0, epsilon=2.0, rounds=2, workers=3, batch=4)
)
assert (result.rounds, result.workers, result.accountant, result.epsilon) == (2, 3, "stated", 2.0), result
loaded = [name for name in sys.modules if name.partition(".")[0] in OPTIONAL and sys.modules[name] is not None]
assert not loaded, loaded
print("ran")
"""


def test_a_run_with_given_noise_needs_no_optional_package(tmp_path):
    rng = np.random.default_rng(1)
    y = np.arange(120) % 3
    x = rng.normal(size=(120, 6)).astype(np.float32) + y[:, None]
    np.savez(tmp_path / "tiny.npz", x=x, y=y)
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", BLOCKED_RUN.format(optional=OPTIONAL), str(tmp_path / "tiny.npz")],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT.parent)},
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "ran"


def faults(text: str) -> list[str]:
    """What the house rules forbid in src: assert, bare except, global generators."""
    found = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Assert):
            found.append(f"assert at {node.lineno}")
        if isinstance(node, ast.ExceptHandler) and node.type is None:
            found.append(f"bare except at {node.lineno}")
        if isinstance(node, ast.Attribute | ast.Call):
            name = ast.unparse(node)
            if re.fullmatch(
                r"torch\.(random\.|cuda\.)?(manual_seed(_all)?|seed)|(np|numpy)\.random\.(?!default_rng|Gen).*", name
            ):
                found.append(f"{name} at {node.lineno}")
    return found + [f"import {name}" for name in imported(ast.parse(text)) if name.partition(".")[0] == "random"]


def test_no_assert_no_bare_except_no_global_generator():
    found = [f"{place(path)}: {wrong}" for path in FILES for wrong in faults(path.read_text())]
    assert not found, "\n".join(found)


def test_the_check_of_house_rules_can_fail():
    for text in (
        "assert x",
        "try:\n    f()\nexcept:\n    pass",
        "torch.manual_seed(1)",
        "torch.random.manual_seed(1)",
        "torch.cuda.manual_seed_all(1)",
        "np.random.seed(1)",
        "np.random.normal(3)",
        "import random",
        "from random import shuffle",
    ):
        assert faults(text), text


def oversized(text: str) -> list[str]:
    """What is longer than the house rules allow: the file, its functions, their signatures."""
    lines = len(text.splitlines())
    found = [f"{lines} lines"] if lines > MOST_LINES else []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            kernel = any("jit" in ast.unparse(decorator) for decorator in node.decorator_list)
            if (long := node.end_lineno - node.lineno + 1) > MOST_FUNCTION and not kernel:
                found.append(f"{node.name}: {long} lines")
            given = node.args.posonlyargs + node.args.args + node.args.kwonlyargs
            count = sum(one.arg not in ("self", "cls") for one in given)
            if count > MOST_PARAMETERS and not kernel:
                found.append(f"{node.name}: {count} parameters")
    return found


def test_no_file_no_function_and_no_signature_is_too_long():
    found = [f"{place(path)}: {wrong}" for path in FILES for wrong in oversized(path.read_text())]
    assert not found, "\n".join(found)


def test_the_check_of_lengths_can_fail():
    many = ", ".join(f"a{i}" for i in range(9))
    for text in ("x = 1\n" * 301, "def f():\n" + "    x = 1\n" * 60, f"def f({many}): ...", f"def f(*, {many}): ..."):
        assert oversized(text), text[:40]
    assert not oversized(f"@triton.jit\ndef f({many}): ...")


def test_no_class_name_is_used_twice():
    homes = defaultdict(list)
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                homes[node.name].append(place(path))
    twice = [f"{name}: {', '.join(places)}" for name, places in homes.items() if len(places) > 1 and name not in TWICE]
    assert not twice, "\n".join(twice)


def test_what_noisegate_exports_is_what_it_says():
    assert set(noisegate.__all__) <= set(dir(noisegate))
    for name in noisegate.__all__:  # which come when they are asked for
        assert getattr(noisegate, name) is not None
    with pytest.raises(AttributeError, match="nosuch"):
        noisegate.nosuch  # noqa: B018
    public = {
        name for name, value in vars(noisegate).items() if not name.startswith("_") and type(value).__name__ != "module"
    }
    assert public == set(noisegate.__all__)
    assert noisegate.__all__ == sorted(noisegate.__all__)


def test_what_types_say_is_exported_is_what_is_exported():
    block = next(node for node in ast.parse((ROOT / "__init__.py").read_text()).body if isinstance(node, ast.If))
    typed = {(node.module, alias.name) for node in block.body for alias in node.names}
    assert typed == {(home, name) for home, names in noisegate._HOMES.items() for name in names}


@pytest.mark.parametrize("module", ["noisegate", "noisegate.cli", "noisegate.version"])
def test_nothing_heavy_is_imported_before_it_is_needed(module):
    """So that Ctrl-C finds somebody who knows what to do with it."""
    heavy = ("torch", "numpy", "scipy", *OPTIONAL)
    code = f"import sys, {module}; print([name for name in {heavy!r} if name in sys.modules])"
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=os.environ)
    assert told.stdout.strip() == "[]"
