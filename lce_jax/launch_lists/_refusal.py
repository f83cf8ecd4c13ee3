"""What no list of kernels serves."""

from __future__ import annotations


class UnservedError(ValueError):
    """A pass holds something that is no kernel; the message names it."""
