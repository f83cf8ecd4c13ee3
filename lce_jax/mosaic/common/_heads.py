"""What the kernels of `lce_jax.linear_kl` share: the operands of two heads, held tiles, and a mixture in base 2.

A warpgroup computes a [64, 256] tile of each head. The tile of p is multiplied first, and is held outside the registers
until the tile of q is computed; the generation decides where. Two accumulators of 64 x 256 would take all 256 registers
of a thread, and narrower tiles would read the operands more often. Both products use the same stages of shared memory,
so the operands of the second product arrive while the first is multiplied.

The mixture's formulas are those of `lce_jax.mathematics._kl`, but in base 2, without divisions, and with the hardware's
logarithm. Its absolute error is up to 2^-22, so near 1 a polynomial replaces it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from lce_jax.mathematics._kl import (
    MOST_DISTANCE,
    Direction,
    KLCoefficients,
    KLStatistics,
    Mixture,
    MixtureCoefficients,
    compare,
)
from lce_jax.mosaic._call import Generation, Machine
from lce_jax.mosaic._chunks import KLCache
from lce_jax.mosaic._operands import LOG2E, KLOperands, Span
from lce_jax.mosaic._pallas import pl
from lce_jax.mosaic.common import _logits
from lce_jax.mosaic.common._epilogue_steps import ACCUMULATOR, mask_padding
from lce_jax.mosaic.common._logits import apply_softcap
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
STRIP = 32  # the columns of a strip, which is half of a block
HELD_SHAPE = (COMPUTE_WARPGROUPS, BLOCKS, WARPGROUP_ROWS, STAGING_COLUMNS)  # the held tiles of a block
MOST = MOST_DISTANCE * LOG2E  # the value of `MixtureFactors.most` where d₀ is 0

along = functools.partial(ACCUMULATOR.along_rows, columns=STAGING_COLUMNS)


class MixtureFactors(NamedTuple):
    """Factors of the rows for eqs. 9 or 11, and 10, [T] each, in the order in which the kernels get them.

    With n = β / (1 - β + β e^{d₀}), the logarithm of eq. 9 is that of 1 + x, x = n (e^d - e^{d₀}).
    """

    max_p: Array
    max_q: Array
    at_p: Array
    log_sums: Array  # log2 s_p - log2 s_q
    base: Array  # (1 - β) n / β, so that 1 + x is also base + n e^d
    other: Array  # n
    start: Array  # n e^{d₀}, which is 1 - base
    most: Any  # the largest d whose exponential is computed
    slope: Array  # t₀
    student: Array  # 1 - β
    teacher: Array  # β
    is_above_half: Array  # 1.0 in every row if a β of any row is above ½
    factor_p: Array  # that of `MixtureCoefficients`, for a slope in base 2
    mean: Array  # b, in base 2


def mixture_factors(rows: Mixture | MixtureCoefficients, length: int) -> Float[Array, "14 Tp"]:
    """Stacks the factors for the sums or for the gradients of a mixture, and pads them with 0 to ``length`` tokens."""
    if isinstance(rows, MixtureCoefficients):
        rows, factor_p, mean = rows
    else:
        factor_p = mean = jnp.zeros_like(rows.log_sums)
    factors = convert_mixture_to_base_2(rows, factor_p, mean, jnp.any(rows.weights.teacher > 0.5))
    stacked = jnp.stack([jnp.broadcast_to(x, factor_p.shape).astype(jnp.float32) for x in factors])
    return jnp.pad(stacked, ((0, 0), (0, length - stacked.shape[1])))


def convert_mixture_to_base_2(rows: Mixture, factor_p: Array, mean: Array, is_above_half: Any) -> MixtureFactors:
    """Returns the factors of a mixture. ``factor_p`` and ``mean`` are those of `MixtureCoefficients`."""
    student, teacher = rows.weights
    other = teacher / rows.at_p.total
    return MixtureFactors(
        *rows.references,
        log_sums=rows.log_sums * LOG2E,
        base=student / rows.at_p.total,
        other=other,
        start=other * rows.at_p.ratio,
        most=rows.at_p.most * LOG2E,
        slope=rows.slope_at_p * LOG2E,
        student=student,
        teacher=teacher,
        is_above_half=is_above_half,
        factor_p=factor_p * (1.0 / LOG2E),
        mean=mean * LOG2E,
    )


def kl_factors(
    rows: KLCoefficients | MixtureCoefficients, length: int, direction: Direction
) -> Float[Array, "fields Tp"]:
    """Stacks the factors of the gradients in base 2, and pads them with 0 to ``length`` tokens.

    In base 2, u_p - v_q is log2 e times its value in eq. 8.
    """
    if isinstance(rows, MixtureCoefficients):
        return mixture_factors(rows, length)
    factors = jnp.stack(convert_to_base_2(rows, direction))
    return jnp.pad(factors, ((0, 0), (0, length - factors.shape[1])))


def convert_to_base_2(rows: KLCoefficients, direction: Direction) -> KLCoefficients:
    """Returns the coefficients in base 2, as the kernels take them."""
    if direction == "reverse":
        return rows._replace(factor_p=rows.factor_p * (1.0 / LOG2E), mean=rows.mean * LOG2E)
    return rows


NEAR_ONE = 0.25
# (2^x - 1) / x for |x| up to 1, and log2(1 + x) / x for |x| up to NEAR_ONE: the relative errors are at most 3e-8.
EXPM1 = (0.693147186, 0.2402266472, 0.0555040203, 0.0096169856, 0.0013335338, 0.0001563451, 0.0000152525)
LOG1P = (1.4426950194, -0.7213474397, 0.4809092734, -0.3606914640, 0.2876754352, -0.2394193308, 0.2276765902,
         -0.2020801817)  # fmt: skip


class Reference(NamedTuple):
    """The reference of a relative logarithm: four fields of `MixtureFactors`, each with a number per row."""

    base: Any
    other: Any
    start: Any
    most: Any


def relative_log_ratio(d: Array, distance: Array, rows: Reference) -> Array:
    """Computes the t - t₀ of eq. 9 in base 2, from d and d - d₀."""
    return relative_log_ratios(d, distance, rows)[0]


def relative_log_ratios(d: Array, distance: Array, rows: Reference) -> tuple[Array, Array]:
    """Computes the t - t₀ and d + t - t₀ of eq. 9 in base 2, from d and d - d₀.

    The second has the rounding error of d, and approaches -ln β. If -ln β is small, compute the second from -d instead.
    """
    bounded = jnp.minimum(d, rows.most)
    e = jnp.exp2(bounded) * rows.other
    near = rows.start * (distance * _polynomial(EXPM1, distance))
    x = jnp.where(jnp.abs(distance) < 1.0, near, e - rows.start)
    log = jnp.where(jnp.abs(x) < NEAR_ONE, x * _polynomial(LOG1P, x), jnp.log2(e + rows.base))
    return -log - (d - bounded), bounded - log


def relative_signs(d: Array, at_p: Array) -> Array:
    """Computes the t - t₀ of eq. 11, in the units of a logarithm in base 2, from d and t₀."""
    return compare(d) * LOG2E - at_p


def _polynomial(coefficients: Sequence[float], x: Array) -> Array:
    value = x * coefficients[-1] + coefficients[-2]
    for coefficient in coefficients[-3::-1]:
        value = value * x + coefficient
    return value


class HeadOperands(NamedTuple):
    """The operands of one head in an epilogue."""

    call: Call
    row_scale: Any  # [Tp]


class KLRefs(NamedTuple):
    """The arrays that an epilogue reads and writes."""

    heads: tuple[HeadOperands, HeadOperands]  # the head of p is first
    mask: Any  # [512]
    output: Any  # [tiles, fields, Tp], or [T, columns]
    factors: Any = None  # [fields, Tp]
    cache: Any = None  # a `KLCache` of refs, if tiles are cached


class KLWhere(NamedTuple):
    """The place of a tile, and of its results."""

    column: Any  # the tile's first column in the shard
    number: Any  # the tile's place in the array of partial statistics
    num_columns: Any  # how many columns of the shard are not padding


type Multiply = Sequence[Callable[[], Any]]  # the products of p and of q, which must be called in this order


class HeldTile(NamedTuple):
    """A tile of x that is held until the other head's tile is computed."""

    blocks: Any  # [blocks, 64, 64] of this warpgroup
    load: Callable[[Any], Array]  # loads a part of the blocks, after a barrier of the warpgroup

    @classmethod
    def of(cls, x: Float[Array, "64 256"], blocks: Any, load: Callable[[Any], Array]) -> HeldTile:
        """Stores ``x`` in ``blocks``."""
        for i in range(BLOCKS):
            blocks.at[i][...] = take_block(x, i)
        return cls(blocks, load)

    def block(self, i: int) -> Float[Array, "64 64"]:
        """Loads the columns 64 i to 64 i + 63."""
        return self.load(self.blocks.at[i])

    def strip(self, column: int) -> Float[Array, "64 32"]:
        """Loads half of a block, for computations that need many registers per column."""
        block, first = divmod(column, STAGING_COLUMNS)
        return self.load(self.blocks.at[block, :, pl.ds(first, STRIP)])


