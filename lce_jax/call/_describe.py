"""A call: its arguments checked once, where they lie, the implementation that serves it, its rows, and what is static.

    Arguments ─ `describe_call` ─ where it lies ─ `choose_implementation` ─ `make_operands` ─▶ Bound

Rows that ``where`` leaves out move to the end, after the live ones: tiles that hold only dead rows are never computed.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from lce_jax.call import _checks, _dispatch, _options
from lce_jax.call._options import Arguments, MeshPlacement
from lce_jax.mathematics import _logprobs
from lce_jax.mathematics._kl import Pair
from lce_jax.mesh import _collectives, _layout
from lce_jax.mesh._custom_partitioning import check_rules_are_read
from lce_jax.mesh._layout import Layout, layout_of_arrays
from lce_jax.types import _jax, scalars
from lce_jax.types._types import Call, Primals, is_array

if TYPE_CHECKING:
    from lce_jax.types._shapes import Array, Bool, Float, Int


# Operands per token


class Rows(NamedTuple):
    """A call's per-token operands, in the shape of labels (candidates with K more). None of them has a gradient."""

    labels: Int[Array, "*b"]  # int32 global id, -1 where out of vocabulary
    where: Bool[Array, "*b"] | None
    temperature: Float[Array, "*b"] | None
    logit_scale: Float[Array, "*b"] | None = None  # if it or the softcap is an array; else the options have both
    logit_softcap: Float[Array, "*b"] | None = None
    candidates: Int[Array, "*b K"] | None = None  # int32 global ids, -1 for none and out of vocabulary
    weights: Pair[Float[Array, "*b"]] | None = None  # of both models in the mixture of `lce_jax.linear_kl`
    floor: Float[Array, "*b"] | None = None  # logits below it do not count, but for the label's; None: all do
    num_rows: Int[Array, ""] | None = None  # instead of ``where``: how many rows count, from the first on
    tags: Int[Array, "*b"] | None = None  # where shards must compare what they were given: of all the above

    @property
    def live(self) -> Bool[Array, "T"] | None:
        """Which rows count; None if all do."""
        if self.num_rows is None:
            return self.where
        return jnp.arange(self.labels.shape[0], dtype=jnp.int32) < self.num_rows


@functools.partial(jax.jit, static_argnums=1, inline=True, keep_unused=True)
def make_missing_labels(like: Array, shape: tuple[int, ...]) -> Array:
    """The labels of a call that has none, on the devices of ``like``. Jitted for the reason that `_make_rows` gives."""
    del like
    return jnp.full(shape, -1, jnp.int32)


@functools.partial(jax.jit, static_argnums=(4, 5), inline=True)
def _make_rows(
    labels: Array, where: Array | None, numbers: Any, candidates: Array | None, vocab_size: int, dtype: Any
) -> Rows:
    """Jitted: outside ``jit`` each number in an expression is a transfer, which ``jax.transfer_guard`` may forbid."""
    ids = (labels, candidates)
    labels, candidates = jax.tree.map(lambda x: jnp.where((x >= 0) & (x < vocab_size), x, -1), ids)
    temperature, scale, softcap, floor = (
        None if x is None else broadcast_to_tokens(x, labels.shape, dtype) for x in numbers
    )
    return Rows(labels, where, temperature, scale, softcap, candidates, floor=floor)


@functools.partial(jax.jit, static_argnums=(1, 2), inline=True)
def broadcast_to_tokens(value: Array, shape: tuple[int, ...], dtype: Any) -> Array:
    """A factor as one number per token, without a gradient."""
    return jnp.broadcast_to(lax.stop_gradient(value).astype(dtype), shape)


@functools.partial(jax.jit, inline=True)
def add_tags(rows: Rows) -> Rows:
    """The same with the tags that shards compare."""
    mixture = () if rows.weights is None else rows.weights
    columns = rows.labels, rows.temperature, rows.logit_scale, rows.logit_softcap, rows.candidates, rows.floor, *mixture
    return rows._replace(tags=_collectives.compute_tags([x for x in columns if x is not None], rows.where))


