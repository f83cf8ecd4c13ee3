"""The types that all layers share: outputs, static options, operands, and one shard's statistics.

Dimension letters of the package: T tokens, H hidden size, V vocabulary (of one shard if an axis splits it), N shards.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp

if TYPE_CHECKING:
    from lce_jax._shapes import Array, Bool, Float, Int


class UnsupportedError(ValueError):
    """No implementation, or none of those asked for by name, can serve the call; the message says why."""


class LogprobOutput(NamedTuple):
    """Per-token results, each of ``labels.shape`` and float32 (float64 when the weight is float64) or bool, or None.

    A pytree. What ``stats=True`` adds is not differentiable; all else is. A type checker takes any field but logprobs
    and lse for one that may be None: ``assert out.entropy is not None`` says that the call asked for it.

    Attributes:
        logprobs: ln p(label), nats. 0 where the label is out of vocabulary or ``where`` is False.
        entropy: entropy of the token's distribution, nats. None with ``entropy=False``.
        lse: ln Σ exp(logits), nats.
        max_logit: largest logit over the true vocabulary. None without ``stats=True``.
        min_logit: smallest logit over the true vocabulary. None without ``stats=True``.
        correct: bool, whether no logit is larger than the label's. False where the label is out of vocabulary or
            ``where`` is False. None without ``stats=True``.
        candidate_logprobs: ``[..., K]``, ln p of each id in ``candidates``, nats. 0 where the id is none or out of
            vocabulary, or ``where`` is False. None without ``candidates``.
        dropped_mass: the probability in the tiles that ``gradient_threshold`` leaves out of the gradients, in [0, 1].
            0 where nothing is left out. None without ``stats=True`` or with a threshold of 0.
        sum_p_squared: Σ p² over the true vocabulary, in (0, 1]. None without ``stats=True``.
        support: int32, how many tokens a ``logit_floor`` leaves; -1 where results are NaN. None without both.
    """

    logprobs: Float[Array, ...]
    entropy: Float[Array, ...] | None
    lse: Float[Array, ...]
    max_logit: Float[Array, ...] | None = None
    min_logit: Float[Array, ...] | None = None
    correct: Bool[Array, ...] | None = None
    candidate_logprobs: Float[Array, "*b K"] | None = None
    dropped_mass: Float[Array, ...] | None = None
    sum_p_squared: Float[Array, ...] | None = None
    support: Int[Array, ...] | None = None


RESULTS = ("logprobs", "entropy", "lse", "max_logit", "min_logit", "sum_p_squared", "support")  # three, then of `stats`


class TopK(NamedTuple):
    """The k most likely tokens of each token's distribution, the most likely first. A pytree.

    Attributes:
        ids: ``[..., k]`` int32 vocabulary ids, global also when the vocabulary is split. -1 where ``where`` is False.
        logprobs: ``[..., k]``, ln p of each of them under the whole vocabulary, nats, float32 (float64 when the weight
            is float64). 0 where ``where`` is False.
        lse: ``[...]``, ln Σ exp(logits), nats. 0 where ``where`` is False.
    """

    ids: Int[Array, "*b k"]
    logprobs: Float[Array, "*b k"]
    lse: Float[Array, ...]


class Results(NamedTuple):
    """The outputs and, if a loss smooths its labels, the mean logit, also differentiable. Or the cotangents of both."""

    outputs: LogprobOutput  # all are float: `correct` is 1.0 or 0.0. The cotangents of other types would be float0
    mean_logit: Float[Array, ...] | None = None

    @property
    def public(self) -> LogprobOutput:
        """What the public functions return."""
        out = self.outputs
        return out if out.correct is None else out._replace(**_with_types(out.correct, out.support))


@functools.partial(jax.jit, inline=True)
def _with_types(correct: Array, support: Array | None) -> dict[str, Array | None]:
    """Jitted: outside ``jit`` a number is a transfer, which ``jax.transfer_guard`` may forbid."""
    whole = jax.tree.map(lambda x: jnp.nan_to_num(x, nan=-1.0).astype(jnp.int32), support)
    return {"correct": correct > 0, "support": whole}


@dataclasses.dataclass(frozen=True)
class Options:
    """The static options of a call: hashable, validated, the same for every implementation."""

    logit_scale: float = 1.0
    logit_softcap: float | None = None
    entropy: bool = True
    stats: bool = False
    weight_layout: str = "vh"
    cache_bytes: int = 0
    precision: Any = None
    mean_logit: bool = False  # label smoothing needs it
    has_bias: bool = False
    num_candidates: int = 0  # K; 0: none are asked for
    traced_scale: bool = False  # scale or cap is an array: both are in `Rows`, and the numbers here are 1
    gradient_threshold: float = 0.0  # tiles whose every probability is below it are left out of the gradients
    vocab_part_size: int | None = None  # columns of a part of the vocabulary, whose tiles begin at its first column
    has_floor: bool = False
    top_k: int = 0  # k of `linear_topk`; 0: another function
    function: str = "linear_logprobs"  # the public function that messages name

    @property
    def sharded_function(self) -> str:
        """The one that takes the axes of a mesh by name."""
        return f"sharded_{self.function}"

    @property
    def statistics(self) -> dict[str, int]:
        """The fields of `ShardStatistics` that the call has, in order, and how many numbers per token each has."""
        asked: dict[str, int] = {"weighted": self.entropy, "min": self.stats, "squares": self.stats}
        asked |= {"total": self.mean_logit, "candidates": self.num_candidates}
        asked |= {"support": self.stats and self.has_floor}
        widths = {name: int(asked.get(name, True)) for name in ShardStatistics._fields}
        return {name: width for name, width in widths.items() if width}

    @property
    def signs_hidden(self) -> bool:
        """Whether hidden is multiplied by the sign of a traced scale."""
        return self.traced_scale and self.logit_softcap is None and not self.has_bias

    @property
    def reports_dropped_mass(self) -> bool:
        """Whether the results have ``dropped_mass``."""
        return self.stats and self.gradient_threshold > 0

    @property
    def keeps_tiles(self) -> bool:
        """Whether a backward may need tiles of the forward, whose number depends on how the tokens are split.

        That of `linear_loss`, whose gradients are computed in the forward, needs none.
        """
        return (self.cache_bytes > 0 or self.gradient_threshold > 0) and self.function != "linear_loss"

    @property
    def vocab_dim(self) -> int:
        """The dimension of the weight that runs over the vocabulary."""
        return self.weight_layout.index("v")

    @property
    def hidden_dim(self) -> int:
        """The dimension of the weight that runs over the hidden size."""
        return self.weight_layout.index("h")


class Operands(NamedTuple):
    """The arrays of one shard, as an implementation receives them.

    Rows from ``num_rows`` on are never read back, columns from ``num_columns`` on are padding. Both may be traced.
    """

    hidden: Float[Array, "T H"]  # in the weight's dtype
    weight: Float[Array, "V H"]  # or [H, V]: Options.weight_layout
    targets: Int[Array, "T"]  # int32 column of the label in this shard, -1 where the shard does not own it
    inverse_temperature: Float[Array, "T"] | None  # 1 / temperature times a traced scale or cap; None: 1
    num_rows: Int[Array, ""] | None  # None: T
    num_columns: Int[Array, ""] | int | None  # None: V
    # Multiplies the raw products first: scale / cap if one of them is traced, or the sign of a traced scale.
    raw_scale: Float[Array, "T"] | None = None
    bias: Float[Array, "V"] | None = None  # in the statistics' dtype; added to the raw products
    candidates: Int[Array, "T K"] | None = None  # int32 columns of this shard, -1 where it does not own the id
    floor: Float[Array, "T"] | None = None  # columns whose x is below it do not count, but for the target; None: all do


class ShardStatistics(NamedTuple):
    """Each token's statistics over some columns of the vocabulary: a tile, a shard, or all.

    Each field is ``[T]``, and ``candidates`` ``[T, K]`` (``[N, T]`` and ``[N, T, K]`` of N shards), in float32 (float64
    for a float64 weight), or None. `lce_jax.local` computes, packs, merges and finishes them.

    They are in the units of x. A logit is z = k·x: x is the product with the bias, of the sign of ``logit_scale``, and
    k = |logit_scale| / temperature; with a softcap c, x is the tanh and k = c / temperature. Statistics never hold k
    times a maximum, because its rounding would be an error of every logit.

    Attributes:
        max: m, the largest x; -1e30 without any column.
        sumexp: s = Σ exp(u), with u = (x - m)·k.
        weighted: q = Σ u·exp(u); the entropy is ln s - q/s. None without entropy.
        target: u of the label if these columns hold it, else -inf.
        min: the smallest x; 1e30 without any column. None without ``stats=True``.
        squares: Σ exp(2u); the sum of p² is squares / s². None without ``stats=True``.
        total: Σ x. None unless a loss smooths its labels.
        candidates: x of each candidate that these columns hold, else -inf. None without ``candidates``.
        support: how many of these columns count. None without ``stats=True`` and a ``logit_floor``.
    """

    max: Float[Array, "T"]
    sumexp: Float[Array, "T"]
    weighted: Float[Array, "T"] | None
    target: Float[Array, "T"]
    min: Float[Array, "T"] | None
    squares: Float[Array, "T"] | None = None
    total: Float[Array, "T"] | None = None
    candidates: Float[Array, "T K"] | None = None
    support: Float[Array, "T"] | None = None


class Primals[A](NamedTuple):
    """The operands with gradients, of a call or of one device's part. Or these gradients, or a spec of each."""

    hidden: A  # [..., H]
    weight: A  # [V, H], or [H, V]: Options.weight_layout
    bias: A | None = None  # [V]


