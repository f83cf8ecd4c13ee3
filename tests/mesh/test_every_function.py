"""Every function in every place that spreads it over a mesh: results and all gradients as on one device.

`functions` has both as data: a new function is one line there.
"""

from __future__ import annotations

import logging

import pytest
from jax.sharding import AxisType

from lce_jax.mesh._custom_partitioning import warn_once
from tests.mesh.functions import (
    AUTO,
    EXPLICIT,
    FUNCTIONS,
    PLACES,
    SPLITS,
    Function,
    assert_same,
    over_layout,
    over_named_axes,
    where_operands_are,
)
from tests.pairs import pairs_of

PARTITIONED = ("Auto", "Explicit", "in_shardings")  # as XLA and the types say: with no more work than when told


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("function", FUNCTIONS, ids=str)
def test_places(function: Function, place: str, caplog: pytest.LogCaptureFixture) -> None:
    warn_once.cache_clear()
    with caplog.at_level(logging.WARNING, "lce_jax"):
        got = PLACES[place](function)
    assert not caplog.text
    assert_same(got, function)
    if place in PARTITIONED:
        assert got.flops < 1.1 * over_named_axes(function).flops


@pairs_of(1, function=FUNCTIONS, split=list(SPLITS), kind=[AUTO, EXPLICIT])
def test_splits(function: Function, split: str, kind: AxisType) -> None:
    assert_same(where_operands_are(function, SPLITS[split], kind), function)


@pairs_of(
    1,
    function=FUNCTIONS,
    layout=["tensor 8", "tensor 8, sequence over tensor", "data, sequence over context and tensor",
            "vocabulary over two axes", "data alone"],
    kind=[EXPLICIT, AUTO],
)  # fmt: skip
def test_layouts(function: Function, layout: str, kind: AxisType) -> None:
    assert_same(over_layout(function, layout, kind), function)
