"""The kernels of `lce_jax.linear_kl`: a tile of both heads' logits, and eqs. 6 and 8 to 10 from the two accumulators.

The tile of p is computed first and waits until that of q is there. Both products go through the same stages of shared
memory, so the operands of the second arrive while the first is multiplied. Inside, everything is in base 2.

`lce_jax.mathematics._kl` in a kernel: base 2, no division, and the hardware's own logarithm far from 1.

That one is off by up to 2^-22 wherever its result lies, so near 1 a polynomial is in its place.

The dlogits of two heads (eqs. 8, 10) from what their forward kept, one pass at the speed of memory.

`lce_jax.mathematics._kl` in base 2: what makes a tile's numbers those of the whole vocabulary is one number
per row and tile.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from lce_jax.mathematics._kl import Direction, KLCoefficients, KLStatistics, Mixture, MixtureCoefficients
from lce_jax.mosaic._call import Generation, KLMachine
from lce_jax.mosaic._operands import LOG2E, Span
from lce_jax.mosaic.common import _cached_dlogits, _logits
from lce_jax.mosaic.common._cached_dlogits import HELD, Block, BlockWalk, along, cap_derivative, of_cache
from lce_jax.mosaic.common._tiles import TILE_N, Matmul, Offset, Product, Tile
from lce_jax.types._types import Call

if TYPE_CHECKING:
    from lce_jax.types._shapes import Array, Float, Int


class KLHead(NamedTuple):
    """One head's operands, as the kernels take them."""

    hidden: Float[Array, "T H"]  # as in `Prepared`
    weight: Float[Array, "V H"]  # holds a span's part at its offset; zeros are read after its last row
    scale: Float[Array, "Tp"]  # the k of eq. 0 in base 2


class KLOperands(NamedTuple):
    """Both heads, that of p first, and the columns that are padding."""

    heads: tuple[KLHead, KLHead]
    mask: Int[Array, "2*tile"]  # as in `Prepared`


class KLCache(NamedTuple):
    """What the backward needs of the first vocabulary tiles to spare both heads' products: `_kept_ratios.Kept`."""

    e: Float[Array, "Tp columns"]  # whole tiles
    ratio: Float[Array, "Tp columns"]  # in base 2
    references: Float[Array, "tiles 3 Tp"]  # of each tile


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
    of_p: Array  # as in `MixtureCoefficients`, of a logarithm in base 2
    mean: Array


def mixture_factors(rows: Mixture | MixtureCoefficients, length: int) -> Float[Array, "14 Tp"]:
    """Of the sums' pass, or of the gradient's; 0 from the call's tokens to ``length``."""
    if isinstance(rows, MixtureCoefficients):
        rows, of_p, mean = rows
    else:
        of_p = mean = jnp.zeros_like(rows.log_sums)
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
        of_p=of_p * (1.0 / LOG2E),
        mean=mean * LOG2E,
    )
    stacked = jnp.stack([jnp.broadcast_to(x, of_p.shape).astype(jnp.float32) for x in found])
    return jnp.pad(stacked, ((0, 0), (0, length - stacked.shape[1])))


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

    case: Call
    scale: Any  # [Tp]


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


def kl_statistics(
    generation: Generation,
    cases: tuple[Call, Call],
    operands: KLOperands,
    span: Int[Array, "fields"],
    parts: Float[Array, "n 6 Tp"],
    cache: KLCache | None,
    direction: Direction,
) -> tuple[Float[Array, "n 6 Tp"], KLCache | None]:
    """``parts`` with the `KLStatistics` of the span's tiles: the fields in order, ``cross`` in base 2.

    The cache, if any, gets what the direction's gradient needs of these tiles.

    A tile of padding alone has a maximum of `_operands.FLOOR` and sums of 0. Tiles after the span and row
    blocks without a live row are left unwritten. Cases come as the heads do, that of p first.
    """
    given, name = _arrays(operands, span), "lce_kl_statistics" if cache is None else "lce_kl_statistics_cached"
    updated = [parts, *jax.tree.leaves(cache)]

    def epilogue(refs: KLRefs, *of_tile: Any) -> None:
        generation.machine.kl.statistics(refs, direction, *of_tile)

    parts, *kept = _updated(generation, cases, epilogue, "kl_statistics", name, given, updated)
    return parts, KLCache(*kept) if kept else None


def kl_mixture_sums(
    generation: Generation,
    cases: tuple[Call, Call],
    operands: KLOperands,
    factors: Float[Array, "14 Tp"],
    span: Int[Array, "fields"],
    parts: Float[Array, "n 2 Tp"],
) -> Float[Array, "n 2 Tp"]:
    """``parts`` with the `MixtureSums` of the span's tiles (eq. 9), in base 2; ``factors``: `MixtureFactors`.

    A tile of padding alone has sums of 0. What is left unwritten is as with `kl_statistics`.
    """
    given, epilogue = [*_arrays(operands, span), factors], generation.machine.kl.mixture_sums
    return _updated(generation, cases, epilogue, "kl_mixture_sums", "lce_kl_mixture_sums", given, [parts])[0]


