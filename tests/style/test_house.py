"""How long a file and a function may be."""

from __future__ import annotations

import ast
import pathlib

ROOT = pathlib.Path(__file__).parents[2]
FOLDERS = ("lce_jax", "lce_torch_bridge", "tests", "benchmarks", "examples", "notebooks")
FILES = [*sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")), ROOT / "conftest.py"]
FILE_LINES = 600
FUNCTION_LINES = 45  # of code: signature and docstring are not counted
KERNEL_LINES = 60  # the body of a kernel is one scope


def code_lines(function: ast.FunctionDef) -> int:
    body = function.body[1:] if ast.get_docstring(function) else function.body
    return (function.end_lineno or 0) - body[0].lineno + 1 if body else 0


def test_length() -> None:
    too_long = {}
    for path in FILES:
        text, name = path.read_text(), str(path.relative_to(ROOT))
        if (lines := len(text.splitlines())) > FILE_LINES:
            too_long[name] = lines
        most = KERNEL_LINES if path.parent.name in ("mma", "sm90") else FUNCTION_LINES
        functions = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef)]
        too_long |= {f"{name}:{x.name}": code_lines(x) for x in functions if code_lines(x) > most}
    assert too_long == {}
