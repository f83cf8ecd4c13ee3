"""What the kernels of `lce_jax.linear_kl` share: two heads' operands, the tile that waits, a mixture in base 2.

Two heads' [64, 256] tiles in one warpgroup: that of p is multiplied first and waits outside the registers until that of
q is there, where the generation says. Two accumulators of 64 x 256 would take all 256 registers of a thread, and
narrower tiles read the operands more often. Both products go through the same stages of shared memory, so the operands
of the second arrive while the first is multiplied.

A mixture is `lce_jax.mathematics._kl` in a kernel: base 2, no division, and the hardware's own logarithm far from 1.
That one is off by up to 2^-22 wherever its result lies, so near 1 a polynomial is in its place.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from lce_jax.mathematics._kl import MOST_DISTANCE, Direction, KLCoefficients, KLStatistics, Mixture, MixtureCoefficients
from lce_jax.mosaic._call import Generation, Machine
from lce_jax.mosaic._chunks import KLCache
from lce_jax.mosaic._operands import LOG2E, KLOperands, Span
from lce_jax.mosaic._pallas import pl
from lce_jax.mosaic.common import _logits
from lce_jax.mosaic.common._epilogue import HELD, without_padding
from lce_jax.mosaic.common._logits import softcap
from lce_jax.mosaic.common._tiles import (
    COMPUTE_WARPGROUPS,
    STAGING_COLUMNS,
    TILE_N,
    WARPGROUP_ROWS,
    Matmul,
    Offset,
    Product,
    Tile,
)
from lce_jax.types._types import Call

if TYPE_CHECKING:
    from lce_jax.types._shapes import Array, Float, Int


BLOCKS = TILE_N // STAGING_COLUMNS
STRIP = 32  # columns
HELD_SHAPE = (COMPUTE_WARPGROUPS, BLOCKS, WARPGROUP_ROWS, STAGING_COLUMNS)  # the tiles of a block that wait
MOST = MOST_DISTANCE * LOG2E  # as `MixtureFactors.most`, of a logarithm that is relative to that of 1

along = functools.partial(HELD.along_rows, columns=STAGING_COLUMNS)


class MixtureFactors(NamedTuple):
    """A vector of each, [T], in the order in which the kernels get them.

    With n = β / (1 - β + β e^{d₀}), the logarithm of eq. 9 is that of 1 + x, x = n (e^d - e^{d₀}).
    """

    max_p: Array
    max_q: Array
    at_p: Array
    log_sums: Array  # log2 s_p - log2 s_q
    own: Array  # (1 - β) n / β, so that 1 + x is also own + n e^d
    other: Array  # n
    start: Array  # n e^{d₀}: 1 - own
    most: Array  # the d whose exponential is taken
    log: Array  # t₀
    student: Array  # 1 - β
    teacher: Array  # β
    is_above_half: Array  # 1.0 in every row if a β of any row is above ½
    factor_p: Array  # that of `MixtureCoefficients`, for a logarithm in base 2
    mean: Array


def mixture_factors(rows: Mixture | MixtureCoefficients, length: int) -> Float[Array, "14 Tp"]:
    """Of the sums' pass, or of the gradient's; 0 from the call's tokens to ``length``."""
    if isinstance(rows, MixtureCoefficients):
        rows, factor_p, mean = rows
    else:
        factor_p = mean = jnp.zeros_like(rows.log_sums)
    student, teacher = rows.weights
    other = teacher / rows.at_p.total
    found = MixtureFactors(
        *rows.references,
        log_sums=rows.log_sums * LOG2E,
        own=student / rows.at_p.total,
        other=other,
        start=other * rows.at_p.ratio,
        most=jnp.asarray(rows.at_p.most * LOG2E),
        log=rows.log_at_p * LOG2E,
        student=student,
        teacher=teacher,
        is_above_half=jnp.any(teacher > 0.5),
        factor_p=factor_p * (1.0 / LOG2E),
        mean=mean * LOG2E,
    )
    stacked = jnp.stack([jnp.broadcast_to(x, factor_p.shape).astype(jnp.float32) for x in found])
    return jnp.pad(stacked, ((0, 0), (0, length - stacked.shape[1])))


def kl_factors(
    rows: KLCoefficients | MixtureCoefficients, length: int, direction: Direction
) -> Float[Array, "fields Tp"]:
    """A gradient's, in base 2, where u_p - v_q is log2 e times that of eq. 8; 0 from the last token to ``length``."""
    if isinstance(rows, MixtureCoefficients):
        return mixture_factors(rows, length)
    if direction == "reverse":
        rows = rows._replace(factor_p=rows.factor_p * (1.0 / LOG2E), mean=rows.mean * LOG2E)
    factors = jnp.stack(rows)
    return jnp.pad(factors, ((0, 0), (0, length - factors.shape[1])))


