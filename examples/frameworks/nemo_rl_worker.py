"""NeMo RL's own function with its fused head and with `lce_torch_bridge.nemo_rl`; prints JSON.

``python -m examples.frameworks.nemo_rl_worker``, with a checkout of NeMo RL on the path.
"""

from __future__ import annotations

import os

os.environ["JAX_PLATFORMS"] = "cpu"

import json
from typing import Any

import torch
from nemo_rl.distributed import model_utils

from lce_torch_bridge import nemo_rl


def score(hidden: torch.Tensor, weight: torch.Tensor, tokens: torch.Tensor) -> list[torch.Tensor]:
    """Returns log-probabilities of the next tokens, and their gradients."""
    leaves = [x.clone().requires_grad_() for x in (hidden, weight)]
    group, function = torch.distributed.group.WORLD, model_utils.from_parallel_hidden_states_to_logprobs
    logprobs = function(*leaves, False, tokens, 0, 128, group, chunk_size=4)
    seeds = torch.linspace(-1, 1, logprobs.numel()).reshape(logprobs.shape)
    return [logprobs, *torch.autograd.grad(logprobs, leaves, seeds)]


def main() -> None:
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    generator = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(8, 2, 32, generator=generator), torch.randn(128, 32, generator=generator) / 4
    operands = hidden, weight, torch.randint(0, 128, (2, 8), generator=generator)
    want = score(*operands)
    installed = nemo_rl.install_in_worker()
    got = score(*operands)
    norms = [((x - y).norm() / y.norm()).item() for x, y in zip(got, want, strict=True)]
    results: dict[str, Any] = {"values": norms[0], "gradients": max(norms[1:]), "calls": installed.calls}
    try:
        model_utils.from_parallel_logits_to_logprobs(hidden @ weight.t(), operands[2], 0, 128, None)
    except RuntimeError as refusal:
        results["refusal"] = str(refusal)
    print(json.dumps(results))


if __name__ == "__main__":
    main()
