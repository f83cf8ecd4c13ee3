"""The epilogues of two heads' tiles: statistics (eq. 6), sums (eq. 9), the gradient in raw products (eqs. 8, 10)."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp

from lce_jax.mathematics._kl import KLCoefficients, KLStatistics
from lce_jax.mathematics._log_ratios import MOST_DISTANCE
from lce_jax.mathematics._statistics import MASKED
from lce_jax.mosaic._kl_kernel_set import Direction
from lce_jax.mosaic._mixture import MixtureFactors
from lce_jax.mosaic._operands import LOG2E
from lce_jax.mosaic._pallas import pl
from lce_jax.mosaic._partial_statistics import FLOOR
from lce_jax.mosaic.common._kl import Multiply, Refs, Where, of_rows, store
from lce_jax.mosaic.common._log_ratios import Reference, relative_log_ratio
from lce_jax.mosaic.common._machine import KLMachine, Matmul, Tile, multiple_of
from lce_jax.mosaic.common._tiles import STAGING_COLUMNS
from lce_jax.mosaic.sm90 import _epilogue, _kl_tile, _pipeline
from lce_jax.mosaic.sm90._epilogue import HELD
from lce_jax.mosaic.sm90._kl_tile import BLOCKS, HeldTile, along, block_of, x_of

if TYPE_CHECKING:
    from lce_jax._shapes import Array, Float


def statistics(refs: Refs, tile: Tile, where: Where, multiply: Multiply, scratch: Any) -> None:
    """A warpgroup's part of a tile, from its products to the partial statistics."""
    rows = functools.partial(_epilogue.rows_of, tile.row)  # computed where they are needed: no register holds them
    p, q = refs.heads
    x = x_of(p.options, multiply[0](), refs.mask, where)
    max_p = jnp.maximum(jnp.max(x, axis=1), FLOOR)
    held = HeldTile.of(x, scratch)
    x = x_of(q.options, multiply[1](), refs.mask, where)
    max_q = jnp.maximum(jnp.max(x, axis=1), FLOOR)
    at_p = functools.reduce(jnp.maximum, [_at(held.block(i), max_p, block_of(x, i)) for i in range(BLOCKS)])
    scale_p, scale_q = (HELD.load_rows(head.scale, rows()) for head in refs.heads)
    sums: list[Array] = []
    for i in range(BLOCKS):
        x_p, x_q = held.block(i), block_of(x, i)
        u_p = _relative(x_p, max_p, scale_p)
        e_p = jnp.exp2(u_p)
        # Where e is 0, v may be infinite, and 0 · inf is NaN.
        cross = jnp.where(e_p > 0.0, e_p * (u_p - _relative(x_q, at_p, scale_q)), 0.0)
        terms = e_p, jnp.exp2(_relative(x_q, max_q, scale_q)), cross
        parts = [jnp.sum(term, axis=1) for term in terms]
        sums = [a + b for a, b in zip(sums, parts, strict=True)] if sums else parts
    store(refs, where, rows, KLStatistics(max_p, max_q, at_p, *sums))


def _at(x_p: Float[Array, "64 n"], max_p: Float[Array, "64"], x_q: Float[Array, "64 n"]) -> Float[Array, "64"]:
    """The x of q at the largest x of p, if this block has it."""
    return jnp.max(jnp.where(x_p == along(max_p), x_q, MASKED), axis=1)


def _relative(x: Float[Array, "64 n"], reference: Float[Array, "64"], scale: Float[Array, "64"]) -> Any:
    """One instruction more than a fused multiply-add, which would not be 0 at the reference."""
    return (x - along(reference)) * along(scale)


def mixture_sums(refs: Refs, tile: Tile, where: Where, multiply: Multiply, scratch: Any) -> None:
    """A warpgroup's part of a tile, from its products to the partial sums of a mixture."""
    rows = functools.partial(_epilogue.rows_of, tile.row)
    p, q = refs.heads
    held = HeldTile.of(x_of(p.options, multiply[0](), refs.mask, where), scratch)
    x = x_of(q.options, multiply[1](), refs.mask, where)
    factors = of_rows(MixtureFactors, refs.factors, lambda ref: HELD.load_rows(ref, rows()))
    scales = HELD.load_rows(p.scale, rows()), HELD.load_rows(q.scale, rows())
    student, teacher = along(factors.student), along(factors.teacher)
    of_q = Reference(teacher, student, student, MOST_DISTANCE * LOG2E)
    sums: list[Array] = []
    for i in range(BLOCKS):
        u_p, u_q, d, log = _ratios((held.block(i), block_of(x, i)), scales, factors)
        terms = _times_exp2(u_p, log), _times_exp2(u_q, relative_log_ratio(-d, -d, of_q))
        parts = [jnp.sum(term, axis=1) for term in terms]
        sums = [a + b for a, b in zip(sums, parts, strict=True)] if sums else parts
    store(refs, where, rows, sums)


