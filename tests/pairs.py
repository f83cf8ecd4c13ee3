"""Parameters of a test in fewer combinations than all: `make test` runs a part that `make test-all` completes.

A test is in `make test` unless it is marked ``slow``: another one that stays shows the same mechanism. Of one that is
marked ``fast`` only those combinations stay whose names hold one of the mark's. Of what has several ``parametrize`` as
many stay as hold each value: the parameters have been tested alone, or with others, elsewhere.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from typing import Any

import pytest

type Test = Callable[..., None]


def combined(**values: Collection[Any]) -> Callable[[Test], Test]:
    """Parametrizes with every combination of ``values``."""

    def mark(test: Test) -> Test:
        for parameter, some in values.items():
            test = pytest.mark.parametrize(parameter, some, ids=name)(test)
        return test

    return mark


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


def mark_slow(items: Iterable[pytest.Item]) -> None:
    """The combinations that `make test` leaves to `make test-all`. A ``fast`` that names none of them says nothing."""
    tests: dict[str, list[Any]] = collections.defaultdict(list)
    for item in items:
        if hasattr(item, "callspec") and not item.get_closest_marker("slow"):
            tests[item.nodeid.partition("[")[0]].append(item)
    for some in tests.values():
        mark = some[0].get_closest_marker("fast")
        named = [item for item in some if not mark or any(name in item.callspec.id for name in mark.args)] or some
        kept = covering({item: values_in(item) for item in named}) or named
        for item in set(some).difference(kept):
            item.add_marker("slow")


def values_in(item: Any) -> tuple[Any, ...]:
    """Of each ``parametrize``, which values the item has."""
    axes = [mark.args[0] for mark in item.iter_markers("parametrize")]
    named = [axis.replace(" ", "").split(",") if isinstance(axis, str) else axis for axis in axes]
    return tuple(tuple(id(item.callspec.params[name]) for name in names) for names in named)


def covering[Key](everything: Mapping[Key, Sequence[Hashable]]) -> set[Key]:
    """Some keys, whose values are all that there are in each place: each time one with most new ones.

    Of several the first whose values are the least used.
    """
    pairs = {key: set(enumerate(values)) for key, values in everything.items()}
    missing, chosen = set[Any]().union(*pairs.values()), set()
    used = collections.Counter[Any]()
    while missing:
        best = max(pairs, key=lambda key: (len(pairs[key] & missing), -sum(used[pair] for pair in pairs[key])))
        missing -= pairs[best]
        used.update(pairs[best])
        chosen.add(best)
    return chosen
