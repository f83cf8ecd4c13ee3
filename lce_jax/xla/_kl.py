"""The divergence of two heads on one shard, in plain XLA: one tile of both models' logits at a time.

For each chunk of tokens and each tile of the vocabulary, the forward computes a matrix product per model and the
statistics of both models (eqs. 1 and 6), and merges these (eqs. 2 and 7). A mixture of both distributions needs a
second pass (eq. 9 or 11). The backward recomputes both products, turns them into the gradients in the student's logits
(eq. 8 or 10), and computes the student's two gradient products.
With ``cache_bytes`` the forward caches the first tiles' `mathematics._kl.CachedRatios`, which the gradient needs.
The loops are in `xla._walk`. The first model of a shard is the student.
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
    Contrast,
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
from lce_jax.xla._walk import CacheDtypes, HeadTokens, LogitTile, Shard, TileCache, Walk

if TYPE_CHECKING:
    from lce_jax.types._shapes import Array, Float


@dataclasses.dataclass(frozen=True)
class KLPlan:
    """The static part of a call of two heads."""

    calls: Pair[Call]
    direction: Direction
    columns: int  # the number of columns that the loop covers

    @property
    def student_first(self) -> bool:
        """Whether p in eqs. 6 to 11 is the student's distribution."""
        return self.direction != "forward"

    @property
    def contrast(self) -> Contrast | None:
        """What the second pass computes; None: there is no second pass."""
        return _kl.CONTRASTS.get(self.direction)

    @property
    def saved_numbers(self) -> int:
        """How many numbers per token pass from the forward to the backward."""
        return len(KLStatistics._fields) + (len(MixtureSums._fields) if self.contrast else 0)

    @property
    def dtype(self) -> jnp.dtype:
        """The dtype of values that depend on both models."""
        return jnp.promote_types(self.calls.student.stat_dtype, self.calls.teacher.stat_dtype)

    @property
    def tiles(self) -> tuple[int, int]:
        """The tokens and columns of a tile: half of the columns of a tile of one head, and a quarter on a GPU.

        At (T, H, V) = (4096, 4096, 151936) on an H200, a forward and backward take 55 ms and 224 MiB with 4096 columns
        per tile; 57 ms and 512 MiB with 8192; 54 ms and 960 MiB with 16384.
        """
        student, teacher = self.calls
        size = max(student.hidden_size, teacher.hidden_size)
        tile_t, tile_v = _walk.choose_tile_sizes(dataclasses.replace(student, hidden_size=size, columns=self.columns))
        parts = 2 if student.device.platform == "cpu" else 4
        return tile_t, tile_v // parts // 128 * 128 or tile_v

    @property
    def walk(self) -> Walk:
        """The loop over the tiles of both models."""
        return Walk(self.calls, self.columns, *self.tiles)

    @property
    def cached_columns(self) -> int:
        """How many columns ``cache_bytes`` hold: those of the first tiles, which the backward does not recompute."""
        return _walk.count_cached_columns(self.calls.student, self.columns, self.tiles[1], self.cache_dtypes)

    @property
    def cached_dtypes(self) -> tuple[jnp.dtype, jnp.dtype]:
        """The dtypes of the two arrays of a `CachedRatios`."""
        student = self.calls.student
        return _kl.choose_dtypes(_walk.gradient_dtype(student), self.direction, student.logit_softcap is not None)

    @property
    def cached_item_bytes(self) -> int:
        """The number of cached bytes per token and column."""
        return sum(dtype.itemsize for dtype in self.cached_dtypes)

    @property
    def cache_dtypes(self) -> CacheDtypes:
        """The dtypes of a `CachedRatios` and of its references."""
        return CacheDtypes(columns=self.cached_dtypes, rows=(self.dtype,) * _kl.REFERENCES)


