"""Trains with the Trainer of Hugging Face, with stored logits and without; prints JSON.

``python -m examples.frameworks.hugging_face_worker``, in an environment with transformers and accelerate. With
``torchrun``, two ranks under DDP.
"""

from __future__ import annotations

import os

os.environ.update(JAX_PLATFORMS="cpu", HF_HUB_OFFLINE="1", ACCELERATE_USE_CPU="true")

import json
import types

import torch

from examples import hugging_face_trainer


def main() -> None:
    got = hugging_face_trainer.main()
    want = hugging_face_trainer.main(patch=lambda _: types.SimpleNamespace(served=8, stored=0))
    ranks = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    print(json.dumps({"got": got, "want": want, "ranks": ranks}), flush=True)


if __name__ == "__main__":
    main()
