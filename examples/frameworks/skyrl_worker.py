"""SkyRL's own functions with its fused head and with `lce_torch_bridge.skyrl`; prints JSON.

``python -m examples.frameworks.skyrl_worker``, in an environment with skyrl and megatron-core.
"""

from __future__ import annotations

import os

os.environ["JAX_PLATFORMS"] = "cpu"

import json
from typing import Any

import torch
from skyrl.backends.skyrl_train.distributed.megatron import model_utils

from lce_torch_bridge import skyrl


def scored(hidden: torch.Tensor, weight: torch.Tensor, tokens: torch.Tensor) -> list[torch.Tensor]:
    """Log-probabilities of padded rows and of packed ones, and their gradients."""
    group = torch.distributed.group.WORLD
    leaves = [x.clone().requires_grad_() for x in (hidden, weight)]
    padded = model_utils.from_parallel_hidden_to_logprobs(*leaves, tokens, 0, 128, group, chunk_size=4, temperature=0.7)
    rows = leaves[0].reshape(1, 16, 32), leaves[1], tokens.reshape(1, 16), torch.tensor([0, 6, 16])
    packed = model_utils.from_parallel_hidden_to_logprobs_packed_sequences(*rows, 10, 0, 128, group, chunk_size=4)
    seeds = torch.linspace(-1, 1, padded.numel()).reshape(padded.shape)
    return [padded, packed, *torch.autograd.grad((padded * seeds).sum() + packed.sum(), leaves)]


def main() -> None:
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    generator = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(2, 8, 32, generator=generator), torch.randn(128, 32, generator=generator) / 4
    given = hidden, weight, torch.randint(0, 128, (2, 8), generator=generator)
    want = scored(*given)
    installed = skyrl.install_in_worker()
    got = scored(*given)
    norms = [((x - y).norm() / y.norm()).item() for x, y in zip(got, want, strict=True)]
    results: dict[str, Any] = {"values": max(norms[:2]), "gradients": max(norms[2:]), "calls": installed.calls}
    try:
        model_utils.from_parallel_logits_to_logprobs(hidden @ weight.t(), given[2], 0, 128, None)
    except RuntimeError as refusal:
        results["refusal"] = str(refusal)
    print(json.dumps(results))


if __name__ == "__main__":
    main()
