"""What one device computes of a call, with its collectives: on one device, in ``shard_map``, or where XLA partitions.

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
from lce_jax.run._runner import ArraySharding, Capability, Program, spread
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


# With no collective but the one that the caller gives


def as_operand(primals: Primals) -> Primals:
    """Hidden in the weight's dtype, rounded explicitly because XLA may drop a conversion down and up again."""
    hidden, to = primals.hidden, jnp.finfo(primals.weight.dtype)
    if to.bits < jnp.finfo(hidden.dtype).bits:
        hidden = lax.reduce_precision(hidden, to.nexp, to.nmant)
    return primals._replace(hidden=hidden.astype(primals.weight.dtype))


def given_to(call: Call, primals: Primals, rows: Rows, start: Any) -> _collectives.ShardSummary | None:
    """What the shard says of its operands, flat as in `Part`; None where it need not."""
    if rows.tags is None:
        return None
    dim = call.vocab_dim
    columns = jnp.clip(call.vocab_size - start, 0, primals.weight.shape[dim])
    sketches, probes = _collectives.sketch(primals.hidden), _collectives.probe(primals.weight, dim, columns)
    sketches = sketches if rows.where is None else jnp.where(rows.where, sketches, 0)  # the others may hold anything
    return _collectives.ShardSummary(rows.tags, sketches[None], probes[None])


def agree(call: Call, every: _collectives.ShardSummary | None, rows: Rows, weight: Array) -> Bool[Array, "T"] | None:
    """The rows that all shards were given alike, by what they say, or that do not count; None if they say nothing."""
    if every is None:
        return None
    ids = rows.labels if rows.candidates is None else rows.candidates
    found = _collectives.compare_summaries(every, ids, weight.shape[call.vocab_dim])
    return _collectives.ignore_masked_rows(found, rows.where)


type Stacked = Callable[[Any], Any]  # a tree of arrays -> those of all shards, [N, ...] each


