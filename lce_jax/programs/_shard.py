"""One device's part of a call, without collectives: its operands, its statistics, its gradients.

    hidden ─ cast ─ compact ─ statistics                                  (eq. 1 of the device's own columns)
    row coefficients ─ gradients ─ expand ─▶ dhidden, dweight             (eqs. 4, 5, from the whole vocabulary's)

`programs._one_device` adds the collectives; `lce_jax.local` runs it as it is.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import lax

from lce_jax import _dispatch, mosaic
from lce_jax._types import LogprobOutput, Operands, Primals, Results, RowCoefficients, ShardStatistics, is_array
from lce_jax.call import _rows
from lce_jax.call._rows import Rows, Scales
from lce_jax.call._spec import Spec
from lce_jax.mathematics import _columns, _logprobs, _temperature
from lce_jax.mathematics._statistics import WITHOUT_GRADIENT, Normalizer, Parts, along, as_parts, merge_parts
from lce_jax.mesh import _collectives

if TYPE_CHECKING:
    from lce_jax._shapes import Array, Bool, Float


def as_operand(primals: Primals) -> Primals:
    """Hidden in the weight's dtype, rounded explicitly because XLA may drop a conversion down and up again."""
    hidden, to = primals.hidden, jnp.finfo(primals.weight.dtype)
    if to.bits < jnp.finfo(hidden.dtype).bits:
        hidden = lax.reduce_precision(hidden, to.nexp, to.nmant)
    return primals._replace(hidden=hidden.astype(primals.weight.dtype))


def statistics(
    spec: Spec, primals: Primals, rows: Rows, start: Any, keep_cache: bool, stacked: Stacked | None = None
) -> tuple[ShardStatistics, Any, Bool[Array, "T"] | None]:
    """The statistics of the shard whose first column is ``start``, in the call's row order, and the cache.

    Everything here is flat: hidden ``[T, H]``, as `as_operand` returns it, and rows ``[T]``. With ``stacked``, which
    returns the arrays of all shards, the statistics are those of the whole vocabulary. The last result are the rows
    that all shards were given alike, if these were compared; the statistics of the others are NaN.
    """
    operands, order = operands_of(spec, primals, rows, start, scales_of(spec, rows))
    stats, cache = _statistics(spec, operands, stacked is not None, keep_cache)
    same = None
    if stacked is not None:
        with jax.named_scope("lce_merge"):
            stats, every = stacked((stats, given_to(spec, primals, rows, start)))
            stats, same = _merged(spec, stats, operands), agree(spec, every, rows, primals.weight)
    stats = stats if order is None else _rows.expand(order, stats)
    wrong = _rows.wrong(rows)
    if wrong is not None:
        stats = jax.tree.map(lambda x: jnp.where(along(wrong, x), jnp.nan, x), stats)
    return stats if same is None else _collectives.nan_where_different(same, stats), cache, same


type Stacked = Callable[[Any], Any]  # a tree of arrays -> those of all shards, [N, ...] each


def given_to(spec: Spec, primals: Primals, rows: Rows, start: Any) -> _collectives.Given | None:
    """What the shard says of its operands, flat as in `statistics`; None where it need not."""
    if rows.tags is None:
        return None
    dim = spec.case.options.vocab_dim
    columns = jnp.clip(spec.vocab_size - start, 0, primals.weight.shape[dim])
    sketches, probes = _collectives.sketch(primals.hidden), _collectives.probe(primals.weight, dim, columns)
    sketches = sketches if rows.where is None else jnp.where(rows.where, sketches, 0)  # the others may hold anything
    return _collectives.Given(rows.tags, sketches[None], probes[None])


def agree(spec: Spec, every: _collectives.Given | None, rows: Rows, weight: Array) -> Bool[Array, "T"] | None:
    """The rows that all shards were given alike, by what they say, or that do not count; None if they say nothing."""
    if every is None:
        return None
    ids = rows.labels if rows.candidates is None else rows.candidates
    found = _collectives.agree(every, ids, weight.shape[spec.case.options.vocab_dim])
    return _collectives.where_it_counts(found, rows.where)