def tag_arrays(call: Call, rows: Rows, arrays: tuple[Array, ...]) -> Rows:
    """``rows`` with tags of further ``arrays``, ``[*b, ...]`` each, that no type shows to be equal on every shard."""
    if not arrays or rows.tags is None or _jax.tracks_varying(call.axis_name):
        return rows
    return rows._replace(tags=_collectives.compute_tags([rows.tags, *lax.stop_gradient(arrays)], rows.where))


def make_mixture_weights(beta: Any, shape: tuple[int, ...], dtype: Any, like: Any = None) -> Pair[Array]:
    """Of student and teacher, 1 - β and β. That of a number is rounded once, because near β = 1 float32 has few."""
    if is_array(beta):
        return _spread_teachers_weight(put_on_device(beta, like), shape, dtype)
    return Pair(*(broadcast_to_tokens(put_on_device(weight, like), shape, dtype) for weight in (1.0 - beta, beta)))


@functools.partial(jax.jit, static_argnums=(1, 2), inline=True)
def _spread_teachers_weight(beta: Array, shape: tuple[int, ...], dtype: Any) -> Pair[Array]:
    beta = broadcast_to_tokens(beta, shape, dtype)
    return Pair(1.0 - beta, beta)


class Scales(NamedTuple):
    """Per-token factors of eq. 0 from temperature and a traced scale or softcap; x is one of sign · r."""

    inverse_temperature: Float[Array, "T"] | None  # times a traced scale or cap; None: 1
    raw_scale: Float[Array, "T"] | None = None  # x = tanh(raw_scale · r), or raw_scale · r
    sign: Float[Array, "T"] | None = None  # of a traced scale, where it multiplies hidden

    @property
    def derivative(self) -> Float[Array, "T"] | None:
        """The row factor of eq. 5, without the scale in the options."""
        inverse, raw_scale = self.inverse_temperature, self.raw_scale
        return inverse if raw_scale is None or inverse is None else inverse * raw_scale


def compute_scales(
    rows: Rows, dtype: Any, signs_hidden: bool, invert: Callable[[Array], Array] = _logprobs.invert_temperature
) -> Scales:
    """The factors of a call, whose temperatures ``invert`` inverts.

    The sign of a traced scale, which may be 0, is apart, because k of eq. 1 must be positive. It multiplies hidden
    where ``signs_hidden`` says so, else the raw products, which no kernel does.
    """
    inverse = None if rows.temperature is None else invert(rows.temperature.astype(dtype))
    if rows.logit_scale is None:
        return Scales(inverse)
    sign = raw_scale = None
    if rows.logit_softcap is None:
        sign, scale = jnp.sign(rows.logit_scale), jnp.abs(rows.logit_scale)
        scale = jnp.where(sign == 0, 1.0, scale)
        if not signs_hidden:
            sign, raw_scale = None, sign
    else:
        scale = jnp.abs(rows.logit_softcap)  # c tanh(x / c) is even in c
        raw_scale = rows.logit_scale / scale
    return Scales(scale if inverse is None else scale * inverse, raw_scale, sign)


def find_invalid_rows(rows: Rows) -> Bool[Array, "T"] | None:
    """Rows that count and whose temperature is not positive and finite, or whose floor is NaN.

    They return NaN and have no gradient.
    """
    found = [] if rows.temperature is None else [~scalars.is_temperature(rows.temperature)]
    found += [] if rows.floor is None else [jnp.isnan(rows.floor)]
    if not found:
        return None
    is_wrong = functools.reduce(jnp.logical_or, found)
    return is_wrong if rows.live is None else is_wrong & rows.live


def put_on_device(value: Any, like: Any = None) -> Array:
    """A number as an array, by an explicit transfer, to the mesh of ``like`` if it lies on one; arrays as they are."""
    if isinstance(value, jax.Array):
        return value
    of = None if isinstance(like, jax.core.Tracer) else getattr(like, "sharding", None)
    whole = NamedSharding(of.mesh, PartitionSpec()) if isinstance(of, NamedSharding) else None
    return jax.device_put(np.asarray(value), whole)


