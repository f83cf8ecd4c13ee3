"""Functions made of `linear_logprobs`: the loss, and the entropy alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Unpack

import torch

from lce_jax import scalars
from lce_torch_bridge._types import Reduction
from lce_torch_bridge.call import _arguments, _checks, _dtensor
from lce_torch_bridge.ops._logprobs import linear_logprobs

if TYPE_CHECKING:
    from lce_torch_bridge.call._arguments import CrossEntropyOptions, EntropyOptions

NO_OUTPUTS = ("entropy", "stats", "mean_logit", "candidates", "out_of_vocab")  # options of what a loss does not return


def linear_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    *,
    reduction: Reduction = "mean",
    ignore_index: int | None = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    where: torch.Tensor | None = None,
    **options: Unpack[CrossEntropyOptions],
) -> torch.Tensor:
    """Cross entropy of a language-model head, without storing the logits.

    ``torch.nn.functional.cross_entropy`` of the logits, with a penalty that keeps ``lse`` near 0. Per token, with ε the
    smoothing, ``(1 - ε)·(-logprob) + ε·(lse - mean_v z) + z_loss·lse²``. `lce_jax.linear_cross_entropy` is the same.
    A label outside the vocabulary that is not ``ignore_index`` has logprob 0 and counts as a token; torch raises there.

    Args:
        hidden, weight, labels, ignore_index, where: as in `linear_logprobs`.
        reduction: "mean" over the tokens that count (0 if there are none; torch has NaN), "sum", or "none" for
            ``[...]``, 0 on the others.
        label_smoothing: ε in [0, 1): the target is ``(1 - ε)·onehot + ε/V`` over the true vocabulary, as in torch.
            Megatron's ``vocab_parallel_cross_entropy`` spreads ε over the other tokens alone: its ε is
            ``ε·V / (V - 1)`` here, on one rank. On several, it takes V and the mean from each rank's own part.
        z_loss: weight of ``lse²``, at least 0 (PaLM: 1e-4).
        **options: ``bias``, ``tp_group``, ``temperature``, ``logit_scale``, ``logit_softcap``, ``vocab_size``,
            ``reduce_grad_hidden``, ``wgrad``, ``cache_bytes``, ``gradient_threshold``, ``vocab_part_size``,
            ``logit_floor`` and ``implementation``, as in `linear_logprobs`.

    Returns:
        The loss in nats, float32: a scalar, or ``[...]`` with ``reduction="none"``. It covers this rank's tokens,
        and is the same on all ranks of ``tp_group``.

    Raises:
        lce_jax.UnsupportedError: an implementation asked for by name cannot serve the call; the message says why.
        ValueError, TypeError: shapes, dtypes, devices or options that do not fit, with the offending values.
        NotImplementedError, RuntimeError: in the cases that `linear_logprobs` lists.

    Memory:
        That of `linear_logprobs`.

    Example:
        >>> import torch
        >>> from lce_torch_bridge import linear_cross_entropy
        >>> hidden, weight = torch.randn(4, 8, requires_grad=True), torch.zeros(1000, 8, requires_grad=True)
        >>> loss = linear_cross_entropy(hidden, weight, torch.tensor([1, 2, 3, -100]), label_smoothing=0.1)
        >>> round(loss.item(), 3)                           # ln 1000
        6.908
        >>> loss.backward()
    """
    scalars.one_of("reduction", reduction, ("mean", "sum", "none"))
    smoothing, z_loss = scalars.fraction("label_smoothing", label_smoothing), scalars.not_negative("z_loss", z_loss)
    refused = dict.fromkeys(NO_OUTPUTS, "a loss has no such output")
    _arguments.check_names(linear_cross_entropy, options, refused)
    labels, where = _dtensor.tokens(labels=labels, where=where)
    _checks.integers("labels", labels)
    if where is not None:
        _checks.where(where, labels, labels)
    if ignore_index is not None:
        where = _arguments.without(ignore_index, where, labels)
    out = linear_logprobs(hidden, weight, labels, entropy=False, mean_logit=smoothing > 0, where=where, **options)
    loss = (smoothing - 1.0) * out.logprobs
    if out.mean_logit is not None:
        loss = loss + smoothing * (out.lse - out.mean_logit)
    if z_loss > 0:
        loss = loss + z_loss * out.lse * out.lse
    if reduction == "none":
        return loss
    return loss.sum() if reduction == "sum" else loss.sum() / _arguments.count(where, labels)


def linear_entropy(
    hidden: torch.Tensor, weight: torch.Tensor, **options: Unpack[EntropyOptions]
) -> tuple[torch.Tensor, torch.Tensor]:
    """``(entropy, lse)`` of a language-model head for tokens that have no labels, without storing the logits.

    Args:
        hidden, weight: as in `linear_logprobs`.
        **options: ``bias``, ``tp_group``, ``temperature``, ``logit_scale``, ``logit_softcap``, ``vocab_size``,
            ``where``, ``reduce_grad_hidden``, ``wgrad``, ``cache_bytes``, ``gradient_threshold``, ``vocab_part_size``,
            ``logit_floor`` and ``implementation``, as in `linear_logprobs`, with hidden's leading shape in place
            of the shape of labels.

    Returns:
        Entropies and lse, in nats, float32 of hidden's leading shape, both differentiable.

    Raises:
        lce_jax.UnsupportedError: an implementation asked for by name cannot serve the call; the message says why.
        ValueError, TypeError: shapes, dtypes, devices or options that do not fit, with the offending values.
        NotImplementedError, RuntimeError: in the cases that `linear_logprobs` lists.

    Memory:
        That of `linear_logprobs`.

    Example:
        >>> import torch
        >>> from lce_torch_bridge import linear_entropy
        >>> entropy, lse = linear_entropy(torch.ones(2, 3, 8), torch.zeros(100, 8))
        >>> entropy.shape, round(entropy[0, 0].item(), 3)   # ln 100
        (torch.Size([2, 3]), 4.605)
    """
    refused = dict.fromkeys((*NO_OUTPUTS, "ignore_index"), "linear_entropy returns entropy and lse")
    _arguments.check_names(linear_entropy, options, refused)
    _checks.hidden(hidden)
    labels = hidden.new_full(hidden.shape[:-1], -1, dtype=torch.int64)
    out = linear_logprobs(hidden, weight, labels, **options)
    assert out.entropy is not None
    return out.entropy, out.lse
