"""The epilogues of two heads' tiles: statistics (eq. 6), sums (eq. 9), the gradient in raw products (eqs. 8, 10).

Two heads' [64, 256] tiles in one warpgroup: the first waits outside the registers for the second, where the generation
says. Two accumulators of 64 x 256 would take all 256 registers of a thread, and narrower tiles read the operands more
often.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from lce_jax.mathematics._kl import MOST_DISTANCE, Direction, KLCoefficients, KLStatistics
from lce_jax.mathematics._statistics import MASKED
from lce_jax.mosaic import _pallas
from lce_jax.mosaic._operands import FLOOR, LOG2E
from lce_jax.mosaic._pallas import pl
from lce_jax.mosaic.common import _epilogue
from lce_jax.mosaic.common._epilogue import HELD, without_padding
from lce_jax.mosaic.common._kl import (
    KLCache,
    KLRefs,
    KLWhere,
    MixtureFactors,
    Multiply,
    Reference,
    of_rows,
    relative_log_ratio,
    relative_log_ratios,
    store,
    store_references,
)
from lce_jax.mosaic.common._logits import softcap
from lce_jax.mosaic.common._statistics import as_cached
from lce_jax.mosaic.common._tiles import (
    COMPUTE_WARPGROUPS,
    STAGING_COLUMNS,
    TILE_N,
    WARPGROUP_ROWS,
    Tile,
    multiple_of,
)
from lce_jax.types._types import Call

if TYPE_CHECKING:
    from lce_jax.types._shapes import Array, Float


BLOCKS = TILE_N // STAGING_COLUMNS
STRIP = 32  # columns


HELD_SHAPE = (COMPUTE_WARPGROUPS, BLOCKS, WARPGROUP_ROWS, STAGING_COLUMNS)  # the tiles of a block that wait


class HeldTile(NamedTuple):
    """A tile of x that waits for that of the other head."""

    blocks: Any  # [blocks, 64, 64], of this warpgroup
    load: Callable[[Any], Array]  # a part of them, after a barrier of the warpgroup

    @classmethod
    def of(cls, x: Float[Array, "64 256"], blocks: Any, load: Callable[[Any], Array]) -> HeldTile:
        """``x``, written to ``blocks``."""
        for i in range(BLOCKS):
            blocks.at[i][...] = block_of(x, i)
        return cls(blocks, load)

    def block(self, i: int) -> Float[Array, "64 64"]:
        """Columns 64 i to 64 i + 63."""
        return self.load(self.blocks.at[i])

    def strip(self, column: int) -> Float[Array, "64 32"]:
        """Half of a block, for what takes many registers for each column."""
        block, first = divmod(column, STAGING_COLUMNS)
        return self.load(self.blocks.at[block, :, pl.ds(first, STRIP)])


type Hold = Callable[[Array], HeldTile]


def block_of(x: Float[Array, "64 256"], i: int) -> Float[Array, "64 64"]:
    """The same of a tile in registers."""
    return x[:, i * STAGING_COLUMNS : (i + 1) * STAGING_COLUMNS]


def strip_of(x: Float[Array, "64 256"], column: int) -> Float[Array, "64 32"]:
    """The same of a tile in registers."""
    return x[:, column : column + STRIP]


def x_of(case: Call, z: Float[Array, "64 256"], mask: Any, where: KLWhere) -> Float[Array, "64 256"]:
    """The x of eq. 0 from raw products but for the scale, padding marked."""
    x = z if case.logit_softcap is None else softcap(z, case.logit_softcap, case)
    return without_padding(x, where.column, where.num_columns, mask)


along = functools.partial(HELD.along_rows, columns=STAGING_COLUMNS)


MOST = MOST_DISTANCE * LOG2E  # as `MixtureFactors.most`, of a logarithm that is relative to that of 1


def statistics(refs: KLRefs, direction: Direction, tile: Tile, where: KLWhere, multiply: Multiply, hold: Hold) -> None:
    """A warpgroup's part of a tile, from its products to the partial statistics."""
    rows = functools.partial(_epilogue.rows_of, tile.row)  # computed where they are needed: no register holds them
    p, q = refs.heads
    x = x_of(p.case, multiply[0](), refs.mask, where)
    max_p = jnp.maximum(jnp.max(x, axis=1), FLOOR)
    held = hold(x)
    x = x_of(q.case, multiply[1](), refs.mask, where)
    max_q = jnp.maximum(jnp.max(x, axis=1), FLOOR)
    at_p = functools.reduce(jnp.maximum, [_at(held.block(i), max_p, block_of(x, i)) for i in range(BLOCKS)])
    references = max_p, max_q, at_p
    scales = HELD.load_rows(p.scale, rows()), HELD.load_rows(q.scale, rows())
    sums: list[Array] = []
    for column in range(0, TILE_N, STRIP):  # what is kept takes registers too
        *terms, ratio = _terms((held.strip(column), strip_of(x, column)), references, scales, direction)
        parts = [jnp.sum(term, axis=1) for term in terms]
        sums = [a + b for a, b in zip(sums, parts, strict=True)] if sums else parts
        if refs.cache is not None:
            _keep(refs.cache, rows, where.column + column, _kept_e(direction, *terms[:2]), ratio)
    found = KLStatistics(*references, *sums)
    store(refs, where, rows, found)
    if refs.cache is not None:
        store_references(refs.cache, where, rows, found)


