"""The divergence of two heads on one shard, in plain XLA: one tile of both models' logits at a time.

For each chunk of tokens and tile of the vocabulary: a matrix product per model, the statistics of both (eqs. 1 and 6),
a union (eqs. 2 and 7). A mixture of both distributions needs a second pass (eq. 9). The backward recomputes both
products, turns them into the gradient of the student's (eqs. 8 and 10) and feeds the student's two gradient products.
With ``cache_bytes`` the forward keeps what the gradient needs of the first tiles (`mathematics._kl.CachedRatios`).
`xla._walk` has the loops; a shard's first model is the student.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import lax

from lce_jax.mathematics import _kl, _logprobs, _statistics
from lce_jax.mathematics._kl import (
    CachedRatios,
    Direction,
    KLCoefficients,
    KLStatistics,
    Mixture,
    MixtureCoefficients,
    MixtureSums,
    Pair,
    Ratios,
)
from lce_jax.types._types import OVERWRITES, Call, Plan, Primals, cache_notes
from lce_jax.types.scalars import format_bytes
from lce_jax.xla import _walk
from lce_jax.xla._walk import HeadTokens, PerTile, Shard, TileCache, Walk, XTile

if TYPE_CHECKING:
    from lce_jax.types._shapes import Array, Float


@dataclasses.dataclass(frozen=True)
class KLPlan:
    """What is known when a call is traced."""

    calls: Pair[Call]
    direction: Direction
    columns: int  # to walk over

    @property
    def student_first(self) -> bool:
        """Whether p is the student's in eqs. 6 to 10."""
        return self.direction != "forward"

    @property
    def numbers_kept(self) -> int:
        """Of each token, from the forward to the backward."""
        return len(KLStatistics._fields) + (len(MixtureSums._fields) if self.direction == "jsd" else 0)

    @property
    def dtype(self) -> jnp.dtype:
        """The dtype of everything that both models enter."""
        return jnp.promote_types(self.calls.student.stat_dtype, self.calls.teacher.stat_dtype)

    @property
    def tiles(self) -> tuple[int, int]:
        """Tokens and columns per tile: half of the columns that a tile of `lce_jax.xla` has, off the CPU a quarter.

        At (4096, 4096, 151936) on an H200 a forward and backward take 55 ms and 224 MiB with 4096 columns, 57 ms and
        512 MiB with 8192, 54 ms and 960 MiB with 16384.
        """
        student, teacher = self.calls
        size = max(student.hidden_size, teacher.hidden_size)
        tile_t, tile_v = _walk.tile_sizes(dataclasses.replace(student, hidden_size=size, columns=self.columns))
        parts = 2 if student.device.platform == "cpu" else 4
        return tile_t, tile_v // parts // 128 * 128 or tile_v

    @property
    def walk(self) -> Walk:
        """Over both models' tiles."""
        return Walk(self.calls, self.columns, *self.tiles)

    @property
    def kept_columns(self) -> int:
        """Those of the first tiles of a walk, whose products ``cache_bytes`` spare the backward."""
        return _walk.kept_columns(self.calls.student, self.columns, self.tiles[1], self.per_tile)

    @property
    def kept_dtypes(self) -> tuple[jnp.dtype, jnp.dtype]:
        """Of a `CachedRatios`."""
        student = self.calls.student
        return _kl.dtypes(_walk.gradient_dtype(student), self.direction, student.logit_softcap is not None)

    @property
    def kept_item_bytes(self) -> int:
        """What is kept of a token and column."""
        return sum(dtype.itemsize for dtype in self.kept_dtypes)

    @property
    def per_tile(self) -> PerTile:
        """A `CachedRatios`, and what it is relative to."""
        return PerTile(columns=self.kept_dtypes, rows=(self.dtype,) * _kl.REFERENCES)