type Hold = Callable[[Array], HeldTile]


def take_block(x: Float[Array, "64 256"], i: int) -> Float[Array, "64 64"]:
    """Returns block ``i`` of a tile in registers. `HeldTile.block` does this for a held tile."""
    return x[:, i * STAGING_COLUMNS : (i + 1) * STAGING_COLUMNS]


def take_strip(x: Float[Array, "64 256"], column: int) -> Float[Array, "64 32"]:
    """Returns the strip at ``column`` of a tile in registers. `HeldTile.strip` does this for a held tile."""
    return x[:, column : column + STRIP]


def compute_x(call: Call, z: Float[Array, "64 256"], mask: Any, where: KLWhere) -> Float[Array, "64 256"]:
    """Computes the x of eq. 0 from raw products, and marks padding. The row's scale is not applied."""
    return mask_padding(apply_softcap(call, z), where.column, where.num_columns, mask)


def update_tiles(
    generation: Generation,
    calls: tuple[Call, Call],
    epilogue: Callable[..., None],
    kernel: str,
    name: str,
    operands: Sequence[Any],
    updated: Sequence[Array],
) -> list[Array]:
    """Runs ``epilogue`` on the span's tiles, and returns the arrays that it updates; the statistics are first.

    ``operands`` may end with the rows' factors.
    """
    machine, both = generation.machine, make_matmuls(calls, generation.tunings.of(calls[0], kernel))
    run = machine.kernel_of_heads(
        both[0],
        functools.partial(_kernel_per_tile, machine, both, epilogue, len(updated)),
        [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in updated],
        name,
        updated={len(operands) + i: i for i in range(len(updated))},
    )
    return list(run(*operands, *updated))