def cast_labels(labels: Any, name: str = "labels") -> Array:
    """Labels of any integer type as int32; what does not fit is clamped, and stays out of every vocabulary.

    NumPy's 64-bit labels are clamped first, because JAX would wrap them: 2³² + 3 would become 3.
    """
    _checks.check_labels(labels, name)
    if isinstance(labels, np.ndarray | np.generic):
        return put_on_device(_clamp(labels, np))
    return _clamp_jitted(jnp.asarray(labels))


def _clamp(labels: Any, numpy: Any) -> Any:
    info, int32 = jnp.iinfo(labels.dtype), np.iinfo(np.int32)
    if info.min < int32.min or info.max > int32.max:
        labels = numpy.clip(labels, max(info.min, int32.min), int32.max)
    return labels.astype(np.int32)


_clamp_jitted = jax.jit(functools.partial(_clamp, numpy=jnp), inline=True)


def find_local_columns(ids: Int[Array, "..."], start: Any, columns: int) -> Int[Array, "..."]:
    """Global ids as columns of the shard that has ``columns`` from ``start`` on; -1 where it does not own them."""
    local = ids - start
    return jnp.where((ids >= 0) & (local >= 0) & (local < columns), local, -1)


def flatten_tokens[T](tree: T, leading: int) -> T:
    """Every leaf with its first ``leading`` dimensions, those of labels, as one."""
    return jax.tree.map(lambda x: x.reshape(math.prod(x.shape[:leading]), *x.shape[leading:]), tree)


class Compaction(NamedTuple):
    """The order with the live rows first, in their own order."""

    source: Int[Array, "T"]  # row of the call at each compacted position
    position: Int[Array, "T"]  # compacted position of each row of the call
    num_rows: Int[Array, ""]  # how many are live


def plan_compaction(where: Bool[Array, "T"]) -> Compaction:
    """The compaction of ``where``: two prefix sums and a scatter, no sort."""
    live = jnp.cumsum(where, dtype=jnp.int32)
    dead = jnp.cumsum(~where, dtype=jnp.int32)
    num_rows = jnp.sum(where, dtype=jnp.int32)
    position = jnp.where(where, live - 1, num_rows + dead - 1)
    rows = jnp.arange(where.shape[0], dtype=jnp.int32)
    source = jnp.zeros_like(rows).at[position].set(rows, unique_indices=True)
    return Compaction(source, position, num_rows)


def compact(order: Compaction, tree: Any) -> Any:
    """Every [T, ...] leaf in compacted order, with dead rows zero: NaN or inf in them cannot spread."""
    live = jnp.arange(order.source.shape[0], dtype=jnp.int32) < order.num_rows

    def gather(x: Array) -> Array:
        return jnp.where(live.reshape((-1,) + (1,) * (x.ndim - 1)), x[order.source], jnp.zeros((), x.dtype))

    return jax.tree.map(gather, tree)


def expand(order: Compaction, tree: Any) -> Any:
    """The inverse of `compact` on the live rows. Dead rows hold anything, and the caller overwrites them."""
    return jax.tree.map(lambda x: x[order.position], tree)


# Where a call runs


def find_layout(
    arguments: Arguments, per_token: list[Any], placement: MeshPlacement
) -> tuple[Layout | None, Layout | None]:
    """How the operands lie on a mesh, if they do; and if it is not XLA that partitions the call, over Auto axes."""
    if placement.names_axes:
        _options.refuse_axis_name(arguments.call.axis_name)
        return (placement.find_layout(arguments),) * 2
    call, arrays = arguments.call, (arguments.hidden, arguments.weight, per_token)
    layout = None if call.axis_name is not None else layout_of_arrays(*arrays, call.vocab_dim)
    if layout is None or AxisType.Explicit in layout.mesh.axis_types:
        return layout, layout
    check_rules_are_read(call.device.platform, layout.mesh, call)
    return layout, None


