"""The share of `lce_jax.linear_logprobs` that one device computes, including the collectives.

hidden ─ gather over the sequence ─ statistics of the shard ─ merge over the axis ─ finish ─▶ Results
│ cache
cotangents ─ total over the axis ─ gradients of the shard ─ reduce over the axes ─▶ dhidden, dweight
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from lce_jax import mosaic
from lce_jax.call import _describe, _dispatch
from lce_jax.call._describe import Rows, Scales
from lce_jax.mathematics import _logprobs
from lce_jax.mathematics._statistics import NOT_DIFFERENTIATED, Normalizer, expand_like, make_parts, merge_parts
from lce_jax.mesh import _collectives
from lce_jax.run import _runner
from lce_jax.run._partitioning import ArraySharding, Program, head_sharding
from lce_jax.run._runner import Capability, run_program
from lce_jax.types import _jax
from lce_jax.types._types import (
    Call,
    LogprobOutput,
    Operands,
    Primals,
    Results,
    RowCoefficients,
    ShardStatistics,
    is_array,
)

if TYPE_CHECKING:
    from lce_jax.types._shapes import Array, Bool, Float, Int


# Without collectives, except for a gather that the caller passes


def cast_hidden(primals: Primals) -> Primals:
    """Casts hidden to the weight's dtype. Rounds explicitly, because XLA may drop a cast to fewer bits and back."""
    hidden, to = primals.hidden, jnp.finfo(primals.weight.dtype)
    if to.bits < jnp.finfo(hidden.dtype).bits:
        hidden = lax.reduce_precision(hidden, to.nexp, to.nmant)
    return primals._replace(hidden=hidden.astype(primals.weight.dtype))


def summarize_operands(call: Call, primals: Primals, rows: Rows, start: Any) -> _collectives.ShardSummary | None:
    """Returns a summary of the flat operands, for the comparison of shards; None if there is nothing to compare."""
    if rows.tags is None:
        return None
    dim = call.vocab_dim
    columns = jnp.clip(call.vocab_size - start, 0, primals.weight.shape[dim])
    sketches, probes = _collectives.sketch(primals.hidden), _collectives.probe(primals.weight, dim, columns)
    sketches = sketches if rows.where is None else jnp.where(rows.where, sketches, 0)  # masked rows may hold anything
    return _collectives.ShardSummary(rows.tags, sketches[None], probes[None])


def find_agreeing_rows(
    call: Call, summaries: _collectives.ShardSummary | None, rows: Rows, weight: Array
) -> Bool[Array, "T"] | None:
    """Whether all shards have the same operands in each row; True in masked rows. None: no ``summaries`` to compare."""
    if summaries is None:
        return None
    ids = rows.labels if rows.candidates is None else rows.candidates
    agrees = _collectives.compare_summaries(summaries, ids, weight.shape[call.vocab_dim])
    return _collectives.ignore_masked_rows(agrees, rows.where)


type Gather = Callable[[Any], Any]  # a tree of arrays -> the tree with the arrays of all N shards, stacked as [N, ...]


