"""Turns a caller's arguments into a call and its arrays, and chooses its layout on a mesh and its implementation.

    Arguments ─ `describe_call` ─ layout ─ `choose_implementation` ─ `make_operands` ─▶ Bound

Rows that ``where`` masks move to the end, after the unmasked rows. Tiles with only masked rows are never computed.
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
from lce_jax.types import _jax, scalars, shared_checks
from lce_jax.types._types import Call, Primals, is_array

if TYPE_CHECKING:
    from lce_jax.types._shapes import Array, Bool, Float, Int


# Operands per token


class Rows(NamedTuple):
    """A call's per-token operands, in the shape of labels; candidates are ``[*b, K]``. None of them has a gradient."""

    labels: Int[Array, "*b"]  # int32 global id, -1 where out of vocabulary
    where: Bool[Array, "*b"] | None
    temperature: Float[Array, "*b"] | None
    logit_scale: Float[Array, "*b"] | None = None  # None: scale and softcap are numbers, which the call has
    logit_softcap: Float[Array, "*b"] | None = None
    candidates: Int[Array, "*b K"] | None = None  # int32 global ids, -1 for none or out of vocabulary
    weights: Pair[Float[Array, "*b"]] | None = None  # 1 - β and β of the mixture in `lce_jax.linear_kl`
    floor: Float[Array, "*b"] | None = None  # lower logits do not count, except the label's; None: all count
    num_rows: Int[Array, ""] | None = None  # in place of ``where``: only the first num_rows rows count
    tags: Int[Array, "*b"] | None = None  # a hash of the fields above for each token, which shards compare

    @property
    def unmasked(self) -> Bool[Array, "T"] | None:
        """Which rows count; None if all do."""
        if self.num_rows is None:
            return self.where
        return jnp.arange(self.labels.shape[0], dtype=jnp.int32) < self.num_rows


@functools.partial(jax.jit, static_argnums=1, inline=True, keep_unused=True)
def make_missing_labels(like: Array, shape: tuple[int, ...]) -> Array:
    """Returns the labels of a call without labels: -1 everywhere, on the devices of ``like``.

    This function is jitted because outside ``jit`` the -1 is a transfer, which ``jax.transfer_guard`` may forbid.
    """
    del like
    return jnp.full(shape, -1, jnp.int32)


@functools.partial(jax.jit, static_argnums=(4, 5), inline=True)
def _make_rows(
    labels: Array, where: Array | None, numbers: Any, candidates: Array | None, vocab_size: int, dtype: Any
) -> Rows:
    """Casts and broadcasts per-token operands.

    This function is jitted because outside ``jit`` each Python number in an expression is a transfer, which
    ``jax.transfer_guard`` may forbid.
    """
    ids = (labels, candidates)
    labels, candidates = jax.tree.map(lambda x: jnp.where((x >= 0) & (x < vocab_size), x, -1), ids)
    temperature, scale, softcap, floor = (
        None if x is None else broadcast_to_tokens(x, labels.shape, dtype) for x in numbers
    )
    return Rows(labels, where, temperature, scale, softcap, candidates, floor=floor)


@functools.partial(jax.jit, static_argnums=(1, 2), inline=True)
def broadcast_to_tokens(value: Array, shape: tuple[int, ...], dtype: Any) -> Array:
    """Broadcasts ``value`` to one value per token, without a gradient."""
    return jnp.broadcast_to(lax.stop_gradient(value).astype(dtype), shape)


@functools.partial(jax.jit, inline=True)
def add_tags(rows: Rows) -> Rows:
    """Returns the rows with the tags that shards compare."""
    mixture = () if rows.weights is None else rows.weights
    columns = rows.labels, rows.temperature, rows.logit_scale, rows.logit_softcap, rows.candidates, rows.floor, *mixture
    return rows._replace(tags=_collectives.compute_tags([x for x in columns if x is not None], rows.where))


