"""Names that a shell can complete. They are read from the catalogs' source: to import a catalog takes seconds."""

import ast
from collections.abc import Callable, Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
CATALOGS = {
    "accountants": ("privacy/pricing.py", "ACCOUNTANTS"),
    "aggregators": ("aggregators/__init__.py", "AGGREGATORS"),
    "asleep": ("attacks/dormant.py", "ASLEEP"),
    "attacks": ("attacks/__init__.py", "ATTACKS"),
    "datasets": ("data/sources.py", "DatasetSource"),
    "devices": ("compute.py", "DEVICES"),
    "features": ("features/naming.py", "FEATURES"),
    "metrics": ("runs/measures.py", "NAMES"),
    "models": ("models.py", "MODELS"),
    "objectives": ("redteam/objectives.py", "OBJECTIVES"),
    "samplings": ("sampling/__init__.py", "SAMPLINGS"),
    "workers": ("workers/__init__.py", "WORKERS"),
}
"""Where names are: a file, and a dict or a tuple in it; or a class, each of whose objects there has a name."""


def names_of(kind: str) -> Callable[[str], list[str]]:
    """What completes a flag that takes one of these names. Where none fits, the shell offers files."""

    def complete(incomplete: str) -> list[str]:
        return [name for name in names(kind) if name.startswith(incomplete)]

    return complete


def names(kind: str) -> list[str]:
    """The names of a catalog."""
    if kind == "experiments":
        return sorted(path.stem for path in (ROOT / "paper" / "experiments").glob("*.toml"))
    file, variable = CATALOGS[kind]
    return list(_read(ast.parse((ROOT / file).read_text(encoding="utf-8")), variable))


def _read(tree: ast.Module, variable: str) -> Iterator[str]:
    assigned = dict(_assignments(tree))
    value = assigned.get(variable)
    entries = value.keys if isinstance(value, ast.Dict) else getattr(value, "elts", [])
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == variable:
            entries = [*entries, *(keyword.value for keyword in node.keywords if keyword.arg == "name")]
    for entry in entries:
        meant = assigned.get(entry.id) if isinstance(entry, ast.Name) else entry
        if isinstance(meant, ast.Constant):
            yield str(meant.value)


def _assignments(tree: ast.Module) -> Iterator[tuple[str, ast.expr]]:
    for node in tree.body:
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                if isinstance(target, ast.Name):
                    yield target.id, node.value
