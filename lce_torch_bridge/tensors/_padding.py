"""Padding of the number of rows, so that calls with different numbers of tokens share few compiled programs.

The forward through JAX processes the tokens in pieces of `FORWARD_ROWS` rows, the last piece padded, so it needs one
program. The backward processes all tokens at once, because dweight is a sum over all tokens that is rounded once. Its
sizes are 128, 512, powers of two from 2,048 on, and from 32,768 on also the sizes halfway between powers. That makes 6
programs for up to 16,384 tokens, and 11 for up to 131,072. The same sizes apply to a forward that saves a cache, which
also processes all tokens at once, and to kernels that are launched directly (`launched_directly`), which do not read
padding.

Programs skip blocks of padding. Padding takes at most as much memory as the rows; for 32,768 rows or more, at most half
as much.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

FORWARD_ROWS = 8192
FEW = (128, 512)  # the sizes for few tokens
SMALLEST = 2048  # the smallest of the other sizes
HALFWAY_FROM = 32768


class Piece(NamedTuple):
    """Tokens that one run of a program processes."""

    tokens: slice
    rows: int  # the number of rows of the program, including padding


def pieces(tokens: int, at_once: bool) -> list[Piece]:
    """Divides ``tokens`` tokens into the pieces that a forward processes."""
    if at_once:
        return [Piece(slice(0, tokens), size(tokens))]
    starts = range(0, tokens, FORWARD_ROWS)
    return [Piece(slice(i, min(i + FORWARD_ROWS, tokens)), FORWARD_ROWS) for i in starts]


def size(tokens: int) -> int:
    """Returns the number of rows of the program that processes ``tokens`` tokens at once.

    Example:
        >>> from lce_torch_bridge.tensors._padding import size
        >>> [size(n) for n in (1, 129, 2048, 2049, 32769, 49153, 131072)]
        [128, 512, 2048, 4096, 49152, 65536, 131072]
    """
    few = [rows for rows in FEW if tokens <= rows]
    if few:
        return few[0]
    power = max(SMALLEST, 1 << (tokens - 1).bit_length())
    halfway = power // 4 * 3
    return halfway if halfway > HALFWAY_FROM and tokens <= halfway else power


def round_down(rows: int) -> int:
    """Returns the largest `size` that is at most ``rows``; the smallest size if all are larger.

    Example:
        >>> from lce_torch_bridge.tensors._padding import round_down
        >>> [round_down(n) for n in (1, 2047, 4832, 65535, 65536)]
        [128, 512, 4096, 49152, 65536]
    """
    if rows < SMALLEST:
        return max((size for size in FEW if size <= rows), default=FEW[0])
    power = 1 << rows.bit_length() - 1
    halfway = power // 2 * 3
    return halfway if HALFWAY_FROM < halfway <= rows else power


def pad(x: torch.Tensor, rows: int) -> torch.Tensor:
    """Returns ``x`` with uninitialised rows appended, ``rows`` in all; ``x`` itself if it has ``rows`` rows."""
    if len(x) == rows:
        return x
    padded = x.new_empty((rows, *x.shape[1:]))
    padded[: len(x)].copy_(x)
    return padded


def candidate_ids(candidates: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Converts candidates to int32. Ids outside of the vocabulary stay outside: 2³² + 3 does not become 3.

    Example:
        >>> import torch
        >>> from lce_torch_bridge.tensors._padding import candidate_ids
        >>> candidate_ids(torch.tensor([3, 2**32 + 3, -100]), vocab_size=10).tolist()
        [3, 10, -1]
    """
    return candidates.long().clamp(-1, vocab_size).int()


def pack_rows(x: torch.Tensor, rows: int) -> torch.Tensor:
    """Packs n and ``x [n, K]``, padded to ``rows`` rows, into one flat tensor ``[1 + rows K]``.

    The result is one tensor, because each tensor that is passed to JAX takes time on the host. torch owns its memory,
    in stream order.

    Example:
        >>> import torch
        >>> from lce_torch_bridge.tensors._padding import pack_rows
        >>> pack_rows(torch.tensor([[5, 6]]), rows=2).tolist()  # the last two: padding
        [1, 5, 6, 1, 1]
    """
    packed = x.new_full((1 + rows * x.shape[1],), len(x))
    packed[1 : 1 + x.numel()].view(x.shape).copy_(x)
    return packed