def make_plan(kl: KLPlan) -> Plan:
    """Returns the plan of a call: its tiles and their bytes."""
    student, teacher = kl.calls
    tile_t, tile_v = kl.tiles
    columns, cached, sizes = min(student.columns, teacher.columns), kl.cached_columns, (tile_v, kl.cache_dtypes)
    has_padding = student.vocab_size != student.columns  # whether columns may be padding
    in_place = _walk.can_overwrite_cache(student, cached, tile_t, has_padding, adds_dweight=False)
    tile_bytes = _walk.cached_tile_bytes(student, *sizes)
    student_bytes, teacher_bytes = (
        _walk.tile_bytes(call, tile_t, min(tile_v, columns)) + _walk.copied_bytes(call) for call in kl.calls
    )
    return Plan(
        implementation="xla",
        refused={},
        call=student,
        tiles={"tokens": tile_t, "vocabulary": tile_v},
        forward_bytes=student_bytes + teacher_bytes,
        backward_bytes=student_bytes + teacher_bytes + _walk.sum_bytes(student),
        kept_bytes=kl.saved_numbers * student.num_tokens * kl.dtype.itemsize
        + _walk.cached_bytes(student, cached, *sizes),
        logits_bytes=student.num_tokens * columns * kl.dtype.itemsize,
        notes=(
            f"linear_kl: each pass includes {format_bytes(teacher_bytes)} for the teacher "
            f"(hidden size {teacher.hidden_size:,}, {teacher.dtype.name}): a tile of its logits, and copies of "
            "its hidden states",
            *cache_notes(student, -(-cached // tile_v), -(-kl.columns // tile_v), tile_bytes),
            *([OVERWRITES] if in_place else []),
        ),
        full_cache_bytes=_walk.cached_bytes(student, kl.columns, *sizes),
    )


def statistics(plan: KLPlan, shard: Shard, keep_cache: bool = False) -> tuple[KLStatistics, TileCache | None]:
    """Computes the statistics of the shard (eqs. 1, 6), [T] each, and caches the tiles that fit ``cache_bytes``."""
    walk, cache = plan.walk, None
    if keep_cache and plan.calls.student.cache_budget:
        walk = dataclasses.replace(walk, cached_columns=plan.cached_columns)
        cache = _walk.empty_cache(walk, shard, plan.cache_dtypes)

    def add(running: _kl.RunningKL, tile: LogitTile, cache: TileCache | None) -> tuple[_kl.RunningKL, TileCache | None]:
        x, scales = _unscaled_logits(plan, tile).ordered(plan.student_first), _row_scales(plan, tile.tokens)
        stats = _kl.tile_statistics(x, scales, tile.unpadded)
        if cache is not None and tile.index is not None:
            ratios = Ratios.of(x, stats.references, scales)
            values = _kl.encode_ratios(ratios, plan.cached_dtypes, plan.direction)
            cache = cache.write(tile, values, stats.references)
        return running.add(stats, scales), cache

    running, cache = walk.fold_with_cache(
        shard, lambda tokens: _kl.RunningKL.start(_kl.empty_statistics(tokens, plan.dtype)), add, cache
    )
    return running.finish(), cache


def mixture_sums(plan: KLPlan, shard: Shard, rows: Mixture) -> MixtureSums:
    """Computes the sums of eq. 9 or 11 over the shard, [T] each."""
    contrast = plan.contrast
    assert contrast is not None
    # Without the barrier, XLA may keep a tile of the first pass to share it with this pass.
    shard = lax.optimization_barrier(shard._replace(rows=rows))

    def empty(num_tokens: int) -> tuple[MixtureSums, MixtureSums]:
        zeros = jnp.zeros((num_tokens,), plan.dtype)
        return (MixtureSums(zeros, zeros),) * 2  # the sums, and their rounding errors

    def add(running: tuple[MixtureSums, MixtureSums], tile: LogitTile) -> tuple[MixtureSums, MixtureSums]:
        x, scales = _unscaled_logits(plan, tile).ordered(plan.student_first), _row_scales(plan, tile.tokens)
        sums, errors = running
        return _statistics.add_compensated(sums, _kl.tile_sums(x, scales, tile.rows, tile.unpadded, contrast), errors)

    return jax.tree.map(jnp.add, *plan.walk.fold(shard, empty, add))


def gradients(
    plan: KLPlan, shard: Shard, rows: KLCoefficients | MixtureCoefficients, cache: TileCache | None = None
) -> Primals:
    """Computes the student's gradients (eqs. 5, and 8 or 10). dhidden is only this shard's part of the sum.

    dweight is in the weight's dtype, and the others are in the student's statistics' dtype.
    """
    call, shard = plan.calls.student, shard._replace(rows=rows)

    def dlogits(tile: LogitTile, cache: TileCache | None) -> Float[Array, "t v"]:
        """Computes the gradients in the student's raw products (eq. 8 or 10)."""
        ratios, x = _ratios(plan, tile) if cache is None or tile.index is None else _cached_ratios(plan, tile, cache)
        if isinstance(tile.rows, MixtureCoefficients):
            assert plan.contrast is not None
            d = _kl.mixture_dlogits(ratios, tile.rows, plan.contrast)
        else:
            d = _kl.dlogits(ratios, tile.rows, plan.student_first)
        if call.logit_softcap is not None:
            d = d * _logprobs.cap_derivative(x())
        return (d if tile.unpadded is None else jnp.where(tile.unpadded[None, :], d, 0.0)).astype(call.stat_dtype)

    if cache is None:
        return plan.walk.gradients(shard, functools.partial(dlogits, cache=None))
    walk = dataclasses.replace(plan.walk, cached_columns=cache.num_columns)
    if _walk.can_overwrite_cache(call, walk.cached_columns, walk.tile_t, shard.num_columns is not None, False):
        return _walk.overwrite_cache(walk, shard, cache, dlogits, call.stat_dtype, None)
    return walk.gradients(shard, functools.partial(dlogits, cache=cache))


type RatiosAndX = tuple[Ratios, Callable[[], Array]]  # the ratios, and a function that returns the student's x


def _ratios(plan: KLPlan, tile: LogitTile) -> RatiosAndX:
    x, scales = _unscaled_logits(plan, tile), _row_scales(plan, tile.tokens)
    return Ratios.of(x.ordered(plan.student_first), tile.rows.references, scales), lambda: x.student


def _cached_ratios(plan: KLPlan, tile: LogitTile, cache: TileCache) -> RatiosAndX:
    """Returns the same as `_ratios`, from the cache."""
    (columns, (max_p, max_q, at_p)), scales = cache.read(tile), _row_scales(plan, tile.tokens)
    cached, references = CachedRatios(*columns), (max_p, max_q, at_p)
    ratios = _kl.decode_ratios(cached, references, tile.rows.references, scales, plan.direction)
    return ratios, functools.partial(_kl.decode_student_x, cached, references, scales, plan.direction)


def _unscaled_logits(plan: KLPlan, tile: LogitTile) -> Pair[Float[Array, "t v"]]:
    """Computes the x of eq. 0 for each model, with equal bits in every pass.

    At small temperatures the last bit matters. Without the barriers, XLA may move a factor into the product, or round
    the softcap differently in two places.
    """
    unscaled = []
    for call, tokens, raw in zip(plan.calls, tile.tokens, tile.products(), strict=True):
        x = _logprobs.unscaled_logits(lax.optimization_barrier(raw), call, tokens.raw_scale)
        unscaled.append(lax.optimization_barrier(x.astype(plan.dtype)))
    return Pair(*unscaled)


def _row_scales(plan: KLPlan, tokens: tuple[HeadTokens, ...]) -> tuple[Any, Any]:
    """Returns the factor k of eq. 0 for each model. The model of p comes first."""
    pairs = zip(plan.calls, tokens, strict=True)
    scales = Pair(*(_logprobs.compute_row_scale(call, x.inverse_temperature) for call, x in pairs))
    return scales.ordered(plan.student_first)