NEAR_ONE = 0.25
# (2^x - 1) / x up to 1 and log2(1 + x) / x up to NEAR_ONE: both are off by at most 3e-8 of what they are.
EXPM1 = (0.693147186, 0.2402266472, 0.0555040203, 0.0096169856, 0.0013335338, 0.0001563451, 0.0000152525)
LOG1P = (1.4426950194, -0.7213474397, 0.4809092734, -0.3606914640, 0.2876754352, -0.2394193308, 0.2276765902,
         -0.2020801817)  # fmt: skip


class Reference(NamedTuple):
    """What a logarithm is relative to, a number per row each: `MixtureFactors`."""

    own: Any
    other: Any
    start: Any
    most: Any


def relative_log_ratio(d: Array, distance: Array, rows: Reference) -> Array:
    """The t - t₀ of eq. 9 in base 2, from d and d - d₀."""
    return relative_log_ratios(d, distance, rows)[0]


def relative_log_ratios(d: Array, distance: Array, rows: Reference) -> tuple[Array, Array]:
    """The t - t₀ and d + t - t₀ of eq. 9 in base 2, from d and d - d₀.

    The second is off by the rounding of d. It approaches -ln β: where that is small, the ratio is better taken from -d.
    """
    bounded = jnp.minimum(d, rows.most)
    e = jnp.exp2(bounded) * rows.other
    near = rows.start * (distance * _polynomial(EXPM1, distance))
    x = jnp.where(jnp.abs(distance) < 1.0, near, e - rows.start)
    log = jnp.where(jnp.abs(x) < NEAR_ONE, x * _polynomial(LOG1P, x), jnp.log2(e + rows.own))
    return -log - (d - bounded), bounded - log


def _polynomial(coefficients: Sequence[float], x: Array) -> Array:
    value = x * coefficients[-1] + coefficients[-2]
    for coefficient in coefficients[-3::-1]:
        value = value * x + coefficient
    return value


class HeadOperands(NamedTuple):
    """What an epilogue knows of one head."""

    call: Call
    row_scale: Any  # [Tp]


class KLRefs(NamedTuple):
    """What an epilogue reads and writes."""

    heads: tuple[HeadOperands, HeadOperands]  # that of p first
    mask: Any  # [512]
    output: Any  # [tiles, fields, Tp], or [T, columns]
    factors: Any = None  # [fields, Tp]
    cache: Any = None  # a `KLCache` of refs, if tiles are kept


class KLWhere(NamedTuple):
    """Where a tile lies, and where its results go."""

    column: Any  # its first one, in the shard
    number: Any  # in the array of partial statistics
    num_columns: Any  # live ones of the shard


type Multiply = Sequence[Callable[[], Any]]  # the products of p and of q, to be asked for in turn


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


def x_of(call: Call, z: Float[Array, "64 256"], mask: Any, where: KLWhere) -> Float[Array, "64 256"]:
    """The x of eq. 0 from raw products but for the scale, padding marked."""
    x = z if call.logit_softcap is None else softcap(z, call.logit_softcap, call)
    return without_padding(x, where.column, where.num_columns, mask)


def update_tiles(
    generation: Generation,
    calls: tuple[Call, Call],
    epilogue: Callable[..., None],
    kernel: str,
    name: str,
    given: Sequence[Any],
    updated: Sequence[Array],
) -> list[Array]:
    """``updated``, parts first, with what ``epilogue`` makes of the span's tiles.

    ``given`` may end with factors of the rows.
    """
    machine, both = generation.machine, make_matmuls(calls, generation.tunings.of(calls[0], kernel))
    run = machine.kernel_of_heads(
        both[0],
        functools.partial(_kernel_per_tile, machine, both, epilogue, len(updated)),
        [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in updated],
        name,
        updated={len(given) + i: i for i in range(len(updated))},
    )
    return list(run(*given, *updated))


def _kernel_per_tile(
    machine: Machine, matmuls: tuple[Matmul, Matmul], epilogue: Callable[..., None], num_updated: int, *refs: Any
) -> None:
    *arrays, row_scales, mask, scalars, (*rest, held) = unpack_refs(refs)
    # What is updated, as it was, lies in the same places.
    factors, (output, *kept) = rest[: -2 * num_updated] or [None], rest[-num_updated:]
    span = Span.unpack(scalars)
    cache = KLCache(*kept) if kept else None
    of_kernel = KLRefs(make_head_operands(matmuls, row_scales), mask, output, factors[0], cache)

    def consume(tile: Tile, multiply: Multiply, held: Any) -> None:
        where = KLWhere(span.column + tile.column, span.slot + tile.vocabulary_tile, span.num_columns)
        epilogue(of_kernel, tile, where, multiply, functools.partial(machine.hold, held))

    walk_heads(machine, matmuls, arrays, span, consume, held)


