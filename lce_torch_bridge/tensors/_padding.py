"""How many rows a program has, so that many counts of tokens share few programs.

The forward of JAX's way walks the tokens in pieces of `FORWARD_ROWS`, the last one padded: one program for all counts.
The backward takes all tokens at once, because dweight is a sum over them and is rounded once. Its sizes are 128, 512,
powers of two from 2,048 on, and from 32,768 on the numbers half-way between them too: 6 programs up to 16,384 tokens
and 11 up to 131,072. A forward that keeps a cache takes all tokens at once as well, with as many programs. So do
kernels that are launched directly (`launched_directly`), which read no padding.

The programs skip padding, block by block. It costs memory: at most twice that of the rows, 1.5 times from 32,768 on.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

FORWARD_ROWS = 8192
FEW = (128, 512)  # sizes for few tokens
SMALLEST = 2048  # of the other sizes
HALFWAY_FROM = 32768


class Piece(NamedTuple):
    """Tokens that a program takes."""

    tokens: slice
    rows: int  # of the program


def pieces(tokens: int, at_once: bool) -> list[Piece]:
    """The forward's pieces of ``tokens`` tokens."""
    if at_once:
        return [Piece(slice(0, tokens), size(tokens))]
    starts = range(0, tokens, FORWARD_ROWS)
    return [Piece(slice(i, min(i + FORWARD_ROWS, tokens)), FORWARD_ROWS) for i in starts]


def size(tokens: int) -> int:
    """The rows of the program that takes ``tokens`` tokens at once.

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


def at_most(rows: int) -> int:
    """The largest `size` of at most ``rows`` rows, or the smallest one.

    Example:
        >>> from lce_torch_bridge.tensors._padding import at_most
        >>> [at_most(n) for n in (1, 2047, 4832, 65535, 65536)]
        [128, 512, 4096, 49152, 65536]
    """
    if rows < SMALLEST:
        return max((size for size in FEW if size <= rows), default=FEW[0])
    power = 1 << rows.bit_length() - 1
    halfway = power // 2 * 3
    return halfway if HALFWAY_FROM < halfway <= rows else power


def pad(x: torch.Tensor, rows: int) -> torch.Tensor:
    """``x`` with uninitialised rows added up to ``rows``; ``x`` itself if it has that many."""
    if len(x) == rows:
        return x
    padded = x.new_empty((rows, *x.shape[1:]))
    padded[: len(x)].copy_(x)
    return padded


def candidate_ids(candidates: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Candidates as int32 numbers. Those outside of the vocabulary stay outside: 2³² + 3 does not become 3.

    Example:
        >>> import torch
        >>> from lce_torch_bridge.tensors._padding import candidate_ids
        >>> candidate_ids(torch.tensor([3, 2**32 + 3, -100]), vocab_size=10).tolist()
        [3, 10, -1]
    """
    return candidates.long().clamp(-1, vocab_size).int()


def with_count(x: torch.Tensor, rows: int) -> torch.Tensor:
    """n, then ``x [n, K]`` padded to ``rows`` rows, flat: ``[1 + rows K]``.

    One tensor, because each one that crosses costs the host time. It lies in torch's memory, used in stream order.

    Example:
        >>> import torch
        >>> from lce_torch_bridge.tensors._padding import with_count
        >>> with_count(torch.tensor([[5, 6]]), rows=2).tolist()  # the last two: padding
        [1, 5, 6, 1, 1]
    """
    packed = x.new_full((1 + rows * x.shape[1],), len(x))
    packed[1 : 1 + x.numel()].view(x.shape).copy_(x)
    return packed
