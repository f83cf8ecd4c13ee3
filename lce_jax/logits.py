"""Logits at chosen ids alone, without a pass over the vocabulary."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from lce_jax import (
    _bind,
    _checks,
    _chosen,
    _chosen_reference,
    _collectives,
    _compat,
    _dispatch,
    _math,
    _options,
    _partition,
    _rows,
    _scales,
    _shard,
    reference,
    xla,
)
from lce_jax._layout import Layout
from lce_jax._options import CallOptions
from lce_jax._rows import Rows
from lce_jax._types import LogprobOptions, Options, Primals
from lce_jax._xla_partitioning import warn_once

if TYPE_CHECKING:
    from jax.lax import PrecisionLike
    from jaxtyping import Array, Bool, Float, Int

__all__ = ["linear_logits"]


def linear_logits(
    hidden: Float[Array, "*b H"],
    weight: Float[Array, "V H"],
    ids: Int[Array, "*b K"],
    *,
    where: Bool[Array, "*b"] | None = None,
    temperature: float | Float[Array, "..."] = 1.0,
    logit_softcap: float | Float[Array, ""] | None = None,
    logit_scale: float | Float[Array, ""] = 1.0,
    vocab_size: int | None = None,
    weight_layout: Literal["vh", "hv"] = "vh",
    axis_name: Any = None,
    precision: PrecisionLike = None,
    implementation: str | tuple[str, ...] | None = None,
    bias: Float[Array, "V"] | None = None,
) -> Float[Array, "*b K"]:
    """Logits at chosen ids, without a pass over the vocabulary.

    ``z[k] = cap(logit_scale · (hidden · weight[ids[k]] + bias[ids[k]])) / temperature`` in float32, T·K dot products.
    Differentiable, once, in ``hidden``, ``weight`` and ``bias``. `masked_logprobs` makes a softmax over them; for
    log-probabilities under the whole vocabulary use ``linear_logprobs(..., candidates=ids)``.

    Args:
        hidden: ``[..., H]`` hidden states; any leading shape, also an empty one. bfloat16, float16, float32 or
            float64. Cast to the weight's dtype for the matrix products.
        weight: ``[V, H]`` head (``[H, V]`` with ``weight_layout="hv"``). Its dtype is that of the matrix products.
        ids: ``[..., K]`` integer vocabulary ids per token, global also when the vocabulary is split; K from 1 to 512.
            -1 stands for none.
        where: ``[...]`` bool, the rows that count. The others are exactly 0 in outputs and gradients, whatever they
            hold. None: every row counts.
        temperature: divides the float32 logits: a positive number, or an array that broadcasts to ``[...]`` (one value
            per token, or per sequence as ``[b, 1]``). No gradient. A value that is not positive and finite is refused
            where it is known; in a traced array its row returns NaN and has no gradient, and the other rows are not
            affected.
        logit_softcap: ``c`` in ``cap(x) = c·tanh(x / c)``, before the temperature (Gemma 2: 30): a positive number,
            or an array of shape (), which may be traced. None: no cap. No gradient.
        logit_scale: multiplies the float32 logits first (Cohere, MuP): a number, or an array of shape (), which may
            be traced. No gradient.
        vocab_size: the true size of the vocabulary. Columns from it on are padding: in no sum, with zero gradient,
            whatever they hold. None: every column counts.
        weight_layout: "vh" for ``[V, H]`` (nnx.Embed, PyTorch, Megatron), "hv" for ``[H, V]`` (nnx.Linear kernel).
        axis_name: inside ``shard_map``, the mesh axis (or tuple of axes) that splits the vocabulary. Each shard
            passes its own columns of ``weight`` and the same ``hidden`` and ``labels``; all shards return
            bitwise-equal results. None: ``weight`` is whole.
        precision: of the matrix products with float32 operands; "highest" is exact to float32 rounding where the
            default may be TF32 (GPU) or bfloat16 (TPU).
        implementation: "xla", "reference" (stores all rows of the weight that the ids name), or a tuple of them to try
            in order. None: "xla". There are no kernels for it.
        bias: ``[V]``, added to the float32 products before the scale, and split as the weight's vocabulary is. Its
            gradient is summed in float32 and rounded once. None: no bias.

    Returns:
        ``[..., K]`` in float32 (float64 for a float64 weight); 0, without a gradient, where the id is none or out of
        vocabulary, and where ``where`` is False.

    Raises:
        UnsupportedError: an implementation asked for by name cannot serve the call; the message says why.
        ValueError, TypeError: shapes, dtypes or options that do not fit, with the offending values.
        NotImplementedError: on a second derivative.

    Memory:
        O(T·K), and a few chunks of gathered rows of 32 MiB each, beyond the operands and the gradients.

    Numerics:
        Every sum is float32, and each gradient is rounded once, to its operand's dtype. No product is a matrix's, so
        all are exact to float32 rounding whatever ``precision`` says. Two runs are bitwise equal:
        the gradients of an id that occurs many times are added in a fixed order.

    Sharding:
        Over Explicit axes the operands' types say how the call is split. Over Auto axes XLA is not told: call
        `sharded_linear_logits`. Inside ``shard_map`` give ``axis_name``. A sum of one logit per id over the shards is
        the only collective of the forward.

    Example:
        >>> import jax.numpy as jnp
        >>> from lce_jax import linear_logits
        >>> hidden, weight = jnp.ones((2, 4)), jnp.arange(10.0)[:, None] * jnp.ones(4)
        >>> linear_logits(hidden, weight, jnp.array([[3, 0], [7, -1]])).tolist()
        [[12.0, 0.0], [28.0, 0.0]]
    """
    given: LogprobOptions = {
        "temperature": temperature,
        "logit_softcap": logit_softcap,
        "logit_scale": logit_scale,
        "vocab_size": vocab_size,
        "weight_layout": weight_layout,
        "axis_name": axis_name,
        "precision": precision,
        "implementation": implementation,
        "bias": bias,
    }
    static, primals, rows = operands(hidden, weight, ids, where, _options.of_call(given))
    layout = None if axis_name is not None else _layout_of_types(static, primals, rows)
    if layout is not None:
        return over_mesh(static, layout, primals, rows)
    rows, agree = _bind.same_on_all_shards(primals, rows, axis_name, weight.shape[static.options.vocab_dim])
    return _collectives.nan_where_different(agree, _of_call(static, primals, rows))


def operands(hidden: Any, weight: Any, ids: Any, where: Any, options: CallOptions) -> tuple[Static, Primals, Rows]:
    """The arrays of a call, checked, and what is known when it is traced."""
    _checks.array("hidden", hidden)
    _checks.num_candidates(ids, "ids")
    leading = tuple(hidden.shape[:-1])
    _checks.candidate_shape(ids, leading, "hidden before H", "ids")
    options = options.named("linear_logits")
    case = _bind.case(hidden, weight, jax.ShapeDtypeStruct(leading, jnp.int32), where, options)
    implementation, _ = _dispatch.choose(case, options.implementation or (xla.NAME,))
    size = _checks.vocabulary(options.vocab_size, case.vocab_size * _checks.axis_size(options.axis_name))
    primals = jax.tree.map(lambda x: _compat.without_reduced(jnp.asarray(x)), Primals(hidden, weight, options.bias))
    factors = (options.temperature, size, case.stat_dtype, options.logit_scale, options.logit_softcap)
    rows = _rows.of_ids(ids, where, *factors)
    return Static(options.static, options.axis_name, case.stat_dtype, implementation.NAME), primals, rows


class Static(NamedTuple):
    """What is known when a call is traced."""

    options: Options
    axis_name: Any
    dtype: Any  # of the results and of every sum
    implementation: str

    @property
    def chosen(self) -> Any:
        """The module with the products of chosen columns and their gradients."""
        return _chosen_reference if self.implementation == reference.NAME else _chosen


def _layout_of_types(static: Static, primals: Primals, rows: Rows) -> Layout | None:
    """The layout of operands over Explicit axes."""
    mesh = _partition.mesh_of((primals, rows), static.options.function)
    if mesh is None:
        return None
    layout = _partition.explicit_layout(static.options, primals, rows)
    if layout is None and not mesh.empty:
        warn_once(
            "linear_logits cannot see how XLA splits its operands over Auto axes, and may repeat all work on every "
            "device: call sharded_linear_logits(hidden, weight, ids, mesh=mesh, vocab_axis=..., batch_axes=...), or "
            "make the mesh's axes Explicit"
        )
    return layout


@functools.partial(jax.jit, static_argnums=(0, 1), inline=True)
def over_mesh(static: Static, layout: Layout, primals: Primals, rows: Rows) -> Float[Array, "*b K"]:
    """The logits of global arrays. Hidden states whose sequence the vocabulary's axis splits are gathered over it."""
    static, whole = static._replace(axis_name=layout.vocab_axes), layout.without_gather()

    def device(primals: Primals, rows: Rows) -> Array:
        return layout.own_rows(_of_call(static, primals, rows))

    in_specs = (whole.primal_specs, whole.row_spec)
    mapped = jax.shard_map(device, mesh=layout.mesh, in_specs=in_specs, out_specs=layout.out_spec)
    return mapped(*whole.place(primals, rows))


