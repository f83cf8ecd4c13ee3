"""A card that has not run its kernels: its first direct launch is compared with stored logits in float64.

It runs once per process, without a client of JAX's on the GPU. `lce_jax.run.kernels.check_once` keeps the result, which
also holds for calls that JAX runs.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from lce_jax.run import kernels
from lce_torch_bridge._types import Tensors, call_with

T, H, V, COLUMNS, BLOCKS = 200, 256, 1100, 1152, 2  # the last tile ends in padding, and half of it is there
CALL = call_with(vocab_size=V, cache_bytes=300_000)


def compare(device: torch.device, launch: Callable[..., list[torch.Tensor]]) -> dict[str, float]:
    """Those of ``launch(tensors, call, seeds)``: of the results, dhidden, dweight, and dweight by way of a sum."""
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(rows, H, generator=generator) for rows in (T, COLUMNS))
    labels, seeds = (
        torch.randint(V, (T,), generator=generator),
        torch.randn(3, T, generator=generator, dtype=torch.float32).to(device),
    )
    hidden, weight = (x.to(device, torch.bfloat16) for x in (hidden, weight * (2 / H**0.5)))
    x = Tensors(hidden, weight, None, labels.to(device))
    names = *CALL.differentiable, "dhidden", "dweight", "dweight of a sum"
    found, wanted = launch(x, CALL, seeds), _stored(x, seeds)
    numbers = [[y.detach().double().cpu().numpy() for y in of] for of in (found, wanted)]
    return kernels.measure_errors(*(dict(zip(names, of, strict=True)) for of in numbers))


def _stored(x: Tensors, seeds: torch.Tensor) -> list[torch.Tensor]:
    with torch.enable_grad():
        hidden, weight = (y.double().requires_grad_() for y in (x.hidden, x.weight))
        logits = hidden @ weight[:V].T
        lse, each = logits.logsumexp(1), logits.log_softmax(1)
        results = [each.gather(1, x.labels[:, None])[:, 0], -(each.exp() * each).sum(1), lse]
        dhidden, dweight = torch.autograd.grad(results, (hidden, weight), list(seeds.double()))
        return [*results, dhidden, dweight, dweight]