def _terms(
    x: tuple[Array, Array], references: tuple[Array, Array, Array], scales: tuple[Array, Array], direction: Direction
) -> tuple[Array, Array, Array, Array]:
    """Those of the three sums, and the ratio that a `_kept_ratios.Kept` has."""
    u_p = _relative(x[0], references[0], scales[0])
    e_p = jnp.exp2(u_p)
    # Where e is 0, v may be infinite, and 0 · inf is NaN.
    to_v = u_p - _relative(x[1], references[2], scales[1])
    cross = jnp.where(e_p > 0.0, e_p * to_v, 0.0)
    u_q = _relative(x[1], references[1], scales[1])
    return e_p, jnp.exp2(u_q), cross, -to_v if direction == "reverse" else u_q - u_p


def _kept_e(direction: Direction, e_p: Array, e_q: Array) -> Array:
    return jnp.maximum(e_p, e_q) if direction == "forward" else e_p


def _keep(cache: KLCache, rows: Callable[[], Any], column: Any, e: Array, ratio: Array) -> None:
    """Some columns of a `_kept_ratios.Kept`. Not through shared memory, as `dlogits`."""
    columns = pl.ds(multiple_of(column, STRIP), STRIP)
    for output, values in (cache.e, as_cached(e, cache.e.dtype)), (cache.ratio, ratio):
        _pallas.store(output.at[rows(), columns], values.astype(output.dtype))


def _at(x_p: Float[Array, "64 n"], max_p: Float[Array, "64"], x_q: Float[Array, "64 n"]) -> Float[Array, "64"]:
    """The x of q at the largest x of p, if this block has it."""
    return jnp.max(jnp.where(x_p == along(max_p), x_q, MASKED), axis=1)


def _relative(x: Float[Array, "64 n"], reference: Float[Array, "64"], scale: Float[Array, "64"]) -> Any:
    """One instruction more than a fused multiply-add, which would not be 0 at the reference."""
    columns = x.shape[1]
    return (x - HELD.along_rows(reference, columns)) * HELD.along_rows(scale, columns)


