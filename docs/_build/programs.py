"""``python docs/_build/programs.py``: writes the programs of ``examples/`` into the pages of ``docs/recipes``, whole.

A program stands between ``<!-- program: examples/NAME.py -->`` and ``<!-- /program -->``. A test checks that each is
up to date.
"""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "docs" / "recipes").glob("*.md"))
PLACE = re.compile(r"(<!-- program: (.+?) -->\n)(.*?)(<!-- /program -->)", re.DOTALL)


def block(name: str) -> str:
    """A program as a code block with its name above it."""
    return f'```python title="{name}"\n{(ROOT / name).read_text()}```\n'


def written(page: Path) -> str:
    """The text of a page with its programs as they should be."""
    return PLACE.sub(lambda found: f"{found[1]}{block(found[2])}{found[4]}", page.read_text())


if __name__ == "__main__":
    for path in PAGES:
        path.write_text(written(path))
