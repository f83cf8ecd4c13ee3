"""SkyRL's own functions with its fused head and with `lce_torch_bridge.skyrl`; prints JSON.

``python -m examples.frameworks.skyrl_worker``, in an environment with skyrl and megatron-core. SkyRL's model for FSDP
imports FlashAttention's functions for packed rows, which are not called here.
"""

from __future__ import annotations

import os

os.environ["JAX_PLATFORMS"] = "cpu"

import importlib.machinery
import json
import sys
import types
from typing import Any

import torch
import transformers
from skyrl.backends.skyrl_train.distributed.megatron import model_utils

from lce_torch_bridge import skyrl


def score(hidden: torch.Tensor, weight: torch.Tensor, tokens: torch.Tensor) -> list[torch.Tensor]:
    """Returns log-probabilities of padded rows and of packed rows, and their gradients."""
    group = torch.distributed.group.WORLD
    leaves = [x.clone().requires_grad_() for x in (hidden, weight)]
    padded = model_utils.from_parallel_hidden_to_logprobs(*leaves, tokens, 0, 128, group, chunk_size=4, temperature=0.7)
    rows = leaves[0].reshape(1, 16, 32), leaves[1], tokens.reshape(1, 16), torch.tensor([0, 6, 16])
    packed = model_utils.from_parallel_hidden_to_logprobs_packed_sequences(*rows, 10, 0, 128, group, chunk_size=4)
    seeds = torch.linspace(-1, 1, padded.numel()).reshape(padded.shape)
    return [padded, packed, *torch.autograd.grad((padded * seeds).sum() + packed.sum(), leaves)]


def replace_flash_attention() -> None:
    for name in ("flash_attn", "flash_attn.bert_padding"):
        sys.modules[name] = types.ModuleType(name)
        sys.modules[name].__spec__ = importlib.machinery.ModuleSpec(name, None)
        sys.modules[name].pad_input = sys.modules[name].unpad_input = None  # type: ignore[attr-defined]


def score_with_fsdp(model: transformers.PreTrainedModel) -> list[torch.Tensor]:
    """Returns log-probabilities and entropy of SkyRL's model for FSDP, of an old policy too, and gradients."""
    from skyrl.backends.skyrl_train.workers.model_wrapper import HFModelWrapper

    wrapper, generator = HFModelWrapper(model), torch.Generator().manual_seed(1)
    mask = torch.arange(9).expand(2, 9) >= torch.tensor([[0], [3]])
    options = {"attention_mask": mask.long(), "temperature": 0.7}
    tokens = torch.randint(0, 64, (2, 9), generator=generator)
    logprobs, output = wrapper(tokens, 4, return_output=True, compute_entropy=True, **options)
    gradients = torch.autograd.grad(logprobs.sum() + 0.1 * output["entropy"].sum(), [*model.parameters()])
    with torch.no_grad():
        return [logprobs, output["entropy"], wrapper(tokens, 4, **options), *gradients]


def make_model() -> transformers.PreTrainedModel:
    torch.manual_seed(0)
    sizes = dict(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=1, head_dim=8)
    config = transformers.Qwen3Config(**sizes, num_attention_heads=4, num_key_value_heads=2)
    return transformers.Qwen3ForCausalLM(config)


def main() -> None:
    replace_flash_attention()
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    generator = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(2, 8, 32, generator=generator), torch.randn(128, 32, generator=generator) / 4
    operands = hidden, weight, torch.randint(0, 128, (2, 8), generator=generator)
    want, want_fsdp = score(*operands), score_with_fsdp(make_model())
    installed = skyrl.install_in_worker()
    got = score(*operands)
    norms = [((x - y).norm() / y.norm()).item() for x, y in zip(got, want, strict=True)]
    results: dict[str, Any] = {"values": max(norms[:2]), "gradients": max(norms[2:]), "calls": installed.calls}
    got_fsdp = score_with_fsdp(make_model())
    results["FSDP"] = max(((x - y).norm() / y.norm()).item() for x, y in zip(got_fsdp, want_fsdp, strict=True))
    (handle,) = installed.deferrals
    results |= {"served": handle.served, "stored": handle.stored}
    try:
        model_utils.from_parallel_logits_to_logprobs(hidden @ weight.t(), operands[2], 0, 128, None)
    except RuntimeError as refusal:
        results["refusal"] = str(refusal)
    print(json.dumps(results))


if __name__ == "__main__":
    main()
