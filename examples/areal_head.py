"""AReaL (1.0.4) under FSDP without logits: its actor's and its language model's engine take this package's head.

With this file on the path of every node, in the script that starts the run, before the trainer is built:

    import areal_head
    areal_head.install()
"""

from __future__ import annotations

import functools
from typing import Any

import areal.engine
import torch
from areal.engine.fsdp_engine import FSDPLMEngine, FSDPPPOActor

from lce_torch_bridge import linear_logprobs

calls = 0  # in this process
OTHER_LOGITS = ("final_logit_softcapping", "logit_scale", "logits_scaling", "lm_head_multiplier", "output_multiplier")


def scores(head: torch.nn.Linear, labels: torch.Tensor, temperature: float, hidden: torch.Tensor) -> torch.Tensor:
    """In place of the head's forward, within which FSDP2 has gathered the weight: [1, T, 4], float32, for [1, T, V]."""
    global calls
    if calls == 0:
        print("areal_head: log-probabilities of the head come from lce_torch_bridge", flush=True)
    calls += 1
    labels = labels.reshape(hidden.shape[:-1])
    out = linear_logprobs(hidden, head.weight, labels, bias=head.bias, temperature=temperature, stats=True)
    # AReaL's smallest and largest logits are of the logits before the temperature.
    return torch.stack([out.logprobs, out.entropy, out.min_logit * temperature, out.max_logit * temperature], -1)


class WithoutLogits:
    """Before an engine in the bases of a class. What the engine calls logits are then `scores`."""

    def _prepare_mb_inputs(self, mb_item: Any) -> tuple[dict[str, Any], Any]:
        inputs, context = super()._prepare_mb_inputs(mb_item)
        self._check_head()
        labels = inputs.get("rolled_input_ids", torch.roll(inputs["input_ids"], shifts=-1, dims=-1))
        head = self.model.lm_head
        head.forward = functools.partial(scores, head, labels, self.config.temperature)
        return inputs, context

    def _check_head(self) -> None:
        if self.parallel_helper.tp_size > 1 or self.enable_tree_training or self.config.is_critic:
            raise NotImplementedError("this recipe serves neither tensor parallelism, tree training nor a critic")
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


class Actor(WithoutLogits, FSDPPPOActor):
    pass


class LanguageModel(WithoutLogits, FSDPLMEngine):
    pass


def install() -> None:
    """AReaL's trainers, and the workers that they start, then take these engines for the backend "fsdp"."""
    areal.engine.FSDPPPOActor, areal.engine.FSDPLMEngine = Actor, LanguageModel