@functools.partial(jax.jit, static_argnums=0, inline=True)
def _of_call(static: Static, primals: Primals, rows: Rows) -> Float[Array, "*b K"]:
    assert rows.candidates is not None
    shape = rows.candidates.shape
    if not rows.labels.size:
        return _compat.vary_like(jnp.zeros(shape, static.dtype), (primals.hidden, rows.candidates))
    flat = _rows.flattened(rows, rows.labels.ndim)
    live, wrong = flat.where, _scales.wrong_temperature(flat)
    if wrong is not None:
        live = ~wrong if live is None else live & ~wrong
    if live is not None:
        assert flat.candidates is not None
        flat = flat._replace(candidates=jnp.where(live[:, None], flat.candidates, -1))
    z = _of_shard(static, primals, flat)
    if static.axis_name is not None:
        z = lax.psum(z, static.axis_name)  # one shard has the logit, the others 0, so the sum is exact
    if wrong is not None:
        z = jnp.where(wrong[:, None], jnp.nan, z)
    return z.reshape(shape)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _of_shard(static: Static, primals: Primals, rows: Rows) -> Float[Array, "T K"]:
    return _forward(static, primals, rows)[0]


def _of_shard_fwd(static: Static, primals: Primals, rows: Rows) -> tuple[Array, Any]:
    z, slope = _compat.first_order_only(functools.partial(_forward, static))(primals, rows)
    return z, (primals, rows, slope)


