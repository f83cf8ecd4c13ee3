"""What `explain` says of a call: its tiles, the bytes it will hold, and remarks."""

from __future__ import annotations

import math
from typing import NamedTuple

from lce_jax._plans import OVERWRITES, Plan, Surroundings, candidate_notes, format_bytes
from lce_jax._types import Case
from lce_jax.mosaic import _cache, _chunks, _dhidden, _partial_statistics
from lce_jax.mosaic._geometry import Geometry, geometry
from lce_jax.mosaic._kernel_set import KernelSet


def plan(case: Case, kernels: KernelSet, name: str, around: Surroundings) -> Plan:
    """Tiles and bytes of ``case``."""
    shape = geometry(case, kernels.tiling)
    of_gradients = geometry(case.without_parts, kernels.tiling)
    backward = _backward_columns(case, of_gradients, kernels)
    live = _live_bytes(case, shape, kernels)
    copies = copied_bytes(case, shape, around)
    launch = _chunks.launch_tiles(case, shape, kernels.budget)
    groups = _chunks.num_groups(shape)
    gathered = groups * around.shards if around.shards > 1 else 0
    statistics = 4 * math.prod(_partial_statistics.array_shape(case, shape, launch + groups + gathered))
    cached = _cache.num_cached_tiles(case, shape)
    return Plan(
        implementation=name,
        refused={},
        case=case,
        tiles={
            "tokens": shape.row_block,
            "vocabulary": shape.tile,
            **kernels.tile_sizes(case),
            "backward chunk": max(backward.chunk, backward.overwritten),
        },
        forward_bytes=statistics + copies.forward + case.candidate_bytes + live.forward,
        backward_bytes=shape.tokens * backward.chunk * case.dtype.itemsize
        + live.backward
        + math.prod(_dhidden.sums_shape(case, shape)) * 4
        + (0 if shape.whole_atoms else 2 * backward.chunk * case.hidden_size * case.dtype.itemsize)
        + copies.backward
        + case.candidate_bytes,
        kept_bytes=case.statistics_bytes + cached * _cache.tile_bytes(case, shape) + live.kept,
        logits_bytes=case.num_tokens * case.vocab_size * 4,
        notes=_notes(case, shape),
        full_cache_bytes=of_gradients.num_tiles * _cache.tile_bytes(case, shape),
        same_bits=_same_bits(case, shape, around),
    )


class _Columns(NamedTuple):
    chunk: int  # of the largest chunk of dlogits that needs memory of its own
    overwritten: int  # of the cache, where dlogits take its place


def _backward_columns(case: Case, shape: Geometry, kernels: KernelSet) -> _Columns:
    cached = _cache.num_cached_tiles(case, shape)
    overwritten = cached if _cache.can_be_overwritten(shape) else 0
    parts = [part for part in (cached - overwritten, shape.num_tiles - cached) if part]
    chunk = max((_chunks.chunk_tiles(case, shape, kernels.budget, part) for part in parts), default=0)
    return _Columns(chunk * shape.tile, overwritten * shape.tile)


class _Live(NamedTuple):
    """What a ``gradient_threshold`` adds."""

    forward: int = 0  # bytes of what the forward holds of each tile until the live ones are known
    kept: int = 0  # the mask of the live ones
    backward: int = 0  # their lists


def _live_bytes(case: Case, shape: Geometry, kernels: KernelSet) -> _Live:
    if not case.options.gradient_threshold:
        return _Live()
    maxima = (1 + case.options.reports_dropped_mass) * 4 * shape.num_tiles * shape.padded_tokens
    lists = 5 * 4 * shape.num_tiles * shape.row_blocks
    return _Live(maxima, 4 * math.prod(kernels.live_shape(case)), lists)


class Copies(NamedTuple):
    forward: int  # bytes
    backward: int


def copied_bytes(case: Case, shape: Geometry, around: Surroundings) -> Copies:
    """Copies of operands and of gradients that a pass makes beside the kernels."""
    hidden = case.num_tokens * case.hidden_size * case.dtype.itemsize
    compacted = hidden if case.partial_rows else 0
    padded = shape.tokens * case.hidden_size * case.dtype.itemsize if shape.tokens != case.num_tokens else 0
    gathered = hidden if around.gathers_hidden else 0
    in_float32 = case.num_tokens * case.hidden_size * 4 if case.options.mean_logit else 0  # hidden, for its mean logit
    summed = case.vocab_size * case.hidden_size * case.dtype.itemsize if around.sums_dweight else 0
    both = padded + gathered + in_float32
    return Copies(both + compacted, both + 2 * compacted + summed)


def _same_bits(case: Case, shape: Geometry, around: Surroundings) -> str:
    columns, size, part = case.vocab_size, _chunks.GROUP * shape.tile, case.options.vocab_part_size
    if part is not None:
        return f"in every call, over any number of shards of whole parts of {part:,} columns"
    if columns % size == 0:
        return f"in every call, over any number of shards of whole groups of {size:,} columns"
    if around.shards == 1:
        return "in every call of these columns"
    return f"in every call over {around.shards} shards: {columns:,} columns are no whole groups of {size:,}"


def _notes(case: Case, shape: Geometry) -> tuple[str, ...]:
    notes = [*_threshold_notes(case, shape)]
    if shape.has_parts:
        notes.append(
            f"vocab_part_size={shape.part_columns}: {shape.part_tiles} tiles a part, {shape.num_tiles} in the forward "
            f"in place of {-(-case.vocab_size // shape.tile)}"
        )
    if case.options.cache_bytes and not case.options.gradient_threshold:
        cached = _cache.num_cached_tiles(case, shape)
        notes.append(
            f"the forward keeps {cached} of {shape.num_tiles} vocabulary tiles, "
            f"{format_bytes(_cache.tile_bytes(case, shape))} each"
        )
        if cached and _cache.can_be_overwritten(shape):
            notes.append(OVERWRITES)
    if not shape.whole_atoms:
        notes.append(
            f"V is no multiple of {shape.atom}: the backward copies the weight and its gradient, one chunk at a time"
        )
    return *notes, *candidate_notes(case)


def _threshold_notes(case: Case, shape: Geometry) -> tuple[str, ...]:
    """What is left out, and how far off it puts the gradient in a logit: p (|g| + |g'| (|ln p| + entropy))."""
    threshold = case.options.gradient_threshold
    if not threshold:
        return ()
    of_entropy = -math.log(threshold) if threshold < math.exp(-1) else math.exp(-1) / threshold  # p |ln p| rises to 1/e
    notes = [
        f"gradient_threshold={threshold:g}: the gradients leave out tiles of {shape.row_block} tokens by {shape.tile} "
        f"columns without a label{' or a candidate' if case.options.num_candidates else ''} and without a probability "
        "of at least that",
        f"what is left out of a logit's gradient is below {threshold:g} (|dlogprob - dlse| + |dentropy| "
        f"({of_entropy:.3g} + entropy))",
    ]
    if case.options.cache_bytes:
        notes.append(f"cache_bytes={case.options.cache_bytes} is not used: a backward over live tiles recomputes them")
    return tuple(notes)
