"""verl 0.9.1 without logits: its ``linear_cross_entropy`` is this package's, in every process that imports verl.

verl itself imports the modules that VERL_USE_EXTERNAL_MODULES names, on the driver and in Ray's workers:

    export PYTHONPATH=$PWD/examples VERL_USE_EXTERNAL_MODULES=verl_head
    python -m verl.trainer.main_ppo \
        actor_rollout_ref.model.use_fused_kernels=True \
        actor_rollout_ref.model.fused_kernel_options.impl_backend=triton ...

``python examples/verl_head.py`` trains a small model by verl's own patch, on one process, and checks that ours ran.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import verl.utils.kernel.linear_cross_entropy as kernel

import lce_torch_bridge.verl

CALLERS_AT_IMPORT = ("verl.models.mcore.model_forward_fused", "verl.models.mcore.model_forward_1f1b_overlap")
calls = 0  # in this process


def linear_cross_entropy(*arguments: Any, **named: Any) -> Any:
    """Takes verl's arguments; each worker's log names its first call."""
    global calls
    if calls == 0:
        print("verl_head: log-probabilities of the head come from lce_torch_bridge", flush=True)
    calls += 1
    return lce_torch_bridge.verl.linear_cross_entropy(*arguments, **named)


def refuse_head(model: torch.nn.Module, name: str, module: torch.nn.Module | None) -> None:
    """Torch calls it before a module becomes part of another, as when an adapter (LoRA) is put around a layer.

    verl hands over the head's weight alone: a bias would be left out, and so would an adapter, which would not train.
    """
    if name not in ("lm_head", "output_layer") or module is None:
        return
    if name == "lm_head" and isinstance(module, torch.nn.Linear) and module.bias is not None:
        raise NotImplementedError(
            "lm_head has a bias, which verl drops here: set use_fused_kernels=False without verl_head"
        )
    if hasattr(module, "modules_to_save") or type(module).__module__.startswith("torch."):
        return  # PEFT's copy in modules_to_save gives its own weight, and FSDP what it wraps
    if any(layer is model._modules.get(name) for layer in module.children()):
        raise NotImplementedError(
            f"{type(module)} around {name}, whose weight alone is read: leave {name} out of target_modules"
        )


def install() -> None:
    """In place of verl's function. Five modules import it at each call; the two of Megatron may have it already."""
    torch.nn.modules.module.register_module_module_registration_hook(refuse_head)
    kernel.linear_cross_entropy = linear_cross_entropy
    for name in CALLERS_AT_IMPORT:
        if name in sys.modules:
            sys.modules[name].linear_cross_entropy = linear_cross_entropy  # type: ignore[attr-defined]


install()


def main(steps: int = 3) -> list[float]:
    """An actor's steps under the switch of its FSDP engine; returns the losses in nats per token."""
    from transformers import Qwen3Config, Qwen3ForCausalLM
    from verl.models.transformers.monkey_patch import patch_forward_with_backends

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
    assert calls == steps, f"{calls} calls in {steps} steps: verl computes the logits"
    return losses


if __name__ == "__main__":
    print("loss", *(f"{x:.3f}" for x in main()), "nats per token")
