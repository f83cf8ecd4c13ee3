"""The steps of a pass that are no product of tiles, as kernels. For `lce_jax.run.kernels`: elsewhere XLA compiles them.

prepare        labels, temperatures           ->  what the other kernels need of each token
finish         statistics                     ->  results (eq. 3), and what the backward needs
coefficients   what was kept, cotangents      ->  the factors of eq. 4
per_token      any function of a few numbers per token
total, copy_rows, copy, scale, zeros          rows of H numbers: dhidden from its sums, copies, a multiple

The first four have one thread per token: a block is one warpgroup, whose tokens lie side by side in memory. They call
the functions that XLA compiles: the mathematics is written once. XLA has another logarithm and another division, so its
results differ from theirs in the last bit.

A program serves every number of tokens up to its own, R. The caller's arrays have T rows, or `THREADS` if that is more.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from lce_jax.mathematics import _logprobs, _statistics
from lce_jax.mosaic import _operands, _pallas
from lce_jax.mosaic._chunks import num_groups
from lce_jax.mosaic._operands import LOG2E, Geometry, Marked, geometry, lay_out_saved
from lce_jax.mosaic._pallas import pl, plgpu
from lce_jax.mosaic.common._tiles import SCALED, TILE_N, TILING
from lce_jax.types import scalars
from lce_jax.types._types import Call, LogprobOutput, Results, RowCoefficients

if TYPE_CHECKING:
    from lce_jax.types._shapes import Array, Float, Int


THREADS = 128  # of a block, a token each


def on_all_threads(value: Any, dtype: Any = jnp.int32) -> Any:
    """One number for all threads."""
    return per_thread(jnp.full((THREADS,), value, dtype))


def numbered() -> Any:
    """The number of each thread."""
    return per_thread(lax.iota(jnp.int32, THREADS))


def per_thread(values: Any) -> Any:
    """``values`` [128] as each thread holds its own."""
    return plgpu.layout_cast(values, plgpu.Layout.WG_STRIDED((THREADS,), vec_size=1))


def as_int(mask: Any) -> Any:
    """1 where a thread's own is true, else 0."""
    return jnp.where(mask, on_all_threads(1), on_all_threads(0))


def block_rows(block: Any) -> Any:
    """The rows of a block."""
    return pl.ds(pl.multiple_of(block * THREADS, THREADS), THREADS)


class BlockRows(NamedTuple):
    """The rows of a block where arrays end with the last row: their last `THREADS` rows, if its own are not all there.

    So it computes some rows that the block before it computes too.
    """

    first: Any  # of `THREADS` rows that are there
    live: Any  # whether any of its own is there
    whole: Any  # whether all of its own are

    @classmethod
    def of(cls, block: Any, count: Any) -> BlockRows:
        """The rows of a block where there are ``count``."""
        first = jnp.minimum(block * THREADS, jnp.maximum(count - THREADS, 0))
        return cls(first, block * THREADS < count, (block + 1) * THREADS <= count)

    @property
    def here(self) -> Any:
        """The rows of an array of one field."""
        return pl.ds(self.first, THREADS)

    def of_field(self, field: Any, stride: Any) -> Any:
        """The rows of a field of a flat array, whose fields lie one after the other, ``stride`` numbers each."""
        return pl.ds(field * stride + self.first, THREADS)


def before_others(write: Callable[[], None]) -> Callable[[], None]:
    """``write``, and then a barrier: other threads of the block write to some of the same places afterwards."""

    def run() -> None:
        write()
        plgpu.commit_smem()

    return run


STEP = 16  # tokens whose tiles are compared with the threads' at a time
TILE_BITS = TILE_N.bit_length() - 1


def kernel(body: Callable[..., None], outputs: Sequence[Any], name: str, grid: dict[str, int], **more: Any) -> Any:
    """Without approximations, which would be other functions than those that XLA compiles."""
    return _pallas.kernel(
        body,
        out_type=list(outputs),
        grid=tuple(grid.values()),
        grid_names=tuple(grid),
        compiler_params=plgpu.CompilerParams(approx_math=False),
        kernel_name=name,
        **more,
    )


