"""What runs in `make test` holds every value, and `make test-all` runs the rest."""

from __future__ import annotations

import itertools

from tests.pairs import covering


def test_every_value_is_there() -> None:
    values = "wxyz", [1, 2, 3], [None, False]
    chosen = covering({key: key for key in itertools.product(*values)})
    assert len(chosen) == 4
    assert all({key[i] for key in chosen} == set(some) for i, some in enumerate(values))


def test_what_stays_whole() -> None:
    """Rows that have nothing in common, and a value of its own beside one that all share."""
    rows = [(i, None) for i in range(5)]
    assert covering({row: row for row in rows}) == {*rows}
