"""``python docs/_build/programs.py``: writes the programs of ``examples/`` into the pages of ``docs/recipes``.

A program stands between ``<!-- program: examples/NAME.py -->`` and ``<!-- /program -->``; of
``<!-- program: examples/NAME.py up to main -->`` only what comes before that function. A test checks that each is up to
date.
"""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "docs" / "recipes").glob("*.md"))
PLACE = re.compile(r"(<!-- program: (\S+)(?: up to (\w+))? -->\n)(.*?)(<!-- /program -->)", re.DOTALL)


def block(name: str, end: str | None = None) -> str:
    """A program as a code block with its name above it, up to a function if one is named."""
    text, found, _ = (ROOT / name).read_text().partition(f"\n\n\ndef {end}(")
    if end and not found:
        raise ValueError(f"{name} has no function {end}")
    return f'```python title="{name}"\n{text.rstrip()}\n```\n'


def written(page: Path) -> str:
    """The text of a page with its programs as they should be."""
    return PLACE.sub(lambda found: f"{found[1]}{block(found[2], found[3])}{found[5]}", page.read_text())


if __name__ == "__main__":
    for path in PAGES:
        path.write_text(written(path))
