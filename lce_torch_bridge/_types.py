"""The types of the bridge: its outputs, and what is static about a call.

Dimension letters: T tokens, H hidden size, V vocabulary entries of this rank's shard, P rows of a program (tokens and
their padding), N ranks of the tensor-parallel group, F statistics, O outputs, S numbers that the backward needs of each
token: its label, its temperature, its floor and its candidates if it has them, and the merged statistics. K candidates.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch

type Entropy = bool | Literal["metric"]
type OutOfVocab = Literal["zero", "megatron"]
type Wgrad = Literal["return", "main_grad"]
type Reduction = Literal["none", "sum", "mean"]

PLAIN = (torch.Tensor, torch.nn.Parameter)  # types of tensors that nothing else interprets
PER_CANDIDATE = "candidate_logprobs"  # the one result that is [T, K]; the others are [T]
DIFFERENTIABLE = ("logprobs", "entropy", "lse", "mean_logit", PER_CANDIDATE)  # results that may have a gradient
OF_STATS = ("max_logit", "min_logit", "sum_p_squared")  # what ``stats=True`` adds, without a gradient


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

    hidden: torch.Tensor  # [T, H]; [T, H + R] with an adapter (`TorchCall.rank`)
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
type Function = Literal["logprobs", "kl", "logits", "topk"]


class TorchCall(NamedTuple):
    """All else about a call of any function: numbers, flags and names, which a text holds as well (`operators`).

    A field that is in `SHARED` becomes an option of `lce_jax` under the same name.
    """

    group: str  # `tensors._tensor_parallel.name_of`
    vocab_size: int  # the true size of the whole vocabulary; 0 in a trace: every column of the weight
    logit_scale: float
    logit_softcap: float | None
    entropy: str  # "grad", "metric" (no gradient) or "none"
    stats: bool
    mean_logit: bool
    num_candidates: int  # 0: none are asked for; of "topk", the k that are
    has_floor: bool
    megatron: bool  # Megatron's value for labels out of vocabulary
    reduce_grad_hidden: bool  # only where there is a group
    cache_bytes: int
    gradient_threshold: float
    vocab_part_size: int | None
    implementation: str  # names joined by commas; empty for lce_jax's choice
    function: Function = "logprobs"
    direction: str = ""  # this and what follows: of "kl"
    beta: float | None = None
    teacher_logit_scale: float = 1.0
    teacher_logit_softcap: float | None = None
    has_temperature: bool = False  # for each token
    has_teacher_temperature: bool = False
    rank: int = 0  # R of an adapter in "logprobs", as `lce_jax` pads it; 0: there is none

    @property
    def num_temperatures(self) -> int:
        """Of each token of "kl"."""
        return self.has_temperature + self.has_teacher_temperature

    @property
    def implementations(self) -> tuple[str, ...] | None:
        """As `lce_jax` takes them."""
        return tuple(self.implementation.split(",")) if self.implementation else None

    @property
    def keeps_tiles(self) -> bool:
        """Whether the forward may keep something of its tiles for the backward."""
        return self.cache_bytes > 0 or self.gradient_threshold > 0

    @property
    def differentiable(self) -> tuple[str, ...]:
        """The results that have a gradient: of "logprobs", fields of `LogprobOutput`."""
        if self.function != "logprobs":
            return () if self.function == "topk" else (self.function,)
        there = {
            "entropy": self.entropy == "grad",
            "mean_logit": self.mean_logit,
            PER_CANDIDATE: self.num_candidates > 0,
        }
        return tuple(name for name in DIFFERENTIABLE if there.get(name, True))

    @property
    def fields(self) -> tuple[str, ...]:
        """The results that are there, the differentiable ones first."""
        if self.function != "logprobs":
            return TopK._fields if self.function == "topk" else (self.function,)
        metric = ("entropy",) if self.entropy == "metric" else ()
        support = ("support",) if self.stats and self.has_floor else ()
        return (*self.differentiable, *metric, *(OF_STATS if self.stats else ()), *support)

    @property
    def of_programs(self) -> TorchCall:
        """The call without what the compiled programs do not depend on, so that calls share them."""
        entropy = "none" if self.entropy == "none" else "grad"
        plain = self._replace(group="", entropy=entropy, megatron=False, reduce_grad_hidden=False)
        return plain._replace(vocab_size=int(self.vocab_size))  # a SymInt where torch.compile traces

    @property
    def of_exchange(self) -> TorchCall:
        """The call without what changes neither which numbers the ranks of a group exchange, nor when."""
        entropy = "none" if self.entropy == "none" else "grad"
        plain = self._replace(group="", vocab_size=0, entropy=entropy, megatron=False, cache_bytes=0)
        plain = plain._replace(logit_scale=1.0, logit_softcap=None, gradient_threshold=0.0, beta=None)
        plain = plain._replace(teacher_logit_scale=1.0, teacher_logit_softcap=None)
        return plain._replace(has_temperature=False, has_teacher_temperature=False)

    @property
    def options(self) -> dict[str, Any]:
        """The call as options of `lce_jax.linear_logprobs`."""
        given = {name: getattr(self, name) for name in SHARED}
        return given | {"entropy": self.entropy != "none", "implementation": self.implementations}


@functools.cache
def names_of(call: TorchCall) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The call's ``fields`` and ``differentiable``, made once for equal calls. Not where torch.compile traces."""
    return call.fields, call.differentiable


SHARED = (
    "vocab_size",
    "logit_scale",
    "logit_softcap",
    "stats",
    "cache_bytes",
    "gradient_threshold",
    "vocab_part_size",
)  # fields of `TorchCall` that are options of `lce_jax` as they are
