"""`linear_topk` with the vocabulary split over real GPUs: exact, and the same bits on each."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from lce_jax import linear_topk
from tests.topk_cases import assert_exact, integers

pytestmark = pytest.mark.multi_gpu


def test_every_gpu_has_the_same_bits() -> None:
    count = len(jax.devices())
    hidden, weight = integers(300, 4096 * count, "bfloat16", H=64)
    mesh = jax.make_mesh((count,), ("tensor",), axis_types=(AxisType.Auto,))

    def body(hidden: Any, weight: Any) -> Any:
        out = linear_topk(hidden, weight, 64, axis_name="tensor")
        return jax.tree.map(lambda x: jax.lax.pcast(x, "tensor", to="varying")[None], out)

    run = jax.shard_map(body, mesh=mesh, in_specs=(P(), P("tensor")), out_specs=P("tensor"))
    every = jax.tree.map(np.asarray, jax.jit(run)(hidden, weight))
    assert all(part.tobytes() == x[0].tobytes() for x in every for part in x)
    assert_exact(jax.tree.map(lambda x: x[0], every), hidden, weight, 64)
