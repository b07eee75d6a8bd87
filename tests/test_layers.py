"""Imports point down (decision 0012), the core needs torch, numpy and scipy alone, no one breaks house rules."""

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import noisegate

ROOT = Path(noisegate.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))

LAYERS = {
    **dict.fromkeys(
        (
            "chacha",
            "checks",
            "compute",
            "entropy",
            "errors",
            "kernels",
            "capacity",
            "streams",
            "vectors",
            "version",
        ),
        0,
    ),
    **dict.fromkeys(("views", "roles", "catalog", "sampling", "models", "data", "flips"), 1),
    **dict.fromkeys(("workers", "attacks", "aggregators", "privacy"), 2),
    "protocol": 3,
    **dict.fromkeys(("simulate", "federation", "flower"), 4),
    **dict.fromkeys(("runs", "sweeps", "paper", "redteam", "report", "audit"), 5),
    "cli": 6,
    "": 7,  # noisegate/__init__.py and __main__.py: they may import everything, and nobody may import them
}
SAME_LAYER = {
    ("checks", "errors"),
    ("compute", "checks"),
    ("compute", "errors"),
    ("entropy", "chacha"),
    ("entropy", "kernels"),
    ("streams", "errors"),
    ("vectors", "errors"),
    ("vectors", "kernels"),
}
"""The arrows between two parts of one layer: all in layer 0, and without a cycle. There are no others."""

CORE = ("simulate", "workers", "attacks", "aggregators", "views", "sampling", "vectors", "streams", "checks", "errors")
CORE_MAY_IMPORT = set(sys.stdlib_module_names) | {"torch", "numpy", "scipy", "noisegate"}
OPTIONAL = ("dp_accounting", "typer", "rich", "sklearn", "pooch", "plotly")


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
    return LAYERS[other] < LAYERS[own] or arrow in SAME_LAYER


def test_every_part_has_a_layer():
    assert {part_of(path) for path in FILES} <= set(LAYERS)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_point_down(path):
    wrong = [arrow for arrow in arrows(path.read_text(), part_of(path)) if not points_down(arrow)]
    assert not wrong


def test_the_arrows_within_a_layer_are_the_stated_ones_and_have_no_cycle():
    found = {
        a for path in FILES for a in arrows(path.read_text(), part_of(path)) if a[0] and LAYERS[a[0]] == LAYERS[a[1]]
    }
    assert found == SAME_LAYER
    assert all(LAYERS[own] == LAYERS[other] == 0 for own, other in SAME_LAYER)
    left = set(SAME_LAYER)
    while left:
        leaves = {other for _, other in left} - {own for own, _ in left}
        assert leaves, f"cycle in {left}"
        left = {(own, other) for own, other in left if other not in leaves}


@pytest.mark.parametrize(
    ("text", "own", "good"),
    [
        ("from noisegate.workers import Normalized", "aggregators", False),  # siblings
        ("def f():\n    from noisegate import lab", "simulate", False),  # up, inside a function
        ("import noisegate.simulate", "flower", False),
        ("from noisegate import run", "cli", False),  # the package's own __init__
        ("import noisegate", "lab", False),
        ("from noisegate import views", "workers", True),
        ("from noisegate.workers import layers", "workers", True),
        ("from noisegate import checks", "errors", False),
    ],
)
def test_the_check_of_arrows_can_fail(text, own, good):
    assert all(points_down(arrow) for arrow in arrows(text, own)) is good


CORE_FILES = [path for path in FILES if part_of(path) in CORE and "kernels" not in path.parts]
"""Kernels need Triton, and are imported by who has a device that it compiles for."""


@pytest.mark.parametrize("path", CORE_FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_the_core_needs_torch_numpy_and_scipy_only(path):
    tree = ast.parse(path.read_text())
    tops = {name.partition(".")[0] for node in tree.body for name in imported(node) if not _is_definition(node)}
    assert tops <= CORE_MAY_IMPORT


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


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_assert_no_bare_except_no_global_generator(path):
    assert not faults(path.read_text())


@pytest.mark.parametrize(
    "text",
    [
        "assert x",
        "try:\n    f()\nexcept:\n    pass",
        "torch.manual_seed(1)",
        "torch.random.manual_seed(1)",
        "torch.cuda.manual_seed_all(1)",
        "np.random.seed(1)",
        "np.random.normal(3)",
        "import random",
        "from random import shuffle",
    ],
)
def test_the_check_of_house_rules_can_fail(text):
    assert faults(text)


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
