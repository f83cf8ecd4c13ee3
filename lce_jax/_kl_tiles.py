"""The divergence of two heads on one shard, in plain XLA: one tile of both models' logits at a time.

For each tile of tokens and of the vocabulary: a matrix product per model, the statistics of both (eqs. 1 and 6), a
union (eqs. 2 and 7). A mixture of both distributions needs a second walk (eq. 9). The backward recomputes both
products, turns them into the gradient of the student's (eqs. 8 and 10) and feeds the student's two gradient products.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from lce_jax import _compat, _kl_math, _kl_mixture, _math, _softcap, _statistics, _xla_plan, _xla_tiles
from lce_jax._kl_math import KLCoefficients, KLStatistics, Pair
from lce_jax._kl_mixture import Mixture, MixtureCoefficients, MixtureSums
from lce_jax._types import Case, Primals

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Float, Int


class Tokens(NamedTuple):
    """What some tokens have of one model."""

    hidden: Float[Array, "t H"]  # in the weight's dtype
    scale: Float[Array, "t"] | None  # the k of eq. 0 but for the options' part of it
    raw_scale: Float[Array, "t"] | None


class Head(NamedTuple):
    """What some columns of the vocabulary have of one model."""

    weight: Float[Array, "v H"]  # or [H, v]
    bias: Float[Array, "v"] | None  # in the statistics' dtype


class Shard(NamedTuple):
    """The arrays of a shard, the rows that count first."""

    tokens: Pair[Tokens]
    heads: Pair[Head]
    num_rows: Int[Array, ""] | None  # None: all
    num_columns: Int[Array, ""] | None  # columns from there on are padding; None: those of the plan are all true


@dataclasses.dataclass(frozen=True)
class KLPlan:
    """What is known when a call is traced."""

    cases: Pair[Case]
    student_first: bool  # p is the student's in eqs. 6 to 10
    columns: int  # to walk over

    @property
    def dtype(self) -> jnp.dtype:
        """The dtype of everything that both models enter."""
        return jnp.promote_types(self.cases.student.stat_dtype, self.cases.teacher.stat_dtype)

    @property
    def tiles(self) -> tuple[int, int]:
        """Tokens and columns per tile: half of the columns that a tile of `lce_jax.xla` has, off the CPU a quarter.

        At (4096, 4096, 151936) on an H200 a forward and backward take 55 ms and 224 MiB with 4096 columns, 57 ms and
        512 MiB with 8192, 54 ms and 960 MiB with 16384.
        """
        student, teacher = self.cases
        size = max(student.hidden_size, teacher.hidden_size)
        tile_t, tile_v = _xla_plan.tile_sizes(dataclasses.replace(student, hidden_size=size, vocab_size=self.columns))
        parts = 2 if student.device.platform == "cpu" else 4
        return tile_t, tile_v // parts // 128 * 128 or tile_v


def statistics(plan: KLPlan, shard: Shard) -> KLStatistics:
    """Eqs. 1 and 6 of the whole shard, [T] each."""
    empty = _kl_math.no_columns(plan.cases.student.num_tokens, plan.dtype)
    return _by_tokens(plan, shard, functools.partial(_tokens_statistics, plan, shard), shard.tokens, empty)


def mixture_sums(plan: KLPlan, shard: Shard, rows: Mixture) -> MixtureSums:
    """Eq. 9 of the whole shard, [T] each."""
    # The barrier keeps XLA from holding a tile of the walk before, to share it.
    shard, rows = lax.optimization_barrier((shard, rows))
    zeros = jnp.zeros((plan.cases.student.num_tokens,), plan.dtype)

    def of_tokens(tokens: tuple[Pair[Tokens], Mixture]) -> MixtureSums:
        return _tokens_mixture_sums(plan, shard, *tokens)

    return _by_tokens(plan, shard, of_tokens, (shard.tokens, rows), MixtureSums(zeros, zeros))


def _by_tokens[S](plan: KLPlan, shard: Shard, function: Callable[[Any], S], per_token: Any, empty: S) -> S:
    """``function`` of one tile of tokens after another; ``empty`` has the shapes of the result."""
    num_tokens, (tile_t, _) = plan.cases.student.num_tokens, plan.tiles
    if tile_t == num_tokens:
        return function(per_token)

    def body(i: Array, found: S) -> S:
        start, _ = _xla_tiles.token_start(i, tile_t, num_tokens)
        tile = function(_slice(per_token, start, tile_t))
        return jax.tree.map(lambda all_, part: lax.dynamic_update_slice_in_dim(all_, part, start, 0), found, tile)

    empty = _compat.vary_like(empty, (shard, per_token))
    return lax.fori_loop(0, _xla_tiles.num_token_tiles(shard.num_rows, tile_t, num_tokens), body, empty)


def _tokens_statistics(plan: KLPlan, shard: Shard, tokens: Pair[Tokens]) -> KLStatistics:
    """Eqs. 1 and 6 of some tokens, over one tile of the vocabulary after the other."""
    scales = _scales(plan, tokens)

    def vocab_tile(start: Any, size: int, running: _kl_math.Running) -> _kl_math.Running:
        x = _x(plan, tokens, _columns(plan, shard, start, size)).ordered(plan.student_first)
        tile = _kl_math.tile_statistics(x, scales, _math.live_columns(start, size, shard.num_columns))
        return running.add(tile, scales)

    empty = _kl_math.no_columns(tokens.student.hidden.shape[0], plan.dtype)
    running = _compat.vary_like(_kl_math.Running.start(empty), (tokens, shard))
    return _xla_tiles.walk_vocabulary(plan.columns, plan.tiles[1], vocab_tile, running).finish()


def _tokens_mixture_sums(plan: KLPlan, shard: Shard, tokens: Pair[Tokens], rows: Mixture) -> MixtureSums:
    """Eq. 9 of some tokens, with what rounding has left out of the sums."""
    scales = _scales(plan, tokens)

    def vocab_tile(start: Any, size: int, running: tuple[MixtureSums, MixtureSums]) -> tuple[MixtureSums, MixtureSums]:
        x = _x(plan, tokens, _columns(plan, shard, start, size)).ordered(plan.student_first)
        tile = _kl_mixture.tile_sums(x, scales, rows, _math.live_columns(start, size, shard.num_columns))
        sums, lost = running
        lost = jax.tree.map(lambda a, b, c: c + _statistics.rounded_away(a, b), sums, tile, lost)
        return jax.tree.map(jnp.add, sums, tile), lost

    zeros = jnp.zeros(rows.log_sums.shape, plan.dtype)
    empty = _compat.vary_like((MixtureSums(zeros, zeros),) * 2, (tokens, shard, rows))
    return jax.tree.map(jnp.add, *_xla_tiles.walk_vocabulary(plan.columns, plan.tiles[1], vocab_tile, empty))


def gradients(plan: KLPlan, shard: Shard, rows: KLCoefficients | MixtureCoefficients) -> Primals:
    """The student's part of dhidden and its dbias, in its statistics' dtype, and its dweight in the weight's."""
    # As in `lce_jax.xla.gradients`: the barrier keeps XLA from sharing work and memory with the forward.
    shard, rows, zero = lax.optimization_barrier((shard, rows, jnp.float32(0)))
    case, head = plan.cases.student, shard.heads.student
    vocab_dim = case.options.vocab_dim

    def vocab_tile(start: Any, size: int, carry: Primals) -> Primals:
        part = _columns_gradients(plan, shard, rows, start, size, carry.hidden)
        dcolumns = part.weight.astype(case.dtype)
        put = functools.partial(lax.dynamic_update_slice_in_dim, start_index=start, axis=0)
        return Primals(
            part.hidden,
            lax.dynamic_update_slice_in_dim(carry.weight, dcolumns, start, vocab_dim),
            jax.tree.map(put, carry.bias, part.bias),
        )

    init = Primals(
        jnp.full(shard.tokens.student.hidden.shape, zero.astype(case.stat_dtype)),
        jnp.full(head.weight.shape, zero.astype(case.dtype)),
        jax.tree.map(jnp.zeros_like, head.bias),
    )
    init = _compat.vary_like(init, (shard, rows))
    return _xla_tiles.walk_vocabulary(plan.columns, plan.tiles[1], vocab_tile, init)


