"""How many rows programs have, so that many counts of tokens share few of them.

The forward walks the tokens in pieces of `FORWARD_ROWS`, the last one padded: one program for all counts, and a
token's results have the same bits whichever tokens stand around it. The backward takes all tokens at once, for dweight
is a sum over them and is rounded once: its sizes are powers of two, and from 32,768 on their halfway points too. With
the programs for `WHOLE` sizes that makes a dozen up to 131,072 tokens.

Padding is left out of the work, block by block. What it costs is memory: that of at most twice the rows, 1.5 times
from 32,768 on.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

FORWARD_ROWS = 8192
SMALLEST = 2048  # size of the backward
HALFWAY_FROM = 32768
WHOLE = (4096, 8192, 16384)  # sizes with a program of their own for exactly so many tokens, which masks no rows


class Piece(NamedTuple):
    """Tokens that a program takes."""

    tokens: slice
    rows: int  # of the program
    num_rows: int | None  # how many of them count; None: all


def pieces(tokens: int) -> list[Piece]:
    """The forward's pieces of ``tokens`` tokens."""
    starts = range(0, tokens, FORWARD_ROWS)
    counts = [min(FORWARD_ROWS, tokens - start) for start in starts]
    return [Piece(slice(i, i + count), FORWARD_ROWS, count) for i, count in zip(starts, counts, strict=True)]


def whole(tokens: int) -> Piece:
    """All of ``tokens`` tokens at once."""
    return Piece(slice(0, tokens), size(tokens), None if tokens in WHOLE else tokens)


def size(tokens: int) -> int:
    """The rows of the program that takes ``tokens`` tokens at once.

    Example:
        >>> from lce_torch_bridge._rows import size
        >>> [size(n) for n in (1, 2048, 2049, 32769, 49153, 131072)]
        [2048, 2048, 4096, 49152, 65536, 131072]
    """
    power = max(SMALLEST, 1 << (tokens - 1).bit_length())
    halfway = power // 4 * 3
    return halfway if halfway > HALFWAY_FROM and tokens <= halfway else power


def pad(x: torch.Tensor, rows: int, dim: int = 0) -> torch.Tensor:
    """``x`` with ``rows`` entries along ``dim``, anything behind its own; itself where it has them."""
    entries = x.shape[dim]
    if entries == rows:
        return x
    shape = list(x.shape)
    shape[dim] = rows
    padded = x.new_empty(shape)
    padded.narrow(dim, 0, entries).copy_(x)
    return padded
