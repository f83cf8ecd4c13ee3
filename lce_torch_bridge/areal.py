"""AReaL under FSDP without logits: its actor's and its language model's engine take this package's head.

AReaL has no switch: the method that calls the model gives its logits to other methods of the same engine. So there are
two engines, `Actor` and `LanguageModel`, AReaL's own with four methods replaced. AReaL's workers import an engine by
the name of its class: this package is what each node has to have.
"""

from __future__ import annotations

import functools
import importlib
from typing import Any

import torch

from lce_torch_bridge import _framework
from lce_torch_bridge.ops._logprobs import linear_logprobs

__all__ = ["install"]

OTHER_LOGITS = ("final_logit_softcapping", "logit_scale", "logits_scaling", "lm_head_multiplier", "output_multiplier")
ENGINES = {"Actor": "FSDPPPOActor", "LanguageModel": "FSDPLMEngine"}
_installed = _framework.Installed("areal", "1.0", "log-probabilities of the head come")


def install() -> _framework.Installed:
    """AReaL's trainers, and the workers that they start, then take these engines for the backend "fsdp".

    To be called in the script that starts the run, before the trainer is built.

    Returns:
        What counts the calls in this process, and undoes it; a second call returns the same.

    Raises:
        NotImplementedError: AReaL's engines have other names. And then, in an engine's step: tensor parallelism, tree
            training, a critic, a head that is more than a linear layer, as with an adapter (LoRA), or a model that
            scales or caps its logits.

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
    return type(name, (_WithoutLogits, base), {"__module__": __name__})


def _scores(head: torch.nn.Linear, labels: torch.Tensor, temperature: float, hidden: torch.Tensor) -> torch.Tensor:
    """In place of the head's forward, within which FSDP2 has gathered the weight: [1, T, 4], float32, for [1, T, V]."""
    _installed.count()
    labels = labels.reshape(hidden.shape[:-1])
    out: Any = linear_logprobs(hidden, head.weight, labels, bias=head.bias, temperature=temperature, stats=True)
    # AReaL's smallest and largest logits are of the logits before the temperature.
    return torch.stack([out.logprobs, out.entropy, out.min_logit * temperature, out.max_logit * temperature], -1)


class _WithoutLogits:
    """Before an engine in the bases of a class. What the engine calls logits are then `_scores`."""

    _compute_values: Any
    config: Any
    enable_tree_training: bool
    model: Any
    model_config: Any
    parallel_helper: Any

    def _prepare_mb_inputs(self, mb_item: Any) -> tuple[dict[str, Any], Any]:
        inputs, context = super()._prepare_mb_inputs(mb_item)  # type: ignore[misc] # the engine's
        self._check_head()
        labels = inputs.get("rolled_input_ids", torch.roll(inputs["input_ids"], shifts=-1, dims=-1))
        head = self.model.lm_head
        head.forward = functools.partial(_scores, head, labels, self.config.temperature)
        return inputs, context

    def _check_head(self) -> None:
        if self.parallel_helper.tp_size > 1 or self.enable_tree_training or self.config.is_critic:
            raise NotImplementedError(
                "lce_torch_bridge.areal serves neither tensor parallelism, tree training nor a critic"
            )
        head = self.model.lm_head
        if type(head).forward is not torch.nn.Linear.forward:
            raise NotImplementedError(
                f"lm_head is {type(head)}, and its weight and bias alone are read: an adapter would not "
                "train. Leave lm_head out of target_modules"
            )
        config = self.model_config.get_text_config()
        for name in OTHER_LOGITS:
            if getattr(config, name, None) not in (None, 1):
                raise NotImplementedError(f"{name}={getattr(config, name)}: the model changes what its head returns")

    def _columns(self, logits: torch.Tensor, pad: int, *which: int) -> list[torch.Tensor]:
        return [self._compute_values(logits[..., column], pad) for column in which]  # gathers Ulysses' parts

    def _compute_logprobs_entropy(self, logits: torch.Tensor, inputs: Any, ulysses_pad_size: int = 0) -> Any:
        del inputs
        return tuple(self._columns(logits, ulysses_pad_size, 0, 1))

    def _compute_logprobs(self, logits: torch.Tensor, inputs: Any, ulysses_pad_size: int = 0) -> torch.Tensor:
        del inputs
        return self._columns(logits, ulysses_pad_size, 0)[0]

    def _get_vocab_min_max_logits(self, logits: torch.Tensor, ulysses_pad_size: int = 0) -> Any:
        return tuple(self._columns(logits.detach(), ulysses_pad_size, 2, 3))
