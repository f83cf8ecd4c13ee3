"""What the heads of both Flax APIs share: options, logits, and methods that store no logits.

This module does not import Flax.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypedDict, Unpack, overload

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from lce_jax.call import _checks, _options
from lce_jax.call._options import CallOptions, GradientOptions, MeshPlacement
from lce_jax.mathematics import _logprobs
from lce_jax.ops import _sharded
from lce_jax.ops._cross_entropy import linear_cross_entropy
from lce_jax.ops._kl import linear_kl
from lce_jax.ops._logprobs import linear_logprobs
from lce_jax.ops._loss import linear_loss
from lce_jax.ops._topk import linear_topk
from lce_jax.types import _jax, loss_signatures, messages, scalars
from lce_jax.types._types import Call

if TYPE_CHECKING:
    from jax.lax import PrecisionLike
    from jax.sharding import Mesh
    from jax.typing import DTypeLike

    from lce_jax.mesh._layout import Axes
    from lce_jax.ops._cross_entropy import Reduction
    from lce_jax.types._shapes import Array, ArrayLike, Bool, Float, Int
    from lce_jax.types._types import LogprobOutput, PerhapsWithoutEntropy, TopK

METHODS: dict[str, Callable[..., Any]] = {  # a head's methods, and the functions that they call
    "logprobs": linear_logprobs,
    "topk": linear_topk,
    "kl": linear_kl,
    "loss": linear_cross_entropy,
    "linear_loss": linear_loss,
}
SHARDED_METHODS = {name: getattr(_sharded, f"sharded_{function.__name__}") for name, function in METHODS.items()}

# With this initializer, hidden states of unit variance give logits of unit variance.
WEIGHT_INIT = jax.nn.initializers.lecun_normal(in_axis=1, out_axis=0)


class OptionsOfTopK(CallOptions, total=False):
    """The options of every method. The other options of `lce_jax.linear_logprobs` belong to the head."""

    where: Bool[ArrayLike, "*b"] | None


class SharedOptions(OptionsOfTopK, GradientOptions, total=False):
    """The options of every differentiable method except ``kl``."""


class OptionsOfKL(OptionsOfTopK, total=False):
    """The options of ``kl``. The other options of `lce_jax.linear_kl` belong to the two heads."""

    direction: Literal["forward", "reverse", "jsd", "tv"]
    beta: float | Float[ArrayLike, ""] | None
    teacher_temperature: float | Float[ArrayLike, "..."] | Literal["same"]
    cache_bytes: int | None


class OptionsOfLogprobs(SharedOptions, total=False):
    """The options of ``logprobs``, except ``entropy``."""

    stats: bool
    candidates: Int[ArrayLike, "*b K"] | None
    ignore_index: int | None


class OptionsOfLoss(SharedOptions, total=False):
    """The options of ``loss``."""

    ignore_index: int | None
    reduction: Reduction
    label_smoothing: float
    z_loss: float | Float[ArrayLike, ""]
    class_weights: Float[ArrayLike, "V"] | None
    normalizer: float | ArrayLike | None
    chunk_bytes: int | None


class TiedOptions(TypedDict, total=False):
    """The options of a head whose weight is that of an embedding."""

    use_bias: bool
    logit_scale: float
    logit_softcap: float | None
    dtype: DTypeLike | None
    param_dtype: DTypeLike
    precision: PrecisionLike
    mesh: Mesh | None
    vocab_axis: Axes
    batch_axes: Axes
    sequence_axis: Axes


class Embedding(Protocol):
    """A module with a parameter ``embedding [rows, H]`` that a head may share, such as ``nnx.Embed``."""

    @property
    def embedding(self) -> Any:
        """The parameter."""


@dataclasses.dataclass(frozen=True)
class HeadSettings:
    """The options of a head. They are hashable, so they are static in any module that holds them."""

    vocab_size: int
    logit_scale: float = 1.0
    logit_softcap: float | None = None
    dtype: Any = None
    precision: PrecisionLike = None
    mesh: Mesh | None = None
    vocab_axis: Axes = None
    batch_axes: Axes = None
    sequence_axis: Axes = None

    @classmethod
    def collect(cls, arguments: Mapping[str, Any]) -> HeadSettings:
        """Selects the options of a head among the arguments of a module."""
        return cls(**{field.name: arguments[field.name] for field in dataclasses.fields(cls)})

    def __post_init__(self) -> None:
        scalars.number("logit_scale", self.logit_scale)
        if self.logit_softcap is not None:
            scalars.positive("logit_softcap", self.logit_softcap)
        if self.dtype is not None:
            check_dtype("dtype", self.dtype)
        if self.precision is not None:
            _options.check_option("precision", {"precision": self.precision})
        _checks.check_mesh(self.mesh)
        if self.mesh is not None and not self.names_axes:
            raise ValueError("mesh without an axis: name one as vocab_axis, batch_axes or sequence_axis")

    @property
    def names_axes(self) -> bool:
        """Whether the head names a mesh axis."""
        return any(axes is not None for axes in (self.vocab_axis, self.batch_axes, self.sequence_axis))

    def logits(
        self, hidden: Float[ArrayLike, "*b H"], weight: Float[Array, "V H"], bias: Float[Array, "V"] | None = None
    ) -> Float[Array, "*b vocab_size"]:
        """Computes ``cap(logit_scale · (hidden · weightᵀ + bias))`` over the true vocabulary, without padding."""
        self.check_hidden(hidden, weight)
        weight, sharding = self.cast(weight), _logits_sharding(hidden, weight)
        raw = jnp.einsum(
            "...h,vh->...v",
            hidden.astype(weight.dtype),
            weight,
            precision=self.precision,
            preferred_element_type=jnp.promote_types(weight.dtype, jnp.float32),
            out_sharding=sharding,
        )
        if bias is not None:
            if sharding is not None:
                bias = jax.sharding.reshard(bias, NamedSharding(sharding.mesh, P(None)))
            raw = raw + bias.astype(raw.dtype)
        call = Call(logit_scale=self.logit_scale, logit_softcap=self.logit_softcap)
        logits, _ = _logprobs.transform_logits(raw, call, None)
        return logits[..., : self.vocab_size]

    def call(
        self,
        method: str,
        before: tuple[Any, ...],
        parts: tuple[Any, Any],
        after: tuple[Any, ...],
        options: Mapping[str, Any],
        teacher_options: Mapping[str, Any] | None = None,
    ) -> Any:
        """Calls the function of `lce_jax` for ``method``, or its sharded form if the head names a mesh axis.

        ``before`` and ``after`` are the positional arguments before and after the weight. ``parts`` are the weight and
        the bias. ``options`` are those of this call, and ``teacher_options`` come from a teacher's head.
        """
        weight, bias = parts
        self.check_hidden(before[-1], weight)
        function = (SHARDED_METHODS if self.names_axes else METHODS)[method]
        head_options = {"bias": bias, **self._function_options(), **(teacher_options or {})}
        _check_names(method, function, head_options, options, before[0] if method == "linear_loss" else None)
        return function(*before, self.cast(weight), *after, **head_options, **options)

    def _function_options(self) -> dict[str, Any]:
        """Returns the function's options that belong to the head, which a call cannot set."""
        others = {"dtype"} if self.names_axes else {"dtype", *MeshPlacement._fields}
        return {"weight_layout": "vh", **{name: x for name, x in vars(self).items() if name not in others}}

    def check_hidden(self, hidden: Any, weight: Any) -> None:
        """Refuses hidden states whose last dimension is not the head's hidden size."""
        _checks.check_array("hidden", hidden)
        size, last = weight.shape[1], tuple(hidden.shape[-1:])
        if last == (size,):
            return
        swapped = f": did you swap the sizes, and mean LMHead({self.vocab_size}, {size})? Or did you pass logits?"
        raise ValueError(
            f"hidden {tuple(hidden.shape)} must end in the head's hidden_size={size}"
            f"{swapped if last == (self.vocab_size,) else ''}"
        )

    def cast(self, weight: Float[Array, "V H"]) -> Float[Array, "V H"]:
        """Casts the weight to the dtype of the matrix products."""
        return weight if self.dtype is None else weight.astype(self.dtype)


