"""What stands at the candidates' places in dlogits, put there.

put       values  ->  a chunk of dlogits with them in their places, rounded once
put live  values  ->  the same of a batch of live tiles

Values are those of `_candidates`. An id that occurs twice has the same value twice, so no order of stores matters.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import lax

from lce_jax._types import Case
from lce_jax.mosaic._live_tiles import Batch, Batches, Worklist
from lce_jax.mosaic._pallas import pl
from lce_jax.mosaic.common._tiles import ROW_BLOCK, TILE_N
from lce_jax.mosaic.common._tokens import kernel

if TYPE_CHECKING:
    from lce_jax._shapes import Array, Float, Int

PUT = 16  # candidates of a block's token whose loads overlap


def put_candidates(
    case: Case,
    dlogits: Float[Array, "T columns"],
    ids: Int[Array, "n"],
    values: Float[Array, "K*stride"],
    numbers: Int[Array, "5"],
    first: int,
) -> Float[Array, "T columns"]:
    """``dlogits`` with the values of the candidates that are columns of this chunk in their places, rounded.

    Args:
        case: T tokens, and the shard.
        dlogits: of a chunk; there may be more rows.
        ids: of the candidates.
        values: theirs.
        numbers: how many rows there are, the stride of all that is flat, the id of the shard's first column, and the
            columns where the chunk begins and ends.
        first: the field of the first candidate in ``ids``.
    """
    output = jax.ShapeDtypeStruct(dlogits.shape, dlogits.dtype)
    body = functools.partial(_put, case, first)
    run = kernel(body, [output], "lce_put_candidates", {"token": case.num_tokens}, updated={0: 0})
    return run(dlogits, ids, values, numbers)[0]


def _put(case: Case, first: int, dlogits: Any, ids: Any, values: Any, numbers: Any, output: Any) -> None:
    del dlogits
    token, start, begin, end = lax.axis_index("token"), *(numbers[i] for i in range(2, 5))

    def place(column: Any) -> tuple[Any, Any, Any]:
        return (column >= begin) & (column < end), token, column - begin

    _put_each(case, first, ids, values, numbers, output, lambda number: place(number - start))


def _put_each(
    case: Case,
    first: int,
    ids: Any,
    values: Any,
    numbers: Any,  # how many rows there are, the stride, …
    output: Any,
    place: Callable[[Any], tuple[Any, Any, Any]],  # of an id: whether it has one here, its row, and its column
) -> None:
    """The values of a block's token in their places."""
    most, token, count, stride = case.options.num_candidates, lax.axis_index("token"), numbers[0], numbers[1]

    def store(row: Any, column: Any, value: Any) -> None:
        output.at[row, column][...] = value  # by all threads: the same number

    def step(i: Any, _: Any) -> None:
        which = [jnp.minimum(i * PUT + j, most - 1) for j in range(min(PUT, most))]  # after the last, that one again
        places = [place(ids[(first + k) * stride + token]) for k in which]
        found = [values[k * stride + token].astype(output.dtype) for k in which]
        for (is_here, row, column), value in zip(places, found, strict=True):
            pl.when(is_here)(functools.partial(store, row, column, value))

    pl.when(token < count)(lambda: lax.fori_loop(0, -(-most // PUT), step, None))


def put_live_candidates(
    case: Case,
    dlogits: Float[Array, "slots*128 256"],
    ids: Int[Array, "n"],
    values: Float[Array, "K*stride"],
    work: Worklist,
    batches: Batches,
    batch: Int[Array, "1"],
    numbers: Int[Array, "3"],
    first: int,
) -> Float[Array, "slots*128 256"]:
    """`put_candidates` of a batch of live tiles; ``batch`` is its number.

    ``numbers``: how many rows there are, the stride of all that is flat, and the id of the shard's first column.
    """
    output = jax.ShapeDtypeStruct(dlogits.shape, dlogits.dtype)
    body = functools.partial(_put_live, case, first)
    run = kernel(body, [output], "lce_put_live_candidates", {"token": case.num_tokens}, updated={0: 0})
    return run(dlogits, ids, values, numbers, work.rank_of, work.places, batches.scalars, batch)[0]


def _put_live(
    case: Case,
    first: int,
    dlogits: Any,  # [slots · 128, 256]
    ids: Any,  # flat
    values: Any,  # flat
    numbers: Any,
    rank_of: Any,  # [tiles]
    places: Any,  # [blocks, ranks]
    scalars: Any,  # [batches, fields], a `Batch` each
    number: Any,  # of the batch
    output: Any,  # what ``dlogits`` is, in the same place
) -> None:
    del dlogits
    batch, start = Batch.unpack(scalars, number[0]), numbers[2]
    block, row = (of(lax.axis_index("token"), ROW_BLOCK) for of in (lax.div, lax.rem))

    def place(column: Any) -> tuple[Any, Any, Any]:
        owned, known = (column >= 0) & (column < batch.num_columns), jnp.clip(column, 0, case.vocab_size - 1)
        slot = places[block, rank_of[lax.div(known, TILE_N)]] - batch.entry
        return owned & (slot >= 0) & (slot < batch.num_entries), slot * ROW_BLOCK + row, lax.rem(known, TILE_N)

    _put_each(case, first, ids, values, numbers, output, lambda number: place(number - start))