class RowCoefficients(NamedTuple):
    """dlogits = uniform + e^u·(constant + slope·u), with u = (x - max)·k (eq. 4), per token.

    At the label it is uniform + target. And at each candidate one number more. Both have the cap's derivative in them.
    """

    max: Float[Array, "T"]  # the largest x of the whole vocabulary
    target: Float[Array, "T"]
    constant: Float[Array, "T"]
    slope: Float[Array, "T"] | None  # None without entropy
    uniform: Float[Array, "T"] | None = None  # None without mean_logit
    candidates: Float[Array, "T K"] | None = None  # None without candidates
    at_candidates: Float[Array, "T K"] | None = None  # x of each, -inf where none; the kernels read it


class Device(NamedTuple):
    """The properties of a device that decide whether kernels run on it, and with which tiles."""

    platform: str = "cpu"
    kind: str = ""
    compute_capability: str = ""  # of an NVIDIA GPU: "9.0"
    core_count: int = 0  # multiprocessors of a GPU


CPU = Device()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """A call reduced to what decides support and tiling: shapes, dtypes, options and the device. No arrays."""

    num_tokens: int
    hidden_size: int
    vocab_size: int  # columns of this shard's weight
    dtype: jnp.dtype  # of the weight, hence of the matrix products
    options: Options
    given_dtype: jnp.dtype | None = None  # of hidden as the caller gave it, if not the weight's
    partial_rows: bool = False  # some rows may not count: ``where``, or a number of rows
    device: Device = CPU

    @property
    def without_parts(self) -> Case:
        """The same of a vocabulary that is laid out in one part."""
        if self.options.vocab_part_size is None:
            return self
        return dataclasses.replace(self, options=dataclasses.replace(self.options, vocab_part_size=None))

    @property
    def hidden_dtype(self) -> jnp.dtype:
        """The dtype of hidden before it is cast to the weight's, and of dhidden."""
        return self.given_dtype or self.dtype

    @property
    def stat_dtype(self) -> jnp.dtype:
        """The dtype of every sum and softmax: float32, or float64 for a float64 weight."""
        return self.dtype if self.dtype == jnp.float64 else jnp.dtype(jnp.float32)

    @property
    def statistics_bytes(self) -> int:
        """What every implementation keeps from forward to backward: the merged statistics."""
        return sum(self.options.statistics.values()) * self.num_tokens * self.stat_dtype.itemsize

    @property
    def candidate_bytes(self) -> int:
        """What each pass holds of candidates: their logits, ids and gradients, or sorted copies of these."""
        return 3 * self.options.num_candidates * self.num_tokens * self.stat_dtype.itemsize


def is_array(x: Any) -> bool:
    """Whether ``x`` has the shape and dtype of an array, concrete, traced or a ShapeDtypeStruct."""
    return isinstance(x, jax.Array | jax.ShapeDtypeStruct) or (hasattr(x, "shape") and hasattr(x, "dtype"))