def _ratios(
    x: tuple[Array, Array], scales: tuple[Array, Array], rows: MixtureFactors
) -> tuple[Array, Array, Array, Array]:
    """`lce_jax.mathematics._kl_mixture`'s, of a block in base 2: both u, ln q - ln p, and the t - t₀ of eq. 9."""
    u_p = jnp.minimum(_relative(x[0], rows.max_p, scales[0]), 0.0)
    u_q = jnp.minimum(_relative(x[1], rows.max_q, scales[1]), 0.0)
    d, distance = (u_q - u_p) + along(rows.log_sums), _relative(x[1], rows.at_p, scales[1]) - u_p
    reference = Reference(*map(along, (rows.own, rows.other, rows.start, rows.most)))
    return u_p, u_q, d, relative_log_ratio(d, distance, reference)


def _times_exp2(u: Float[Array, "64 n"], x: Float[Array, "64 n"]) -> Float[Array, "64 n"]:
    """Zero where e is, also times what is infinite."""
    e = jnp.exp2(u)
    return jnp.where(e > 0.0, e * x, 0.0)


def dlogits(refs: Refs, direction: Direction, tile: Tile, where: Where, multiply: Multiply, scratch: Any) -> None:
    """A warpgroup's part of a tile, from its products to the output."""
    rows = functools.partial(_epilogue.rows_of, tile.row)
    p, q = refs.heads
    held_scratch, slots = scratch
    held = HeldTile.of(x_of(p.options, multiply[0](), refs.mask, where), held_scratch)
    x = x_of(q.options, multiply[1](), refs.mask, where)
    kind = MixtureFactors if direction == "mixture" else KLCoefficients
    factors = of_rows(kind, refs.factors, lambda ref: HELD.load_rows(ref, rows()))
    scales = HELD.load_rows(p.scale, rows()), HELD.load_rows(q.scale, rows())
    student_first = direction != "forward"
    capped = (p if student_first else q).options.logit_softcap is not None
    for i in range(BLOCKS):
        both = held.block(i), block_of(x, i)
        d = _gradient(both, scales, factors, direction)
        own = both[0] if student_first else both[1]
        d = d * (1.0 - own * own) if capped else d
        column = tile.column + i * STAGING_COLUMNS
        if slots is not None:
            _epilogue.send(d, i, slots, rows(), refs.output, column)
        else:
            columns = pl.ds(multiple_of(column, STAGING_COLUMNS), STAGING_COLUMNS)
            refs.output.at[rows(), columns][...] = d.astype(refs.output.dtype)


def _gradient(
    x: tuple[Array, Array], scales: tuple[Array, Array], rows: KLCoefficients | MixtureFactors, direction: Direction
) -> Float[Array, "64 n"]:
    """`lce_jax.mathematics._kl.dlogits` of a block, or that of `_kl_mixture`, in base 2."""
    if isinstance(rows, MixtureFactors):
        u_p, _, _, log = _ratios(x, scales, rows)
        return _times_exp2(u_p, along(rows.of_p) * (log - along(rows.mean)))
    u_p = jnp.minimum(_relative(x[0], rows.max_p, scales[0]), 0.0)
    e_p = jnp.exp2(u_p)
    if direction == "reverse":
        distance = u_p - _relative(x[1], rows.at_p, scales[1]) - along(rows.mean)
        return jnp.where(e_p > 0.0, e_p * along(rows.of_p) * distance, 0.0)
    u_q = jnp.minimum(_relative(x[1], rows.max_q, scales[1]), 0.0)
    return jnp.exp2(u_q) * along(rows.of_q) - e_p * along(rows.of_p)


def staging(matmul: Matmul, columns: int, dtype: Any) -> Any:
    """`_epilogue.staging`, or None where the output is written from registers."""
    return _epilogue.staging(matmul, columns, dtype) if matmul.tuning.slots else None


MACHINE = KLMachine(
    kernel=_pipeline.kernel,
    walk=_pipeline.walk_products,
    held=_kl_tile.held,
    staging=staging,
    statistics=statistics,
    mixture_sums=mixture_sums,
    dlogits=dlogits,
)
