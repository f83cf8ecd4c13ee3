"""Joining the statistics of neighbouring tiles (eq. 2), in an order that the tiles' numbers alone decide.

    [parts, fields, Tp] ── each group of neighbours ──▶ [groups, fields, Tp]

A thread takes its token's parts of a group in their order, a few at a time so that their loads overlap. So a token's
sums are rounded in the same way whatever else is in the call. XLA's own reduction over the tiles goes by the number of
tokens.
"""

from __future__ import annotations

import functools
import itertools
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import lax

from lce_jax.mathematics import _statistics
from lce_jax.mosaic import _operands, _pallas
from lce_jax.mosaic._pallas import pl, plgpu
from lce_jax.mosaic.common import _tiles
from lce_jax.mosaic.common._tiles import Parted
from lce_jax.mosaic.common._tokens import THREADS, block_rows, on_all_threads
from lce_jax.types._types import Call, ShardStatistics

if TYPE_CHECKING:
    from lce_jax.types._shapes import Array, Float, Int

AT_A_TIME = 8  # parts whose loads overlap


def join(
    row_scale: Float[Array, "Tp"],
    parts: Float[Array, "parts fields Tp"],
    joined: Float[Array, "groups fields Tp"],
    call: Call,
    group: int,
    numbers: Int[Array, "3"],
    in_nats: bool = False,
    parted: Parted | None = None,
) -> Float[Array, "groups fields Tp"]:
    """``joined`` with the unions (eq. 2) of each ``group`` neighbours among ``parts``, added in their order.

    ``row_scale`` is the k of eq. 0 in base 2. ``numbers`` are the live rows, the parts that count, and where in
    ``joined`` the first group goes. Groups after the last part are those of no columns; those after the last of
    ``joined`` are not written, nor are row blocks without a live row. ``parts`` and ``joined`` may have more fields
    than statistics do. With ``in_nats`` the unions are as eq. 1 has them, else in base 2 as the parts are. With
    ``parted`` the first of ``parts`` is the first tile of a group of the shard, and groups end where its parts do.
    """
    return _join(row_scale, parts, [joined], call, group, numbers, in_nats, parted)[0]


def join_keeping(
    row_scale: Float[Array, "Tp"],
    parts: Float[Array, "parts fields Tp"],
    joined: Float[Array, "groups fields Tp"],
    call: Call,
    group: int,
    numbers: Int[Array, "3"],
    maxima: Float[Array, "tiles kept Tp"],
) -> tuple[Float[Array, "groups fields Tp"], Float[Array, "tiles kept Tp"]]:
    """The same, and ``maxima`` with the first fields of each part, which the thread has at hand.

    A group's parts go where the group's number says, in whole groups.
    """
    joined, maxima = _join(row_scale, parts, [joined, maxima], call, group, numbers)
    return joined, maxima


def _join(
    row_scale: Array,
    parts: Array,
    updated: list[Array],
    call: Call,
    group: int,
    numbers: Array,
    in_nats: bool = False,
    parted: Parted | None = None,
) -> list[Array]:
    """``updated``, the unions and what is kept of each part, if anything is."""
    run = _pallas.kernel(
        functools.partial(_kernel, call, group, in_nats, parted),
        out_type=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in updated],
        grid=(parts.shape[2] // THREADS, -(-parts.shape[0] // group) if parted is None else parted.groups),
        grid_names=("rows", "group"),
        compiler_params=plgpu.CompilerParams(approx_math=True),
        kernel_name="lce_join",
        updated={3 + i: i for i in range(len(updated))},
    )
    return list(run(parts, row_scale, numbers, *updated))


def _kernel(
    call: Call,
    group: int,
    in_nats: bool,
    parted: Parted | None,
    parts: Any,  # [parts, fields, Tp]
    row_scale: Any,  # [Tp]
    numbers: Any,  # live rows, parts, the first group
    *results: Any,  # [groups, fields, Tp] and the maxima, if any, as they were; both as they will be, in their places
) -> None:
    output, *maxima = results[len(results) // 2 :]
    most_groups = output.shape[0]
    names, block, number = _operands.statistic_names(call), lax.axis_index("rows"), lax.axis_index("group")
    rows, num_parts = block_rows(block), numbers[1]
    begin, stop = None, num_parts
    if parted is not None:
        begin, stop = _tiles.tiles_of_group(parted, group, numbers[2], number, num_parts)
    none = _statistics.make_statistics(
        {name: on_all_threads(getattr(_operands.UNWRITTEN, name), jnp.float32) for name in names}
    )

    def load(i: Any) -> ShardStatistics:
        there, at = on_all_threads(i) < stop, jnp.maximum(jnp.minimum(i, stop - 1), 0)
        found = {name: jnp.where(there, parts[at, f, rows], getattr(none, name)) for f, name in enumerate(names)}
        return _statistics.make_statistics(found)

    def of_live_rows() -> None:
        k = row_scale[rows]

        def step(i: Any, union: ShardStatistics) -> ShardStatistics:
            first = (number * group if begin is None else begin) + i * AT_A_TIME
            of_step = [load(first + j) for j in range(min(group, AT_A_TIME))]
            for ref in maxima:
                for (j, part), f in itertools.product(enumerate(of_step), range(ref.shape[1])):
                    ref.at[numbers[2] * group + first + j, f, rows][...] = getattr(part, names[f])
            return _statistics.union([union, *of_step], k, jnp.exp2)

        union = lax.fori_loop(0, -(-group // AT_A_TIME), step, none)
        union = _operands.to_nats(union) if in_nats else union
        for f, name in enumerate(names):
            output.at[numbers[2] + number, f, rows][...] = getattr(union, name)

    pl.when((block * THREADS < numbers[0]) & (numbers[2] + number < most_groups))(of_live_rows)
