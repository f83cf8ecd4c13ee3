"""The part of the vocabulary that one launch covers, as the scalars that a kernel is given."""

from __future__ import annotations

from typing import Any, NamedTuple


class Span(NamedTuple):
    """What one launch covers. The numbers are known at run time, so one compiled kernel serves every chunk."""

    num_rows: Any  # live rows
    num_columns: Any  # live columns of the shard
    column: Any  # the first one: the number of its tile in the shard, times the tile's columns
    num_tiles: Any  # of the vocabulary
    depth: Any = 0  # columns that a product contracts
    offset: Any = 0  # where its first column lies in the weight and in dweight that the kernel is given
    slot: Any = 0  # of its first tile in the array of partial statistics
    adds: Any = 0  # 1: the product is added to dhidden's sums, which it otherwise overwrites

    @classmethod
    def unpack(cls, scalars: Any) -> Span:
        """In a kernel."""
        return cls(*(scalars[i] for i in range(len(cls._fields))))
