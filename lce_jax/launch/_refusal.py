"""What a program may hold that a launch without XLA does not serve."""

from __future__ import annotations


class UnservedError(ValueError):
    """The program holds something that only XLA runs; the message names it."""