def tag_arrays(call: Call, rows: Rows, arrays: tuple[Array, ...]) -> Rows:
    """Adds ``arrays``, each ``[*b, ...]``, to the tags of ``rows``, unless types track whether shards differ."""
    if not arrays or rows.tags is None or _jax.tracks_varying(call.axis_name):
        return rows
    return rows._replace(tags=_collectives.compute_tags([rows.tags, *lax.stop_gradient(arrays)], rows.where))


def make_mixture_weights(beta: Any, shape: tuple[int, ...], dtype: Any, like: Any = None) -> Pair[Array]:
    """Returns 1 - β and β, the weights of student and teacher, per token.

    If β is a number, 1 - β is rounded to float32 once. If β is a float32 array with values near 1, few digits of 1 - β
    are exact.
    """
    if is_array(beta):
        return _broadcast_beta(put_on_device(beta, like), shape, dtype)
    return Pair(*(broadcast_to_tokens(put_on_device(weight, like), shape, dtype) for weight in (1.0 - beta, beta)))


@functools.partial(jax.jit, static_argnums=(1, 2), inline=True)
def _broadcast_beta(beta: Array, shape: tuple[int, ...], dtype: Any) -> Pair[Array]:
    beta = broadcast_to_tokens(beta, shape, dtype)
    return Pair(1.0 - beta, beta)


class Scales(NamedTuple):
    """Per-token factors of eq. 0, from the temperature and from a traced scale or softcap."""

    inverse_temperature: Float[Array, "T"] | None  # 1 / temperature, times a traced |scale| or cap; None: 1
    raw_scale: Float[Array, "T"] | None = None  # x = tanh(raw_scale · r) with a softcap, else x = raw_scale · r
    sign: Float[Array, "T"] | None = None  # the sign of a traced scale, if hidden is multiplied by it

    @property
    def derivative(self) -> Float[Array, "T"] | None:
        """The row factor of eq. 5. It does not include a scale that is a number."""
        inverse, raw_scale = self.inverse_temperature, self.raw_scale
        return inverse if raw_scale is None or inverse is None else inverse * raw_scale


def compute_scales(
    rows: Rows, dtype: Any, signs_hidden: bool, invert: Callable[[Array], Array] = _logprobs.invert_temperature
) -> Scales:
    """Computes the factors of a call. ``invert`` computes the inverse temperatures.

    The sign of a traced scale (it may be 0) is a separate factor, because the k of eq. 1 must be positive. With
    ``signs_hidden``, the sign multiplies hidden. Otherwise it multiplies the raw products, which kernels do not
    support.
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
    """Returns the unmasked rows whose temperature is not positive and finite, or whose floor is NaN.

    The results of these rows are NaN, and they have no gradient. Returns None if the call has neither temperature nor
    floor.
    """
    conditions = [] if rows.temperature is None else [~scalars.is_temperature(rows.temperature)]
    conditions += [] if rows.floor is None else [jnp.isnan(rows.floor)]
    if not conditions:
        return None
    is_invalid = functools.reduce(jnp.logical_or, conditions)
    return is_invalid if rows.unmasked is None else is_invalid & rows.unmasked


def put_on_device(value: Any, like: Any = None) -> Array:
    """Returns a number or NumPy array as a JAX array, by an explicit transfer. Returns a JAX array unchanged.

    If ``like`` is on a mesh, the result is replicated over that mesh.
    """
    if isinstance(value, jax.Array):
        return value
    sharding = None if isinstance(like, jax.core.Tracer) else getattr(like, "sharding", None)
    replicated = NamedSharding(sharding.mesh, PartitionSpec()) if isinstance(sharding, NamedSharding) else None
    return jax.device_put(np.asarray(value), replicated)


def cast_labels(labels: Any, name: str = "labels") -> Array:
    """Casts labels of any integer type to int32. Labels beyond int32 are clamped, and stay out of every vocabulary.

    64-bit labels of NumPy are clamped before they become a JAX array, because JAX would wrap them: 2³² + 3 would
    become 3.
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
    """Maps global ids to the columns of a shard that has ``columns`` ids from ``start`` on. Other ids become -1."""
    local = ids - start
    return jnp.where((ids >= 0) & (local >= 0) & (local < columns), local, -1)