def mixture_sums(refs: KLRefs, tile: Tile, where: KLWhere, multiply: Multiply, hold: Hold) -> None:
    """A warpgroup's part of a tile, from its products to the partial sums of a mixture."""
    rows = functools.partial(_epilogue.rows_of, tile.row)
    p, q = refs.heads
    held = hold(x_of(p.case, multiply[0](), refs.mask, where))
    x = x_of(q.case, multiply[1](), refs.mask, where)
    is_above_half = refs.factors[MixtureFactors._fields.index("is_above_half"), 0] > 0.0

    def add(column: int, apart: bool, sums: list[Array]) -> list[Array]:
        both = held.strip(column), strip_of(x, column)
        factors, scales = _mixture_factors(refs, rows)
        terms = MixtureRatios.of(both, scales, factors).terms(factors, apart)
        return [total + jnp.sum(term, axis=1) for total, term in zip(sums, terms, strict=True)]

    def add_strip(column: int, sums: list[Array]) -> list[Array]:
        apart, together = (functools.partial(add, column, each) for each in (True, False))
        return lax.cond(is_above_half, apart, together, sums)

    zeros = jnp.zeros_like(HELD.load_rows(p.scale, rows()))
    sums = [zeros, zeros]
    for column in range(0, TILE_N, STRIP):
        sums = _unless_padding(where, column, functools.partial(add_strip, column), lambda sums: sums, sums)
    store(refs, where, rows, sums)


def _unless_padding[S](
    where: KLWhere, column: int, compute: Callable[[S], S], otherwise: Callable[[S], S], given: S
) -> S:
    """``compute(given)`` for a strip with a column that counts.

    The branch also keeps the compiler from mixing strips, which would spill more registers.
    """
    return lax.cond(where.column + column < where.num_columns, compute, otherwise, given)


def _mixture_factors(refs: KLRefs, rows: Callable[[], Any]) -> tuple[MixtureFactors, tuple[Array, Array]]:
    """Those of these rows, and both scales: read anew for each strip, so that no register holds them between two."""
    p, q = refs.heads
    factors = of_rows(MixtureFactors, refs.factors, lambda ref: HELD.load_rows(ref, rows()))
    factors = MixtureFactors(*(along(of_row, columns=STRIP) for of_row in factors))
    return factors, (HELD.load_rows(p.scale, rows()), HELD.load_rows(q.scale, rows()))


class MixtureRatios(NamedTuple):
    """`lce_jax.mathematics._kl`'s, of a strip in base 2."""

    u_p: Array
    u_q: Array
    d: Array
    of_p: Array  # t - t₀
    of_q: Array  # d + t - t₀

    @classmethod
    def of(cls, x: tuple[Array, Array], scales: tuple[Array, Array], rows: MixtureFactors) -> MixtureRatios:
        """From both x."""
        k_p, k_q = (along(scale, columns=STRIP) for scale in scales)
        u_p = jnp.minimum((x[0] - rows.max_p) * k_p, 0.0)
        u_q = jnp.minimum((x[1] - rows.max_q) * k_q, 0.0)
        d, distance = (u_q - u_p) + rows.log_sums, (x[1] - rows.at_p) * k_q - u_p
        reference = Reference(rows.own, rows.other, rows.start, rows.most)
        return cls(u_p, u_q, d, *relative_log_ratios(d, distance, reference))

    def terms(self, rows: MixtureFactors, apart: bool) -> tuple[Array, Array]:
        """Those of both sums of eq. 9; ``apart``: with a logarithm of its own for q in the rows that ask for it."""
        of_q = self.of_q + rows.log
        if apart:
            of_teacher = Reference(rows.teacher, rows.student, rows.student, MOST)
            of_q = jnp.where(rows.teacher > 0.5, relative_log_ratio(-self.d, -self.d, of_teacher), of_q)
        return _times_exp2(self.u_p, self.of_p), _times_exp2(self.u_q, of_q)


def _times_exp2(u: Float[Array, "64 n"], x: Float[Array, "64 n"]) -> Float[Array, "64 n"]:
    """Zero where e is, also times what is infinite."""
    e = jnp.exp2(u)
    return jnp.where(e > 0.0, e * x, 0.0)


