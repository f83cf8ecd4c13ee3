"""The types that all layers share: outputs, static options, operands, and one shard's statistics.

Dimension letters of the package: T tokens, H hidden size, V vocabulary (of one shard if an axis splits it), N shards.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from lce_jax.types import scalars
from lce_jax.types.scalars import format_bytes

if TYPE_CHECKING:
    from lce_jax.types._shapes import Array, Bool, Float, Int


class UnsupportedError(ValueError):
    """No implementation, or none of those asked for by name, can serve the call; the message says why."""


class LogprobOutput(NamedTuple):
    """Per-token results, each of ``labels.shape`` and float32 (float64 when the weight is float64) or bool, or None.

    A pytree. What ``stats=True`` adds is not differentiable; all else is. To a type checker, logprobs, entropy and lse
    are arrays; ``entropy`` may be None only in a call of `linear_logprobs` with ``entropy=False``. It reports no use of
    the other fields, which are there if the call asks for them.

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

    # `Any` stands for None, which a checker would report in each call that asks for the field.
    logprobs: Float[Array, ...]
    entropy: Float[Array, ...]
    lse: Float[Array, ...]
    max_logit: Float[Array, ...] | Any = None
    min_logit: Float[Array, ...] | Any = None
    correct: Bool[Array, ...] | Any = None
    candidate_logprobs: Float[Array, "*b K"] | Any = None
    dropped_mass: Float[Array, ...] | Any = None
    sum_p_squared: Float[Array, ...] | Any = None
    support: Int[Array, ...] | Any = None


if TYPE_CHECKING:

    class PerhapsWithoutEntropy(LogprobOutput):
        """What a type checker sees of a call with ``entropy=False``, or with a flag that it does not know."""

        @property
        def entropy(self) -> Float[Array, ...] | None: ...  # type: ignore[override]


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


class Operands(NamedTuple):
    """The arrays of one shard, as an implementation receives them.

    Rows from ``num_rows`` on are never read back, columns from ``num_columns`` on are padding. Both may be traced.
    """

    hidden: Float[Array, "T H"]  # in the weight's dtype; [T, H + R] with an adapter (`Call.rank`)
    weight: Float[Array, "V H"]  # or [H, V]: Call.weight_layout
    targets: Int[Array, "T"]  # int32 column of the label in this shard, -1 where the shard does not own it
    inverse_temperature: Float[Array, "T"] | None  # 1 / temperature times a traced scale or cap; None: 1
    num_rows: Int[Array, ""] | None  # None: T
    num_columns: Int[Array, ""] | int | None  # None: V
    # Multiplies the raw products first: scale / cap if one of them is traced, or the sign of a traced scale.
    raw_scale: Float[Array, "T"] | None = None
    # In the statistics' dtype; added to the raw products. Of an adapter [V, R], in the weight's.
    bias: Float[Array, "V"] | None = None
    candidates: Int[Array, "T K"] | None = None  # int32 columns of this shard, -1 where it does not own the id
    floor: Float[Array, "T"] | None = None  # columns whose x is below it do not count, but for the target; None: all do


