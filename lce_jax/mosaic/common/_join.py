"""Joins the statistics of adjacent tiles (eqs. 2, 7), in an order that depends only on the tiles' numbers.

    [parts, fields, Tp] ── each group of adjacent parts ──▶ [groups, fields, Tp]

A part is the statistics of one tile. A thread joins its token's parts of a group in order, so a token's sums are
rounded in the same way in every call. The order of XLA's reduction over tiles would depend on the number of tokens. A
thread loads a few parts at a time so that the loads overlap.
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

AT_A_TIME = 8  # how many parts a thread loads at a time

# What is joined: the statistics of one head in a call, those of two heads, or the sums of their mixture.
type Joined = Call | type[KLStatistics] | type[MixtureSums]
type Numbers = tuple[Any, ...]  # the numbers of a part, field by field


class Rules(NamedTuple):
    """How to join the parts of a `Joined`."""

    none: tuple[float, ...]  # the statistics of zero columns
    union: Callable[[Sequence[Numbers], Sequence[Any]], Numbers]  # (parts, row scales) -> their union
    to_nats: Callable[[Numbers], Numbers]

    @classmethod
    def of(cls, joined: Joined) -> Rules:
        """Returns the rules for joining parts in base 2."""
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
        names = _operands.list_statistics(call)

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
    """Joins every ``group`` adjacent parts (eqs. 2, 7), in their order, and writes the unions to ``joined``.

    ``row_scales`` are the k of eq. 0 in base 2; with two heads, that of p comes first. ``numbers`` are the number of
    unmasked rows, the number of valid parts, and the place of the first group in ``joined``. Groups after the last part
    are empty. Groups after the end of ``joined``, and row blocks without an unmasked row, are not written. ``parts``
    and ``joined`` may have more fields than the statistics. With ``in_nats`` the unions are in the units of eq. 1,
    otherwise in base 2 like the parts. With ``parted``, a group ends where its part of the vocabulary ends, so the last
    group there may be shorter. ``parts`` then begins with the first part of a group.
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
    """Does the same as `join`, and also copies the first fields of each part to ``maxima``.

    The parts of group n begin at the place ``group`` · n in ``maxima``.
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
    """Runs the kernel that updates ``updated``: the unions, and the maxima if the parts' first fields are copied."""
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
    *refs: Any,  # the row scales, [Tp] each; ``numbers`` [3]; ``joined``, and the maxima if any; these two as outputs
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
        is_valid, at = on_all_threads(i) < stop, jnp.maximum(jnp.minimum(i, stop - 1), 0)
        return tuple(jnp.where(is_valid, parts[at, f, rows], x) for f, x in enumerate(none))

    def join_rows() -> None:
        k = [row_scale[rows] for row_scale in row_scales]

        def step(i: Any, union: Numbers) -> Numbers:
            first = (number * group if begin is None else begin) + i * AT_A_TIME
            loaded = [load(first + j) for j in range(min(group, AT_A_TIME))]
            for ref in maxima:
                for (j, part), f in itertools.product(enumerate(loaded), range(ref.shape[1])):
                    ref.at[numbers[2] * group + first + j, f, rows][...] = part[f]
            return tuple(rules.union([union, *loaded], k))

        union = lax.fori_loop(0, -(-group // AT_A_TIME), step, none)
        for f, x in enumerate(rules.to_nats(union) if in_nats else union):
            output.at[numbers[2] + number, f, rows][...] = x

    pl.when((block * THREADS < numbers[0]) & (numbers[2] + number < most_groups))(join_rows)
