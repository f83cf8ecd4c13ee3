"""Numbers on command lines: each function parses one, or raises an error that says what to write."""

from __future__ import annotations

import argparse
import math

from lce_jax.types import scalars


def integer(text: str, least: int) -> int:
    """Parses a whole number of at least ``least`` that fits in 31 bits."""
    try:
        value = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a whole number: write all its digits, such as 8192"
        ) from None
    if not least <= value < scalars.INT32_MAX:
        raise argparse.ArgumentTypeError(f"{value} is not between {least} and {scalars.INT32_MAX - 1}")
    return value


def positive(text: str) -> int:
    """Parses a whole number of at least 1."""
    return integer(text, 1)


def not_negative(text: str) -> int:
    """Parses a whole number of at least 0."""
    return integer(text, 0)


def positives(text: str) -> tuple[int, ...]:
    """Parses whole numbers of at least 1, separated by commas."""
    return tuple(positive(part) for part in text.split(","))


def shape(text: str) -> tuple[int, int, int]:
    """Parses tokens, hidden size and vocabulary: three numbers separated by commas."""
    sizes = positives(text)
    if len(sizes) != 3:
        raise argparse.ArgumentTypeError(f"{text!r} must be three numbers: tokens, hidden size, vocabulary")
    return sizes[0], sizes[1], sizes[2]


def gibibytes(text: str) -> float:
    """Parses an amount of memory in GiB, at least 0."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < 1 << 20:
        raise argparse.ArgumentTypeError(f"{text} must be a number of GiB, at least 0, such as 4 or 0.5")
    return value
