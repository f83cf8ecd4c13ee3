"""Tensors that kernels read by address: dense, their memory there, and nothing left to be done to their numbers.

torch itself does not look: some of its own kernels read freed memory, and a tensor with the negative or conjugate bit
holds other numbers than its memory.
"""

from __future__ import annotations

from typing import Any

import torch

from lce_torch_bridge._types import PLAIN

GATHER = (
    "If it is a sharded parameter, gather it until the backward is over: make the call inside the forward of the FSDP "
    "module that holds it, or write `with deepspeed.zero.GatheredParameters([weight]):` around call and backward; "
    "without a backward, FullyShardedDataParallel.summon_full_params does as well. FSDP2's DTensor is gathered here: "
    "pass it itself, not its to_local()"
)


def readable(name: str, x: Any) -> Any:
    """A tensor with what its bits say carried out. What is no tensor is returned as it is.

    Raises:
        TypeError: it is sparse or nested.
        RuntimeError: its memory was freed.
    """
    if not isinstance(x, torch.Tensor):
        return x
    if x.is_nested:
        raise TypeError(f"{name} is nested: pass torch.cat({name}.unbind()), and the same of all that is per token")
    if x.layout is not torch.strided:
        raise TypeError(f"{name} {tuple(x.shape)} must be dense, got {x.layout}: pass {name}.to_dense()")
    if torch.compiler.is_compiling() or type(x) not in PLAIN or torch._C._functorch.is_functorch_wrapped_tensor(x):
        return x  # what is inside is looked at where it is computed
    left_by_zero = name == "weight" and x.shape == (0,)  # in place of a parameter that ZeRO-3 has partitioned
    if left_by_zero or (x.numel() and not x.untyped_storage().nbytes()):
        raise RuntimeError(f"{name} {tuple(x.shape)} has no memory, because it was {_freed_by(x)}. {GATHER}")
    return x.resolve_neg().resolve_conj()


def _freed_by(x: torch.Tensor) -> str:
    """What has become of a tensor without memory. ZeRO-3 writes what it has partitioned onto the parameter."""
    whole = getattr(x, "ds_shape", None)
    if whole is None:
        return "freed"
    return f"partitioned by ZeRO-3 (ds_shape {tuple(whole)}, ds_status {getattr(x, 'ds_status', None)})"


def is_readable(x: Any) -> bool:
    """Whether ``x`` certainly needs no `readable`, or is nested. Takes little time. Not while torch compiles."""
    if type(x) not in PLAIN:
        return False
    try:
        return x.untyped_storage().nbytes() > 0 and not x.is_neg()
    except NotImplementedError:  # sparse, or inside a transform of torch.func
        return False
