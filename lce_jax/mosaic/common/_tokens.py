"""The steps of a pass between the products, as kernels. `lce_jax.run.kernels` calls them; elsewhere XLA compiles them.

prepare        labels, temperatures           ->  the per-token operands of the other kernels
finish         statistics                     ->  results (eq. 3), and what the backward needs
coefficients   saved fields, cotangents       ->  the factors of eq. 4
per_token      any function of a few numbers per token
total, copy_rows, copy, scale, zeros          rows of H numbers: dhidden from its splits, copies, a multiple, zeros

The first four have one thread per token. A block is one warpgroup, whose tokens are adjacent in memory. These kernels
call the functions that XLA compiles elsewhere, so the mathematics is written once. XLA's logarithm and division are
others, so its results differ in the last bit.

A program is compiled for R rows, and serves every number of tokens T up to R. The caller's arrays have T rows, or
`THREADS` rows if T is smaller than that.
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
from lce_jax.mosaic._chunks import count_groups
from lce_jax.mosaic._operands import LOG2E, Geometry, Marked, lay_out_saved, make_geometry
from lce_jax.mosaic._pallas import pl, plgpu
from lce_jax.mosaic.common._tiles import SCALED, TILE_N, TILING
from lce_jax.types import scalars
from lce_jax.types._types import Call, LogprobOutput, Results, RowCoefficients

if TYPE_CHECKING:
    from lce_jax.types._shapes import Array, Float, Int


THREADS = 128  # threads of a block, one per token


def on_all_threads(value: Any, dtype: Any = jnp.int32) -> Any:
    """Returns a number in the layout with one value per thread. All threads have the same value."""
    return per_thread(jnp.full((THREADS,), value, dtype))


def thread_numbers() -> Any:
    """Returns the number of each thread."""
    return per_thread(lax.iota(jnp.int32, THREADS))


def per_thread(values: Any) -> Any:
    """Returns ``values`` [128] in the layout in which each thread holds one value."""
    return plgpu.layout_cast(values, plgpu.Layout.WG_STRIDED((THREADS,), vec_size=1))


def mask_to_int(mask: Any) -> Any:
    """Returns 1 in threads where ``mask`` is true, else 0."""
    return jnp.where(mask, on_all_threads(1), on_all_threads(0))


def block_rows(block: Any) -> Any:
    """Returns the slice of a block's rows."""
    return pl.ds(pl.multiple_of(block * THREADS, THREADS), THREADS)


class BlockRows(NamedTuple):
    """The rows that a block computes in arrays that end with the last row.

    If the arrays end within the block, the block computes the last `THREADS` rows of the arrays instead. The previous
    block computes some of these rows, too.
    """

    first: Any  # the first of `THREADS` existing rows
    any_exist: Any  # whether any row of the block exists
    all_exist: Any  # whether all rows of the block exist

    @classmethod
    def of(cls, block: Any, count: Any) -> BlockRows:
        """Returns the rows of a block if ``count`` rows exist."""
        first = jnp.minimum(block * THREADS, jnp.maximum(count - THREADS, 0))
        return cls(first, block * THREADS < count, (block + 1) * THREADS <= count)

    @property
    def here(self) -> Any:
        """Where the rows are in a per-token array."""
        return pl.ds(self.first, THREADS)

    def field_rows(self, field: Any, stride: Any) -> Any:
        """Returns where the rows of a field are in a flat array, whose fields have ``stride`` numbers each."""
        return pl.ds(field * stride + self.first, THREADS)


def add_barrier(write: Callable[[], None]) -> Callable[[], None]:
    """Returns ``write`` followed by a barrier, after which other threads may write to the same places."""

    def run() -> None:
        write()
        plgpu.commit_smem()

    return run


STEP = 16  # a thread compares its tile with the tiles of this many tokens at a time
TILE_BITS = TILE_N.bit_length() - 1


