"""Checks of numbers, flags and names, and their limits and choices. `lce_jax` and `lce_torch_bridge` share them.

A check takes an argument's name and value. It returns a plain Python value, or raises a ``TypeError`` or ``ValueError``
that shows the wrong value.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Sequence
from typing import Any

import numpy as np

__all__ = [
    "ATOM",
    "DIRECTIONS",
    "DIVERGENCES",
    "FLOAT32_MAX",
    "FLOAT32_TINY",
    "INT32_MAX",
    "MOST_CANDIDATES",
    "MOST_MASS",
    "RESTS",
    "bound",
    "check_beta",
    "check_choice",
    "check_k",
    "check_part_size",
    "flag",
    "format_bytes",
    "fraction",
    "integer",
    "is_integer",
    "is_number",
    "is_temperature",
    "not_negative",
    "num_bytes",
    "number",
    "padded_rank",
    "positive",
    "real",
    "smoothing",
]

FLOAT32_MAX, FLOAT32_TINY = float(np.finfo(np.float32).max), float(np.finfo(np.float32).tiny)
INT32_MAX = int(np.iinfo(np.int32).max)
MOST_CANDIDATES = 512  # the largest number of ids per token
DIRECTIONS = ("forward", "reverse", "jsd", "tv")  # directions of `linear_kl`
DIVERGENCES = ("forward_kl", "reverse_kl", "jsd")  # divergences of `distillation_loss`
RESTS = ("bin", "drop", "renormalize")  # how a distillation treats the probability outside the candidates
MOST_MASS = 1.01  # no rounded sum of probabilities exceeds this, even with bfloat16 log-probabilities
ATOM = 8  # the number of vocabulary columns in the smallest block that kernels copy


def padded_rank(rank: int) -> int:
    """Returns an adapter's rank, rounded up to a multiple of 64, which is a swizzle atom of the kernels."""
    return -(-rank // 64) * 64


def number(name: str, value: Any) -> float:
    """Returns ``value`` as a float. It must be finite in float32."""
    if type(value) is not float:
        value = real(name, value)
    if not abs(value) <= FLOAT32_MAX:
        raise ValueError(f"{name} must be finite in float32, got {value}")
    return value


def bound(name: str, value: Any) -> float:
    """Returns ``value`` as a float. It must be infinite, or finite in float32."""
    value = real(name, value)
    return value if math.isinf(value) else number(name, value)


def real(name: str, value: Any) -> float:
    """Returns a Python or NumPy number as a float, whatever its value."""
    if isinstance(value, np.generic) and not isinstance(value, np.bool_):
        value = value.item()  # including scalars of ml_dtypes
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name} must be a Python number, got {type(value).__name__} {value!r}")
    return float(value)


def positive(name: str, value: Any) -> float:
    """Returns ``value`` as a float. It must be finite and positive in float32, where subnormal numbers count as 0."""
    value = number(name, value)
    if value < FLOAT32_TINY:
        raise ValueError(f"{name} must be positive in float32, got {value}")
    return value


def is_temperature(x: Any) -> Any:
    """Whether ``x``, in float32 or float64, is positive and finite in float32, where subnormal numbers count as 0."""
    return (x >= FLOAT32_TINY) & (x <= FLOAT32_MAX)


def not_negative(name: str, value: Any) -> float:
    """Returns ``value`` as a float. It must be finite and at least 0."""
    value = number(name, value)
    if value < 0:
        raise ValueError(f"{name} must not be negative, got {value}")
    return value


def fraction(name: str, value: Any) -> float:
    """Returns ``value`` as a float. It must lie in [0, 1)."""
    value = number(name, value)
    if not 0 <= value < 1:
        raise ValueError(f"{name} must lie in [0, 1), got {value}")
    return value


def smoothing(value: Any) -> float:
    """Returns a ``label_smoothing`` as a float. It must lie in [0, 1], as in torch; with 1, labels have no effect."""
    value = number("label_smoothing", value)
    if not 0 <= value <= 1:
        raise ValueError(f"label_smoothing must lie in [0, 1], got {value}")
    return value


