"""The backward by one program of JAX."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import torch

from lce_torch_bridge._types import Call, Sums
from lce_torch_bridge.tensors import _padding, _tensor_parallel
from lce_torch_bridge.through_jax import _programs, _run
from lce_torch_bridge.through_jax._key import cache_structure, key_of


def gradients(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    saved: torch.Tensor,
    cache: Sequence[torch.Tensor | jax.Array],
    cotangents: dict[str, torch.Tensor],
    wanted: tuple[bool, ...],
    call: Call,
    sums: Sums,
) -> list[torch.Tensor]:
    """What `operators._execute.gradients` returns."""
    reduced = call.reduce_grad_hidden and call.group != _tensor_parallel.NO_GROUP
    piece, key = _padding.whole(hidden.shape[0]), key_of(weight, call)
    tree = None
    if cache:
        tree = jax.tree.structure(cache_structure(hidden, weight, bias, len(saved) - _programs.num_merged(key), key))
    run = _programs.gradients(key, tuple(cotangents), wanted, not reduced, tree)
    seeds = [seed.view(torch.int32) for seed in cotangents.values()]
    per_token = torch.cat([saved, *[seed[None] if seed.ndim == 1 else seed.T for seed in seeds]])
    rows = _padding.pad(hidden, piece.rows), weight, bias, _padding.with_count(per_token.T, piece.rows)
    if sums.total is None:
        (grads,) = _run.run(run, (*rows, None, *cache))
    else:
        *grads, _ = sums.total.after(run, (*rows, *cache), operand=len(rows), place=int(wanted[0]))
    if wanted[0]:
        grads[0] = grads[0][: hidden.shape[0]]
    if wanted[0] and reduced:
        grads[0] = _tensor_parallel.all_reduce(grads[0], call.group).to(hidden.dtype)
    return grads
