"""AReaL under FSDP without logits: its engines compute log-probabilities of deferred logits.

AReaL's workers import an engine by the name of its class. So this module defines subclasses of AReaL's engines that
call `defer_logits` on their model, and every node needs this package.
"""

from __future__ import annotations

import functools
import importlib
from typing import Any

import torch

from lce_torch_bridge import _framework
from lce_torch_bridge.deferred._tensor import DeferredLogits

__all__ = ["install"]

ENGINES = {"Actor": "FSDPPPOActor", "LanguageModel": "FSDPLMEngine", "DPO": "FSDPDPOEngine"}
_installed = _framework.Installed("areal", "1.0", "log-probabilities of the head come")


def install() -> _framework.Installed:
    """Makes AReaL's trainers, and the workers that they start, use these engines for the backend "fsdp".

    Call it in the script that starts the run, before the trainer is built. Whatever `defer_logits` does not support,
    such as tensor parallelism, works as before.

    Returns:
        The handle, which counts results in this process and has ``undo()``. A second call returns the same handle.

    Raises:
        NotImplementedError: AReaL's engines have other names.

    Example:
        >>> import lce_torch_bridge.areal
        >>> lce_torch_bridge.areal.install()  # doctest: +SKIP
    """
    engine = _installed.import_module("areal.engine")
    return _installed.replace_attributes(*((engine, theirs, _make_engine(ours)) for ours, theirs in ENGINES.items()))


def __getattr__(name: str) -> Any:
    """Returns an engine, a subclass of AReaL's."""
    if name not in ENGINES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return _make_engine(name)


@functools.cache
def _make_engine(name: str) -> type:
    base = getattr(importlib.import_module("areal.engine.fsdp_engine"), ENGINES[name])
    return type(name, (_DeferLogits, base), {"__module__": __name__})


class _DeferLogits:
    """A base class that precedes AReaL's engine in the bases of each engine here."""

    _compute_values: Any
    config: Any
    model: Any

    def _create_device_model(self) -> None:
        super()._create_device_model()  # type: ignore[misc] # the engine's
        if not self.config.is_critic:
            _installed.defer(self.model)

    def _get_vocab_min_max_logits(self, logits: torch.Tensor, ulysses_pad_size: int = 0) -> Any:
        """Returns the smallest and the largest logit from one pass. AReaL computes them one after the other."""
        if not isinstance(logits, DeferredLogits):
            return super()._get_vocab_min_max_logits(logits, ulysses_pad_size)  # type: ignore[misc]
        extremes = torch.aminmax(logits.detach(), dim=-1)
        return tuple(self._compute_values(each.float(), ulysses_pad_size) for each in extremes)