def dlogits(refs: KLRefs, direction: Direction, tile: Tile, where: KLWhere, multiply: Multiply, hold: Hold) -> None:
    """A warpgroup's part of a tile, from its products to the output."""
    rows = functools.partial(_epilogue.rows_of, tile.row)
    p, q = refs.heads
    held = hold(x_of(p.case, multiply[0](), refs.mask, where))
    x = x_of(q.case, multiply[1](), refs.mask, where)
    gradient = _of_mixture(refs, rows, where) if direction == "jsd" else _of_kl(refs, rows, direction == "reverse")
    for i in range(BLOCKS):
        d = gradient(held, x, i)
        column = tile.column + i * STAGING_COLUMNS
        # Without a slot of shared memory, where a stage of the products does more (`_tuning`).
        columns = pl.ds(multiple_of(column, STAGING_COLUMNS), STAGING_COLUMNS)
        _pallas.store(refs.output.at[rows(), columns], d.astype(refs.output.dtype))


type Gradient = Callable[[HeldTile, Array, int], Array]  # [64, 64], of a block by its number


def _of_kl(refs: KLRefs, rows: Callable[[], Any], reverse: bool) -> Gradient:
    """`lce_jax.mathematics._kl.dlogits` in base 2, and the cap's derivative."""
    p, q = refs.heads
    factors = of_rows(KLCoefficients, refs.factors, lambda ref: HELD.load_rows(ref, rows()))
    scales = HELD.load_rows(p.scale, rows()), HELD.load_rows(q.scale, rows())

    def of_block(held: HeldTile, x: Array, i: int) -> Array:
        both = held.block(i), block_of(x, i)
        d = _gradient(both, scales, factors, reverse)
        return _through_cap((p if reverse else q).case, d, both[0] if reverse else both[1])

    return of_block


def _of_mixture(refs: KLRefs, rows: Callable[[], Any], where: KLWhere) -> Gradient:
    """`lce_jax.mathematics._kl.dlogits` in base 2, and the cap's derivative."""

    def of_strip(held: HeldTile, column: int, x: Array) -> Array:
        x_p = held.strip(column)
        factors, scales = _mixture_factors(refs, rows)
        own = MixtureRatios.of((x_p, x), scales, factors)
        d = _times_exp2(own.u_p, factors.of_p * (own.of_p - factors.mean))
        return _through_cap(refs.heads[0].case, d, x_p)

    def of_block(held: HeldTile, x: Array, i: int) -> Array:
        first = i * STAGING_COLUMNS
        strips = [
            _unless_padding(
                where, column, functools.partial(of_strip, held, column), jnp.zeros_like, strip_of(x, column)
            )
            for column in range(first, first + STAGING_COLUMNS, STRIP)
        ]
        return jnp.concatenate(strips, axis=1)

    return of_block


def _through_cap(case: Call, d: Float[Array, "64 n"], x: Float[Array, "64 n"]) -> Float[Array, "64 n"]:
    """In the raw products."""
    return d if case.logit_softcap is None else d * (1.0 - x * x)


def _gradient(
    x: tuple[Array, Array], scales: tuple[Array, Array], rows: KLCoefficients, reverse: bool
) -> Float[Array, "64 n"]:
    """`lce_jax.mathematics._kl.dlogits` of a block, in base 2."""
    u_p = jnp.minimum(_relative(x[0], rows.max_p, scales[0]), 0.0)
    e_p = jnp.exp2(u_p)
    if reverse:
        distance = u_p - _relative(x[1], rows.at_p, scales[1]) - along(rows.mean)
        return jnp.where(e_p > 0.0, e_p * along(rows.of_p) * distance, 0.0)
    u_q = jnp.minimum(_relative(x[1], rows.max_q, scales[1]), 0.0)
    return jnp.exp2(u_q) * along(rows.of_q) - e_p * along(rows.of_p)
