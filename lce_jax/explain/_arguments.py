"""Numbers on the command lines of this package: what they may be, and what to write in place of one that is wrong."""

from __future__ import annotations

import argparse
import math

from lce_jax.types import scalars


def integer(text: str, least: int) -> int:
    """A whole number from ``least`` on that 31 bits hold."""
    try:
        value = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number: write all its digits, such as 8192") from None
    if not least <= value < scalars.INT32_MAX:
        raise argparse.ArgumentTypeError(f"{value} is not between {least} and {scalars.INT32_MAX - 1}")
    return value


def positive(text: str) -> int:
    """A whole number from 1 on."""
    return integer(text, 1)


def not_negative(text: str) -> int:
    """A whole number from 0 on."""
    return integer(text, 0)


def positives(text: str) -> tuple[int, ...]:
    """Whole numbers from 1 on, with commas between them."""
    return tuple(positive(part) for part in text.split(","))


def shape(text: str) -> tuple[int, int, int]:
    """Tokens, hidden size and vocabulary."""
    sizes = positives(text)
    if len(sizes) != 3:
        raise argparse.ArgumentTypeError(f"{text!r} must be three numbers: tokens, hidden size, vocabulary")
    return sizes[0], sizes[1], sizes[2]


def gibibytes(text: str) -> float:
    """An amount of memory, at least 0."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < 1 << 20:
        raise argparse.ArgumentTypeError(f"{text} must be a number of GiB, at least 0, such as 4 or 0.5")
    return value