def _columns_gradients(
    plan: KLPlan,
    shard: Shard,
    rows: KLCoefficients | MixtureCoefficients,
    start: Any,
    size: int,
    dhidden: Float[Array, "T H"],
) -> Primals:
    """``dhidden`` plus the part of some columns, and the gradients of these columns."""
    case, (tile_t, _) = plan.cases.student, plan.tiles
    heads = _columns(plan, shard, start, size)
    live = _math.live_columns(start, size, shard.num_columns)
    if tile_t == case.num_tokens:
        part = _tile_gradients(plan, shard.tokens, heads, rows, live, case.dtype)
        return part._replace(hidden=dhidden + part.hidden)

    def body(i: Array, carry: Primals) -> Primals:
        first, new = _xla_tiles.token_start(i, tile_t, case.num_tokens)
        tokens, own = _slice((shard.tokens, rows), first, tile_t)
        own = own.only(jnp.arange(tile_t, dtype=jnp.int32) >= new)  # rows of two tiles count once
        part = _tile_gradients(plan, tokens, heads, own, live, case.stat_dtype)
        dhidden = part.hidden + lax.dynamic_slice_in_dim(carry.hidden, first, tile_t)
        dhidden = lax.dynamic_update_slice_in_dim(carry.hidden, dhidden, first, 0)
        return Primals(dhidden, carry.weight + part.weight, jax.tree.map(jnp.add, carry.bias, part.bias))

    of_columns = jax.tree.map(lambda x: jnp.zeros(x.shape, case.stat_dtype), (heads.student.weight, heads.student.bias))
    init = Primals(dhidden, *_compat.vary_like(of_columns, (shard, rows)))
    return lax.fori_loop(0, _xla_tiles.num_token_tiles(shard.num_rows, tile_t, case.num_tokens), body, init)


