"""The steps of `lce_jax.linear_kl` on a few numbers per token, as kernels: what `_tokens` has for one head.

scales         temperatures                 ->  the row scales of both heads
keep           statistics                   ->  the divergence, or the factors of a mixture; what the backward needs
keep_mixture   the sums of a mixture        ->  its divergence; what the backward needs of these sums
coefficients   what was kept, the cotangent ->  the factors of eq. 8 or 10

For `lce_jax.run.kernels`: elsewhere XLA compiles the same functions. Kept are, field by field, the temperatures that
there are, `KLStatistics`, and of a mixture `MixtureSums`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import lax

from lce_jax.mathematics import _kl, _logprobs
from lce_jax.mathematics._kl import KLStatistics, MixtureSums, Pair
from lce_jax.mosaic._chunks import KL_FIELDS, count_groups
from lce_jax.mosaic._operands import LOG2E, make_geometry
from lce_jax.mosaic._pallas import pl
from lce_jax.mosaic.common import _heads
from lce_jax.mosaic.common._heads import MixtureFactors, Reference, relative_log_ratio
from lce_jax.mosaic.common._tiles import TILING
from lce_jax.mosaic.common._tokens import (
    THREADS,
    BlockRows,
    add_barrier,
    block_rows,
    kernel,
    on_all_threads,
    thread_numbers,
)
from lce_jax.types import scalars
from lce_jax.types._types import Call
from lce_jax.xla._kl import KLPlan

if TYPE_CHECKING:
    from lce_jax.types._shapes import Array, Float, Int


@dataclasses.dataclass(frozen=True)
class KLRows:
    """The static part of these kernels."""

    plan: KLPlan
    has_temperature: Pair[bool]
    beta: float | None  # the teacher's weight in a mixture

    @property
    def call(self) -> Call:
        """The student's."""
        return self.plan.calls.student

    @property
    def padded_tokens(self) -> int:
        """The length of a kernel's per-token vectors."""
        return make_geometry(self.call, TILING).padded_tokens

    @property
    def num_temperatures(self) -> int:
        """How many temperatures a token has."""
        return sum(self.has_temperature)

    @property
    def num_kept(self) -> int:
        """How many numbers of each token are kept."""
        return self.num_temperatures + self.plan.saved_numbers

    def launch(self, body: Callable[..., None], outputs: Sequence[Any], name: str, **more: Any) -> Any:
        """Returns what launches ``body`` on every block of rows."""
        grid = {"rows": self.padded_tokens // THREADS}
        return kernel(functools.partial(body, self), outputs, name, grid, **more)

    def vectors(self, *fields: int) -> Any:
        """Returns the shape of an output with a number per token and field."""
        return jax.ShapeDtypeStruct((*fields, self.padded_tokens), jnp.float32)


class _Tokens:
    """The rows of a block, in a kernel, and what is kept of them."""

    def __init__(self, of: KLRows, numbers: Any, kept: Any, temperatures: Sequence[Any] = ()) -> None:
        self.of, self.kept, self.count, self.stride = of, kept, numbers[0], numbers[1]
        self.given = temperatures  # none: they are in ``kept``
        self.block = lax.axis_index("rows")
        self.rows = BlockRows.of(self.block, self.count)

    def field(self, number: int) -> Any:
        """Returns the places of a field."""
        return self.rows.field_rows(number, self.stride)

    def load(self, first: int, count: int) -> list[Array]:
        """Returns so many fields."""
        return [self.kept[self.field(first + i)] for i in range(count)]

    def store(self, first: int, values: Sequence[Array]) -> None:
        """Writes fields."""
        for i, x in enumerate(values, first):
            self.kept.at[self.field(i)][...] = x

    @property
    def temperatures(self) -> Pair[Any]:
        """Those of the student and of the teacher; None: 1."""
        found = [x[self.rows.here] for x in self.given] or self.load(0, self.of.num_temperatures)
        return Pair(*(found.pop(0) if is_there else None for is_there in self.of.has_temperature))

    @property
    def inverse_temperatures(self) -> Pair[Any]:
        """Their inverses; None: 1."""
        return Pair(*(None if x is None else _logprobs.invert_temperature(x) for x in self.temperatures))

    @property
    def scale_q(self) -> Any:
        """The k of eq. 0 of q."""
        pairs = zip(self.of.plan.calls, self.inverse_temperatures, strict=True)
        return Pair(*(_logprobs.compute_row_scale(*x) for x in pairs)).ordered(self.of.plan.student_first)[1]

    @property
    def is_valid(self) -> Any:
        """A mask of the rows whose temperatures are right; None if there are none."""
        masks = [scalars.is_temperature(x) for x in self.temperatures if x is not None]
        return functools.reduce(jnp.logical_and, masks) if masks else None

    def mixture(self, stats: KLStatistics, mask: Any = None) -> _kl.Mixture:
        """Returns the numbers of eq. 9."""
        assert self.of.beta is not None
        weights = Pair(1.0 - self.of.beta, self.of.beta)
        return _kl.mixture(stats, self.scale_q, weights, mask, _compute_log_ratio)

    def mixture_factors(self, mixture: _kl.Mixture, factor_p: Array, mean: Array) -> MixtureFactors:
        """Returns what the kernels of tiles take."""
        assert self.of.beta is not None
        found = _heads.mixture_in_base_2(mixture, factor_p, mean, float(self.of.beta > 0.5))
        return MixtureFactors(*(on_all_threads(x, jnp.float32) if isinstance(x, float) else x for x in found))

    def finish(self, result: Any, stats: KLStatistics, divergence: Array) -> None:
        """Writes the result: NaN where a temperature is wrong, or where the shards have different rows."""
        nan, mask = on_all_threads(jnp.nan, jnp.float32), self.is_valid
        divergence = jnp.where(stats.sum_p != stats.sum_p, nan, divergence)
        result.at[self.rows.here][...] = divergence if mask is None else jnp.where(mask, divergence, nan)

    def write_all(self, write: Callable[[], None], *padded: Any) -> None:
        """Runs ``write`` where rows are, and writes zeros to the other rows of ``padded``, [Tp] or [fields, Tp]."""
        rows = block_rows(self.block)

        def pad() -> None:
            for ref in padded:
                for place in [(f, rows) for f in range(ref.shape[0])] if len(ref.shape) > 1 else [(rows,)]:
                    ref.at[place][...] = on_all_threads(0.0, jnp.float32)

        pl.when(jnp.logical_not(self.rows.whole))(add_barrier(pad))
        pl.when(self.rows.live)(write)


def _compute_log_ratio(d: Array, weights: Pair[Any]) -> Array:
    """`_kl.log_ratio` without the logarithm that kernels lack."""
    d, (own, other) = d * LOG2E, weights
    return relative_log_ratio(d, d, Reference(own, other, other, _heads.MOST)) * (1.0 / LOG2E)


def scales(
    of: KLRows,
    temperatures: tuple[Float[Array, "R"], ...],
    numbers: Int[Array, "2"],
    kept: Float[Array, "n"],
) -> tuple[Pair[Float[Array, "Tp"]], Float[Array, "n"]]:
    """The k of eq. 0 of both heads in base 2; and ``kept`` with the ``temperatures``.

    ``numbers``: how many rows there are, and the stride of ``kept``. Without ``temperatures``, those that are kept.
    """
    outputs = [of.vectors(), of.vectors(), jax.ShapeDtypeStruct(kept.shape, kept.dtype)]
    run = of.launch(_scales, outputs, "lce_kl_scales", updated={len(temperatures) + 1: 2})
    student, teacher, kept = run(*temperatures, numbers, kept)
    return Pair(student, teacher), kept


def _scales(of: KLRows, *refs: Any) -> None:
    *temperatures, numbers, _, student, teacher, kept = refs
    tokens = _Tokens(of, numbers, kept, temperatures)

    def write() -> None:
        tokens.store(0, [x[tokens.rows.here] for x in temperatures])
        each = zip((student, teacher), of.plan.calls, tokens.inverse_temperatures, strict=True)
        for found, call, inverse in each:
            k = LOG2E * float(_logprobs.compute_row_scale(call, None))
            found.at[tokens.rows.here][...] = on_all_threads(k, jnp.float32) if inverse is None else k * inverse

    tokens.write_all(write, student, teacher)


def keep(
    of: KLRows,
    joined: Float[Array, "1 6 Tp"],
    numbers: Int[Array, "2"],
    kept: Float[Array, "n"],
    tags: Int[Array, "groups 7 Tp"] | None = None,
) -> tuple[Float[Array, "R"] | Float[Array, "14 Tp"], Float[Array, "n"]]:
    """The divergence, of a mixture the factors of its sums' pass; and ``kept`` with the statistics.

    ``tags`` are as in `_tokens.finish`. Where they differ, the statistics are NaN.
    """
    result = jax.ShapeDtypeStruct((of.call.num_tokens,), jnp.float32)
    outputs = [result if of.beta is None else of.vectors(len(MixtureFactors._fields))]
    outputs.append(jax.ShapeDtypeStruct(kept.shape, kept.dtype))
    given = [joined, *([] if tags is None else [tags]), numbers, kept]
    found: tuple[Array, Array] = of.launch(_keep, outputs, "lce_kl_keep", updated={len(given) - 1: 1})(*given)
    return found


def _keep(of: KLRows, joined: Any, *refs: Any) -> None:
    *tags, numbers, _, found, kept = refs
    tokens, groups = _Tokens(of, numbers, kept), count_groups(make_geometry(of.call, TILING))  # of a shard
    here, nan = tokens.rows.here, on_all_threads(jnp.nan, jnp.float32)

    def write() -> None:
        stats = KLStatistics(*(joined[0, f, here] for f in range(KL_FIELDS)))
        for ref in tags:
            for first in range(groups, ref.shape[0], groups):
                differs = ref[first, KL_FIELDS, here] != ref[0, KL_FIELDS, here]
                stats = KLStatistics(*(jnp.where(differs, nan, x) for x in stats))
        tokens.store(of.num_temperatures, stats)
        if of.beta is None:
            tokens.finish(found, stats, _kl.finish(stats, tokens.scale_q, None))
            return
        zero = on_all_threads(0.0, jnp.float32)
        for f, x in enumerate(tokens.mixture_factors(tokens.mixture(stats), zero, zero)):
            found.at[f, here][...] = x

    tokens.write_all(write, *([] if of.beta is None else [found]))


def keep_mixture(
    of: KLRows, joined: Float[Array, "1 2 Tp"], numbers: Int[Array, "2"], kept: Float[Array, "n"]
) -> tuple[Float[Array, "R"], Float[Array, "n"]]:
    """The divergence of a mixture, and ``kept`` with its sums."""
    outputs = [jax.ShapeDtypeStruct((of.call.num_tokens,), jnp.float32)]
    outputs.append(jax.ShapeDtypeStruct(kept.shape, kept.dtype))
    found: tuple[Array, Array] = of.launch(_keep_mixture, outputs, "lce_kl_keep_mixture", updated={2: 1})(
        joined, numbers, kept
    )
    return found


def _keep_mixture(of: KLRows, joined: Any, numbers: Any, _: Any, result: Any, kept: Any) -> None:
    tokens, first = _Tokens(of, numbers, kept), of.num_temperatures

    def write() -> None:
        stats = KLStatistics(*tokens.load(first, KL_FIELDS))
        sums = MixtureSums(*(joined[0, f, tokens.rows.here] for f in range(2)))
        tokens.store(first + KL_FIELDS, sums)
        tokens.finish(result, stats, _kl.divergence(sums, stats, tokens.mixture(stats), None))

    tokens.write_all(write)


def coefficients(
    of: KLRows, kept: Float[Array, "n"], seed: Float[Array, "R"], numbers: Int[Array, "2"]
) -> Float[Array, "fields Tp"]:
    """The factors of eq. 8, or of a mixture of eq. 10, zero from the last row on and where a temperature is wrong."""
    kind: Any = _kl.KLCoefficients if of.beta is None else MixtureFactors
    outputs = [of.vectors(len(kind._fields))]
    found: Array = of.launch(_coefficients, outputs, "lce_kl_coefficients")(kept, seed, numbers)[0]
    return found


def _coefficients(of: KLRows, kept: Any, seed: Any, numbers: Any, factors: Any) -> None:
    tokens, first = _Tokens(of, numbers, kept), of.num_temperatures

    def write() -> None:
        stats, given = KLStatistics(*tokens.load(first, KL_FIELDS)), seed[tokens.rows.here]
        # With few tokens the rows after them hold anything.
        counts = on_all_threads(tokens.rows.first) + thread_numbers() < numbers[0]
        valid = tokens.is_valid
        counts = counts if valid is None else jnp.logical_and(counts, valid)
        factor = _logprobs.compute_row_factor(of.call, tokens.inverse_temperatures.student)
        found: Any
        if of.beta is None:
            found = _heads.in_base_2(_kl.coefficients(stats, given, factor, counts), of.plan.direction)
        else:
            sums, mixture = MixtureSums(*tokens.load(first + KL_FIELDS, 2)), tokens.mixture(stats, counts)
            rows = _kl.mixture_coefficients(sums, stats, mixture, given, factor, counts)
            found = tokens.mixture_factors(mixture, rows.factor_p, rows.mean)
        for f, x in enumerate(found):
            factors.at[f, tokens.rows.here][...] = x

    tokens.write_all(write, factors)
