"""The types that every layer shares: public outputs, a call's static description, operands, statistics, and the plan.

Dimension letters of the package: T tokens, H hidden size, V vocabulary (of one shard if an axis splits it), N shards.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from lce_jax.types import defaults
from lce_jax.types.scalars import format_bytes

if TYPE_CHECKING:
    from lce_jax.types._shapes import Array, Bool, Float, Int


class UnsupportedError(ValueError):
    """No implementation, or none that ``implementation`` names, can serve the call. The message says why."""


class LogprobOutput(NamedTuple):
    """Per-token results, as a pytree. Each field is None or an array with the shape of ``labels``.

    Floating-point fields are float32, or float64 for a float64 weight. The fields that ``stats=True`` adds are not
    differentiable; all others are. To a type checker, logprobs, entropy and lse are arrays, and ``entropy`` may be None
    only in a call of `linear_logprobs` with ``entropy=False``. A type checker does not warn when the other fields are
    used, although they are None unless the call requests them.

    Attributes:
        logprobs: ln p(label), nats. 0 where the label is out of vocabulary or ``where`` is False.
        entropy: entropy of the token's distribution, nats. None with ``entropy=False``.
        lse: ln Σ exp(logits), nats.
        max_logit: largest logit over the true vocabulary. None without ``stats=True``.
        min_logit: smallest logit over the true vocabulary. None without ``stats=True``.
        correct: bool, whether no logit is larger than the label's. False where the label is out of vocabulary or
            ``where`` is False. None without ``stats=True``.
        candidate_logprobs: ``[..., K]``, ln p of each id in ``candidates``, nats. 0 where the id is out of vocabulary
            (-1 included) or ``where`` is False. None without ``candidates``.
        dropped_mass: the probability in the tiles that ``gradient_threshold`` leaves out of the gradients, in [0, 1].
            0 where nothing is left out. None without ``stats=True`` or with a threshold of 0.
        sum_p_squared: Σ p² over the true vocabulary, in (0, 1]. None without ``stats=True``.
        support: int32, how many tokens reach the ``logit_floor``; -1 where results are NaN. None without ``stats=True``
            or without a floor.
    """

    # `Any` stands in place of None, because with None a type checker would report every use of a requested field.
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
        """The type of a result whose ``entropy`` may be None, for type checkers."""

        @property
        def entropy(self) -> Float[Array, ...] | None: ...  # type: ignore[override]


# The results that are computed from statistics alone: first three of every call, then those that ``stats=True`` adds.
RESULTS = ("logprobs", "entropy", "lse", "max_logit", "min_logit", "sum_p_squared", "support")


class TopK(NamedTuple):
    """The k most likely tokens of each token's distribution, the most likely first; a pytree.

    Attributes:
        ids: ``[..., k]`` int32 vocabulary ids, global even when the vocabulary is split. -1 where ``where`` is False.
        logprobs: ``[..., k]``, ln p of each id under the whole vocabulary, nats, float32 (float64 for a float64
            weight). 0 where ``where`` is False.
        lse: ``[...]``, ln Σ exp(logits), nats. 0 where ``where`` is False.
    """

    ids: Int[Array, "*b k"]
    logprobs: Float[Array, "*b k"]
    lse: Float[Array, ...]


class Results(NamedTuple):
    """The outputs of one call and, if a loss smooths its labels, the mean logit; or the cotangents of these."""

    # All fields are floats, even `correct` (1.0 or 0.0), because the cotangent of another dtype would be float0.
    outputs: LogprobOutput
    mean_logit: Float[Array, ...] | None = None

    @property
    def public(self) -> LogprobOutput:
        """The outputs as the public functions return them: `correct` as bool, `support` as int32."""
        out = self.outputs
        return out if out.correct is None else out._replace(**_cast_to_public_types(out.correct, out.support))


@functools.partial(jax.jit, inline=True)
def _cast_to_public_types(correct: Array, support: Array | None) -> dict[str, Array | None]:
    """Returns `correct` and `support` in their public dtypes.

    The function is jitted because outside ``jit`` a Python number in an expression is a transfer to the device, which
    ``jax.transfer_guard`` may forbid.
    """
    count = jax.tree.map(lambda x: jnp.nan_to_num(x, nan=-1.0).astype(jnp.int32), support)
    return {"correct": correct > 0, "support": count}


class Operands(NamedTuple):
    """The arrays of one shard, as an implementation receives them.

    Rows from ``num_rows`` on and columns from ``num_columns`` on are padding. Results of padded rows are never read.
    Both counts may be traced.
    """

    hidden: Float[Array, "T H"]  # in the weight's dtype; [T, H + R] with an adapter (`Call.rank`)
    weight: Float[Array, "V H"]  # or [H, V]: Call.weight_layout
    targets: Int[Array, "T"]  # int32 column of the label in this shard, -1 where the shard does not own it
    inverse_temperature: Float[Array, "T"] | None  # 1 / temperature, times the scale or cap if traced; None: 1
    num_rows: Int[Array, ""] | None  # None: T
    num_columns: Int[Array, ""] | int | None  # None: V
    # A factor of the raw products, applied first: scale / cap if either is traced; without a cap, the sign of a traced
    # scale.
    raw_scale: Float[Array, "T"] | None = None
    bias: Float[Array, "V"] | None = None  # added to the raw products, in the statistics' dtype
    candidates: Int[Array, "T K"] | None = None  # int32 columns of this shard, -1 where the shard does not own the id
    # A column whose x is below its token's floor does not count, except the target. None: every column counts.
    floor: Float[Array, "T"] | None = None
    adapter: Float[Array, "V R"] | None = None  # B of an adapter, in the weight's dtype


class ShardStatistics(NamedTuple):
    """Each token's statistics over some columns of the vocabulary: those of a tile, of a shard, or all.

    Every field is ``[T]``, except ``candidates``, which is ``[T, K]``. The statistics of N shards are stacked, as
    ``[N, T]`` and ``[N, T, K]``. The dtype is float32 (float64 for a float64 weight). A field that the call does not
    need is None.

    The unit is that of x; a logit is z = k·x. Without a softcap, x is the product plus the bias, with the sign of
    ``logit_scale``, and k = |logit_scale| / temperature. With a softcap c, x is the tanh and k = c / temperature.
    Statistics never hold k times a maximum, because the rounding of that product would be an error of every logit.

    Attributes:
        max: m, the largest x; -1e30 if there is no column.
        sumexp: s = Σ exp(u), with u = (x - m)·k.
        weighted: q = Σ u·exp(u); the entropy is ln s - q/s. None without entropy.
        target: u of the label if these columns hold it, else -inf.
        min: the smallest x; 1e30 if there is no column. None without ``stats=True``.
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
    """One value for each operand that can have a gradient: its array, its gradient or its partition spec."""

    hidden: A  # [..., H]
    weight: A  # [V, H], or [H, V]: Call.weight_layout
    bias: A | None = None  # [V]
    adapter: A | None = None  # [V, R], B of an adapter (`Call.rank`)

    def select(self, gradients: RequestedGradients) -> Primals[A | None]:
        """Returns the operands whose gradients are computed, with None in place of the others."""
        is_requested = dataclasses.astuple(gradients)
        return Primals(*(x if computed else None for x, computed in zip(self, is_requested, strict=True)))


