"""What the kernels refuse, and why: decided before anything is lowered."""

from __future__ import annotations

from collections.abc import Mapping

from lce_jax._types import Case, format_bytes
from lce_jax.mathematics._kl import Pair
from lce_jax.mosaic.common._tiles import ATOM_ROWS, COLUMN_GRAIN, SMEM_LIMIT, TILE_N, widest_swizzle


def refusal(case: Case, smem_bytes: Mapping[str, int]) -> str | None:
    """Why the kernels cannot serve ``case``; None where they can. ``smem_bytes``: what a block of each kernel needs.

    A dtype without exact products, a shape that cannot be tiled, or an option that no kernel knows.
    """
    return _shape_refusal(case) or _smem_refusal(smem_bytes) or _options_refusal(case)


def kl_refusal(cases: Pair[Case]) -> str | None:
    """Why the kernels that see two heads cannot serve ``cases``, each of which other kernels serve."""
    student, teacher = cases
    if student.dtype != teacher.dtype:
        return f"both weights must have one dtype, got {student.dtype.name} and the teacher's {teacher.dtype.name}"
    for whose, case in (("", student), ("the teacher's ", teacher)):
        if case.options.weight_layout != "vh":
            return f'{whose}weight_layout must be "vh", got "{case.options.weight_layout}"'
        if case.vocab_size % ATOM_ROWS:
            return f"{whose}V must be a multiple of {ATOM_ROWS}, got {case.vocab_size}"
        if case.options.traced_scale:
            return f"{whose}logit_scale and logit_softcap must be numbers, not arrays"
    return None


def _shape_refusal(case: Case) -> str | None:
    if case.dtype.name not in ("bfloat16", "float16"):
        return f"needs a bfloat16 or float16 weight (fp32 products would run in TF32), got {case.dtype.name}"
    if case.hidden_size % 64:
        return f"H must be a multiple of 64 (one swizzle atom), got {case.hidden_size}"
    if case.vocab_size < TILE_N:
        return f"V must be at least {TILE_N}, one tile, got {case.vocab_size}"
    if case.options.weight_layout == "hv":
        return _refusal_of_columns(case)
    return None


def _refusal_of_columns(case: Case) -> str | None:
    """Why a weight [H, V] cannot be tiled."""
    if case.vocab_size % COLUMN_GRAIN:
        return f'weight_layout="hv" needs V to be a multiple of {COLUMN_GRAIN}, got {case.vocab_size}'
    part, grain = case.options.vocab_part_size, widest_swizzle(case.vocab_size, case.dtype.itemsize)[1]
    if part is not None and part % grain:
        needs = f"needs vocab_part_size to be a multiple of {grain} with V {case.vocab_size}"
        return f'weight_layout="hv" {needs}, got {part}'
    return None


def _smem_refusal(smem_bytes: Mapping[str, int]) -> str | None:
    for kernel, needed in smem_bytes.items():
        if needed > SMEM_LIMIT:
            return (
                f"the {kernel} kernel needs {format_bytes(needed)} of shared memory, {format_bytes(SMEM_LIMIT)} exist"
            )
    return None


def _options_refusal(case: Case) -> str | None:
    options = case.options
    if options.logit_scale <= 0:
        return f"logit_scale must be positive for its running maximum, got {options.logit_scale}"
    if options.gradient_threshold and case.vocab_size % ATOM_ROWS:
        return f"gradient_threshold needs V to be a multiple of {ATOM_ROWS}, got {case.vocab_size}"
    if options.has_bias:
        return "bias: the kernels' epilogues add none to the products"
    if options.traced_scale and options.logit_softcap is not None:
        return "logit_softcap beside an array for it or logit_scale: the kernels hold the cap's numbers as constants"
    if options.mean_logit and options.logit_softcap is not None:
        return "label smoothing together with a softcap: the mean logit is no product of hidden then"
    return None