def load_fields[F: (KLCoefficients, MixtureFactors)](kind: type[F], factors: Any, load: Callable[[Any], Array]) -> F:
    """In a kernel: the factors of some rows, which ``load`` reads from a vector."""
    return kind(*(load(factors.at[i]) for i in range(len(kind._fields))))


def store_fields(refs: KLRefs, where: KLWhere, rows: Callable[[], Any], fields: Sequence[Array]) -> None:
    """Writes a tile's numbers of these rows, whose places are computed when they are needed."""
    for i, field in enumerate(fields):
        refs.output.at[where.number, i, rows()][...] = field


def store_references(cache: Any, where: KLWhere, rows: Callable[[], Any], stats: KLStatistics) -> None:
    """Writes those of a tile that is kept."""
    tile = lax.div(where.column, jnp.int32(TILE_N))
    for i, field in enumerate(stats.references):
        cache.references.at[tile, i, rows()][...] = field


def make_matmuls(calls: tuple[Call, Call], tuning: Any) -> tuple[Matmul, Matmul]:
    """The static part of a kernel, of each head."""
    first, second = (_logits.logits(call, tuning) for call in calls)
    return first, second


def pack_operands(operands: KLOperands, span: Int[Array, "fields"]) -> list[Any]:
    """In the order in which a kernel gets them."""
    (p, q), mask = operands
    return [p.hidden, p.weight, q.hidden, q.weight, p.row_scale, q.row_scale, mask, span]


def unpack_refs(refs: Sequence[Any]) -> list[Any]:
    """What `pack_operands` packed: the arrays with H in them, both scales, the mask, the span; and the rest in one."""
    return [*refs[:4], refs[4:6], *refs[6:8], refs[8:]]


def make_head_operands(matmuls: tuple[Matmul, Matmul], row_scales: Sequence[Any]) -> tuple[HeadOperands, HeadOperands]:
    """Of both heads, from what a kernel is given."""
    first, second = (HeadOperands(own.call, row_scale) for own, row_scale in zip(matmuls, row_scales, strict=True))
    return first, second


def walk_heads(
    machine: Machine, matmuls: tuple[Matmul, Matmul], arrays: Sequence[Any], span: Span, consume: Any, held: Any
) -> None:
    """`Machine.walk_heads` over the logits of the live row groups and the span's vocabulary tiles."""
    visit_all = _logits.visit_all(matmuls[0], span)
    of_heads = zip(matmuls, arrays[::2], arrays[1::2], strict=True)
    products = [Product(matmul, hidden, weight, _logits.num_steps(matmul)) for matmul, hidden, weight in of_heads]
    machine.walk_heads(products, Offset(column=span.offset), visit_all, consume, held)


def unless_padding[S](
    where: KLWhere, column: int, compute: Callable[[S], S], otherwise: Callable[[S], S], given: S
) -> S:
    """``compute(given)`` for a strip with a column that counts.

    The branch also keeps the compiler from mixing strips, which would spill more registers.
    """
    return lax.cond(where.column + column < where.num_columns, compute, otherwise, given)


def load_mixture_factors(refs: KLRefs, rows: Callable[[], Any]) -> tuple[MixtureFactors, tuple[Array, Array]]:
    """Those of these rows, and both scales: read anew for each strip, so that no register holds them between two."""
    p, q = refs.heads
    factors = load_fields(MixtureFactors, refs.factors, lambda ref: HELD.load_rows(ref, rows()))
    factors = MixtureFactors(*(along(of_row, columns=STRIP) for of_row in factors))
    return factors, (HELD.load_rows(p.row_scale, rows()), HELD.load_rows(q.row_scale, rows()))


class MixtureRatios(NamedTuple):
    """`lce_jax.mathematics._kl`'s, of a strip in base 2."""

    u_p: Array
    u_q: Array
    d: Array
    of_p: Array  # t - t₀
    of_q: Array  # d + t - t₀

    @classmethod
    def of(cls, x: tuple[Array, Array], row_scales: tuple[Array, Array], rows: MixtureFactors) -> MixtureRatios:
        """From both x."""
        k_p, k_q = (along(row_scale, columns=STRIP) for row_scale in row_scales)
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
        return times_exp2(self.u_p, self.of_p), times_exp2(self.u_q, of_q)


def times_exp2(u: Float[Array, "64 n"], x: Float[Array, "64 n"]) -> Float[Array, "64 n"]:
    """Zero where e is, also times what is infinite."""
    e = jnp.exp2(u)
    return jnp.where(e > 0.0, e * x, 0.0)


def relative(x: Float[Array, "64 n"], reference: Float[Array, "64"], row_scale: Float[Array, "64"]) -> Any:
    """One instruction more than a fused multiply-add, which would not be 0 at the reference."""
    columns = x.shape[1]
    return (x - HELD.along_rows(reference, columns)) * HELD.along_rows(row_scale, columns)