@dataclasses.dataclass(frozen=True)
class RequestedGradients:
    """For each operand, whether its gradient is computed. A frozen operand costs no product in the backward."""

    hidden: bool = True
    weight: bool = True
    bias: bool = True
    adapter: bool = True

    @property
    def any(self) -> bool:
        """Whether any gradient is computed."""
        return any(dataclasses.astuple(self))


class RowCoefficients(NamedTuple):
    """Each token's coefficients of dlogits = uniform + e^u·(constant + slope·u), with u = (x - max)·k (eq. 4).

    In the label's column, ``target`` replaces e^u·(constant + slope·u). In each candidate's column, its value in
    ``candidates`` is added. Both arrays include the derivative of the softcap.
    """

    max: Float[Array, "T"]  # the largest x of the whole vocabulary
    target: Float[Array, "T"]
    constant: Float[Array, "T"]
    slope: Float[Array, "T"] | None  # None without entropy
    uniform: Float[Array, "T"] | None = None  # None without mean_logit
    candidates: Float[Array, "T K"] | None = None  # None without candidates
    at_candidates: Float[Array, "T K"] | None = None  # for kernels: x of each candidate, or -inf


class Device(NamedTuple):
    """The properties of a device that decide whether kernels run on it, and with which tile sizes."""

    platform: str = "cpu"
    kind: str = ""
    compute_capability: str = ""  # of an NVIDIA GPU: "9.0"
    core_count: int = 0  # multiprocessors of a GPU


