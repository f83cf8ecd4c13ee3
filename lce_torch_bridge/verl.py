"""verl's ``linear_cross_entropy``: its name, its positional signature, its results."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from lce_jax import scalars
from lce_torch_bridge._types import Reduction
from lce_torch_bridge.call import _checks
from lce_torch_bridge.ops._logprobs import linear_logprobs

if TYPE_CHECKING:
    import torch.distributed as dist

__all__ = ["linear_cross_entropy"]


def linear_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    temperature: float | None = 1.0,
    reduction: Reduction | None = "none",
    dist_process_group: dist.ProcessGroup | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``(logprobs, entropy)`` under the positional signature of verl's ``linear_cross_entropy``.

    As with verl, the first result is a log-probability, ``z[label] - lse ≤ 0``: the loss is its negative.

    Args:
        hidden: ``[..., H]`` hidden states; any leading shape, also an empty one. bfloat16, float16 or float32, on a GPU
            or the CPU.
        weight: ``[V, H]``, this rank's rows of the head; copied for each call if it is not contiguous. Its dtype is
            that of the matrix products. Under ``torch.autocast`` it is cast to autocast's dtype first, and all calls
            of the context share the copy, as with ``torch.nn.functional.linear``.
        labels: hidden's leading shape, also with other dimensions of 1 (``[1, T]`` for ``[T, 1, H]``), or flat.
            ``[b, s]`` for ``[s, b, H]`` is refused. A label outside the vocabulary has logprob 0 (verl's kernel:
            ``-lse`` on a process group, and undefined without one).
        temperature: divides the float32 logits: a positive number. None: 1.
        reduction: of the log-probabilities: "none" for one per token, "sum", or "mean" over all tokens, also those
            out of vocabulary; in upper or lower case. The entropy is never reduced. None: "none".
        dist_process_group: the group over which the vocabulary is split. Each rank's dhidden is its own part, which
            the caller sums, as with verl's kernel.

    Returns:
        Log-probabilities, ``[tokens]`` flat or a scalar, and entropies, ``[tokens]`` flat; float32, both
        differentiable.

    Raises:
        lce_jax.UnsupportedError: an implementation asked for by name cannot serve the call; the message says why.
        ValueError, TypeError: shapes, dtypes, devices or options that do not fit, with the offending values.
        NotImplementedError, RuntimeError: in the cases that `linear_logprobs` lists.

    Memory:
        That of `linear_logprobs`.

    Example:
        >>> import torch
        >>> from lce_torch_bridge.verl import linear_cross_entropy
        >>> logprobs, entropy = linear_cross_entropy(torch.ones(2, 3, 8), torch.zeros(100, 8), torch.ones(2, 3).long())
        >>> logprobs.shape, round(logprobs[0].item(), 3), round(entropy[0].item(), 3)
        (torch.Size([6]), -4.605, 4.605)
    """
    reduction = "none" if reduction is None else reduction
    reduction = reduction.lower() if isinstance(reduction, str) else reduction  # type: ignore[assignment]
    scalars.one_of("reduction", reduction, ("none", "sum", "mean"))
    temperature = 1.0 if temperature is None else temperature
    out = linear_logprobs(_like(labels, hidden), weight, labels, tp_group=dist_process_group, temperature=temperature)
    assert out.entropy is not None
    logprobs = out.logprobs.reshape(-1)
    if reduction == "sum":
        logprobs = logprobs.sum()
    elif reduction == "mean":
        logprobs = logprobs.mean()
    return logprobs, out.entropy.reshape(-1)


def _like(labels: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
    """``hidden`` with the leading shape of labels, if both certainly hold the same tokens in the same order."""
    _checks.hidden(hidden)
    _checks.integers("labels", labels)
    if hidden.shape[:-1] == labels.shape:
        return hidden
    ours, theirs = ([size for size in shape if size != 1] for shape in (hidden.shape[:-1], labels.shape))
    flat = min(len(ours), len(theirs)) < 2 and hidden.shape[:-1].numel() == labels.numel()
    if ours == theirs or flat:
        return hidden.reshape(*labels.shape, hidden.shape[-1])
    if ours == theirs[::-1]:
        raise ValueError(
            f"hidden {tuple(hidden.shape)} and labels {tuple(labels.shape)} hold their tokens in another order: pass "
            "hidden.transpose(0, 1)"
        )
    return hidden
