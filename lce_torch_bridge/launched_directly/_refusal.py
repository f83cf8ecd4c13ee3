"""Which calls kernels serve, and a call as `lce_jax.launch_lists` knows it."""

from __future__ import annotations

import torch

from lce_jax import launch_lists
from lce_torch_bridge._types import Call, Operands
from lce_torch_bridge.tensors import _device, _tensor_parallel
from lce_torch_bridge.tensors._device import name_of


def refusal(x: Operands, call: Call) -> str | None:
    """Why no list of kernels serves such calls; None if one does."""
    reason = _device.why_not(x.hidden.device)
    if reason is not None:
        return reason
    options = {"bias": x.bias is not None, "mean_logit": call.mean_logit}
    for name, asked in options.items():
        if asked:
            return f"{name}: no kernel computes what it needs between the others"
    if call.implementation and call.implementation.split(",")[0] != "mosaic_gpu":
        return f"implementation={call.implementation!r}"
    return launch_lists.refusal(kind_of(x.hidden, x.weight, call, x.temperature is not None, launch_lists.THREADS))


def kind_of(
    hidden: torch.Tensor, weight: torch.Tensor, call: Call, has_temperature: bool, rows: int
) -> launch_lists.CallKind:
    """The kind of the call, in lists for up to so many ``rows``."""
    device = _device.device_of(hidden.device)
    assert device is not None
    _, rank = _tensor_parallel.size_and_rank(call.group)
    return launch_lists.CallKind(
        num_tokens=rows,
        hidden_size=int(hidden.shape[1]),
        num_columns=int(weight.shape[0]),
        vocab_size=call.vocab_size,
        start=rank * int(weight.shape[0]),
        dtype=name_of(weight.dtype),
        device=device,
        entropy=call.entropy != "none",
        stats=call.stats,
        logit_scale=call.logit_scale,
        logit_softcap=call.logit_softcap,
        cache_bytes=call.cache_bytes,
        gradient_threshold=call.gradient_threshold,
        vocab_part_size=call.vocab_part_size,
        num_candidates=call.num_candidates,
        has_temperature=has_temperature,
        has_floor=call.has_floor,
        # Kernels read hidden where it lies only if it has all their rows, in the dtype of their products.
        copied_from=None if rows == len(hidden) and hidden.dtype == weight.dtype else name_of(hidden.dtype),
        megatron=call.megatron,
    )
