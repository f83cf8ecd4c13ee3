"""What the host code asks of the kernels with a ``gradient_threshold``: live tiles, lists of them, their gradients."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from lce_jax._types import Case
from lce_jax.mosaic._live_tiles import Batches, Entries, Order, RowEntries, RowLists, Sizes, Worklist
from lce_jax.mosaic._operands import Prepared

if TYPE_CHECKING:
    from lce_jax._shapes import Array, Float, Int


class LiveKernelSet(Protocol):
    """The part of a `KernelSet` that a ``gradient_threshold`` needs.

    Arrays along tiles, ranks or row blocks may be longer than these: what is after the last one may be anything.
    """

    def join_keeping(
        self,
        scale: Float[Array, "Tp"],
        parts: Float[Array, "parts fields Tp"],
        joined: Float[Array, "groups fields Tp"],
        case: Case,
        group: int,
        numbers: Int[Array, "3"],
        maxima: Float[Array, "tiles kept Tp"],
    ) -> tuple[Float[Array, "groups fields Tp"], Float[Array, "tiles kept Tp"]]:
        """`KernelSet.join`, and ``maxima`` with the first fields of the parts: their largest x, and their sums.

        A group's parts go where the group's number says, in whole groups.
        """

    def select(
        self,
        case: Case,
        maxima: Float[Array, "tiles kept Tp"],
        targets: Int[Array, "Tp"],
        scale: Float[Array, "Tp"],
        merged: Float[Array, "n"],
        field: int,
        numbers: Int[Array, "3 or 5"],
        ids: Int[Array, "n"] | None = None,
        first: int = 0,
    ) -> tuple[Int[Array, "tiles blocks"], Float[Array, "parts Tp"] | None]:
        """1 where a tile is live, and of several parts of the vocabulary the probability in the tiles that are not.

        Args:
            case: of the shard.
            maxima: each tile's largest x, and its sum if the probabilities are asked for.
            targets: the shard's columns of the labels, -1 where it does not hold them.
            scale: the k of eq. 0 in base 2.
            merged: flat; its fields ``field`` and ``field + 1`` are the maximum and the sum of the whole vocabulary.
                Another field follows, or both are padded to whole row blocks.
            field: of the maximum.
            numbers: how many rows there are, the stride of fields, and a tile that is live whatever it holds, or -1;
                with candidates also the id of the shard's first column, and how many columns it has.
            ids: of the candidates, flat. None: there are none.
            first: the field of the first candidate's.
        """

    def dropped_mass(self, masses: Float[Array, "parts Tp"], numbers: Int[Array, "2"]) -> Float[Array, "Tp"]:
        """The sum of the parts in their order. ``numbers``: how many rows there are, and the stride of fields."""

    def live_shape(self, case: Case) -> tuple[int, int]:
        """The shape of what `select` says of the tiles."""

    def live_counts(self, sizes: Sizes, live: Int[Array, "tiles blocks"]) -> Int[Array, "tiles"]:
        """The live row blocks of each tile."""

    def live_order(self, sizes: Sizes, counts: Int[Array, "tiles"]) -> Order:
        """The order of a `Worklist`."""

    def live_entries(
        self,
        sizes: Sizes,
        live: Int[Array, "tiles blocks"],
        order: Int[Array, "ranks"],
        counts: Int[Array, "ranks"],
    ) -> Entries:
        """Each rank's entries."""

    def live_rows(
        self,
        sizes: Sizes,
        order: Int[Array, "ranks"],
        first: Int[Array, "ranks+1"],
        places: Int[Array, "blocks ranks"],
        numbers: Int[Array, "1"],
    ) -> RowEntries:
        """The entries that dhidden contracts, once more, by row block.

        ``numbers``: how many of the first vocabulary tiles it contracts.
        """

    def live_row_lists(
        self,
        sizes: Sizes,
        first: Int[Array, "ranks+1"],
        starts: Int[Array, "batches blocks"],
        counts: Int[Array, "batches blocks"],
        numbers: Int[Array, "1"],
    ) -> tuple[RowLists, Int[Array, "batches fields"]]:
        """Each batch by row block, and its numbers. ``numbers``: the live columns of the shard."""

    def live_ranks(
        self, sizes: Sizes, first: Int[Array, "ranks+1"], counts: Int[Array, "ranks"]
    ) -> Int[Array, "ranks"]:
        """The ``ranks`` of `Batches`."""

    def zeros(self, shape: tuple[int, int, int], numbers: Int[Array, "1"]) -> Float[Array, "splits Tp Hp"]:
        """The first rows of an array, so many as ``numbers`` says, in float32; the others may be anything."""

    def live_group(self, case: Case) -> int:
        """The entries of a `Worklist` that `live_dlogits` computes together: those of one vocabulary tile."""

    def live_dlogits(
        self,
        prepared: Prepared,
        weight: Float[Array, "V H"],
        case: Case,
        factors: Float[Array, "factors Tp"],
        work: Worklist,
        batches: Batches,
        batch: Int[Array, "1"],
        slots: int,
    ) -> Float[Array, "slots*blocks tile"]:
        """The gradient in the raw products of a batch of live tiles, each in the slot of its entry.

        ``batch`` is its number.
        """

    def put_live_candidates(
        self,
        case: Case,
        dlogits: Float[Array, "slots*blocks tile"],
        ids: Int[Array, "n"],
        values: Float[Array, "K*stride"],
        work: Worklist,
        batches: Batches,
        batch: Int[Array, "1"],
        numbers: Int[Array, "3"],
        first: int,
    ) -> Float[Array, "slots*blocks tile"]:
        """`put_candidates` of a batch of live tiles.

        ``numbers``: how many rows there are, the stride, and the id of the shard's first column.
        """

    def update_live_dhidden(
        self,
        sums: Float[Array, "splits Tp Hp"],
        dlogits: Float[Array, "slots*blocks tile"],
        weight: Float[Array, "V H"],
        case: Case,
        work: Worklist,
        batches: Batches,
        batch: Int[Array, "1"],
    ) -> Float[Array, "splits Tp Hp"]:
        """``sums`` with the batch's products over each row block's live vocabulary tiles added."""

    def write_live_dweight(
        self,
        dweight: Float[Array, "V H"],
        dlogits: Float[Array, "slots*blocks tile"],
        hidden: Float[Array, "T H"],
        case: Case,
        work: Worklist,
        batches: Batches,
        batch: Int[Array, "1"],
        add: bool = False,
    ) -> Float[Array, "V H"]:
        """``dweight`` with the batch's vocabulary tiles written, or added, each from its live row blocks."""