class ShardStatistics(NamedTuple):
    """Each token's statistics over some columns of the vocabulary: a tile, a shard, or all.

    Each field is ``[T]``, and ``candidates`` ``[T, K]`` (``[N, T]`` and ``[N, T, K]`` of N shards), in float32 (float64
    for a float64 weight), or None.

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
    weight: A  # [V, H], or [H, V]: Call.weight_layout
    bias: A | None = None  # [V]; the B [V, R] of an adapter (`Call.rank`)

    def only(self, wanted: Wanted) -> Primals[A | None]:
        """Those whose gradients are computed; None in place of the others."""
        return Primals(*(x if asked else None for x, asked in zip(self, dataclasses.astuple(wanted), strict=True)))


@dataclasses.dataclass(frozen=True)
class Wanted:
    """Whose gradients are computed: a frozen operand has none, and no product for it."""

    hidden: bool = True
    weight: bool = True
    bias: bool = True

    @property
    def any(self) -> bool:
        """Whether there is one."""
        return self.hidden or self.weight or self.bias


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
FLOAT32 = jnp.dtype(jnp.float32)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Call:
    """All that is static about a call of any function: shapes, dtypes, device, options, and how it runs. Hashable.

    `lce_jax.call._options` writes the options, which are validated, and `lce_jax.call._describe` the rest. ``columns``
    are those of the weight that is here, a shard's or with padding; ``vocab_size`` is the true size of the whole
    vocabulary.
    """

    num_tokens: int = 0
    hidden_size: int = 0
    columns: int = 0
    dtype: jnp.dtype = FLOAT32  # of the weight, hence of the matrix products
    given_dtype: jnp.dtype | None = None  # of hidden as the caller gave it, if not the weight's
    partial_rows: bool = False  # some rows may not count: ``where``, or a number of rows
    device: Device = CPU

    function: str = "linear_logprobs"  # the public function that messages name
    logit_scale: float = 1.0
    logit_softcap: float | None = None
    entropy: bool = True
    stats: bool = False
    weight_layout: str = "vh"
    cache_bytes: int | None = 0  # as the caller gives it, or None: see `cache_budget`
    chunk_bytes: int | None = None  # of a chunk's exponentials in `linear_loss`; None: the default of the device
    precision: Any = None
    mean_logit: bool = False  # label smoothing needs it
    has_bias: bool = False
    # R of an adapter (`scalars.padded_rank`); 0: none. Then hidden is [..., H + R], the weight is frozen, and in place
    # of a bias stands B [V, R], by which the last R columns of hidden are multiplied: logits = h·Wᵀ + u·Bᵀ.
    rank: int = 0
    num_candidates: int = 0  # K; 0: none are asked for
    traced_scale: bool = False  # scale or cap is an array: both are in `Rows`, and the numbers here are 1
    gradient_threshold: float = 0.0  # tiles whose every probability is below it are left out of the gradients
    vocab_part_size: int | None = None  # columns of a part of the vocabulary, whose tiles begin at its first column
    has_floor: bool = False
    top_k: int = 0  # k of `linear_topk`; 0: another function
    direction: Literal["forward", "reverse", "jsd"] = "forward"  # of `linear_kl`
    teacher: Call | None = None  # the other head of `linear_kl`
    wanted: Wanted = Wanted()  # once the call is differentiated, the gradients asked for

    implementation: str = ""  # chosen among those requested
    requested: tuple[str, ...] | None = None  # the names to choose from again, for a shard's shapes; None: all
    given_vocab_size: int | None = None  # as the caller gives it; None once ``vocab_size`` is known
    vocab_size: int = 0
    padded: bool = False  # whether the shards together have more columns
    axis_name: Any = None  # of the mesh, over which the vocabulary is split here
    gather_dim: int | None = None  # hidden's dimension that is split over ``axis_name`` too
    shards: int = 1  # of the vocabulary, where `explain` knows them
    # The axes that split the tokens, in a program of `_runner._over_devices`. No types say there what to sum, so the
    # program sums over these axes, and cotangents arrive whole. None: the types of ``shard_map`` say what to sum.
    token_axes: tuple[str, ...] | None = None
    # Where `_runner._over_devices` finds global operands: a `Layout`, or the mesh of their types, empty if they name
    # none. None: on this device.
    mesh: Any = None

    @property
    def heads(self) -> tuple[Call, ...]:
        """The call, and its teacher's if there is one."""
        return (self,) if self.teacher is None else (self, self.teacher)

    def but(self, **fields: Any) -> Call:
        """The same with other ``fields``, the teacher's too. In a tenth of the time of `dataclasses.replace`."""
        other = object.__new__(Call)
        vars(other).update(vars(self) | {"teacher": self.teacher and self.teacher.but(**fields)} | fields)
        assert len(vars(other)) == len(vars(self)), fields
        return other

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
    def cache_budget(self) -> int:
        """The bytes of the forward's tiles that may be kept for a backward: by default some on a GPU."""
        if self.cache_bytes is not None:
            return self.cache_bytes
        is_of_use = self.vocab_part_size is None and not self.gradient_threshold
        return scalars.CACHE_BYTES if is_of_use and self.device.platform == "gpu" else 0

    @property
    def asks_for_tiles(self) -> bool:
        """Whether the caller wants the backward to have tiles of the forward: then tracing must know the mesh.

        How many there are depends on how the tokens are split. `linear_loss`, whose gradients are computed in the
        forward, needs none.
        """
        return (bool(self.cache_bytes) or self.gradient_threshold > 0) and self.function != "linear_loss"

    @property
    def vocab_dim(self) -> int:
        """The dimension of the weight that runs over the vocabulary."""
        return self.weight_layout.index("v")

    @property
    def hidden_dim(self) -> int:
        """The dimension of the weight that runs over the hidden size."""
        return self.weight_layout.index("h")

    def split(self, hidden: Array) -> tuple[Array, Array]:
        """Hidden [..., H] and what an adapter has beside it, [..., R]."""
        return (hidden[..., : self.hidden_size], hidden[..., self.hidden_size :]) if self.rank else (hidden, hidden)

    @property
    def without_parts(self) -> Call:
        """The same of a vocabulary that is laid out in one part."""
        return dataclasses.replace(self, vocab_part_size=None)

    @property
    def hidden_dtype(self) -> jnp.dtype:
        """The dtype of hidden before it is cast to the weight's, and of dhidden."""
        return self.given_dtype or self.dtype

    @property
    def stat_dtype(self) -> jnp.dtype:
        """The dtype of every sum and softmax: float32, or float64 for a float64 weight."""
        return self.dtype if self.dtype == jnp.float64 else FLOAT32

    @property
    def result_dtype(self) -> jnp.dtype:
        """The dtype of what all heads enter."""
        return functools.reduce(jnp.promote_types, (head.stat_dtype for head in self.heads))

    @property
    def statistics_bytes(self) -> int:
        """What every implementation keeps from forward to backward: the merged statistics."""
        return sum(self.statistics.values()) * self.num_tokens * self.stat_dtype.itemsize

    @property
    def candidate_bytes(self) -> int:
        """What each pass holds of candidates: their logits, ids and gradients, or sorted copies of these."""
        return 3 * self.num_candidates * self.num_tokens * self.stat_dtype.itemsize