def _updated(
    generation: Generation,
    cases: tuple[Call, Call],
    epilogue: Callable[..., None],
    kernel: str,
    name: str,
    given: Sequence[Any],
    updated: Sequence[Array],
) -> list[Array]:
    """``updated``, parts first, with what ``epilogue`` makes of the span's tiles.

    ``given`` may end with factors of the rows.
    """
    kl, matmuls = generation.machine.kl, _matmuls(cases, generation.tunings.of(cases[0], kernel))
    run = kl.kernel(
        matmuls[0],
        functools.partial(_kernel_per_tile, kl, matmuls, epilogue, len(updated)),
        [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in updated],
        name,
        updated={len(given) + i: i for i in range(len(updated))},
    )
    return list(run(*given, *updated))


def _kernel_per_tile(
    kl: KLMachine, matmuls: tuple[Matmul, Matmul], epilogue: Callable[..., None], num_updated: int, *refs: Any
) -> None:
    *arrays, scales, mask, scalars, (*rest, held) = _unpacked(refs)
    # What is updated, as it was, lies in the same places.
    factors, (output, *kept) = rest[: -2 * num_updated] or [None], rest[-num_updated:]
    span = Span.unpack(scalars)
    cache = KLCache(*kept) if kept else None
    of_kernel = KLRefs(_heads(matmuls, scales), mask, output, factors[0], cache)

    def consume(tile: Tile, multiply: Multiply, held: Any) -> None:
        where = KLWhere(span.column + tile.column, span.slot + tile.vocabulary_tile, span.num_columns)
        epilogue(of_kernel, tile, where, multiply, functools.partial(kl.hold, held))

    _walk(kl, matmuls, arrays, span, consume, held)


def kl_dlogits(
    generation: Generation,
    cases: tuple[Call, Call],
    operands: KLOperands,
    factors: Float[Array, "fields Tp"],
    span: Int[Array, "fields"],
    columns: int,
    direction: Direction,
) -> Float[Array, "Tp columns"]:
    """Eq. 8 or 10 in the student's raw products, in its weight's dtype, at the beginning of ``columns``.

    ``factors`` are the `KLCoefficients` in base 2, where u_p - v_q is log2 e times that of eq. 8, or of "jsd" the
    `MixtureFactors`. Zero on columns that are padding or do not exist; tiles after the span and row blocks without a
    live row are left unwritten.
    """
    kl, matmuls = generation.machine.kl, _matmuls(cases, generation.tunings.of(cases[0], "kl_dlogits"))
    output = jax.ShapeDtypeStruct((factors.shape[1], columns), cases[0].dtype)  # whole tiles
    body = functools.partial(_dlogits_kernel, kl, matmuls, direction)
    return kl.kernel(matmuls[0], body, [output], "lce_kl_dlogits")(*_arrays(operands, span), factors)[0]


def _dlogits_kernel(kl: KLMachine, matmuls: tuple[Matmul, Matmul], direction: Direction, *refs: Any) -> None:
    *arrays, scales, mask, scalars, (factors, output, held) = _unpacked(refs)
    span = Span.unpack(scalars)
    of_kernel = KLRefs(_heads(matmuls, scales), mask, output, factors)

    def consume(tile: Tile, multiply: Multiply, held: Any) -> None:
        where = KLWhere(span.column + tile.column, None, span.num_columns)
        kl.dlogits(of_kernel, direction, tile, where, multiply, functools.partial(kl.hold, held))

    _walk(kl, matmuls, arrays, span, consume, held)


def of_rows[F: (KLCoefficients, MixtureFactors)](kind: type[F], factors: Any, load: Callable[[Any], Array]) -> F:
    """In a kernel: the factors of some rows, which ``load`` reads from a vector."""
    return kind(*(load(factors.at[i]) for i in range(len(kind._fields))))


def store(refs: KLRefs, where: KLWhere, rows: Callable[[], Any], fields: Sequence[Array]) -> None:
    """Writes a tile's numbers of these rows, whose places are computed when they are needed."""
    for i, field in enumerate(fields):
        refs.output.at[where.number, i, rows()][...] = field


def store_references(cache: Any, where: KLWhere, rows: Callable[[], Any], stats: KLStatistics) -> None:
    """Writes those of a tile that is kept."""
    tile = lax.div(where.column, jnp.int32(TILE_N))
    for i, field in enumerate(stats.references):
        cache.references.at[tile, i, rows()][...] = field


def _matmuls(cases: tuple[Call, Call], tuning: Any) -> tuple[Matmul, Matmul]:
    first, second = (_logits.logits(case, tuning) for case in cases)
    return first, second


