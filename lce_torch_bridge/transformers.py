"""The loss of Hugging Face Transformers' models without stored logits: call `patch` on a model before training."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from lce_torch_bridge import _framework
from lce_torch_bridge.deferred._heads import defer
from lce_torch_bridge.ops._cross_entropy import linear_cross_entropy

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from lce_torch_bridge._types import Lora
    from lce_torch_bridge.deferred._deferral import Deferral

__all__ = ["loss_function", "patch"]


def patch(model: PreTrainedModel, *, strict: bool = False, always: bool = False) -> Deferral:
    """Applies `defer_logits` to a model of Transformers, which then computes the same loss without logits.

    The model's own forward runs, so its operations on logits, its router loss and other loss terms stay as they are.
    The Trainer does not change. With labels, the output's ``logits`` are deferred: reading their values computes them.

    A Trainer with its own loss function, or with ``label_smoothing_factor``, does not pass labels to the model. In
    evaluation the head then computes its logits, and does not count them, unless ``always=True``.

    Args:
        model: a model of Transformers 5 whose head is a linear layer, before the Trainer, DDP, FSDP or
            ``torch.compile`` wraps it. PEFT may come before or after.
        strict: whether to raise an error instead of computing logits.
        always: whether to defer logits even without gradients and labels, for example for log-probabilities of an old
            policy or a reference. ``generate`` then computes the logits that it reads.

    Returns:
        The handle, which counts results and logits and has ``undo()``. A second call with the same model returns the
        same handle.

    Raises:
        TypeError, NotImplementedError: `defer_logits` does not support the model; the message says why.

    Example:
        >>> import lce_torch_bridge.transformers
        >>> lce_torch_bridge.transformers.patch(model)  # doctest: +SKIP
        >>> Trainer(model, arguments, train_dataset=rows).train()  # doctest: +SKIP
    """
    _framework.check_version("transformers", "5")
    return defer("patch", model, strict, always)


def loss_function(
    hidden_states: torch.Tensor,
    labels: torch.Tensor | None,
    vocab_size: int | None = None,
    num_items_in_batch: torch.Tensor | int | None = None,
    ignore_index: int = -100,
    shift_labels: torch.Tensor | None = None,
    *,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    logit_scale: float = 1.0,
    logit_softcap: float | None = None,
    lora: Lora | None = None,
) -> torch.Tensor:
    """Returns Transformers' causal-language-model loss, from hidden states and the head's weight, without logits.

    `linear_cross_entropy` and `linear_logprobs` describe the other arguments.

    Args:
        hidden_states: ``[b, s, H]``, the head's input.
        labels: ``[b, s]`` token ids, not shifted: the hidden state of a token predicts the next token.
        num_items_in_batch: the divisor of the summed losses; the Trainer passes the number of labels over all
            micro-batches. None: the number of labels in this call that are not ignored.
        shift_labels: ``[b, s]``, labels that are already shifted, used instead of ``labels``.

    Returns:
        The loss in nats, a float32 scalar.

    Raises:
        lce_jax.UnsupportedError, ValueError, TypeError, NotImplementedError, RuntimeError: in the cases that
            `linear_cross_entropy` lists.

    Example:
        >>> import torch
        >>> from lce_torch_bridge.transformers import loss_function
        >>> tokens, weight = torch.tensor([[1, 2, 3]]), torch.zeros(1000, 8)
        >>> round(loss_function(torch.ones(1, 3, 8), tokens, weight=weight).item(), 3)  # ln 1000
        6.908
    """
    if shift_labels is None:
        if labels is None:
            raise ValueError("no labels: pass labels, or shift_labels")
        hidden_states, shift_labels = hidden_states[:, :-1], labels[:, 1:]
    loss = linear_cross_entropy(
        hidden_states, weight, shift_labels, bias=bias, logit_scale=logit_scale, logit_softcap=logit_softcap,
        vocab_size=vocab_size, ignore_index=ignore_index, reduction="mean" if num_items_in_batch is None else "sum",
        lora=lora,
    )  # fmt: skip
    if isinstance(num_items_in_batch, torch.Tensor):
        num_items_in_batch = num_items_in_batch.to(loss.device)
    return loss if num_items_in_batch is None else loss / num_items_in_batch
