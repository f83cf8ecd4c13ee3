"""What the pages of docs/recipes print is what the programs of ``examples/`` run."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.site
ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "docs" / "recipes").glob("*.md"))
PROGRAMS = {path.relative_to(ROOT).as_posix(): path.read_text() for path in sorted((ROOT / "examples").glob("*.py"))}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_block_is_part_of_a_program_that_is_tested(page: Path) -> None:
    text = page.read_text()
    for code in re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        assert any(code in program for program in PROGRAMS.values()), code
    for code in re.findall(r"^```text\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        lines = code.splitlines()
        assert any(all(line in program for line in lines) for program in PROGRAMS.values()), code
    for name in re.findall(r"`((?:examples|tests)/[\w/.]+)`", text):
        assert (ROOT / name).exists(), name


def test_every_program_is_named_and_tested() -> None:
    pages = "".join(page.read_text() for page in PAGES)
    tests = "".join(path.read_text() for path in (ROOT / "tests").rglob("*.py"))
    for name in PROGRAMS:
        assert name in pages, name
        assert re.search(rf"\bimport (?:\(?[\w, ]*\b)?{Path(name).stem}\b|{re.escape(name)}", tests), name


def test_every_page_is_in_the_table() -> None:
    index = (ROOT / "docs" / "recipes" / "index.md").read_text()
    assert set(re.findall(r"\]\(([\w-]+\.md)\)", index)) == {page.name for page in PAGES} - {"index.md"}
