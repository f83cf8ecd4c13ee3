"""The combinations that `make test` runs contain every value of each parameter."""

from __future__ import annotations

import itertools

from tests.pairs import cover_values


def test_every_value_occurs() -> None:
    values = "wxyz", [1, 2, 3], [None, False]
    chosen = cover_values({key: key for key in itertools.product(*values)})
    assert len(chosen) == 4
    assert all({key[i] for key in chosen} == set(some) for i, some in enumerate(values))


def test_all_combinations_run() -> None:
    """Each has a value that no other has, and a value that all share."""
    rows = [(i, None) for i in range(5)]
    assert cover_values({row: row for row in rows}) == {*rows}
