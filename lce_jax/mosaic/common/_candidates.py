"""Candidates' steps, for a host that launches kernels alone; elsewhere XLA compiles the same mathematics.

products       hidden, gathered rows of the weight  ->  a dot product for each candidate, and no copy of the rows
keep           statistics, ids, x                   ->  log-probabilities (eq. 3), and what the backward needs
cotangents     what was kept, cotangents            ->  those that have a gradient, and their sum for eq. 4
place_values   both, factors                        ->  what stands in dlogits at each candidate's place (eqs. 4, 5)
put            values, their places                 ->  an array with them, rounded; some have no place

In those of one thread per token, a candidate is a step of the grid or of a loop.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from lce_jax.mathematics import _logprobs
from lce_jax.mosaic._live_tiles import Batch, Sizes, Worklist, place
from lce_jax.mosaic._operands import RowFactors, SavedLayout, kept_statistics, lay_out_saved
from lce_jax.mosaic._pallas import pl, plgpu
from lce_jax.mosaic.common._tokens import (
    THREADS,
    BlockRows,
    before_others,
    block_rows,
    is_wrong,
    kernel,
    numbered,
    on_all_threads,
)
from lce_jax.types._types import Call

if TYPE_CHECKING:
    from lce_jax.types._shapes import Array, Float, Int

VECTOR = 8  # 16-bit numbers of the widest load of a thread
LOADED = 4  # rows of the weight whose loads overlap; their sums take 8 registers of a thread each
OF_BLOCK = 16  # candidates of a token that a block computes: few enough for few tokens to fill the GPU
PUT = 16  # candidates of a block's token whose loads overlap


def products(
    hidden: Float[Array, "T H"], weight: Float[Array, "V H"], columns: Int[Array, "T K"], numbers: Int[Array, "1"]
) -> Float[Array, "T K"]:
    """H · w of each token's columns, in float32; anything at the column -1. ``numbers``: how many rows there are."""
    tokens, most = columns.shape
    groups = -(-most // OF_BLOCK)

    def body(hidden: Any, weight: Any, columns: Any, numbers: Any, output: Any) -> None:
        block = lax.axis_index("block")
        token, group = lax.div(block, groups), lax.rem(block, groups)

        def step(i: Any, _: Any) -> None:
            begin = group * OF_BLOCK + i * LOADED
            which = [jnp.minimum(begin + j, most - 1) for j in range(min(LOADED, most))]  # then the last again
            known = [jnp.maximum(columns[token, k], 0) for k in which]
            for k, product in zip(which, _products(hidden, weight, token, known), strict=True):
                output[token, k] = product

        steps = lax.div(jnp.minimum(most - group * OF_BLOCK, OF_BLOCK) + LOADED - 1, LOADED)
        pl.when(token < numbers[0])(lambda: lax.fori_loop(0, steps, step, None))

    # One axis, because the others of a CUDA grid end at 65535. Blocks that share a row of hidden are neighbours.
    run = kernel(body, [jax.ShapeDtypeStruct(columns.shape, jnp.float32)], "lce_products", {"block": tokens * groups})
    return run(hidden, weight, columns, numbers)[0]


def _products(hidden: Any, weight: Any, token: Any, columns: list[Any]) -> list[Any]:
    """A piece of H after the other.

    H may be no multiple of a piece. The last one then ends where H ends, with zeros in place of what has been counted.
    """
    hidden_size = hidden.shape[1]
    size = next(THREADS * n for n in (VECTOR, 4, 2, 1) if hidden_size >= THREADS * n)
    layout = plgpu.Layout.WG_STRIDED((size,), vec_size=size // THREADS)
    sums: list[Any] = []
    for begin in range(0, hidden_size, size):
        at = min(begin, hidden_size - size)
        load = functools.partial(_piece, pl.ds(at, size), layout)
        of_hidden = load(hidden, token)
        if at < begin:
            number = plgpu.layout_cast(lax.iota(jnp.int32, size), layout)
            of_hidden = jnp.where(number < begin - at, 0.0, of_hidden)
        found = [of_hidden * piece for piece in [load(weight, column) for column in columns]]
        sums = [a + b for a, b in zip(sums, found, strict=True)] if sums else found
    return [jnp.sum(x) for x in sums]


def _piece(columns: Any, layout: Any, ref: Any, row: Any) -> Float[Array, "n"]:
    return plgpu.load(ref.at[row, columns], layout=layout, optimized=False).astype(jnp.float32)


class _Kept(NamedTuple):
    """What is kept of the candidates of a block's tokens."""

    call: Call
    has_temperature: bool
    fields: Any  # flat
    rows: BlockRows
    stride: Any

    @property
    def layout(self) -> SavedLayout:
        """Where what lies."""
        return lay_out_saved(self.call, self.has_temperature)

    def at(self, field: Any) -> Any:
        """Where the tokens' numbers of a field lie."""
        return self.rows.of_field(field, self.stride)

    def statistic(self, name: str) -> Any:
        """One of the tokens' statistics."""
        return self.fields[self.at(self.layout.statistics + kept_statistics(self.call).index(name))]

    def id(self, k: Any) -> Any:
        """The tokens' candidate of a number."""
        return lax.bitcast_convert_type(self.fields[self.at(self.layout.ids + k)], jnp.int32)

    def x(self, k: Any) -> Any:
        """Its x, -inf where no shard owns it."""
        return self.fields[self.at(self.layout.x + k)]

    @property
    def temperature(self) -> Any:
        """None: 1."""
        return self.fields[self.at(1)] if self.has_temperature else None

    @property
    def inverse_temperature(self) -> Any:
        """None: 1."""
        return _logprobs.invert_temperature(self.temperature) if self.has_temperature else None


def keep(
    call: Call,
    has_temperature: bool,
    ids: Int[Array, "R K"],
    x: Float[Array, "R K"],
    kept: Float[Array, "n"],
    numbers: Int[Array, "2"],
) -> tuple[Float[Array, "R K"], Float[Array, "n"]]:
    """The log-probabilities, NaN where a row's statistics are, and ``kept`` with both.

    ``numbers``: how many rows there are, and the stride of ``kept``.
    """

    def body(ids: Any, x: Any, numbers: Any, _: Any, found: Any, kept: Any) -> None:
        k, rows = lax.axis_index("candidate"), BlockRows.of(lax.axis_index("rows"), numbers[0])
        of = _Kept(call, has_temperature, kept, rows, numbers[1])

        def write() -> None:
            own, highest = x[rows.here, k], of.statistic("max")
            row_scale = _logprobs.compute_row_scale(call, of.inverse_temperature)
            logprob = _logprobs.candidate_logprobs(own, highest, row_scale, jnp.log(of.statistic("sumexp")))
            nan = on_all_threads(jnp.nan, jnp.float32)
            found.at[rows.here, k][...] = jnp.where(highest == highest, logprob, nan)
            kept.at[of.at(of.layout.ids + k)][...] = lax.bitcast_convert_type(ids[rows.here, k], jnp.float32)
            kept.at[of.at(of.layout.x + k)][...] = own

        pl.when(rows.live)(write)

    outputs = [jax.ShapeDtypeStruct(like.shape, jnp.float32) for like in (x, kept)]
    found, kept = kernel(body, outputs, "lce_keep", _grid(ids), updated={3: 1})(ids, x, numbers, kept)
    return found, kept


def cotangents(
    call: Call,
    has_temperature: bool,
    kept: Float[Array, "n"],
    seed: Float[Array, "R K"],
    numbers: Int[Array, "2"],
) -> tuple[Float[Array, "K R"], Float[Array, "R"]]:
    """The g_c of eq. 4, 0 for a candidate that no shard owns, and their sum."""
    rows, most = seed.shape

    def body(kept: Any, seed: Any, numbers: Any, each: Any, total: Any) -> None:
        rows = BlockRows.of(lax.axis_index("rows"), numbers[0])
        of, zero = _Kept(call, has_temperature, kept, rows, numbers[1]), on_all_threads(0.0, jnp.float32)

        def step(k: Any, total: Any) -> Any:
            g = jnp.where(of.x(k) > -jnp.inf, seed[rows.here, k], zero)
            each.at[k, rows.here][...] = g
            return total + g

        def write() -> None:
            total.at[rows.here][...] = lax.fori_loop(0, most, step, zero)

        pl.when(rows.live)(write)

    outputs = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((most, rows), (rows,))]
    each, total = kernel(body, outputs, "lce_cotangents", {"rows": rows // THREADS})(kept, seed, numbers)
    return each, total


def place_values(
    call: Call,
    has_temperature: bool,
    kept: Float[Array, "n"],
    each: Float[Array, "K R"],
    targets: Int[Array, "Tp"],
    row_scale: Float[Array, "Tp"],
    factors: Float[Array, "factors Tp"],
    numbers: Int[Array, "5"],
) -> tuple[Int[Array, "R K"], Float[Array, "R K"]]:
    """The shard's columns, once each, and what stands in dlogits there; -1 for others' ids, and beyond the last row.

    Of candidates that a token has several times, the last has the sum of their gradients, in their order.

    ``numbers``: those of `prepare`, and how many columns of the shard count.
    """
    most, rows = each.shape

    def body(*refs: Any) -> None:
        kept, each, targets, row_scale, factors, numbers, columns, values = refs
        k, block = lax.axis_index("candidate"), lax.axis_index("rows")
        rows, padded = BlockRows.of(block, numbers[0]), block_rows(block)
        of = _Kept(call, has_temperature, kept, rows, numbers[1])

        def pad() -> None:
            columns.at[padded, k][...] = on_all_threads(-1)

        def write() -> None:
            own = of.id(k)

            def step(j: Any, carry: Any) -> Any:
                total, last = carry
                same = of.id(j) == own
                return jnp.where(same, total + each[j, rows.here], total), jnp.where(same, on_all_threads(j), last)

            start = on_all_threads(0.0, jnp.float32), on_all_threads(-1)
            total, last = lax.fori_loop(0, most, step, start)
            column = own - on_all_threads(numbers[2])
            there = (last == on_all_threads(k)) & (column >= 0) & (column < on_all_threads(numbers[4]))
            # With few tokens the rows after them hold anything.
            there = there & (on_all_threads(rows.first) + numbered() < on_all_threads(numbers[0]))
            columns.at[rows.here, k][...] = jnp.where(there, column, on_all_threads(-1))
            row, x = RowFactors.of([factors[f, rows.here] for f in range(factors.shape[0])]), of.x(k)
            term = total * _logprobs.compute_row_factor(call, of.inverse_temperature)
            term = term if call.logit_softcap is None else term * _logprobs.cap_derivative(x)
            if has_temperature:
                term = jnp.where(is_wrong(of.temperature), 0.0, term)
            is_label = column == targets[rows.here]
            values.at[rows.here, k][...] = (
                row.at(x, row_scale[rows.here], is_label, call.logit_softcap is not None) + term
            )

        pl.when(jnp.logical_not(rows.whole))(before_others(pad))
        pl.when(rows.live)(write)

    outputs = [jax.ShapeDtypeStruct((rows, most), dtype) for dtype in (jnp.int32, jnp.float32)]
    given = kept, each, targets, row_scale, factors, numbers
    columns, values = kernel(body, outputs, "lce_place_values", _grid(outputs[0]))(*given)
    return columns, values


def _grid(x: Any) -> dict[str, int]:
    """A block for `THREADS` tokens and a candidate."""
    return {"rows": x.shape[0] // THREADS, "candidate": x.shape[1]}


def put(
    x: Float[Array, "n m"],
    columns: Int[Array, "T K"],
    values: Float[Array, "T K"],
    numbers: Int[Array, "3"],
    entries: Int[Array, "T K"] | None = None,
    work: Worklist | None = None,
    sizes: Sizes | None = None,
) -> Float[Array, "n m"]:
    """``x`` with the values at their places, which `lce_jax.mosaic._live_tiles.place` finds."""
    (tokens, most), lists = columns.shape, () if work is None else (entries, work.sums, work.cells)

    def body(x: Any, columns: Any, values: Any, numbers: Any, *refs: Any) -> None:
        del x
        (*lists, output), token = refs, lax.axis_index("token")
        batch = None if sizes is None else Batch.of(sizes, numbers[0], *lists[1:])

        def place_of(k: Any) -> tuple[Any, Any, Any]:
            of_live = (lists[0][token, k], batch, sizes) if lists else ()
            return place(columns[token, k], token, numbers, *of_live)

        def store(row: Any, column: Any, value: Any) -> None:
            output.at[row, column][...] = value  # by all threads: the same number

        def step(i: Any, _: Any) -> None:
            which = [jnp.minimum(i * PUT + j, most - 1) for j in range(min(PUT, most))]  # then the last again
            places = [place_of(k) for k in which]
            found = [values[token, k].astype(output.dtype) for k in which]
            for (is_there, row, column), value in zip(places, found, strict=True):
                pl.when(is_there)(functools.partial(store, row, column, value))

        pl.when(token < numbers[1])(lambda: lax.fori_loop(0, -(-most // PUT), step, None))

    output = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return kernel(body, [output], "lce_put", {"token": tokens}, updated={0: 0})(x, columns, values, numbers, *lists)[0]