def kernel(body: Callable[..., None], outputs: Sequence[Any], name: str, grid: dict[str, int], **more: Any) -> Any:
    """Makes a kernel without approximate functions, because these would differ more from XLA's."""
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
    """Computes the labels' columns in the shard, the rows' scales and floors, and which tiles hold a label.

    Args:
        call: the call of R tokens on the shard.
        labels: global ids, as int32 or as both halves of int64.
        temperatures: a flat array of fields, of which the one with the index ``field`` is read. None stands for 1.
        field: the index of the field with the temperatures.
        numbers: the number of rows, the stride of fields, the global id of the shard's first column, and the size of
            the whole vocabulary. The fifth entry is not used.
        ids: memory for int64 labels as int32; a label out of vocabulary becomes -1.
        floors: a flat array of fields, of which the one with the index ``floor_field`` is read; floors are logits. If
            it is None, every column counts.
        floor_field: the index of the field with the floors.
    """
    shape = make_geometry(call, TILING)
    blocks, parts = shape.padded_tokens // THREADS, -(-shape.num_tiles // THREADS)
    shapes = [(shape.padded_tokens,), (shape.padded_tokens,), (blocks, parts * THREADS)]
    outputs = list(map(jax.ShapeDtypeStruct, shapes, (jnp.int32, jnp.float32, jnp.int32)))
    outputs += [] if floors is None else [outputs[1]]
    operands, memory = [x for x in (labels, temperatures, floors) if x is not None], [] if ids is None else [ids]
    first = len(outputs)
    outputs += [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in memory]
    fields = None if temperatures is None else field, None if floors is None else floor_field
    body = functools.partial(_prepare, call, fields, bool(memory))
    updated = {len(operands) + 1: first} if memory else None
    run = kernel(body, outputs, "lce_prepare", {"rows": blocks, "part": parts}, updated=updated)
    results = run(*operands, numbers, *memory)
    return Marked(*results[:first]), results[first] if memory else None


def _prepare(call: Call, fields: tuple[int | None, int | None], in_halves: bool, labels: Any, *refs: Any) -> None:
    (field, floor_field), rest = fields, list(refs)
    temperatures: Any = None if field is None else rest.pop(0)
    floors: Any = None if floor_field is None else rest.pop(0)
    numbers, targets, row_scale, holds_target, *rest = rest[:1] + rest[1 + in_halves :]
    floor: Any = None if floor_field is None else rest.pop(0)
    part, block, shape = lax.axis_index("part"), lax.axis_index("rows"), make_geometry(call, TILING)
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
        inverse = None if field is None else _logprobs.invert_temperature(temperatures[rows.field_rows(field, stride)])
        k = LOG2E * float(_logprobs.compute_row_scale(call, None))
        targets.at[rows.here][...] = target()
        row_scale.at[rows.here][...] = on_all_threads(k, jnp.float32) if inverse is None else k * inverse
        if floor is not None:
            in_logits = floors[rows.field_rows(floor_field, stride)]
            floor.at[rows.here][...] = _logprobs.unscaled_floor(in_logits, _logprobs.compute_row_scale(call, inverse))
        for ref in rest:
            ref.at[rows.here][...] = label()

    def pad() -> None:
        targets.at[padded][...] = on_all_threads(-1)
        row_scale.at[padded][...] = on_all_threads(LOG2E, jnp.float32)
        if floor is not None:
            floor.at[padded][...] = on_all_threads(0.0, jnp.float32)

    def mark(tile_of_row: Any) -> None:
        pl.when((part == 0) & jnp.logical_not(rows.all_exist))(add_barrier(pad))
        pl.when((part == 0) & rows.any_exist)(write)
        place = lax.cond(rows.any_exist, target, lambda: on_all_threads(-1))
        tile_of_row[...] = lax.shift_right_arithmetic(place, on_all_threads(TILE_BITS))
        holds_target.at[block, block_rows(part)][...] = _mark_tiles(part, tile_of_row)

    pl.run_scoped(mark, plgpu.SMEM((THREADS,), jnp.int32))


