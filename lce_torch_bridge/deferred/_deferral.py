"""`Deferral`, the handle of `defer_logits`: replaces forwards, counts results and logits, and logs computed logits."""

from __future__ import annotations

import logging
import sys
import types
from typing import Any, Self

import torch

from lce_jax.types import scalars
from lce_torch_bridge.tensors import _device

_logger = logging.getLogger("lce_torch_bridge")
_INSIDE = ("torch", "lce_torch_bridge")
DEFERRAL, PREVIOUS_FORWARD = "_lce_deferral", "_lce_forward_before"  # attributes of a module
REPLICATE = "_replicate_for_data_parallel"  # the name of torch's method


class Deferral:
    """The handle that `defer_logits` returns. Heads defer their logits until `undo` or the end of a ``with`` block.

    A deep copy of a model shares the handle. Nothing is counted in a graph of ``torch.compile``.

    Attributes:
        served: how many results were computed without logits, in this process.
        stored: how many times logits were computed because something needed their values.
        places: for each computation of logits, what needed them and the line of code; also why a head did not defer its
            logits.
        strict: whether an error is raised instead of computing logits.

    Example:
        >>> import torch
        >>> from lce_torch_bridge import defer_logits
        >>> head = torch.nn.Linear(8, 1000)
        >>> with defer_logits(head) as deferral:
        ...     largest = head(torch.ones(4, 8)).argmax(-1)
        >>> deferral
        Deferral(served=1, stored=0, places=[])
    """

    def __init__(self, strict: bool = False, always: bool = False) -> None:
        self.served = self.stored = 0
        self.places: list[str] = []
        self.strict, self.always = strict, always
        self.has_model = False  # whether a model's forward is replaced too, so that calls with labels are known
        self.labelled_calls = 0  # how many calls of the model with labels are running
        self._modules: list[Any] = []
        self._forwards: dict[int, Any] = {}  # the replacements, by the module's id

    def undo(self) -> None:
        """Restores the forwards, so that heads compute their logits again. Does nothing if they are already restored.

        Raises:
            RuntimeError: other code has replaced a forward since.
        """
        for module in self._modules:
            if vars(module).get("forward") != self._forwards[id(module)]:
                raise RuntimeError(f"forward of {type(module).__name__} has been replaced since: undo that first")
        while self._modules:
            attributes = vars(self._modules.pop())
            previous = attributes.pop(PREVIOUS_FORWARD, None)
            del attributes["forward"], attributes[DEFERRAL], attributes[REPLICATE]
            if previous is not None:
                attributes["forward"] = previous

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.undo()

    def __deepcopy__(self, memo: Any) -> Self:
        return self

    def __repr__(self) -> str:
        return f"Deferral(served={self.served}, stored={self.stored}, places={self.places})"

    def replace_forward(self, module: torch.nn.Module, forward: Any) -> None:
        """Replaces a module's forward with ``forward``, until `undo`."""
        attributes = vars(module)
        if "forward" in attributes:
            attributes[PREVIOUS_FORWARD] = attributes["forward"]
        attributes[DEFERRAL], attributes["forward"] = self, types.MethodType(forward, module)
        attributes[REPLICATE] = types.MethodType(_replicate_for_data_parallel, module)
        self._modules.append(module)
        self._forwards[id(module)] = attributes["forward"]

    def should_defer(self, *operands: Any) -> bool:
        """Whether a head defers its logits: a gradient is needed, the model was called with labels, or ``always``."""
        hidden, weight, bias, lora = operands
        is_recorded = torch.is_grad_enabled()
        if lora is not None and is_recorded and weight.requires_grad:
            return False  # because adapters are supported only on frozen weights
        if self.labelled_calls or self.always:
            return True
        if not is_recorded:
            return False
        optional = (bias, *(lora or ())[:2])
        return hidden.requires_grad or weight.requires_grad or _device.is_differentiated(*optional)

    def log_reason(self, reason: str) -> None:
        """Logs why a head computes its logits, once per reason."""
        if reason not in self.places:
            self.places.append(reason)
            _logger.warning("the head computes its logits: %s", reason)

    def record_logits(self, shape: torch.Size, dtype: torch.dtype, needed_for: str) -> None:
        """Counts logits that are about to be computed. Logs the line of code that needs them, once per line.

        Raises:
            RuntimeError: the deferral is strict.
        """
        place = f"{needed_for or 'their values'} at {_find_caller()}"
        text = f"logits of {list(shape)} ({scalars.format_bytes(shape.numel() * dtype.itemsize)})"
        if self.strict:
            raise RuntimeError(
                f"{text} would be computed for {place}, but they are deferred with strict=True. Available without "
                "logits are cross entropy, log_softmax with gather, logsumexp, entropy, argmax and topk: write the "
                "loss with these, or leave strict out"
            )
        self.stored += 1
        if place not in self.places:
            self.places.append(place)
            _logger.warning("%s are computed for %s", text, place)


def _replicate_for_data_parallel(module: Any) -> Any:
    """Makes DataParallel's shallow copy of a module, and binds replaced methods to the copy."""
    replica = getattr(type(module), REPLICATE)(module)
    attributes = vars(replica)
    for name, method in attributes.items():
        if getattr(method, "__self__", None) is module:
            attributes[name] = types.MethodType(method.__func__, replica)
    return replica


def _find_caller() -> str:
    """Returns the file and line of the innermost frame outside of torch and this package."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").split(".")[0] in _INSIDE:
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"
