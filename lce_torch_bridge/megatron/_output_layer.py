"""`FusedForward`, which replaces ``ColumnParallelLinear.forward`` by `linear_logprobs` with the layer's options."""

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

# Options that a caller cannot set, because the layer and the model determine them.
LAYER_OPTIONS = ("tp_group", "bias", "logit_scale", "reduce_grad_hidden", "lora")


@dataclasses.dataclass
class FusedForward:
    """A ``forward`` for an output layer, which returns a `LogprobOutput` of ``[s, b]`` instead of logits.

    Raises:
        NotImplementedError: `linear_logprobs` does not support the layer (raised by the constructor) or the call
            (raised when called).
        ValueError, TypeError: options do not fit (raised by the constructor or when called).
    """

    layer: Any
    labels: torch.Tensor  # [b, s]
    logit_scale: float
    options: Mapping[str, Any]  # of linear_logprobs, as the user has passed them
    mtp: bool = False  # whether multi-token prediction also uses the weight

    def __post_init__(self) -> None:
        """Checks the layer and the options that do not depend on hidden states."""
        reason = find_refusal(self.layer)
        if reason is not None:
            raise NotImplementedError(reason)
        fixed = [name for name in LAYER_OPTIONS if name in self.options]
        if fixed:
            raise ValueError(f"{', '.join(fixed)}: set by the model, not by the caller; leave out")
        self.per_token = transpose_options(self.labels, self.options)

    def __call__(
        self, input_: torch.Tensor, weight: torch.Tensor | None = None, runtime_gather_output: bool | None = None
    ) -> tuple[LogprobOutput, torch.Tensor | None]:
        """Returns the results and, like `ColumnParallelLinear.forward`, the bias that the caller must add or None."""
        layer = self.layer
        if layer.gather_output if runtime_gather_output is None else runtime_gather_output:
            raise NotImplementedError(
                "gathered logits were asked for (generation, runtime_gather_output=True or parallel_output=False), but "
                "no logits are computed here, and every rank has all log-probabilities and entropies anyway: call the "
                "model with runtime_gather_output=False, and generate outside of this package's functions"
            )
        weight = layer.weight if weight is None else weight
        layer_options = {
            "tp_group": layer.tp_group,
            "bias": None if layer.skip_bias_add else layer.bias,
            "logit_scale": self.logit_scale,
            "reduce_grad_hidden": layer.allreduce_dgrad,
            "wgrad": self._choose_wgrad(weight),
        }
        out: Any = linear_logprobs(
            self._gather_hidden(input_), weight, **dict(self.options) | self.per_token | layer_options
        )
        return out, layer.bias if layer.skip_bias_add else None

    def _gather_hidden(self, input_: torch.Tensor) -> torch.Tensor:
        """Returns all hidden states ``[s, b, h]``. The backward of the gather sums dhidden over the ranks."""
        hidden = input_
        if self.layer.sequence_parallel:
            hidden = gather_from_sequence_parallel_region(input_, group=self.layer.tp_group)
        if hidden.shape[:-1] != self.labels.t().shape:
            raise ValueError(
                f"labels {tuple(self.labels.shape)} must be [b, s] for hidden states [s, b, h] = "
                f"{tuple(hidden.shape)}; with context parallelism, s is this rank's part of the sequence"
            )
        return hidden

    def _choose_wgrad(self, weight: torch.Tensor) -> str:
        """Returns the option ``wgrad``. By default, dweight goes where the layer itself would put it."""
        if hasattr(weight, "__fsdp_param__"):
            raise NotImplementedError(
                "Megatron-FSDP gathers and frees this weight around the layer's own forward and backward, which do not "
                "run here: use DistributedDataParallel, with use_distributed_optimizer to shard the optimizer's state"
            )
        # As in Megatron: without DistributedDataParallel there is no main_grad.
        fused = self.layer.gradient_accumulation_fusion and hasattr(weight, "main_grad")
        layer_wgrad = "main_grad" if fused else "return"
        wgrad = self.options.get("wgrad", layer_wgrad)
        if self.mtp and wgrad != layer_wgrad:
            raise ValueError(
                f"wgrad={wgrad!r}: multi-token prediction uses this weight too, with "
                f"wgrad={layer_wgrad!r}, and Megatron would drop one of the two gradients; leave wgrad out"
            )
        return wgrad


def find_refusal(layer: Any) -> str | None:
    """Returns why `linear_logprobs` cannot replace this output layer, and what to do instead; None if it can."""
    if getattr(type(layer), "forward", None) is not ColumnParallelLinear.forward:
        return (
            f"the output layer's class is {type(layer).__name__}, whose forward is not ColumnParallelLinear's and may "
            "compute something other than hidden @ weight.T: turn off what put it there (fp8_output_proj, an adapter "
            "such as LoRA on output_layer, a value head)"
        )
    if layer.config.defer_embedding_wgrad_compute:
        return (
            "defer_embedding_wgrad_compute makes Megatron compute dweight later, from dlogits, which are not stored: "
            "turn it off"
        )
    if getattr(layer, "gtp_remat_size", 1) > 1:
        return "the output weight is split over gtp_remat ranks as well: exempt the output layer, or turn it off"
    return None


def transpose_options(labels: torch.Tensor, options: Mapping[str, Any]) -> dict[str, Any]:
    """Checks labels and per-token options ``[b, s]``, and returns them as ``[s, b]``."""
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
    transposed = {"labels": labels.t()}
    if candidates is not None:
        transposed["candidates"] = candidates.transpose(0, 1)
    if isinstance(temperature, torch.Tensor):
        transposed["temperature"] = temperature.expand(labels.shape).t()
    if isinstance(floor, torch.Tensor):
        transposed["logit_floor"] = floor.expand(labels.shape).t()
    if where is not None and where.dtype == torch.bool:
        transposed["where"] = where.t()
    elif where is not None:
        transposed_rows = torch.arange(labels.numel(), device=labels.device).view(labels.shape[::-1]).t().reshape(-1)
        transposed["where"] = transposed_rows[where]
    return transposed


def read_multiplier(scale_logits: Callable[[torch.Tensor], torch.Tensor]) -> float:
    """Returns the factor by which the model multiplies logits, derived from its results for two numbers."""
    one, many = scale_logits(torch.tensor([1.0, 1024.0], dtype=torch.float64, device="cpu")).tolist()
    if many != 1024 * one:
        raise NotImplementedError(
            f"the model's _scale_logits does more than multiply: 1 becomes {one:g}, and 1024 becomes {many:g}; pass a "
            "soft cap as logit_softcap; anything else needs the logits"
        )
    return one