def divide_call(call: Call, layout: Layout | None) -> Call:
    """What one device computes of it, with the implementation."""
    call = choose_implementation(call, mesh=layout)
    if layout is None:
        return call
    return dataclasses.replace(
        call, axis_name=layout.vocab_axes, gather_dim=layout.gather_dim, shards=layout.vocab_shards
    )


# The door of every function


class Bound(NamedTuple):
    """A call and its arrays; of `lce_jax.linear_kl` a `Pair` of these."""

    call: Call
    primals: Any  # `Primals`
    rows: Any  # `Rows`
    agree: Bool[Array, "*b"] | None  # inside ``shard_map``: the rows that all shards of the vocabulary were given alike


def bind_call(arguments: Arguments, others: Any = ()) -> Bound:
    """A call over the mesh of its placement, over the one that the operands name, or of this device.

    ``others`` are further operands, which may name the mesh too.
    """
    call = arguments.call
    mesh: Layout | AbstractMesh | None
    if arguments.placement is not None:
        mesh = arguments.placement.find_layout(arguments)
    else:
        arrays = (*arguments[1:5], arguments.bias, arguments.temperature, arguments.candidates, others)
        mesh = _layout.find_mesh(arrays, call.function, call.asks_for_tiles)
        mesh = mesh if call.axis_name is None else None
    shards = 1 if call.axis_name is None else _checks.find_axis_size(call.axis_name)
    call = choose_implementation(call, call.columns * shards, mesh)
    primals, rows = make_operands(call, arguments)
    if call.axis_name is None:
        return Bound(call, primals, rows, None)
    _checks.check_split(primals, arguments.lora, call)
    rows, agree = _collectives.equalize_shards(rows, rows.labels.ndim, call.axis_name)
    return Bound(call, primals, add_tags(rows), _collectives.ignore_masked_rows(agree, rows.where))


def describe_call(arguments: Arguments) -> Arguments:
    """With a call's shapes and dtypes, validated against each other. Arrays may be tracers or ShapeDtypeStructs."""
    call, hidden, weight, labels, where, *_ = arguments
    if labels is None:
        _checks.check_array("hidden", hidden)
        labels = jax.ShapeDtypeStruct(tuple(hidden.shape[:-1]), jnp.int32)
    _checks.check_operands(hidden, weight, labels, where, arguments.bias, call)
    columns = weight.shape[call.vocab_dim]
    if arguments.labels is not None:
        _checks.warn_of_labels(labels, where, arguments.ignore_index, call.replace(columns=columns))
    if arguments.ignore_index is not None:
        where = _exclude_ignored(cast_labels(labels), where, arguments.ignore_index)
    if arguments.lora is not None and (arguments.lora[0].shape[1], arguments.lora[1].shape[0]) != (
        hidden.shape[-1],
        columns,
    ):
        a, b, _ = arguments.lora
        raise ValueError(
            f"lora's A {tuple(a.shape)} and B {tuple(b.shape)} must be [r, {hidden.shape[-1]}] and [{columns}, r], of "
            f"hidden {tuple(hidden.shape)} and weight {tuple(weight.shape)}"
        )
    if arguments.candidates is not None:
        scalars.check_candidate_shape("candidates", arguments.candidates.shape, labels.shape, "labels")
    dtype, of_hidden = (jnp.dtype(jax.dtypes.canonicalize_dtype(x.dtype)) for x in (weight, hidden))
    of_hidden = jnp.promote_types(of_hidden, dtype) if call.rank else of_hidden
    call = call.replace(
        num_tokens=math.prod(labels.shape),
        hidden_size=weight.shape[call.hidden_dim],
        columns=columns,
        dtype=dtype,
        caller_dtype=None if of_hidden == dtype else of_hidden,
        partial_rows=where is not None,
        device=_dispatch.current_device(weight, hidden, labels, where),
    )
    return arguments._replace(call=call, where=where, ignore_index=None)


@functools.partial(jax.jit, static_argnums=2, inline=True)
def _exclude_ignored(labels: Array, where: Array | None, ignore_index: int) -> Array:
    kept = labels != ignore_index
    return kept if where is None else kept & where


