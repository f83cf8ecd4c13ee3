"""Rooms that a reader can take in: how long a file and a function may be."""

from __future__ import annotations

import ast
import pathlib

import pytest

ROOT = pathlib.Path(__file__).parents[2]
FOLDERS = ("lce_jax", "lce_torch_bridge", "tests", "examples", "notebooks")
FILES = [*sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")), ROOT / "conftest.py"]
FILE_LINES = 300
FUNCTION_LINES = 45  # of code: signature and docstring are not counted
KERNEL_LINES = 60  # the body of a kernel is one scope


def code_lines(function: ast.FunctionDef) -> int:
    body = function.body[1:] if ast.get_docstring(function) else function.body
    return (function.end_lineno or 0) - body[0].lineno + 1 if body else 0


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_length(path: pathlib.Path) -> None:
    text = path.read_text()
    assert len(text.splitlines()) <= FILE_LINES
    most = KERNEL_LINES if path.parent.name.startswith("sm") else FUNCTION_LINES
    functions = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef)]
    assert {node.name: code_lines(node) for node in functions if code_lines(node) > most} == {}
