"""Runs the cells of a notebook in their order, as Jupyter does, and tells what they print and show. No tests here.

    python tests/notebooks.py examples/hospitals.ipynb

prints a list with the outputs of each code cell as JSON. A process of its own runs the cells as its `__main__`.
"""

import ast
import contextlib
import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

Notebook = dict[str, Any]

FOLDER = Path(__file__).parents[1] / "examples"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))


def read(path: Path) -> Notebook:
    """A notebook as it is in its file."""
    return json.loads(path.read_text(encoding="utf-8"))


def written(notebook: Notebook) -> str:
    """The text of a notebook's file."""
    return json.dumps(notebook, indent=1, ensure_ascii=False) + "\n"


def executed(path: Path, folder: Path) -> Notebook:
    """The notebook with what its cells print and show now. folder: where they are played. RuntimeError if one fails."""
    command = [sys.executable, str(Path(__file__).resolve()), str(path.resolve())]
    fixed = {"OMP_NUM_THREADS": "1", "NOISEGATE_KEY": str(folder / ".key")}
    done = subprocess.run(command, cwd=folder, env=os.environ | fixed, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{path.name}: {done.stderr}")
    notebook, answers = read(path), json.loads(done.stdout)
    codes = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    for number, (cell, outputs) in enumerate(zip(codes, answers, strict=True), 1):
        cell.update(execution_count=number, outputs=outputs)
        for output in outputs:
            if output["output_type"] == "execute_result":
                output["execution_count"] = number
    return notebook


def text_of(notebook: Notebook) -> str:
    """What the cells of a notebook print and show, as text."""
    outputs = [output for cell in notebook["cells"] for output in cell.get("outputs", [])]
    return "\n".join("".join(output.get("text") or output["data"]["text/plain"]) for output in outputs)


def _play(path: Path) -> list[list[dict[str, Any]]]:
    """The outputs of each code cell, run in this process's `__main__`."""
    cells = [cell for cell in read(path)["cells"] if cell["cell_type"] == "code"]
    namespace = sys.modules["__main__"].__dict__
    return [_outputs("".join(cell["source"]), f"{path.name}[{i}]", namespace) for i, cell in enumerate(cells, 1)]


def _outputs(source: str, name: str, namespace: dict[str, Any]) -> list[dict[str, Any]]:
    body = ast.parse(source, name).body
    last = body.pop() if body and isinstance(body[-1], ast.Expr) else None
    value, printed = None, io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(ast.Module(body, []), name, "exec"), namespace)
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), name, "eval"), namespace)
    outputs: list[dict[str, Any]] = []
    if printed.getvalue():
        lines = printed.getvalue().splitlines(keepends=True)
        outputs.append({"output_type": "stream", "name": "stdout", "text": lines})
    if value is not None:
        data = {"text/plain": str(value).splitlines(keepends=True)}
        if hasattr(value, "_repr_html_"):
            data["text/html"] = value._repr_html_().splitlines(keepends=True)
        outputs.append({"output_type": "execute_result", "metadata": {}, "data": data})
    return outputs


if __name__ == "__main__":
    answer = _play(Path(sys.argv[1]))
    print(json.dumps(answer))
