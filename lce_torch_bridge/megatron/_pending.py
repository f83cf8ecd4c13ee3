"""What an output layer returns in place of logits, until the model says what it wants of them.

Megatron computes a prediction's logits first, then rolls labels and mask, then takes the loss. So labels are not known
when the output layer is called, and its inputs are all that is kept until they are.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from lce_torch_bridge.megatron._output_layer import FusedForward, multiplier

if TYPE_CHECKING:
    from collections.abc import Mapping

    from lce_torch_bridge._types import LogprobOutput

_changing = threading.Lock()


@contextlib.contextmanager
def replaced(module: torch.nn.Module, **methods: Callable[..., Any]) -> Iterator[None]:
    """Inside, methods of a module are others, in all threads: autograd runs a checkpoint's forward in one of its own.

    Raises:
        RuntimeError: they have been replaced already.
    """
    with _changing:
        for name in methods:
            if name in vars(module):
                raise _already(module, name)
        for name, method in methods.items():
            vars(module)[name] = method if isinstance(method, OfThreads) else Replacement(method)
    try:
        yield
    finally:
        for name in methods:
            del vars(module)[name]


@contextlib.contextmanager
def replaced_here(module: torch.nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Inside, a module's ``forward`` is another one in this thread. Other threads may replace it too, or not.

    Raises:
        RuntimeError: it has been replaced already in this thread, or in all.
    """
    thread = threading.get_ident()
    with _changing:
        shared = vars(module).get("forward") or OfThreads(module.forward)
        if not isinstance(shared, OfThreads) or thread in shared.others:
            raise _already(module, "forward")
        shared.others[thread] = forward
        vars(module)["forward"] = shared
    try:
        yield
    finally:
        with _changing:
            del shared.others[thread]
            if not shared.others and not shared.stays:
                del vars(module)["forward"]


class Replacement:
    """A method in the place of another. A copy of the module would go on calling the original: it cannot be made."""

    def __init__(self, own: Callable[..., Any]) -> None:
        self.own = own

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.own(*args, **kwargs)

    def __reduce_ex__(self, _protocol: Any) -> NoReturn:
        raise TypeError(
            "inside of fused_output_layer, fused_losses and output_processor, methods of a model are replaced by some "
            "that call this very model: copy or pickle it outside of the block, or pass on its state_dict()"
        )


class OfThreads(Replacement):
    """A method that is another one in some threads. It ``stays`` on the module where a `replaced` put it there."""

    def __init__(self, own: Callable[..., Any], *, stays: bool = False) -> None:
        super().__init__(own)
        self.stays = stays
        self.others: dict[int, Callable[..., Any]] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.others.get(threading.get_ident(), self.own)(*args, **kwargs)


def _already(module: torch.nn.Module, name: str) -> RuntimeError:
    return RuntimeError(
        f"{type(module).__name__}.{name} has been replaced already, which would be bypassed. If an enclosing "
        "fused_output_layer, fused_losses or other code has replaced it, leave one of the two; if another thread is "
        "inside of fused_output_layer with this model, let threads take turns"
    )


ROUNDINGS = 4  # of float32, in ``logprob``, ``lse`` and their sum: a label's logit is the largest within them


