"""`pairs_of`: what runs in `make test` holds every pair, and `make test-all` runs the rest."""

from __future__ import annotations

import itertools

import pytest

from tests.pairs import pairs_of


@pytest.mark.parametrize(("strength", "most"), [(1, 4), (2, 12), (3, 24)])
def test_every_group_is_there(strength: int, most: int) -> None:
    values = {"a": "wxyz", "b": [1, 2, 3], "c": [None, {}]}
    names, params = pairs_of(strength, **values).args
    every = [param.values for param in params]
    assert names == ("a", "b", "c")
    assert every == list(itertools.product(*values.values()))
    fast = [param.values for param in params if not param.marks]
    assert len(fast) <= most
    for some in itertools.combinations(range(3), strength):
        wanted = [tuple(row[i] for i in some) for row in every]
        assert all(one in [tuple(row[i] for i in some) for row in fast] for one in wanted)