def prepare(
    call: Call,
    labels: Int[Array, "R 2"] | Int[Array, "R"],
    temperatures: Float[Array, "n"] | None,
    field: int,
    numbers: Int[Array, "5"],
    ids: Int[Array, "R"] | None = None,
    floors: Float[Array, "n"] | None = None,
    floor_field: int = 0,
) -> tuple[Marked, Int[Array, "R"] | None]:
    """The shard's columns of the labels, the rows' scales and floors, and which tiles hold a label.

    Args:
        call: R tokens, and the shard.
        labels: global ids, or the halves of int64 numbers.
        temperatures: None: 1. They are the field ``field`` of a flat array.
        field: 0 if there is no other.
        numbers: how many rows there are, the stride of fields, the global id of the shard's first column, and the
                size of the whole vocabulary; one more is not read.
        ids: memory for the labels in int32, if they come in halves: -1 where they are out of vocabulary.
        floors: in logits, a flat array. None: every column counts.
        floor_field: the field of that array that they are.
    """
    shape = geometry(call, TILING)
    blocks, parts = shape.padded_tokens // THREADS, -(-shape.num_tiles // THREADS)
    shapes = [(shape.padded_tokens,), (shape.padded_tokens,), (blocks, parts * THREADS)]
    outputs = list(map(jax.ShapeDtypeStruct, shapes, (jnp.int32, jnp.float32, jnp.int32)))
    outputs += [] if floors is None else [outputs[1]]
    given, memory = [x for x in (labels, temperatures, floors) if x is not None], [] if ids is None else [ids]
    first = len(outputs)
    outputs += [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in memory]
    fields = None if temperatures is None else field, None if floors is None else floor_field
    body = functools.partial(_prepare, call, fields, bool(memory))
    updated = {len(given) + 1: first} if memory else None
    run = kernel(body, outputs, "lce_prepare", {"rows": blocks, "part": parts}, updated=updated)
    found = run(*given, numbers, *memory)
    return Marked(*found[:first]), found[first] if memory else None


def _prepare(call: Call, fields: tuple[int | None, int | None], in_halves: bool, labels: Any, *refs: Any) -> None:
    (field, floor_field), given = fields, list(refs)
    temperatures: Any = None if field is None else given.pop(0)
    floors: Any = None if floor_field is None else given.pop(0)
    numbers, targets, row_scale, holds_target, *rest = given[:1] + given[1 + in_halves :]
    floor: Any = None if floor_field is None else rest.pop(0)
    part, block, shape = lax.axis_index("part"), lax.axis_index("rows"), geometry(call, TILING)
    count, stride, start, vocab_size = (numbers[i] for i in range(4))
    rows, padded = BlockRows.of(block, count), block_rows(block)

    def label() -> Any:
        if not rest:
            return labels[rows.here]
        low, high = labels[rows.here, 0], labels[rows.here, 1]
        return jnp.where((high == 0) & (low >= 0) & (low < vocab_size), low, on_all_threads(-1))

    def target() -> Any:
        column = label() - on_all_threads(start)
        owned = (label() >= 0) & (label() < vocab_size) & (column >= 0) & (column < call.columns)
        return jnp.where(owned, _place(shape, column), on_all_threads(-1))

    def write() -> None:
        inverse = None if field is None else _logprobs.invert_temperature(temperatures[rows.of_field(field, stride)])
        k = LOG2E * float(_logprobs.compute_row_scale(call, None))
        targets.at[rows.here][...] = target()
        row_scale.at[rows.here][...] = on_all_threads(k, jnp.float32) if inverse is None else k * inverse
        if floor is not None:
            in_logits = floors[rows.of_field(floor_field, stride)]
            floor.at[rows.here][...] = _logprobs.unscaled_floor(in_logits, _logprobs.compute_row_scale(call, inverse))
        for ref in rest:
            ref.at[rows.here][...] = label()

    def pad() -> None:
        targets.at[padded][...] = on_all_threads(-1)
        row_scale.at[padded][...] = on_all_threads(LOG2E, jnp.float32)
        if floor is not None:
            floor.at[padded][...] = on_all_threads(0.0, jnp.float32)

    def mark(tile_of_row: Any) -> None:
        pl.when((part == 0) & jnp.logical_not(rows.whole))(before_others(pad))
        pl.when((part == 0) & rows.live)(write)
        place = lax.cond(rows.live, target, lambda: on_all_threads(-1))
        tile_of_row[...] = lax.shift_right_arithmetic(place, on_all_threads(TILE_BITS))
        holds_target.at[block, block_rows(part)][...] = _held(on_all_threads(part * THREADS) + numbered(), tile_of_row)

    pl.run_scoped(mark, plgpu.SMEM((THREADS,), jnp.int32))