class Part(NamedTuple):
    """One device's part of a call: the columns of the device, and all tokens, in flat arrays."""

    call: Call
    primals: Primals  # hidden [T, H], as `cast_hidden` returns it
    rows: Rows  # [T]
    start: Any  # the global id of the first column
    scales: Scales

    @classmethod
    def of(cls, call: Call, primals: Primals, rows: Rows, start: Any = None) -> Part:
        """Makes a part, with the factors of eq. 0.

        If ``start`` is None, the first column follows from the device's mesh position.
        """
        invert = functools.partial(_compute_per_token, call, _logprobs.invert_temperature)
        scales = _describe.compute_scales(rows, call.stat_dtype, call.signs_hidden, invert)
        return cls(call, primals, rows, find_first_column(call, primals.weight) if start is None else start, scales)

    @property
    def row_scale(self) -> Float[Array, "T"] | float:
        """The factor k of eq. 0."""
        return _logprobs.compute_row_scale(self.call, self.scales.inverse_temperature)

    def operands(self) -> tuple[Operands, _describe.Compaction | None]:
        """Returns the operands of an implementation, with unmasked rows first; and the order of these rows."""
        (call, (hidden, weight, bias, adapter), rows, start, scales), num_columns = self, None
        columns = weight.shape[call.vocab_dim]
        if call.padded:
            rest = call.vocab_size - start
            num_columns = min(max(rest, 0), columns) if isinstance(rest, int) else jnp.clip(rest, 0, columns)
            if call.implementation == mosaic.NAME:
                num_columns = jnp.asarray(num_columns, jnp.int32)  # not static: the same kernels serve every vocab_size

        targets = _describe.find_local_columns(rows.labels, start, columns)
        candidates = None if rows.candidates is None else _describe.find_local_columns(rows.candidates, start, columns)
        hidden, order, num_rows, floor = _apply_sign(hidden, scales), None, rows.num_rows, rows.floor
        if floor is not None:
            floor = _compute_per_token(call, _logprobs.unscaled_floor, floor, self.row_scale)
        if rows.where is not None:
            order = _describe.plan_compaction(rows.where)
            hidden, targets, candidates, scales, floor = _describe.compact(
                order, (hidden, targets, candidates, scales, floor)
            )
            num_rows = order.num_rows
        elif rows.unmasked is not None:  # NaN or inf in a masked row must not spread
            hidden = jnp.where(rows.unmasked[:, None], hidden, jnp.zeros((), hidden.dtype))
        operands = Operands(
            hidden,
            weight,
            targets,
            scales.inverse_temperature,
            num_rows,
            num_columns,
            raw_scale=scales.raw_scale,
            bias=None if bias is None else bias.astype(call.stat_dtype),
            candidates=candidates,
            floor=floor,
            adapter=None if adapter is None else adapter.astype(call.dtype),
        )
        return operands, order

    def statistics(
        self, keep_cache: bool, gather: Gather | None = None
    ) -> tuple[ShardStatistics, Any, Bool[Array, "T"] | None]:
        """Returns the statistics in the call's row order, the cache, and the result of `find_agreeing_rows`.

        With ``gather``, the statistics cover the full vocabulary, and are NaN in rows in which the shards differ.
        """
        (call, primals, rows, start, _), (operands, order), same = self, self.operands(), None
        implementation, has_kernels = _dispatch.IMPLEMENTATIONS[call.implementation], call.implementation == mosaic.NAME
        stats: Any
        parts: Any
        if gather is None:
            stats, cache = implementation.statistics(operands, call, keep_cache)
        else:
            if has_kernels:  # kernels send the statistics of each group of tiles
                parts, cache = mosaic.partial_statistics(operands, call, keep_cache)
            else:
                stats, cache = implementation.statistics(operands, call, keep_cache)
                parts = make_parts(stats)
            with jax.named_scope("lce_merge"):
                parts, summaries = gather((parts, summarize_operands(call, primals, rows, start)))
                if has_kernels:
                    stats = mosaic.merge_statistics(parts, call, operands.inverse_temperature, operands.num_rows)
                else:
                    row_scale = _logprobs.compute_row_scale(call, operands.inverse_temperature)
                    stats = merge_parts(parts, call, call.num_tokens, row_scale)
                same = find_agreeing_rows(call, summaries, rows, primals.weight)
        stats = stats if order is None else _describe.expand(order, stats)
        wrong = _describe.find_invalid_rows(rows)
        if wrong is not None:
            stats = jax.tree.map(lambda x: jnp.where(expand_like(wrong, x), jnp.nan, x), stats)
        return stats if same is None else _collectives.set_nan_where_different(same, stats), cache, same

    def finish(
        self, stats: ShardStatistics, where: Bool[Array, "T"] | None, dropped_mass: Float[Array, "T"] | None
    ) -> Results:
        """Computes the results (eq. 3) from the statistics of the full vocabulary, in the call's row order."""
        call, per_token = self.call, functools.partial(_compute_per_token, self.call)
        where = _logprobs.exclude_empty_rows(where, stats.sumexp) if call.has_floor else where
        labels, vocab_size = self.rows.labels, call.vocab_size
        return _logprobs.finish(stats, self.row_scale, labels, where, vocab_size, dropped_mass, per_token)

    def select(self, stats: ShardStatistics, cache: Any) -> tuple[Any, Float[Array, "T"] | None]:
        """Selects the tiles that reach the ``gradient_threshold``.

        Returns the cache for `gradients`, and the dropped mass.

        The mass is this shard's part, or None if the implementation skips no tiles. ``stats`` are the statistics of the
        full vocabulary, in the call's row order.
        """
        call, rows = self.call, self.rows
        if call.implementation != mosaic.NAME:
            return cache, None
        order = None if rows.where is None else _describe.plan_compaction(rows.where)
        num_rows = rows.num_rows if order is None else order.num_rows
        normalizer = Normalizer(stats.max, stats.sumexp)
        if order is not None:
            normalizer = jax.tree.map(lambda x: x[order.source], normalizer)

        cache, dropped = mosaic.select_tiles(call, cache, normalizer, num_rows)
        return cache, dropped if order is None or dropped is None else _describe.expand(order, dropped)

    def gradients(
        self,
        stats: ShardStatistics,
        cotangent: Results,
        cache: Any,
        *,
        may_round_dhidden: bool = False,
        may_overwrite_cache: bool = True,
        dweight: Array | None = None,
        adds_dweight: Any = True,
    ) -> Primals:
        """Returns this shard's gradients (eq. 5), or None where `Call.gradients` requests none.

        dweight is in the weight's dtype, and the other gradients are in the statistics' dtype. dhidden is only this
        shard's part of the sum over the vocabulary.

        Args:
            stats: the statistics of the full vocabulary, in the call's row order.
            cotangent: the cotangent of the results, in the call's row order.
            cache: as `statistics` or `select` returns it.
            may_round_dhidden: whether dhidden may be in the weight's dtype.
            may_overwrite_cache: whether the memory of the cache may be overwritten.
            dweight: a sum in the statistics' dtype, to which this shard's dweight is added. None: there is no sum.
            adds_dweight: whether dweight is added to the sum. False: it overwrites the sum
                (`_dispatch.writes_dweight`).
        """
        call, rows, (operands, order) = self.call, self.rows, self.operands()
        coefficients = self._coefficients(stats, cotangent)
        if order is not None:
            coefficients = _describe.compact(order, coefficients)

        gradients = _dispatch.IMPLEMENTATIONS[call.implementation].gradients(
            operands, call, coefficients, cache,
            may_round_dhidden=may_round_dhidden, may_overwrite_cache=may_overwrite_cache,
            dweight=dweight, adds_dweight=adds_dweight,
        )  # fmt: skip
        if gradients.hidden is None:
            return gradients
        dhidden = gradients.hidden if order is None else _describe.expand(order, gradients.hidden)
        dhidden = _apply_sign(dhidden, self.scales)
        if rows.unmasked is not None:
            dhidden = jnp.where(rows.unmasked[:, None], dhidden, 0.0)
        return gradients._replace(hidden=dhidden)

    def _coefficients(self, stats: ShardStatistics, cotangent: Results) -> RowCoefficients:
        """Computes the coefficients of eqs. 4 and 5, in the call's row order."""
        call, rows = self.call, self.rows
        factors = self.row_scale, _logprobs.compute_row_factor(call, self.scales.derivative)
        compute = functools.partial(_logprobs.row_coefficients, call=call, vocab_size=call.vocab_size)
        unmasked = _logprobs.exclude_empty_rows(rows.unmasked, stats.sumexp) if call.has_floor else rows.unmasked
        if stats.candidates is not None:
            coefficients = compute(stats, cotangent, *factors, unmasked)
        else:
            seeds = cotangent._replace(outputs=LogprobOutput(*cotangent.outputs[:3]))
            unused: Any = dict.fromkeys((*NOT_DIFFERENTIATED, "total"))
            used = stats._replace(**unused)
            used = used if unmasked is None else used._replace(sumexp=jnp.where(unmasked, used.sumexp, 1.0))
            coefficients = _compute_per_token(call, functools.partial(compute, where=None), used, seeds, *factors)
            coefficients = (
                coefficients if unmasked is None else jax.tree.map(lambda x: jnp.where(unmasked, x, 0.0), coefficients)
            )
        wrong = _describe.find_invalid_rows(rows)
        return coefficients if wrong is None else _logprobs.zero_gradient(coefficients, wrong)


