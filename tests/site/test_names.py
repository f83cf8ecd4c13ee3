"""Names in the pages exist: files in every page; functions, classes and fields in the pages about the code."""

from __future__ import annotations

import ast
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

import pytest

from tests.doc_blocks import ROOT
from tests.site.test_figures import tables

pytestmark = pytest.mark.site
ABOUT_THE_CODE = ("how-it-works", "adding-an-output", "adding-a-function", "adding-a-gpu-generation")
NOT_OURS = {"True", "unique_indices"}  # Python's, and a keyword of JAX's scatter
EXAMPLES = {"sum_p_cubed"}  # a function that a page adds
FILES = [
    PurePosixPath(name)
    for name in subprocess.run(["git", "ls-files"], capture_output=True, text=True, check=True, cwd=ROOT).stdout.split()
]
FOLDERS = {folder for file in FILES for folder in file.parents}


def defined_names(path: PurePosixPath) -> Iterator[str]:
    """The functions, classes, variables, fields and arguments of a module."""
    for node in ast.walk(ast.parse((ROOT / path).read_text())):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.arg):
            yield node.arg


DEFINED = {
    file: set(defined_names(file))
    for file in FILES
    if file.parts[0] in ("lce_jax", "lce_torch_bridge") and file.suffix == ".py"
}


def spans(page: Path) -> list[str]:
    """What stands between backticks, outside blocks of code and generated tables."""
    text = re.sub(
        r"<!-- table: .+? -->\n.*?<!-- /table -->|^```.*?^```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE
    )
    return re.findall(r"`([^`]+)`", " ".join(text.split()))


def is_path(span: str) -> bool:
    return span.endswith(".py") or re.fullmatch(r"[\w.-]+/[\w./-]*", span) is not None


def path_exists(path: str) -> bool:
    """Whether a file has this path, or its last parts; or a folder has."""
    parts = PurePosixPath(path).parts
    return any(known.parts[-len(parts) :] == parts for known in (*FILES, *FOLDERS))


def name_exists(chain: str) -> bool:
    """Whether a name is defined, or is a folder's; in a chain such as ``module.Class.field``, each part in one module.

    ``kl_`` stands for every name that begins with it.
    """
    *outer, name = chain.split(".")
    if name.endswith("_"):
        return any(defined.startswith(name) for names in DEFINED.values() for defined in names)
    if not outer and any(name in folder.parts for folder in FOLDERS):
        return True
    return any(
        name in names and all(part in names or part in file.with_suffix("").parts for part in outer)
        for file, names in DEFINED.items()
    )


@pytest.mark.parametrize("page", tables.PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_files_in_a_page_exist(page: Path) -> None:
    folders = ("lce_jax/", "lce_torch_bridge/", "tests/", "benchmarks/", "examples/", "notebooks/", "docs/")
    named = [span for span in spans(page) if span.startswith(folders) and is_path(span)]
    assert [path for path in named if not path_exists(path)] == []


@pytest.mark.parametrize("name", ABOUT_THE_CODE)
def test_names_in_a_page_about_the_code_exist(name: str) -> None:
    missing = set()
    for span in spans(ROOT / "docs" / f"{name}.md"):
        if is_path(span):
            missing |= set() if path_exists(span) else {span}
        elif not span.startswith(("make ", "python -m ")):
            chains = re.findall(r"(?<![\w\"])[A-Za-z_]\w*(?:\.\w+)*(?!\")", span)  # no strings
            missing |= {chain for chain in chains if not name_exists(chain)}
    assert missing - NOT_OURS - EXAMPLES == set()
