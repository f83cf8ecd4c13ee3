"""The check of the kernels' first direct launch on a card: results are compared with stored logits in float64.

The check starts no client of JAX on the GPU. `lce_jax.run.kernels.check_once` keeps the outcome, also for calls that
JAX runs, and saves it for later processes if nothing is wrong.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from lce_jax.run import kernels
from lce_torch_bridge._types import Tensors, make_call

T, H, V, BLOCKS = 200, 256, 896, 2  # V is three tiles and a half, of which two are cached
CALL = make_call(vocab_size=V, cache_bytes=300_000)


def compare(device: torch.device, launch: Callable[..., list[torch.Tensor]]) -> dict[str, float]:
    """Returns the errors of the results and gradients that ``launch(tensors, call, seeds)`` computes.

    ``launch`` must return the results, dhidden, dweight, and a float32 sum to which dweight was added.
    """
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(rows, H, generator=generator) for rows in (T, V))
    labels, seeds = (
        torch.randint(V, (T,), generator=generator),
        torch.randn(3, T, generator=generator, dtype=torch.float32).to(device),
    )
    hidden, weight = (x.to(device, torch.bfloat16) for x in (hidden, weight * (2 / H**0.5)))
    x = Tensors(hidden, weight, None, labels.to(device))
    names = *CALL.differentiable, "dhidden", "dweight", "dweight of a sum"
    actual, expected = launch(x, CALL, seeds), _differentiate_logits(x, seeds)
    numbers = [[y.detach().double().cpu().numpy() for y in tensors] for tensors in (actual, expected)]
    return kernels.measure_errors(*(dict(zip(names, arrays, strict=True)) for arrays in numbers))


def _differentiate_logits(x: Tensors, seeds: torch.Tensor) -> list[torch.Tensor]:
    """Returns results and gradients, computed from stored float64 logits."""
    with torch.enable_grad():
        hidden, weight = (y.double().requires_grad_() for y in (x.hidden, x.weight))
        logits = hidden @ weight.T
        lse, logprobs = logits.logsumexp(1), logits.log_softmax(1)
        results = [logprobs.gather(1, x.labels[:, None])[:, 0], -(logprobs.exp() * logprobs).sum(1), lse]
        dhidden, dweight = torch.autograd.grad(results, (hidden, weight), list(seeds.double()))
        return [*results, dhidden, dweight, dweight]