def _of_shard_bwd(static: Static, residuals: Any, cotangent: Array) -> tuple[Primals, None]:
    return _compat.first_order_only(functools.partial(_backward, static))(*residuals, cotangent), None


_of_shard.defvjp(_of_shard_fwd, _of_shard_bwd)


def _forward(static: Static, primals: Primals, rows: Rows) -> tuple[Float[Array, "T K"], Float[Array, "T K"]]:
    """The logits of the ids that this shard owns, and their derivatives in the raw products; 0 at the others."""
    options, columns = static.options, _columns(static, primals, rows)
    hidden = _shard.as_operand(primals).hidden.reshape(-1, primals.hidden.shape[-1])
    raw = static.chosen.products(hidden, primals.weight, columns, options, static.dtype)
    if primals.bias is not None:
        raw = raw + jnp.take(primals.bias, columns, mode="clip").astype(static.dtype)
    scales = _scales.of_rows(rows, static.dtype, signs_hidden=False)
    z, slope = _math.transform_logits(raw, options, scales.logits, scales.raw)
    factor = _math.row_factor(options, scales.derivative)
    factor = factor if isinstance(factor, float) else factor[:, None]
    slope = jnp.full_like(raw, factor) if slope is None else slope * factor
    return jnp.where(columns >= 0, z, 0.0), jnp.where(columns >= 0, slope, 0.0)


def _backward(static: Static, primals: Primals, rows: Rows, slope: Array, cotangent: Array) -> Primals:
    """The gradients, in the shapes, dtypes and types of their operands."""
    options, columns = static.options, _columns(static, primals, rows)
    terms = jnp.where(slope == 0.0, 0.0, cotangent * slope)
    hidden = _shard.as_operand(primals).hidden.reshape(-1, primals.hidden.shape[-1])
    of_hidden = static.chosen.dhidden(terms, primals.weight, columns, options).reshape(primals.hidden.shape)
    found = Primals(
        of_hidden,
        static.chosen.dweight(terms, hidden, columns, primals.weight, options),
        None if primals.bias is None else _chosen.dbias(terms, columns, primals.bias.shape[0]),
    )
    return jax.tree.map(lambda x, like: _compat.psum_to_type(x, like).astype(like.dtype), found, primals)


def _columns(static: Static, primals: Primals, rows: Rows) -> Int[Array, "T K"]:
    """The ids as columns of this shard, -1 where it does not own them."""
    assert rows.candidates is not None
    size = primals.weight.shape[static.options.vocab_dim]
    return _rows.owned(rows.candidates, _collectives.first_column(static.axis_name, size), size)
