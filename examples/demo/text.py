"""Text that every machine has: the sources of Python's standard library, and a byte-level BPE trained on them."""

from __future__ import annotations

import dataclasses
import itertools
import pathlib
import sysconfig
import tokenize
from typing import TYPE_CHECKING

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

if TYPE_CHECKING:
    from lce_jax.types._shapes import Int

VOCAB_SIZE = 16_000
END_OF_TEXT = "<|endoftext|>"
# Folders that some distributions do not have, that are not part of Python, or that contain tables and not code.
_SKIPPED = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "encodings", "pydoc_data"}
_HELD_OUT_EVERY = 20  # one file in 20 is never trained on


@dataclasses.dataclass(frozen=True)
class Corpus:
    """Token ids of training files and of held-out files. The end-of-text token ends each file."""

    tokenizer: Tokenizer
    train: Int[np.ndarray, "n"]
    held_out: Int[np.ndarray, "m"]

    @property
    def vocab_size(self) -> int:
        """The number of entries of the tokenizer."""
        return self.tokenizer.get_vocab_size()

    @property
    def end_of_text(self) -> int:
        """The id of the token that ends a file."""
        return self.tokenizer.encode(END_OF_TEXT).ids[0]

    @property
    def newline(self) -> int:
        """The id of the newline, which is part of no other token."""
        return self.tokenizer.encode("\n").ids[0]


def load_corpus(vocab_size: int = VOCAB_SIZE) -> Corpus:
    """Reads the sources, trains the tokenizer on them and encodes them. Every call returns the same corpus."""
    documents = read_standard_library()
    held_out = documents[_HELD_OUT_EVERY - 1 :: _HELD_OUT_EVERY]
    train = [text for i, text in enumerate(documents, start=1) if i % _HELD_OUT_EVERY]
    tokenizer = train_tokenizer(train, vocab_size)
    return Corpus(tokenizer, encode(tokenizer, train), encode(tokenizer, held_out))


def read_standard_library() -> list[str]:
    """Returns the text of every Python module of the standard library, in the order of paths."""
    root = pathlib.Path(sysconfig.get_path("stdlib"))
    paths = sorted(path for path in root.rglob("*.py") if not _SKIPPED & set(path.relative_to(root).parts))
    if not paths:
        raise FileNotFoundError(f"no Python sources under {root}: use a Python that has the sources of its library")
    documents = []
    for path in paths:
        with tokenize.open(path) as source:  # uses the encoding in the file's coding line
            documents.append(source.read())
    return documents


def train_tokenizer(documents: list[str], vocab_size: int) -> Tokenizer:
    """Trains a byte-level BPE in which a newline is always a separate token, so that token ids split into lines."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split("\n", "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(documents, trainer)
    return tokenizer


def sample_windows(
    tokens: Int[np.ndarray, "n"], rng: np.random.Generator, count: int, length: int
) -> Int[np.ndarray, "count length"]:
    """Draws windows of text from random positions."""
    starts = rng.integers(0, len(tokens) - length, count)
    return tokens[starts[:, None] + np.arange(length)]


def sample_prompts(
    corpus: Corpus, tokens: Int[np.ndarray, "n"], rng: np.random.Generator, count: int, prompt: int, continuation: int
) -> tuple[Int[np.ndarray, "count prompt"], Int[np.ndarray, "count continuation"]]:
    """Draws prompts that end with a line, and the real continuation of each."""
    line_starts = np.flatnonzero(tokens[:-continuation] == corpus.newline) + 1
    starts = rng.choice(line_starts[line_starts >= prompt], count, replace=False)[:, None] - prompt
    windows = tokens[starts + np.arange(prompt + continuation)]
    return windows[:, :prompt], windows[:, prompt:]


def encode(tokenizer: Tokenizer, documents: list[str]) -> Int[np.ndarray, "n"]:
    """Returns the token ids of all documents, with an end-of-text token after each."""
    end = tokenizer.token_to_id(END_OF_TEXT)
    ids = ([*encoding.ids, end] for encoding in tokenizer.encode_batch_fast(documents))
    return np.fromiter(itertools.chain.from_iterable(ids), np.int32)
