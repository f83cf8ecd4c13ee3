"""The types of the bridge: its outputs, and what is static about a call.

Dimension letters: T tokens, H hidden size, V vocabulary entries of this rank's shard, P rows of a program (tokens and
their padding), N ranks of the tensor-parallel group, F statistics, O outputs, S numbers that the backward needs of each
token: its label, its temperature if it has one, and the merged statistics.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch

type Entropy = Literal["grad", "metric", "none"]
type OutOfVocab = Literal["zero", "megatron"]
type Wgrad = Literal["return", "main_grad"]
type Reduction = Literal["none", "sum", "mean"]


class LogprobOutput(NamedTuple):
    """Per-token results: float32 tensors of ``labels.shape``, or None. Tokens that are not kept are 0.

    ``logprobs``, ``entropy`` and ``lse`` are differentiable; ``max_logit`` and ``min_logit`` are not. Where only
    tensors may pass, as out of a stage of ``torch.distributed.pipelining``, return ``out[:3]``, or the fields you use.

    Attributes:
        logprobs: ln p(label), nats. What a label outside the vocabulary has is ``out_of_vocab``'s to say.
        entropy: entropy of the token's distribution, nats. None with ``entropy="none"``.
        lse: ln Σ exp(logits), nats.
        max_logit: largest logit over the true vocabulary. None without ``stats=True``.
        min_logit: smallest logit over the true vocabulary. None without ``stats=True``.
    """

    logprobs: torch.Tensor
    entropy: torch.Tensor | None
    lse: torch.Tensor
    max_logit: torch.Tensor | None = None
    min_logit: torch.Tensor | None = None


class Operands(NamedTuple):
    """The tensors of a call, flattened."""

    hidden: torch.Tensor  # [T, H]
    weight: torch.Tensor  # [V, H]
    labels: torch.Tensor  # [T] global id; outside [0, vocab_size): out of vocabulary
    temperature: torch.Tensor | None  # [T] float32; None: 1

    @property
    def numbers(self) -> int:
        """How many numbers each token comes with."""
        return 1 if self.temperature is None else 2


class Call(NamedTuple):
    """All else about a call, of types that an operator's schema knows: the trailing arguments of both operators."""

    group: str  # `tensor_parallel.name_of`
    vocab_size: int  # the true size of the whole vocabulary
    logit_scale: float
    logit_softcap: float | None
    entropy: str  # an `Entropy`
    stats: bool
    megatron: bool  # its value for labels out of vocabulary
    reduce_grad_hidden: bool
    cache_bytes: int
    implementation: str  # names joined by commas; empty for lce_jax's choice

    @property
    def fields(self) -> tuple[str, ...]:
        """The fields of `LogprobOutput` that are there, the differentiable ones first."""
        entropy = ("entropy",) if self.entropy != "none" else ()
        extremes = ("max_logit", "min_logit") if self.stats else ()
        if self.entropy == "metric":
            return ("logprobs", "lse", *entropy, *extremes)
        return ("logprobs", *entropy, "lse", *extremes)

    @property
    def num_differentiable(self) -> int:
        """How many of them, from the first on, have a gradient."""
        return 3 if self.entropy == "grad" else 2


CALL_SCHEMA = (
    "str group, int vocab_size, float logit_scale, float? logit_softcap, str entropy, bool stats, bool megatron, "
    "bool reduce_grad_hidden, int cache_bytes, str implementation"
)