def _kernel_per_tile(
    machine: Machine, matmuls: tuple[Matmul, Matmul], epilogue: Callable[..., None], num_updated: int, *refs: Any
) -> None:
    *arrays, row_scales, mask, scalars, (*rest, held) = unpack_refs(refs)
    # Updated inputs alias the outputs.
    factors, (output, *cached) = rest[: -2 * num_updated] or [None], rest[-num_updated:]
    span = Span.unpack(scalars)
    cache = KLCache(*cached) if cached else None
    tile_refs = KLRefs(make_head_operands(matmuls, row_scales), mask, output, factors[0], cache)

    def consume(tile: Tile, multiply: Multiply, held: Any) -> None:
        where = KLWhere(span.column + tile.column, span.slot + tile.vocabulary_tile, span.num_columns)
        epilogue(tile_refs, tile, where, multiply, functools.partial(machine.hold, held))

    walk_heads(machine, matmuls, arrays, span, consume, held)


def load_fields[F: (KLCoefficients, MixtureFactors)](kind: type[F], factors: Any, load: Callable[[Any], Array]) -> F:
    """Loads the factors of some rows in a kernel. ``load`` reads these rows of a vector."""
    return kind(*(load(factors.at[i]) for i in range(len(kind._fields))))


def store_fields(refs: KLRefs, where: KLWhere, rows: Callable[[], Any], fields: Sequence[Array]) -> None:
    """Stores a tile's statistics of these rows. ``rows()`` computes where they are, at each use."""
    for i, field in enumerate(fields):
        refs.output.at[where.number, i, rows()][...] = field


