"""What the compiled programs of a call depend on, and what its cache looks like."""

from __future__ import annotations

import functools
from typing import Any

import jax
import torch

from lce_torch_bridge._types import Call
from lce_torch_bridge.tensors import _device, _padding, _tensor_parallel
from lce_torch_bridge.through_jax import _programs
from lce_torch_bridge.through_jax import _runtime as runtime
from lce_torch_bridge.through_jax._programs import ProgramKey


def key_of(weight: torch.Tensor, call: Call) -> ProgramKey:
    """The key of the programs."""
    shards, rank = _tensor_parallel.size_and_rank(call.group)
    if type(call.vocab_size) is not int:  # where torch.compile traces
        call = call.of_programs
    return _made_once(call, int(weight.shape[0]), shards, rank, precision_of(weight))


@functools.cache
def _made_once(call: Call, rows: int, shards: int, rank: int, precision: str | None) -> ProgramKey:
    return ProgramKey(call.of_programs, rank * rows, call.vocab_size < shards * rows, precision)


def precision_of(weight: torch.Tensor) -> str | None:
    """The option of `lce_jax`: float32 products are as exact as torch's settings ask."""
    if weight.dtype != torch.float32:
        return None
    # This tells what was set by any of torch's functions; torch.get_float32_matmul_precision raises after newer ones.
    products: Any = torch.backends.cuda.matmul if weight.is_cuda else torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    return "highest" if products.fp32_precision in ("none", "ieee") else None


def cache_structure(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, numbers: int, key: ProgramKey
) -> Any:
    piece, struct = _padding.whole(int(hidden.shape[0])), jax.ShapeDtypeStruct
    described = _device.device_of(hidden.device)
    return _programs.cache_structure(
        key,
        runtime.jax_device(hidden.device) if described is None else described,
        struct((piece.rows, int(hidden.shape[1])), _device.struct(hidden).dtype),
        _device.struct(weight),
        None if bias is None else _device.struct(bias),
        struct((1 + (1 + numbers) * piece.rows,), "int32"),
    )
