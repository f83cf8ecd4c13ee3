"""``python -m tests.small_demo``: the demo's command, on every fourth of its files, with an eighth of its vocabulary.

And with one layer in place of three.

The rest is the demo's own. ``.ci/run`` runs the demo whole.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from lce_jax.demo import cli, model, text

VOCAB_SIZE = 2000


def small_corpus() -> text.Corpus:
    return text.load_corpus(VOCAB_SIZE)


def small_model(*arguments: Any) -> model.Config:
    return dataclasses.replace(every_layer(*arguments), num_layers=1)


if __name__ == "__main__":
    every, every_layer = text.read_standard_library, cli._model_config
    text.read_standard_library = lambda: every()[::4]
    cli.load_corpus, cli.VOCAB_SIZE = small_corpus, VOCAB_SIZE
    cli._model_config = small_model
    cli.main()
