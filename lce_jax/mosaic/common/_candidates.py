"""The kernels for candidates, for a host that only launches kernels. Elsewhere XLA compiles the same mathematics.

products       hidden, gathered rows of the weight  ->  a dot product for each candidate, without a copy of the rows
keep           statistics, ids, x                   ->  log-probabilities (eq. 3), and what the backward needs
cotangents     saved fields, cotangents             ->  the cotangents, 0 for ids that no shard has, and their sum
place_values   saved fields, cotangents, factors    ->  the value of dlogits at each candidate's place (eqs. 4, 5)
put            dlogits, values, their places        ->  dlogits with the rounded values; some values have no place

Where a thread computes a token, the candidates are steps of the grid or of a loop.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from lce_jax.mathematics import _logprobs
from lce_jax.mosaic._operands import RowFactors, SavedLayout, lay_out_saved, list_saved_statistics
from lce_jax.mosaic._pallas import pl, plgpu
from lce_jax.mosaic._threshold_tiles import Batch, Sizes, Worklist, place
from lce_jax.mosaic.common._tokens import (
    THREADS,
    BlockRows,
    add_barrier,
    block_rows,
    is_wrong_temperature,
    kernel,
    on_all_threads,
    thread_numbers,
)
from lce_jax.types._types import Call

if TYPE_CHECKING:
    from lce_jax.types._shapes import Array, Float, Int

VECTOR = 8  # how many 16-bit numbers the widest load of a thread reads
LOADED = 4  # rows of the weight whose loads overlap; each sum takes 8 registers of a thread
OF_BLOCK = 16  # candidates of a token per block; it is small so that a call with few tokens fills the GPU
PUT = 16  # candidates of a token whose loads overlap in `put`


def products(
    hidden: Float[Array, "T H"], weight: Float[Array, "V H"], columns: Int[Array, "T K"], numbers: Int[Array, "1"]
) -> Float[Array, "T K"]:
    """Computes h · w in each token's columns, in float32; arbitrary at column -1. ``numbers``: how many rows."""
    tokens, most = columns.shape
    groups = -(-most // OF_BLOCK)

    def body(hidden: Any, weight: Any, columns: Any, numbers: Any, output: Any) -> None:
        block = lax.axis_index("block")
        token, group = lax.div(block, groups), lax.rem(block, groups)

        def step(i: Any, _: Any) -> None:
            begin = group * OF_BLOCK + i * LOADED
            which = [jnp.minimum(begin + j, most - 1) for j in range(min(LOADED, most))]  # the last one is repeated
            known = [jnp.maximum(columns[token, k], 0) for k in which]
            for k, product in zip(which, _products(hidden, weight, token, known), strict=True):
                output[token, k] = product

        steps = lax.div(jnp.minimum(most - group * OF_BLOCK, OF_BLOCK) + LOADED - 1, LOADED)
        pl.when(token < numbers[0])(lambda: lax.fori_loop(0, steps, step, None))

    # One axis, because the other axes of a CUDA grid end at 65535. Blocks that share a row of hidden are adjacent.
    run = kernel(body, [jax.ShapeDtypeStruct(columns.shape, jnp.float32)], "lce_products", {"block": tokens * groups})
    return run(hidden, weight, columns, numbers)[0]


def _products(hidden: Any, weight: Any, token: Any, columns: list[Any]) -> list[Any]:
    """Computes the products, one piece of H after the other.

    If H is not a multiple of a piece, the last piece ends where H ends, with zeros where it overlaps the piece before.
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
        terms = [of_hidden * piece for piece in [load(weight, column) for column in columns]]
        sums = [a + b for a, b in zip(sums, terms, strict=True)] if sums else terms
    return [jnp.sum(x) for x in sums]


def _piece(columns: Any, layout: Any, ref: Any, row: Any) -> Float[Array, "n"]:
    return plgpu.load(ref.at[row, columns], layout=layout, optimized=False).astype(jnp.float32)


class _SavedCandidates(NamedTuple):
    """The saved fields of the candidates of a block's tokens."""

    call: Call
    has_temperature: bool
    fields: Any  # flat
    rows: BlockRows
    stride: Any

    @property
    def layout(self) -> SavedLayout:
        """The places of the fields."""
        return lay_out_saved(self.call, self.has_temperature)

    def locate(self, field: Any) -> Any:
        """Returns where the saved array has this field of the block's tokens."""
        return self.rows.field_rows(field, self.stride)

    def statistic(self, name: str) -> Any:
        """Loads one statistic of the tokens."""
        return self.fields[self.locate(self.layout.statistics + list_saved_statistics(self.call).index(name))]

    def id(self, k: Any) -> Any:
        """Loads the id of the tokens' candidate ``k``."""
        return lax.bitcast_convert_type(self.fields[self.locate(self.layout.ids + k)], jnp.int32)

    def x(self, k: Any) -> Any:
        """Loads the x of candidate ``k``; -inf if no shard has its id."""
        return self.fields[self.locate(self.layout.x + k)]

    @property
    def temperature(self) -> Any:
        """The tokens' temperatures; None stands for 1."""
        return self.fields[self.locate(1)] if self.has_temperature else None

    @property
    def inverse_temperature(self) -> Any:
        """The tokens' inverse temperatures; None stands for 1."""
        return _logprobs.invert_temperature(self.temperature) if self.has_temperature else None


def keep(
    call: Call,
    has_temperature: bool,
    ids: Int[Array, "R K"],
    x: Float[Array, "R K"],
    saved: Float[Array, "n"],
    numbers: Int[Array, "2"],
) -> tuple[Float[Array, "R K"], Float[Array, "n"]]:
    """Computes the log-probabilities, which are NaN in rows with NaN statistics, and saves ids and x in ``saved``.

    ``numbers``: the number of rows, and the stride of ``saved``.
    """

    def body(ids: Any, x: Any, numbers: Any, _: Any, logprobs: Any, saved: Any) -> None:
        k, rows = lax.axis_index("candidate"), BlockRows.of(lax.axis_index("rows"), numbers[0])
        fields = _SavedCandidates(call, has_temperature, saved, rows, numbers[1])

        def write() -> None:
            x_k, highest = x[rows.here, k], fields.statistic("max")
            row_scale = _logprobs.compute_row_scale(call, fields.inverse_temperature)
            logprob = _logprobs.candidate_logprobs(x_k, highest, row_scale, jnp.log(fields.statistic("sumexp")))
            nan = on_all_threads(jnp.nan, jnp.float32)
            logprobs.at[rows.here, k][...] = jnp.where(highest == highest, logprob, nan)
            saved.at[fields.locate(fields.layout.ids + k)][...] = lax.bitcast_convert_type(
                ids[rows.here, k], jnp.float32
            )
            saved.at[fields.locate(fields.layout.x + k)][...] = x_k

        pl.when(rows.any_exist)(write)

    outputs = [jax.ShapeDtypeStruct(like.shape, jnp.float32) for like in (x, saved)]
    logprobs, saved = kernel(body, outputs, "lce_keep", _grid(ids), updated={3: 1})(ids, x, numbers, saved)
    return logprobs, saved


def cotangents(
    call: Call,
    has_temperature: bool,
    saved: Float[Array, "n"],
    seed: Float[Array, "R K"],
    numbers: Int[Array, "2"],
) -> tuple[Float[Array, "K R"], Float[Array, "R"]]:
    """Returns the g_c of eq. 4, 0 for a candidate whose id no shard has, and each token's sum of them."""
    rows, most = seed.shape

    def body(saved: Any, seed: Any, numbers: Any, each: Any, total: Any) -> None:
        rows = BlockRows.of(lax.axis_index("rows"), numbers[0])
        fields, zero = (
            _SavedCandidates(call, has_temperature, saved, rows, numbers[1]),
            on_all_threads(0.0, jnp.float32),
        )

        def step(k: Any, total: Any) -> Any:
            g = jnp.where(fields.x(k) > -jnp.inf, seed[rows.here, k], zero)
            each.at[k, rows.here][...] = g
            return total + g

        def write() -> None:
            total.at[rows.here][...] = lax.fori_loop(0, most, step, zero)

        pl.when(rows.any_exist)(write)

    outputs = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((most, rows), (rows,))]
    each, total = kernel(body, outputs, "lce_cotangents", {"rows": rows // THREADS})(saved, seed, numbers)
    return each, total


def place_values(
    call: Call,
    has_temperature: bool,
    saved: Float[Array, "n"],
    each: Float[Array, "K R"],
    targets: Int[Array, "Tp"],
    row_scale: Float[Array, "Tp"],
    factors: Float[Array, "factors Tp"],
    numbers: Int[Array, "5"],
) -> tuple[Int[Array, "R K"], Float[Array, "R K"]]:
    """Returns each candidate's column in the shard, and the value of dlogits there. Repeated ids count once.

    The column is -1 for ids of other shards and after the last row. If a token has an id several times, the id's last
    occurrence has the sum of the gradients, added in order.

    ``numbers``: the first four of `_tokens.prepare`, then how many columns of the shard are not padding.
    """
    most, rows = each.shape

    def body(*refs: Any) -> None:
        saved, each, targets, row_scale, factors, numbers, columns, values = refs
        k, block = lax.axis_index("candidate"), lax.axis_index("rows")
        rows, padded = BlockRows.of(block, numbers[0]), block_rows(block)
        fields = _SavedCandidates(call, has_temperature, saved, rows, numbers[1])

        def pad() -> None:
            columns.at[padded, k][...] = on_all_threads(-1)

        def write() -> None:
            candidate = fields.id(k)

            def step(j: Any, carry: Any) -> Any:
                total, last = carry
                same = fields.id(j) == candidate
                return jnp.where(same, total + each[j, rows.here], total), jnp.where(same, on_all_threads(j), last)

            start = on_all_threads(0.0, jnp.float32), on_all_threads(-1)
            total, last = lax.fori_loop(0, most, step, start)
            column = candidate - on_all_threads(numbers[2])
            there = (last == on_all_threads(k)) & (column >= 0) & (column < on_all_threads(numbers[4]))
            # With few tokens, the rows after the last one are arbitrary.
            there = there & (on_all_threads(rows.first) + thread_numbers() < on_all_threads(numbers[0]))
            columns.at[rows.here, k][...] = jnp.where(there, column, on_all_threads(-1))
            row, x = RowFactors.of([factors[f, rows.here] for f in range(factors.shape[0])]), fields.x(k)
            term = total * _logprobs.compute_row_factor(call, fields.inverse_temperature)
            term = term if call.logit_softcap is None else term * _logprobs.cap_derivative(x)
            if has_temperature:
                term = jnp.where(is_wrong_temperature(fields.temperature), 0.0, term)
            is_label = column == targets[rows.here]
            values.at[rows.here, k][...] = (
                row.compute_dlogits(x, row_scale[rows.here], is_label, call.logit_softcap is not None) + term
            )

        pl.when(jnp.logical_not(rows.all_exist))(add_barrier(pad))
        pl.when(rows.any_exist)(write)

    outputs = [jax.ShapeDtypeStruct((rows, most), dtype) for dtype in (jnp.int32, jnp.float32)]
    operands = saved, each, targets, row_scale, factors, numbers
    columns, values = kernel(body, outputs, "lce_place_values", _grid(outputs[0]))(*operands)
    return columns, values


def _grid(x: Any) -> dict[str, int]:
    """Returns the grid, in which a block serves `THREADS` tokens and one candidate."""
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
    """Writes the values to their places in ``x``, which `lce_jax.mosaic._threshold_tiles.place` computes."""
    (tokens, most), lists = columns.shape, () if work is None else (entries, work.sums, work.cells)

    def body(x: Any, columns: Any, values: Any, numbers: Any, *refs: Any) -> None:
        del x
        (*lists, output), token = refs, lax.axis_index("token")
        batch = None if sizes is None else Batch.of(sizes, numbers[0], *lists[1:])

        def find_place(k: Any) -> tuple[Any, Any, Any]:
            entry = (lists[0][token, k], batch, sizes) if lists else ()
            return place(columns[token, k], token, numbers, *entry)

        def store(row: Any, column: Any, value: Any) -> None:
            output.at[row, column][...] = value  # all threads write the same number

        def step(i: Any, _: Any) -> None:
            which = [jnp.minimum(i * PUT + j, most - 1) for j in range(min(PUT, most))]  # the last one is repeated
            places = [find_place(k) for k in which]
            new = [values[token, k].astype(output.dtype) for k in which]
            for (is_there, row, column), value in zip(places, new, strict=True):
                pl.when(is_there)(functools.partial(store, row, column, value))

        pl.when(token < numbers[1])(lambda: lax.fori_loop(0, -(-most // PUT), step, None))

    output = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return kernel(body, [output], "lce_put", {"token": tokens}, updated={0: 0})(x, columns, values, numbers, *lists)[0]
