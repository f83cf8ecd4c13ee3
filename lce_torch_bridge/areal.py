"""AReaL under FSDP without logits: its engines compute log-probabilities of deferred logits.

AReaL's workers import an engine by the name of its class. So the engines here are AReaL's own with `defer_logits` of
their model, and each node has to have this package.
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
    """AReaL's trainers, and the workers that they start, then take these engines for the backend "fsdp".

    To be called in the script that starts the run, before the trainer is built. What `defer_logits` does not serve, as
    tensor parallelism, is as without it.

    Returns:
        What counts results in this process, and undoes it; a second call returns the same.

    Raises:
        NotImplementedError: AReaL's engines have other names.

    Example:
        >>> import lce_torch_bridge.areal
        >>> lce_torch_bridge.areal.install()  # doctest: +SKIP
    """
    engine = _installed.module("areal.engine")
    return _installed.put(*((engine, theirs, _engine(ours)) for ours, theirs in ENGINES.items()))


def __getattr__(name: str) -> Any:
    """The engines, which are classes of AReaL."""
    if name not in ENGINES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return _engine(name)


@functools.cache
def _engine(name: str) -> type:
    base = getattr(importlib.import_module("areal.engine.fsdp_engine"), ENGINES[name])
    return type(name, (_Deferring, base), {"__module__": __name__})


class _Deferring:
    """Before an engine in the bases of a class."""

    _compute_values: Any
    config: Any
    model: Any

    def _create_device_model(self) -> None:
        super()._create_device_model()  # type: ignore[misc] # the engine's
        if not self.config.is_critic:
            _installed.defer(self.model)

    def _get_vocab_min_max_logits(self, logits: torch.Tensor, ulysses_pad_size: int = 0) -> Any:
        """The smallest and the largest logit in one pass, where AReaL asks for one after the other."""
        if not isinstance(logits, DeferredLogits):
            return super()._get_vocab_min_max_logits(logits, ulysses_pad_size)  # type: ignore[misc]
        extremes = torch.aminmax(logits.detach(), dim=-1)
        return tuple(self._compute_values(each.float(), ulysses_pad_size) for each in extremes)
