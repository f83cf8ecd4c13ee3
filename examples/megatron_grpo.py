"""GRPO steps of a Megatron model, tensor parallel, without its logits.

torchrun --nproc-per-node=2 examples/megatron_grpo.py

With a GPU for each rank it runs on NCCL. Without a GPU it runs on CPUs with gloo, which shows that it works.
"""

from __future__ import annotations

import os
from typing import Any, NamedTuple

import torch
from megatron.core import parallel_state
from megatron.core.fusions import fused_softmax
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel import random as megatron_random
from megatron.core.transformer.transformer_config import TransformerConfig

from lce_torch_bridge import rows
from lce_torch_bridge.megatron import fused_output_layer


class Rollout(NamedTuple):
    tokens: torch.Tensor  # [b, s]
    positions: torch.Tensor  # [b, s]
    mask: torch.Tensor  # [1, 1, s, s], True: not attended to
    response: torch.Tensor  # [b, s] bool: the positions whose next token the policy chose
    advantages: torch.Tensor  # [b, 1]


def score(model: torch.nn.Module, rollout: Rollout, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns log-probability and entropy [b, s] of the next tokens, 0 outside the response; equal bits on TP ranks."""
    labels = rows.next_tokens(rollout.tokens)
    with fused_output_layer(model, labels, temperature=temperature, where=rollout.response):
        logprobs, entropy, *_ = model(*rollout[:3])
    return logprobs, entropy


def grpo_step(
    model: torch.nn.Module, optimizer: Any, rollout: Rollout, old_logprobs: torch.Tensor, temperature: float
) -> float:
    """Takes one clipped step with an entropy bonus; returns the loss."""
    logprobs, entropy = score(model, rollout, temperature)
    ratio = torch.exp(logprobs - old_logprobs)
    gain = torch.minimum(ratio * rollout.advantages, ratio.clamp(0.8, 1.2) * rollout.advantages)
    loss = -(gain + 0.001 * entropy)[rollout.response].sum() / rollout.response.sum()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


def build(tensor_parallel: int) -> GPTModel:
    """Builds a GPTModel. A HybridModel is scored in the same way, but its layers need Transformer Engine."""
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=tensor_parallel)
    megatron_random.model_parallel_cuda_manual_seed(0)
    config = TransformerConfig(
        num_layers=1, hidden_size=64, num_attention_heads=4, hidden_dropout=0.0, attention_dropout=0.0,
        tensor_model_parallel_size=tensor_parallel, use_cpu_initialization=True,
    )  # fmt: skip
    model = GPTModel(config, get_gpt_layer_local_spec(), vocab_size=512, max_sequence_length=32)
    return model.to(torch.cuda.current_device())


def random_rollout() -> Rollout:
    """Draws what a sampler and a reward would give."""
    device, generator = torch.cuda.current_device(), torch.Generator().manual_seed(0)
    tokens = torch.randint(0, 512, (4, 32), generator=generator).to(device)
    positions = torch.arange(32, device=device).expand(4, 32)
    mask = torch.triu(torch.ones(32, 32, dtype=torch.bool, device=device), diagonal=1)[None, None]
    advantages = torch.tensor([[1.0], [-1.0], [-1.0], [1.0]], device=device)
    return Rollout(tokens, positions, mask, (positions >= 15) & (positions < 31), advantages)


def main(steps: int = 3, temperature: float = 0.7) -> tuple[list[float], GPTModel]:
    """Trains; returns the losses and the model."""
    torch.manual_seed(0)
    model = build(torch.distributed.get_world_size())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    rollout = random_rollout()
    with torch.no_grad():
        old_logprobs, _ = score(model, rollout, temperature)
    return [grpo_step(model, optimizer, rollout, old_logprobs, temperature) for _ in range(steps)], model


def stand_in_for_cuda() -> None:
    """Replaces functions of ``torch.cuda`` on a CPU: megatron-core asks them for a device and random states."""
    torch.cuda.current_device = lambda: torch.device("cpu")
    torch.cuda.manual_seed = torch.manual_seed
    torch.cuda.get_rng_state = torch.cuda.random.get_rng_state = lambda *_, **__: torch.get_rng_state()
    megatron_random._set_cuda_rng_state = lambda state, *_, **__: torch.set_rng_state(state)
    fused_softmax.get_default_causal_mask = lambda size: torch.ones(size, size, dtype=torch.bool).triu(diagonal=1)


if __name__ == "__main__":
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    else:
        stand_in_for_cuda()
    torch.distributed.init_process_group()
    losses, _ = main()
    if torch.distributed.get_rank() == 0:
        print("loss", *(f"{x:.4f}" for x in losses))
    torch.distributed.destroy_process_group()
