"""The reward of phase 2: the share of a completion that Python's own parser accepts as statements, line by line.

The reward of real text is below 1, because real text has comments, docstrings and statements of several lines. A policy
can earn more with short statements alone, and with enough steps it does, because the reward measures statements and not
good code. The loss on real text, which the demo prints too, shows the cost of that.
"""

from __future__ import annotations

import ast
import itertools
import warnings
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator

    from examples.demo.text import Corpus
    from lce_jax.types._shapes import Bool, Float, Int

# A line of a program may need other lines around it. The first of these frames that parses decides.
_FRAMES = ("{}", "{} pass", "if 1: pass\n{} pass", "try: pass\n{} pass", "{}\ndef f(): pass")
_MAX_LINE = 500  # characters: beyond it the parser's own recursion could overflow


def is_statement(line: str) -> bool:
    """Whether a line is a statement that does something, or the head of one.

    `ast.parse` must accept it within one of the frames above. A comment, a name, a number, a string or another
    expression without effect does not count, because prose is full of those ("This", "a < b").
    """
    line = line.strip()
    if not line or line.startswith("#") or len(line) > _MAX_LINE:
        return False
    for frame in _FRAMES:
        body = _parse(frame.format(line))
        if body is not None:
            return all(_does_something(node) for node in body)
    return False


def statement_share(lines: list[tuple[str, int]], window: int) -> float:
    """Returns the share of ``window`` tokens on lines that are statements. Equal lines count once.

    A line is (text, tokens). Blank lines, comments, repeated lines and tokens after the end of the text add nothing, so
    degenerate completions earn little.
    """
    distinct = {text.strip(): length for text, length in reversed(lines)}
    return sum(length for text, length in distinct.items() if is_statement(text)) / window


def rewards(completions: Int[np.ndarray, "b window"], corpus: Corpus) -> Float[np.ndarray, "b"]:
    """Returns the `statement_share` of each completion up to its end-of-text token."""
    lengths = generated(completions, corpus).sum(axis=1)
    shares = []
    for tokens, length in zip(completions.tolist(), lengths.tolist(), strict=True):
        lines = list(_lines(tokens[:length], corpus))
        shares.append(statement_share(lines, completions.shape[1]))
    return np.array(shares, np.float32)


def generated(completions: Int[np.ndarray, "b window"], corpus: Corpus) -> Bool[np.ndarray, "b window"]:
    """Returns which tokens are part of the completion: those up to and including the first end-of-text token."""
    ended = np.cumsum(completions == corpus.end_of_text, axis=1)
    return np.pad(ended, ((0, 0), (1, 0)))[:, :-1] == 0


def _lines(tokens: list[int], corpus: Corpus) -> Iterator[tuple[str, int]]:
    """Yields the text and the token count of each line, newline included. The window may cut the last line."""
    starts = [0, *(i + 1 for i, token in enumerate(tokens) if token == corpus.newline), len(tokens)]
    for start, stop in itertools.pairwise(starts):
        yield corpus.tokenizer.decode(tokens[start:stop]), stop - start


def _parse(source: str) -> list[ast.stmt] | None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SyntaxWarning)  # an invalid escape is no error here
        try:
            return ast.parse(source).body
        except (SyntaxError, ValueError):
            return None


def _does_something(node: ast.stmt) -> bool:
    return not isinstance(node, ast.Expr) or isinstance(node.value, ast.Call | ast.Await | ast.Yield | ast.YieldFrom)