def store_references(cache: Any, where: KLWhere, rows: Callable[[], Any], stats: KLStatistics) -> None:
    """Stores the references of a cached tile."""
    tile = lax.div(where.column, jnp.int32(TILE_N))
    for i, field in enumerate(stats.references):
        cache.references.at[tile, i, rows()][...] = field


def make_matmuls(calls: tuple[Call, Call], tuning: Any) -> tuple[Matmul, Matmul]:
    """Returns the static part of each head's product."""
    first, second = (_logits.make_matmul(call, tuning) for call in calls)
    return first, second


def pack_operands(operands: KLOperands, span: Int[Array, "fields"]) -> list[Any]:
    """Returns the operands in the order in which a kernel gets them."""
    (p, q), mask = operands
    return [p.hidden, p.weight, q.hidden, q.weight, p.row_scale, q.row_scale, mask, span]


def unpack_refs(refs: Sequence[Any]) -> list[Any]:
    """Returns hidden and weight of p, those of q, a list of both scales, the mask, the span, and a list of the rest."""
    return [*refs[:4], refs[4:6], *refs[6:8], refs[8:]]


def make_head_operands(matmuls: tuple[Matmul, Matmul], row_scales: Sequence[Any]) -> tuple[HeadOperands, HeadOperands]:
    """Returns the operands of both heads in an epilogue."""
    first, second = (
        HeadOperands(matmul.call, row_scale) for matmul, row_scale in zip(matmuls, row_scales, strict=True)
    )
    return first, second


def walk_heads(
    machine: Machine, matmuls: tuple[Matmul, Matmul], arrays: Sequence[Any], span: Span, consume: Any, held: Any
) -> None:
    """Walks over both heads' logits in the unmasked row groups and the span's vocabulary tiles."""
    visit_all = _logits.make_visit(matmuls[0], span)
    of_heads = zip(matmuls, arrays[::2], arrays[1::2], strict=True)
    products = [Product(matmul, hidden, weight, _logits.num_steps(matmul)) for matmul, hidden, weight in of_heads]
    machine.walk_heads(products, Offset(column=span.offset), visit_all, consume, held)


def skip_padding[S](where: KLWhere, column: int, compute: Callable[[S], S], otherwise: Callable[[S], S], carry: S) -> S:
    """Returns ``compute(carry)`` for a strip with an unpadded column, and ``otherwise(carry)`` for other strips.

    The branch also keeps the compiler from interleaving strips, which would spill more registers.
    """
    return lax.cond(where.column + column < where.num_columns, compute, otherwise, carry)


class MixtureRows:
    """The rows of a strip, in a kernel. It reads their `MixtureFactors` and scales, each repeated along the strip.

    Each strip reads these numbers again, so that no register holds them between two strips.
    """

    def __init__(self, refs: KLRefs, rows: Callable[[], Any]) -> None:
        self._refs, self._rows = refs, rows

    def load(self, *names: str) -> list[Float[Array, "64 32"]]:
        """Returns the factors with these names."""
        return [self._load(self._refs.factors.at[MixtureFactors._fields.index(name)]) for name in names]

    def load_row_scales(self) -> list[Float[Array, "64 32"]]:
        """Returns the scale of each head; that of p is first."""
        return [self._load(head.row_scale) for head in self._refs.heads]

    def shift(self, x: tuple[Array, Array], k_p: Array, k_q: Array) -> list[Float[Array, "64 32"]]:
        """Returns the u of p and of q, and log2 s_p - log2 s_q."""
        max_p, max_q, log_sums = self.load("max_p", "max_q", "log_sums")
        return [jnp.minimum((x[0] - max_p) * k_p, 0.0), jnp.minimum((x[1] - max_q) * k_q, 0.0), log_sums]

    def _load(self, values: Any) -> Float[Array, "64 32"]:
        return along(ACCUMULATOR.load_rows(values, self._rows()), columns=STRIP)


