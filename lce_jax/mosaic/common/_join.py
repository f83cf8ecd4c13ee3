"""Joining the statistics of neighbouring tiles (eqs. 2, 7), in an order that the tiles' numbers alone decide.

    [parts, fields, Tp] ── each group of neighbours ──▶ [groups, fields, Tp]

A thread takes its token's parts of a group in their order, a few at a time so that their loads overlap. So a token's
sums are rounded in the same way whatever else is in the call. XLA's own reduction over the tiles goes by the number of
tokens.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from lce_jax.mathematics import _kl, _statistics
from lce_jax.mathematics._kl import KLStatistics, MixtureSums
from lce_jax.mathematics._statistics import MASKED
from lce_jax.mosaic import _operands, _pallas
from lce_jax.mosaic._operands import LOG2E
from lce_jax.mosaic._pallas import pl, plgpu
from lce_jax.mosaic.common import _tiles
from lce_jax.mosaic.common._tiles import Parted
from lce_jax.mosaic.common._tokens import THREADS, block_rows, on_all_threads
from lce_jax.types._types import Call

if TYPE_CHECKING:
    from lce_jax.types._shapes import Array, Float, Int

AT_A_TIME = 8  # parts whose loads overlap

# What is joined: the statistics of one head in a call, those of two heads, or the sums of their mixture.
type Joined = Call | type[KLStatistics] | type[MixtureSums]
type Numbers = tuple[Any, ...]  # those of a part, field by field


class Rules(NamedTuple):
    """How to join the parts of a `Joined`."""

    none: tuple[float, ...]  # the numbers of no columns
    union: Callable[[Sequence[Numbers], Sequence[Any]], Numbers]  # of a few parts in their order, and the row scales
    to_nats: Callable[[Numbers], Numbers]

    @classmethod
    def of(cls, joined: Joined) -> Rules:
        """Returns the rules; in base 2."""
        if isinstance(joined, Call):
            return cls._of_head(joined)
        if joined is KLStatistics:
            none = (_operands.FLOOR,) * 2 + (MASKED, 0.0, 0.0, 0.0)
            return cls(none, lambda parts, k: _kl.union([KLStatistics(*x) for x in parts], (k[0], k[1]), jnp.exp2),
                       lambda x: _operands.kl_to_nats(KLStatistics(*x)))  # fmt: skip
        return cls((0.0, 0.0), lambda parts, _: tuple(functools.reduce(jnp.add, x) for x in zip(*parts, strict=True)),
                   lambda sums: tuple(x * (1.0 / LOG2E) for x in sums))  # fmt: skip

    @classmethod
    def _of_head(cls, call: Call) -> Rules:
        names = _operands.statistic_names(call)

        def make(numbers: Numbers) -> Any:
            return _statistics.make_statistics(dict(zip(names, numbers, strict=True)))

        def unmake(stats: Any) -> Numbers:
            return tuple(getattr(stats, name) for name in names)

        return cls(
            unmake(_operands.UNWRITTEN),
            lambda parts, k: unmake(_statistics.union([make(x) for x in parts], k[0], jnp.exp2)),
            lambda numbers: unmake(_operands.to_nats(make(numbers))),
        )


def join(
    row_scales: tuple[Float[Array, "Tp"], ...],
    parts: Float[Array, "parts fields Tp"],
    joined: Float[Array, "groups fields Tp"],
    of: Joined,
    group: int,
    numbers: Int[Array, "3"],
    in_nats: bool = False,
    parted: Parted | None = None,
) -> Float[Array, "groups fields Tp"]:
    """``joined`` with the unions (eqs. 2, 7) of each ``group`` neighbours among ``parts``, added in their order.

    ``row_scales`` are the k of eq. 0 in base 2, of two heads that of p first. ``numbers`` are the live rows, the parts
    that count, and where in ``joined`` the first group goes. Groups after the last part are those of no columns; those
    after the last of ``joined`` are not written, nor are row blocks without a live row. ``parts`` and ``joined`` may
    have more fields than statistics do. With ``in_nats`` the unions are as eq. 1 has them, else in base 2 as the parts
    are. With ``parted`` the first of ``parts`` is the first tile of a group of the shard, and groups end where its
    parts do.
    """
    return _join(row_scales, parts, [joined], of, group, numbers, in_nats, parted)[0]


def join_keeping(
    row_scales: tuple[Float[Array, "Tp"], ...],
    parts: Float[Array, "parts fields Tp"],
    joined: Float[Array, "groups fields Tp"],
    of: Joined,
    group: int,
    numbers: Int[Array, "3"],
    maxima: Float[Array, "tiles kept Tp"],
) -> tuple[Float[Array, "groups fields Tp"], Float[Array, "tiles kept Tp"]]:
    """The same, and ``maxima`` with the first fields of each part, which the thread has at hand.

    A group's parts go where the group's number says, in whole groups.
    """
    joined, maxima = _join(row_scales, parts, [joined, maxima], of, group, numbers)
    return joined, maxima


def _join(
    row_scales: tuple[Array, ...],
    parts: Array,
    updated: list[Array],
    of: Joined,
    group: int,
    numbers: Array,
    in_nats: bool = False,
    parted: Parted | None = None,
) -> list[Array]:
    """``updated``, the unions and what is kept of each part, if anything is."""
    run = _pallas.kernel(
        functools.partial(_kernel, of, len(row_scales), group, in_nats, parted),
        out_type=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in updated],
        grid=(parts.shape[2] // THREADS, -(-parts.shape[0] // group) if parted is None else parted.groups),
        grid_names=("rows", "group"),
        compiler_params=plgpu.CompilerParams(approx_math=True),
        kernel_name="lce_join",
        updated={2 + len(row_scales) + i: i for i in range(len(updated))},
    )
    return list(run(parts, *row_scales, numbers, *updated))


def _kernel(
    of: Joined,
    num_scales: int,
    group: int,
    in_nats: bool,
    parted: Parted | None,
    parts: Any,  # [parts, fields, Tp]
    # The scales [Tp]; live rows, parts, the first group; then [groups, fields, Tp] and the maxima, if any, as they
    # were, and both as they will be, in their places.
    *refs: Any,
) -> None:
    row_scales, numbers, results = refs[:num_scales], refs[num_scales], refs[num_scales + 1 :]
    output, *maxima = results[len(results) // 2 :]
    most_groups, rules = output.shape[0], Rules.of(of)
    block, number = lax.axis_index("rows"), lax.axis_index("group")
    rows, num_parts = block_rows(block), numbers[1]
    begin, stop = None, num_parts
    if parted is not None:
        begin, stop = _tiles.tiles_of_group(parted, group, numbers[2], number, num_parts)
    none = tuple(on_all_threads(x, jnp.float32) for x in rules.none)

    def load(i: Any) -> Numbers:
        there, at = on_all_threads(i) < stop, jnp.maximum(jnp.minimum(i, stop - 1), 0)
        return tuple(jnp.where(there, parts[at, f, rows], x) for f, x in enumerate(none))

    def of_live_rows() -> None:
        k = [row_scale[rows] for row_scale in row_scales]

        def step(i: Any, union: Numbers) -> Numbers:
            first = (number * group if begin is None else begin) + i * AT_A_TIME
            of_step = [load(first + j) for j in range(min(group, AT_A_TIME))]
            for ref in maxima:
                for (j, part), f in itertools.product(enumerate(of_step), range(ref.shape[1])):
                    ref.at[numbers[2] * group + first + j, f, rows][...] = part[f]
            return tuple(rules.union([union, *of_step], k))

        union = lax.fori_loop(0, -(-group // AT_A_TIME), step, none)
        for f, x in enumerate(rules.to_nats(union) if in_nats else union):
            output.at[numbers[2] + number, f, rows][...] = x

    pl.when((block * THREADS < numbers[0]) & (numbers[2] + number < most_groups))(of_live_rows)