def _held(number: Any, tile_of_row: Any) -> Any:
    """1 for each tile, by ``number``, that some row has."""

    def step(i: Any, found: Any) -> Any:
        for j in range(STEP):
            found = jnp.where(number == tile_of_row[i * STEP + j], 1, found)
        return found

    return lax.fori_loop(0, THREADS // STEP, step, on_all_threads(0))


def _place(shape: Geometry, column: Any) -> Any:
    """`Geometry.place`, in a kernel."""
    if not shape.has_parts:
        return column
    before = lax.div(jnp.maximum(column, on_all_threads(0)), on_all_threads(shape.part_columns))
    return column + before * on_all_threads(shape.overhang)


def finish(
    call: Call,
    joined: Float[Array, "1 fields Tp"],
    ids: Int[Array, "R"],
    temperatures: Float[Array, "R"] | None,
    numbers: Int[Array, "2"],
    kept: Float[Array, "n"],
    vocab_size: int,
    megatron: bool,
    tags: Int[Array, "groups fields Tp"] | None = None,
    floors: Float[Array, "R"] | None = None,
) -> tuple[list[Float[Array, "R"]], Float[Array, "n"]]:
    """The results of the whole vocabulary, and ``kept`` with what the backward needs, from its field 1 on.

    The results are the fields of `LogprobOutput` that there are. Kept are the temperature and the floor, if there
    is one, and after the fields of candidates the fields of `ShardStatistics` that gradients have, in nats.

    Args:
        call: R tokens, and the shard.
        joined: statistics of the whole vocabulary, in nats.
        ids: global ids of the labels.
        temperatures: None: 1.
        numbers: how many rows there are, and the stride of ``kept``.
        kept: flat; its field 0 is not touched.
        vocab_size: of the whole vocabulary.
        megatron: whether labels out of the vocabulary get -ln Σ e^u in place of 0.
        tags: of a vocabulary in parts, the bits of their groups' statistics, of which the field after the last has
            a tag for each token, in the first group of a part. Where these differ, the results are NaN.
        floors: in logits. None: every column counts.
    """
    count = len(_operands.result_statistics(call))
    outputs = [jax.ShapeDtypeStruct((call.num_tokens,), jnp.float32)] * count
    outputs.append(jax.ShapeDtypeStruct(kept.shape, kept.dtype))
    given = [joined, ids, *(x for x in (temperatures, tags, floors) if x is not None)]
    body = functools.partial(_finish, call, vocab_size, megatron, temperatures is not None, tags is not None)
    grid = {"rows": -(-call.num_tokens // THREADS)}
    *results, kept = kernel(body, outputs, "lce_finish", grid, updated={len(given) + 1: count})(*given, numbers, kept)
    return results, kept


def _finish(
    call: Call,
    vocab_size: int,
    megatron: bool,
    has_temperature: bool,
    is_split: bool,
    joined: Any,
    ids: Any,
    *refs: Any,
) -> None:
    temperatures: Any = refs[0] if has_temperature else None
    tags: Any = refs[has_temperature] if is_split else None
    floors: Any = refs[has_temperature + is_split] if call.has_floor else None
    numbers, _, *results, kept = refs[has_temperature + is_split + call.has_floor :]
    rows, stride = BlockRows.of(lax.axis_index("rows"), numbers[0]), numbers[1]
    names, nan = _operands.statistic_names(call), on_all_threads(jnp.nan, jnp.float32)

    def write() -> None:
        temperature = temperatures[rows.here] if has_temperature else None
        stats = _statistics.make_statistics({name: joined[0, f, rows.here] for f, name in enumerate(names)})
        floor = floors[rows.here] if floors is not None else None
        for wrong in wrong_rows(temperature, floor):
            stats = jax.tree.map(lambda x, wrong=wrong: jnp.where(wrong, nan, x), stats)
        k = _logprobs.compute_row_scale(
            call, None if temperature is None else _logprobs.invert_temperature(temperature)
        )
        labels, groups = ids[rows.here], num_groups(geometry(call, TILING))  # of a shard
        for first in range(groups, tags.shape[0] if is_split else 0, groups):
            other = tags[first, len(names), rows.here] != tags[0, len(names), rows.here]
            stats = jax.tree.map(lambda x, other=other: jnp.where(other, nan, x), stats)
            labels = jnp.where(other, on_all_threads(0), labels)  # the result of no label would be 0
        counts = None if floor is None else _logprobs.exclude_empty_rows(None, stats.sumexp)
        out = _logprobs.finish(stats, k, labels, counts, vocab_size).outputs
        if megatron:
            sumexp = stats.sumexp if counts is None else jnp.where(counts, stats.sumexp, 1.0)
            out = out._replace(logprobs=jnp.where(labels >= 0, out.logprobs, -jnp.log(sumexp)))
        for ref, name in zip(results, _operands.result_statistics(call), strict=True):
            ref.at[rows.here][...] = getattr(out, name)
        if temperature is not None:
            kept.at[rows.of_field(1, stride)][...] = temperature
        layout = lay_out_saved(call, has_temperature)
        if floor is not None:
            kept.at[rows.of_field(layout.floor, stride)][...] = floor
        for field, name in enumerate(_operands.kept_statistics(call), layout.statistics):
            kept.at[rows.of_field(field, stride)][...] = getattr(stats, name)

    pl.when(rows.live)(write)


def coefficients(
    call: Call,
    kept: Float[Array, "n"],
    has_temperature: bool,
    seeds: dict[str, Float[Array, "R"]],
    numbers: Int[Array, "2"],
    vocab_size: int,
    of_candidates: Float[Array, "R"] | None = None,
) -> Float[Array, "factors Tp"]:
    """The factors of eq. 4, zero from the last row on, from what `finish` kept.

    ``seeds`` are the cotangents that there are, by the fields of `LogprobOutput`, and ``of_candidates`` the Σ g of
    those of candidates. ``numbers`` are those of `finish`.
    """
    padded = geometry(call, TILING).padded_tokens
    output = jax.ShapeDtypeStruct((3 + ("entropy" in seeds), padded), jnp.float32)
    body = functools.partial(_coefficients, call, has_temperature, tuple(seeds), vocab_size)
    run = kernel(body, [output], "lce_coefficients", {"rows": padded // THREADS})
    return run(kept, numbers, *seeds.values(), *([] if of_candidates is None else [of_candidates]))[0]


def _coefficients(
    call: Call, has_temperature: bool, names: tuple[str, ...], vocab_size: int, kept: Any, numbers: Any, *refs: Any
) -> None:
    seeds, of_candidates, factors = refs[: len(names)], refs[len(names) : -1], refs[-1]
    block, stride = lax.axis_index("rows"), numbers[1]
    rows, padded = BlockRows.of(block, numbers[0]), block_rows(block)
    fields, layout = _operands.kept_statistics(call), lay_out_saved(call, has_temperature)

    def pad() -> None:
        for f in range(factors.shape[0]):
            factors.at[f, padded][...] = on_all_threads(0.0, jnp.float32)

    def write() -> None:
        first, zero = layout.statistics, on_all_threads(0.0, jnp.float32)
        stats = _statistics.make_statistics(
            {name: kept[rows.of_field(first + f, stride)] for f, name in enumerate(fields)}
        )
        given = {name: ref[rows.here] for name, ref in zip(names, seeds, strict=True)}
        entropy: Any = given.get("entropy")
        seed = LogprobOutput(given.get("logprobs", zero), entropy, given.get("lse", zero))
        temperature = kept[rows.of_field(1, stride)] if has_temperature else None
        inverse = None if temperature is None else _logprobs.invert_temperature(temperature)
        k, factor = _logprobs.compute_row_scale(call, inverse), _logprobs.compute_row_factor(call, inverse)
        given_to = [sums[rows.here] for sums in of_candidates]
        floor = kept[rows.of_field(layout.floor, stride)] if call.has_floor else None
        counts = None if floor is None else _logprobs.exclude_empty_rows(None, stats.sumexp)
        found: RowCoefficients = _logprobs.row_coefficients(
            stats, Results(seed), k, factor, counts, call, vocab_size, *given_to
        )
        for wrong in wrong_rows(temperature, floor):
            found = _logprobs.zero_gradient(found, wrong)
        # With few tokens the rows after them hold anything.
        there = on_all_threads(rows.first) + numbered() < numbers[0]
        for f, x in enumerate(jax.tree.leaves(_operands.in_base_2(found))):
            factors.at[f, rows.here][...] = jnp.where(there, x, zero)

    pl.when(jnp.logical_not(rows.whole))(before_others(pad))
    pl.when(rows.live)(write)


def wrong_rows(temperature: Any, floor: Any) -> list[Any]:
    """Masks of the rows that are NaN: those without such a temperature, and those whose floor is NaN."""
    found = [] if temperature is None else [is_wrong(temperature)]
    return found if floor is None else [*found, floor != floor]


def is_wrong(temperature: Any) -> Any:
    """Where there is no such temperature. The kernel language cannot negate a mask."""
    return jnp.where(scalars.is_temperature(temperature), on_all_threads(0), on_all_threads(1)) > 0


def per_token(function: Callable[..., Any], *operands: Any) -> Any:
    """``function(*operands)`` of trees of arrays [T], computed for `THREADS` tokens at a time."""
    leaves: list[Any] = jax.tree.leaves(operands)
    tree: Any = jax.tree.structure(operands)
    count = leaves[0].shape[0]
    missing = max(THREADS - count, 0)
    given = [jnp.pad(x, (0, missing)) for x in leaves] if missing else leaves
    of_block = [jax.ShapeDtypeStruct((THREADS,), x.dtype) for x in given]
    found = jax.eval_shape(function, *tree.unflatten(of_block))
    results, out_tree = jax.tree.leaves(found), jax.tree.structure(found)
    run = _pallas.kernel(
        functools.partial(_kernel, function, tree, count + missing),
        out_type=[jax.ShapeDtypeStruct((count + missing,), x.dtype) for x in results],
        grid=(-(-count // THREADS),),
        grid_names=("rows",),
        compiler_params=plgpu.CompilerParams(approx_math=False),
        kernel_name="lce_per_token",
    )
    return jax.tree.unflatten(out_tree, [x[:count] for x in run(*given)])


def _kernel(function: Callable[..., Any], tree: Any, count: int, *refs: Any) -> None:
    given, results = refs[: tree.num_leaves], refs[tree.num_leaves :]
    rows = BlockRows.of(lax.axis_index("rows"), count)

    def write() -> None:
        found = function(*tree.unflatten([ref[rows.here] for ref in given]))
        for ref, x in zip(results, jax.tree.leaves(found), strict=True):
            ref.at[rows.here][...] = x

    pl.when(rows.live)(write)


COPIED = 512  # numbers that a block copies at a time
SUMMED_ROWS = 4  # rows that a block adds up, or copies


def total(call: Call, sums: Float[Array, "splits Tp Hp"], dtype: Any, numbers: Int[Array, "1"]) -> Float[Array, "R H"]:
    """dhidden: the splits added up in their order, rounded once. ``numbers``: how many rows there are."""
    width, grid = _pieces(call)
    output = jax.ShapeDtypeStruct((call.num_tokens, call.hidden_size), dtype)

    def body(sums: Any, numbers: Any, dhidden: Any) -> None:
        columns = _columns(call, width)
        first, last = lax.axis_index("rows") * SUMMED_ROWS, numbers[0] - 1

        def rows() -> None:
            for i in range(SUMMED_ROWS):
                row = jnp.minimum(first + i, last)  # after the last one, that one again
                x = functools.reduce(jnp.add, (sums[split, row, columns] for split in range(sums.shape[0])))
                dhidden.at[row, columns][...] = x.astype(dtype)

        pl.when(first <= last)(rows)

    return kernel(body, [output], "lce_total", grid)(sums, numbers)[0]


def _pieces(call: Call) -> tuple[int, dict[str, int]]:
    """The columns that a block takes at a time, and the grid. Its last axis is the one that may exceed 65,535."""
    width = next(width for width in (COPIED, THREADS) if call.hidden_size >= width)
    return width, {"part": -(-call.hidden_size // width), "rows": call.num_tokens // SUMMED_ROWS}


def _columns(call: Call, width: int) -> Any:
    """Those of a block. The last part ends with the last column: it takes some of the part before it too."""
    return pl.ds(jnp.minimum(lax.axis_index("part") * width, call.hidden_size - width), width)


def copy_rows(call: Call, hidden: Float[Array, "R H"], numbers: Int[Array, "1"]) -> Float[Array, "R H"]:
    """The rows that there are, in the weight's dtype, then rows of zeros as far as any kernel looks beyond the last.

    ``numbers``: how many there are.
    """
    width, grid = _pieces(call)
    output = jax.ShapeDtypeStruct(hidden.shape, call.dtype)
    seen = TILING.row_block * TILING.most_clustered

    def body(hidden: Any, numbers: Any, copied: Any) -> None:
        columns = _columns(call, width)
        first, count = lax.axis_index("rows") * SUMMED_ROWS, numbers[0]

        def copy(row: Any) -> None:
            copied.at[row, columns][...] = hidden[row, columns].astype(call.dtype)

        def pad(row: Any) -> None:
            copied.at[row, columns][...] = jnp.zeros((width,), call.dtype)

        for row in [first + i for i in range(SUMMED_ROWS)]:
            pl.when(row < count)(functools.partial(copy, row))
            pl.when((row >= count) & (row < count + seen))(functools.partial(pad, row))

    return kernel(body, [output], "lce_rows", grid)(hidden, numbers)[0]


def copy(call: Call, weight: Float[Array, "atoms n"], numbers: Int[Array, "2"]) -> Float[Array, "tile_atoms n"]:
    """A tile of the weight's rows, of both in whole atoms: [V / 8, 8 H]. ``numbers``: its first atom, its true rows.

    The rows after these are zero.
    """
    atom_size = TILING.atom * call.hidden_size
    output = jax.ShapeDtypeStruct((TILE_N // TILING.atom, atom_size), weight.dtype)
    layout = plgpu.Layout.WG_STRIDED((COPIED,), vec_size=COPIED // THREADS)

    def body(weight: Any, numbers: Any, copied: Any) -> None:
        atom, first = lax.axis_index("atom"), lax.axis_index("part") * COPIED
        columns = pl.ds(pl.multiple_of(first, COPIED), COPIED)
        source = jnp.minimum(numbers[0] + atom, weight.shape[0] - 1)
        there = (numbers[1] - atom * TILING.atom) * call.hidden_size - first
        number = plgpu.layout_cast(lax.iota(jnp.int32, COPIED), layout)
        values = plgpu.load(weight.at[source, columns], layout=layout, optimized=False)
        copied.at[atom, columns][...] = jnp.where(number < there, values, jnp.zeros((), values.dtype))

    return kernel(body, [output], "lce_copy", {"atom": output.shape[0], "part": atom_size // COPIED})(weight, numbers)[
        0
    ]


def scale(x: Float[Array, "n"], factor: Float[Array, "1"], dtype: Any, in_place: bool = False) -> Float[Array, "n"]:
    """``factor · x`` in float32, rounded once. n is a multiple of `SCALED`. ``in_place``, a factor of 1 moves nothing.

    What is not in place is rounded to ``dtype``; in place, that is the dtype of ``x``.
    """
    layout = plgpu.Layout.WG_STRIDED((COPIED,), vec_size=COPIED // THREADS)

    def body(x: Any, factor: Any, scaled: Any) -> None:
        def multiply() -> None:
            k = plgpu.layout_cast(jnp.full((COPIED,), factor[0], jnp.float32), layout)
            for i in range(SCALED // COPIED):
                first = lax.axis_index("part") * SCALED + i * COPIED
                numbers = pl.ds(pl.multiple_of(first, COPIED), COPIED)
                values = plgpu.load(x.at[numbers], layout=layout, optimized=False)
                scaled.at[numbers][...] = (k * values.astype(jnp.float32)).astype(dtype)

        if in_place:
            pl.when(factor[0] != 1.0)(multiply)
        else:
            multiply()

    output, updated = jax.ShapeDtypeStruct(x.shape, dtype), {0: 0} if in_place else None
    return kernel(body, [output], "lce_scale", {"part": x.shape[0] // SCALED}, updated=updated)(x, factor)[0]


def zeros(shape: tuple[int, int, int], numbers: Int[Array, "1"]) -> Float[Array, "splits Tp Hp"]:
    """The first rows of an array, so many as ``numbers`` says, in float32; the others are left unwritten."""
    output, width = jax.ShapeDtypeStruct(shape, jnp.float32), 2 * THREADS
    layout = plgpu.Layout.WG_STRIDED((width,), vec_size=width // THREADS)

    def body(numbers: Any, output: Any) -> None:
        split, row = lax.axis_index("split"), lax.axis_index("row")

        def clear() -> None:
            for column in range(0, shape[2], width):
                value = plgpu.layout_cast(jnp.zeros((width,), jnp.float32), layout)
                output.at[split, row, pl.ds(column, width)][...] = value

        pl.when(row < numbers[0])(clear)

    return kernel(body, [output], "lce_zeros", {"split": shape[0], "row": shape[1]})(numbers)[0]
