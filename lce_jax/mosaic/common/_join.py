"""Joins the statistics of adjacent tiles (eq. 2), in an order that depends only on the tiles' numbers.

    [parts, fields, Tp] ── each group of adjacent parts ──▶ [groups, fields, Tp]

A thread joins its token's parts of a group in order. It loads a few parts at a time so that the loads overlap. So a
token's sums are rounded in the same way in every call. The order of XLA's reduction over tiles would depend on the
number of tokens.
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
    """Writes the unions (eq. 2) of each ``group`` adjacent parts to ``joined``, each added up in the parts' order.

    ``row_scale`` is the k of eq. 0 in base 2. ``numbers`` are the number of unmasked rows, the number of valid parts,
    and the place of the first group in ``joined``. Groups after the last part are empty. Groups after the end of
    ``joined``, and row blocks without an unmasked row, are not written. ``parts`` and ``joined`` may have more fields
    than the statistics. With ``in_nats`` the unions are in the units of eq. 1, otherwise in base 2 like the parts. With
    ``parted``, ``parts`` begins with the first tile of a group of the shard, and a group ends with its vocabulary part.
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
    """Does the same as `join`, and also copies the first fields of each part to ``maxima``.

    The group's number determines the place of its parts in ``maxima``, in whole groups.
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
    """Runs the kernel on ``updated``: the unions, and the maxima of the parts if they are copied."""
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
    numbers: Any,  # the unmasked rows, the parts, the first group
    *results: Any,  # [groups, fields, Tp] and the maxima, if any; then the same memory as outputs
) -> None:
    output, *maxima = results[len(results) // 2 :]
    most_groups = output.shape[0]
    names, block, number = _operands.list_statistics(call), lax.axis_index("rows"), lax.axis_index("group")
    rows, num_parts = block_rows(block), numbers[1]
    begin, stop = None, num_parts
    if parted is not None:
        begin, stop = _tiles.tiles_of_group(parted, group, numbers[2], number, num_parts)
    none = _statistics.make_statistics(
        {name: on_all_threads(getattr(_operands.UNWRITTEN, name), jnp.float32) for name in names}
    )

    def load(i: Any) -> ShardStatistics:
        is_valid, at = on_all_threads(i) < stop, jnp.maximum(jnp.minimum(i, stop - 1), 0)
        fields = {name: jnp.where(is_valid, parts[at, f, rows], getattr(none, name)) for f, name in enumerate(names)}
        return _statistics.make_statistics(fields)

    def join_rows() -> None:
        k = row_scale[rows]

        def step(i: Any, union: ShardStatistics) -> ShardStatistics:
            first = (number * group if begin is None else begin) + i * AT_A_TIME
            loaded = [load(first + j) for j in range(min(group, AT_A_TIME))]
            for ref in maxima:
                for (j, part), f in itertools.product(enumerate(loaded), range(ref.shape[1])):
                    ref.at[numbers[2] * group + first + j, f, rows][...] = getattr(part, names[f])
            return _statistics.union([union, *loaded], k, jnp.exp2)

        union = lax.fori_loop(0, -(-group // AT_A_TIME), step, none)
        union = _operands.to_nats(union) if in_nats else union
        for f, name in enumerate(names):
            output.at[numbers[2] + number, f, rows][...] = getattr(union, name)

    pl.when((block * THREADS < numbers[0]) & (numbers[2] + number < most_groups))(join_rows)