def _compute_per_token(call: Call, function: Callable[..., Any], *operands: Any) -> Any:
    """Computes ``function(*operands)`` with the implementation's arithmetic.

    Operands are trees of [T] arrays and scalars.

    XLA and the kernels round logarithms and quotients differently. For a token's results to have the same bits in every
    call, all such steps must run in XLA, or all in kernels.
    """
    if call.implementation != mosaic.NAME:
        return function(*operands)
    run, arrays = bind_scalars(function, operands)
    return mosaic.compute_per_token(call, run, *arrays)


def bind_scalars(function: Callable[..., Any], operands: Any) -> tuple[Callable[..., Any], list[Any]]:
    """Binds the scalar operands of ``function``. Returns a function of the array operands, and these arrays."""
    leaves, tree = jax.tree.leaves(operands), jax.tree.structure(operands)

    def run(*arrays: Any) -> Any:
        remaining = iter(arrays)
        return function(*jax.tree.unflatten(tree, [next(remaining) if is_array(x) else x for x in leaves]))

    return run, list(filter(is_array, leaves))


def _apply_sign(hidden: Float[Array, "T H"], scales: Scales) -> Float[Array, "T H"]:
    return hidden if scales.sign is None else hidden * scales.sign.astype(hidden.dtype)[:, None]


