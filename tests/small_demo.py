"""``python -m tests.small_demo``: the demo's command with a quarter of its files and an eighth of its vocabulary.

The model has one layer in place of three; batches are shorter, completions fewer. Phase 1 is repeated as on a GPU with
kernels. Packages that only the tests install cannot be imported here, because ``make demo`` does not install them.

All else is the demo's code. ``.ci/run`` runs the demo in full size.
"""

from __future__ import annotations

import dataclasses
import functools
import gc
import sys
from typing import Any

if __name__ == "__main__":  # pytest imports this file too, to look for doctests
    for name in ("torch", "megatron", "hypothesis", "IPython", "nbconvert", "pytest"):
        sys.modules[name] = None  # type: ignore[assignment]

from examples.demo import cli, model, rl, sft, text

VOCAB_SIZE = 2000


def small_corpus() -> text.Corpus:
    return text.load_corpus(VOCAB_SIZE)


def small_model(*arguments: Any) -> model.Config:
    return dataclasses.replace(every_layer(*arguments), num_layers=1, hidden_size=64, mlp_size=128)


if __name__ == "__main__":
    gc.set_threshold(50_000, 20, 20)  # as in conftest.py
    every, every_layer = text.read_standard_library, cli._model_config
    text.read_standard_library = lambda: every()[::4]
    cli.load_corpus, cli.VOCAB_SIZE = small_corpus, VOCAB_SIZE
    cli._model_config = small_model
    sft.supports_threshold = lambda _: True
    sft.SftConfig = functools.partial(sft.SftConfig, batch=4, length=32)
    rl.RlConfig = functools.partial(rl.RlConfig, prompts=4, group=4, completion_length=16)
    cli.main()
