"""A call under ``vmap``: a batch of tokens is one more leading dimension of the same call.

So ``vmap`` never reaches the implementations: the kernels take all tokens in one launch, and no loop is rewritten.
Examples that each have a weight or a dweight of their own are computed one by one, on each device those that it has.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from lce_jax import _compat, _partition, _spmd
from lce_jax._rows import Rows
from lce_jax._shard import Spec
from lce_jax._types import Primals, Results, ShardStatistics

if TYPE_CHECKING:
    from jaxtyping import Array


def forward(spec: Spec, primals: Primals, rows: Rows, keep_cache: bool) -> tuple[Results, ShardStatistics, Any]:
    """`_spmd.forward`, or over the call's mesh `_partition.forward`."""

    @jax.custom_batching.custom_vmap
    def call(primals: Primals, rows: Rows) -> Any:
        run: Any = _spmd.forward if spec.mesh is None else _partition.forward
        return run(spec, primals, rows, keep_cache)

    @call.def_vmap
    def batched(size: int, in_batched: Any, primals: Primals, rows: Rows) -> Any:
        again = functools.partial(forward, keep_cache=keep_cache)
        apart = bool(keep_cache and spec.case.options.keeps_tiles)
        return _as_tokens(again, spec, size, in_batched, (primals, rows), apart)

    return call(primals, rows)


def per_token(program: _partition.Program, spec: Spec, primals: Primals, rows: Rows) -> Any:
    """``program``, all of whose results are per token, or over the call's mesh `_partition.per_token`."""

    @jax.custom_batching.custom_vmap
    def call(primals: Primals, rows: Rows) -> Any:
        run = program if spec.mesh is None else functools.partial(_partition.per_token, program)
        return run(spec, primals, rows)

    @call.def_vmap
    def batched(size: int, in_batched: Any, primals: Primals, rows: Rows) -> Any:
        return _as_tokens(functools.partial(per_token, program), spec, size, in_batched, (primals, rows), apart=False)

    return call(primals, rows)


def _as_tokens(
    function: Callable[..., Any], spec: Spec, size: int, in_batched: Any, operands: tuple[Primals, Rows], apart: bool
) -> tuple[Any, Any]:
    """``function`` of a batch of calls, as one call with more tokens unless they must stay apart."""
    if apart or has_own_columns(in_batched):
        out = one_by_one(functools.partial(function, spec), in_batched, operands)
    else:
        primals, rows = with_batch(size, in_batched, operands)
        case = dataclasses.replace(spec.case, num_tokens=rows.labels.size)
        out = function(dataclasses.replace(spec, case=case), primals, rows)
    return out, jax.tree.map(lambda _: True, out)


def backward(
    spec: Spec, primals: Primals, rows: Rows, stats: ShardStatistics, cache: Any, cotangent: Results
) -> Primals:
    """`_spmd.backward`, or over the call's mesh `_partition.backward`."""

    @jax.custom_batching.custom_vmap
    def call(*operands: Any) -> Any:
        run = _spmd.backward if spec.mesh is None else _partition.backward
        return run(spec, *operands)

    @call.def_vmap
    def batched(size: int, in_batched: Any, *operands: Any) -> Any:
        del size
        out = one_by_one(functools.partial(backward, spec), in_batched, operands)
        return out, jax.tree.map(lambda _: True, out)

    return call(primals, rows, stats, cache, cotangent)


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
    examples = P(_compat.partitions(sharding.spec)[0])
    axes = _compat.as_axes(examples[0])
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
