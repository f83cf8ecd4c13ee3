"""Our docstrings as the parser of the API pages knows them, with a link where one names a function that has a page."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import griffe

RETURNS = re.compile(r"(?<=\nReturns:\n).*?(?=\n\n\S|\Z)", re.DOTALL)
CODE_OR_COLON = re.compile(r"`[^`]*`|:")
NAME = re.compile(r"(?<!`)`([A-Za-z_][\w.]*)`(?!`)")
PUBLIC = Path(__file__).parents[1] / "api" / "names.json"  # by api.py: public name to where the parser finds it


def without_types(section: str) -> str:
    """``section`` as prose: the parser would take what stands before a colon for a type, but not before an entity."""
    return CODE_OR_COLON.sub(lambda found: "&#58;" if found[0] == ":" else found[0], section)


def with_links(text: str, module: str, public: dict[str, str]) -> str:
    """``text`` with each public name in backticks as a link: a name of the same module first, then of ``lce_jax``."""
    package = module.partition(".")[0]

    def link(found: re.Match[str]) -> str:
        for path in (f"{module}.{found[1]}", f"{package}.{found[1]}", f"lce_jax.{found[1]}", found[1]):
            if path in public:
                return f"[{found[0]}][{public[path]}]"
        return found[0]

    return NAME.sub(link, text)


class AsParsed(griffe.Extension):
    """A section ``Example:`` is what the parser calls ``Examples:``, and ``Returns:`` names no type."""

    def __init__(self) -> None:
        self.public = json.loads(PUBLIC.read_text())

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Adapts one docstring."""
        if obj.docstring:
            text = obj.docstring.value.replace("\nExample:\n", "\nExamples:\n")
            text = RETURNS.sub(lambda found: without_types(found[0]), text)
            where = obj.path if obj.is_module else obj.path.rpartition(".")[0]
            module = re.sub(r"\._\w+|\.ops\b", "", where)
            obj.docstring.value = with_links(text, module, self.public)
