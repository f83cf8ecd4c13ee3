"""What is static about the calls that a list serves, and which calls those are."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp

from lce_jax._types import Case, Device, Options
from lce_jax.mosaic import _chunks, _generations, _partial_statistics
from lce_jax.mosaic._generation import Generation
from lce_jax.mosaic._geometry import Geometry, geometry

THREADS = 128  # rows that every per-token array has at least

SERVED = tuple(one for generation in _generations.GENERATIONS for one in generation.compute_capabilities)


@dataclasses.dataclass(frozen=True, kw_only=True)
class CallKind:
    """What is static about the calls that a program serves.

    Attributes:
        num_tokens: the most tokens, a multiple of 128.
        hidden_size: H, a multiple of 64, 128 at least.
        num_columns: V of the weight, a multiple of 8.
        vocab_size: of the whole vocabulary.
        start: the global id of the weight's first row.
        dtype: the weight's.
        device: what runs it.
        entropy, stats, logit_scale, logit_softcap, cache_bytes, gradient_threshold: as in `lce_jax.linear_logprobs`.
        dropped_mass: whether what the threshold leaves out is a result, the last one.
        vocab_part_size: columns of a part of the vocabulary, of which the weight has whole ones; None: one part.
        num_candidates: K, of each token; 0: none.
        has_temperature: whether each token has one.
        has_floor: likewise.
        copied_from: hidden's dtype where its rows are copied first: it has fewer than ``num_tokens``, or another dtype
            than the weight. None: kernels read it where it lies.
        megatron: whether labels out of the vocabulary get -ln Σ e^u in place of 0.
    """

    num_tokens: int
    hidden_size: int
    num_columns: int
    vocab_size: int
    start: int
    dtype: str
    device: Device
    entropy: bool = True
    stats: bool = False
    logit_scale: float = 1.0
    logit_softcap: float | None = None
    cache_bytes: int = 0
    gradient_threshold: float = 0.0
    dropped_mass: bool = False
    vocab_part_size: int | None = None
    num_candidates: int = 0
    has_temperature: bool = False
    has_floor: bool = False
    copied_from: str | None = None
    megatron: bool = False

    @property
    def case(self) -> Case:
        """As the kernels know it."""
        options = Options(
            logit_scale=self.logit_scale, logit_softcap=self.logit_softcap, entropy=self.entropy, stats=self.stats,
            cache_bytes=self.cache_bytes, gradient_threshold=self.gradient_threshold,
            num_candidates=self.num_candidates, vocab_part_size=self.vocab_part_size, has_floor=self.has_floor,
        )  # fmt: skip
        return Case(
            num_tokens=self.num_tokens, hidden_size=self.hidden_size, vocab_size=self.num_columns,
            dtype=jnp.dtype(self.dtype), options=options, device=self.device,
        )  # fmt: skip

    @property
    def generation(self) -> Generation:
        """The device's; the first where no kernels serve it, and `refusal` says so."""
        return _generations.serving(self.device) or _generations.GENERATIONS[0]

    @property
    def shape(self) -> Geometry:
        """The tiles."""
        return geometry(self.case, self.generation.tiling)

    @property
    def live_columns(self) -> int | None:
        """The true columns among those of the weight; None if all are."""
        live = min(max(self.vocab_size - self.start, 0), self.num_columns)
        return None if live == self.num_columns else live

    @property
    def saved_fields(self) -> int:
        """How many numbers are saved of each token."""
        return self.first_statistic + len(_partial_statistics.kept(self.case.options)) + self.num_candidates

    @property
    def first_statistic(self) -> int:
        """The field of the first one that is saved."""
        return 1 + self.has_temperature + self.has_floor + self.num_candidates

    @property
    def sent_shape(self) -> tuple[int, int, int]:
        """What a shard sends: of each group of tiles, the fields of statistics and one for the tokens' tags."""
        fields = len(_partial_statistics.names(self.case.options)) + 1
        return _chunks.num_groups(self.shape), fields, self.shape.padded_tokens


def refusal(kind: CallKind) -> str | None:
    """Why no list serves these calls; None if one does."""
    reason = _generations.refusal(kind.case)
    if reason is not None:
        return reason
    if not kind.shape.whole_atoms:
        return f"V must be a multiple of {kind.shape.atom}, got {kind.num_columns}"
    if kind.hidden_size < THREADS:
        return f"H must be at least {THREADS}, got {kind.hidden_size}"
    return None
