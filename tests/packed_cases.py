"""Packed rows of tokens, and the plain computation on each sequence, in NumPy."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np


class Packed(NamedTuple):
    """Sequences of tokens in one row, each padded to a multiple. Token ids begin at 100."""

    lengths: list[int]
    multiple: int = 1
    padding: int = 0  # tokens after the last sequence

    @property
    def sequences(self) -> list[np.ndarray]:
        return [100 * (i + 1) + np.arange(length) for i, length in enumerate(self.lengths)]

    @property
    def padded_lengths(self) -> list[int]:
        return [-(-length // self.multiple) * self.multiple for length in self.lengths]

    @property
    def cu_seqlens(self) -> np.ndarray:
        return np.cumsum([0, *self.lengths])

    @property
    def cu_seqlens_padded(self) -> np.ndarray:
        return np.cumsum([0, *self.padded_lengths])

    @property
    def segment_ids(self) -> np.ndarray:
        """The sequences' ids from 1 on; 0 is padding."""
        return self.row([np.full(length, i + 1) for i, length in enumerate(self.lengths)], 0)

    @property
    def tokens(self) -> np.ndarray:
        return self.row(self.sequences, 7)

    def row(self, sequences: list[Any], padding: Any) -> np.ndarray:
        """Returns one value per token of each sequence, with ``padding`` between and after the sequences."""
        padded_lengths = zip(sequences, self.padded_lengths, strict=True)
        kind = np.asarray(padding).dtype
        parts = [np.concatenate([np.asarray(x, kind), np.full(room - len(x), padding)]) for x, room in padded_lengths]
        return np.concatenate([*parts, np.full(self.padding, padding)])

    @property
    def labels(self) -> np.ndarray:
        return self.labels_ahead(1)

    def summed(self, x: np.ndarray, where: np.ndarray, *, mean: bool) -> np.ndarray:
        """Returns the sum or mean of each sequence over its rows in ``where``, at each of its rows; 0 elsewhere."""
        x, result = np.asarray(x, float), np.zeros(x.shape)
        for begin, length in zip(self.cu_seqlens_padded, self.lengths, strict=False):
            rows = slice(begin, begin + length)
            count = where[..., rows].sum(-1)
            total = np.where(where[..., rows], x[..., rows], 0).sum(-1) / (np.maximum(count, 1) if mean else 1)
            result[..., rows] = total[..., None]
        return result

    def labels_ahead(self, steps: int) -> np.ndarray:
        return self.row([np.append(x[steps:], np.full(steps, -100))[: len(x)] for x in self.sequences], -100)


PACKED = {
    "one": Packed([5]),
    "several": Packed([3, 1, 4]),
    "empty ones": Packed([0, 3, 0, 0, 2, 0]),
    "padding after": Packed([3, 2], padding=4),
    "padded each": Packed([3, 5, 4], multiple=4),
    "padded, and after": Packed([3, 5, 0, 1], multiple=4, padding=2),
}
WITHOUT_SEGMENTS = ("padded each", "padded, and after")  # segment ids cannot tell an empty sequence from padding


def chunks_of_rank(x: np.ndarray, rank: int, cp_size: int, layout: str) -> np.ndarray:
    """Returns the chunks that a rank has of one sequence, or of several rows."""
    if layout == "contiguous":
        return np.split(x, cp_size, axis=-1)[rank]
    parts = np.split(x, 2 * cp_size, axis=-1)
    return np.concatenate([parts[rank], parts[2 * cp_size - 1 - rank]], axis=-1)


def part_of_rank(x: np.ndarray, offsets: Any, rank: int, cp_size: int, layout: str) -> np.ndarray:
    """Returns the chunks that a rank has of each sequence. ``offsets`` are the sequences' beginnings."""
    parts = np.split(x, np.asarray(offsets)[1:-1], axis=-1)
    return np.concatenate([chunks_of_rank(part, rank, cp_size, layout) for part in parts], axis=-1)


# Offsets of 4 sequences in 12 tokens, and of their padded lengths. They do not fit together.
MISFITS = {
    "beyond the end": ([0, 5, 13, 13, 13], None),
    "falling": ([0, 5, 3, 12, 12], None),
    "filled up with zeros": ([0, 5, 9, 0, 0], None),
    "not from 0": ([1, 5, 9, 9, 9], None),
    "differences that overflow": ([0, 2**31 - 1, -(2**31), -1, 12], None),
    "more than their room": ([0, 5, 9, 9, 9], [0, 4, 12, 12, 12]),
    "room beyond the end": ([0, 5, 9, 9, 9], [0, 8, 12, 16, 16]),
    "falling room": ([0, 5, 9, 9, 9], [0, 8, 12, 8, 12]),
}


