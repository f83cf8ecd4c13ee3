"""How a call is cut into tiles: padded tokens, row blocks, vocabulary tiles, what is left over."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

from lce_jax._types import Case


class Tiling(NamedTuple):
    """The tile sizes of a generation."""

    row_block: int  # tokens of a tile of logits
    tile: int  # vocabulary columns of a tile of logits
    atom: int  # rows of an array: a copy into shared memory moves whole atoms
    most_clustered: int  # row blocks that may share an operand; per-token vectors are padded to whole groups of them


@dataclasses.dataclass(frozen=True)
class Geometry:
    """The shapes of a call as the kernels see them."""

    row_block: int  # tokens of a tile of logits
    tile: int  # vocabulary columns of a tile of logits
    atom: int  # rows that a copy into shared memory moves at least
    tokens: int  # T, padded to whole atoms and to one row block
    padded_tokens: int  # the length of per-token vectors: whole groups of row blocks
    row_blocks: int
    num_tiles: int  # of the vocabulary; the last one of a part may be ragged
    whole_atoms: bool  # V is a multiple of the atom, so kernels read and write part of the weight where it lies
    part_columns: int  # of a part of the vocabulary, whose tiles begin at its first column; V if it has one part
    part_tiles: int

    @property
    def has_parts(self) -> bool:
        """Whether the vocabulary has several parts, of which the last may be smaller."""
        return self.part_tiles < self.num_tiles

    @property
    def overhang(self) -> int:
        """The columns by which the tiles of a part reach beyond it."""
        return self.part_tiles * self.tile - self.part_columns

    def column(self, tile: Any) -> Any:
        """The first column of a tile."""
        return tile * self.tile - (tile // self.part_tiles * self.overhang if self.has_parts else 0)

    def place(self, column: Any) -> Any:
        """Where a column lies in the row of all tiles: its tile, times the tile's size, and its place in the tile."""
        return column + (column // self.part_columns * self.overhang if self.has_parts else 0)

    def tiles_of(self, columns: int) -> int:
        """The tiles that hold the first so many columns."""
        parts, rest = divmod(columns, self.part_columns)
        return parts * self.part_tiles + -(-rest // self.tile)


def geometry(case: Case, tiling: Tiling) -> Geometry:
    """The shapes of ``case``."""
    tokens = max(-(-case.num_tokens // tiling.atom) * tiling.atom, tiling.row_block)
    row_blocks = -(-tokens // tiling.row_block)
    part = min(case.options.vocab_part_size or case.vocab_size, case.vocab_size)
    part_tiles, (parts, rest) = -(-part // tiling.tile), divmod(case.vocab_size, part)
    return Geometry(
        row_block=tiling.row_block,
        tile=tiling.tile,
        atom=tiling.atom,
        tokens=tokens,
        padded_tokens=-(-row_blocks // tiling.most_clustered) * tiling.most_clustered * tiling.row_block,
        row_blocks=row_blocks,
        num_tiles=parts * part_tiles + -(-rest // tiling.tile),
        whole_atoms=case.vocab_size % tiling.atom == 0,
        part_columns=part,
        part_tiles=part_tiles,
    )
