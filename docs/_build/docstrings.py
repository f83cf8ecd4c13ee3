"""The sections of our docstrings in the names that the API pages' parser knows."""

from __future__ import annotations

from typing import Any

import griffe


class SingularExample(griffe.Extension):
    """A section ``Example:`` of doctests is what the parser calls ``Examples:``."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Renames the section in one docstring."""
        if obj.docstring:
            obj.docstring.value = obj.docstring.value.replace("\nExample:\n", "\nExamples:\n")
