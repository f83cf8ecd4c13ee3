"""The plan of a call, which `explain` returns: its tiles, the bytes of its arrays, and notes."""

from __future__ import annotations

import math
from typing import NamedTuple

from lce_jax.mosaic import _chunks, _operands
from lce_jax.mosaic._call import Generation
from lce_jax.mosaic._operands import Geometry, make_geometry
from lce_jax.mosaic.common._tiles import active_tiles_shape
from lce_jax.types._types import OVERWRITES, Call, Plan, cache_notes, candidate_notes
from lce_jax.types.scalars import format_bytes
from lce_jax.xla._kl import KLPlan


def plan(call: Call, generation: Generation, name: str) -> Plan:
    """Returns the plan of ``call``: its tiles and their bytes."""
    shape = make_geometry(call, generation.tiling)
    backward_shape = make_geometry(call.single_part, generation.tiling)
    backward = _plan_backward(call, backward_shape, generation)
    copied = _copied_bytes(call, shape)
    groups = _chunks.count_groups(shape)
    gathered = groups * call.shards if call.shards > 1 else 0
    fields = len(_operands.list_statistics(call))
    arrays = _chunks.choose_launch_tiles(fields, shape, generation.budget) + groups + gathered
    statistics = 4 * fields * arrays * shape.padded_tokens
    has_threshold = call.gradient_threshold > 0
    maxima = (1 + call.reports_dropped_mass) * 4 * shape.num_tiles * shape.padded_tokens if has_threshold else 0
    mask = 4 * math.prod(active_tiles_shape(call)) if has_threshold else 0
    cached = _chunks.count_cached_tiles(call, shape)
    return Plan(
        implementation=name,
        refused={},
        call=call,
        tiles={
            "tokens": shape.row_block,
            "vocabulary": shape.tile,
            **_tile_sizes(call, generation),
            "backward chunk": backward.columns,
        },
        forward_bytes=statistics + maxima + copied + call.candidate_bytes,
        backward_bytes=backward.num_bytes + copied + call.candidate_bytes,
        kept_bytes=call.statistics_bytes + cached * _chunks.cached_tile_bytes(call, shape) + mask,
        logits_bytes=call.num_tokens * call.columns * 4,
        notes=_notes(call, shape),
        full_cache_bytes=backward_shape.num_tiles * _chunks.cached_tile_bytes(call, shape),
        same_bits=_same_bits(call, shape),
    )


def kl_plan(kl: KLPlan, generation: Generation, name: str) -> Plan:
    """Returns the plan of `lce_jax.linear_kl` on one device."""
    student, teacher = kl.calls
    shape = make_geometry(student, generation.tiling)
    copied = [_copied_bytes(call, make_geometry(call, generation.tiling)) for call in kl.calls]
    cached, tiles = _chunks.count_cached_kl_tiles(kl, shape), shape.count_tiles(kl.columns)
    left, overwritten = shape.num_tiles - cached, cached if _chunks.can_overwrite_cache(shape) else 0
    chunks = _chunks.choose_chunks(student, shape, generation.budget, left, overwritten)
    chunk = 0 if chunks.in_cache else chunks.num_tiles * shape.tile
    arrays = _chunks.choose_launch_tiles(_chunks.KL_FIELDS, shape, generation.budget) + _chunks.count_groups(shape)
    statistics = 4 * _chunks.KL_FIELDS * arrays * shape.padded_tokens
    sums = 4 * math.prod(_chunks.dhidden_shape(student, shape))
    # The bytes of the copies of hidden states, and of memory for held tiles of one head.
    copies = sum(copied) + generation.machine.held_bytes * student.device.core_count
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
        forward_bytes=statistics + copies,
        backward_bytes=shape.padded_tokens * chunk * student.dtype.itemsize + sums + copies,
        kept_bytes=kl.saved_numbers * 4 * student.num_tokens + cached * _chunks.cached_kl_tile_bytes(kl, shape),
        logits_bytes=student.num_tokens * min(student.columns, teacher.columns) * 4,
        notes=(
            f"linear_kl: the teacher (hidden size {teacher.hidden_size:,}, {teacher.dtype.name}) adds a product to "
            f"each pass, and {format_bytes(copied[1])} for copies of its hidden states",
            *cache_notes(student, cached, tiles, _chunks.cached_kl_tile_bytes(kl, shape)),
            *([OVERWRITES] if cached else []),
        ),
        full_cache_bytes=tiles * _chunks.cached_kl_tile_bytes(kl, shape),
    )


def _tile_sizes(call: Call, generation: Generation) -> dict[str, int]:
    """Returns the tile sizes of the two kernels that contract H."""
    forward, backward = (generation.tunings.of(call, kernel) for kernel in ("forward", "dlogits"))
    return {
        "hidden forward": forward.tile_k,
        "stages forward": forward.stages,
        "hidden backward": backward.tile_k,
        "stages backward": backward.stages,
    }


def _kl_tile_sizes(student: Call, generation: Generation) -> dict[str, int]:
    """Returns the tile sizes of the two kernels that contract H, for a call with two heads."""
    forward, backward = (generation.tunings.of(student, f"kl_{kernel}") for kernel in ("statistics", "dlogits"))
    return {"hidden": forward.tile_k, "stages forward": forward.stages, "stages backward": backward.stages}


