"""What a ``gradient_threshold`` adds to the kernel set.

join             _join.py             the union of the tiles' statistics, which keeps some of each tile
select           _select.py           which tiles are live, and the probability in the others
lists            _worklists.py        the live tiles as lists
live dlogits     _dlogits.py          the gradient in the raw products, along a list
live candidates  _candidates.py       what stands at the candidates' places among these
live products    _live_products.py    dhidden and dweight from live tiles of dlogits
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from lce_jax._types import Case
from lce_jax.mosaic._geometry import geometry
from lce_jax.mosaic._operands import Prepared
from lce_jax.mosaic._threshold_kernel_set import LiveKernelSet
from lce_jax.mosaic._worklist import Batches, Entries, Order, RowEntries, RowLists, Sizes, Worklist
from lce_jax.mosaic.common._tiles import ROW_BLOCK, TILING

if TYPE_CHECKING:
    from lce_jax._shapes import Array, Float, Int
    from lce_jax.mosaic.common._machine import Machine


class Tunings(Protocol):
    """A generation's free choices."""

    def of(self, case: Case, kernel: str) -> Any:
        """Those of a kernel."""


class LiveKernels(LiveKernelSet, Protocol):
    """The launches import the kernel language when they are first called, as those of `Kernels` do."""

    tunings: Tunings

    @property
    def machine(self) -> Machine:
        """How the generation multiplies tiles."""

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
        """The same kernel as `join`, which has these fields at hand."""
        from lce_jax.mosaic.common import _join

        joined, kept = _join.join(scale, parts, joined, case, group, numbers, maxima=maxima)
        assert kept is not None
        return joined, kept

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
        """One thread per token and a few tiles."""
        from lce_jax.mosaic.common import _select

        candidates = None if ids is None else _select.Ids(ids, first)
        return _select.select(case, self.live_shape(case), maxima, targets, scale, merged, field, numbers, candidates)

    def dropped_mass(self, masses: Float[Array, "parts Tp"], numbers: Int[Array, "2"]) -> Float[Array, "Tp"]:
        """One thread per token."""
        from lce_jax.mosaic.common import _select

        return _select.dropped_mass(masses, numbers)

    def live_shape(self, case: Case) -> tuple[int, int]:
        """Row blocks are padded to one for each thread."""
        shape = geometry(case, TILING)
        return shape.num_tiles, -(-shape.row_blocks // ROW_BLOCK) * ROW_BLOCK

    def live_counts(self, sizes: Sizes, live: Int[Array, "tiles blocks"]) -> Int[Array, "tiles"]:
        """A block per vocabulary tile."""
        from lce_jax.mosaic.common import _worklists

        return _worklists.counts(sizes, live)

    def live_order(self, sizes: Sizes, counts: Int[Array, "tiles"]) -> Order:
        """A block per vocabulary tile."""
        from lce_jax.mosaic.common import _worklists

        return _worklists.order(sizes, counts)

    def live_entries(
        self,
        sizes: Sizes,
        live: Int[Array, "tiles blocks"],
        order: Int[Array, "ranks"],
        counts: Int[Array, "ranks"],
    ) -> Entries:
        """A block per rank."""
        from lce_jax.mosaic.common import _worklists

        return _worklists.entries(sizes, live, order, counts)

    def live_rows(
        self,
        sizes: Sizes,
        order: Int[Array, "ranks"],
        first: Int[Array, "ranks+1"],
        places: Int[Array, "blocks ranks"],
        numbers: Int[Array, "1"],
    ) -> RowEntries:
        """A block per row block."""
        from lce_jax.mosaic.common import _worklists

        return _worklists.rows(sizes, order, first, places, numbers)

    def live_row_lists(
        self,
        sizes: Sizes,
        first: Int[Array, "ranks+1"],
        starts: Int[Array, "batches blocks"],
        counts: Int[Array, "batches blocks"],
        numbers: Int[Array, "1"],
    ) -> tuple[RowLists, Int[Array, "batches fields"]]:
        """A block per row block and batch."""
        from lce_jax.mosaic.common import _worklists

        return _worklists.row_lists(sizes, first, starts, counts, numbers)

    def live_ranks(
        self, sizes: Sizes, first: Int[Array, "ranks+1"], counts: Int[Array, "ranks"]
    ) -> Int[Array, "ranks"]:
        """A block per rank."""
        from lce_jax.mosaic.common import _worklists

        return _worklists.ranks(sizes, first, counts)

    def zeros(self, shape: tuple[int, int, int], numbers: Int[Array, "1"]) -> Float[Array, "splits Tp Hp"]:
        """A few rows for each block."""
        from lce_jax.mosaic.common import _hidden_rows

        return _hidden_rows.zeros(shape, numbers)

    def live_group(self, case: Case) -> int:
        """The blocks of a cluster, which share each tile of the weight."""
        return self.tunings.of(case, "dlogits").cluster

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
    ) -> Float[Array, "slots*128 256"]:
        """The same kernel as `dlogits`, along a list."""
        from lce_jax.mosaic.common import _dlogits

        tuning = self.tunings.of(case, "dlogits")
        return _dlogits.live_dlogits(self.machine, prepared, weight, case, tuning, factors, work, batches, batch, slots)

    def put_live_candidates(
        self,
        case: Case,
        dlogits: Float[Array, "slots*128 256"],
        ids: Int[Array, "n"],
        values: Float[Array, "K*stride"],
        work: Worklist,
        batches: Batches,
        batch: Int[Array, "1"],
        numbers: Int[Array, "3"],
        first: int,
    ) -> Float[Array, "slots*128 256"]:
        """One token for each block."""
        from lce_jax.mosaic.common import _candidates

        return _candidates.put_live(case, dlogits, ids, values, work, batches, batch, numbers, first)

    def update_live_dhidden(
        self,
        sums: Float[Array, "splits Tp Hp"],
        dlogits: Float[Array, "slots*128 256"],
        weight: Float[Array, "V H"],
        case: Case,
        work: Worklist,
        batches: Batches,
        batch: Int[Array, "1"],
    ) -> Float[Array, "splits Tp Hp"]:
        """The product dlogits · weight over each row block's list."""
        from lce_jax.mosaic.common import _live_products

        tuning = self.tunings.of(case, "live_dhidden")
        return _live_products.update_dhidden(self.machine, sums, dlogits, weight, case, tuning, work, batches, batch)

    def write_live_dweight(
        self,
        dweight: Float[Array, "V H"],
        dlogits: Float[Array, "slots*128 256"],
        hidden: Float[Array, "T H"],
        case: Case,
        work: Worklist,
        batches: Batches,
        batch: Int[Array, "1"],
        add: bool = False,
    ) -> Float[Array, "V H"]:
        """The product dlogitsᵀ · hidden over each vocabulary tile's list."""
        from lce_jax.mosaic.common import _live_products

        tuning = self.tunings.of(case, "live_dweight")
        return _live_products.write_dweight(
            self.machine, dweight, dlogits, hidden, case, tuning, work, batches, batch, add
        )