class Part(NamedTuple):
    """One device's part of a call: its columns, and all tokens, flat."""

    call: Call
    primals: Primals  # hidden [T, H], as `as_operand` returns it
    rows: Rows  # [T]
    start: Any  # the global id of the first column
    scales: Scales

    @classmethod
    def of(cls, call: Call, primals: Primals, rows: Rows, start: Any = None) -> Part:
        """With the factors of eq. 0 in the implementation's arithmetic. ``start``: None for that of the mesh."""
        invert = functools.partial(_in_arithmetic_of, call, _logprobs.invert_temperature)
        scales = _describe.compute_scales(rows, call.stat_dtype, call.signs_hidden, invert)
        return cls(call, primals, rows, first_column(call, primals.weight) if start is None else start, scales)

    @property
    def row_scale(self) -> Float[Array, "T"] | float:
        """The k of eq. 0."""
        return _logprobs.compute_row_scale(self.call, self.scales.inverse_temperature)

    def operands(self) -> tuple[Operands, _describe.Compaction | None]:
        """What an implementation is given, the live rows first, and how to undo their order."""
        (call, (hidden, weight, bias), rows, start, scales), num_columns = self, None
        columns = weight.shape[call.vocab_dim]
        if call.padded:
            left = call.vocab_size - start
            num_columns = min(max(left, 0), columns) if isinstance(left, int) else jnp.clip(left, 0, columns)
            if call.implementation == mosaic.NAME:
                num_columns = jnp.asarray(num_columns, jnp.int32)  # one set of kernels for every vocab_size

        targets = _describe.find_local_columns(rows.labels, start, columns)
        candidates = None if rows.candidates is None else _describe.find_local_columns(rows.candidates, start, columns)
        hidden, order, num_rows, floor = _signed(hidden, scales), None, rows.num_rows, rows.floor
        if floor is not None:
            floor = _in_arithmetic_of(call, _logprobs.unscaled_floor, floor, self.row_scale)
        if rows.where is not None:
            order = _describe.plan_compaction(rows.where)
            hidden, targets, candidates, scales, floor = _describe.compact(
                order, (hidden, targets, candidates, scales, floor)
            )
            num_rows = order.num_rows
        elif rows.unmasked is not None:  # NaN or inf in the other rows cannot spread
            hidden = jnp.where(rows.unmasked[:, None], hidden, jnp.zeros((), hidden.dtype))
        bias = None if bias is None else bias.astype(call.dtype if call.rank else call.stat_dtype)
        inverse, raw_scale = scales.inverse_temperature, scales.raw_scale
        local = Operands(hidden, weight, targets, inverse, num_rows, num_columns, raw_scale, bias, candidates, floor)
        return local, order

    def statistics(
        self, keep_cache: bool, stacked: Stacked | None = None
    ) -> tuple[ShardStatistics, Any, Bool[Array, "T"] | None]:
        """The statistics of the part, in the call's row order, and the cache.

        With ``stacked``, which returns the arrays of all shards, the statistics are those of the whole vocabulary. The
        last result are the rows that all shards were given alike, if these were compared; the statistics of the others
        are NaN.
        """
        (call, primals, rows, start, _), (operands, order), same = self, self.operands(), None
        implementation, has_kernels = _dispatch.IMPLEMENTATIONS[call.implementation], call.implementation == mosaic.NAME
        stats: Any
        parts: Any
        if stacked is None:
            stats, cache = implementation.statistics(operands, call, keep_cache)
        else:
            if has_kernels:  # they send the statistics of each group of tiles
                parts, cache = mosaic.in_parts(operands, call, keep_cache)
            else:
                stats, cache = implementation.statistics(operands, call, keep_cache)
                parts = make_parts(stats)
            with jax.named_scope("lce_merge"):
                parts, every = stacked((parts, given_to(call, primals, rows, start)))
                if has_kernels:
                    stats = mosaic.merged(parts, call, operands.inverse_temperature, operands.num_rows)
                else:
                    row_scale = _logprobs.compute_row_scale(call, operands.inverse_temperature)
                    stats = merge_parts(parts, call, call.num_tokens, row_scale)
                same = agree(call, every, rows, primals.weight)
        stats = stats if order is None else _describe.expand(order, stats)
        wrong = _describe.find_invalid_rows(rows)
        if wrong is not None:
            stats = jax.tree.map(lambda x: jnp.where(expand_like(wrong, x), jnp.nan, x), stats)
        return stats if same is None else _collectives.set_nan_where_different(same, stats), cache, same

    def finish(
        self, stats: ShardStatistics, where: Bool[Array, "T"] | None, dropped_mass: Float[Array, "T"] | None
    ) -> Results:
        """Eq. 3 in the implementation's arithmetic, from the whole vocabulary's statistics in the call's row order."""
        call, per_token = self.call, functools.partial(_in_arithmetic_of, self.call)
        where = _logprobs.exclude_empty_rows(where, stats.sumexp) if call.has_floor else where
        labels, vocab_size = self.rows.labels, call.vocab_size
        return _logprobs.finish(stats, self.row_scale, labels, where, vocab_size, dropped_mass, per_token)

    def select(self, stats: ShardStatistics, cache: Any) -> tuple[Any, Float[Array, "T"] | None]:
        """What `gradients` needs of the cache, known after the merge, and the shard's part of ``dropped_mass``.

        The part is None if nothing is ever left out. ``stats`` are those of the whole vocabulary, in the call's row
        order.
        """
        call, rows = self.call, self.rows
        if call.implementation != mosaic.NAME:
            return cache, None
        order = None if rows.where is None else _describe.plan_compaction(rows.where)
        num_rows = rows.num_rows if order is None else order.num_rows
        of_rows = Normalizer(stats.max, stats.sumexp)
        if order is not None:
            of_rows = jax.tree.map(lambda x: x[order.source], of_rows)

        cache, dropped = mosaic.selected(call, cache, of_rows, num_rows)
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
        """The shard's part of dhidden and its dbias, in the statistics' dtype, and its dweight, in the weight's.

        Those that are not in `Call.gradients` are None.

        ``stats`` are those of the whole vocabulary, in the call's row order. With ``may_round_dhidden``, dhidden may
        come in the weight's dtype. With ``dweight``, a sum in the statistics' dtype, the shard's dweight is added to it
        instead, or written there (`_dispatch.writes_dweight`).
        """
        call, rows, (operands, order) = self.call, self.rows, self.operands()
        coefficients = self._coefficients(stats, cotangent)
        if order is not None:
            coefficients = _describe.compact(order, coefficients)

        found = _dispatch.IMPLEMENTATIONS[call.implementation].gradients(
            operands, call, coefficients, cache,
            may_round_dhidden=may_round_dhidden, may_overwrite_cache=may_overwrite_cache,
            dweight=dweight, adds_dweight=adds_dweight,
        )  # fmt: skip
        if found.hidden is None:
            return found
        dhidden = found.hidden if order is None else _describe.expand(order, found.hidden)
        dhidden = _signed(dhidden, self.scales)
        if rows.unmasked is not None:
            dhidden = jnp.where(rows.unmasked[:, None], dhidden, 0.0)
        return found._replace(hidden=dhidden)

    def _coefficients(self, stats: ShardStatistics, cotangent: Results) -> RowCoefficients:
        """What eqs. 4 and 5 need of each token, in the call's row order."""
        call, rows = self.call, self.rows
        factors = self.row_scale, _logprobs.compute_row_factor(call, self.scales.derivative)
        of_rows = functools.partial(_logprobs.row_coefficients, call=call, vocab_size=call.vocab_size)
        live = _logprobs.exclude_empty_rows(rows.unmasked, stats.sumexp) if call.has_floor else rows.unmasked
        if stats.candidates is not None:
            found = of_rows(stats, cotangent, *factors, live)
        else:
            of_results = cotangent._replace(outputs=LogprobOutput(*cotangent.outputs[:3]))
            unread: Any = dict.fromkeys((*NOT_DIFFERENTIATED, "total"))
            read = stats._replace(**unread)
            read = read if live is None else read._replace(sumexp=jnp.where(live, read.sumexp, 1.0))
            found = _in_arithmetic_of(call, functools.partial(of_rows, where=None), read, of_results, *factors)
            found = found if live is None else jax.tree.map(lambda x: jnp.where(live, x, 0.0), found)
        wrong = _describe.find_invalid_rows(rows)
        return found if wrong is None else _logprobs.zero_gradient(found, wrong)


