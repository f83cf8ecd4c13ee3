"""`PendingLogits`, which an output layer returns instead of logits, and the temporary replacement of methods.

Megatron computes a prediction's logits first, then rolls labels and mask, then computes the loss. So labels are not
known when the output layer is called. `PendingLogits` saves the layer's inputs until they are.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from lce_torch_bridge.megatron._output_layer import FusedForward, read_multiplier

if TYPE_CHECKING:
    from collections.abc import Mapping

    from lce_torch_bridge._types import LogprobOutput

_lock = threading.Lock()


@contextlib.contextmanager
def replace_methods(module: torch.nn.Module, **methods: Callable[..., Any]) -> Iterator[None]:
    """Replaces methods of a module in all threads, because autograd runs a checkpoint's forward in a thread of its own.

    Raises:
        RuntimeError: a method is replaced already.
    """
    with _lock:
        for name in methods:
            if name in vars(module):
                raise _make_replaced_error(module, name)
        for name, method in methods.items():
            vars(module)[name] = method if isinstance(method, PerThreadMethod) else Replacement(method)
    try:
        yield
    finally:
        for name in methods:
            del vars(module)[name]


@contextlib.contextmanager
def replace_forward_in_thread(module: torch.nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Replaces a module's ``forward`` in this thread only. Other threads may replace it with their own.

    Raises:
        RuntimeError: it is replaced already, in this thread or in all threads.
    """
    thread = threading.get_ident()
    with _lock:
        shared = vars(module).get("forward") or PerThreadMethod(module.forward)
        if not isinstance(shared, PerThreadMethod) or thread in shared.overrides:
            raise _make_replaced_error(module, "forward")
        shared.overrides[thread] = forward
        vars(module)["forward"] = shared
    try:
        yield
    finally:
        with _lock:
            del shared.overrides[thread]
            if not shared.overrides and not shared.persistent:
                del vars(module)["forward"]


class Replacement:
    """A function that replaces a method. It cannot be copied: in a copied module it would still call the original."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)

    def __reduce_ex__(self, _protocol: Any) -> NoReturn:
        raise TypeError(
            "inside fused_output_layer, fused_losses and output_processor, methods of a model are replaced by "
            "functions that call this model and not its copy: copy or pickle it outside of the block, or pass on its "
            "state_dict()"
        )


class PerThreadMethod(Replacement):
    """A method with overrides in some threads. ``persistent`` keeps it on the module when no override is left."""

    def __init__(self, function: Callable[..., Any], *, persistent: bool = False) -> None:
        super().__init__(function)
        self.persistent = persistent
        self.overrides: dict[int, Callable[..., Any]] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.overrides.get(threading.get_ident(), self.function)(*args, **kwargs)


def _make_replaced_error(module: torch.nn.Module, name: str) -> RuntimeError:
    return RuntimeError(
        f"{type(module).__name__}.{name} has been replaced already, and that replacement would not be called. If an "
        "enclosing fused_output_layer, fused_losses or other code has replaced it, remove one of the two; if another "
        "thread is inside fused_output_layer with this model, let threads take turns"
    )


ROUNDINGS = 4  # of float32, in ``logprob``, ``lse`` and their sum, before a logit is compared with the largest


@dataclasses.dataclass
class PendingLogits:
    """The inputs of an output layer, in place of logits. Supports only what Megatron does with logits."""

    layer: Any
    inputs: tuple[Any, ...]  # of ColumnParallelLinear.forward
    finish: Callable[[PendingLogits], LogprobOutput]  # computes what a model without labels returns
    scale: float = 1.0
    predicted: torch.Tensor | None = None  # [s, b], the label where its logit is the largest, else another id

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
        """Returns ids that equal the label where its logit is the largest, because Megatron counts only that."""
        rounding = ROUNDINGS * torch.finfo(torch.float32).eps * torch.maximum(lse.abs(), largest.abs())
        hit = (logprobs + lse - largest).abs() <= rounding
        columns = self.size(-1) * self.layer.tp_group.size()
        return labels.where(hit & (labels >= 0) & (labels < columns), ~labels)

    def transpose(self, _first: int, _second: int) -> PendingLogits:
        """Returns itself: a model without labels ends with ``transpose(0, 1).contiguous()``."""
        return self

    def contiguous(self) -> LogprobOutput:
        """Returns the results that replace logits."""
        return self.finish(self)

    def size(self, _dimension: int) -> int:
        """Returns the number of this rank's columns, from which Megatron computes global ids."""
        weight = self.layer.weight if self.inputs[1] is None else self.inputs[1]
        return int(weight.shape[0])

    def max(self, dim: int) -> tuple[torch.Tensor, torch.Tensor]:  # noqa: ARG002 Megatron names it
        """Returns stand-ins for this rank's largest logits and columns: rank 0 has the largest ones, and global ids."""
        predicted = self._get_predicted("max")
        return torch.full_like(predicted, -self.layer.tp_group.rank(), dtype=torch.float32), predicted

    @classmethod
    def __torch_function__(cls, function: Any, _types: Any, args: Any = (), _kwargs: Any = None) -> torch.Tensor:
        """Supports ``torch.argmax`` only, after a loss with statistics."""
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
    """Makes a model's output layer return `PendingLogits`, and compute its losses with `linear_logprobs`.

    Args:
        model: the owner of the output layer.
        finish: computes what a call without labels returns, from its pending logits.
        options: of `linear_logprobs`, for the losses.
        processors: whether an output processor may replace the layer's forward inside.
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
    """Returns logits unchanged: ``_scale_logits`` for models before megatron-core 0.17, which do not have it."""
    return logits
