"""``python docs/_build/programs.py``: writes the programs of ``examples/`` into the pages that show them.

A program stands between ``<!-- program: examples/NAME.py -->`` and ``<!-- /program -->``. With
``<!-- program: examples/NAME.py up to main -->`` it ends before that function. A test checks that all are up to date.
"""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
RECIPES = sorted((ROOT / "docs" / "recipes").glob("*.md"))
PAGES = [*RECIPES, ROOT / "docs" / "trainer-and-sampler.md"]
PLACE = re.compile(r"(<!-- program: (\S+)(?: up to (\w+))? -->\n)(.*?)(<!-- /program -->)", re.DOTALL)


def block(name: str, end: str | None = None) -> str:
    """Returns a program as a code block with its name as the title. ``end`` names the function before which it ends."""
    text, has_end, _ = (ROOT / name).read_text().partition(f"\n\n\ndef {end}(")
    if end and not has_end:
        raise ValueError(f"{name} has no function {end}")
    return f'```python title="{name}"\n{text.rstrip()}\n```\n'


def render(page: Path) -> str:
    """Returns the text of a page with its programs up to date."""
    return PLACE.sub(lambda match: f"{match[1]}{block(match[2], match[3])}{match[5]}", page.read_text())


if __name__ == "__main__":
    for path in PAGES:
        path.write_text(render(path))