# With collectives


type Saved = tuple[ShardStatistics, Any]  # what the backward needs: the statistics, and the implementation's cache


def device_forward(call: Call, primals: Primals, rows: Rows, keep_cache: bool) -> tuple[Results, Saved]:
    """Returns the results; and for the backward the statistics of the full vocabulary and the cache."""
    shape = rows.labels.shape
    part = Part.of(call, flatten_operands(call, primals), _describe.flatten_tokens(rows, len(shape)))
    out, stats, cache = compute_results(part, keep_cache)
    out, stats = jax.tree.map(lambda x: x.reshape(shape + x.shape[1:]), (out, stats))
    return out, (stats, cache if keep_cache else None)


def compute_results(part: Part, keep_cache: bool) -> tuple[Results, ShardStatistics, Any]:
    """Returns the results, the statistics of the full vocabulary, and the cache that the backward needs."""
    call, dropped = part.call, None
    with jax.named_scope("lce_statistics"):
        gather = (
            None if call.axis_name is None else functools.partial(_collectives.gather_trees, axis_name=call.axis_name)
        )
        stats, cache, same = part.statistics(keep_cache, gather)
    if call.gradient_threshold:
        with jax.named_scope("lce_select"):
            cache, dropped = part.select(stats, cache)
            if not call.reports_dropped_mass:
                dropped = None
            elif dropped is None:
                dropped = jnp.zeros_like(stats.max)
            elif call.axis_name is not None:
                dropped = lax.psum(dropped, call.axis_name)
    results = part.finish(stats, part.rows.where, dropped)
    return results if same is None else _collectives.set_nan_where_different(same, results), stats, cache


def device_backward(call: Call, primals: Primals, rows: Rows, saved: Saved, cotangent: Results) -> Primals:
    """Returns the gradients, in the shapes, dtypes and types of their operands."""
    (hidden, weight, *_), (stats, cache) = primals, saved
    varying = _jax.varying_axes((primals, rows, stats, cache))
    rows, stats, cotangent = _describe.flatten_tokens((rows, stats, cotangent), rows.labels.ndim)
    if call.axis_name is not None and call.token_axes is None:
        cotangent = _collectives.sum_cotangents(cotangent, call.axis_name)
    summed = call.axis_name is not None or varying != _jax.varying_axes(hidden)
    may_round = not summed and hidden.dtype == weight.dtype
    with jax.named_scope("lce_gradients"):
        part = Part.of(call, flatten_operands(call, primals), rows)
        gradients = part.gradients(stats, cotangent, cache, may_round_dhidden=may_round)
    return reduce_gradients(call, gradients, primals)


def reduce_gradients(call: Call, gradients: Primals, operands: Primals) -> Primals:
    """Sums each gradient over the devices that share its operand.

    Returns the sums in the shapes and dtypes of the operands.
    """
    if call.axis_name is not None or call.token_axes or _jax.varying_axes(gradients):
        # A Hopper kernel occupies every multiprocessor. A concurrent collective waits for the kernel on one device, and
        # delays the next kernel on another. So collectives start after all gradients.
        gradients = lax.optimization_barrier(gradients)
    with jax.named_scope("lce_reduce"):
        of_head = zip(gradients[1:], operands[1:], strict=True)
        return Primals(
            None if gradients.hidden is None else _sum_dhidden(call, gradients.hidden, operands.hidden),
            *(None if dx is None else _sum_dweight(call, dx, x).astype(x.dtype) for dx, x in of_head),
        )


def _sum_dhidden(call: Call, dhidden: Float[Array, "T H"], hidden: Float[Array, "*b H"]) -> Float[Array, "*b H"]:
    """Sums dhidden over the devices that share hidden, and rounds the sum."""
    if call.gather_dim is not None:
        dhidden = scatter_dhidden(call, dhidden, hidden)
    elif call.token_axes is not None and call.axis_name is not None:
        dhidden = lax.psum(dhidden, call.axis_name)
    return _jax.psum_to_axes(dhidden.reshape(hidden.shape), _jax.varying_axes(hidden)).astype(hidden.dtype)