def _in_arithmetic_of(call: Call, function: Callable[..., Any], *operands: Any) -> Any:
    """``function(*operands)`` of trees of [T] and of numbers, in the implementation's arithmetic.

    XLA and the kernels round logarithms and quotients differently, so a token's results keep their bits only where all
    such steps are of one kind.
    """
    if call.implementation != mosaic.NAME:
        return function(*operands)
    run, arrays = of_arrays(function, operands)
    return mosaic.per_token(call, run, *arrays)


def of_arrays(function: Callable[..., Any], operands: Any) -> tuple[Callable[..., Any], list[Any]]:
    """``function(*operands)`` as a function of the arrays among the trees ``operands``, and these."""
    leaves, tree = jax.tree.leaves(operands), jax.tree.structure(operands)

    def run(*arrays: Any) -> Any:
        given = iter(arrays)
        return function(*jax.tree.unflatten(tree, [next(given) if is_array(x) else x for x in leaves]))

    return run, list(filter(is_array, leaves))


def _signed(hidden: Float[Array, "T H"], scales: Scales) -> Float[Array, "T H"]:
    return hidden if scales.sign is None else hidden * scales.sign.astype(hidden.dtype)[:, None]


# With collectives


type Kept = tuple[ShardStatistics, Any]  # for the backward: also the implementation's cache


def device_forward(call: Call, primals: Primals, rows: Rows, keep_cache: bool) -> tuple[Results, Kept]:
    """The results and the whole vocabulary's statistics, in the shape of labels, and the implementation's cache."""
    shape = rows.labels.shape
    part = Part.of(call, flat_operands(call, primals), _describe.flatten_tokens(rows, len(shape)))
    out, stats, cache = compute_results(part, keep_cache)
    out, stats = jax.tree.map(lambda x: x.reshape(shape + x.shape[1:]), (out, stats))
    return out, (stats, cache if keep_cache else None)


def compute_results(part: Part, keep_cache: bool) -> tuple[Results, ShardStatistics, Any]:
    """The results and statistics of the whole vocabulary, and what the backward needs of the shard's cache."""
    call, dropped = part.call, None
    with jax.named_scope("lce_statistics"):
        stacked = (
            None if call.axis_name is None else functools.partial(_collectives.gather_trees, axis_name=call.axis_name)
        )
        stats, cache, same = part.statistics(keep_cache, stacked)
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


def device_backward(call: Call, primals: Primals, rows: Rows, kept: Kept, cotangent: Results) -> Primals:
    """The gradients, in the shapes, dtypes and types of their operands."""
    (hidden, weight, _), (stats, cache) = primals, kept
    varying = _jax.varying_axes((primals, rows, stats, cache))
    rows, stats, cotangent = _describe.flatten_tokens((rows, stats, cotangent), rows.labels.ndim)
    if call.axis_name is not None and call.token_axes is None:
        cotangent = _collectives.sum_cotangents(cotangent, call.axis_name)
    summed = call.axis_name is not None or varying != _jax.varying_axes(hidden)
    may_round = not summed and hidden.dtype == weight.dtype
    with jax.named_scope("lce_gradients"):
        part = Part.of(call, flat_operands(call, primals), rows)
        found = part.gradients(stats, cotangent, cache, may_round_dhidden=may_round)
    return reduced(call, found, primals)


def reduced(call: Call, found: Primals, given: Primals) -> Primals:
    """This device's gradients summed over the devices that share an operand, in the shapes and dtypes of ``given``."""
    if call.axis_name is not None or call.token_axes or _jax.varying_axes(found):
        # A Hopper kernel occupies every multiprocessor. A collective beside it waits for it on one device and delays
        # the next kernel on another, so collectives start after both gradients.
        found = lax.optimization_barrier(found)
    with jax.named_scope("lce_reduce"):
        of_head = zip(found[1:], given[1:], strict=True)
        return Primals(
            None if found.hidden is None else _total_dhidden(call, found.hidden, given.hidden),
            *(None if dx is None else _total_dweight(call, dx, x).astype(x.dtype) for dx, x in of_head),
        )