def explained(kl: KLPlan) -> Plan:
    """What `explain` says of a call: its tiles and their bytes."""
    student, teacher = kl.calls
    tile_t, tile_v = kl.tiles
    columns, kept, sizes = min(student.columns, teacher.columns), kl.kept_columns, (tile_v, kl.per_tile)
    has_padding = student.vocab_size != student.columns  # or may have
    in_place = _walk.is_one_piece(student, kept, tile_t, has_padding, adds_dweight=False)
    of_tile = _walk.kept_bytes_of_tile(student, *sizes)
    own, others = (_walk.tile_bytes(call, tile_t, min(tile_v, columns)) + _walk.copied_bytes(call) for call in kl.calls)
    return Plan(
        implementation="xla",
        refused={},
        call=student,
        tiles={"tokens": tile_t, "vocabulary": tile_v},
        forward_bytes=own + others,
        backward_bytes=own + others + _walk.sum_bytes(student),
        kept_bytes=kl.numbers_kept * student.num_tokens * kl.dtype.itemsize + _walk.num_bytes(student, kept, *sizes),
        logits_bytes=student.num_tokens * columns * kl.dtype.itemsize,
        notes=(
            f"linear_kl: of each pass {format_bytes(others)} for the teacher (hidden size {teacher.hidden_size:,}, "
            f"{teacher.dtype.name}): a tile of its logits, and copies of its hidden states",
            *cache_notes(student, -(-kept // tile_v), -(-kl.columns // tile_v), of_tile),
            *([OVERWRITES] if in_place else []),
        ),
        full_cache_bytes=_walk.num_bytes(student, kl.columns, *sizes),
    )


def statistics(plan: KLPlan, shard: Shard, keep_cache: bool = False) -> tuple[KLStatistics, TileCache | None]:
    """Eqs. 1 and 6 of the whole shard, [T] each, and what ``cache_bytes`` hold of the first tiles."""
    walk, cache = plan.walk, None
    if keep_cache and plan.calls.student.cache_budget:
        walk = dataclasses.replace(walk, kept_columns=plan.kept_columns)
        cache = _walk.empty_cache(walk, shard, plan.per_tile)

    def add(running: _kl.RunningKL, tile: XTile, cache: TileCache | None) -> tuple[_kl.RunningKL, TileCache | None]:
        x, scales = _x(plan, tile).ordered(plan.student_first), _scales(plan, tile.tokens)
        found = _kl.tile_statistics(x, scales, tile.live)
        if cache is not None and tile.index is not None:
            own = Ratios.of(x, found.references, scales)
            kept = _kl.encode_ratios(own, plan.kept_dtypes, plan.direction)
            cache = cache.with_part(tile, kept, found.references)
        return running.add(found, scales), cache

    running, cache = walk.fold_keeping(
        shard, lambda tokens: _kl.RunningKL.start(_kl.empty_statistics(tokens, plan.dtype)), add, cache
    )
    return running.finish(), cache


def mixture_sums(plan: KLPlan, shard: Shard, rows: Mixture) -> MixtureSums:
    """Eq. 9 of the whole shard, [T] each."""
    # The barrier keeps XLA from holding a tile of the pass before, to share it.
    shard = lax.optimization_barrier(shard._replace(rows=rows))

    def empty(num_tokens: int) -> tuple[MixtureSums, MixtureSums]:
        zeros = jnp.zeros((num_tokens,), plan.dtype)
        return (MixtureSums(zeros, zeros),) * 2  # sums, and what rounding has left out of them

    def add(running: tuple[MixtureSums, MixtureSums], tile: XTile) -> tuple[MixtureSums, MixtureSums]:
        x, scales = _x(plan, tile).ordered(plan.student_first), _scales(plan, tile.tokens)
        sums, lost = running
        return _statistics.add_compensated(sums, _kl.tile_sums(x, scales, tile.rows, tile.live), lost)

    return jax.tree.map(jnp.add, *plan.walk.fold(shard, empty, add))


def gradients(
    plan: KLPlan, shard: Shard, rows: KLCoefficients | MixtureCoefficients, cache: TileCache | None = None
) -> Primals:
    """The student's part of dhidden and its dbias, in its statistics' dtype, and its dweight in the weight's."""
    call, shard = plan.calls.student, shard._replace(rows=rows)

    def dlogits(tile: XTile, cache: TileCache | None) -> Float[Array, "t v"]:
        """Eqs. 5 and 8 or 10."""
        own, x = _ratios(plan, tile) if cache is None or tile.index is None else _ratios_kept(plan, tile, cache)
        if isinstance(tile.rows, MixtureCoefficients):
            d = _kl.mixture_dlogits(own, tile.rows)
        else:
            d = _kl.dlogits(own, tile.rows, plan.student_first)
        if call.logit_softcap is not None:
            d = d * _logprobs.cap_derivative(x())
        return (d if tile.live is None else jnp.where(tile.live[None, :], d, 0.0)).astype(call.stat_dtype)

    if cache is None:
        return plan.walk.gradients(shard, functools.partial(dlogits, cache=None))
    walk = dataclasses.replace(plan.walk, kept_columns=cache.num_columns)
    if _walk.is_one_piece(call, walk.kept_columns, walk.tile_t, shard.num_columns is not None, False):
        return _walk.gradients_with_cache(walk, shard, cache, dlogits, call.stat_dtype, None)
    return walk.gradients(shard, functools.partial(dlogits, cache=cache))


type Found = tuple[Ratios, Callable[[], Array]]  # and the student's x, where a cap asks for it


def _ratios(plan: KLPlan, tile: XTile) -> Found:
    x, scales = _x(plan, tile), _scales(plan, tile.tokens)
    return Ratios.of(x.ordered(plan.student_first), tile.rows.references, scales), lambda: x.student


def _ratios_kept(plan: KLPlan, tile: XTile, cache: TileCache) -> Found:
    """The same without a product."""
    (columns, (max_p, max_q, at_p)), scales = cache.part(tile), _scales(plan, tile.tokens)
    kept, references = CachedRatios(*columns), (max_p, max_q, at_p)
    own = _kl.decode_ratios(kept, references, tile.rows.references, scales, plan.direction)
    return own, functools.partial(_kl.decode_student_x, kept, references, scales, plan.direction)


def _x(plan: KLPlan, tile: XTile) -> Pair[Float[Array, "t v"]]:
    """The x of eq. 0 of both models, the same bits in every pass: at small temperatures the last one counts.

    Without the barriers XLA may put a factor into the product, or round the cap of one use otherwise than that of
    another.
    """
    found = []
    for call, tokens, raw in zip(plan.calls, tile.tokens, tile.products(), strict=True):
        x = _logprobs.unscaled_logits(lax.optimization_barrier(raw), call, tokens.raw_scale)
        found.append(lax.optimization_barrier(x.astype(plan.dtype)))
    return Pair(*found)


def _scales(plan: KLPlan, tokens: tuple[HeadTokens, ...]) -> tuple[Any, Any]:
    """The k of eq. 0, that of p first."""
    pairs = zip(plan.calls, tokens, strict=True)
    scales = Pair(*(_logprobs.compute_row_scale(call, own.inverse_temperature) for call, own in pairs))
    return scales.ordered(plan.student_first)
