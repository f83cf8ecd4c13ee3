"""The two passes of a call: by kernels that are launched directly, or by programs of JAX."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import torch

from lce_torch_bridge._types import NO_SUMS, PER_CANDIDATE, Call, Operands, Sums
from lce_torch_bridge.launched_directly import _backward as launched_backward
from lce_torch_bridge.launched_directly import _forward as launched_forward
from lce_torch_bridge.launched_directly._way import Way, refuse_another_way, way_of
from lce_torch_bridge.tensors import _tensor_parallel
from lce_torch_bridge.tensors._readable import is_readable, readable
from lce_torch_bridge.through_jax import _backward, _forward
from lce_torch_bridge.through_jax._key import cache_structure, key_of
from lce_torch_bridge.through_jax._programs import num_merged


def forward(x: Operands, call: Call, keep_cache: bool, way: Way, lend_cache: bool = True) -> list[Any]:
    """The outputs, what the backward needs per token ``[S, T]``, and the cache.

    Autograd keeps the cache as tensors. A caller who goes on to `gradients` at once takes JAX's own arrays if JAX runs
    the call, with ``lend_cache`` False: JAX reuses their memory as soon as they are dropped, in stream order, while a
    tensor that it was lent it holds until the GPU is done. The host may be many programs ahead.
    """
    _tensor_parallel.check(call.group, way.direct, x.hidden, x.labels, call.vocab_size, x.weight)
    if x.labels.shape[0] == 0:
        return forward_structs(x, call, keep_cache)
    results = launched_forward.forward(x, call, keep_cache, way) if way.direct else None
    return _forward.forward(x, call, keep_cache, lend_cache) if results is None else results


def forward_structs(x: Operands, call: Call, keep_cache: bool) -> list[torch.Tensor]:
    """What `forward` returns, uninitialised."""
    tokens = x.labels.shape[0]
    shapes = [(tokens, call.num_candidates) if name == PER_CANDIDATE else (tokens,) for name in call.fields]
    outputs = [x.hidden.new_empty(shape, dtype=torch.float32) for shape in shapes]
    key = key_of(x.weight, call)
    saved = x.hidden.new_empty((x.numbers + num_merged(key), tokens), dtype=torch.int32)
    cache = []
    live = launched_forward.live_shape(x, call, way_of(x.hidden)) if keep_cache and tokens else None
    if live is not None:
        cache = [x.hidden.new_empty(live, dtype=torch.int32)]
    elif keep_cache and tokens:
        structs = jax.tree.leaves(cache_structure(x.hidden, x.weight, x.bias, x.numbers, key))
        cache = [x.hidden.new_empty(struct.shape, dtype=getattr(torch, struct.dtype.name)) for struct in structs]
    return [*outputs, saved, *cache]


def gradients(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    saved: torch.Tensor,
    cache: Sequence[torch.Tensor | jax.Array],
    cotangents: dict[str, torch.Tensor],
    wanted: tuple[bool, ...],
    call: Call,
    way: Way,
    sums: Sums = NO_SUMS,
) -> list[torch.Tensor]:
    """Those of dhidden, dweight and dbias that are wanted, in their operands' dtypes.

    With ``reduce_grad_hidden``, dhidden is summed over the group in float32 and rounded once. (With stored logits, each
    rank rounds before the sum.)
    """
    tokens = hidden.shape[0]
    if tokens == 0:
        return [y.new_zeros(y.shape) for y in those_wanted(hidden, weight, bias, wanted)]
    # The operands may have been freed since the forward.
    if bias is not None or not all(map(is_readable, (hidden, weight, *cotangents.values()))):
        hidden, weight, bias = readable("hidden", hidden), readable("weight", weight), readable("bias", bias)
        cotangents = {name: readable(f"the cotangent of {name}", seed) for name, seed in cotangents.items()}
    of_torch = [y for y in cache if isinstance(y, torch.Tensor)]
    if way.direct and bias is None and len(of_torch) == len(cache):
        grads = launched_backward.gradients(hidden, weight, saved, of_torch, cotangents, wanted, call, sums, way)
        if grads is not None:
            return grads
    elif way.must:
        way.refuse("JAX ran the forward")
    if call.gradient_threshold and launched_backward.are_live_tiles(of_torch):
        refuse_another_way()
    return _backward.gradients(hidden, weight, bias, saved, cache, cotangents, wanted, call, sums)


def those_wanted(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, wanted: tuple[bool, ...]
) -> list[torch.Tensor]:
    """The operands whose gradients are wanted."""
    return [x for x, want in zip((hidden, weight, bias), wanted, strict=True) if want and x is not None]
