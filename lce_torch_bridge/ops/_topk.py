"""`linear_topk`: the most likely tokens of each distribution, without storing the logits."""

from __future__ import annotations

from typing import TYPE_CHECKING, Never

import torch

from lce_jax.types import scalars
from lce_torch_bridge._types import TopK, call_with
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
    """The k most likely tokens and their log-probabilities: the teacher's side of a distillation.

    The k largest of ``logprobs[v] = z[v] - ln Σ_u exp(z[u])``, exactly, the largest first, with ``z = cap(logit_scale ·
    (hidden · weight + bias)) / temperature`` in float32. Of equal logits the smaller id comes first. No gradient flows
    through the results: give the ids to ``linear_logprobs(..., candidates=ids)`` for one.

    Args:
        hidden, weight, logit_scale, logit_softcap: as in `linear_logprobs`.
        k: how many, from 1 to 512 and at most the vocabulary; a Python integer.
        bias: ``[V]``, this rank's part; bfloat16, float16 or float32. Added to the raw products in float32, also under
            autocast, which leaves it as it is. None: no bias.
        tp_group: the process group over which the vocabulary is split into parts of the same size; rank r holds the
            r-th. All ranks pass the same ``hidden`` and get bitwise-equal results. None: ``weight`` is whole.
        temperature: divides the float32 logits: a positive number, or a float tensor that broadcasts to ``[...]`` (one
            value per token, or per sequence as ``[b, 1]``). A tensor's values are looked at only on the CPU and outside
            ``torch.compile``: there, one that is not positive and finite is refused. Elsewhere its token has ids -1 and
            NaN, and the other tokens are not affected.
        vocab_size: the true size of the vocabulary of all ranks together. Columns from it on are padding, which is
            never among the results. None: every column counts.
        where: the tokens that count: bool of the shape ``[...]``, or the rows of the flattened tokens, each at most
            once (int64 or int32). The others have ids -1 and zeros, and cost no work. The host waits for the GPU to
            count a bool tensor, but not for an index. None: all.
        implementation: None or "xla": the kernels do not serve it, because XLA's own product takes the same time.
        **unknown: refused; the message names the option that may be meant.

    Returns:
        A `TopK`: ids and logprobs ``[..., k]``, lse ``[...]``.

    Raises:
        lce_jax.UnsupportedError: an implementation asked for by name cannot serve the call; the message says why.
        ValueError, TypeError: shapes, dtypes, devices or options that do not fit, with the offending values. Over a
            ``tp_group`` also, in its first call, ranks whose parts of the vocabulary are of different sizes or the same
            columns, or whose tokens or options differ. In later calls lse and logprobs are NaN and ids -1 on all ranks:
            in rows whose temperatures differ between ranks, and in all rows if the sizes do.
        RuntimeError: in the cases that `linear_logprobs` lists.

    Memory:
        The logits of one chunk of tokens, 160 MiB or 256 tokens if these are more (on a CPU 32 MiB or 128 tokens),
        O(T·k), and a copy of hidden, padded to 128, 512, or the next power of two of tokens from 2048 on (from 32,768
        on, or to halfway there).

    Numerics:
        float32 products are as exact as ``torch.set_float32_matmul_precision`` or torch's ``fp32_precision`` says. With
        ``tp_group``, one all-gather of 2k + 2 numbers per token merges the ranks' own k largest by their logits, which
        are computed once more as dot products: logits that differ by rounding alone may change places.

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
    given = _arguments.of_call(hidden, weight, hidden.new_full(hidden.shape[:-1], -1, dtype=torch.int64), options)
    columns = given.weight.shape[0] * (1 if tp_group is None else tp_group.size())
    scalars.check_k(k, given.call.jax.vocab_size or columns)
    x, rows = _arguments.operands(given, _arguments.weight_of(given, "return").detach())
    x = x._replace(hidden=x.hidden.detach(), bias=None if x.bias is None else x.bias.detach())
    found = _operators.apply(x, call_with(given.call.text, function="linear_topk", top_k=int(k)))
    ids, logprobs, lse = found.values()
    # The ids of tokens that are left out are -1, and `placed` gives them 0.
    above, *others = [_arguments.placed(y, rows, given.labels) for y in (ids + 1, logprobs, lse)]
    return TopK(above - 1, *others)
