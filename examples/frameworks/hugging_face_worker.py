"""The Trainer of Hugging Face with logits and without; prints JSON.

``python -m examples.frameworks.hugging_face_worker``, in an environment with transformers and accelerate. With
``torchrun``, two ranks under DDP.
"""

from __future__ import annotations

import os

os.environ.update(JAX_PLATFORMS="cpu", HF_HUB_OFFLINE="1", ACCELERATE_USE_CPU="true")

import json
from unittest import mock

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from examples import hugging_face_trainer


def main() -> None:
    ours = hugging_face_trainer.linear_cross_entropy
    with mock.patch.object(hugging_face_trainer, "linear_cross_entropy", wraps=ours) as called:
        got = hugging_face_trainer.main()
    want = hugging_face_trainer.main(change=lambda model: model)
    scaled = Qwen3ForCausalLM(Qwen3Config(vocab_size=8, hidden_size=8, num_hidden_layers=1, logit_scale=0.5))
    try:
        hugging_face_trainer.without_logits(scaled)
    except NotImplementedError as refusal:
        refused = str(refusal)
    ranks = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    print(
        json.dumps({"got": got, "want": want, "calls": called.call_count, "ranks": ranks, "refused": refused}),
        flush=True,
    )


if __name__ == "__main__":
    main()
