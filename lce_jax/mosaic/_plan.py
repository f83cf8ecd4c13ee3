"""What `explain` says of a call: its tiles, the bytes of the memory that its launches are given, and remarks."""

from __future__ import annotations

import math
from typing import NamedTuple

from lce_jax.mosaic import _chunks, _operands
from lce_jax.mosaic._call import Generation
from lce_jax.mosaic._operands import Geometry, geometry
from lce_jax.mosaic.common._tiles import live_shape
from lce_jax.types._types import OVERWRITES, Call, Plan, cache_notes, candidate_notes
from lce_jax.types.scalars import format_bytes
from lce_jax.xla._kl import KLPlan


def plan(case: Call, generation: Generation, name: str) -> Plan:
    """Tiles and bytes of ``case``."""
    shape = geometry(case, generation.tiling)
    of_gradients = geometry(case.without_parts, generation.tiling)
    backward = _backward(case, of_gradients, generation)
    copied = _copied_bytes(case, shape)
    groups = _chunks.num_groups(shape)
    gathered = groups * case.shards if case.shards > 1 else 0
    arrays = _chunks.launch_tiles(case, shape, generation.budget) + groups + gathered
    statistics = 4 * math.prod(_operands.statistics_shape(case, shape, arrays))
    live = case.gradient_threshold > 0
    maxima = (1 + case.reports_dropped_mass) * 4 * shape.num_tiles * shape.padded_tokens if live else 0
    mask = 4 * math.prod(live_shape(case)) if live else 0
    cached = _chunks.num_cached_tiles(case, shape)
    return Plan(
        implementation=name,
        refused={},
        call=case,
        tiles={
            "tokens": shape.row_block,
            "vocabulary": shape.tile,
            **_tile_sizes(case, generation),
            "backward chunk": backward.columns,
        },
        forward_bytes=statistics + maxima + copied + case.candidate_bytes,
        backward_bytes=backward.num_bytes + copied + case.candidate_bytes,
        kept_bytes=case.statistics_bytes + cached * _chunks.cached_tile_bytes(case, shape) + mask,
        logits_bytes=case.num_tokens * case.columns * 4,
        notes=_notes(case, shape),
        full_cache_bytes=of_gradients.num_tiles * _chunks.cached_tile_bytes(case, shape),
        same_bits=_same_bits(case, shape),
    )


def kl_plan(kl: KLPlan, generation: Generation, name: str) -> Plan:
    """Tiles and bytes of `lce_jax.linear_kl` on one device."""
    student, teacher = kl.cases
    shape = geometry(student, generation.tiling)
    copied = [_copied_bytes(case, geometry(case, generation.tiling)) for case in kl.cases]
    cached, tiles = _chunks.num_cached_kl_tiles(kl, shape), shape.tiles_of(kl.columns)
    left = shape.num_tiles - cached
    chunk = _chunks.chunk_tiles(student, shape, generation.budget, left) * shape.tile if left else 0
    statistics = (
        4 * shape.padded_tokens * _chunks.KL_FIELDS * _chunks.launch_kl_tiles(shape, generation.budget, kl.columns)
    )
    sums = 4 * math.prod(_chunks.dhidden_shape(student, shape))
    # Beside copies of hidden states where tiles of one head wait for the other's.
    beside = sum(copied) + generation.machine.held_bytes * student.device.core_count
    return Plan(
        implementation=name,
        refused={},
        call=student,
        tiles={
            "tokens": shape.row_block,
            "vocabulary": shape.tile,
            **_kl_tile_sizes(student, generation),
            "backward chunk": max(chunk, cached * shape.tile),
        },
        forward_bytes=statistics + beside,
        backward_bytes=shape.padded_tokens * chunk * student.dtype.itemsize + sums + beside,
        kept_bytes=kl.numbers_kept * 4 * student.num_tokens + cached * _chunks.cached_kl_tile_bytes(kl, shape),
        logits_bytes=student.num_tokens * min(student.columns, teacher.columns) * 4,
        notes=(
            f"linear_kl: the teacher (hidden size {teacher.hidden_size:,}, {teacher.dtype.name}) adds a product to "
            f"each pass, and {format_bytes(copied[1])} for copies of its hidden states",
            *cache_notes(student, cached, tiles, _chunks.cached_kl_tile_bytes(kl, shape)),
            *([OVERWRITES] if cached else []),
        ),
        full_cache_bytes=tiles * _chunks.cached_kl_tile_bytes(kl, shape),
    )


def _tile_sizes(case: Call, generation: Generation) -> dict[str, int]:
    """Of the two kernels that contract H."""
    forward, backward = (generation.tunings.of(case, kernel) for kernel in ("forward", "dlogits"))
    return {
        "hidden forward": forward.tile_k,
        "stages forward": forward.stages,
        "hidden backward": backward.tile_k,
        "stages backward": backward.stages,
    }


def _kl_tile_sizes(student: Call, generation: Generation) -> dict[str, int]:
    """Of both kernels that see two heads."""
    forward, backward = (generation.tunings.of(student, f"kl_{kernel}") for kernel in ("statistics", "dlogits"))
    return {"hidden": forward.tile_k, "stages forward": forward.stages, "stages backward": backward.stages}


