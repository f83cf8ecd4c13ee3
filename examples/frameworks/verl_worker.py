"""verl's own patch of a model with `lce_torch_bridge.verl`, and with verl's head in PyTorch; prints JSON.

``python -m examples.frameworks.verl_worker``, in an environment with verl.
"""

from __future__ import annotations

import os

os.environ["JAX_PLATFORMS"] = "cpu"

import copy
import json
from typing import Any

import torch
import verl.models.mcore.model_forward_1f1b_overlap as overlap  # before our file: these two import by name
import verl.models.mcore.model_forward_fused as fused
from transformers import Qwen3Config, Qwen3ForCausalLM
from verl.models.transformers.monkey_patch import patch_forward_with_backends
from verl.utils.kernel import linear_cross_entropy as kernel

from examples import verl_actor
from lce_torch_bridge import verl


def score(backend: str, model: Any) -> list[torch.Tensor]:
    """Returns log-probabilities, entropies and gradients of a model with a backend of verl."""
    model = copy.deepcopy(model)
    patch_forward_with_backends(model, use_fused_kernels=True, fused_kernels_backend=backend)
    tokens = torch.randint(0, 256, (2, 16), generator=torch.Generator().manual_seed(1))
    out = model(tokens, temperature=0.7, return_dict=True)
    (out.log_probs.sum() - 0.1 * out.entropy.sum()).backward()
    return [out.log_probs.flatten(), out.entropy.flatten(), *(x.grad for x in model.parameters())]


def main() -> None:
    torch.manual_seed(0)
    sizes = dict(vocab_size=256, hidden_size=32, intermediate_size=64, num_hidden_layers=1, head_dim=8)
    model = Qwen3ForCausalLM(Qwen3Config(**sizes, num_attention_heads=4, num_key_value_heads=2))
    with verl.install_in_worker() as installed:
        results: dict[str, Any] = {
            "replaced": [x.linear_cross_entropy is verl._counting_cross_entropy for x in (kernel, overlap, fused)]
        }
        got, want = score("triton", model), score("torch", model)
    norms = [((x - y).norm() / y.norm()).item() for x, y in zip(got, want, strict=True)]
    results |= {"values": max(norms[:2]), "gradients": max(norms[2:]), "calls": installed.calls}
    installed.calls = 0
    results["losses"] = verl_actor.main()
    print(json.dumps(results))


if __name__ == "__main__":
    main()
