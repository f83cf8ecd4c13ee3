"""Logits at chosen ids alone, without a pass over the vocabulary, and the softmax over a set of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Never

import torch

from lce_torch_bridge._types import LogprobOutput, Wgrad, make_call
from lce_torch_bridge.call import _arguments, _checks, _dtensor
from lce_torch_bridge.call._arguments import Options
from lce_torch_bridge.operators import _operators

if TYPE_CHECKING:
    import torch.distributed as dist


def linear_logits(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    ids: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    tp_group: dist.ProcessGroup | None = None,
    temperature: float | torch.Tensor = 1.0,
    logit_scale: float = 1.0,
    logit_softcap: float | None = None,
    vocab_size: int | None = None,
    where: torch.Tensor | None = None,
    reduce_grad_hidden: bool = False,
    wgrad: Wgrad = "return",
    implementation: str | tuple[str, ...] | None = None,
    **unknown: Never,
) -> torch.Tensor:
    """Logits at chosen ids, without a pass over the vocabulary.

    ``z[k] = cap(logit_scale · (hidden · weight[ids[k]] + bias[ids[k]])) / temperature`` in float32, T·K dot products.
    Differentiable, once, in ``hidden``, ``weight`` and ``bias``. `masked_logprobs` makes a softmax over them; for
    log-probabilities under the whole vocabulary use ``linear_logprobs(..., candidates=ids)``.

    Args:
        hidden, weight, logit_scale, logit_softcap, vocab_size, reduce_grad_hidden: as in `linear_logprobs`.
        ids: ``[..., K]`` integers of any type: vocabulary ids per token, global also when the vocabulary is split; K
            from 1 to 512. -1 stands for none.
        bias: ``[V]``, this rank's part; bfloat16, float16 or float32. Added to the raw products in float32, also under
            autocast, which leaves it as it is. Its gradient goes to autograd, whatever ``wgrad`` says. None: no bias.
        tp_group: the process group over which the vocabulary is split into parts of the same size; rank r holds the
            r-th. All ranks pass the same ``hidden`` and ``ids`` and get bitwise-equal results. None: ``weight`` is
            whole.
        temperature: divides the float32 logits: a positive number, or a float tensor that broadcasts to ``[...]`` (one
            value per token, or per sequence as ``[b, 1]``). No gradient. A tensor's values are looked at only on the
            CPU and outside ``torch.compile``: there, one that is not positive and finite is refused. Elsewhere its
            token's results are NaN without a gradient, and the other tokens are not affected.
        where: the tokens that count: bool of the shape ``[...]``, or the rows of the flattened tokens, each at most
            once (int64 or int32). The others are 0 and have no gradient, as if all their ids were -1, and cost nothing.
            The host waits for the GPU to count a bool tensor, but not for an index. None: all.
        wgrad: "return" gives the weight its gradient. "main_grad" rounds it to the weight's dtype, adds it to
            ``weight.main_grad``, as Megatron's gradient-accumulation fusion does, and sets
            ``grad_added_to_main_grad``. Not under ``torch.compile``.
        implementation: None or "xla": there are no kernels for it.
        **unknown: refused; the message names the option that may be meant.

    Returns:
        ``[..., K]`` in float32; 0, without a gradient, where the id is none or out of vocabulary.

    Raises:
        lce_jax.UnsupportedError: an implementation asked for by name cannot serve the call; the message says why.
        ValueError, TypeError: shapes, dtypes, devices or options that do not fit, with the offending values. Over a
            ``tp_group`` also, in its first call, ranks whose parts of the vocabulary are of different sizes or the same
            columns, or whose tokens or options differ. In later calls results and gradients are NaN on all ranks: in
            rows whose ids or temperatures differ between ranks, and in all rows if the sizes do.
        NotImplementedError: on a second derivative, in forward mode, and under ``torch.func.vmap``
            (``torch.func.grad`` and ``vjp`` work).
        RuntimeError: in the cases that `linear_logprobs` lists.

    Memory:
        A few chunks of gathered rows of 32 MiB each, O(T·K), and copies of hidden and dhidden, padded to 128, 512, or
        the next power of two of tokens from 2048 on (from 32,768 on, or to halfway there). The gradient of ``weight``
        is as large as the weight.

    Numerics:
        Every sum is float32, and each gradient is rounded once. Two runs are bitwise equal: the gradients of an id that
        occurs many times are added in a fixed order.

    Example:
        >>> import torch
        >>> from lce_torch_bridge import linear_logits
        >>> hidden, weight = torch.ones(2, 4), torch.arange(10.0)[:, None] * torch.ones(4)
        >>> linear_logits(hidden, weight, torch.tensor([[3, 0], [7, -1]])).tolist()
        [[12.0, 0.0], [28.0, 0.0]]
    """
    _arguments.check_unknown(linear_logits, unknown)
    (ids,) = _dtensor.tokens(ids=ids)
    _checks.hidden(hidden)
    _checks.ids("ids", ids, hidden, hidden.shape[:-1], "hidden before H")
    options = Options(
        bias=bias,
        tp_group=tp_group,
        temperature=temperature,
        logit_scale=logit_scale,
        logit_softcap=logit_softcap,
        vocab_size=vocab_size,
        candidates=ids,
        where=where,
        reduce_grad_hidden=reduce_grad_hidden,
        wgrad=wgrad,
        implementation=implementation,
    )
    given = _arguments.parse_arguments(hidden, weight, ids[..., 0], options)
    x, rows = _arguments.flatten_operands(given, _arguments.prepare_weight(given, wgrad))
    found = _operators.apply(x, make_call(given.call.text, function="linear_logits"))
    return _arguments.place_results(found["linear_logits"], rows, given.labels)


def masked_logprobs(logits: torch.Tensor, ids: torch.Tensor, labels: torch.Tensor) -> LogprobOutput:
    """Log-probability and entropy of a softmax over a set of ids: what top-k, top-p or min-p sampling left.

    ``logprobs = z[label] - lse`` with ``lse = ln Σ_{k: ids[k] ≥ 0} exp(z[k])`` and the z of `linear_logits`, and the
    entropy ``-Σ p ln p`` over the set. Plain PyTorch, which differentiates them in ``logits`` any number of times.

    Args:
        logits: ``[..., K]``, those of `linear_logits` at ``ids``.
        ids: ``[..., K]`` the set of each token, its ids all different; -1 stands for none. An id out of vocabulary
            must be -1 too.
        labels: ``[...]`` integers of any type: vocabulary ids, global also when the vocabulary is split.

    Returns:
        A `LogprobOutput` with ``logprobs``, ``entropy`` and ``lse``, ``[...]`` in the dtype of the logits. A logprob
        is -inf, without a gradient, where the label is not in the set: sampling could not have drawn it. It is 0,
        without a gradient, where the label is negative, as in a prompt: `linear_logprobs` gives 0 for such a label too.
        All are 0 where the set has no id.

    Raises:
        ValueError, TypeError: shapes or dtypes that do not fit, with the offending values.

    Example:
        >>> import torch
        >>> from lce_torch_bridge import masked_logprobs
        >>> ids = torch.tensor([[3, 5, -1], [3, 5, 8]])
        >>> out = masked_logprobs(torch.zeros(2, 3), ids, torch.tensor([5, 6]))
        >>> [round(x, 3) for x in out.logprobs.tolist()]      # -ln 2, and a label outside the set
        [-0.693, -inf]
        >>> [round(x, 3) for x in out.entropy.tolist()]       # ln 2, ln 3
        [0.693, 1.099]
    """
    _checks.tensor("logits", logits)
    _checks.integers("labels", labels)
    _checks.ids("ids", ids, labels, labels.shape, "labels")
    if logits.shape != ids.shape or not logits.is_floating_point():
        raise ValueError(
            f"logits {tuple(logits.shape)} of {logits.dtype} must be floating point in the shape of ids "
            f"{tuple(ids.shape)}"
        )
    ids, labels = ids.long(), labels.long()  # torch compares only some of the unsigned types
    in_set = ids >= 0
    is_label = in_set & (ids == labels.unsqueeze(-1))
    found, some = is_label.any(-1), in_set.any(-1)
    # Where the set has no id, the softmax is that of zeros: NaN cannot reach the gradient.
    z = logits.masked_fill(~in_set, -torch.inf).where(some.unsqueeze(-1), 0.0)
    log_p = z.log_softmax(-1)
    logprobs = log_p.where(is_label, 0.0).sum(-1).masked_fill(~found & some & (labels >= 0), -torch.inf)
    entropy = -(log_p.exp() * log_p.masked_fill(log_p == -torch.inf, 0.0)).sum(-1)
    return LogprobOutput(logprobs, entropy.where(some, 0.0), z.logsumexp(-1).where(some, 0.0))
