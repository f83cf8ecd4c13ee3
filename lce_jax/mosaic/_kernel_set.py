"""What the host code asks of the kernels of one generation of GPUs."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from lce_jax._types import Case
from lce_jax.mosaic._cache import Cache
from lce_jax.mosaic._candidate_kernel_set import CandidateKernelSet
from lce_jax.mosaic._chunks import Budget
from lce_jax.mosaic._geometry import Tiling
from lce_jax.mosaic._kl_kernel_set import KLKernelSet
from lce_jax.mosaic._operands import Marked, Prepared
from lce_jax.mosaic._threshold_kernel_set import LiveKernelSet

if TYPE_CHECKING:
    from lce_jax._shapes import Array, Float, Int


class Parted(NamedTuple):
    """How `KernelSet.join` groups the tiles of a vocabulary in parts: a group ends where its part does."""

    groups: int  # of a launch, at most
    tiles: int  # of a part


class KernelSet(LiveKernelSet, CandidateKernelSet, KLKernelSet, Protocol):
    """The kernels of one generation of GPUs: what they are cut for, what they refuse, and their launches.

    Each launch gets a packed `Span`: the vocabulary tiles it covers, and the live rows and columns.
    """

    @property
    def compute_capabilities(self) -> tuple[str, ...]:
        """The compute capabilities that the kernels run on, the best known first: "9.0"."""

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

    def statistics(
        self,
        prepared: Prepared,
        weight: Float[Array, "V H"],
        case: Case,
        span: Int[Array, "fields"],
        parts: Float[Array, "tiles fields Tp"],
        cache: Cache | None,
    ) -> tuple[Float[Array, "tiles fields Tp"], Cache | None]:
        """``parts`` with the partial statistics of the span's tiles, and the cache, if any, with their exponentials.

        ``weight`` holds the span's part at its offset.
        """

    def join(
        self,
        scale: Float[Array, "Tp"],
        parts: Float[Array, "parts fields Tp"],
        joined: Float[Array, "groups fields Tp"],
        case: Case,
        group: int,
        numbers: Int[Array, "3"],
        in_nats: bool = False,
        parted: Parted | None = None,
    ) -> Float[Array, "groups fields Tp"]:
        """``joined`` with the unions (eq. 2) of each ``group`` neighbours among ``parts``, added in their order.

        ``scale`` is the k of eq. 0 in base 2. ``numbers`` are the live rows, the parts that count, and where in
        ``joined`` the first group goes. Groups after the last part are those of no columns; those after the last of
        ``joined`` are not written, nor are row blocks without a live row. ``parts`` and ``joined`` may have more fields
        than statistics do. With ``in_nats`` the unions are as eq. 1 has them, else in base 2 as the parts are. With
        ``parted`` the first of ``parts`` is the first tile of a group of the shard, and groups end where its parts do.
        """

    def per_token(self, function: Callable[..., Any], *operands: Any) -> Any:
        """``function(*operands)`` of trees of arrays [T], rounded as the other kernels round."""

    def dlogits(
        self,
        prepared: Prepared,
        weight: Float[Array, "V H"],
        case: Case,
        factors: Float[Array, "factors Tp"],
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
        factors: Float[Array, "factors Tp"],
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
    ) -> Float[Array, "splits Tp Hp"]:
        """The product over the span's first ``depth`` columns, in the span's rows, written to ``sums`` or added."""

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

    def prepare(
        self,
        case: Case,
        labels: Int[Array, "R 2"] | Int[Array, "R"],
        temperatures: Float[Array, "n"] | None,
        field: int,
        numbers: Int[Array, "4"],
        ids: Int[Array, "R"] | None = None,
        floors: Float[Array, "n"] | None = None,
        floor_field: int = 0,
    ) -> tuple[Marked, Int[Array, "R"] | None]:
        """The shard's columns of the labels, the rows' scales and floors, and which tiles hold a label.

        Args:
            case: R tokens, and the shard.
            labels: global ids, or the halves of int64 numbers.
            temperatures: None: 1. They are the field ``field`` of a flat array.
            field: 0 if there is no other.
            numbers: how many rows there are, the stride of fields, the global id of the shard's first column, and the
                size of the whole vocabulary.
            ids: memory for the labels in int32, if they come in halves: -1 where they are out of vocabulary.
            floors: in logits, a flat array. None: every column counts.
            floor_field: the field of that array that they are.
        """

    def finish(
        self,
        case: Case,
        joined: Float[Array, "1 fields Tp"],
        ids: Int[Array, "R"],
        temperatures: Float[Array, "R"] | None,
        numbers: Int[Array, "2"],
        kept: Float[Array, "n"],
        vocab_size: int,
        megatron: bool,
        tags: Int[Array, "groups fields Tp"] | None = None,
        floors: Float[Array, "R"] | None = None,
    ) -> tuple[list[Float[Array, "R"]], Float[Array, "n"]]:
        """The results of the whole vocabulary, and ``kept`` with what the backward needs, from its field 1 on.

        The results are the fields of `LogprobOutput` that there are. Kept are the temperature and the floor, if there
        is one, and after the fields of candidates the fields of `ShardStatistics` that gradients have, in nats.

        Args:
            case: R tokens, and the shard.
            joined: statistics of the whole vocabulary, in nats.
            ids: global ids of the labels.
            temperatures: None: 1.
            numbers: how many rows there are, and the stride of ``kept``.
            kept: flat; its field 0 is not touched.
            vocab_size: of the whole vocabulary.
            megatron: whether labels out of the vocabulary get -ln Σ e^u in place of 0.
            tags: of a vocabulary in parts, the bits of their groups' statistics, of which the field after the last has
                a tag for each token, in the first group of a part. Where these differ, the results are NaN.
            floors: in logits. None: every column counts.
        """

    def coefficients(
        self,
        case: Case,
        kept: Float[Array, "n"],
        has_temperature: bool,
        seeds: dict[str, Float[Array, "R"]],
        numbers: Int[Array, "2"],
        vocab_size: int,
        terms: Float[Array, "(K+1)*R"] | None = None,
    ) -> Float[Array, "factors Tp"]:
        """The factors of eq. 4, zero from the last row on, from what `finish` kept.

        ``seeds`` are the cotangents that there are, by the fields of `LogprobOutput`, and ``terms`` what has become of
        those of candidates. ``numbers`` are those of `finish`.
        """

    def total(
        self, case: Case, sums: Float[Array, "splits Tp Hp"], dtype: Any, numbers: Int[Array, "1"]
    ) -> Float[Array, "R H"]:
        """dhidden: the splits added up in their order, rounded once. ``numbers``: how many rows there are."""

    def rows(self, case: Case, hidden: Float[Array, "R H"], numbers: Int[Array, "1"]) -> Float[Array, "R H"]:
        """The rows that there are, in the weight's dtype, then rows of zeros as far as kernels look beyond the last.

        ``numbers``: how many there are. ``hidden`` is not read beyond them.
        """

    def copy(
        self, case: Case, weight: Float[Array, "atoms n"], numbers: Int[Array, "2"]
    ) -> Float[Array, "tile_atoms n"]:
        """A tile of the weight's rows, of both in whole atoms: [V / 8, 8 H].

        ``numbers``: its first atom, and its true rows. Those after them are zero.
        """

    def scale(self, x: Float[Array, "n"], factor: Float[Array, "1"], dtype: Any) -> Float[Array, "n"]:
        """``factor · x`` in float32, rounded once, for n a multiple of `scaled_numbers`."""

    @property
    def scaled_numbers(self) -> int:
        """The numbers that a block of `scale` multiplies."""
