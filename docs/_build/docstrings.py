"""Adapts docstrings to the parser of the API pages, and links the names in them that have a page."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import griffe

RETURNS = re.compile(r"(?<=\nReturns:\n).*?(?=\n\n\S|\Z)", re.DOTALL)
CODE_OR_COLON = re.compile(r"`[^`]*`|:")
NAME = re.compile(r"(?<!`)`([A-Za-z_][\w.]*)`(?!`)")
PUBLIC = Path(__file__).parents[1] / "api" / "names.json"  # written by api.py: the parser's path of each public name


def hide_types(section: str) -> str:
    """Replaces colons by their HTML entity, because the parser would read the words before a colon as a type."""
    return CODE_OR_COLON.sub(lambda match: "&#58;" if match[0] == ":" else match[0], section)


def add_links(text: str, module: str, public: dict[str, str]) -> str:
    """Makes public names in backticks links: to a name of the same module, else of the package, else of ``lce_jax``."""
    package = module.partition(".")[0]

    def link(match: re.Match[str]) -> str:
        for path in (f"{module}.{match[1]}", f"{package}.{match[1]}", f"lce_jax.{match[1]}", match[1]):
            if path in public:
                return f"[{match[0]}][{public[path]}]"
        return match[0]

    return NAME.sub(link, text)


class AsParsed(griffe.Extension):
    """Renames the section ``Example:`` to the parser's ``Examples:``. ``Returns:`` names no type."""

    def __init__(self) -> None:
        self.public = json.loads(PUBLIC.read_text())

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Adapts one docstring."""
        if obj.docstring:
            text = obj.docstring.value.replace("\nExample:\n", "\nExamples:\n")
            text = RETURNS.sub(lambda match: hide_types(match[0]), text)
            where = obj.path if obj.is_module else obj.path.rpartition(".")[0]
            module = re.sub(r"\._\w+|\.ops\b", "", where)
            obj.docstring.value = add_links(text, module, self.public)
