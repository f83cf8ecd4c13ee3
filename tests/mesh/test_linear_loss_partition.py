"""`linear_loss` under plain ``jit`` over Auto axes: XLA splits it as its operands are split."""

from __future__ import annotations

import functools
import logging
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from lce_jax import linear_logprobs, linear_loss, sharded_linear_loss
from lce_jax.mesh._custom_partitioning import warn_once
from tests import oracle
from tests.mesh.test_linear_loss import (
    ADVANTAGE,
    BIAS,
    GROUP,
    HIDDEN,
    LABELS,
    OLD,
    WEIGHT,
    WHERE,
    assert_same,
    expected,
    mesh_of,
    scaled,
)

# How hidden, weight and the per-token arrays are split, and the arguments of `sharded_linear_loss` for it.
PLACES: dict[str, tuple[P, P, P, dict[str, Any]]] = {
    "sequence on the vocabulary's axis": (
        P("data", "tensor"), P("tensor"), P("data"), {"batch_axes": "data", "sequence_axis": "tensor"},
    ),
    "one axis for both": (P("data"), P("data"), P("data"), {"batch_axes": "data", "vocab_axis": None}),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("place", [*PLACES][:1] + [pytest.param(x, marks=pytest.mark.slow) for x in [*PLACES][1:]])
def test_auto_axes_are_seen_by_xla(place: str, caplog: pytest.LogCaptureFixture) -> None:
    """Value, metrics and all gradients, with the work split as it is when the axes are told; nothing is warned of."""
    mesh, (of_hidden, of_weight, of_rows, axes) = mesh_of((4, 2)), PLACES[place]
    table = jnp.linspace(0.5, 1.5, 8)  # a concrete array that the loss closes over

    def loss(scale: Any) -> Any:
        return lambda logprob, entropy, lse, pair, *own: scaled(scale)(logprob, entropy, lse, *own) + table[3] * pair[1]

    def total(function: Any, hidden: Any, weight: Any, pairs: Any, labels: Any, old: Any, scale: Any) -> Any:
        return function(
            loss(scale), hidden, weight, labels, pairs, old, ADVANTAGE, GROUP,
            where=WHERE, precision="highest", bias=BIAS, stats=True,
        )  # fmt: skip

    def step(function: Any) -> Any:
        run = functools.partial(total, function)
        return jax.jit(jax.value_and_grad(run, argnums=(0, 1, 2), has_aux=True))

    pairs = jnp.stack([jnp.zeros(LABELS.shape), ADVANTAGE], -1)
    arrays = (HIDDEN, WEIGHT, pairs, LABELS, OLD)
    split = [
        jax.device_put(x, NamedSharding(mesh, spec))
        for x, spec in zip(arrays, (of_hidden, of_weight, *(of_rows,) * 3), strict=True)
    ]
    warn_once.cache_clear()
    with caplog.at_level(logging.WARNING, logger="lce_jax"):
        compiled = step(linear_loss).lower(*split, 1.5).compile()
    assert not caplog.text
    (value, out), (dhidden, dweight, dpairs) = compiled(*split, 1.5)
    want = expected(biased=True)
    added = jnp.sum(jnp.where(WHERE, table[3] * pairs[..., 1], 0.0))
    assert_same((value - added, (dhidden, dweight)), (want[0], want[1][:2]))
    assert oracle.value_error(dpairs, jnp.where(WHERE, table[3], 0.0)[..., None] * jnp.array([0.0, 1.0])) < 1e-6
    plain = linear_logprobs(HIDDEN, WEIGHT, LABELS, where=WHERE, bias=BIAS, stats=True, precision="highest")
    for x, y in zip(jax.tree.leaves(out), jax.tree.leaves(plain), strict=True):
        assert oracle.value_error(x, y) < 1e-5
    told = step(functools.partial(sharded_linear_loss, mesh=mesh, **axes)).lower(*arrays, 1.5).compile()
    assert compiled.cost_analysis()["flops"] < 1.1 * told.cost_analysis()["flops"]