def flatten_tokens[T](tree: T, leading: int) -> T:
    """Merges the first ``leading`` dimensions of every leaf, the dimensions of labels, into one."""
    return jax.tree.map(lambda x: x.reshape(math.prod(x.shape[:leading]), *x.shape[leading:]), tree)


class Compaction(NamedTuple):
    """A permutation of a call's rows: the unmasked rows first, then the masked rows, each in the call's order."""

    source: Int[Array, "T"]  # the call's row at each compacted position
    position: Int[Array, "T"]  # the compacted position of each of the call's rows
    num_rows: Int[Array, ""]  # the number of unmasked rows


def plan_compaction(where: Bool[Array, "T"]) -> Compaction:
    """Computes the compaction for ``where`` with two prefix sums and a scatter, without a sort."""
    unmasked = jnp.cumsum(where, dtype=jnp.int32)
    masked = jnp.cumsum(~where, dtype=jnp.int32)
    num_rows = jnp.sum(where, dtype=jnp.int32)
    position = jnp.where(where, unmasked - 1, num_rows + masked - 1)
    rows = jnp.arange(where.shape[0], dtype=jnp.int32)
    source = jnp.zeros_like(rows).at[position].set(rows, unique_indices=True)
    return Compaction(source, position, num_rows)


def compact(order: Compaction, tree: Any) -> Any:
    """Permutes every [T, ...] leaf into compacted order. Masked rows become 0, so that NaN and inf cannot spread."""
    unmasked = jnp.arange(order.source.shape[0], dtype=jnp.int32) < order.num_rows

    def gather(x: Array) -> Array:
        return jnp.where(unmasked.reshape((-1,) + (1,) * (x.ndim - 1)), x[order.source], jnp.zeros((), x.dtype))

    return jax.tree.map(gather, tree)


def expand(order: Compaction, tree: Any) -> Any:
    """Inverts `compact` for unmasked rows. Masked rows may hold anything, and the caller overwrites them."""
    return jax.tree.map(lambda x: x[order.position], tree)


# How a mesh splits a call


def find_layout(
    arguments: Arguments, per_token: list[Any], placement: MeshPlacement
) -> tuple[Layout | None, Layout | None]:
    """Returns two layouts on a mesh: the layout that the operands have, and the layout that the call uses.

    Both are None without a mesh. Over Auto axes the second is None, because XLA partitions the call.
    """
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
    """Returns the call that describes one device's share, with the implementation for this share."""
    call = choose_implementation(call, mesh=layout)
    if layout is None:
        return call
    return dataclasses.replace(
        call, axis_name=layout.vocab_axes, gather_dim=layout.gather_dim, shards=layout.vocab_shards
    )


# What every public function calls


class Bound(NamedTuple):
    """A call and its arrays. For `lce_jax.linear_kl`, the arrays are a `Pair`, one for each model."""

    call: Call
    primals: Any  # `Primals`
    rows: Any  # `Rows`
    agree: Bool[Array, "*b"] | None  # inside ``shard_map``: which rows are equal on all shards of the vocabulary


