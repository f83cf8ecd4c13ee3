"""Models of Hugging Face Transformers whose loss needs no logits: `patch` one, before it is trained."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lce_torch_bridge import _framework
from lce_torch_bridge.deferred._defer import Deferral, defer_logits

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["patch"]


def patch(model: PreTrainedModel, *, strict: bool = False) -> Deferral:
    """`defer_logits` of a model of Transformers, which computes its loss as before, without logits.

    The model's own forward runs: what it does to its logits, its router's loss and its other terms are all there. The
    Trainer does not change. With labels, the output's ``logits`` are deferred: to read their values computes them.

    Args:
        model: a model of Transformers 5 whose head is a linear layer, before the Trainer, DDP, FSDP or
            ``torch.compile`` wraps it. PEFT may come before or after.
        strict: as in `defer_logits`.

    Returns:
        What counts results and logits, and undoes it; a second call for the same model returns the same.

    Raises:
        TypeError, NotImplementedError: as in `defer_logits`.

    Example:
        >>> import lce_torch_bridge.transformers
        >>> lce_torch_bridge.transformers.patch(model)  # doctest: +SKIP
        >>> Trainer(model, arguments, train_dataset=rows).train()  # doctest: +SKIP
    """
    _framework.check_version("transformers", "5")
    return defer_logits(model, strict=strict)