def _arrays(operands: KLOperands, span: Int[Array, "fields"]) -> list[Any]:
    (p, q), mask = operands
    return [p.hidden, p.weight, q.hidden, q.weight, p.scale, q.scale, mask, span]


def _unpacked(refs: Sequence[Any]) -> list[Any]:
    """The arrays with H in them, both heads' scales, the mask, the span, and the rest in one."""
    return [*refs[:4], refs[4:6], *refs[6:8], refs[8:]]


def _heads(matmuls: tuple[Matmul, Matmul], scales: Sequence[Any]) -> tuple[HeadOperands, HeadOperands]:
    first, second = (HeadOperands(own.case, scale) for own, scale in zip(matmuls, scales, strict=True))
    return first, second


def _walk(
    kl: KLMachine, matmuls: tuple[Matmul, Matmul], arrays: Sequence[Any], span: Span, consume: Any, held: Any
) -> None:
    """Over the logits of the live row groups and the span's vocabulary tiles."""
    visit_all = _logits.visit_all(matmuls[0], span)
    of_heads = zip(matmuls, arrays[::2], arrays[1::2], strict=True)
    products = [Product(matmul, hidden, weight, _logits.num_steps(matmul)) for matmul, hidden, weight in of_heads]
    kl.walk_products(products, Offset(column=span.offset), visit_all, consume, held)


def cached_kl_dlogits(
    generation: Generation,
    cases: tuple[Call, Call],
    operands: KLOperands,
    factors: Float[Array, "fields Tp"],
    cache: KLCache,
    span: Int[Array, "fields"],
    columns: int,
    direction: Direction,
) -> Float[Array, "Tp columns"]:
    """As `kl_dlogits`, in the place of the cache's exponentials: a block is read before it is written."""
    case = cases[direction == "forward"]  # the student's
    output = jax.ShapeDtypeStruct((factors.shape[1], columns), case.dtype)
    body = functools.partial(_kernel, generation, case, direction)
    scales = [head.scale for head in operands.heads]
    run = _cached_dlogits.kernel(generation, body, output, case, "lce_cached_kl_dlogits", cache[:2], {0: 0})
    return run(*cache, *scales, factors, span)[0]


def _kernel(
    generation: Generation,
    case: Call,
    direction: Direction,
    e: Any,
    ratio: Any,
    references: Any,  # [tiles of the cache, 3, Tp]
    scale_p: Any,  # [Tp]
    scale_q: Any,
    factors: Any,  # [fields, Tp]
    scalars: Any,  # a `Span`
    output: Any,
) -> None:
    gradient = functools.partial(_block_gradient, case, direction, references, (scale_p, scale_q), factors)
    _cached_dlogits.walk_blocks(generation, BlockWalk.of(Span.unpack(scalars)), [e, ratio], output, gradient)


def _block_gradient(
    case: Call,
    direction: Direction,
    references: Any,
    scales: Sequence[Any],
    factors: Any,
    block: Block,
    values: Sequence[Array],
) -> Array:
    """The gradient of one block: loads what its rows need, then eq. 8 or 10 and the cap's derivative."""
    load = functools.partial(HELD.load_rows, rows=block.rows)
    k_p, k_q = map(load, scales)
    max_p, max_q, at_p = (load(references.at[block.tile, i]) for i in range(3))
    rows: KLCoefficients | MixtureFactors
    rows = of_rows(MixtureFactors, factors, load) if direction == "jsd" else of_rows(KLCoefficients, factors, load)
    (e, log2_e), ratio = of_cache(values[0], case.dtype), values[1]
    down_p, down_q = (max_p - rows.max_p) * k_p, (max_q - rows.max_q) * k_q
    of_p, u = along(rows.of_p * jnp.exp2(down_p)), log2_e
    if isinstance(rows, MixtureFactors):
        reference = Reference(*map(along, (rows.own, rows.other, rows.start, rows.most)))
        d, to_distance = ratio + along(down_q - down_p + rows.log_sums), (max_q - rows.at_p) * k_q - down_p
        log = relative_log_ratio(d, ratio + along(to_distance), reference)
        gradient = e * of_p * (log - along(rows.mean))
    elif direction == "reverse":
        to_distance = (at_p - rows.at_p) * k_q - down_p
        gradient = e * of_p * -(ratio + along(to_distance) + along(rows.mean))
    else:
        below_p, below_q = jnp.minimum(-ratio, 0.0), jnp.minimum(ratio, 0.0)
        of_q, u = along(rows.of_q * jnp.exp2(down_q)), log2_e + below_q
        gradient = e * (jnp.exp2(below_q) * of_q - jnp.exp2(below_p) * of_p)
    if case.logit_softcap is not None:
        gradient = gradient * cap_derivative(u, *((max_q, k_q) if direction == "forward" else (max_p, k_p)))
    return jnp.where(e > 0.0, gradient, 0.0)  # on padding the ratio says nothing