class JSDRatios(NamedTuple):
    """A strip's `lce_jax.mathematics._kl.Ratios` and their logarithms in eq. 9, in base 2."""

    u_p: Array
    u_q: Array
    d: Array
    slope: Array  # t - t₀
    of_q: Array  # d + t - t₀

    @classmethod
    def of(cls, x: tuple[Array, Array], rows: MixtureRows) -> JSDRatios:
        """From both x."""
        k_p, k_q = rows.load_row_scales()
        u_p, u_q, log_sums = rows.shift(x, k_p, k_q)
        (at_p,) = rows.load("at_p")
        d, distance = (u_q - u_p) + log_sums, (x[1] - at_p) * k_q - u_p
        reference = Reference(*rows.load("base", "other", "start", "most"))
        return cls(u_p, u_q, d, *relative_log_ratios(d, distance, reference))

    def terms(self, rows: MixtureRows, is_above_half: Any) -> tuple[Array, Array]:
        """Returns the terms of both sums of eq. 9.

        Where ``is_above_half``, the rows with a β above ½ take the logarithm for q from the teacher's side.
        """

        def replace(of_q: Array) -> Array:
            student, teacher = rows.load("student", "teacher")
            reference = Reference(teacher, student, student, MOST)
            return jnp.where(teacher > 0.5, relative_log_ratio(-self.d, -self.d, reference), of_q)

        (log,) = rows.load("slope")
        of_q = lax.cond(is_above_half, replace, lambda of_q: of_q, self.of_q + log)
        return multiply_exp2(self.u_p, self.slope), multiply_exp2(self.u_q, of_q)


class TVRatios(NamedTuple):
    """A strip's `lce_jax.mathematics._kl.Ratios` and their signs in eq. 11, in base 2."""

    u_p: Array
    u_q: Array
    d: Array
    slope: Array  # t - t₀

    @classmethod
    def of(cls, x: tuple[Array, Array], rows: MixtureRows) -> TVRatios:
        """From both x."""
        u_p, u_q, log_sums = rows.shift(x, *rows.load_row_scales())
        d = (u_q - u_p) + log_sums
        return cls(u_p, u_q, d, relative_signs(d, *rows.load("slope")))

    def terms(self, rows: MixtureRows, is_above_half: Any) -> tuple[Array, Array]:
        """Returns the terms of both sums of eq. 11. Its β is never above ½."""
        del is_above_half
        (log_sums,), m = rows.load("log_sums"), -jnp.abs(self.d)
        difference = jnp.where(m > -1.0, -m * _polynomial(EXPM1, m), 1.0 - jnp.exp2(m))
        larger = jnp.maximum(self.u_q, self.u_p - log_sums)
        return multiply_exp2(self.u_p, self.slope), multiply_exp2(larger, difference * LOG2E)


RATIOS: dict[Direction, type[JSDRatios | TVRatios]] = {"jsd": JSDRatios, "tv": TVRatios}


def multiply_exp2(u: Float[Array, "64 n"], x: Float[Array, "64 n"]) -> Float[Array, "64 n"]:
    """Computes 2^u · x, which is 0 if 2^u is 0, even if x is infinite."""
    e = jnp.exp2(u)
    return jnp.where(e > 0.0, e * x, 0.0)


def scale_difference(x: Float[Array, "64 n"], reference: Float[Array, "64"], row_scale: Float[Array, "64"]) -> Any:
    """Computes (x - reference)·scale, which is 0 at the reference. A fused multiply-add would not be exactly 0."""
    columns = x.shape[1]
    return (x - ACCUMULATOR.along_rows(reference, columns)) * ACCUMULATOR.along_rows(row_scale, columns)