def _statistics(spec: Spec, operands: Operands, in_parts: bool, keep_cache: bool) -> tuple[Any, Any]:
    """Of one shard, and its cache; as `Parts` where it is one among others.

    The kernels send those of each group of tiles, XLA those of the shard.
    """
    if in_parts and spec.implementation == mosaic.NAME:
        return mosaic.in_parts(operands, spec.case, keep_cache)
    stats, cache = _dispatch.IMPLEMENTATIONS[spec.implementation].statistics(operands, spec.case, keep_cache)
    return as_parts(stats) if in_parts else stats, cache


def _merged(spec: Spec, parts: Parts, operands: Operands) -> ShardStatistics:
    """Eq. 1 of the whole vocabulary, from the parts of all shards, stacked."""
    case, inverse_temperature = spec.case, operands.inverse_temperature
    if spec.implementation == mosaic.NAME:
        return mosaic.merged(parts, case, inverse_temperature, operands.num_rows)
    scale = _logprobs.row_scale(case.options, inverse_temperature)
    return merge_parts(parts, case.options, case.num_tokens, scale)


def finish(
    spec: Spec,
    rows: Rows,
    stats: ShardStatistics,
    where: Bool[Array, "T"] | None,
    dropped_mass: Float[Array, "T"] | None,
) -> Results:
    """Eq. 3 in the implementation's arithmetic, from the whole vocabulary's statistics in the call's row order."""
    per_token = functools.partial(_in_arithmetic_of, spec)
    where = _columns.without_empty(where, stats.sumexp) if spec.case.options.has_floor else where
    scale = _logprobs.row_scale(spec.case.options, scales_of(spec, rows).logits)
    return _logprobs.finish(stats, scale, rows.labels, where, spec.vocab_size, dropped_mass, per_token)


def _in_arithmetic_of(spec: Spec, function: Callable[..., Any], *operands: Any) -> Any:
    """``function(*operands)`` of trees of [T] and of numbers, in the implementation's arithmetic.

    XLA and the kernels round logarithms and quotients differently, so a token's results keep their bits only where all
    such steps are of one kind.
    """
    if spec.implementation != mosaic.NAME:
        return function(*operands)
    run, arrays = of_arrays(function, operands)
    return mosaic.per_token(run, spec.case, *arrays)


def of_arrays(function: Callable[..., Any], operands: Any) -> tuple[Callable[..., Any], list[Any]]:
    """``function(*operands)`` as a function of the arrays among the trees ``operands``, and these."""
    leaves, tree = jax.tree.leaves(operands), jax.tree.structure(operands)

    def run(*arrays: Any) -> Any:
        given = iter(arrays)
        return function(*jax.tree.unflatten(tree, [next(given) if is_array(x) else x for x in leaves]))

    return run, list(filter(is_array, leaves))


def selected(spec: Spec, rows: Rows, stats: ShardStatistics, cache: Any) -> tuple[Any, Float[Array, "T"] | None]:
    """What `gradients` needs of the cache, known after the merge, and the shard's part of ``dropped_mass``.

    The part is None if nothing is ever left out. ``stats`` are those of the whole vocabulary, in the call's row order.
    """
    if spec.implementation != mosaic.NAME:
        return cache, None
    order = None if rows.where is None else _rows.compaction(rows.where)
    num_rows = rows.num_rows if order is None else order.num_rows
    of_rows = Normalizer(stats.max, stats.sumexp)
    if order is not None:
        of_rows = jax.tree.map(lambda x: x[order.source], of_rows)

    cache, dropped = mosaic.selected(spec.case, cache, of_rows, num_rows)
    return cache, dropped if order is None or dropped is None else _rows.expand(order, dropped)


def gradients(
    spec: Spec,
    primals: Primals,
    rows: Rows,
    start: Any,
    stats: ShardStatistics,
    cotangent: Results,
    cache: Any,
    *,
    may_round_dhidden: bool = False,
    may_overwrite_cache: bool = True,
    dweight: Array | None = None,
) -> Primals:
    """The shard's part of dhidden and its dbias, in the statistics' dtype, and its dweight, in the weight's.

    ``stats`` are those of the whole vocabulary, in the call's row order. With ``may_round_dhidden``, dhidden may come
    in the weight's dtype. With ``dweight``, a sum in the statistics' dtype, the shard's dweight is added to it instead.
    """
    scales = scales_of(spec, rows)
    operands, order = operands_of(spec, primals, rows, start, scales)
    coefficients = _coefficients(spec, rows, stats, cotangent, scales)
    if order is not None:
        coefficients = _rows.compact(order, coefficients)

    found = _dispatch.IMPLEMENTATIONS[spec.implementation].gradients(
        operands, spec.case, coefficients, cache,
        may_round_dhidden=may_round_dhidden, may_overwrite_cache=may_overwrite_cache, dweight=dweight,
    )  # fmt: skip
    dhidden = found.hidden if order is None else _rows.expand(order, found.hidden)
    dhidden = _signed(dhidden, scales)
    return found._replace(hidden=dhidden if rows.live is None else jnp.where(rows.live[:, None], dhidden, 0.0))


