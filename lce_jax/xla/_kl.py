"""The divergence of two heads on one shard, in plain XLA: one tile of both models' logits at a time.

For each chunk of tokens and tile of the vocabulary: a matrix product per model, the statistics of both (eqs. 1 and 6),
a union (eqs. 2 and 7). A mixture of both distributions needs a second pass (eq. 9). The backward recomputes both
products, turns them into the gradient of the student's (eqs. 8 and 10) and feeds the student's two gradient products.
`xla._walk` has the loops; a shard's first model is the student.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import lax

from lce_jax._types import Case, Primals
from lce_jax.mathematics import _kl, _kl_mixture, _logprobs, _softcap, _statistics
from lce_jax.mathematics._kl import KLCoefficients, KLStatistics, Pair
from lce_jax.mathematics._kl_mixture import Mixture, MixtureCoefficients, MixtureSums
from lce_jax.xla import _plan
from lce_jax.xla._walk import Shard, Tile, Tokens, Walk

if TYPE_CHECKING:
    from lce_jax._shapes import Array, Float


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
        tile_t, tile_v = _plan.tile_sizes(dataclasses.replace(student, hidden_size=size, vocab_size=self.columns))
        parts = 2 if student.device.platform == "cpu" else 4
        return tile_t, tile_v // parts // 128 * 128 or tile_v

    @property
    def walk(self) -> Walk:
        """Over both models' tiles."""
        return Walk(self.cases, self.columns, *self.tiles)


def statistics(plan: KLPlan, shard: Shard) -> KLStatistics:
    """Eqs. 1 and 6 of the whole shard, [T] each."""

    def empty(num_tokens: int) -> _kl.RunningKL:
        return _kl.RunningKL.start(_kl.no_columns(num_tokens, plan.dtype))

    def add(running: _kl.RunningKL, tile: Tile) -> _kl.RunningKL:
        x, scales = _x(plan, tile).ordered(plan.student_first), _scales(plan, tile.tokens)
        return running.add(_kl.tile_statistics(x, scales, tile.live), scales)

    return plan.walk.fold(shard, empty, add).finish()


def mixture_sums(plan: KLPlan, shard: Shard, rows: Mixture) -> MixtureSums:
    """Eq. 9 of the whole shard, [T] each."""
    # The barrier keeps XLA from holding a tile of the pass before, to share it.
    shard = lax.optimization_barrier(shard._replace(rows=rows))

    def empty(num_tokens: int) -> tuple[MixtureSums, MixtureSums]:
        zeros = jnp.zeros((num_tokens,), plan.dtype)
        return (MixtureSums(zeros, zeros),) * 2  # sums, and what rounding has left out of them

    def add(running: tuple[MixtureSums, MixtureSums], tile: Tile) -> tuple[MixtureSums, MixtureSums]:
        x, scales = _x(plan, tile).ordered(plan.student_first), _scales(plan, tile.tokens)
        sums, lost = running
        return _statistics.compensated(sums, _kl_mixture.tile_sums(x, scales, tile.rows, tile.live), lost)

    return jax.tree.map(jnp.add, *plan.walk.fold(shard, empty, add))


def gradients(plan: KLPlan, shard: Shard, rows: KLCoefficients | MixtureCoefficients) -> Primals:
    """The student's part of dhidden and its dbias, in its statistics' dtype, and its dweight in the weight's."""
    case = plan.cases.student

    def dlogits(tile: Tile) -> Float[Array, "t v"]:
        """Eqs. 5 and 8 or 10."""
        x, scales = _x(plan, tile), _scales(plan, tile.tokens)
        both = x.ordered(plan.student_first)
        if isinstance(tile.rows, MixtureCoefficients):
            d = _kl_mixture.dlogits(both, scales, tile.rows)
        else:
            d = _kl.dlogits(both, scales, tile.rows, plan.student_first)
        if case.options.logit_softcap is not None:
            d = d * _softcap.derivative(x.student)
        return (d if tile.live is None else jnp.where(tile.live[None, :], d, 0.0)).astype(case.stat_dtype)

    return plan.walk.gradients(shard._replace(rows=rows), dlogits)


def _x(plan: KLPlan, tile: Tile) -> Pair[Float[Array, "t v"]]:
    """The x of eq. 0 of both models, the same bits in every pass: at small temperatures the last one counts.

    Without the barriers XLA may put a factor into the product, or round the cap of one use otherwise than that of
    another.
    """

    def of_one(case: Case, tokens: Tokens, raw: Array) -> Float[Array, "t v"]:
        x = _logprobs.unscaled_logits(lax.optimization_barrier(raw), case.options, tokens.raw_scale)
        return lax.optimization_barrier(x.astype(plan.dtype))

    return Pair(*map(of_one, plan.cases, tile.tokens, tile.products()))


def _scales(plan: KLPlan, tokens: tuple[Tokens, ...]) -> tuple[Any, Any]:
    """The k of eq. 0, that of p first."""
    pairs = zip(plan.cases, tokens, strict=True)
    scales = Pair(*(_logprobs.row_scale(case.options, own.inverse_temperature) for case, own in pairs))
    return scales.ordered(plan.student_first)