def scatter_dhidden(call: Call, dhidden: Float[Array, "T H"], hidden: Float[Array, "*b H"]) -> Float[Array, "*b H"]:
    """Sums dhidden over the vocabulary shards, and gives each shard its part of the sequence."""
    assert call.gather_dim is not None
    shards = lax.axis_size(call.axis_name)
    gathered = [n * shards if i == call.gather_dim else n for i, n in enumerate(hidden.shape)]
    return _collectives.scatter_sequence(dhidden.reshape(gathered), call.axis_name, call.gather_dim)


def _sum_dweight(call: Call, dweight: Array, weight: Array) -> Array:
    """Sums dweight over the devices that hold other tokens of the same call."""
    if call.token_axes:
        dweight = lax.psum(dweight, call.token_axes)
    return _jax.psum_to_axes(dweight, _jax.varying_axes(weight))


def flatten_operands(call: Call, primals: Primals) -> Primals:
    """Casts hidden to the weight's dtype, gathers it over the sequence, and flattens it to [T, H]."""
    primals = cast_hidden(primals)
    hidden = primals.hidden
    if call.gather_dim is not None:
        hidden = _collectives.gather_sequence(hidden, call.axis_name, call.gather_dim)
    return primals._replace(hidden=hidden.reshape(-1, hidden.shape[-1]))


def find_first_column(call: Call, weight: Array) -> Int[Array, ""] | int:
    """Returns the global id of this shard's first column."""
    if call.axis_name is None:
        return 0
    return lax.axis_index(call.axis_name) * weight.shape[call.vocab_dim]


# The forward and the backward of `lce_jax.linear_logprobs`


def forward(call: Call, primals: Primals, rows: Rows, differentiated: bool) -> tuple[Results, Saved]:
    """Returns the results, and what the backward needs. If XLA partitions the call, no tile is cached."""
    asked, caches, unused = call, differentiated, []
    partitioned = _runner.is_partitioned_by_xla(call, (primals, rows))
    if partitioned:
        if differentiated and asked.cache_bytes:
            unused.append("cache_bytes keeps nothing")
        if differentiated and asked.gradient_threshold:
            unused.append("gradient_threshold is not used, and the gradients are exact,")
        call, caches = _disable_threshold(call), False
    keeps_tiles = caches and (asked.cache_budget > 0 or asked.gradient_threshold > 0)
    call = call if caches else call.replace(cache_bytes=0)
    operands = head_sharding(call.vocab_dim), ArraySharding.TOKENS
    results = ArraySharding.RESULTS, (ArraySharding.TOKENS, ArraySharding.DEVICE)
    run = functools.partial(device_forward, keep_cache=caches)
    program = Program(run, operands, results, joins=not keeps_tiles, unused=tuple(unused))
    out, saved = run_program(call, program, primals, rows)
    if partitioned and asked.reports_dropped_mass:
        out = out._replace(outputs=out.outputs._replace(dropped_mass=jnp.zeros_like(out.outputs.lse)))
    return out, saved


def backward(call: Call, primals: Primals, rows: Rows, saved: Saved, cotangent: Results) -> Primals:
    """Returns the gradients of the operands."""
    call = _disable_threshold(call) if _runner.is_partitioned_by_xla(call, (primals, rows)) else call
    head = head_sharding(call.vocab_dim)
    operands = head, ArraySharding.TOKENS, (ArraySharding.TOKENS, ArraySharding.DEVICE), ArraySharding.RESULTS
    program = Program(device_backward, operands, head)
    return run_program(call, program, primals, rows, saved, cotangent)


def make_empty_results(call: Call, rows: Rows) -> Results:
    """Returns the results of a call without tokens, in the shape of the call's labels."""
    shapes = jax.eval_shape(lambda: _logprobs.empty_results(0, call.stat_dtype, call))
    return jax.tree.map(lambda x: jnp.zeros(rows.labels.shape + x.shape[1:], x.dtype), shapes)


LOGPROBS = Capability(forward, backward, make_empty_results)


def _disable_threshold(call: Call) -> Call:
    """Returns the call without its ``gradient_threshold``."""
    return dataclasses.replace(call, gradient_threshold=0.0)
