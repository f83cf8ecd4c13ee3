"""Rooms that a reader can take in: how long a file and a function may be, and how large the house."""

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


# What the two packages are today. Less is better: lower the numbers with it.
PACKAGES_LINES = 28_587
PACKAGES_FILES = 147
TESTS_LINES = 33_695


def test_size() -> None:
    """Ceilings that only fall."""
    packages, tests = (
        [path.read_text().count("\n") for path in FILES if path.relative_to(ROOT).parts[0] in folders]
        for folders in (("lce_jax", "lce_torch_bridge"), ("tests",))
    )
    print(f"packages: {sum(packages)} lines in {len(packages)} files; tests: {sum(tests)} lines in {len(tests)} files")
    assert sum(packages) <= PACKAGES_LINES
    assert len(packages) <= PACKAGES_FILES
    assert sum(tests) <= TESTS_LINES


def test_no_class_name_twice() -> None:
    """But those that both packages, or both Flax APIs, make public."""
    trees = [ast.parse(path.read_text()) for path in FILES if path.relative_to(ROOT).parts[0] in FOLDERS[:2]]
    names = [node.name for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    assert sorted(names) == sorted([*{*names}, "LMHead", "LogprobOutput", "TopK"])
