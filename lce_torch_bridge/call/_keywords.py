"""What public functions take by keyword beside the arguments that their signatures name."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypedDict

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

    from lce_torch_bridge._types import Entropy, OutOfVocab, Wgrad, WithEntropy


class CommonOptions(TypedDict, total=False):
    """Of every function; `linear_logprobs` says what each means."""

    temperature: float | torch.Tensor
    logit_softcap: float | None
    vocab_size: int | None
    gradient_threshold: float
    implementation: str | tuple[str, ...] | None


class HeadOptions(CommonOptions, total=False):
    """Of functions that no model has told about its head."""

    bias: torch.Tensor | None
    tp_group: dist.ProcessGroup | None
    logit_scale: float
    reduce_grad_hidden: bool


class CrossEntropyOptions(HeadOptions, total=False):
    """Of `linear_cross_entropy`."""

    wgrad: Wgrad
    cache_bytes: int
    vocab_part_size: int | None
    logit_floor: float | torch.Tensor | None


class EntropyOptions(CrossEntropyOptions, total=False):
    """Of `linear_entropy`."""

    where: torch.Tensor | None


class LogprobOptions(EntropyOptions, total=False):
    """Of `explain`."""

    entropy: Entropy
    stats: bool
    mean_logit: bool
    candidates: torch.Tensor | None
    ignore_index: int | None
    out_of_vocab: OutOfVocab


class LossOptions(HeadOptions, total=False):
    """Of `linear_loss`, beside what its signature names."""

    entropy: Entropy
    stats: bool
    out_of_vocab: OutOfVocab


class ModelOptions(CommonOptions, total=False):
    """Of `lce_torch_bridge.megatron.fused_output_layer`."""

    entropy: WithEntropy
    candidates: torch.Tensor | None
    where: torch.Tensor | None
    ignore_index: int | None
    out_of_vocab: OutOfVocab
    wgrad: Wgrad
    cache_bytes: int
    vocab_part_size: int | None
    logit_floor: float | torch.Tensor | None


class LossesOptions(TypedDict, total=False):
    """Of `lce_torch_bridge.megatron.fused_losses`."""

    cache_bytes: int
    gradient_threshold: float
    vocab_part_size: int | None
    implementation: str | tuple[str, ...] | None
