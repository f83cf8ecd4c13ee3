"""Steps of an actor with the option of verl's FSDP engine, without logits: one line, or a variable for whole runs.

python examples/verl_actor.py
"""

from __future__ import annotations

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM
from verl.models.transformers.monkey_patch import patch_forward_with_backends

import lce_torch_bridge.verl


def main(steps: int = 3) -> list[float]:
    """Trains a small Qwen 3 with verl's own patch in one process; returns the losses in nats per token."""
    installed = lce_torch_bridge.verl.install()
    torch.manual_seed(0)
    sizes = {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "head_dim": 16}
    model = Qwen3ForCausalLM(Qwen3Config(**sizes, num_attention_heads=4, num_key_value_heads=2))
    patch_forward_with_backends(model, use_fused_kernels=True, fused_kernels_backend="triton")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    tokens, losses = torch.randint(0, 512, (2, 32)), []
    for _ in range(steps):
        out = model(tokens, temperature=0.7, return_dict=True)
        loss = -out.log_probs.view(tokens.shape)[:, :-1].mean() - 0.001 * out.entropy.mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert installed.calls == steps, f"{installed.calls} calls in {steps} steps: verl computes the logits"
    return losses


if __name__ == "__main__":
    print("loss", *(f"{x:.3f}" for x in main()), "nats per token")
