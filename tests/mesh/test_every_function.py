"""Every function in every place that spreads it over a mesh: results and all gradients as on one device.

`functions` has both as data: a new function is one line there. A place is one program of all functions.
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
    run_over_layout,
    run_over_named_axes,
    where_operands_are,
)
from tests.pairs import combined, values_of

PARTITIONED = ("Auto", "Explicit", "in_shardings")  # as XLA and the types say: with no more work than when told


# Those that are slow differ from others in what does not depend on the function.
@values_of("place", PLACES, slow=set(PLACES) - {"shard_map", "Auto"})
def test_places(place: str, caplog: pytest.LogCaptureFixture) -> None:
    warn_once.cache_clear()
    with caplog.at_level(logging.WARNING, "lce_jax"):
        got = PLACES[place]()
    assert not caplog.text
    for function in FUNCTIONS:
        assert_same(got[function.name], function)
        if place in PARTITIONED:
            named = run_over_named_axes()[function.name]
            assert_same(named, function)
            assert got[function.name].flops < 1.1 * named.flops


@combined(function=FUNCTIONS, split=list(SPLITS), kind=[AUTO, EXPLICIT])
def test_splits(function: Function, split: str, kind: AxisType) -> None:
    assert_same(where_operands_are(SPLITS[split], kind, [function])[function.name], function)


@pytest.mark.slow
@combined(
    function=FUNCTIONS,
    layout=["tensor 8", "tensor 8, sequence over tensor", "data, sequence over context and tensor",
            "vocabulary over two axes", "data alone"],
    kind=[EXPLICIT, AUTO],
)  # fmt: skip
def test_layouts(function: Function, layout: str, kind: AxisType) -> None:
    assert_same(run_over_layout(function, layout, kind), function)
