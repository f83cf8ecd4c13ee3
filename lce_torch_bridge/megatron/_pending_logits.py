"""`PendingLogits`, which an output layer returns instead of logits until the labels are known.

Megatron computes a prediction's logits first, then rolls labels and mask, then computes the loss. So the labels are not
known when the output layer is called, and `PendingLogits` saves the layer's inputs until the loss is computed.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch

from lce_torch_bridge.megatron._output_layer import FusedForward, read_multiplier
from lce_torch_bridge.megatron._patching import PerThreadMethod, replace_methods

if TYPE_CHECKING:
    from collections.abc import Mapping

    from lce_torch_bridge._types import LogprobOutput

ROUNDINGS = 4  # a bound on the float32 roundings in ``logprob + lse``, which is compared with the largest logit


@dataclasses.dataclass
class PendingLogits:
    """The saved inputs of an output layer, in place of its logits. Supports only what Megatron does with logits."""

    layer: Any
    inputs: tuple[Any, ...]  # the arguments of ColumnParallelLinear.forward
    finish: Callable[[PendingLogits], LogprobOutput]  # computes what the model returns if it is called without labels
    scale: float = 1.0
    predicted: torch.Tensor | None = None  # [s, b], the label where the label's logit is the largest, else another id

    def loss(self, labels: torch.Tensor, options: Mapping[str, Any]) -> torch.Tensor:
        """Returns the loss ``[b, s]``, as the model's ``compute_language_model_loss`` does."""
        defaults: dict[str, Any] = {"entropy": False, "out_of_vocab": "megatron"}
        out, _bias = FusedForward(self.layer, labels, self.scale, defaults | dict(options))(*self.inputs)
        if out.max_logit is not None:
            self.predicted = self._predict_labels(labels.t(), out.logprobs, out.lse, out.max_logit)
        return -out.logprobs.transpose(0, 1).contiguous()

    def _predict_labels(
        self, labels: torch.Tensor, logprobs: torch.Tensor, lse: torch.Tensor, largest: torch.Tensor
    ) -> torch.Tensor:
        """Returns the label where its logit is the largest, and another id elsewhere. Megatron counts equal ids."""
        rounding = ROUNDINGS * torch.finfo(torch.float32).eps * torch.maximum(lse.abs(), largest.abs())
        hit = (logprobs + lse - largest).abs() <= rounding
        columns = self.size(-1) * self.layer.tp_group.size()
        return labels.where(hit & (labels >= 0) & (labels < columns), ~labels)

    def transpose(self, _first: int, _second: int) -> PendingLogits:
        """Returns this object. A model that is called without labels ends with ``transpose(0, 1).contiguous()``."""
        return self

    def contiguous(self) -> LogprobOutput:
        """Returns the results that replace logits."""
        return self.finish(self)

    def size(self, _dimension: int) -> int:
        """Returns the number of this rank's columns, from which Megatron computes global ids."""
        weight = self.layer.weight if self.inputs[1] is None else self.inputs[1]
        return int(weight.shape[0])

    def max(self, dim: int) -> tuple[torch.Tensor, torch.Tensor]:  # noqa: ARG002 Megatron names it
        """Returns stand-ins for this rank's largest logits and their ids. Megatron then chooses rank 0's ids."""
        predicted = self._get_predicted("max")
        return torch.full_like(predicted, -self.layer.tp_group.rank(), dtype=torch.float32), predicted

    @classmethod
    def __torch_function__(cls, function: Any, _types: Any, args: Any = (), _kwargs: Any = None) -> torch.Tensor:
        """Supports only ``torch.argmax``, after a loss with statistics."""
        if function is not torch.argmax:
            raise _make_unknown_error(f"{function.__name__} of")
        return args[0]._get_predicted("argmax")

    def _get_predicted(self, name: str) -> torch.Tensor:
        if self.predicted is None:
            raise _make_unknown_error(f"{name}, before a loss, of")
        return self.predicted

    def __getattr__(self, name: str) -> Any:
        """Raises for every attribute that this class does not have."""
        raise _make_unknown_error(f".{name} of")


def _make_unknown_error(operation: str) -> AttributeError:
    return AttributeError(
        f"{operation} logits that are not stored: this megatron-core uses them in an unsupported way; call the model "
        "outside of fused_losses and fused_output_layer"
    )


@contextlib.contextmanager
def pending_logits(
    model: Any, finish: Callable[[PendingLogits], LogprobOutput], options: Mapping[str, Any], *, processors: bool
) -> Iterator[None]:
    """Makes a model's output layer return `PendingLogits`, and the model compute its losses with `linear_logprobs`.

    Args:
        model: the owner of the output layer.
        finish: computes what the model returns if it is called without labels, from the pending logits.
        options: options of `linear_logprobs`, for the losses.
        processors: whether an output processor may replace the layer's forward inside the context.
    """
    layer, loss = model.output_layer, model.compute_language_model_loss
    scale = getattr(model, "_scale_logits", unscaled)
    factor = read_multiplier(scale)

    def forward(
        input_: torch.Tensor, weight: torch.Tensor | None = None, runtime_gather_output: bool | None = None
    ) -> tuple[PendingLogits, torch.Tensor | None]:
        bias = layer.bias if layer.skip_bias_add else None
        return PendingLogits(layer, (input_, weight, runtime_gather_output), finish), bias

    def scale_pending(logits: Any) -> Any:
        return dataclasses.replace(logits, scale=factor) if isinstance(logits, PendingLogits) else scale(logits)

    def compute_loss(labels: torch.Tensor, logits: Any) -> torch.Tensor:
        if not isinstance(logits, PendingLogits):
            return loss(labels, logits)
        with_stats = model.training and bool(getattr(model.config, "mtp_num_layers", None))
        return logits.loss(labels, {**options, "stats": with_stats})

    with (
        replace_methods(layer, forward=PerThreadMethod(forward, persistent=True) if processors else forward),
        replace_methods(model, _scale_logits=scale_pending, compute_language_model_loss=compute_loss),
    ):
        yield


def unscaled(logits: torch.Tensor) -> torch.Tensor:
    """Returns logits unchanged. Stands for ``_scale_logits``, which models before megatron-core 0.17 do not have."""
    return logits
