"""``python -m tests.small_demo``: the demo's command on every fourth of its files, with an eighth of its vocabulary.

The rest is the demo's own. ``.ci/run`` runs the demo whole.
"""

from __future__ import annotations

from lce_jax.demo import cli, text

VOCAB_SIZE = 2000


def small_corpus() -> text.Corpus:
    return text.load_corpus(VOCAB_SIZE)


if __name__ == "__main__":
    every = text.read_standard_library
    text.read_standard_library = lambda: every()[::4]
    cli.load_corpus, cli.VOCAB_SIZE = small_corpus, VOCAB_SIZE
    cli.main()
