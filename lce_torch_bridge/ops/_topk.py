"""`linear_topk`: the most likely ids of each token's distribution, without storing the logits."""

from __future__ import annotations

from typing import TYPE_CHECKING, Never

import torch

from lce_jax.types import scalars
from lce_torch_bridge._types import TopK, make_call
from lce_torch_bridge.call import _arguments, _checks
from lce_torch_bridge.call._arguments import Options
from lce_torch_bridge.operators import _operators

if TYPE_CHECKING:
    import torch.distributed as dist


def linear_topk(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    k: int,
    *,
    bias: torch.Tensor | None = None,
    tp_group: dist.ProcessGroup | None = None,
    temperature: float | torch.Tensor = 1.0,
    logit_scale: float = 1.0,
    logit_softcap: float | None = None,
    vocab_size: int | None = None,
    where: torch.Tensor | None = None,
    implementation: str | tuple[str, ...] | None = None,
    **unknown: Never,
) -> TopK:
    """Returns each token's k most likely ids and their log-probabilities, for example a teacher's for distillation.

    The log-probabilities are exactly the k largest of ``logprobs[v] = z[v] - ln Σ_u exp(z[u])``, the largest first,
    with ``z = cap(logit_scale · (hidden · weight + bias)) / temperature`` in float32. Of equal logits the smaller id
    comes first. No gradient flows through the results. For a gradient, pass the ids to ``linear_logprobs(...,
    candidates=ids)``.

    Args:
        hidden, weight, logit_scale, logit_softcap: as in `linear_logprobs`.
        k: the number of ids, from 1 to 512 and at most the size of the vocabulary; a Python integer.
        bias: ``[V]``, this rank's part; bfloat16, float16 or float32. It is added to the products in float32, also
            under autocast, which does not cast it. None: no bias.
        tp_group: the process group over which the vocabulary is split into parts of the same size. Rank r holds part r.
            All ranks pass the same ``hidden`` and get bitwise-equal results. None: ``weight`` is the full weight.
        temperature: divides the float32 logits. It is a positive number, or a float tensor that broadcasts to ``[...]``
            (one value per token, or per sequence as ``[b, 1]``). A tensor's values must be positive and finite. They
            are checked only on the CPU and outside of ``torch.compile``; elsewhere, a token with an invalid temperature
            gets ids of -1 and NaN in lse and logprobs, and other tokens are unaffected.
        vocab_size: the true size of the vocabulary of all ranks together. Columns from ``vocab_size`` on are padding,
            which is never among the results. None: every column counts.
        where: the tokens that count: a bool tensor of the shape ``[...]``, or the row indices of the flattened tokens,
            without repetitions (int64 or int32). Other tokens have ids of -1, other results of 0, and cost nothing. For
            a bool tensor, but not for an index, the host waits until the GPU has counted it. None: all tokens count.
        implementation: None or "xla": there are no kernels for this function, because XLA's product is as fast.
        **unknown: an error; the message names the option that may be meant.

    Returns:
        A `TopK`: ids and logprobs ``[..., k]``, lse ``[...]``.

    Raises:
        lce_jax.UnsupportedError: an implementation requested by name cannot run the call; the message says why.
        ValueError, TypeError: shapes, dtypes, devices or options do not fit; the message has their values. The first
            call of a ``tp_group`` also raises if the ranks' vocabulary parts differ in size or overlap, or if the
            ranks' tokens or options differ. In later calls, such a difference gives ids of -1 and NaN in lse and
            logprobs on all ranks: in rows whose temperatures differ, and in all rows if the sizes differ.
        RuntimeError: in the cases that `linear_logprobs` lists.

    Memory:
        The call holds the logits of one chunk of tokens (160 MiB or 256 tokens, whichever is more; on a CPU 32 MiB or
        128 tokens), O(T·k), and a copy of hidden. The copy is padded to 128 or 512 tokens, or to a power of two from
        2048 on (from 32,768 on, also to sizes halfway between two powers).

    Numerics:
        float32 products are as exact as ``torch.set_float32_matmul_precision`` or torch's ``fp32_precision`` asks. With
        ``tp_group``, one all-gather of 2k + 2 values per token collects each rank's k largest. To merge them, their
        logits are computed once more as dot products, so logits that differ only by rounding may change their order.

    Example:
        >>> import torch
        >>> from lce_torch_bridge import linear_logprobs, linear_topk
        >>> hidden, weight = torch.ones(2, 4), torch.tensor([0.0, 2.0, 1.0, 2.0])[:, None] * torch.ones(4)
        >>> top = linear_topk(hidden, weight, 3)
        >>> top.ids.tolist(), round(top.logprobs[0, 0].item(), 3)      # of equal logits the smaller id first
        ([[1, 3, 2], [1, 3, 2]], -0.702)
        >>> out = linear_logprobs(hidden, weight, torch.tensor([0, 0]), candidates=top.ids)
        >>> torch.allclose(out.candidate_logprobs, top.logprobs)
        True
    """
    _arguments.check_unknown(linear_topk, unknown)
    k = scalars.check_k(k)
    _checks.hidden(hidden)
    options = Options(
        bias=bias,
        tp_group=tp_group,
        temperature=temperature,
        logit_scale=logit_scale,
        logit_softcap=logit_softcap,
        vocab_size=vocab_size,
        where=where,
        implementation=implementation,
    )
    no_labels = hidden.new_full(hidden.shape[:-1], -1, dtype=torch.int64)
    arguments = _arguments.parse_arguments(hidden, weight, no_labels, options)
    columns = arguments.weight.shape[0] * (1 if tp_group is None else tp_group.size())
    scalars.check_k(k, arguments.call.jax.vocab_size or columns)
    x, rows = _arguments.flatten_operands(arguments, _arguments.prepare_weight(arguments, "return").detach())
    x = x._replace(hidden=x.hidden.detach(), bias=None if x.bias is None else x.bias.detach())
    results = _operators.apply(x, make_call(arguments.call.text, function="linear_topk", top_k=int(k)))
    ids, logprobs, lse = results.values()
    # Masked tokens have ids of -1, and `place_results` fills in 0.
    ids_above, *others = [_arguments.place_results(y, rows, arguments.labels) for y in (ids + 1, logprobs, lse)]
    return TopK(ids_above - 1, *others)
