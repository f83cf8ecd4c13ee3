"""`linear_logits` computes logits at chosen ids, and `masked_logprobs` a softmax over them."""

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
    """Returns logits at chosen ids, without a pass over the vocabulary.

    ``z[k] = cap(logit_scale · (hidden · weight[ids[k]] + bias[ids[k]])) / temperature`` in float32, T·K dot products.
    The logits are differentiable, once, in ``hidden``, ``weight`` and ``bias``. `masked_logprobs` computes a softmax
    over these logits. For log-probabilities under the full vocabulary use ``linear_logprobs(..., candidates=ids)``.

    Args:
        hidden, weight, logit_scale, logit_softcap, vocab_size, reduce_grad_hidden: as in `linear_logprobs`.
        ids: ``[..., K]`` integers of any type, K from 1 to 512: vocabulary ids of each token, global even when the
            vocabulary is split. -1 stands for no id.
        bias: ``[V]``, this rank's part; bfloat16, float16 or float32. It is added to the products in float32, also
            under autocast, which does not cast it. Its gradient is returned to autograd, whatever ``wgrad`` is. None:
            no bias.
        tp_group: the process group over which the vocabulary is split into parts of the same size. Rank r holds part r.
            All ranks pass the same ``hidden`` and ``ids`` and get bitwise-equal results. None: ``weight`` is the full
            weight.
        temperature: divides the float32 logits. It is a positive number, or a float tensor that broadcasts to ``[...]``
            (one value per token, or per sequence as ``[b, 1]``), and has no gradient. A tensor's values must be
            positive and finite. They are checked only on the CPU and outside of ``torch.compile``; elsewhere, a token
            with an invalid temperature gets NaN results and no gradient, and other tokens are unaffected.
        where: the tokens that count: a bool tensor of the shape ``[...]``, or the row indices of the flattened tokens,
            without repetitions (int64 or int32). Other tokens have 0 as results and no gradient, as if all their ids
            were -1, and cost nothing. For a bool tensor, but not for an index, the host waits until the GPU has counted
            it. None: all tokens count.
        wgrad: "return" returns the weight's gradient to autograd. "main_grad" rounds the gradient to the weight's dtype
            and adds it to ``weight.main_grad``. It also sets ``grad_added_to_main_grad``, as Megatron's
            gradient-accumulation fusion does. ``torch.compile`` does not support "main_grad".
        implementation: None or "xla": there are no kernels for this function.
        **unknown: an error; the message names the option that may be meant.

    Returns:
        Logits ``[..., K]`` in float32; 0, without a gradient, where the id is negative or out of vocabulary.

    Raises:
        lce_jax.UnsupportedError: an implementation requested by name cannot run the call; the message says why.
        ValueError, TypeError: shapes, dtypes, devices or options do not fit; the message has their values. The first
            call of a ``tp_group`` also raises if the ranks' vocabulary parts differ in size or overlap, or if the
            ranks' tokens or options differ. In later calls, such a difference gives NaN results and gradients on all
            ranks: in rows whose ids or temperatures differ, and in all rows if the sizes differ.
        NotImplementedError: a second derivative, a forward-mode derivative or ``torch.func.vmap`` is requested
            (``torch.func.grad`` and ``vjp`` work).
        RuntimeError: in the cases that `linear_logprobs` lists.

    Memory:
        The call holds a few chunks of gathered rows, of 32 MiB each; O(T·K); and copies of hidden and dhidden. The
        copies are padded to 128 or 512 tokens, or to a power of two from 2048 on (from 32,768 on, also to sizes halfway
        between two powers). The gradient of ``weight`` is as large as the weight.

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
    arguments = _arguments.parse_arguments(hidden, weight, ids[..., 0], options)
    x, rows = _arguments.flatten_operands(arguments, _arguments.prepare_weight(arguments, wgrad))
    results = _operators.apply(x, make_call(arguments.call.text, function="linear_logits"))
    return _arguments.place_results(results["linear_logits"], rows, arguments.labels)


def masked_logprobs(logits: torch.Tensor, ids: torch.Tensor, labels: torch.Tensor) -> LogprobOutput:
    """Returns log-probability and entropy of a softmax over a set of ids, such as the set that top-k sampling leaves.

    ``logprobs = z[label] - lse`` with ``lse = ln Σ_{k: ids[k] ≥ 0} exp(z[k])``, where z are the logits of
    `linear_logits`. The entropy ``-Σ p ln p`` is over the set. This is plain PyTorch, differentiable in ``logits`` any
    number of times.

    Args:
        logits: ``[..., K]``, the result of `linear_logits` at ``ids``.
        ids: ``[..., K]``, the set of each token, without repetitions; -1 stands for no id. Also write -1 for an id out
            of vocabulary.
        labels: ``[...]`` integers of any type: vocabulary ids, global even when the vocabulary is split.

    Returns:
        A `LogprobOutput` with ``logprobs``, ``entropy`` and ``lse``, ``[...]`` in the dtype of the logits. A logprob
        is -inf, without a gradient, where the label is not in the set, because sampling cannot have drawn it. As in
        `linear_logprobs`, it is 0, without a gradient, where the label is negative, as in a prompt. All results are 0
        where the set is empty.

    Raises:
        ValueError, TypeError: shapes or dtypes do not fit; the message has their values.

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
    has_label, has_ids = is_label.any(-1), in_set.any(-1)
    # For an empty set this is the softmax of zeros, so that no NaN reaches the gradient.
    z = logits.masked_fill(~in_set, -torch.inf).where(has_ids.unsqueeze(-1), 0.0)
    log_p = z.log_softmax(-1)
    logprobs = log_p.where(is_label, 0.0).sum(-1).masked_fill(~has_label & has_ids & (labels >= 0), -torch.inf)
    entropy = -(log_p.exp() * log_p.masked_fill(log_p == -torch.inf, 0.0)).sum(-1)
    return LogprobOutput(logprobs, entropy.where(has_ids, 0.0), z.logsumexp(-1).where(has_ids, 0.0))
