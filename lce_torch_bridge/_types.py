"""The types of the bridge: its outputs, and what is static about a call.

Dimension letters: T tokens, H hidden size, V vocabulary entries of this rank's shard, P rows of a program (tokens and
their padding), N ranks of the tensor-parallel group, F statistics, O outputs, S numbers that the backward needs of each
token: its label, its temperature, its floor and its candidates if it has them, and the merged statistics. K candidates.
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

PLAIN = (torch.Tensor, torch.nn.Parameter)  # types of tensors that nothing else interprets
PER_CANDIDATE = "candidate_logprobs"  # the one result that is [T, K]; the others are [T]
DIFFERENTIABLE = ("logprobs", "entropy", "lse", "mean_logit", PER_CANDIDATE)  # results that may have a gradient
STATS_FIELDS = ("max_logit", "min_logit", "sum_p_squared")  # what ``stats=True`` adds, without a gradient


class LogprobOutput(NamedTuple):
    """Results of each token, float32 tensors of ``labels.shape``, or None. Tokens that are not kept are 0.

    All are differentiable except what ``stats=True`` adds. To a type checker, logprobs, entropy and lse are tensors;
    ``entropy`` may be None only in a call of `linear_logprobs` with ``entropy=False``. It reports no use of the other
    fields, which are there if the call asks for them. If a function may return only tensors, such as a stage of
    ``torch.distributed.pipelining``, return ``out[:3]``, or the fields that you need.

    Attributes:
        logprobs: ln p(label), nats. ``out_of_vocab`` says what a label outside the vocabulary has.
        entropy: entropy of the token's distribution, nats. None with ``entropy=False``.
        lse: ln Σ exp(logits), nats.
        max_logit: largest logit over the true vocabulary. None without ``stats=True``.
        min_logit: smallest logit over the true vocabulary. None without ``stats=True``.
        mean_logit: mean logit over the true vocabulary. None without ``mean_logit=True``.
        candidate_logprobs: ``[..., K]``, ln p of each id in ``candidates``, nats; 0 where the id is none or out of
            vocabulary. None without ``candidates``.
        sum_p_squared: Σ p² over the true vocabulary, the chance that two draws are the same token, in (0, 1]. None
            without ``stats=True``.
        support: how many tokens a ``logit_floor`` leaves. None without it or ``stats=True``.
    """

    # `Any` stands for None, which a checker would report in each call that asks for the field.
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
        """What a type checker sees of a call with ``entropy=False``, or with a flag that it does not know."""

        @property
        def entropy(self) -> torch.Tensor | None: ...  # type: ignore[override]


class TopK(NamedTuple):
    """The k most likely tokens of each token's distribution, the most likely first. No gradient flows through it.

    Attributes:
        ids: ``[..., k]`` int64 vocabulary ids, global also when the vocabulary is split. -1 for tokens not kept.
        logprobs: ``[..., k]`` float32, ln p of each of them under the whole vocabulary, nats. 0 for tokens not kept.
        lse: ``[...]`` float32, ln Σ exp(logits), nats. 0 for tokens not kept.
    """

    ids: torch.Tensor
    logprobs: torch.Tensor
    lse: torch.Tensor


class Tensors(NamedTuple):
    """The tensors of a call, flattened; None where the function or the call has none."""

    hidden: torch.Tensor  # [T, H]; [T, H + R] with an adapter (`Call.rank`)
    weight: torch.Tensor  # [V, H]
    bias: torch.Tensor | None  # [V]; the B [V, R] of an adapter
    labels: torch.Tensor  # [T] global id; outside [0, vocab_size): out of vocabulary
    temperature: torch.Tensor | None = None  # [T] float32; None: 1
    candidates: torch.Tensor | None = None  # [T, K] global ids; outside [0, vocab_size): none
    floor: torch.Tensor | None = None  # [T] float32, in logits; None: there is none
    teacher_hidden: torch.Tensor | None = None  # [T, G]
    teacher_weight: torch.Tensor | None = None  # [V, G]
    teacher_bias: torch.Tensor | None = None  # [V]
    teacher_temperature: torch.Tensor | None = None  # [T] float32; None: 1

    @property
    def numbers(self) -> int:
        """How many numbers each token comes with."""
        once = 1 + (self.temperature is not None) + (self.floor is not None)
        return once + (0 if self.candidates is None else self.candidates.shape[1])


class Sums(NamedTuple):
    """What a backward may write to besides its results, where its kernels are launched directly."""

    total: Any = None  # a `DweightSum`: dweight, which must be wanted then, is added to it and not returned
    main_grad: torch.Tensor | None = None  # float32: dweight is added to it, and what is returned is empty and sparse
    owns_cache: bool = False  # whether nothing else reads the cache


NO_SUMS = Sums()


type Lora = tuple[torch.Tensor, torch.Tensor, float]  # A [r, H], B [V, r] and the scale


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class TorchCall:
    """All that is static about a call of any function: what `lce_jax` calls a call, and what torch adds to it.

    Equal calls are one object, which `make_call` makes, so that comparing them costs nothing.
    """

    jax: Call  # its options, without shapes: vocab_size is 0 in a trace, for every column of the weight
    group: str = ""  # `tensors._tensor_parallel.name_of`
    metric_entropy: bool = False  # the entropy has no gradient
    megatron: bool = False  # Megatron's value for labels out of vocabulary
    reduce_grad_hidden: bool = False  # only where there is a group
    beta: float | None = None  # this and what follows: of "linear_kl"
    has_temperature: bool = False  # for each token
    has_teacher_temperature: bool = False

    text: str  # of all that differs from the defaults. The operators take it, because it says the same in any process
    fields: tuple[str, ...] = dataclasses.field(init=False)  # the results that are there, the differentiable ones first
    differentiable: tuple[str, ...] = dataclasses.field(init=False)  # of "linear_logprobs", fields of `LogprobOutput`

    def __post_init__(self) -> None:
        call = self.jax
        fields: tuple[str, ...] = (call.function,)
        differentiable = fields
        if call.function == "linear_topk":
            fields, differentiable = TopK._fields, ()
        elif call.function == "linear_logprobs":
            there = {
                "entropy": call.entropy and not self.metric_entropy,
                "mean_logit": call.mean_logit,
                PER_CANDIDATE: call.num_candidates > 0,
            }
            differentiable = tuple(name for name in DIFFERENTIABLE if there.get(name, True))
            metric = ("entropy",) if call.entropy and self.metric_entropy else ()
            support = ("support",) if call.stats and call.has_floor else ()
            fields = (*differentiable, *metric, *(STATS_FIELDS if call.stats else ()), *support)
        vars(self).update(fields=fields, differentiable=differentiable)

    @property
    def num_temperatures(self) -> int:
        """Of each token of "linear_kl"."""
        return self.has_temperature + self.has_teacher_temperature

    @property
    def keeps_tiles(self) -> bool:
        """Whether the forward may keep something of its tiles for the backward."""
        return bool(self.jax.cache_bytes) or self.jax.gradient_threshold > 0

    @property
    def options(self) -> dict[str, Any]:
        """All that `make_call` may change, by name."""
        return DEFAULTS | json.loads(self.text)

    @functools.cached_property
    def compiled(self) -> TorchCall:
        """The call without what the compiled programs do not depend on, so that calls share them."""
        return make_call(self.text, group="", metric_entropy=False, megatron=False, reduce_grad_hidden=False)

    @functools.cached_property
    def exchanged(self) -> TorchCall:
        """The call without what changes neither which numbers the ranks of a group exchange, nor when."""
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
_calls: weakref.WeakValueDictionary[str, TorchCall] = weakref.WeakValueDictionary()  # by their texts


def make_call(text: str = "{}", **fields: Any) -> TorchCall:
    """The call of a `TorchCall.text` with other fields, its own or those of `Call`.

    ``teacher_...``: those of the teacher's `Call`. A number that torch.compile takes as an input of the graph becomes a
    constant.
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
    own = {name: known.pop(name) for name in TORCH_FIELDS if name in known}
    teacher = {name.removeprefix("teacher_"): known.pop(name) for name in [*known] if name.startswith("teacher_")}
    if known.get("function") == "linear_kl":
        known["teacher"] = Call(**teacher)
    if "requested" in known:
        known["requested"] = tuple(known["requested"])
    return _calls.setdefault(text, TorchCall(jax=Call(**known), text=text, **own))