def _tile_gradients(
    plan: KLPlan,
    tokens: Pair[Tokens],
    heads: Pair[Head],
    rows: KLCoefficients | MixtureCoefficients,
    live: Bool[Array, "v"] | None,
    dweight_dtype: jnp.dtype,
) -> Primals:
    """Eqs. 5 and 8 or 10 of one tile: recomputed logits, the gradient of the student's, and its products."""
    case, x = plan.cases.student, _x(plan, tokens, heads)
    options = case.options
    both, scales = x.ordered(plan.student_first), _scales(plan, tokens)
    if isinstance(rows, MixtureCoefficients):
        d = _kl_mixture.dlogits(both, scales, rows)
    else:
        d = _kl_math.dlogits(both, scales, rows, plan.student_first)
    if options.logit_softcap is not None:
        d = d * _softcap.derivative(x.student)
    d = (d if live is None else jnp.where(live[None, :], d, 0.0)).astype(case.stat_dtype)
    dbias = None if heads.student.bias is None else jnp.sum(d, axis=0)
    weight = _math.without_padding(heads.student.weight, live, options)
    to = _xla_tiles.gradient_dtype(case)
    d, weight, hidden = (a.astype(to) for a in (d, weight, tokens.student.hidden))
    dhidden = _xla_tiles.dot(d, weight, 1, options.vocab_dim, options.precision, case.stat_dtype)
    left, right = (d, hidden) if options.vocab_dim == 0 else (hidden, d)
    return Primals(dhidden, _xla_tiles.dot(left, right, 0, 0, options.precision, dweight_dtype), dbias)


def _x(plan: KLPlan, tokens: Pair[Tokens], heads: Pair[Head]) -> Pair[Float[Array, "t v"]]:
    """The x of eq. 0 of both models, the same bits in every pass: at small temperatures the last one counts.

    Without the barriers XLA may put a factor into the product, or round the cap of one use otherwise than that of
    another.
    """

    def of_one(case: Case, tokens: Tokens, head: Head) -> Float[Array, "t v"]:
        options = case.options
        raw = _xla_tiles.dot(tokens.hidden, head.weight, 1, options.hidden_dim, options.precision, case.stat_dtype)
        raw = lax.optimization_barrier(raw)
        raw = raw if head.bias is None else raw + head.bias[None, :]
        return lax.optimization_barrier(_math.unscaled_logits(raw, options, tokens.raw_scale).astype(plan.dtype))

    return Pair(*map(of_one, plan.cases, tokens, heads))


def _scales(plan: KLPlan, tokens: Pair[Tokens]) -> tuple[Any, Any]:
    """The k of eq. 0, that of p first."""
    pairs = zip(plan.cases, tokens, strict=True)
    return Pair(*(_math.row_scale(case.options, own.scale) for case, own in pairs)).ordered(plan.student_first)


def _columns(plan: KLPlan, shard: Shard, start: Any, size: int) -> Pair[Head]:
    def of_one(case: Case, head: Head) -> Head:
        weight = lax.dynamic_slice_in_dim(head.weight, start, size, axis=case.options.vocab_dim)
        return Head(weight, None if head.bias is None else lax.dynamic_slice_in_dim(head.bias, start, size))

    return Pair(*map(of_one, plan.cases, shard.heads))


def _slice[T](tree: T, start: Any, size: int) -> T:
    return jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, start, size), tree)
