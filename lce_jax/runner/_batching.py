"""Calls under ``vmap``: a batch of tokens is one more leading dimension of the same call.

So ``vmap`` never reaches the implementations: the kernels take all tokens in one launch, and no loop is rewritten.
Examples that each have a weight or a dweight of their own are computed one by one, on each device those that it has.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from lce_jax import _jax
from lce_jax._types import Primals

if TYPE_CHECKING:
    from lce_jax._shapes import Array


def has_own_columns(in_batched: Any) -> bool:
    """Whether each example has a weight or a bias of its own."""
    return any(primals.weight or primals.bias for primals in _primals(in_batched))


def _primals(operands: Any) -> list[Primals]:
    """The heads among the operands of a call, one or several."""
    leaves = jax.tree.leaves(operands, is_leaf=_is_primals)
    return [x for x in leaves if _is_primals(x)]


def _is_primals(x: Any) -> bool:
    return isinstance(x, Primals)


def one_by_one(function: Callable[..., Any], in_batched: Any, operands: Any) -> Any:
    """``function`` of each example in turn: its own operands and those that all share.

    Explicit axes that split the examples are Manual for ``function``: each of their devices has examples of its own.
    """
    tree: Any = jax.tree.structure(operands)
    batched = jax.tree.leaves(tuple(in_batched))
    flat = list(zip(jax.tree.leaves(operands), batched, strict=True))

    def all_of(own: list[Array], shared: list[Array]) -> Any:
        def one(own: list[Array]) -> Any:
            of_each, of_all = iter(own), iter(shared)
            return function(*tree.unflatten(next(of_each if b else of_all) for b in batched))

        return lax.map(one, own)

    own, shared = [x for x, b in flat if b], [x for x, b in flat if not b]
    sharding = jax.typeof(own[0]).sharding
    examples = P(_jax.partitions(sharding.spec)[0])
    axes = _jax.as_axes(examples[0])
    if not axes:
        return all_of(own, shared)
    of_each_device: Any = jax.shard_map(
        all_of, mesh=sharding.mesh, in_specs=(examples, P()), out_specs=examples, axis_names=set(axes), check_vma=False
    )
    return of_each_device(own, shared)


def with_batch(size: int, in_batched: Any, operands: Any) -> Any:
    """Every leaf with the batch as its first dimension, except weights and biases."""

    def lead(batched: bool, x: Array) -> Array:
        return x if batched else jnp.broadcast_to(x, (size, *x.shape))

    def shared(batched: Any) -> Any:
        if not _is_primals(batched):
            return batched
        return batched._replace(weight=True, bias=None if batched.bias is None else True)

    in_batched = jax.tree.map(shared, tuple(in_batched), is_leaf=_is_primals)
    return jax.tree.map(lead, in_batched, tuple(operands))