def _check_names(
    method: str,
    function: Callable[..., Any],
    head_options: Mapping[str, Any],
    call_options: Mapping[str, Any],
    loss_fn: Callable[..., Any] | None,
) -> None:
    """Refuses a call's options that belong to the head, and unknown names.

    ``function`` itself refuses the options of other functions.
    """
    known = [name for name in _options.list_keywords(function) if name not in head_options]
    if repeated := [name for name in call_options if name in head_options]:
        may = ", ".join(known)
        raise TypeError(f"LMHead.{method}: {repeated[0]} is set where the head is made; a call may set {may}")
    others = [name for name in call_options if name not in (*known, *_options.OPTIONS)]
    if others and (unknown := [name for name in others if name not in loss_signatures.list_loss_arguments(loss_fn)]):
        raise messages.unknown_options_error(f"LMHead.{method}", unknown, known, loss_fn)


class LMHead:
    """A head's methods, none of which stores logits. The classes LMHead of both Flax APIs inherit from this class."""

    options: HeadSettings

    def parts(self) -> tuple[Float[Array, "V H"], Float[Array, "V"] | None]:
        """Returns the head's weight and bias."""
        raise NotImplementedError

    @overload
    def logprobs(  # type: ignore[overload-overlap]  # bool has True in it
        self, hidden: Float[ArrayLike, "*b H"], labels: Int[ArrayLike, "*b"], *, entropy: Literal[True] = True,
        **options: Unpack[OptionsOfLogprobs],
    ) -> LogprobOutput: ...  # fmt: skip
    @overload
    def logprobs(
        self, hidden: Float[ArrayLike, "*b H"], labels: Int[ArrayLike, "*b"], *, entropy: bool,
        **options: Unpack[OptionsOfLogprobs],
    ) -> PerhapsWithoutEntropy: ...  # fmt: skip
    def logprobs(
        self,
        hidden: Float[ArrayLike, "*b H"],
        labels: Int[ArrayLike, "*b"],
        *,
        entropy: bool = True,
        **options: Unpack[OptionsOfLogprobs],
    ) -> LogprobOutput:
        """Returns each token's log-probability and entropy, without storing the logits.

        Args:
            hidden: ``[..., H]``.
            labels: ``[...]`` vocabulary ids.
            entropy: False: ``.entropy`` is None and costs nothing.
            **options: ``where``, ``temperature``, ``stats``, ``candidates``, ``cache_bytes``, ``gradient_threshold``,
                ``vocab_part_size``, ``logit_floor``, ``ignore_index``, ``implementation`` and (inside
                ``jax.shard_map``) ``axis_name``, as in `lce_jax.linear_logprobs`.
        """
        options_and_entropy = {"entropy": entropy, **options}
        out: LogprobOutput = self.options.call("logprobs", (hidden,), self.parts(), (labels,), options_and_entropy)
        return out

    def topk(self, hidden: Float[ArrayLike, "*b H"], k: int, **options: Unpack[OptionsOfTopK]) -> TopK:
        """Returns the k most likely tokens and their log-probabilities, without storing the logits.

        The results are not differentiable.

        Args:
            hidden: ``[..., H]``.
            k: how many tokens, from 1 to 512 and at most the vocabulary; a Python integer.
            **options: ``where``, ``temperature``, ``implementation`` and (inside ``jax.shard_map``) ``axis_name``, as
                in `lce_jax.linear_topk`.
        """
        top: TopK = self.options.call("topk", (hidden,), self.parts(), (k,), options)
        return top

    def kl(
        self,
        hidden: Float[ArrayLike, "*b H"],
        teacher: LMHead,
        teacher_hidden: Float[ArrayLike, "*b G"],
        **options: Unpack[OptionsOfKL],
    ) -> Float[Array, "*b"]:
        """Returns each token's exact divergence from a teacher's head, without storing the logits of either head.

        Each head has its own scale, cap, bias and dtype. The teacher has no gradient.

        Args:
            hidden: ``[..., H]``.
            teacher: the teacher's head, over the same ``vocab_size``. In Linen, it must be bound
                (``head.bind(variables)``) or have the same parent.
            teacher_hidden: ``[..., G]``, the teacher's hidden states at the same tokens.
            **options: ``direction``, ``beta``, ``where``, ``temperature``, ``teacher_temperature``, ``cache_bytes``,
                ``implementation`` and (inside ``jax.shard_map``) ``axis_name``, as in `lce_jax.linear_kl`.
        """
        head, other = self.options, teacher.options
        if head.vocab_size != other.vocab_size:
            raise ValueError(
                f"vocab_size={head.vocab_size}, but the teacher's is {other.vocab_size}: a divergence needs one "
                "vocabulary"
            )
        weight, bias = teacher.parts()
        other.check_hidden(teacher_hidden, weight)
        teacher_options = {
            "teacher_bias": bias,
            "teacher_logit_scale": other.logit_scale,
            "teacher_logit_softcap": other.logit_softcap,
            "teacher_weight_layout": "vh",
        }
        operands = teacher_hidden, other.cast(weight)
        divergence: Array = head.call("kl", (hidden,), self.parts(), operands, options, teacher_options)
        return divergence

    def loss(
        self, hidden: Float[ArrayLike, "*b H"], labels: Int[ArrayLike, "*b"], **options: Unpack[OptionsOfLoss]
    ) -> Float[Array, "..."]:
        """Returns the cross entropy, without storing the logits.

        Args:
            hidden: ``[..., H]``.
            labels: ``[...]`` vocabulary ids.
            **options: ``ignore_index``, ``reduction``, ``label_smoothing``, ``z_loss``, ``class_weights``,
                ``normalizer``, ``chunk_bytes`` and the options of `logprobs`, as in `lce_jax.linear_cross_entropy`.
        """
        loss: Array = self.options.call("loss", (hidden,), self.parts(), (labels,), options)
        return loss

    @overload
    def linear_loss(  # type: ignore[overload-overlap]  # bool has True in it
        self, loss_fn: Callable[..., Array], hidden: Float[ArrayLike, "*b H"], labels: Int[ArrayLike, "*b"],
        *per_token: object, entropy: Literal[True] = True, **options: object,
    ) -> tuple[Float[Array, ""], LogprobOutput]: ...  # fmt: skip
    @overload
    def linear_loss(
        self, loss_fn: Callable[..., Array], hidden: Float[ArrayLike, "*b H"], labels: Int[ArrayLike, "*b"],
        *per_token: object, entropy: bool, **options: object,
    ) -> tuple[Float[Array, ""], PerhapsWithoutEntropy]: ...  # fmt: skip
    def linear_loss(
        self,
        loss_fn: Callable[..., Array],
        hidden: Float[ArrayLike, "*b H"],
        labels: Int[ArrayLike, "*b"],
        *per_token: object,
        **options: object,
    ) -> tuple[Float[Array, ""], LogprobOutput]:
        """Returns Σ loss_fn(logprob, entropy, lse, …) over the tokens, without storing the logits.

        Args:
            loss_fn: a loss of one token, such as those of `lce_jax.losses`.
            hidden: ``[..., H]``.
            labels: ``[...]`` vocabulary ids.
            *per_token: the further arguments of ``loss_fn``. Give them by name, ``advantage=...``.
            **options: ``where``, ``temperature``, ``entropy``, ``stats``, ``chunk_bytes``, ``gradient_threshold``,
                ``logit_floor``, ``implementation`` and (inside ``jax.shard_map``) ``axis_name``, as in
                `lce_jax.linear_loss`; all other names are arguments of ``loss_fn``.

        Returns:
            The sum, and a `LogprobOutput` for metrics.
        """
        before, after = (loss_fn, hidden), (labels, *per_token)
        result: tuple[Array, LogprobOutput] = self.options.call("linear_loss", before, self.parts(), after, options)
        return result