def is_nothing(x: Any) -> bool:
    """Returns whether all of a result is NaN, the least integer or False, as for traced offsets that do not fit."""
    x = np.asarray(x)
    if x.dtype == np.bool_:
        return not x.any()
    if np.issubdtype(x.dtype, np.floating):
        return bool(np.isnan(x).all())
    return bool((x == {"int8": -128, "uint8": 255, "int32": -(2**31), "int64": -(2**63)}[x.dtype.name]).all())


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {  # the function, its arguments as lists, and the message
    "two ways": (
        "next_tokens",
        {"tokens": [1, 2], "segment_ids": [1, 1], "cu_seqlens": [0, 2]},
        "segment_ids and cu_seqlens both say where sequences end",
    ),
    "padded alone": ("next_tokens", {"tokens": [1, 2], "cu_seqlens_padded": [0, 2]}, "without cu_seqlens"),
    "an id alone": ("next_tokens", {"tokens": [1, 2], "padding_segment": 0}, "padding_segment=0 without segment_ids"),
    "beyond the end": (
        "next_tokens", {"tokens": [1, 2], "cu_seqlens": [0, 3]}, r"must rise from 0 to at most 2, .* got \[0, 3\]"
    ),
    "falling": ("next_tokens", {"tokens": [1, 2, 3], "cu_seqlens": [0, 2, 1]}, r"must rise .* got \[0, 2, 1\]"),
    "more than its room": (
        "next_values",
        {"values": [1, 2, 3, 4], "fill": 0, "cu_seqlens": [0, 3, 4], "cu_seqlens_padded": [0, 2, 4]},
        "sequence 0 has 3 tokens by cu_seqlens, but 2 by cu_seqlens_padded",
    ),
    "other shapes": ("next_tokens", {"tokens": [1, 2], "segment_ids": [1]}, r"segment_ids \(1,\) must have .* \(2,\)"),
    "of rank": ("of_rank", {"x": [1, 2, 3, 4], "cp_rank": 2, "cp_size": 2}, r"cp_rank must lie in \[0, 2\), got 2"),
    "chunks": (
        "of_rank", {"x": [1, 2, 3, 4, 5, 6], "cp_rank": 0, "cp_size": 2},
        r'6 tokens do not divide into 4 chunks, which layout="zigzag" gives 2 ranks: pad them to 8',
    ),
    "chunks of one": (
        "in_rank_order", {"x": [1, 2, 3, 4, 5, 6], "cp_size": 2, "cu_seqlens": [0, 4, 6]},
        "cu_seqlens must have sequences of multiples of 4 tokens, got one of 2: pad them",
    ),
    "not all": (
        "in_sequence_order", {"x": [1, 2, 3, 4], "cp_size": 1, "cu_seqlens": [0, 3]}, r"rise from 0 to 4, .*\[0, 3\]"
    ),
    "a layout": (
        "positions", {"length": 4, "cp_rank": 0, "cp_size": 1, "layout": "striped"}, 'layout must be "zigzag" or "conti'
    ),
    "a dimension": ("of_rank", {"x": [1, 2], "cp_rank": 0, "cp_size": 1, "axis": 1}, r"axis=1 is no dimension of x"),
    "the token itself": ("next_tokens", {"tokens": [1, 2], "ahead": 0}, "ahead must be at least 1, .* got 0"),
    "no bool": ("next_values", {"values": [True], "fill": 2}, "fill must be True or False, got 2"),
    "a mask of numbers": (
        "segment_mean", {"x": [1.0, 2.0], "where": [1, 0]}, r"where .*int64 \(2,\) must be bool .* of x \(2,\)"
    ),
    "a mask of sequences": (
        "segment_sum", {"x": [1.0, 2.0], "where": [True]}, r"where .*bool \(1,\) must be bool of the shape of x \(2,\)"
    ),
    "offsets of all ranks": (
        "segment_mean", {"x": [1.0, 2.0], "cu_seqlens": [0, 4]}, r"must rise from 0 to at most 2, .* got \[0, 4\]"
    ),
    "a fraction": ("next_values", {"values": [1, 2], "fill": 0.5}, "fill must be a Python integer, got 0.5"),
}  # fmt: skip