CPU = Device()
FLOAT32 = jnp.dtype(jnp.float32)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Call:
    """Everything static about a call of any function: shapes, dtypes, device, options, and how it runs. Hashable.

    `lce_jax.call._options` validates the options and sets them; `lce_jax.call._describe` sets the other fields.
    ``columns`` counts the columns of the local weight, which may be a shard and may be padded; ``vocab_size`` is the
    true size of the whole vocabulary.
    """

    num_tokens: int = 0
    hidden_size: int = 0
    columns: int = 0
    dtype: jnp.dtype = FLOAT32  # of the weight, and therefore of the matrix products
    caller_dtype: jnp.dtype | None = None  # the dtype of the caller's hidden if it is not the weight's; else None
    partial_rows: bool = False  # whether some rows may be masked, by ``where`` or by a number of rows
    device: Device = CPU

    function: str = "linear_logprobs"  # the public function that messages name
    logit_scale: float = 1.0
    logit_softcap: float | None = None
    entropy: bool = True
    stats: bool = False
    weight_layout: str = "vh"
    cache_bytes: int | None = 0  # the caller's option; `cache_budget` says what None means
    chunk_bytes: int | None = None  # of a chunk's exponentials in `linear_loss`; None: the default of the device
    precision: Any = None
    mean_logit: bool = False  # whether the mean logit is computed, which label smoothing needs
    has_bias: bool = False
    # The padded rank R of an adapter (`scalars.padded_rank`); 0: no adapter. With an adapter, hidden is [..., H + R],
    # the weight is frozen, and there is no bias. The weight multiplies the first H columns of hidden, h, and B [V, R]
    # the last R, u: logits = h·Wᵀ + u·Bᵀ.
    rank: int = 0
    num_candidates: int = 0  # K; 0: the call has no candidates
    traced_scale: bool = False  # whether scale or cap is an array; then `Rows` has both, and the fields above are 1
    gradient_threshold: float = 0.0  # gradients leave out tiles in which all probabilities are below this
    vocab_part_size: int | None = None  # columns per part of the vocabulary; each part begins a new tile
    has_floor: bool = False
    top_k: int = 0  # k of `linear_topk`; 0 in every other function
    direction: Literal["forward", "reverse", "jsd", "tv"] = "forward"  # of `linear_kl`
    teacher: Call | None = None  # the teacher's call, in `linear_kl`
    gradients: RequestedGradients = RequestedGradients()  # the gradients that a differentiated call computes

    implementation: str = ""  # the implementation that serves the call, chosen among ``requested``
    requested: tuple[str, ...] | None = None  # names to choose from, now and for a shard's shapes; None: all
    caller_vocab_size: int | None = None  # the caller's option, until it is checked and moved to ``vocab_size``
    vocab_size: int = 0
    padded: bool = False  # whether all shards together have more columns than ``vocab_size``
    axis_name: Any = None  # the mesh axis over which the vocabulary is split inside this program
    gather_dim: int | None = None  # the dimension of hidden that is split over ``axis_name`` too
    shards: int = 1  # the number of vocabulary shards, if `explain` knows it
    # The mesh axes that split the tokens, in a program that `run_over_devices` runs. There, types do not show what to
    # sum, so the program itself sums over these axes, and the cotangents that it receives are complete sums. None: the
    # types of ``shard_map`` show what to sum.
    token_axes: tuple[str, ...] | None = None
    # How the global operands of `run_over_devices` are split: a `Layout`, or the mesh of the operands' types, which is
    # empty if the types name none. None: the operands are on one device.
    mesh: Any = None

    @property
    def heads(self) -> tuple[Call, ...]:
        """The call of each head: this one, and the teacher's if there is one."""
        return (self,) if self.teacher is None else (self, self.teacher)

    def replace(self, **fields: Any) -> Call:
        """Returns a copy with new ``fields``, which are also set in the teacher's call.

        `dataclasses.replace` takes ten times as long, and does not change the teacher's call.
        """
        other = object.__new__(Call)
        vars(other).update(vars(self) | {"teacher": self.teacher and self.teacher.replace(**fields)} | fields)
        assert len(vars(other)) == len(vars(self)), fields
        return other

    @property
    def sharded_function(self) -> str:
        """The name of the public function that takes mesh axes by name."""
        return f"sharded_{self.function}"

    @property
    def statistics(self) -> dict[str, int]:
        """The fields of `ShardStatistics` that the call computes, in order, with their numbers of values per token."""
        optional: dict[str, int] = {"weighted": self.entropy, "min": self.stats, "squares": self.stats}
        optional |= {"total": self.mean_logit, "candidates": self.num_candidates}
        optional |= {"support": self.stats and self.has_floor}
        widths = {name: int(optional.get(name, True)) for name in ShardStatistics._fields}
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
        """How many bytes of the forward's tiles may be cached for the backward.

        The default is `defaults.CACHE_BYTES` on a GPU (0 with a threshold or vocabulary parts), and 0 elsewhere.
        """
        if self.cache_bytes is not None:
            return self.cache_bytes
        is_useful = self.vocab_part_size is None and not self.gradient_threshold
        return defaults.CACHE_BYTES if is_useful and self.device.platform == "gpu" else 0

    @property
    def asks_for_tiles(self) -> bool:
        """Whether the backward reads tiles that the forward saves, so that the mesh must be known while tracing.

        The number of saved tiles depends on how the tokens are split. `linear_loss` saves none, because its forward
        computes the gradients.
        """
        return (bool(self.cache_bytes) or self.gradient_threshold > 0) and self.function != "linear_loss"

    @property
    def vocab_dim(self) -> int:
        """The index of the weight's vocabulary dimension."""
        return self.weight_layout.index("v")

    @property
    def hidden_dim(self) -> int:
        """The index of the weight's hidden dimension."""
        return self.weight_layout.index("h")

    def split(self, hidden: Array) -> tuple[Array, Array]:
        """Splits hidden into [..., H] for the weight and [..., R] for an adapter.

        Without an adapter, both are ``hidden``.
        """
        return (hidden[..., : self.hidden_size], hidden[..., self.hidden_size :]) if self.rank else (hidden, hidden)

    @property
    def single_part(self) -> Call:
        """The same call without ``vocab_part_size``."""
        return dataclasses.replace(self, vocab_part_size=None)

    @property
    def hidden_dtype(self) -> jnp.dtype:
        """The dtype of hidden before it is cast to the weight's, and of dhidden."""
        return self.caller_dtype or self.dtype

    @property
    def stat_dtype(self) -> jnp.dtype:
        """The dtype of every sum and softmax: float32, or float64 for a float64 weight."""
        return self.dtype if self.dtype == jnp.float64 else FLOAT32

    @property
    def result_dtype(self) -> jnp.dtype:
        """The dtype of results that are computed from all heads."""
        return functools.reduce(jnp.promote_types, (head.stat_dtype for head in self.heads))

    @property
    def statistics_bytes(self) -> int:
        """The bytes of the merged statistics, which every implementation saves for the backward."""
        return sum(self.statistics.values()) * self.num_tokens * self.stat_dtype.itemsize

    @property
    def candidate_bytes(self) -> int:
        """The bytes that each pass needs for candidates: their logits, ids and gradients, or sorted copies of these."""
        return 3 * self.num_candidates * self.num_tokens * self.stat_dtype.itemsize


