"""Parameters of a test in fewer combinations than all: `make test` runs a part that `make test-all` completes."""

from __future__ import annotations

import collections
import itertools
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import pytest


def pairs_of(strength: int = 2, **values: Sequence[Any]) -> pytest.MarkDecorator:
    """Parametrizes with every combination of ``values``; those that add nothing are slow.

    Among the others each value occurs with each value of every other parameter, or with a ``strength`` of 1 each value
    occurs at all, and with 3 each three values. A mistake needs more than that to go unseen: the parameters have been
    tested alone, or with others, elsewhere.
    """
    everything = list(itertools.product(*(range(len(some)) for some in values.values())))
    chosen = covering(everything, strength)
    params = []
    for places in everything:
        row = [some[place] for some, place in zip(values.values(), places, strict=True)]
        params.append(pytest.param(*row, marks=() if places in chosen else pytest.mark.slow))
    return pytest.mark.parametrize(tuple(values), params, ids=name)


def values_of(parameter: str, values: Iterable[Any], *, slow: Collection[Any]) -> pytest.MarkDecorator:
    """Parametrizes with the values, of which some are slow."""
    params = [pytest.param(x, marks=pytest.mark.slow if x in slow else ()) for x in values]
    return pytest.mark.parametrize(parameter, params, ids=name)


def name(value: Any) -> str:
    """In a test's name. Arrays are called by their options."""
    if callable(value) and not isinstance(value, type):
        return str(getattr(value, "__name__", value))
    holds_arrays = isinstance(value, dict) and any(hasattr(x, "shape") for x in value.values())
    return ", ".join(value) if holds_arrays else str(value)


def covering(everything: Sequence[tuple[int, ...]], strength: int) -> set[tuple[int, ...]]:
    """Some of ``everything``, which hold all groups of ``strength`` places: each time one with most new ones.

    Of several the first whose values are the least used.
    """
    missing, chosen = {group for one in everything for group in groups(one, strength)}, set()
    used = collections.Counter[Any]()
    while missing:
        best = max(
            everything,
            key=lambda one: (len(groups(one, strength) & missing), -sum(used[place] for place in groups(one, 1))),
        )
        missing -= groups(best, strength)
        used.update(groups(best, 1))
        chosen.add(best)
    return chosen


def groups(places: tuple[int, ...], strength: int) -> set[tuple[tuple[int, int], ...]]:
    """Every choice of ``strength`` parameters, each with its value's place."""
    return set(itertools.combinations(enumerate(places), strength))