class _BackwardPlan(NamedTuple):
    columns: int  # the columns of the largest chunk of dlogits
    num_bytes: int  # the bytes of dhidden, of such a chunk unless it overwrites the cache, and of the copies for it


def _plan_backward(call: Call, shape: Geometry, generation: Generation) -> _BackwardPlan:
    item = call.dtype.itemsize
    sums = 4 * math.prod(_chunks.dhidden_shape(call, shape))
    adapter_sums = 4 * math.prod(_chunks.dhidden_shape(call.replace(hidden_size=call.rank), shape)) if call.rank else 0
    cached = _chunks.count_cached_tiles(call, shape)
    overwritten = cached if _chunks.can_overwrite_cache(shape) else 0
    parts = (cached - overwritten, 0), (shape.num_tiles - cached, overwritten)  # tiles, and how many have free memory
    chunks = [_chunks.choose_chunks(call, shape, generation.budget, *part) for part in parts]
    columns = max((one.num_tiles for one in chunks if not one.in_cache), default=0) * shape.tile
    if call.gradient_threshold:
        slots = _chunks.choose_active_slots(
            call, shape, generation.budget, generation.tunings.of(call, "dlogits").cluster
        )
        lists = 5 * 4 * shape.num_tiles * shape.row_blocks
        return _BackwardPlan(columns, slots * shape.row_block * shape.tile * item + lists + sums)
    if overwritten == shape.num_tiles and _writes_dhidden_once(call, shape):
        sums = 0
    sums += adapter_sums
    copied = 1 + call.gradients.weight  # the weight, and dweight if requested
    copies = 0 if shape.whole_atoms else copied * columns * call.hidden_size * item
    return _BackwardPlan(max(columns, overwritten * shape.tile), shape.tokens * columns * item + copies + sums)


def _writes_dhidden_once(call: Call, shape: Geometry) -> bool:
    """Whether there is a single chunk, so that one launch computes all of dhidden and rounds it."""
    is_all = call.shards == 1 and call.vocab_size == call.columns
    return is_all and not call.mean_logit and _chunks.dhidden_shape(call, shape)[0] == 1


def _copied_bytes(call: Call, shape: Geometry) -> int:
    """Returns the bytes of hidden's copies: cast or reordered, padded, gathered, with u, in float32 for the mean."""
    width = call.hidden_size + call.rank
    hidden = call.num_tokens * width * call.dtype.itemsize
    moved = hidden if call.partial_rows or call.hidden_dtype != call.dtype else 0
    padded = shape.tokens * width * call.dtype.itemsize if shape.tokens != call.num_tokens else 0
    gathered = hidden if call.gather_dim is not None else 0
    joined = call.num_tokens * width * call.hidden_dtype.itemsize if call.rank else 0  # hidden and u
    return moved + padded + gathered + joined + (call.num_tokens * call.hidden_size * 4 if call.mean_logit else 0)


def _same_bits(call: Call, shape: Geometry) -> str:
    columns, size, part = call.columns, _chunks.GROUP * shape.tile, call.vocab_part_size
    if part is not None:
        return f"in every call, over any number of shards of whole parts of {part:,} columns"
    if columns % size == 0:
        return f"in every call, over any number of shards of whole groups of {size:,} columns"
    if call.shards == 1:
        return "in every call of these columns"
    return f"in every call over {call.shards} shards, because {columns:,} columns are not a multiple of {size:,}"


def _notes(call: Call, shape: Geometry) -> tuple[str, ...]:
    notes = [*_threshold_notes(call, shape)]
    if shape.has_parts:
        notes.append(
            f"vocab_part_size={shape.part_columns}: {shape.part_tiles} tiles a part, {shape.num_tiles} in the forward "
            f"instead of {-(-call.columns // shape.tile)}"
        )
    if call.cache_budget and not call.gradient_threshold:
        cached = _chunks.count_cached_tiles(call, shape)
        notes += cache_notes(call, cached, shape.num_tiles, _chunks.cached_tile_bytes(call, shape))
        if cached and _chunks.can_overwrite_cache(shape):
            notes.append(OVERWRITES)
    if not shape.whole_atoms:
        notes.append(
            f"V is not a multiple of {shape.atom}: the backward copies the weight and its gradient, one chunk at a time"
        )
    return *notes, *candidate_notes(call)


def _threshold_notes(call: Call, shape: Geometry) -> tuple[str, ...]:
    """Returns notes on the skipped tiles and the bound of their gradient: p (|g| + |g'| (|ln p| + entropy))."""
    threshold = call.gradient_threshold
    if not threshold:
        return ()
    # p |ln p| rises until p is 1/e.
    entropy_term = -math.log(threshold) if threshold < math.exp(-1) else math.exp(-1) / threshold
    notes = [
        f"gradient_threshold={threshold:g}: the gradients skip tiles of {shape.row_block} tokens by {shape.tile} "
        f"columns without a label{' or a candidate' if call.num_candidates else ''} and without a probability "
        "of at least that",
        f"the skipped part of a logit's gradient is below {threshold:g} (|dlogprob - dlse| + |dentropy| "
        f"({entropy_term:.3g} + entropy))",
    ]
    if call.cache_bytes:
        notes.append(f"cache_bytes={call.cache_bytes} is not used: a backward over active tiles recomputes them")
    return tuple(notes)
