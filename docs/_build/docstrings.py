"""Our docstrings as the parser of the API pages knows them."""

from __future__ import annotations

import re
from typing import Any

import griffe

RETURNS = re.compile(r"(?<=\nReturns:\n).*?(?=\n\n\S|\Z)", re.DOTALL)
CODE_OR_COLON = re.compile(r"`[^`]*`|:")


def without_types(section: str) -> str:
    """``section`` as prose: the parser would take what stands before a colon for a type, but not before an entity."""
    return CODE_OR_COLON.sub(lambda found: "&#58;" if found[0] == ":" else found[0], section)


class AsParsed(griffe.Extension):
    """A section ``Example:`` is what the parser calls ``Examples:``, and ``Returns:`` names no type."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Adapts one docstring."""
        if obj.docstring:
            text = obj.docstring.value.replace("\nExample:\n", "\nExamples:\n")
            obj.docstring.value = RETURNS.sub(lambda found: without_types(found[0]), text)
