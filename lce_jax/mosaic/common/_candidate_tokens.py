"""The steps of a pass that work on a few numbers per candidate, as kernels for PyTorch: one thread per token.

keep         ids                        ->  the fields of what is kept that hold them
join         the shards' x              ->  their union (eq. 2)
logprobs     what was kept              ->  log-probabilities (eq. 3)
terms        what was kept, cotangents  ->  what each adds to dlogits (eqs. 4, 5), and the sum of the cotangents

What is kept of each token is that of `_tokens`, where the candidates' ids come before the statistics, and their x after
them. Elsewhere XLA compiles these steps, from the functions that these bodies call too.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import lax

from lce_jax._types import Case
from lce_jax.mathematics import _logprobs
from lce_jax.mosaic import _partial_statistics
from lce_jax.mosaic._pallas import pl
from lce_jax.mosaic.common._threads import THREADS, Rows, along
from lce_jax.mosaic.common._tokens import is_wrong, kernel

if TYPE_CHECKING:
    from lce_jax._shapes import Array, Float, Int

AT_A_TIME = 8  # candidates of a thread's token whose loads overlap


def keep_candidates(
    case: Case, ids: Int[Array, "R K"], kept: Int[Array, "n"], numbers: Int[Array, "2"], first: int
) -> Int[Array, "n"]:
    """``kept`` with the ids, from its field ``first`` on. ``numbers``: how many rows there are, and its stride."""

    def body(ids: Any, numbers: Any, _: Any, kept: Any) -> None:
        def write(rows: Rows, k: Any) -> None:
            kept.at[rows.of_field(first + k, numbers[1])][...] = ids[rows.here, k]

        _of_group(case, numbers[0], write)

    output = jax.ShapeDtypeStruct(kept.shape, kept.dtype)
    return kernel(body, [output], "lce_keep_candidates", _grid(case), updated={2: 0})(ids, numbers, kept)[0]


def join_candidates(
    case: Case, x: Float[Array, "N*K Tp"], kept: Float[Array, "n"], numbers: Int[Array, "2"], first: int, field: int
) -> Float[Array, "n"]:
    """``kept`` with the x of the candidates of all shards, from its field ``first`` on.

    NaN where its field ``field``, a statistic of all shards, is. ``numbers``: how many rows there are, and the stride
    of ``kept``.
    """
    most = case.options.num_candidates

    def body(x: Any, numbers: Any, _: Any, kept: Any) -> None:
        def write(rows: Rows, k: Any) -> None:
            shards = range(x.shape[0] // most)
            found = functools.reduce(jnp.maximum, (x[shard * most + k, rows.here] for shard in shards))
            statistic = kept[rows.of_field(field, numbers[1])]
            found = jnp.where(statistic == statistic, found, along(jnp.nan, jnp.float32))
            kept.at[rows.of_field(first + k, numbers[1])][...] = found

        _of_group(case, numbers[0], write)

    output = jax.ShapeDtypeStruct(kept.shape, kept.dtype)
    return kernel(body, [output], "lce_join_candidates", _grid(case), updated={2: 0})(x, numbers, kept)[0]


def candidate_logprobs(
    case: Case, kept: Float[Array, "n"], has_temperature: bool, numbers: Int[Array, "2"]
) -> Float[Array, "R K"]:
    """``numbers``: how many rows there are, and the stride of ``kept``."""

    def body(kept: Any, numbers: Any, output: Any) -> None:
        of = Kept(case, has_temperature, kept, numbers[1])

        def write(rows: Rows, k: Any) -> None:
            temperature, inverse = of.temperature(rows)
            x, scale = of.x(rows, k), _logprobs.row_scale(case.options, inverse)
            log_sumexp = jnp.log(of.statistic(rows, "sumexp"))
            found = _logprobs.candidate_logprobs(x, of.statistic(rows, "max"), scale, log_sumexp)
            if temperature is not None:
                found = jnp.where(is_wrong(temperature), along(jnp.nan, jnp.float32), found)
            output.at[rows.here, k][...] = found

        _of_group(case, numbers[0], write)

    output = jax.ShapeDtypeStruct((case.num_tokens, case.options.num_candidates), jnp.float32)
    return kernel(body, [output], "lce_candidate_logprobs", _grid(case))(kept, numbers)[0]


def candidate_terms(
    case: Case, kept: Float[Array, "n"], has_temperature: bool, seed: Float[Array, "R K"], numbers: Int[Array, "2"]
) -> Float[Array, "(K+1)*R"]:
    """Flat, of the stride of ``kept``: what each candidate adds, and as the last field the Σ g of eq. 4.

    ``seed`` are the cotangents of `candidate_logprobs`. ``numbers``: how many rows there are, and the stride.
    """
    most = case.options.num_candidates
    output = jax.ShapeDtypeStruct(((most + 1) * case.num_tokens,), jnp.float32)
    body = functools.partial(_terms, case, has_temperature)
    return kernel(body, [output], "lce_candidate_terms", {"rows": case.num_tokens // THREADS})(kept, seed, numbers)[0]


def _terms(case: Case, has_temperature: bool, kept: Any, seed: Any, numbers: Any, output: Any) -> None:
    most, stride, zero = case.options.num_candidates, numbers[1], along(0.0, jnp.float32)
    rows, of = Rows.of(lax.axis_index("rows"), numbers[0]), Kept(case, has_temperature, kept, stride)

    def write() -> None:
        temperature, inverse = of.temperature(rows)
        factor = _logprobs.row_factor(case.options, inverse)
        dcap = None if case.options.logit_softcap is None else _logprobs.cap_derivative

        def step(i: Any, total: Any) -> Any:
            numbered = [i * AT_A_TIME + j for j in range(min(AT_A_TIME, most))]
            which = [jnp.minimum(k, most - 1) for k in numbered]  # after the last, that one again
            given = [(of.x(rows, k), seed[rows.here, k]) for k in which]
            for number, k, (x, g) in zip(numbered, which, given, strict=True):
                g, term = _logprobs.candidate_terms(x, g, factor, dcap)
                term = term if temperature is None else jnp.where(is_wrong(temperature), zero, term)
                output.at[rows.of_field(k, stride)][...] = term
                total = total + jnp.where(along(number) < most, g, zero)
            return total

        total = lax.fori_loop(0, -(-most // AT_A_TIME), step, zero)
        output.at[rows.of_field(most, stride)][...] = total

    pl.when(rows.live)(write)


class Kept:
    """What is kept, in a kernel: each field for the block's tokens."""

    def __init__(self, case: Case, has_temperature: bool, ref: Any, stride: Any) -> None:
        self._case, self._has_temperature, self._ref, self._stride = case, has_temperature, ref, stride

    def temperature(self, rows: Rows) -> tuple[Any, Any]:
        """It and its inverse, if there is one."""
        if not self._has_temperature:
            return None, None
        temperature = self._ref[rows.of_field(1, self._stride)]
        return temperature, _logprobs.inverse_of(temperature)

    def statistic(self, rows: Rows, name: str) -> Any:
        """One of the merged statistics."""
        field = self._first + _partial_statistics.kept(self._case.options).index(name)
        return self._ref[rows.of_field(field, self._stride)]

    def x(self, rows: Rows, k: Any) -> Any:
        """That of candidate k."""
        field = self._first + len(_partial_statistics.kept(self._case.options)) + k
        return self._ref[rows.of_field(field, self._stride)]

    @property
    def _first(self) -> int:
        return 1 + self._has_temperature + self._case.options.num_candidates


def _grid(case: Case) -> dict[str, int]:
    return {"group": -(-case.options.num_candidates // AT_A_TIME), "rows": case.num_tokens // THREADS}


def _of_group(case: Case, count: Any, write: Callable[[Rows, Any], None]) -> None:
    """``write(rows, k)`` for each candidate of the block's group."""
    most, begin = case.options.num_candidates, lax.axis_index("group") * AT_A_TIME
    rows = Rows.of(lax.axis_index("rows"), count)

    def write_all() -> None:
        for j in range(min(AT_A_TIME, most)):
            write(rows, jnp.minimum(begin + j, most - 1))  # after the last, that one again

    pl.when(rows.live)(write_all)
