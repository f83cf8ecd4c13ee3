"""The handle of `defer_logits`: what was served, what was computed after all, and where in the code."""

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
DEFERRAL, BEFORE = "_lce_deferral", "_lce_forward_before"  # attributes of a module
REPLICATE = "_replicate_for_data_parallel"  # torch's own


class Deferral:
    """What `defer_logits` returns: heads that defer their logits, until `undo` or the end of a ``with``.

    A deep copy of a model has the same one. In a graph of ``torch.compile`` nothing is counted.

    Attributes:
        served: how many results were computed without logits, in this process.
        stored: how many times logits were computed after all.
        places: for what, and where in the code; and why a head computes its logits by itself.
        strict: whether that raises.

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
        self.of_model = False  # whether it knows which calls have labels
        self.with_labels = 0  # calls of the model that have labels, and are not over
        self._modules: list[Any] = []
        self._forwards: dict[int, Any] = {}  # ours, by the module's id

    def undo(self) -> None:
        """The heads compute their logits again. Nothing where they do already.

        Raises:
            RuntimeError: another forward has been put in the place of ours.
        """
        for module in self._modules:
            if vars(module).get("forward") != self._forwards[id(module)]:
                raise RuntimeError(f"forward of {type(module).__name__} has been replaced since: undo that first")
        while self._modules:
            attributes = vars(self._modules.pop())
            before = attributes.pop(BEFORE, None)
            del attributes["forward"], attributes[DEFERRAL], attributes[REPLICATE]
            if before is not None:
                attributes["forward"] = before

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.undo()

    def __deepcopy__(self, memo: Any) -> Self:
        return self

    def __repr__(self) -> str:
        return f"Deferral(served={self.served}, stored={self.stored}, places={self.places})"

    def put(self, module: torch.nn.Module, forward: Any) -> None:
        """Puts ``forward`` in the place of a module's."""
        attributes = vars(module)
        if "forward" in attributes:
            attributes[BEFORE] = attributes["forward"]
        attributes[DEFERRAL], attributes["forward"] = self, types.MethodType(forward, module)
        attributes[REPLICATE] = types.MethodType(_replicate_for_data_parallel, module)
        self._modules.append(module)
        self._forwards[id(module)] = attributes["forward"]

    def wants(self, *operands: Any) -> bool:
        """Whether logits are deferred: where a gradient is wanted, or the model was given labels, or always."""
        hidden, weight, bias, lora = operands
        is_recorded = torch.is_grad_enabled()
        if lora is not None and is_recorded and weight.requires_grad:
            return False  # an adapter here is one of a frozen weight
        if self.with_labels or self.always:
            return True
        if not is_recorded:
            return False
        others = (bias, *(lora or ())[:2])
        return hidden.requires_grad or weight.requires_grad or _device.is_differentiated(*others)

    def say(self, reason: str) -> None:
        """Logs once why a head computes its logits."""
        if reason not in self.places:
            self.places.append(reason)
            _logger.warning("the head computes its logits: %s", reason)

    def note(self, shape: torch.Size, dtype: torch.dtype, needed_for: str) -> None:
        """Counts logits that are about to be computed, and logs the first of each place.

        Raises:
            RuntimeError: the deferral is strict.
        """
        place = f"{needed_for or 'their values'} at {_place()}"
        text = f"logits of {list(shape)} ({scalars.format_bytes(shape.numel() * dtype.itemsize)})"
        if self.strict:
            raise RuntimeError(
                f"{text} would be computed for {place}, and these are deferred with strict=True. Without logits there "
                "are cross entropy, log_softmax with gather, logsumexp, entropy, argmax and topk: write the loss with "
                "these, or leave strict out"
            )
        self.stored += 1
        if place not in self.places:
            self.places.append(place)
            _logger.warning("%s are computed for %s", text, place)


def _replicate_for_data_parallel(module: Any) -> Any:
    """A shallow copy as DataParallel makes it, whose forward is not that of the module itself."""
    replica = getattr(type(module), REPLICATE)(module)
    attributes = vars(replica)
    for name, method in attributes.items():
        if getattr(method, "__self__", None) is module:
            attributes[name] = types.MethodType(method.__func__, replica)
    return replica


def _place() -> str:
    """File and line of the innermost frame that is neither torch's nor this package's."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").split(".")[0] in _INSIDE:
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"
