"""What `explain` says of `lce_jax.linear_kl` with kernels: its tiles, and the bytes that it will hold."""

from __future__ import annotations

import math

from lce_jax._plans import OVERWRITES, Plan, Surroundings, cache_notes, format_bytes
from lce_jax.mosaic import _chunks, _dhidden, _kl, _plan
from lce_jax.mosaic._geometry import geometry
from lce_jax.mosaic._kernel_set import KernelSet
from lce_jax.xla import _kl_plan
from lce_jax.xla._kl import KLPlan


def plan(kl: KLPlan, kernels: KernelSet, name: str, around: Surroundings) -> Plan:
    """Tiles and bytes of a call on one device."""
    student, teacher = kl.cases
    shape = geometry(student, kernels.tiling)
    copies = [_plan.copied_bytes(case, geometry(case, kernels.tiling), around) for case in kl.cases]
    launch = _kl.launch_tiles(shape, kernels, kl.columns)
    cached = _kl.num_cached_tiles(kl, shape)
    left = shape.num_tiles - cached
    chunk = _chunks.chunk_tiles(student, shape, kernels.budget, left) * shape.tile if left else 0
    vector = 4 * shape.padded_tokens
    merged = vector * (_kl.MERGED - _kl.FIELDS) * launch
    sums = 4 * math.prod(_dhidden.sums_shape(student, shape))
    columns = min(student.vocab_size, teacher.vocab_size)
    return Plan(
        implementation=name,
        refused={},
        case=student,
        tiles={
            "tokens": shape.row_block,
            "vocabulary": shape.tile,
            **kernels.kl_tile_sizes(kl.cases),
            "backward chunk": max(chunk, cached * shape.tile),
        },
        # The copies are gone when the tiles' statistics are merged.
        forward_bytes=vector * (_kl.FIELDS * (launch + 2)) + max(sum(of.forward for of in copies), merged),
        backward_bytes=shape.padded_tokens * chunk * student.dtype.itemsize
        + sums
        + vector * _kl.FIELDS
        + copies[0].backward
        + copies[1].forward,
        kept_bytes=kl.numbers_kept * 4 * student.num_tokens + cached * _kl.tile_bytes(kl, shape),
        logits_bytes=student.num_tokens * columns * 4,
        notes=(
            f"linear_kl: the teacher (hidden size {teacher.hidden_size:,}, {teacher.dtype.name}) adds a product to "
            f"each pass, and {format_bytes(copies[1].forward)} for copies of its hidden states",
            *cache_notes(student, cached, shape.tiles_of(kl.columns), _kl.tile_bytes(kl, shape)),
            *([OVERWRITES] if cached else []),
        ),
        full_cache_bytes=shape.tiles_of(kl.columns) * _kl.tile_bytes(kl, shape),
        stored=_kl_plan.stored(kl, columns),
    )