def is_integer(value: Any) -> bool:
    """Whether ``value`` is a Python or NumPy integer, and not a bool."""
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def is_number(value: Any) -> bool:
    """Whether ``value`` is a Python or NumPy scalar, bool included. Programs contain these values as constants."""
    return isinstance(value, numbers.Number | np.generic)


def integer(name: str, value: Any) -> int:
    """Returns ``value`` as a Python int. It must be an integer that fits in an int32."""
    if not is_integer(value):
        raise TypeError(f"{name} must be a Python integer, got {value!r}")
    if abs(value) >= INT32_MAX:
        raise ValueError(f"{name} must lie within ±{INT32_MAX - 1}, got {value}")
    return int(value)


def check_beta(beta: Any, argument: str, chosen: str, ends: tuple[str, ...]) -> float | None:
    """Returns the teacher's weight in a mixture: the β of a generalised JSD (default 0.5), and 0.5 for "tv".

    Returns None if ``chosen`` is another divergence. ``ends`` names the divergences that β = 0 and β = 1 would be.
    """
    if chosen != "jsd":
        if beta is not None:
            raise ValueError(
                f'beta={beta!r} is a weight of {argument}="jsd", but {argument} is "{chosen}": leave beta out, or '
                f'write {argument}="jsd"'
            )
        return 0.5 if chosen == "tv" else None
    beta = number("beta", 0.5 if beta is None else beta)
    if not 0 < beta < 1:
        raise ValueError(f'beta must lie in (0, 1), got {beta}: {argument}="{ends[0]}" is 0, "{ends[1]}" is 1')
    return beta


def num_bytes(name: str, value: Any) -> int:
    """Returns ``value``, a number of bytes, as a Python int. It may exceed an int32."""
    if not is_integer(value) or value < 0:
        raise ValueError(f"{name} must be a whole number of bytes, at least 0, got {value!r}")
    return int(value)


def format_bytes(count: float) -> str:
    """Formats ``count`` in the largest binary unit with a value of 1 or more: ``3 << 20`` is ``'3.0 MiB'``."""
    if count < 1024:
        return f"{count:.0f} B"
    for unit in ("KiB", "MiB", "GiB"):
        count /= 1024
        if count < 1024 or unit == "GiB":
            break
    return f"{count:,.1f} {unit}"


def check_part_size(value: Any, cache_bytes: int | None, gradient_threshold: float) -> int | None:
    """Checks a ``vocab_part_size``, in columns, and returns it; None for a vocabulary without parts.

    The size must be a multiple of 8, because TMA reads the weight in atoms of 8 columns.
    """
    if value is None:
        return None
    value = integer("vocab_part_size", value)
    if value < 1 or value % ATOM:
        raise ValueError(f"vocab_part_size must be a positive multiple of {ATOM}, got {value}")
    excluded = {"cache_bytes": cache_bytes, "gradient_threshold": gradient_threshold}
    for name, excluded_value in excluded.items():
        if excluded_value:
            raise ValueError(
                f"vocab_part_size={value} with {name}={excluded_value}: the backward does not support vocab_part_size, "
                f"so it cannot use tiles that the forward keeps. Write {name}=0, or vocab_part_size=None"
            )
    return value


def flag(name: str, value: Any) -> bool:
    """Returns a flag as a Python bool."""
    if not isinstance(value, bool | np.bool_):
        raise TypeError(f"{name} must be True or False, got {value!r}")
    return bool(value)


def check_choice(name: str, value: Any, choices: Sequence[str]) -> None:
    """Refuses a value that is not one of ``choices``."""
    if value not in choices:
        *first, last = (f'"{choice}"' for choice in choices)
        raise ValueError(f"{name} must be {', '.join(first)} or {last}, got {value!r}")


def check_k(k: Any, vocab_size: int | None = None) -> int:
    """Returns the k of `linear_topk` as a Python int. It must not exceed ``vocab_size``, if that is known."""
    k = integer("k", k)
    if not 1 <= k <= MOST_CANDIDATES:
        raise ValueError(f"k must lie in [1, {MOST_CANDIDATES}], got {k}")
    if vocab_size is not None and k > vocab_size:
        raise ValueError(f"k must be at most the vocabulary, {vocab_size}, got {k}")
    return k