def bind_call(arguments: Arguments, others: Any = ()) -> Bound:
    """Binds a described call to its arrays, over the mesh that its placement or its operands name, or on one device.

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
    """Checks a call's arrays against each other, and sets the shapes, dtypes and device of the call.

    Arrays may be tracers or ``ShapeDtypeStruct``.
    """
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
    if arguments.lora is not None:
        _check_adapter(arguments.lora, hidden, weight, columns)
    if arguments.candidates is not None:
        shared_checks.check_candidate_shape("candidates", arguments.candidates.shape, labels.shape, "labels")
    dtype, hidden_dtype = (jnp.dtype(jax.dtypes.canonicalize_dtype(x.dtype)) for x in (weight, hidden))
    hidden_dtype = jnp.promote_types(hidden_dtype, dtype) if call.rank else hidden_dtype
    call = call.replace(
        num_tokens=math.prod(labels.shape),
        hidden_size=weight.shape[call.hidden_dim],
        columns=columns,
        dtype=dtype,
        caller_dtype=None if hidden_dtype == dtype else hidden_dtype,
        partial_rows=where is not None,
        device=_dispatch.current_device(weight, hidden, labels, where),
    )
    return arguments._replace(call=call, where=where, ignore_index=None)


def _check_adapter(lora: Any, hidden: Any, weight: Any, columns: int) -> None:
    """Refuses factors of an adapter that do not fit hidden and weight."""
    a, b, _ = lora
    if (a.shape[1], b.shape[0]) != (hidden.shape[-1], columns):
        raise ValueError(
            f"lora's A {tuple(a.shape)} and B {tuple(b.shape)} must be [r, {hidden.shape[-1]}] and [{columns}, r], to "
            f"fit hidden {tuple(hidden.shape)} and weight {tuple(weight.shape)}"
        )


@functools.partial(jax.jit, static_argnums=2, inline=True)
def _exclude_ignored(labels: Array, where: Array | None, ignore_index: int) -> Array:
    """Returns ``where`` without the rows whose label is ``ignore_index``."""
    counts = labels != ignore_index
    return counts if where is None else counts & where


def check_values(arguments: Arguments) -> None:
    """Refuses wrong temperatures and floors of a described call if their values are known."""
    shape, where = tuple(arguments.labels.shape), arguments.where
    _checks.check_temperature(arguments.temperature, shape, where)
    if arguments.logit_floor is not None:
        _checks.check_floor(arguments.logit_floor, shape, where)


def choose_implementation(call: Call, columns: int | None = None, mesh: Layout | AbstractMesh | None = None) -> Call:
    """Returns the call with its true vocabulary size and implementation; over a `Layout`, the call of one device.

    ``columns`` is the number of columns of all shards. None: the number is that of the call, or unknown if an axis
    splits the columns.
    """
    if columns is None:
        columns = call.columns if call.axis_name is None else scalars.INT32_MAX
    vocab_size = _checks.check_vocab_size(call.caller_vocab_size, columns)
    if isinstance(mesh, Layout):
        tokens, size = call.num_tokens // mesh.token_shards, call.columns // mesh.vocab_shards
        call = _dispatch.use_mesh_device(call, mesh.mesh).replace(num_tokens=tokens, columns=size)
    if call.top_k:
        scalars.check_k(call.top_k, vocab_size)
    if call.vocab_part_size and columns < scalars.INT32_MAX:  # INT32_MAX: the number of shards is unknown here
        shared_checks.check_vocab_parts(call.vocab_part_size, columns, call.columns)
    return call.replace(
        implementation=_dispatch.choose(call)[0].NAME,
        vocab_size=vocab_size,
        caller_vocab_size=None,
        padded=vocab_size < columns,
        mesh=mesh,
    )


def make_operands(call: Call, arguments: Arguments) -> tuple[Primals, Rows]:
    """Returns the arrays that can have gradients, and the per-token rows. Ids outside [0, vocab_size) become -1."""
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
    """Appends u = hidden · (scale · A)ᵀ to hidden, and sets the padded B as adapter. JAX differentiates both steps."""
    missing = (0, call.rank - a.shape[0])
    hidden, a = _jax.gather_dims(primals.hidden, -1), _jax.gather_dims(a, -2, -1)
    a = jnp.pad(a.astype(call.stat_dtype) * lax.stop_gradient(scale).astype(call.stat_dtype), (missing, (0, 0)))
    unmasked = hidden  # masked rows become 0 below
    if where is not None:
        unmasked = jnp.where(_jax.split_like(where, hidden)[..., None], hidden, jnp.zeros((), hidden.dtype))
    u = jnp.matmul(unmasked.astype(call.dtype), a.astype(call.dtype).T, precision=call.precision)
    extended = jnp.concatenate([x.astype(call.hidden_dtype) for x in (hidden, u)], axis=-1)
    return primals._replace(hidden=extended, adapter=jnp.pad(b, ((0, 0), missing)))