def is_array(x: Any) -> bool:
    """Whether ``x`` has a shape and a dtype: a concrete array, a tracer or a ``ShapeDtypeStruct``."""
    return isinstance(x, jax.Array | jax.ShapeDtypeStruct) or (hasattr(x, "shape") and hasattr(x, "dtype"))


class PassBytes(NamedTuple):
    """Temporary memory of compiled programs on one device, in bytes, as XLA allocates it.

    Attributes:
        forward: memory of a program that runs the forward alone.
        backward: memory of a program that runs both passes. The gradients are results and not counted.
    """

    forward: int
    backward: int


@dataclasses.dataclass(frozen=True)
class Plan:
    """How a call will be computed and how much memory it will take, in bytes per device. ``print(plan)`` shows it all.

    The bytes of a pass count the arrays that this package allocates: tiles or chunks of logits and statistics, sums in
    float32, copies of operands, and a few values per token. Operands, results and gradients are not counted. Only XLA's
    compiler knows where it places these arrays and which it adds: see ``compiled``.

    Attributes:
        implementation: the implementation that will run.
        refused: the implementations tried before that one, each with the reason why it cannot serve the call.
        call: the shapes, dtypes, device and options that the plan is for.
        tiles: tile sizes by name.
        forward_bytes: memory of the forward.
        backward_bytes: memory of the backward, without ``kept_bytes``.
        kept_bytes: memory kept from forward to backward, without the call's operands.
        logits_bytes: for comparison, the bytes of one copy of the logits in the statistics' dtype.
        notes: remarks on options, in sentences.
        full_cache_bytes: the smallest ``cache_bytes`` with which the backward recomputes no tile; 0 if no cache avoids
            that.
        same_bits: in words, the calls in which a token's logprob, entropy and lse have the same bits. None: their bits
            may depend on everything else in the call.
        compiled: all temporary memory of the call's compiled programs. None without ``compile=True``.
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
        """The peak memory: ``kept_bytes`` plus the larger pass.

        The gradients may later take part of this memory. So the real peak may be lower than this number plus the
        gradients.
        """
        return self.kept_bytes + max(self.forward_bytes, self.backward_bytes)

    def __str__(self) -> str:
        call = self.call
        device = call.device.kind or call.device.platform
        lines = [
            f"{self.implementation}: {call.num_tokens:,} tokens, hidden size {call.hidden_size:,}, "
            f"{call.columns:,} vocabulary columns, {call.dtype.name}, on {device}",
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
    """Returns the plan's notes on options that an implementation without kernels does not use."""
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


OVERWRITES = "the backward overwrites the cached tiles; outside jax.jit, a copy of them"


def cache_notes(call: Call, cached: int, tiles: int, tile_bytes: int) -> tuple[str, ...]:
    """Returns the plan's note on ``cache_bytes``: how many of the vocabulary's ``tiles`` are ``cached``."""
    if not call.cache_budget:
        return ()
    default = "" if call.cache_bytes else f"; cache_bytes=None is up to {format_bytes(defaults.CACHE_BYTES)} on a GPU"
    return (f"the forward keeps {cached} of {tiles} vocabulary tiles, {format_bytes(tile_bytes)} each{default}",)


def candidate_notes(call: Call) -> tuple[str, ...]:
    """Returns the plan's note on the bytes that candidates add."""
    if not call.num_candidates:
        return ()
    in_pass, saved = format_bytes(call.candidate_bytes), format_bytes(call.candidate_bytes // 3)
    return (f"{call.num_candidates} candidates per token add {in_pass} to each pass and {saved} to what is kept",)