def _mark_tiles(part: Any, tile_of_row: Any) -> Any:
    """Returns 1 in threads whose tile is that of some row, else 0. A ``part`` has `THREADS` tiles, one per thread."""
    number = on_all_threads(part * THREADS) + thread_numbers()

    def step(i: Any, marked: Any) -> Any:
        for j in range(STEP):
            marked = jnp.where(number == tile_of_row[i * STEP + j], 1, marked)
        return marked

    return lax.fori_loop(0, THREADS // STEP, step, on_all_threads(0))


def _place(shape: Geometry, column: Any) -> Any:
    """Computes `Geometry.place` in a kernel."""
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
    saved: Float[Array, "n"],
    vocab_size: int,
    megatron: bool,
    tags: Int[Array, "groups fields Tp"] | None = None,
    floors: Float[Array, "R"] | None = None,
) -> tuple[list[Float[Array, "R"]], Float[Array, "n"]]:
    """Computes the results from the statistics of the whole vocabulary, and saves what the backward needs.

    The results are the requested fields of `LogprobOutput`. `lay_out_saved` says which field of ``saved`` holds the
    temperature, the floor, and the statistics that gradients need, in nats.

    Args:
        call: the call of R tokens on the shard.
        joined: the statistics of the whole vocabulary, in nats.
        ids: global ids of the labels.
        temperatures: the tokens' temperatures. None stands for 1.
        numbers: the number of rows, and the stride of ``saved``.
        saved: a flat array; its field 0 is not changed.
        vocab_size: the size of the whole vocabulary.
        megatron: whether the logprob of an out-of-vocabulary label is -ln Σ e^u instead of 0.
        tags: the bits of the gathered statistics of a split vocabulary. In the first group of each shard, an additional
            last field has a tag for each token. Rows whose tags differ between shards get NaN.
        floors: the tokens' floors, as logits. If it is None, every column counts.
    """
    count = len(_operands.list_results(call))
    outputs = [jax.ShapeDtypeStruct((call.num_tokens,), jnp.float32)] * count
    outputs.append(jax.ShapeDtypeStruct(saved.shape, saved.dtype))
    operands = [joined, ids, *(x for x in (temperatures, tags, floors) if x is not None)]
    body = functools.partial(_finish, call, vocab_size, megatron, temperatures is not None, tags is not None)
    grid = {"rows": -(-call.num_tokens // THREADS)}
    *results, saved = kernel(body, outputs, "lce_finish", grid, updated={len(operands) + 1: count})(
        *operands, numbers, saved
    )
    return results, saved


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
    numbers, _, *results, saved = refs[has_temperature + is_split + call.has_floor :]
    rows, stride = BlockRows.of(lax.axis_index("rows"), numbers[0]), numbers[1]
    names, nan = _operands.list_statistics(call), on_all_threads(jnp.nan, jnp.float32)

    def write() -> None:
        temperature = temperatures[rows.here] if has_temperature else None
        stats = _statistics.make_statistics({name: joined[0, f, rows.here] for f, name in enumerate(names)})
        floor = floors[rows.here] if floors is not None else None
        for wrong in find_wrong_rows(temperature, floor):
            stats = jax.tree.map(lambda x, wrong=wrong: jnp.where(wrong, nan, x), stats)
        k = _logprobs.compute_row_scale(
            call, None if temperature is None else _logprobs.invert_temperature(temperature)
        )
        labels, groups = ids[rows.here], count_groups(make_geometry(call, TILING))  # the groups of one shard
        for first in range(groups, tags.shape[0] if is_split else 0, groups):
            other = tags[first, len(names), rows.here] != tags[0, len(names), rows.here]
            stats = jax.tree.map(lambda x, other=other: jnp.where(other, nan, x), stats)
            labels = jnp.where(other, on_all_threads(0), labels)  # without a label the result would be 0, not NaN
        counts = None if floor is None else _logprobs.exclude_empty_rows(None, stats.sumexp)
        out = _logprobs.finish(stats, k, labels, counts, vocab_size).outputs
        if megatron:
            sumexp = stats.sumexp if counts is None else jnp.where(counts, stats.sumexp, 1.0)
            out = out._replace(logprobs=jnp.where(labels >= 0, out.logprobs, -jnp.log(sumexp)))
        for ref, name in zip(results, _operands.list_results(call), strict=True):
            ref.at[rows.here][...] = getattr(out, name)
        if temperature is not None:
            saved.at[rows.field_rows(1, stride)][...] = temperature
        layout = lay_out_saved(call, has_temperature)
        if floor is not None:
            saved.at[rows.field_rows(layout.floor, stride)][...] = floor
        for field, name in enumerate(_operands.list_saved_statistics(call), layout.statistics):
            saved.at[rows.field_rows(field, stride)][...] = getattr(stats, name)

    pl.when(rows.any_exist)(write)


def coefficients(
    call: Call,
    saved: Float[Array, "n"],
    has_temperature: bool,
    seeds: dict[str, Float[Array, "R"]],
    numbers: Int[Array, "2"],
    vocab_size: int,
    seed_sums: Float[Array, "R"] | None = None,
) -> Float[Array, "factors Tp"]:
    """Computes the factors of eq. 4 from what `finish` saved. Rows after the last get zeros.

    ``seeds`` maps fields of `LogprobOutput` to their cotangents. ``seed_sums`` are the sums of the candidates'
    cotangents. ``numbers``: the number of rows, and the stride of ``saved``.
    """
    padded = make_geometry(call, TILING).padded_tokens
    output = jax.ShapeDtypeStruct((3 + ("entropy" in seeds), padded), jnp.float32)
    body = functools.partial(_coefficients, call, has_temperature, tuple(seeds), vocab_size)
    run = kernel(body, [output], "lce_coefficients", {"rows": padded // THREADS})
    return run(saved, numbers, *seeds.values(), *([] if seed_sums is None else [seed_sums]))[0]


def _coefficients(
    call: Call, has_temperature: bool, names: tuple[str, ...], vocab_size: int, saved: Any, numbers: Any, *refs: Any
) -> None:
    seeds, seed_sums, factors = refs[: len(names)], refs[len(names) : -1], refs[-1]
    block, stride = lax.axis_index("rows"), numbers[1]
    rows, padded = BlockRows.of(block, numbers[0]), block_rows(block)
    fields, layout = _operands.list_saved_statistics(call), lay_out_saved(call, has_temperature)

    def pad() -> None:
        for f in range(factors.shape[0]):
            factors.at[f, padded][...] = on_all_threads(0.0, jnp.float32)

    def write() -> None:
        first, zero = layout.statistics, on_all_threads(0.0, jnp.float32)
        stats = _statistics.make_statistics(
            {name: saved[rows.field_rows(first + f, stride)] for f, name in enumerate(fields)}
        )
        cotangents = {name: ref[rows.here] for name, ref in zip(names, seeds, strict=True)}
        entropy: Any = cotangents.get("entropy")
        seed = LogprobOutput(cotangents.get("logprobs", zero), entropy, cotangents.get("lse", zero))
        temperature = saved[rows.field_rows(1, stride)] if has_temperature else None
        inverse = None if temperature is None else _logprobs.invert_temperature(temperature)
        k, factor = _logprobs.compute_row_scale(call, inverse), _logprobs.compute_row_factor(call, inverse)
        candidate_sums = [sums[rows.here] for sums in seed_sums]
        floor = saved[rows.field_rows(layout.floor, stride)] if call.has_floor else None
        counts = None if floor is None else _logprobs.exclude_empty_rows(None, stats.sumexp)
        row_coefficients: RowCoefficients = _logprobs.row_coefficients(
            stats, Results(seed), k, factor, counts, call, vocab_size, *candidate_sums
        )
        for wrong in find_wrong_rows(temperature, floor):
            row_coefficients = _logprobs.zero_gradient(row_coefficients, wrong)
        # With few tokens, the rows after the last one are arbitrary.
        exists = on_all_threads(rows.first) + thread_numbers() < numbers[0]
        for f, x in enumerate(jax.tree.leaves(_operands.convert_to_base_2(row_coefficients))):
            factors.at[f, rows.here][...] = jnp.where(exists, x, zero)

    pl.when(jnp.logical_not(rows.all_exist))(add_barrier(pad))
    pl.when(rows.any_exist)(write)


def find_wrong_rows(temperature: Any, floor: Any) -> list[Any]:
    """Returns masks of the rows whose results must be NaN, because a temperature is invalid or a floor is NaN."""
    masks = [] if temperature is None else [is_wrong_temperature(temperature)]
    return masks if floor is None else [*masks, floor != floor]


def is_wrong_temperature(temperature: Any) -> Any:
    """Whether a temperature is invalid. It is computed without a negation, which kernels lack for masks."""
    return jnp.where(scalars.is_temperature(temperature), on_all_threads(0), on_all_threads(1)) > 0


def compute_per_token(function: Callable[..., Any], *operands: Any) -> Any:
    """Computes ``function(*operands)`` in a kernel, `THREADS` tokens at a time. Operands are trees of [T] arrays."""
    leaves: list[Any] = jax.tree.leaves(operands)
    tree: Any = jax.tree.structure(operands)
    count = leaves[0].shape[0]
    missing = max(THREADS - count, 0)
    padded = [jnp.pad(x, (0, missing)) for x in leaves] if missing else leaves
    block_types = [jax.ShapeDtypeStruct((THREADS,), x.dtype) for x in padded]
    result_types = jax.eval_shape(function, *tree.unflatten(block_types))
    results, out_tree = jax.tree.leaves(result_types), jax.tree.structure(result_types)
    run = _pallas.kernel(
        functools.partial(_kernel, function, tree, count + missing),
        out_type=[jax.ShapeDtypeStruct((count + missing,), x.dtype) for x in results],
        grid=(-(-count // THREADS),),
        grid_names=("rows",),
        compiler_params=plgpu.CompilerParams(approx_math=False),
        kernel_name="lce_per_token",
    )
    return jax.tree.unflatten(out_tree, [x[:count] for x in run(*padded)])


def _kernel(function: Callable[..., Any], tree: Any, count: int, *refs: Any) -> None:
    operands, results = refs[: tree.num_leaves], refs[tree.num_leaves :]
    rows = BlockRows.of(lax.axis_index("rows"), count)

    def write() -> None:
        values = function(*tree.unflatten([ref[rows.here] for ref in operands]))
        for ref, x in zip(results, jax.tree.leaves(values), strict=True):
            ref.at[rows.here][...] = x

    pl.when(rows.any_exist)(write)


COPIED = 512  # how many numbers a block copies at a time
SUMMED_ROWS = 4  # how many rows a block sums or copies


def total(call: Call, sums: Float[Array, "splits Tp Hp"], dtype: Any, numbers: Int[Array, "1"]) -> Float[Array, "R H"]:
    """Computes dhidden: it sums the splits in their order, and rounds once. ``numbers``: the number of rows."""
    width, grid = _make_pieces(call)
    output = jax.ShapeDtypeStruct((call.num_tokens, call.hidden_size), dtype)

    def body(sums: Any, numbers: Any, dhidden: Any) -> None:
        columns = _columns(call, width)
        first, last = lax.axis_index("rows") * SUMMED_ROWS, numbers[0] - 1

        def rows() -> None:
            for i in range(SUMMED_ROWS):
                row = jnp.minimum(first + i, last)  # instead of rows after the last one, that one is computed again
                x = functools.reduce(jnp.add, (sums[split, row, columns] for split in range(sums.shape[0])))
                dhidden.at[row, columns][...] = x.astype(dtype)

        pl.when(first <= last)(rows)

    return kernel(body, [output], "lce_total", grid)(sums, numbers)[0]


def _make_pieces(call: Call) -> tuple[int, dict[str, int]]:
    """Returns the columns that a block computes, and the grid. Only the last axis of a grid may exceed 65,535."""
    width = next(width for width in (COPIED, THREADS) if call.hidden_size >= width)
    return width, {"part": -(-call.hidden_size // width), "rows": call.num_tokens // SUMMED_ROWS}


def _columns(call: Call, width: int) -> Any:
    """Returns the columns of a block. The last part ends with the last column, and overlaps the part before it."""
    return pl.ds(jnp.minimum(lax.axis_index("part") * width, call.hidden_size - width), width)


def copy_rows(call: Call, hidden: Float[Array, "R H"], numbers: Int[Array, "1"]) -> Float[Array, "R H"]:
    """Copies the rows of hidden in the weight's dtype. As many rows of zeros follow as a kernel may read.

    ``numbers`` has one entry, the number of rows to copy.
    """
    width, grid = _make_pieces(call)
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
    """Copies a tile of the weight's rows. The weight and the copy are in whole atoms: [V / 8, 8 H].

    ``numbers``: the tile's first atom, and how many of its rows are not padding. Padding rows get zeros.
    """
    atom_size = TILING.atom * call.hidden_size
    output = jax.ShapeDtypeStruct((TILE_N // TILING.atom, atom_size), weight.dtype)
    layout = plgpu.Layout.WG_STRIDED((COPIED,), vec_size=COPIED // THREADS)

    def body(weight: Any, numbers: Any, copied: Any) -> None:
        atom, first = lax.axis_index("atom"), lax.axis_index("part") * COPIED
        columns = pl.ds(pl.multiple_of(first, COPIED), COPIED)
        source = jnp.minimum(numbers[0] + atom, weight.shape[0] - 1)
        count = (numbers[1] - atom * TILING.atom) * call.hidden_size - first
        number = plgpu.layout_cast(lax.iota(jnp.int32, COPIED), layout)
        values = plgpu.load(weight.at[source, columns], layout=layout, optimized=False)
        copied.at[atom, columns][...] = jnp.where(number < count, values, jnp.zeros((), values.dtype))

    return kernel(body, [output], "lce_copy", {"atom": output.shape[0], "part": atom_size // COPIED})(weight, numbers)[
        0
    ]


def scale(x: Float[Array, "n"], factor: Float[Array, "1"], dtype: Any, in_place: bool = False) -> Float[Array, "n"]:
    """Computes ``factor · x`` in float32 and rounds once to ``dtype``. n is a multiple of `SCALED`.

    With ``in_place``, ``dtype`` is the dtype of ``x``, and a factor of 1 reads and writes nothing.
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
    """Returns a float32 array whose first rows are zero. ``numbers``: how many. The other rows are not written."""
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