class _Backward(NamedTuple):
    columns: int  # of the largest chunk of dlogits
    num_bytes: int  # of it, unless it lies where the cache was, of what it is copied from and to, and of dhidden


def _backward(case: Call, shape: Geometry, generation: Generation) -> _Backward:
    item = case.dtype.itemsize
    sums = 4 * math.prod(_chunks.dhidden_shape(case, shape))
    of_adapter = 4 * math.prod(_chunks.dhidden_shape(case.but(hidden_size=case.rank), shape)) if case.rank else 0
    cached = _chunks.num_cached_tiles(case, shape)
    overwritten = cached if _chunks.can_overwrite_cache(shape) else 0
    parts = [part for part in (cached - overwritten, shape.num_tiles - cached) if part]
    columns = max((_chunks.chunk_tiles(case, shape, generation.budget, part) for part in parts), default=0) * shape.tile
    if case.gradient_threshold:
        slots = _chunks.live_slots(case, shape, generation.budget, generation.tunings.of(case, "dlogits").cluster)
        lists = 5 * 4 * shape.num_tiles * shape.row_blocks
        return _Backward(columns, slots * shape.row_block * shape.tile * item + lists + sums)
    if overwritten == shape.num_tiles and _writes_dhidden_once(case, shape):
        sums = 0
    sums += of_adapter
    copied = 1 + case.gradients.weight  # the weight, and dweight
    copies = 0 if shape.whole_atoms else copied * columns * case.hidden_size * item
    return _Backward(max(columns, overwritten * shape.tile), shape.tokens * columns * item + copies + sums)


def _writes_dhidden_once(case: Call, shape: Geometry) -> bool:
    """Whether the one chunk that there is is contracted by one launch, which rounds."""
    whole = case.shards == 1 and case.vocab_size == case.columns
    return whole and not case.mean_logit and _chunks.dhidden_shape(case, shape)[0] == 1


def _copied_bytes(case: Call, shape: Geometry) -> int:
    """Of copies of hidden: cast or its rows moved, padded, gathered, beside u, and in float32 for its mean logit."""
    width = case.hidden_size + case.rank
    hidden = case.num_tokens * width * case.dtype.itemsize
    moved = hidden if case.partial_rows or case.hidden_dtype != case.dtype else 0
    padded = shape.tokens * width * case.dtype.itemsize if shape.tokens != case.num_tokens else 0
    gathered = hidden if case.gather_dim is not None else 0
    beside = case.num_tokens * width * case.hidden_dtype.itemsize if case.rank else 0
    return moved + padded + gathered + beside + (case.num_tokens * case.hidden_size * 4 if case.mean_logit else 0)


def _same_bits(case: Call, shape: Geometry) -> str:
    columns, size, part = case.columns, _chunks.GROUP * shape.tile, case.vocab_part_size
    if part is not None:
        return f"in every call, over any number of shards of whole parts of {part:,} columns"
    if columns % size == 0:
        return f"in every call, over any number of shards of whole groups of {size:,} columns"
    if case.shards == 1:
        return "in every call of these columns"
    return f"in every call over {case.shards} shards: {columns:,} columns are no whole groups of {size:,}"


def _notes(case: Call, shape: Geometry) -> tuple[str, ...]:
    notes = [*_threshold_notes(case, shape)]
    if shape.has_parts:
        notes.append(
            f"vocab_part_size={shape.part_columns}: {shape.part_tiles} tiles a part, {shape.num_tiles} in the forward "
            f"in place of {-(-case.columns // shape.tile)}"
        )
    if case.cache_budget and not case.gradient_threshold:
        cached = _chunks.num_cached_tiles(case, shape)
        notes += cache_notes(case, cached, shape.num_tiles, _chunks.cached_tile_bytes(case, shape))
        if cached and _chunks.can_overwrite_cache(shape):
            notes.append(OVERWRITES)
    if not shape.whole_atoms:
        notes.append(
            f"V is no multiple of {shape.atom}: the backward copies the weight and its gradient, one chunk at a time"
        )
    return *notes, *candidate_notes(case)


def _threshold_notes(case: Call, shape: Geometry) -> tuple[str, ...]:
    """What is left out, and how far off it puts the gradient in a logit: p (|g| + |g'| (|ln p| + entropy))."""
    threshold = case.gradient_threshold
    if not threshold:
        return ()
    of_entropy = -math.log(threshold) if threshold < math.exp(-1) else math.exp(-1) / threshold  # p |ln p| rises to 1/e
    notes = [
        f"gradient_threshold={threshold:g}: the gradients leave out tiles of {shape.row_block} tokens by {shape.tile} "
        f"columns without a label{' or a candidate' if case.num_candidates else ''} and without a probability "
        "of at least that",
        f"what is left out of a logit's gradient is below {threshold:g} (|dlogprob - dlse| + |dentropy| "
        f"({of_entropy:.3g} + entropy))",
    ]
    if case.cache_bytes:
        notes.append(f"cache_bytes={case.cache_bytes} is not used: a backward over live tiles recomputes them")
    return tuple(notes)
