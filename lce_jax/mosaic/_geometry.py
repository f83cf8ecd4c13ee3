"""How a call is cut into the tiles of a kernel set: padded tokens, row blocks, vocabulary tiles, what is left over."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

from lce_jax._types import Case


class Tiling(NamedTuple):
    """The tile sizes of a kernel set."""

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
    num_tiles: int  # of the vocabulary; the last one may be ragged
    whole_atoms: bool  # V is a multiple of the atom, so kernels read and write part of the weight where it lies


def geometry(case: Case, tiling: Tiling) -> Geometry:
    """The shapes of ``case``."""
    tokens = max(-(-case.num_tokens // tiling.atom) * tiling.atom, tiling.row_block)
    row_blocks = -(-tokens // tiling.row_block)
    return Geometry(
        row_block=tiling.row_block,
        tile=tiling.tile,
        atom=tiling.atom,
        tokens=tokens,
        padded_tokens=-(-row_blocks // tiling.most_clustered) * tiling.most_clustered * tiling.row_block,
        row_blocks=row_blocks,
        num_tiles=-(-case.vocab_size // tiling.tile),
        whole_atoms=case.vocab_size % tiling.atom == 0,
    )