def _logits_sharding(hidden: Float[ArrayLike, "*b H"], weight: Float[Array, "V H"]) -> NamedSharding | None:
    """Returns the sharding of logits over Explicit axes: tokens split as in hidden, the vocabulary not split.

    Returns None over other axes, where the compiler decides. The vocabulary is not split because removing the padding
    would leave uneven shards.
    """
    sharding = jax.typeof(hidden).sharding
    if AxisType.Explicit not in sharding.mesh.axis_types:
        return None
    vocab_axes = _jax.list_axes(_jax.partitions(jax.typeof(weight).sharding.spec)[0])
    leading = _jax.partitions(sharding.spec)[:-1]
    rows = (tuple(axis for axis in _jax.list_axes(entry) if axis not in vocab_axes) for entry in leading)
    return NamedSharding(sharding.mesh, P(*rows, None))


def check_dtype(name: str, value: Any) -> None:
    """Refuses a value that is not a floating-point dtype of JAX, such as a dtype of torch."""
    try:
        known = jnp.issubdtype(jnp.dtype(value), jnp.floating)
    except TypeError:
        known = False
    if not known:
        raise TypeError(f"{name} must be a floating-point dtype of JAX, such as jnp.bfloat16, got {value!r}")


def pad_vocab_size(vocab_size: int, pad_to_multiple: int) -> int:
    """Returns ``vocab_size`` rounded up to a multiple: the number of rows of a weight that the head creates."""
    for name, value in (("vocab_size", vocab_size), ("pad_to_multiple", pad_to_multiple)):
        if scalars.integer(name, value) < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    return -(-vocab_size // pad_to_multiple) * pad_to_multiple


def check_tied(embedding: Any, hidden_size: int, vocab_size: int, pad_to_multiple: int) -> None:
    """Checks that an embedding's parameter fits a head that shares it."""
    rows, size = embedding.shape
    if size != hidden_size:
        raise ValueError(f"hidden_size={hidden_size} does not fit the tied embedding {(rows, size)}")
    if pad_to_multiple != 1:
        raise ValueError(f"pad_to_multiple={pad_to_multiple} cannot pad a tied embedding {(rows, size)}: pad it there")
    _checks.check_vocab_size(vocab_size, rows)


def count_rows(vocab_size: int, pad_to_multiple: int, vocab_axis: Axes, mesh: Any) -> int:
    """Returns how many rows the head's new weight has. Refuses a number that a known mesh's shards do not divide."""
    rows = pad_vocab_size(vocab_size, pad_to_multiple)
    _checks.check_mesh(mesh)
    mesh = jax.sharding.get_abstract_mesh() if mesh is None else mesh
    shards = math.prod(mesh.shape.get(axis, 1) for axis in _jax.list_axes(vocab_axis))
    if rows % shards:
        raise ValueError(
            f"the weight's {rows} rows (vocab_size={vocab_size}, pad_to_multiple={pad_to_multiple}) must divide by the "
            f"{shards} shards of vocab_axis {vocab_axis!r}: give pad_to_multiple={math.lcm(shards, pad_to_multiple)}"
        )
    return rows


def check_same_axes(names: Sequence[Any], vocab_axis: Axes) -> None:
    """Checks that an initializer's annotation splits the weight's rows over the axes of the head."""
    rows = _jax.list_axes(names[0]) if names else ()
    if vocab_axis is not None and rows != _jax.list_axes(vocab_axis):
        raise ValueError(
            f"weight_init splits the vocabulary over {rows or None}, vocab_axis over {_jax.list_axes(vocab_axis)}: "
            "name the same axes, or leave the annotation to vocab_axis"
        )