def check_values(arguments: Arguments) -> None:
    """Refuses wrong temperatures and floors of a described call, as far as their values are known."""
    shape, where = tuple(arguments.labels.shape), arguments.where
    _checks.check_temperature(arguments.temperature, shape, where)
    if arguments.logit_floor is not None:
        _checks.check_floor(arguments.logit_floor, shape, where)


def choose_implementation(call: Call, columns: int | None = None, mesh: Layout | AbstractMesh | None = None) -> Call:
    """With the true vocabulary and the implementation; over a layout, those of one device's share.

    ``columns``: of all shards. None: the call's own, or some number where an axis splits them.
    """
    if columns is None:
        columns = call.columns if call.axis_name is None else scalars.INT32_MAX
    vocab_size = _checks.check_vocab_size(call.caller_vocab_size, columns)
    if isinstance(mesh, Layout):
        tokens, size = call.num_tokens // mesh.token_shards, call.columns // mesh.vocab_shards
        call = _dispatch.use_mesh_device(call, mesh.mesh).replace(num_tokens=tokens, columns=size)
    if call.top_k:
        scalars.check_k(call.top_k, vocab_size)
    if call.vocab_part_size and columns < scalars.INT32_MAX:  # else how many shards there are is not known here
        scalars.check_vocab_parts(call.vocab_part_size, columns, call.columns)
    return call.replace(
        implementation=_dispatch.choose(call)[0].NAME,
        vocab_size=vocab_size,
        caller_vocab_size=None,
        padded=vocab_size < columns,
        mesh=mesh,
    )


def make_operands(call: Call, arguments: Arguments) -> tuple[Primals, Rows]:
    """The arrays of a call: those with gradients, and the per-token ones; ids outside [0, vocab_size) become -1."""
    labels = arguments.labels
    if labels is None:
        labels = make_missing_labels(jnp.asarray(arguments.hidden), tuple(arguments.hidden.shape[:-1]))
    arrays = Primals(arguments.hidden, arguments.weight, arguments.bias), arguments.lora
    primals, lora = jax.tree.map(lambda x: _jax.drop_reduced_axes(jnp.asarray(x)), arrays)
    shape, where, candidates = labels.shape, arguments.where, arguments.candidates
    floor = None if arguments.logit_floor is None else _checks.check_floor(arguments.logit_floor, shape, where)
    temperature = _checks.check_temperature(arguments.temperature, shape, where)
    numbers = temperature, arguments.logit_scale, arguments.logit_softcap, floor
    on_devices = tuple(None if x is None else put_on_device(x, labels) for x in numbers)
    where = None if where is None else jnp.asarray(where)
    candidates = None if candidates is None else cast_labels(candidates, "candidates")
    rows = _make_rows(cast_labels(labels), where, on_devices, candidates, call.vocab_size, call.stat_dtype)
    return primals if lora is None else _append_adapter(call, primals, rows.where, *lora), rows


@functools.partial(jax.jit, static_argnums=0, inline=True)
def _append_adapter(call: Call, primals: Primals, where: Array | None, a: Array, b: Array, scale: Array) -> Primals:
    """With u = hidden · (scale · A)ᵀ beside hidden, and with B. JAX differentiates it in hidden and A."""
    missing = (0, call.rank - a.shape[0])
    hidden, a = _jax.gather_dims(primals.hidden, -1), _jax.gather_dims(a, -2, -1)
    a = jnp.pad(a.astype(call.stat_dtype) * lax.stop_gradient(scale).astype(call.stat_dtype), (missing, (0, 0)))
    live = hidden
    if where is not None:
        live = jnp.where(_jax.split_like(where, hidden)[..., None], hidden, jnp.zeros((), hidden.dtype))
    u = jnp.matmul(live.astype(call.dtype), a.astype(call.dtype).T, precision=call.precision)
    beside = [x.astype(call.hidden_dtype) for x in (hidden, u)]
    return primals._replace(hidden=jnp.concatenate(beside, axis=-1), adapter=jnp.pad(b, ((0, 0), missing)))