def is_array(x: Any) -> bool:
    """Whether ``x`` has the shape and dtype of an array, concrete, traced or a ShapeDtypeStruct."""
    return isinstance(x, jax.Array | jax.ShapeDtypeStruct) or (hasattr(x, "shape") and hasattr(x, "dtype"))


class PassBytes(NamedTuple):
    """Temporary memory of compiled programs on one device, in bytes, as XLA has allotted it.

    Attributes:
        forward: of a program that runs the forward alone.
        backward: of one that runs both passes, beside the gradients, which are its results.
    """

    forward: int
    backward: int


@dataclasses.dataclass(frozen=True)
class Plan:
    """How a call will be computed and what it will hold, in bytes per device. ``str(plan)`` is for people.

    What a pass takes is what it asks for itself: tiles or chunks of logits and statistics, sums in float32 and copies
    of operands, beside a few numbers per token. Operands, results and gradients are not counted. How XLA places these
    arrays, and which of its own it adds, only its compiler knows: see ``compiled``.

    Attributes:
        implementation: the implementation that will run.
        refused: each implementation tried before it, and why it cannot serve the call.
        call: the shapes, dtypes, device and options the plan is for.
        tiles: tile sizes by name.
        forward_bytes: what the forward takes.
        backward_bytes: what the backward takes, beside what is kept.
        kept_bytes: memory kept from forward to backward beyond the call's own operands.
        logits_bytes: what one copy of the logits in the statistics' dtype would take, for comparison.
        notes: remarks on options, in sentences.
        full_cache_bytes: the least ``cache_bytes`` with which the backward recomputes nothing; 0 where it cannot.
        same_bits: in which calls a token's logprob, entropy and lse have the same bits, in words. None: these may
            depend on whatever else is in the call.
        compiled: all temporary memory of the call's compiled programs; None unless ``compile=True`` asks for it.
    """

    implementation: str
    refused: dict[str, str]
    call: Call
    tiles: dict[str, int]
    forward_bytes: int
    backward_bytes: int
    kept_bytes: int
    logits_bytes: int
    notes: tuple[str, ...] = ()
    full_cache_bytes: int = 0
    same_bits: str | None = None
    compiled: PassBytes | None = None

    @property
    def most_bytes(self) -> int:
        """What both passes take at most, some of it perhaps where gradients will be: the larger, and what is kept."""
        return self.kept_bytes + max(self.forward_bytes, self.backward_bytes)

    def __str__(self) -> str:
        call = self.call
        where = call.device.kind or call.device.platform
        lines = [
            f"{self.implementation}: {call.num_tokens:,} tokens, hidden size {call.hidden_size:,}, "
            f"{call.columns:,} vocabulary columns, {call.dtype.name}, on {where}",
            "  tiles      " + ", ".join(f"{name} {size:,}" for name, size in self.tiles.items()),
            f"  forward    {format_bytes(self.forward_bytes)} in tiles and copies",
            f"  backward   {format_bytes(self.backward_bytes)} in tiles, sums and copies; gradients not counted",
            f"  kept       {format_bytes(self.kept_bytes)} from forward to backward",
            f"  logits     {format_bytes(self.logits_bytes)} if they were stored",
        ]
        if self.compiled:
            forward, both = map(format_bytes, self.compiled)
            lines.append(f"  compiled   {forward} temporary in a forward's program, {both} in that of both passes")
        if self.same_bits:
            lines.append(f"  same bits  {self.same_bits}")
        lines += [f"  not used   {name}: {reason}" for name, reason in self.refused.items()]
        lines += [f"  note       {note}" for note in self.notes]
        return "\n".join(lines)


