"""The Trainer of Hugging Face with logits and without; prints JSON.

``python -m examples.frameworks.hugging_face_worker``, in an environment with transformers and accelerate. With
``torchrun``, two ranks under DDP.
"""

from __future__ import annotations

import os

os.environ.update(JAX_PLATFORMS="cpu", HF_HUB_OFFLINE="1", ACCELERATE_USE_CPU="true")

import json
import types
from typing import Any

import torch
import transformers

from examples import hugging_face_trainer
from lce_torch_bridge.transformers import patch

SIZES = dict(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
             num_key_value_heads=2, head_dim=8, pad_token_id=0)  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {  # what is served, then what is refused
    "Llama": {}, "Gemma2": dict(final_logit_softcapping=0.5), "GPTNeoX": {}, "Mixtral": dict(num_local_experts=2),
    "Cohere": {}, "Granite": dict(logits_scaling=8.0), "RecurrentGemma": dict(num_hidden_layers=3, logits_soft_cap=0.5),
}  # fmt: skip


def of_model(name: str) -> str | list[float]:
    """The losses of two calls of a model of its own, with a label that does not count; or why it is refused."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**SIZES | MODELS[name])
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    tokens = torch.randint(1, 64, (2, 12))
    given = dict(input_ids=tokens, labels=tokens.where(torch.arange(12) > 2, -100))
    want = model(**given).loss.item()
    try:
        with patch(model):
            return [want, *(model(**given).loss.item() for _ in range(2))]
    except NotImplementedError as refusal:
        return str(refusal)


def main() -> None:
    got = hugging_face_trainer.main()
    want = hugging_face_trainer.main(patch=lambda _: types.SimpleNamespace(calls=8))
    ranks = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    found = {"got": got, "want": want, "ranks": ranks, "models": {name: of_model(name) for name in MODELS}}
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
