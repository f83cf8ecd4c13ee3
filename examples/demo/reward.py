"""The reward of phase 2: how much of a completion is Python, as Python's own parser judges it, line by line.

Real text does not earn 1: it has comments, docstrings and statements of several lines. A policy can earn more by
writing only short statements, and with enough steps it does: the reward measures statements, not good code. The loss on
real text, which the demo prints too, shows what this costs.
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

# A line of a program may need others around it. The first of these frames that parses decides.
_FRAMES = ("{}", "{} pass", "if 1: pass\n{} pass", "try: pass\n{} pass", "{}\ndef f(): pass")
_MAX_LINE = 500  # characters: beyond it the parser's own recursion could overflow


def is_statement(line: str) -> bool:
    """Whether a line is a statement that does something, or the head of one.

    Accepted by `ast.parse` within one of the frames above, and not just a comment, a name, a number, a string or
    another expression without effect: prose is full of those ("This", "a < b").
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
    """The share of a window of ``window`` tokens on lines that are statements, each different line counted once.

    A line is (text, tokens). Blank lines, comments and repetitions earn nothing, and neither does ending before the
    window is full, so the degenerate ways to please the parser do not pay.
    """
    different = {text.strip(): length for text, length in reversed(lines)}
    return sum(length for text, length in different.items() if is_statement(text)) / window


def rewards(completions: Int[np.ndarray, "b window"], corpus: Corpus) -> Float[np.ndarray, "b"]:
    """`statement_share` of each completion, up to its end-of-text token."""
    lengths = generated(completions, corpus).sum(axis=1)
    shares = []
    for tokens, length in zip(completions.tolist(), lengths.tolist(), strict=True):
        lines = list(_lines(tokens[:length], corpus))
        shares.append(statement_share(lines, completions.shape[1]))
    return np.array(shares, np.float32)


def generated(completions: Int[np.ndarray, "b window"], corpus: Corpus) -> Bool[np.ndarray, "b window"]:
    """True up to and including the first end-of-text token: what comes after it is not part of the completion."""
    ended = np.cumsum(completions == corpus.end_of_text, axis=1)
    return np.pad(ended, ((0, 0), (1, 0)))[:, :-1] == 0


def _lines(tokens: list[int], corpus: Corpus) -> Iterator[tuple[str, int]]:
    """Text and token count of each line, newline included. The window may cut the last line short."""
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
