"""A call under ``vmap``: a batch of tokens is one more leading dimension of the same call.

So the implementations are never batched themselves: the kernels take all tokens in one launch, and no loop of theirs is
rewritten. Where examples share nothing (a weight of their own, or a dweight each) they are computed one by one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import lax

from lce_jax import _partition, _spmd
from lce_jax._shard import Rows, Spec
from lce_jax._types import Results, ShardStatistics

if TYPE_CHECKING:
    from jaxtyping import Array


def forward(
    spec: Spec, hidden: Array, weight: Array, bias: Array | None, rows: Rows, keep_cache: bool
) -> tuple[Results, ShardStatistics, Any]:
    """`_spmd.forward`, or over the call's mesh `_partition.forward`."""

    @jax.custom_batching.custom_vmap
    def call(*operands: Any) -> Any:
        run: Any = _spmd.forward if spec.mesh is None else _partition.forward
        return run(spec, *operands, keep_cache)

    @call.def_vmap
    def batched(size: int, in_batched: Any, *operands: Any) -> Any:
        if in_batched[1] or in_batched[2] or (keep_cache and spec.case.options.cache_bytes):
            out = _one_by_one(lambda h, w, b, r: forward(spec, h, w, b, r, keep_cache), in_batched, operands)
        else:
            hidden, _, _, rows = _with_batch(size, in_batched, operands)
            case = dataclasses.replace(spec.case, num_tokens=rows.labels.size)
            out = forward(dataclasses.replace(spec, case=case), hidden, operands[1], operands[2], rows, keep_cache)
        return out, jax.tree.map(lambda _: True, out)

    return call(hidden, weight, bias, rows)


def backward(
    spec: Spec,
    hidden: Array,
    weight: Array,
    bias: Array | None,
    rows: Rows,
    stats: ShardStatistics,
    cache: Any,
    cotangent: Results,
) -> tuple[Array, Array, Array | None]:
    """`_spmd.backward`, or over the call's mesh `_partition.backward`."""

    @jax.custom_batching.custom_vmap
    def call(*operands: Any) -> Any:
        run = _spmd.backward if spec.mesh is None else _partition.backward
        return run(spec, *operands)

    @call.def_vmap
    def batched(size: int, in_batched: Any, *operands: Any) -> Any:
        out = None
        if spec.mesh is not None and not (in_batched[1] or in_batched[2]) and cache is None:
            hidden, _, _, rows, stats, _, cotangent = _with_batch(size, in_batched, operands)
            out = _partition.backward_of_examples(spec, hidden, operands[1], operands[2], rows, stats, cotangent)
        if out is None:
            out = _one_by_one(lambda *example: backward(spec, *example), in_batched, operands)
        return out, jax.tree.map(lambda _: True, out)

    return call(hidden, weight, bias, rows, stats, cache, cotangent)


def _one_by_one(function: Callable[..., Any], in_batched: Any, operands: Any) -> Any:
    """``function`` of each example in turn: its own operands and those that all share."""
    tree: Any = jax.tree.structure(operands)
    flat = jax.tree.leaves(operands)
    batched = jax.tree.leaves(tuple(in_batched))
    for x in (x for x, b in zip(flat, batched, strict=True) if b):
        axes = jax.typeof(x).sharding.spec.partitions[0]
        if axes is not None:
            raise ValueError(
                f"vmap over a batch that is split over {axes!r}, with cache_bytes or a weight for each example: these "
                "are computed one by one. Give hidden and labels the batch as a leading dimension in place of vmap"
            )

    def one(own: list[Array]) -> Any:
        rest = iter(own)
        return function(*tree.unflatten(next(rest) if b else x for x, b in zip(flat, batched, strict=True)))

    return lax.map(one, [x for x, b in zip(flat, batched, strict=True) if b])


def _with_batch(size: int, in_batched: Any, operands: Any) -> Any:
    """Every leaf but the weight and the bias with the batch as its first dimension."""

    def lead(batched: bool, x: Array) -> Array:
        return x if batched else jnp.broadcast_to(x, (size, *x.shape))

    in_batched = (in_batched[0], *jax.tree.map(lambda _: True, tuple(in_batched[1:3])), *in_batched[3:])
    return jax.tree.map(lead, in_batched, tuple(operands))