@dataclasses.dataclass
class PendingLogits:
    """The inputs of an output layer. It answers what Megatron asks of logits, and raises for anything else."""

    layer: Any
    inputs: tuple[Any, ...]  # of ColumnParallelLinear.forward
    returned: Callable[[PendingLogits], LogprobOutput]  # what a model without labels returns
    scale: float = 1.0
    predicted: torch.Tensor | None = None  # [s, b], the label where its logit is the largest, else another id

    def loss(self, labels: torch.Tensor, options: Mapping[str, Any]) -> torch.Tensor:
        """``[b, s]``, as the model's ``compute_language_model_loss`` of the logits."""
        own: dict[str, Any] = {"entropy": False, "out_of_vocab": "megatron"}
        out, _bias = FusedForward(self.layer, labels, self.scale, own | dict(options))(*self.inputs)
        if out.max_logit is not None:
            self.predicted = self._predicted(labels.t(), out.logprobs, out.lse, out.max_logit)
        return -out.logprobs.transpose(0, 1).contiguous()

    def _predicted(
        self, labels: torch.Tensor, logprobs: torch.Tensor, lse: torch.Tensor, largest: torch.Tensor
    ) -> torch.Tensor:
        """Megatron counts where the largest logit is the label's, and asks for its place: another's is not needed."""
        rounding = ROUNDINGS * torch.finfo(torch.float32).eps * torch.maximum(lse.abs(), largest.abs())
        hit = (logprobs + lse - largest).abs() <= rounding
        columns = self.size(-1) * self.layer.tp_group.size()
        return labels.where(hit & (labels >= 0) & (labels < columns), ~labels)

    def transpose(self, _first: int, _second: int) -> PendingLogits:
        """The model's last step, if it has no labels, is ``transpose(0, 1).contiguous()``."""
        return self

    def contiguous(self) -> LogprobOutput:
        """What is returned in place of logits."""
        return self.returned(self)

    def size(self, _dimension: int) -> int:
        """How many columns a rank has, of which Megatron makes global ids."""
        weight = self.layer.weight if self.inputs[1] is None else self.inputs[1]
        return int(weight.shape[0])

    def max(self, dim: int) -> tuple[torch.Tensor, torch.Tensor]:  # noqa: ARG002 Megatron names it
        """The ranks' largest logits and their columns: those of rank 0 are taken, with a global id for a column."""
        found = self._asked("max")
        return torch.full_like(found, -self.layer.tp_group.rank(), dtype=torch.float32), found

    @classmethod
    def __torch_function__(cls, function: Any, _types: Any, given: Any = (), _options: Any = None) -> torch.Tensor:
        """``torch.argmax`` alone, after the loss was taken with statistics."""
        if function is not torch.argmax:
            raise _unknown(f"{function.__name__} of")
        return given[0]._asked("argmax")

    def _asked(self, name: str) -> torch.Tensor:
        if self.predicted is None:
            raise _unknown(f"{name}, before a loss, of")
        return self.predicted

    def __getattr__(self, name: str) -> Any:
        """What there is none of."""
        raise _unknown(f".{name} of")


def _unknown(asked: str) -> AttributeError:
    return AttributeError(
        f"{asked} logits that are not stored: this megatron-core does more with them than the op can answer; call the "
        "model outside of fused_losses and fused_output_layer"
    )


@contextlib.contextmanager
def pending_logits(
    model: Any, returned: Callable[[PendingLogits], LogprobOutput], options: Mapping[str, Any], *, processors: bool
) -> Iterator[None]:
    """Inside, a model's output layer returns `PendingLogits`, and its losses are the op's.

    Args:
        model: the owner of the output layer.
        returned: what a call without labels returns, from its pending logits.
        options: of `linear_logprobs`, for the losses.
        processors: whether an output processor may replace the layer's forward inside.
    """
    layer, loss = model.output_layer, model.compute_language_model_loss
    scale = getattr(model, "_scale_logits", unscaled)
    by = multiplier(scale)

    def forward(
        input_: torch.Tensor, weight: torch.Tensor | None = None, runtime_gather_output: bool | None = None
    ) -> tuple[PendingLogits, torch.Tensor | None]:
        bias = layer.bias if layer.skip_bias_add else None
        return PendingLogits(layer, (input_, weight, runtime_gather_output), returned), bias

    def scaled(logits: Any) -> Any:
        return dataclasses.replace(logits, scale=by) if isinstance(logits, PendingLogits) else scale(logits)

    def loss_of(labels: torch.Tensor, logits: Any) -> torch.Tensor:
        if not isinstance(logits, PendingLogits):
            return loss(labels, logits)
        counted = model.training and bool(getattr(model.config, "mtp_num_layers", None))
        return logits.loss(labels, {**options, "stats": counted})

    with (
        replaced(layer, forward=OfThreads(forward, stays=True) if processors else forward),
        replaced(model, _scale_logits=scaled, compute_language_model_loss=loss_of),
    ):
        yield


def unscaled(logits: torch.Tensor) -> torch.Tensor:
    """``_scale_logits`` of models before megatron-core 0.17."""
    return logits
