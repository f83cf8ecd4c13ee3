"""The implementation for every device: plain XLA, one tile of logits at a time.

For each chunk of tokens and tile of the vocabulary: one matrix product, its statistics (eq. 1), a merge (eq. 2). The
backward recomputes the product, turns it into dlogits (eqs. 4, 5) and feeds the two gradient products. `_walk` has the
loops, so exactly one tile of logits exists at a time, whatever the vocabulary.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from lce_jax._plans import ALONE, Plan, Surroundings
from lce_jax._types import Case, Operands, Primals, RowCoefficients, ShardStatistics
from lce_jax.mathematics import _logprobs, _repeats, _statistics
from lce_jax.mathematics._one_part import merged as merged
from lce_jax.mathematics._one_part import per_token as per_token
from lce_jax.mathematics._one_part import selected as selected
from lce_jax.mathematics._statistics import Parts, Running
from lce_jax.xla import _plan, _topk
from lce_jax.xla._walk import Head, Shard, Tile, Tokens, Walk

if TYPE_CHECKING:
    from lce_jax._shapes import Array, Float, Int

NAME = "xla"


def supports(case: Case) -> str | None:
    """Why this implementation cannot serve ``case``: never, it serves everything."""
    del case
    return None


def unproven(case: Case) -> str | None:
    """None: it is plain JAX."""
    del case
    return None


def plan(case: Case, around: Surroundings = ALONE) -> Plan:
    """Tiles and bytes."""
    if case.options.top_k:
        return _topk.plan(case, NAME, around)
    return _plan.plan(case, NAME, around)


class _Rows(NamedTuple):
    """What some tokens have beside their hidden states."""

    targets: Int[Array, "t"]
    candidates: Int[Array, "t K"] | None
    floor: Float[Array, "t"] | None
    coefficients: RowCoefficients | None = None  # in the backward

    def relative_to(self, start: Int[Array, ""] | int) -> tuple[Array, Array | None, Array | None]:
        """The ids from column ``start`` on: those of its tile lie in [0, size), the others outside. And the floor."""
        return self.targets - start, None if self.candidates is None else self.candidates - start, self.floor


def statistics(operands: Operands, case: Case, keep_cache: bool = False) -> tuple[ShardStatistics, None]:
    """Eq. 1 of the whole shard, [T] each; nothing is cached."""
    del keep_cache
    options = case.options

    def empty(num_tokens: int) -> Running:
        return Running.start(_statistics.empty(num_tokens, case.stat_dtype, options))

    def add(running: Running, tile: Tile) -> Running:
        (x, scale), (targets, *more) = _logits(case, tile), tile.rows.relative_to(tile.start)
        return running.add(_logprobs.tile_statistics(x, scale, targets, tile.live, options, *more), scale)

    running = _walk_of(operands, case).fold(_shard(operands, None), empty, add)
    return running.finish(), None


def in_parts(operands: Operands, case: Case, keep_cache: bool = False) -> tuple[Parts, None]:
    """One part."""
    return _statistics.as_parts(statistics(operands, case, keep_cache)[0]), None


def gradients(
    operands: Operands,
    case: Case,
    rows: RowCoefficients,
    cache: None = None,
    *,
    may_round_dhidden: bool = False,
    may_overwrite_cache: bool = True,
    dweight: Float[Array, "V H"] | None = None,
) -> Primals:
    """Eq. 5: dhidden and dbias in the statistics' dtype, which the caller sums and rounds once.

    dweight is rounded, or added to the sum ``dweight``.
    """
    del cache, may_round_dhidden, may_overwrite_cache

    def dlogits(tile: Tile) -> Float[Array, "t v"]:
        (x, scale), (targets, *more) = _logits(case, tile), tile.rows.relative_to(tile.start)
        return _logprobs.dlogits(x, scale, tile.rows.coefficients, targets, tile.live, case.options, *more)

    shard = _shard(*_repeats.each_once(operands, rows))
    return _walk_of(operands, case).gradients(shard, dlogits, dweight)


def _logits(case: Case, tile: Tile) -> tuple[Float[Array, "t v"], Float[Array, "t"] | float]:
    """The x and the k of eq. 0."""
    (raw,), (tokens,) = tile.raw, tile.tokens
    x = _logprobs.unscaled_logits(raw, case.options, tokens.raw_scale)
    return x, _logprobs.row_scale(case.options, tokens.inverse_temperature)


def _walk_of(operands: Operands, case: Case) -> Walk:
    """Over all columns, or over the true ones if their number is known."""
    columns = operands.num_columns if isinstance(operands.num_columns, int) else case.vocab_size
    return Walk((case,), columns, *_plan.tile_sizes(case))


def _shard(operands: Operands, coefficients: RowCoefficients | None) -> Shard:
    x = operands
    return Shard(
        tokens=(Tokens(x.hidden, x.inverse_temperature, x.raw_scale),),
        heads=(Head(x.weight, x.bias),),
        rows=_Rows(x.targets, x.candidates, x.floor, coefficients),
        num_rows=x.num_rows,
        num_columns=None if isinstance(x.num_columns, int) else x.num_columns,
    )
