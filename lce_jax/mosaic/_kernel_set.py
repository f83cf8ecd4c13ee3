"""What the host code asks of the kernels for one compute capability."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from lce_jax._types import Case
from lce_jax.mosaic._cache import Cache
from lce_jax.mosaic._chunks import Budget
from lce_jax.mosaic._geometry import Tiling
from lce_jax.mosaic._operands import Prepared, RowFactors
from lce_jax.mosaic._worklist import RowLists, Worklist

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Int


class KernelSet(Protocol):
    """The kernels of one generation of GPUs: what they are cut for, what they refuse, and their launches.

    Each launch gets a packed `Span`: the vocabulary tiles it covers, and the live rows and columns.
    """

    @property
    def compute_capability(self) -> str:
        """The compute capability that the kernels run on: "9.0"."""

    @property
    def devices(self) -> tuple[str, ...]:
        """Parts of the names of devices with that capability, the best known first."""

    @property
    def tiling(self) -> Tiling:
        """The tile sizes."""

    @property
    def budget(self) -> Budget:
        """What decides how much of the vocabulary one launch covers."""

    def refusal(self, case: Case) -> str | None:
        """Why the kernels cannot serve ``case`` on such a device; None if they can."""

    def tile_sizes(self, case: Case) -> dict[str, int]:
        """What a plan says of the kernels' tiles, by name."""

    def depth_step(self, case: Case) -> int:
        """The columns that `update_dhidden` contracts at a time: a span's depth in whole steps reads no padding."""

    def statistics(
        self,
        prepared: Prepared,
        weight: Float[Array, "V H"],
        case: Case,
        span: Int[Array, "fields"],
        num_tiles: int,
        cache: Cache | None,
    ) -> tuple[Float[Array, "tiles fields Tp"], Cache | None]:
        """Partial statistics of the span's tiles, in arrays for ``num_tiles``; the cache, if any, filled with theirs.

        ``weight`` is the shard's, cut to whole atoms.
        """

    def dlogits(
        self,
        prepared: Prepared,
        weight: Float[Array, "V H"],
        case: Case,
        rows: RowFactors,
        span: Int[Array, "fields"],
        columns: int,
    ) -> Float[Array, "T columns"]:
        """The gradient in the span's raw products, in the weight's dtype, at the beginning of ``columns``.

        ``weight`` holds the span's part at its offset. Zero on columns that are padding or do not exist; tiles after
        the span and row blocks without a live row are left unwritten.
        """

    def cached_dlogits(
        self,
        prepared: Prepared,
        case: Case,
        rows: RowFactors,
        cache: Cache,
        span: Int[Array, "fields"],
        columns: int,
        overwrites: bool,
    ) -> Float[Array, "T columns"]:
        """The same from cached exponentials. With ``overwrites`` it takes the place of all of the cache."""

    def update_dhidden(
        self,
        sums: Float[Array, "splits Tp Hp"],
        dlogits: Float[Array, "T columns"],
        weight: Float[Array, "V H"],
        case: Case,
        span: Int[Array, "fields"],
        add: bool,
    ) -> Float[Array, "splits Tp Hp"]:
        """The product over the span's first ``depth`` columns, in the span's rows; with ``add``, added to ``sums``."""

    def write_dweight(
        self,
        dweight: Float[Array, "V H"],
        dlogits: Float[Array, "T columns"],
        hidden: Float[Array, "T H"],
        case: Case,
        span: Int[Array, "fields"],
        add: bool = False,
    ) -> Float[Array, "V H"]:
        """``dweight`` with the span's tiles written, or added, at its offset, from its rows."""

    def live_group(self, case: Case) -> int:
        """The entries of a `Worklist` that `live_dlogits` computes together: those of one vocabulary tile."""

    def live_dlogits(
        self,
        prepared: Prepared,
        weight: Float[Array, "V H"],
        case: Case,
        rows: RowFactors,
        work: Worklist,
        batch: Int[Array, "fields"],
        slots: int,
    ) -> Float[Array, "slots*blocks tile"]:
        """The gradient in the raw products of a packed `Batch` of live tiles, each in the slot of its entry."""

    def update_live_dhidden(
        self,
        sums: Float[Array, "splits Tp Hp"],
        dlogits: Float[Array, "slots*blocks tile"],
        weight: Float[Array, "V H"],
        case: Case,
        work: Worklist,
        rows: RowLists,
        batch: Int[Array, "fields"],
    ) -> Float[Array, "splits Tp Hp"]:
        """``sums`` with the batch's products over each row block's live vocabulary tiles added."""

    def write_live_dweight(
        self,
        dweight: Float[Array, "V H"],
        dlogits: Float[Array, "slots*blocks tile"],
        hidden: Float[Array, "T H"],
        case: Case,
        work: Worklist,
        ranks: Int[Array, "ranks"],
        batch: Int[Array, "fields"],
        add: bool = False,
    ) -> Float[Array, "V H"]:
        """``dweight`` with the batch's vocabulary tiles written, or added, each from its live row blocks.

        ``ranks`` are the vocabulary tiles' ranks by batch, in the order to take them.
        """
