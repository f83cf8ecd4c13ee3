"""What the kernels refuse, and why: decided before anything is lowered."""

from __future__ import annotations

from lce_jax.mosaic._call import Generation
from lce_jax.mosaic.common._tiles import COLUMN_GRAIN, TILE_N, widest_swizzle
from lce_jax.types._types import Call
from lce_jax.types.scalars import format_bytes


def refusal(case: Call, generation: Generation) -> str | None:
    """Why a generation's kernels cannot serve ``case``; None where they can.

    A dtype without exact products, a shape that cannot be tiled, or an option that no kernel knows.
    """
    return _shape_refusal(case, generation) or _smem_refusal(case, generation) or _options_refusal(case, generation)


def kl_refusal(cases: tuple[Call, ...], generation: Generation) -> str | None:
    """Why the kernels that see two heads cannot serve ``cases``, each of which other kernels serve."""
    student, teacher = cases
    if student.dtype != teacher.dtype:
        return f"both weights must have one dtype, got {student.dtype.name} and the teacher's {teacher.dtype.name}"
    for whose, case in (("", student), ("the teacher's ", teacher)):
        if case.weight_layout != "vh":
            return f'{whose}weight_layout must be "vh", got "{case.weight_layout}"'
        if case.columns % generation.tiling.atom:
            return f"{whose}V must be a multiple of {generation.tiling.atom}, got {case.columns}"
        if case.traced_scale:
            return f"{whose}logit_scale and logit_softcap must be numbers, not arrays"
    return None


def _shape_refusal(case: Call, generation: Generation) -> str | None:
    if case.dtype.name not in ("bfloat16", "float16"):
        return f"needs a bfloat16 or float16 weight (fp32 products would run in TF32), got {case.dtype.name}"
    if case.hidden_size % 64:
        return f"H must be a multiple of 64 (one swizzle atom), got {case.hidden_size}"
    if case.columns < TILE_N:
        return f"V must be at least {TILE_N}, one tile, got {case.columns}"
    if case.weight_layout == "hv":
        return _refusal_of_columns(case, generation)
    part, atom = case.vocab_part_size, generation.tiling.atom
    if part is not None and not generation.has_tma and part % atom:
        return f"needs vocab_part_size to be a multiple of {atom}, got {part}"
    return None


def _refusal_of_columns(case: Call, generation: Generation) -> str | None:
    """Why a weight [H, V] cannot be tiled."""
    if not generation.has_tma:
        return 'weight_layout must be "vh" on a GPU without TMA'
    if case.columns % COLUMN_GRAIN:
        return f'weight_layout="hv" needs V to be a multiple of {COLUMN_GRAIN}, got {case.columns}'
    part, grain = case.vocab_part_size, widest_swizzle(case.columns, case.dtype.itemsize)[1]
    if part is not None and part % grain:
        needs = f"needs vocab_part_size to be a multiple of {grain} with V {case.columns}"
        return f'weight_layout="hv" {needs}, got {part}'
    return None


def _smem_refusal(case: Call, generation: Generation) -> str | None:
    limit = generation.smem_limit
    for kernel, needed in generation.tunings.smem_bytes(case).items():
        if needed > limit:
            return f"the {kernel} kernel needs {format_bytes(needed)} of shared memory, {format_bytes(limit)} exist"
    return None


def _beside_lora(case: Call) -> str | None:
    """What of an adapter's call no kernel knows."""
    asked = {
        'weight_layout="hv"': case.weight_layout == "hv",
        "candidates": case.num_candidates,
        "gradient_threshold": case.gradient_threshold,
        "vocab_part_size": case.vocab_part_size,
        "label smoothing": case.mean_logit,
    }
    return next((name for name, is_there in asked.items() if is_there), None)


def _options_refusal(case: Call, generation: Generation) -> str | None:
    if case.logit_scale <= 0:
        return f"logit_scale must be positive for its running maximum, got {case.logit_scale}"
    if case.gradient_threshold and case.columns % generation.tiling.atom:
        return f"gradient_threshold needs V to be a multiple of {generation.tiling.atom}, got {case.columns}"
    if case.rank and (wrong := _beside_lora(case)):
        return f"lora with {wrong}: the kernels have not been written for both"
    if case.has_bias:
        return "bias: the kernels' epilogues add none to the products"
    if case.traced_scale and case.logit_softcap is not None:
        return "logit_softcap beside an array for it or logit_scale: the kernels hold the cap's numbers as constants"
    if case.mean_logit and case.logit_softcap is not None:
        return "label smoothing together with a softcap: the mean logit is no product of hidden then"
    return None