def _total_dhidden(call: Call, dhidden: Float[Array, "T H"], hidden: Float[Array, "*b H"]) -> Float[Array, "*b H"]:
    """The sum over the devices that share hidden, rounded."""
    if call.gather_dim is not None:
        dhidden = scattered(call, dhidden, hidden)
    elif call.token_axes is not None and call.axis_name is not None:
        dhidden = lax.psum(dhidden, call.axis_name)
    return _jax.psum_to_axes(dhidden.reshape(hidden.shape), _jax.varying_axes(hidden)).astype(hidden.dtype)


def scattered(call: Call, dhidden: Float[Array, "T H"], hidden: Float[Array, "*b H"]) -> Float[Array, "*b H"]:
    """The sum over the shards of the vocabulary, each keeping its own part of the sequence."""
    assert call.gather_dim is not None
    shards = lax.axis_size(call.axis_name)
    whole = [n * shards if i == call.gather_dim else n for i, n in enumerate(hidden.shape)]
    return _collectives.scatter_sequence(dhidden.reshape(whole), call.axis_name, call.gather_dim)


def _total_dweight(call: Call, dweight: Array, weight: Array) -> Array:
    """The sum over the devices that hold other tokens of the same call."""
    if call.token_axes:
        dweight = lax.psum(dweight, call.token_axes)
    return _jax.psum_to_axes(dweight, _jax.varying_axes(weight))


def flat_operands(call: Call, primals: Primals) -> Primals:
    """The operands with hidden in the weight's dtype, gathered and flattened."""
    primals = as_operand(primals)
    hidden = primals.hidden
    if call.gather_dim is not None:
        hidden = _collectives.gather_sequence(hidden, call.axis_name, call.gather_dim)
    return primals._replace(hidden=hidden.reshape(-1, hidden.shape[-1]))


def first_column(call: Call, weight: Array) -> Int[Array, ""] | int:
    """The first global column of this shard."""
    if call.axis_name is None:
        return 0
    return lax.axis_index(call.axis_name) * weight.shape[call.vocab_dim]


# `lce_jax.linear_logprobs` as the runner takes it


def forward(call: Call, primals: Primals, rows: Rows, differentiated: bool) -> tuple[Results, Kept]:
    """The results, and what a backward needs. Where XLA decides how operands are split, no tile is kept."""
    given, keeps, unused = call, differentiated, []
    left = _runner.is_left_to_xla(call, (primals, rows))
    if left:
        if differentiated and given.cache_bytes:
            unused.append("cache_bytes keeps nothing")
        if differentiated and given.gradient_threshold:
            unused.append("gradient_threshold is not used, and the gradients are exact,")
        call, keeps = _exact(call), False
    apart = keeps and (given.cache_budget > 0 or given.gradient_threshold > 0)
    call = call if keeps else call.replace(cache_bytes=0)
    operands = _runner.head(call.vocab_dim), ArraySharding.TOKENS
    results = ArraySharding.RESULTS, (ArraySharding.TOKENS, ArraySharding.DEVICE)
    run = functools.partial(device_forward, keep_cache=keeps)
    program = Program(run, operands, results, joins=not apart, unused=tuple(unused))
    out, kept = spread(call, program, primals, rows)
    if left and given.reports_dropped_mass:
        out = out._replace(outputs=out.outputs._replace(dropped_mass=jnp.zeros_like(out.outputs.lse)))
    return out, kept


def backward(call: Call, primals: Primals, rows: Rows, kept: Kept, cotangent: Results) -> Primals:
    """The gradients of the operands."""
    call = _exact(call) if _runner.is_left_to_xla(call, (primals, rows)) else call
    own = _runner.head(call.vocab_dim)
    operands = own, ArraySharding.TOKENS, (ArraySharding.TOKENS, ArraySharding.DEVICE), ArraySharding.RESULTS
    program = Program(device_backward, operands, own)
    return spread(call, program, primals, rows, kept, cotangent)


def of_no_tokens(call: Call, rows: Rows) -> Results:
    """The results of a call without tokens, in the shape of its labels."""
    shapes = jax.eval_shape(lambda: _logprobs.empty_results(0, call.stat_dtype, call))
    return jax.tree.map(lambda x: jnp.zeros(rows.labels.shape + x.shape[1:], x.dtype), shapes)


LOGPROBS = Capability(forward, backward, of_no_tokens)


def _exact(call: Call) -> Call:
    """The same call without a ``gradient_threshold``."""
    return dataclasses.replace(call, gradient_threshold=0.0)
