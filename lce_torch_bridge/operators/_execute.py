"""The two passes of a call of any function: by kernels that are launched directly, or by programs of JAX."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import torch

from lce_torch_bridge._types import NO_SUMS, Sums, Tensors, TorchCall
from lce_torch_bridge.launched_directly import _passes
from lce_torch_bridge.launched_directly._way import Way, refuse_another_way, way_of
from lce_torch_bridge.tensors import _tensor_parallel
from lce_torch_bridge.tensors._device import is_readable, readable
from lce_torch_bridge.through_jax import _ids, _kl, _logprobs


class ThroughJax(NamedTuple):
    """A function that no kernel serves which is launched directly."""

    why: str  # that is so
    forward: Callable[[Tensors, TorchCall, bool], list[Any]]
    structs: Callable[[Tensors, TorchCall, bool], list[torch.Tensor]]
    gradients: Callable[..., list[torch.Tensor]] | None  # None: no backward


THROUGH_JAX = {
    "linear_kl": ThroughJax("linear_kl is a program of JAX", _kl.forward, _kl.structs, _kl.gradients),
    "linear_logits": ThroughJax("linear_logits runs no kernel", _ids.logits, _ids.logits_structs, _ids.gradients),
    "linear_topk": ThroughJax("linear_topk runs no kernel", _ids.topk, _ids.topk_structs, None),
}


def forward(x: Tensors, call: TorchCall, keep: bool, way: Way, lend_cache: bool = True) -> list[Any]:
    """``TorchCall.fields``, and what the backward needs beside operands: of `linear_logprobs` ``[S, T]`` and the cache.

    ``keep``: whether a backward may follow. Autograd keeps the cache as tensors. A caller who goes on to `gradients` at
    once takes JAX's own arrays if JAX runs the call, with ``lend_cache`` False: JAX reuses their memory as soon as they
    are dropped, in stream order, while a tensor that it was lent it holds until the GPU is done. The host may be many
    programs ahead.
    """
    if call.group != _tensor_parallel.NO_GROUP:
        sums_dhidden = keep and call.reduce_grad_hidden and x.hidden.requires_grad
        told: Any = {"bias": x.bias is not None, "hidden.requires_grad": sums_dhidden, "launched directly": way.direct}
        _tensor_parallel.compare_options(call, x.hidden.device, in_chunks=not lend_cache, **told)
        weights = [weight for weight in (x.weight, x.teacher_weight) if weight is not None]
        ids = x.candidates if call.jax.function == "linear_logits" else x.labels
        launches = functools.partial(_passes.launches, way)
        _tensor_parallel.check(call.group, launches, x.hidden, ids, call.jax.vocab_size, *weights)
    if x.hidden.shape[0] == 0:
        return forward_structs(x, call, keep)
    other = THROUGH_JAX.get(call.jax.function)
    if other is not None:
        way.refuse(other.why)
        return other.forward(x, call, keep)
    keep = keep and call.keeps_tiles
    results = _passes.forward(x, call, keep, way) if way.direct else None
    return _logprobs.forward(x, call, keep, lend_cache) if results is None else results


def forward_structs(x: Tensors, call: TorchCall, keep: bool) -> list[torch.Tensor]:
    """What `forward` returns, uninitialised."""
    other = THROUGH_JAX.get(call.jax.function)
    if other is not None:
        return other.structs(x, call, keep)
    keep_cache = keep and call.keeps_tiles and bool(x.hidden.shape[0])
    live = _passes.live_shape(x, call, way_of(x.hidden)) if keep_cache else None
    found = _logprobs.structs(x, call, keep_cache and live is None)
    return found if live is None else [*found, x.hidden.new_empty(live, dtype=torch.int32)]


def gradients(
    x: Tensors,
    kept: Sequence[torch.Tensor | jax.Array],
    cotangents: dict[str, torch.Tensor],
    requested_gradients: tuple[bool, ...],
    call: TorchCall,
    way: Way,
    sums: Sums = NO_SUMS,
) -> list[torch.Tensor]:
    """Those of dhidden, dweight and dbias that are wanted, in their operands' dtypes.

    ``kept`` is what `forward` returned after the results. With ``reduce_grad_hidden``, dhidden is summed over the group
    in float32 and rounded once. (With stored logits, each rank rounds before the sum.)
    """
    if x.hidden.shape[0] == 0:
        return [y.new_zeros(y.shape) for y in those_wanted(x, requested_gradients)]
    # The operands may have been freed since the forward.
    if not all(map(is_readable, [y for y in (*x, *cotangents.values()) if y is not None])):
        x = Tensors(*map(readable, Tensors._fields, x))
        cotangents = {name: readable(f"the cotangent of {name}", seed) for name, seed in cotangents.items()}
    other = THROUGH_JAX.get(call.jax.function)
    if other is not None:
        assert other.gradients is not None
        way.refuse(other.why)
        return other.gradients(x, kept, cotangents, requested_gradients, call)
    of_torch = [y for y in kept if isinstance(y, torch.Tensor)]
    saved, *cache = of_torch
    if way.direct and (x.bias is None or call.jax.rank) and len(of_torch) == len(kept):
        adapter = [x.bias] if call.jax.rank else []
        grads = _passes.gradients(
            x.hidden, x.weight, saved, cache, cotangents, requested_gradients, call, sums, way, *adapter
        )
        if grads is not None:
            return grads
    elif way.must:
        way.refuse("JAX ran the forward")
    if call.jax.gradient_threshold and _passes.are_live_tiles(cache):
        refuse_another_way()
    return _logprobs.gradients(x, kept, cotangents, requested_gradients, call, sums)


def those_wanted(x: Tensors, requested_gradients: Sequence[bool]) -> list[torch.Tensor]:
    """The operands whose gradients are wanted."""
    return [y for y, want in zip(x[:3], requested_gradients, strict=True) if want and y is not None]
