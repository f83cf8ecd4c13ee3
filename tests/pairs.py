"""Chooses the combinations of parameters that `make test` runs. `make test-all` runs the others too.

A test marked ``slow`` is not in `make test`, because a test that is there shows the same mechanism. Of a test marked
``fast``, `make test` runs the combinations whose names contain one of the mark's arguments. Of a test with several
``parametrize``, it runs as many combinations as are needed for each value to occur: other tests have the parameters
alone, or in other combinations.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from typing import Any

import pytest

type Test = Callable[..., None]


def combined(**values: Collection[Any]) -> Callable[[Test], Test]:
    """Parametrizes a test with every combination of ``values``."""

    def mark(test: Test) -> Test:
        for parameter, some in values.items():
            test = pytest.mark.parametrize(parameter, some, ids=name)(test)
        return test

    return mark


def values_of(parameter: str, values: Iterable[Any], *, slow: Collection[Any]) -> pytest.MarkDecorator:
    """Parametrizes a test with ``values``, of which those in ``slow`` are marked."""
    params = [pytest.param(x, marks=pytest.mark.slow if x in slow else ()) for x in values]
    return pytest.mark.parametrize(parameter, params, ids=name)


def name(value: Any) -> str:
    """Returns how a value is written in a test's name. A dict of arrays is written as its keys."""
    if callable(value) and not isinstance(value, type):
        return str(getattr(value, "__name__", value))
    holds_arrays = isinstance(value, dict) and any(hasattr(x, "shape") for x in value.values())
    return ", ".join(value) if holds_arrays else str(value)


def mark_slow(items: Iterable[pytest.Item]) -> None:
    """Marks the combinations that `make test` does not run. A ``fast`` mark that matches none has no effect."""
    tests: dict[str, list[Any]] = collections.defaultdict(list)
    for item in items:
        if hasattr(item, "callspec") and not item.get_closest_marker("slow"):
            tests[item.nodeid.partition("[")[0]].append(item)
    for some in tests.values():
        mark = some[0].get_closest_marker("fast")
        named = [item for item in some if not mark or any(name in item.callspec.id for name in mark.args)] or some
        chosen = cover_values({item: list_values(item) for item in named}) or named
        for item in set(some).difference(chosen):
            item.add_marker("slow")


def list_values(item: Any) -> tuple[Any, ...]:
    """Returns the values of an item by their ids, a tuple for each ``parametrize``."""
    axes = [mark.args[0] for mark in item.iter_markers("parametrize")]
    named = [axis.replace(" ", "").split(",") if isinstance(axis, str) else axis for axis in axes]
    return tuple(tuple(id(item.callspec.params[name]) for name in names) for names in named)


def cover_values[Key](everything: Mapping[Key, Sequence[Hashable]]) -> set[Key]:
    """Returns keys that together have every value in each place.

    It adds the key with the most new values each time; of several, the first whose values were used the least.
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