def _coefficients(
    spec: Spec, rows: Rows, stats: ShardStatistics, cotangent: Results, scales: Scales
) -> RowCoefficients:
    """What eqs. 4 and 5 need of each token, in the call's row order."""
    options = spec.case.options
    factors = _logprobs.row_scale(options, scales.logits), _logprobs.row_factor(options, scales.derivative)
    of_rows = functools.partial(_logprobs.row_coefficients, options=options, vocab_size=spec.vocab_size)
    live = _columns.without_empty(rows.live, stats.sumexp) if options.has_floor else rows.live
    if stats.candidates is not None:
        found = of_rows(stats, cotangent, *factors, live)
    else:
        of_results = cotangent._replace(outputs=LogprobOutput(*cotangent.outputs[:3]))
        unread: Any = dict.fromkeys((*WITHOUT_GRADIENT, "total"))
        read = stats._replace(**unread)
        read = read if live is None else read._replace(sumexp=jnp.where(live, read.sumexp, 1.0))
        found = _in_arithmetic_of(spec, functools.partial(of_rows, where=None), read, of_results, *factors)
        found = found if live is None else jax.tree.map(lambda x: jnp.where(live, x, 0.0), found)
    wrong = _rows.wrong(rows)
    return found if wrong is None else _temperature.without_gradient(found, wrong)


def operands_of(
    spec: Spec, primals: Primals, rows: Rows, start: Any, scales: Scales
) -> tuple[Operands, _rows.Compaction | None]:
    """What an implementation is given, the live rows first, and how to undo their order."""
    hidden, weight, bias = primals
    columns = weight.shape[spec.case.options.vocab_dim]
    num_columns = None
    if spec.padded:
        left = spec.vocab_size - start
        num_columns = min(max(left, 0), columns) if isinstance(left, int) else jnp.clip(left, 0, columns)
        if spec.implementation == mosaic.NAME:
            num_columns = jnp.asarray(num_columns, jnp.int32)  # one set of kernels for every vocab_size

    targets = _rows.owned(rows.labels, start, columns)
    candidates = None if rows.candidates is None else _rows.owned(rows.candidates, start, columns)
    hidden, order, num_rows, floor = _signed(hidden, scales), None, rows.num_rows, rows.floor
    if floor is not None:
        scale = _logprobs.row_scale(spec.case.options, scales.logits)
        floor = _in_arithmetic_of(spec, _columns.unscaled_floor, floor, scale)
    if rows.where is not None:
        order = _rows.compaction(rows.where)
        hidden, targets, candidates, scales, floor = _rows.compact(order, (hidden, targets, candidates, scales, floor))
        num_rows = order.num_rows
    elif rows.live is not None:  # NaN or inf in the other rows cannot spread
        hidden = jnp.where(rows.live[:, None], hidden, jnp.zeros((), hidden.dtype))
    bias = None if bias is None else bias.astype(spec.case.stat_dtype)
    of_shard = Operands(hidden, weight, targets, scales.logits, num_rows, num_columns, scales.raw, bias, candidates)
    return of_shard._replace(floor=floor), order


def scales_of(spec: Spec, rows: Rows) -> Scales:
    """The factors of eq. 0, in the implementation's arithmetic."""
    invert = functools.partial(_in_arithmetic_of, spec, _temperature.inverse)
    return _rows.scales(rows, spec.case.stat_dtype, spec.case.options.signs_hidden, invert)


def _signed(hidden: Float[Array, "T H"], scales: Scales) -> Float[Array, "T H"]:
    return hidden if scales.sign is None else hidden * scales.sign.astype(hidden.dtype)[:, None]
