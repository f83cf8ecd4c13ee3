"""The steps of `lce_jax.linear_kl` on a few numbers per token, as kernels. `_tokens` has those for one head.

compute_row_scales    temperatures              ->  the row scales of both heads
save_statistics       statistics                ->  the divergence, or a mixture's factors; and the saved statistics
save_mixture          the sums of a mixture     ->  the mixture's divergence, and the saved sums
compute_coefficients  saved numbers, cotangent  ->  the factors of eq. 8 or 10

`lce_jax.run.kl_kernels` launches these kernels. Elsewhere XLA compiles the same functions. ``saved`` has one field
after another: the temperatures of the call, `KLStatistics`, and `MixtureSums` for a mixture.
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
        """The student's call."""
        return self.plan.calls.student

    @property
    def padded_tokens(self) -> int:
        """The length of per-token vectors in a kernel."""
        return make_geometry(self.call, TILING).padded_tokens

    @property
    def num_temperatures(self) -> int:
        """The number of temperatures per token."""
        return sum(self.has_temperature)

    @property
    def num_saved(self) -> int:
        """The number of saved numbers per token."""
        return self.num_temperatures + self.plan.saved_numbers

    def launch(self, body: Callable[..., None], outputs: Sequence[Any], name: str, **more: Any) -> Any:
        """Returns a function that launches ``body`` on each block of rows."""
        grid = {"rows": self.padded_tokens // THREADS}
        return kernel(functools.partial(body, self), outputs, name, grid, **more)

    def vectors(self, *fields: int) -> Any:
        """Returns the shape of an output with these ``fields``, in which each token has a number."""
        return jax.ShapeDtypeStruct((*fields, self.padded_tokens), jnp.float32)


class _Tokens:
    """The rows of a block, in a kernel, and their saved numbers."""

    def __init__(self, of: KLRows, numbers: Any, saved: Any, temperatures: Sequence[Any] = ()) -> None:
        self.of, self.saved, self.count, self.stride = of, saved, numbers[0], numbers[1]
        self.temperature_refs = temperatures  # it is empty if the temperatures are in ``saved``
        self.block = lax.axis_index("rows")
        self.rows = BlockRows.of(self.block, self.count)

    def field(self, number: int) -> Any:
        """Returns where ``saved`` has this field of the rows."""
        return self.rows.field_rows(number, self.stride)

    def load(self, first: int, count: int) -> list[Array]:
        """Loads ``count`` saved fields."""
        return [self.saved[self.field(first + i)] for i in range(count)]

    def store(self, first: int, values: Sequence[Array]) -> None:
        """Writes ``values`` to the saved fields from ``first`` on."""
        for i, x in enumerate(values, first):
            self.saved.at[self.field(i)][...] = x

    @property
    def temperatures(self) -> Pair[Any]:
        """The temperatures of the student and of the teacher. None stands for 1."""
        values = [x[self.rows.here] for x in self.temperature_refs] or self.load(0, self.of.num_temperatures)
        return Pair(*(values.pop(0) if is_present else None for is_present in self.of.has_temperature))

    @property
    def inverse_temperatures(self) -> Pair[Any]:
        """The inverse temperatures of the student and of the teacher. None stands for 1."""
        return Pair(*(None if x is None else _logprobs.invert_temperature(x) for x in self.temperatures))

    @property
    def scale_q(self) -> Any:
        """The k of eq. 0 of q."""
        pairs = zip(self.of.plan.calls, self.inverse_temperatures, strict=True)
        return Pair(*(_logprobs.compute_row_scale(*x) for x in pairs)).ordered(self.of.plan.student_first)[1]

    @property
    def is_valid(self) -> Any:
        """A mask of the rows whose temperatures are valid; None without temperatures."""
        masks = [scalars.is_temperature(x) for x in self.temperatures if x is not None]
        return functools.reduce(jnp.logical_and, masks) if masks else None

    def mixture(self, stats: KLStatistics, mask: Any = None) -> _kl.Mixture:
        """Computes the numbers of eq. 9 or 11."""
        assert self.of.beta is not None
        weights = Pair(1.0 - self.of.beta, self.of.beta)
        slope = _compute_log_ratio if self.of.plan.direction == "jsd" else self.contrast.slope
        return _kl.mixture(stats, self.scale_q, weights, mask, slope)

    @property
    def contrast(self) -> _kl.Contrast:
        """What the direction computes in the second pass."""
        assert self.of.plan.contrast is not None
        return self.of.plan.contrast

    def mixture_factors(self, mixture: _kl.Mixture, factor_p: Array, mean: Array) -> MixtureFactors:
        """Returns the factors of the mixture for the kernels that compute tiles."""
        assert self.of.beta is not None
        factors = _heads.convert_mixture_to_base_2(mixture, factor_p, mean, float(self.of.beta > 0.5))
        return MixtureFactors(*(on_all_threads(x, jnp.float32) if isinstance(x, float) else x for x in factors))

    def finish(self, result: Any, stats: KLStatistics, divergence: Array) -> None:
        """Writes the result. It is NaN if a temperature is invalid, or if the shards have different rows."""
        nan, mask = on_all_threads(jnp.nan, jnp.float32), self.is_valid
        divergence = jnp.where(stats.sum_p != stats.sum_p, nan, divergence)
        result.at[self.rows.here][...] = divergence if mask is None else jnp.where(mask, divergence, nan)

    def write_all(self, write: Callable[[], None], *padded: Any) -> None:
        """Runs ``write`` for existing rows, and fills the padding of the ``padded`` arrays with zeros."""
        rows = block_rows(self.block)

        def pad() -> None:
            for ref in padded:
                for place in [(f, rows) for f in range(ref.shape[0])] if len(ref.shape) > 1 else [(rows,)]:
                    ref.at[place][...] = on_all_threads(0.0, jnp.float32)

        pl.when(jnp.logical_not(self.rows.all_exist))(add_barrier(pad))
        pl.when(self.rows.any_exist)(write)


def _compute_log_ratio(d: Array, weights: Pair[Any]) -> Array:
    """Computes `_kl.log_ratio` without ``log1p``, which the kernel language does not have."""
    d, (base, other) = d * LOG2E, weights
    return relative_log_ratio(d, d, Reference(base, other, other, _heads.MOST)) * (1.0 / LOG2E)


def compute_row_scales(
    of: KLRows,
    temperatures: tuple[Float[Array, "R"], ...],
    numbers: Int[Array, "2"],
    saved: Float[Array, "n"],
) -> tuple[Pair[Float[Array, "Tp"]], Float[Array, "n"]]:
    """Computes the k of eq. 0 of both heads in base 2, and writes the ``temperatures`` to ``saved``.

    ``numbers`` are the number of rows and the stride of ``saved``. Without ``temperatures``, the saved ones are used.
    """
    outputs = [of.vectors(), of.vectors(), jax.ShapeDtypeStruct(saved.shape, saved.dtype)]
    run = of.launch(_compute_row_scales, outputs, "lce_kl_scales", updated={len(temperatures) + 1: 2})
    student, teacher, saved = run(*temperatures, numbers, saved)
    return Pair(student, teacher), saved


def _compute_row_scales(of: KLRows, *refs: Any) -> None:
    *temperatures, numbers, _, student, teacher, saved = refs
    tokens = _Tokens(of, numbers, saved, temperatures)

    def write() -> None:
        tokens.store(0, [x[tokens.rows.here] for x in temperatures])
        each = zip((student, teacher), of.plan.calls, tokens.inverse_temperatures, strict=True)
        for scale, call, inverse in each:
            k = LOG2E * float(_logprobs.compute_row_scale(call, None))
            scale.at[tokens.rows.here][...] = on_all_threads(k, jnp.float32) if inverse is None else k * inverse

    tokens.write_all(write, student, teacher)


def save_statistics(
    of: KLRows,
    joined: Float[Array, "1 6 Tp"],
    numbers: Int[Array, "2"],
    saved: Float[Array, "n"],
    tags: Int[Array, "groups 7 Tp"] | None = None,
) -> tuple[Float[Array, "R"] | Float[Array, "14 Tp"], Float[Array, "n"]]:
    """Returns the divergence, or the factors that a mixture's sums need, and writes the statistics to ``saved``.

    The last field of ``tags`` has a tag per token and shard. If a token's tags differ, its statistics are NaN.
    """
    divergence = jax.ShapeDtypeStruct((of.call.num_tokens,), jnp.float32)
    outputs = [divergence if of.beta is None else of.vectors(len(MixtureFactors._fields))]
    outputs.append(jax.ShapeDtypeStruct(saved.shape, saved.dtype))
    operands = [joined, *([] if tags is None else [tags]), numbers, saved]
    run = of.launch(_save_statistics, outputs, "lce_kl_save", updated={len(operands) - 1: 1})
    result, saved = run(*operands)
    return result, saved


def _save_statistics(of: KLRows, joined: Any, *refs: Any) -> None:
    *tags, numbers, _, result, saved = refs
    tokens, groups = _Tokens(of, numbers, saved), count_groups(make_geometry(of.call, TILING))  # groups of one shard
    here, nan = tokens.rows.here, on_all_threads(jnp.nan, jnp.float32)

    def write() -> None:
        stats = KLStatistics(*(joined[0, f, here] for f in range(KL_FIELDS)))
        for ref in tags:
            for first in range(groups, ref.shape[0], groups):
                differs = ref[first, KL_FIELDS, here] != ref[0, KL_FIELDS, here]
                stats = KLStatistics(*(jnp.where(differs, nan, x) for x in stats))
        tokens.store(of.num_temperatures, stats)
        if of.beta is None:
            tokens.finish(result, stats, _kl.finish(stats, tokens.scale_q, None))
            return
        zero = on_all_threads(0.0, jnp.float32)
        for f, x in enumerate(tokens.mixture_factors(tokens.mixture(stats), zero, zero)):
            result.at[f, here][...] = x

    tokens.write_all(write, *([] if of.beta is None else [result]))


def save_mixture(
    of: KLRows, joined: Float[Array, "1 2 Tp"], numbers: Int[Array, "2"], saved: Float[Array, "n"]
) -> tuple[Float[Array, "R"], Float[Array, "n"]]:
    """Returns the divergence of a mixture, and writes its sums to ``saved``."""
    outputs = [jax.ShapeDtypeStruct((of.call.num_tokens,), jnp.float32)]
    outputs.append(jax.ShapeDtypeStruct(saved.shape, saved.dtype))
    result, saved = of.launch(_save_mixture, outputs, "lce_kl_save_mixture", updated={2: 1})(joined, numbers, saved)
    return result, saved


def _save_mixture(of: KLRows, joined: Any, numbers: Any, _: Any, result: Any, saved: Any) -> None:
    tokens, first = _Tokens(of, numbers, saved), of.num_temperatures

    def write() -> None:
        stats = KLStatistics(*tokens.load(first, KL_FIELDS))
        sums = MixtureSums(*(joined[0, f, tokens.rows.here] for f in range(2)))
        tokens.store(first + KL_FIELDS, sums)
        tokens.finish(result, stats, _kl.divergence(sums, stats, tokens.mixture(stats), None, tokens.contrast))

    tokens.write_all(write)


def compute_coefficients(
    of: KLRows, saved: Float[Array, "n"], seed: Float[Array, "R"], numbers: Int[Array, "2"]
) -> Float[Array, "fields Tp"]:
    """Computes the factors of eq. 8 or 10. They are 0 in padding and in rows with an invalid temperature."""
    kind: Any = _kl.KLCoefficients if of.beta is None else MixtureFactors
    outputs = [of.vectors(len(kind._fields))]
    factors: Array = of.launch(_compute_coefficients, outputs, "lce_kl_coefficients")(saved, seed, numbers)[0]
    return factors


def _compute_coefficients(of: KLRows, saved: Any, seed: Any, numbers: Any, factors: Any) -> None:
    tokens, first = _Tokens(of, numbers, saved), of.num_temperatures

    def write() -> None:
        stats, cotangent = KLStatistics(*tokens.load(first, KL_FIELDS)), seed[tokens.rows.here]
        # If there are fewer rows than threads, the rows after them may hold anything.
        mask = on_all_threads(tokens.rows.first) + thread_numbers() < numbers[0]
        valid = tokens.is_valid
        mask = mask if valid is None else jnp.logical_and(mask, valid)
        factor = _logprobs.compute_row_factor(of.call, tokens.inverse_temperatures.student)
        values: Any
        if of.beta is None:
            values = _heads.convert_to_base_2(_kl.coefficients(stats, cotangent, factor, mask), of.plan.direction)
        else:
            sums, mixture = MixtureSums(*tokens.load(first + KL_FIELDS, 2)), tokens.mixture(stats, mask)
            rows = _kl.mixture_coefficients(sums, stats, mixture, cotangent, factor, mask)
            values = tokens.mixture_factors(mixture, rows.factor_p, rows.mean)
        for f, x in enumerate(values):
            factors.at[f, tokens.rows.here][...] = x

    tokens.write_all(write, factors)
