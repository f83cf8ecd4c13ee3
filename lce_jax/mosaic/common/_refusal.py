"""Says which calls the kernels refuse and why, before anything is lowered."""

from __future__ import annotations

from lce_jax.mosaic._call import Generation
from lce_jax.mosaic.common._tiles import COLUMN_GRAIN, TILE_N, widest_swizzle
from lce_jax.types._types import Call
from lce_jax.types.scalars import format_bytes


def refusal(call: Call, generation: Generation) -> str | None:
    """Says why a generation's kernels cannot serve ``call``; None if they can.

    The reason is a dtype without exact products, a shape that cannot be tiled, or an unsupported option.
    """
    return _shape_refusal(call, generation) or _smem_refusal(call, generation) or _options_refusal(call, generation)


def kl_refusal(calls: tuple[Call, ...], generation: Generation) -> str | None:
    """Says why the kernels of two heads cannot serve ``calls``, although those of one head serve each of the calls."""
    student, teacher = calls
    if student.dtype != teacher.dtype:
        return f"both weights must have one dtype, got {student.dtype.name} and the teacher's {teacher.dtype.name}"
    for whose, call in (("", student), ("the teacher's ", teacher)):
        if call.weight_layout != "vh":
            return f'{whose}weight_layout must be "vh", got "{call.weight_layout}"'
        if call.columns % generation.tiling.atom:
            return f"{whose}V must be a multiple of {generation.tiling.atom}, got {call.columns}"
        if call.traced_scale:
            return f"{whose}logit_scale and logit_softcap must be numbers, not arrays"
    return None


def _shape_refusal(call: Call, generation: Generation) -> str | None:
    if call.dtype.name not in ("bfloat16", "float16"):
        return f"needs a bfloat16 or float16 weight (fp32 products would run in TF32), got {call.dtype.name}"
    if call.hidden_size % 64:
        return f"H must be a multiple of 64 (one swizzle atom), got {call.hidden_size}"
    if call.columns < TILE_N:
        return f"V must be at least {TILE_N}, one tile, got {call.columns}"
    if call.weight_layout == "hv":
        return _column_refusal(call, generation)
    part, atom = call.vocab_part_size, generation.tiling.atom
    if part is not None and not generation.machine.has_tma and part % atom:
        return f"needs vocab_part_size to be a multiple of {atom}, got {part}"
    return None


def _column_refusal(call: Call, generation: Generation) -> str | None:
    """Says why a weight [H, V] cannot be tiled."""
    if not generation.machine.has_tma:
        return 'weight_layout must be "vh" on a GPU without TMA'
    if call.columns % COLUMN_GRAIN:
        return f'weight_layout="hv" needs V to be a multiple of {COLUMN_GRAIN}, got {call.columns}'
    part, grain = call.vocab_part_size, widest_swizzle(call.columns, call.dtype.itemsize)[1]
    if part is not None and part % grain:
        needs = f"needs vocab_part_size to be a multiple of {grain} with V {call.columns}"
        return f'weight_layout="hv" {needs}, got {part}'
    return None


def _smem_refusal(call: Call, generation: Generation) -> str | None:
    limit = generation.smem_limit
    for kernel, needed in generation.tunings.smem_bytes(call).items():
        if needed > limit:
            return f"the {kernel} kernel needs {format_bytes(needed)} of shared memory, {format_bytes(limit)} exist"
    return None


def _find_unsupported_with_lora(call: Call) -> str | None:
    """Returns the first option that kernels do not support together with an adapter."""
    asked = {
        'weight_layout="hv"': call.weight_layout == "hv",
        "candidates": call.num_candidates,
        "gradient_threshold": call.gradient_threshold,
        "vocab_part_size": call.vocab_part_size,
        "label smoothing": call.mean_logit,
    }
    return next((name for name, is_there in asked.items() if is_there), None)


def _options_refusal(call: Call, generation: Generation) -> str | None:
    if call.logit_scale <= 0:
        return f"logit_scale must be positive for its running maximum, got {call.logit_scale}"
    if call.gradient_threshold and call.columns % generation.tiling.atom:
        return f"gradient_threshold needs V to be a multiple of {generation.tiling.atom}, got {call.columns}"
    if call.rank and (wrong := _find_unsupported_with_lora(call)):
        return f"lora with {wrong}: the kernels do not support both together"
    if call.has_bias:
        return "bias: the kernels' epilogues do not add a bias to the products"
    if call.traced_scale and call.logit_softcap is not None:
        return (
            "logit_softcap with an array for it or for logit_scale: the kernels have the cap and the scale as constants"
        )
    if call.mean_logit and call.logit_softcap is not None:
        return "label smoothing together with a softcap: the mean logit is then not linear in hidden"
    return None
