"""The types of the bridge: results, tensors, and the static part of a call.

Dimension letters: T tokens, H hidden size, V vocabulary entries of this rank's shard, P rows of a program (tokens and
padding), N ranks of the tensor-parallel group, F statistics, O outputs, K candidates, and S values per token that the
forward saves for the backward: the label; the temperature, floor and candidates if they were passed; and the merged
statistics.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import weakref
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch.fx.experimental.symbolic_shapes import guard_scalar

from lce_jax.run.kernels import Call

type Entropy = bool | Literal["metric"]
type OutOfVocab = Literal["zero", "megatron"]
type Wgrad = Literal["return", "main_grad"]
type Reduction = Literal["none", "sum", "mean"]

PLAIN = (torch.Tensor, torch.nn.Parameter)  # types without the behaviour of a tensor subclass
PER_CANDIDATE = "candidate_logprobs"  # the only result of shape [T, K]; the others are [T]
DIFFERENTIABLE = ("logprobs", "entropy", "lse", "mean_logit", PER_CANDIDATE)  # results that can have a gradient
STATS_FIELDS = ("max_logit", "min_logit", "sum_p_squared")  # results that ``stats=True`` adds, without a gradient


class LogprobOutput(NamedTuple):
    """Per-token results: float32 tensors of ``labels.shape``, or None. They are 0 for masked tokens.

    All are differentiable except the fields that ``stats=True`` adds. To type checkers, logprobs, entropy and lse are
    tensors; only after `linear_logprobs` with ``entropy=False`` may ``entropy`` be None. Type checkers do not warn
    about the other fields, although they are None unless an option requests them. From a function that may return only
    tensors, such as a stage of ``torch.distributed.pipelining``, return ``out[:3]``, or the fields that you need.

    Attributes:
        logprobs: ln p(label), nats. ``out_of_vocab`` decides its value for a label outside the vocabulary.
        entropy: entropy of the token's distribution, nats. None with ``entropy=False``.
        lse: ln Σ exp(logits), nats.
        max_logit: largest logit over the true vocabulary. None without ``stats=True``.
        min_logit: smallest logit over the true vocabulary. None without ``stats=True``.
        mean_logit: mean logit over the true vocabulary. None without ``mean_logit=True``.
        candidate_logprobs: ``[..., K]``, ln p of each id in ``candidates``, nats; 0 where the id is negative or out of
            vocabulary. None without ``candidates``.
        sum_p_squared: Σ p² over the true vocabulary, the probability that two draws are the same token, in (0, 1]. None
            without ``stats=True``.
        support: the number of vocabulary tokens that ``logit_floor`` leaves. None without ``logit_floor`` or without
            ``stats=True``.
    """

    # `Any` stands for None, which a type checker would report even where an option requests the field.
    logprobs: torch.Tensor
    entropy: torch.Tensor
    lse: torch.Tensor
    max_logit: torch.Tensor | Any = None
    min_logit: torch.Tensor | Any = None
    mean_logit: torch.Tensor | Any = None
    candidate_logprobs: torch.Tensor | Any = None
    sum_p_squared: torch.Tensor | Any = None
    support: torch.Tensor | Any = None


if TYPE_CHECKING:

    class PerhapsWithoutEntropy(LogprobOutput):
        """The result type if ``entropy`` is False, or is a flag whose value a type checker does not know."""

        @property
        def entropy(self) -> torch.Tensor | None: ...  # type: ignore[override]


class TopK(NamedTuple):
    """The k most likely ids of each token's distribution, the most likely first. No gradient flows through them.

    Attributes:
        ids: ``[..., k]`` int64 vocabulary ids, global even when the vocabulary is split. -1 for masked tokens.
        logprobs: ``[..., k]`` float32, ln p of each id under the full vocabulary, nats. 0 for masked tokens.
        lse: ``[...]`` float32, ln Σ exp(logits), nats. 0 for masked tokens.
    """

    ids: torch.Tensor
    logprobs: torch.Tensor
    lse: torch.Tensor


class Tensors(NamedTuple):
    """The tensors of a call, flattened. A tensor that the function does not take or that was not passed is None."""

    hidden: torch.Tensor  # [T, H]; with an adapter [T, H + R], where R is `Call.rank`
    weight: torch.Tensor  # [V, H]
    bias: torch.Tensor | None  # [V]; with an adapter, its B [V, R]
    labels: torch.Tensor  # [T] global ids; those outside [0, vocab_size) are out of vocabulary
    temperature: torch.Tensor | None = None  # [T] float32; None: 1
    candidates: torch.Tensor | None = None  # [T, K] global ids; those outside [0, vocab_size) are no candidates
    floor: torch.Tensor | None = None  # [T] float32, in logits; None: no floor
    teacher_hidden: torch.Tensor | None = None  # [T, G]
    teacher_weight: torch.Tensor | None = None  # [V, G]
    teacher_bias: torch.Tensor | None = None  # [V]
    teacher_temperature: torch.Tensor | None = None  # [T] float32; None: 1

    @property
    def numbers_per_token(self) -> int:
        """How many labels, temperatures, floors and candidates each token has, all together."""
        single = 1 + (self.temperature is not None) + (self.floor is not None)
        return single + (0 if self.candidates is None else self.candidates.shape[1])


class Sums(NamedTuple):
    """Memory that a backward may write to, besides its results. JAX uses only ``total``."""

    total: Any = None  # a `DweightSum`: dweight is added to it and not returned; dweight must be requested
    main_grad: torch.Tensor | None = None  # float32: dweight is added to it; an empty sparse tensor is returned instead
    owns_cache: bool = False  # whether nothing else reads the cache, so that its memory may be overwritten


NO_SUMS = Sums()


type Lora = tuple[torch.Tensor, torch.Tensor, float]  # A [r, H], B [V, r], scale


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class TorchCall:
    """The static part of a call of any function: a `Call` of `lce_jax`, and the options that only the bridge has.

    `make_call` returns the same object for equal calls, so that comparing calls costs nothing.
    """

    jax: Call  # options without shapes; in a trace, a vocab_size of 0 stands for all columns of the weight
    group: str = ""  # the group's name, from `tensors._tensor_parallel.name_group`
    metric_entropy: bool = False  # whether the entropy has no gradient
    megatron: bool = False  # whether labels out of vocabulary have Megatron's value
    reduce_grad_hidden: bool = False  # False without a group
    beta: float | None = None  # this and the next two: options of "linear_kl"
    has_temperature: bool = False  # whether each token has its own temperature
    has_teacher_temperature: bool = False

    text: str  # JSON of the options that differ from the defaults. Operators take it, because all processes can read it
    fields: tuple[str, ...] = dataclasses.field(init=False)  # the names of the results, the differentiable ones first
    differentiable: tuple[str, ...] = dataclasses.field(init=False)  # the names of results that have a gradient

    def __post_init__(self) -> None:
        call = self.jax
        fields: tuple[str, ...] = (call.function,)
        differentiable = fields
        if call.function == "linear_topk":
            fields, differentiable = TopK._fields, ()
        elif call.function == "linear_logprobs":
            is_result = {
                "entropy": call.entropy and not self.metric_entropy,
                "mean_logit": call.mean_logit,
                PER_CANDIDATE: call.num_candidates > 0,
            }
            differentiable = tuple(name for name in DIFFERENTIABLE if is_result.get(name, True))
            metric = ("entropy",) if call.entropy and self.metric_entropy else ()
            support = ("support",) if call.stats and call.has_floor else ()
            fields = (*differentiable, *metric, *(STATS_FIELDS if call.stats else ()), *support)
        vars(self).update(fields=fields, differentiable=differentiable)

    @property
    def num_temperatures(self) -> int:
        """How many per-token temperatures a "linear_kl" has: the student's, the teacher's."""
        return self.has_temperature + self.has_teacher_temperature

    @property
    def keeps_tiles(self) -> bool:
        """Whether the forward may save exponentials or active tiles for the backward."""
        return bool(self.jax.cache_bytes) or self.jax.gradient_threshold > 0

    @property
    def options(self) -> dict[str, Any]:
        """The values of all arguments of `make_call`, by name."""
        return DEFAULTS | json.loads(self.text)

    @functools.cached_property
    def compiled(self) -> TorchCall:
        """This call without the options that compiled programs do not depend on, so that calls share programs."""
        return make_call(self.text, group="", metric_entropy=False, megatron=False, reduce_grad_hidden=False)

    @functools.cached_property
    def exchanged(self) -> TorchCall:
        """This call with only the options that affect what the ranks of a group exchange, and when."""
        names = "group", "vocab_size", "metric_entropy", "megatron", "cache_bytes", "gradient_threshold", "beta"
        plain = {name: DEFAULTS[name] for name in (*names, "has_temperature", "has_teacher_temperature")}
        for name in "logit_scale", "logit_softcap":
            plain |= dict.fromkeys((name, f"teacher_{name}"), DEFAULTS[name])
        return make_call(self.text, **plain)


TORCH_FIELDS = tuple(x.name for x in dataclasses.fields(TorchCall) if x.init and x.name not in ("jax", "text"))
DEFAULTS = {
    field.name: field.default
    for field in (*dataclasses.fields(Call), *dataclasses.fields(TorchCall))
    if field.init and field.default is not dataclasses.MISSING
}
_calls: weakref.WeakValueDictionary[str, TorchCall] = weakref.WeakValueDictionary()  # by `TorchCall.text`


def make_call(text: str = "{}", **fields: Any) -> TorchCall:
    """Returns the call that ``text``, a `TorchCall.text`, describes, with ``fields`` of `TorchCall` or `Call` replaced.

    Names of the teacher's fields begin with ``teacher_``. A number that torch.compile treats as an input of the graph
    becomes a constant.
    """
    if not torch.compiler.is_compiling():
        return _make_call(text, *fields.items())
    fields = {name: guard_scalar(x) if isinstance(x, int | float) else x for name, x in fields.items()}
    return _make_constant_call(text, **fields)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _make_constant_call(text: str, **fields: Any) -> TorchCall:
    return _make_call(text, *fields.items())


@functools.lru_cache(maxsize=1024)
def _make_call(text: str, *fields: tuple[str, Any]) -> TorchCall:
    known = json.loads(text) | dict(fields)
    known = {name: value for name, value in known.items() if value != DEFAULTS[name.removeprefix("teacher_")]}
    text = json.dumps(known, sort_keys=True)
    torch_fields = {name: known.pop(name) for name in TORCH_FIELDS if name in known}
    teacher = {name.removeprefix("teacher_"): known.pop(name) for name in [*known] if name.startswith("teacher_")}
    if known.get("function") == "linear_kl":
        known["teacher"] = Call(**teacher)
    if "requested" in known:
        known["requested"] = tuple(known["requested"])
    return _calls.setdefault(text, TorchCall(jax=Call(**known), text=text, **torch_fields))
