"""The replacement of ``ColumnParallelLinear.forward``: `linear_logprobs` with the options that the layer sets."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import torch
from megatron.core.tensor_parallel import ColumnParallelLinear, gather_from_sequence_parallel_region

from lce_torch_bridge.call import _checks
from lce_torch_bridge.ops._logprobs import linear_logprobs

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from lce_torch_bridge._types import LogprobOutput

# Options that are not the caller's to set.
OF_THE_LAYER = ("tp_group", "bias", "logit_scale", "reduce_grad_hidden", "lora")


@dataclasses.dataclass
class FusedForward:
    """A ``forward`` for an output layer, which returns a `LogprobOutput` of ``[s, b]`` instead of logits.

    Raises:
        NotImplementedError: the op cannot serve the layer (when made) or the call (when called).
        ValueError, TypeError: options do not fit, also at both times.
    """

    layer: Any
    labels: torch.Tensor  # [b, s]
    logit_scale: float
    options: Mapping[str, Any]  # of linear_logprobs, as the caller gave them
    mtp: bool = False  # whether multi-token prediction uses the weight as well

    def __post_init__(self) -> None:
        """Refuses what can be seen before the call."""
        reason = refusal(self.layer)
        if reason is not None:
            raise NotImplementedError(reason)
        taken = [name for name in OF_THE_LAYER if name in self.options]
        if taken:
            raise ValueError(f"{', '.join(taken)}: the model's to say, not the caller's; leave out")
        self.per_token = sequence_first(self.labels, self.options)

    def __call__(
        self, input_: torch.Tensor, weight: torch.Tensor | None = None, runtime_gather_output: bool | None = None
    ) -> tuple[LogprobOutput, torch.Tensor | None]:
        """Like `ColumnParallelLinear.forward`: the output, and the bias if the caller is to add it."""
        layer = self.layer
        if layer.gather_output if runtime_gather_output is None else runtime_gather_output:
            raise NotImplementedError(
                "gathered logits were asked for (generation, runtime_gather_output=True or parallel_output=False), but "
                "none are computed here, and log-probability and entropy are whole on every rank anyway: call the "
                "model with runtime_gather_output=False, and generate without this op"
            )
        weight = layer.weight if weight is None else weight
        told = {
            "tp_group": layer.tp_group,
            "bias": None if layer.skip_bias_add else layer.bias,
            "logit_scale": self.logit_scale,
            "reduce_grad_hidden": layer.allreduce_dgrad,
            "wgrad": self._wgrad(weight),
        }
        out: Any = linear_logprobs(self._hidden(input_), weight, **dict(self.options) | self.per_token | told)
        return out, layer.bias if layer.skip_bias_add else None

    def _hidden(self, input_: torch.Tensor) -> torch.Tensor:
        """``[s, b, h]``, whole. The gather's backward sums dhidden over the ranks, so nothing else may sum it."""
        hidden = input_
        if self.layer.sequence_parallel:
            hidden = gather_from_sequence_parallel_region(input_, group=self.layer.tp_group)
        if hidden.shape[:-1] != self.labels.t().shape:
            raise ValueError(
                f"labels {tuple(self.labels.shape)} must be [b, s] for hidden states [s, b, h] = "
                f"{tuple(hidden.shape)}; with context parallelism, s is this rank's part of the sequence"
            )
        return hidden

    def _wgrad(self, weight: torch.Tensor) -> str:
        """Where dweight goes: by default where the layer itself would put it."""
        if hasattr(weight, "__fsdp_param__"):
            raise NotImplementedError(
                "Megatron-FSDP gathers and frees this weight around the layer's own forward and backward, which do not "
                "run here: use DistributedDataParallel, with use_distributed_optimizer to shard the optimizer's state"
            )
        # As in Megatron: before DistributedDataParallel there is no main_grad.
        fused = self.layer.gradient_accumulation_fusion and hasattr(weight, "main_grad")
        own = "main_grad" if fused else "return"
        wgrad = self.options.get("wgrad", own)
        if self.mtp and wgrad != own:
            raise ValueError(
                f"wgrad={wgrad!r}: multi-token prediction uses this weight too, with wgrad={own!r}, and Megatron would "
                "drop one of the two gradients; leave wgrad out"
            )
        return wgrad


def refusal(layer: Any) -> str | None:
    """Why the op cannot stand in for this output layer, and what to do about it; None if it can."""
    if getattr(type(layer), "forward", None) is not ColumnParallelLinear.forward:
        return (
            f"the output layer's class is {type(layer).__name__}, whose forward is not ColumnParallelLinear's and may "
            "compute something other than hidden @ weight.T: turn off what put it there (fp8_output_proj, an adapter "
            "such as LoRA on output_layer, a value head)"
        )
    if layer.config.defer_embedding_wgrad_compute:
        return (
            "defer_embedding_wgrad_compute has Megatron compute dweight later, from dlogits that are not stored here: "
            "turn it off"
        )
    if getattr(layer, "gtp_remat_size", 1) > 1:
        return "the output weight is split over gtp_remat ranks as well: exempt the output layer, or turn it off"
    return None


def sequence_first(labels: torch.Tensor, options: Mapping[str, Any]) -> dict[str, Any]:
    """The per-token options, checked as the caller gave them, then brought from ``[b, s]`` to ``[s, b]``."""
    _checks.tensor("labels", labels)
    if labels.ndim != 2:
        raise ValueError(f"labels {tuple(labels.shape)} must be [b, s]")
    where, temperature = options.get("where"), options.get("temperature", 1.0)
    if where is not None:
        _checks.where(where, labels, labels)
    _checks.temperature(temperature, labels, labels)
    candidates = options.get("candidates")
    if candidates is not None:
        _checks.candidates(candidates, labels, labels)
    floor = options.get("logit_floor")
    if floor is not None:
        _checks.logit_floor(floor, labels, labels)
    turned = {"labels": labels.t()}
    if candidates is not None:
        turned["candidates"] = candidates.transpose(0, 1)
    if isinstance(temperature, torch.Tensor):
        turned["temperature"] = temperature.expand(labels.shape).t()
    if isinstance(floor, torch.Tensor):
        turned["logit_floor"] = floor.expand(labels.shape).t()
    if where is not None and where.dtype == torch.bool:
        turned["where"] = where.t()
    elif where is not None:
        place = torch.arange(labels.numel(), device=labels.device).view(labels.shape[::-1]).t().reshape(-1)
        turned["where"] = place[where]
    return turned


def multiplier(scale_logits: Callable[[torch.Tensor], torch.Tensor]) -> float:
    """The number by which the model multiplies logits, found by scaling two numbers."""
    one, many = scale_logits(torch.tensor([1.0, 1024.0], dtype=torch.float64, device="cpu")).tolist()
    if many != 1024 * one:
        raise NotImplementedError(
            f"the model's _scale_logits does more than multiply: 1 becomes {one:g}, and 1024 becomes {many:g}; a soft "
            "cap goes into logit_softcap, anything else needs the logits"
        )
    return one