def unused_notes(call: Call) -> tuple[str, ...]:
    """The plan's notes on options that an implementation without kernels has no use for."""
    notes = []
    if call.gradient_threshold:
        notes.append(
            f"gradient_threshold={call.gradient_threshold:g} is not used: this implementation's gradients are exact"
        )
    if call.vocab_part_size is not None:
        notes.append(
            f"vocab_part_size={call.vocab_part_size} is not used: this implementation's bits depend on the number "
            "of shards"
        )
    return tuple(notes)


OVERWRITES = "the backward overwrites what was kept; outside jax.jit, a copy of it"


def cache_notes(call: Call, kept: int, of: int, tile_bytes: int) -> tuple[str, ...]:
    """What of ``cache_bytes`` is used."""
    if not call.cache_budget:
        return ()
    because = "" if call.cache_bytes else f"; cache_bytes=None is up to {format_bytes(scalars.CACHE_BYTES)} on a GPU"
    return (f"the forward keeps {kept} of {of} vocabulary tiles, {format_bytes(tile_bytes)} each{because}",)


def candidate_notes(call: Call) -> tuple[str, ...]:
    """The plan's note on what candidates add to its bytes."""
    if not call.num_candidates:
        return ()
    held, kept = format_bytes(call.candidate_bytes), format_bytes(call.candidate_bytes // 3)
    return (f"{call.num_candidates} candidates per token add {held} to each pass and {kept} to what is kept",)
