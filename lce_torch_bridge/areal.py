"""AReaL under FSDP without stored logits: its engines compute log-probabilities from deferred logits.

AReaL's workers import an engine by its class name. So this module defines subclasses of AReaL's engines, which call
`defer_logits` on their model, and this package must be installed on every node.
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
    """Makes AReaL's trainers and their workers use this module's engines for the backend "fsdp".

    Call it in the script that starts the run, before the trainer is built. What `defer_logits` does not support, such
    as tensor parallelism, works as before.

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
    """Returns an engine by its name in `ENGINES`: a subclass of AReaL's engine."""
    if name not in ENGINES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return _make_engine(name)


@functools.cache
def _make_engine(name: str) -> type:
    base = getattr(importlib.import_module("areal.engine.fsdp_engine"), ENGINES[name])
    return type(name, (_DeferLogits, base), {"__module__": __name__})


class _DeferLogits:
    """The first base class of each engine in this module, before AReaL's own engine."""

    _compute_values: Any
    config: Any
    model: Any

    def _create_device_model(self) -> None:
        super()._create_device_model()  # type: ignore[misc] # AReaL's method
        if not self.config.is_critic:
            _installed.defer(self.model)

    def _get_vocab_min_max_logits(self, logits: torch.Tensor, ulysses_pad_size: int = 0) -> Any:
        """Returns the smallest and the largest logit, computed in one pass instead of AReaL's two."""
        if not isinstance(logits, DeferredLogits):
            return super()._get_vocab_min_max_logits(logits, ulysses_pad_size)  # type: ignore[misc]
        extremes = torch.aminmax(logits.detach(), dim=-1)
        return tuple(self._compute_values(each.float(), ulysses_pad_size) for each in extremes)
