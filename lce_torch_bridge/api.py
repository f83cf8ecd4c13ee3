"""The public functions: validate, flatten, call the operator."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.fx.experimental.symbolic_shapes import statically_known_true

from lce_jax import scalars
from lce_torch_bridge import _checks, _dtensor, autograd, tensor_parallel
from lce_torch_bridge._autocast import autocast
from lce_torch_bridge._main_grad import accumulate_into_main_grad
from lce_torch_bridge._types import Call, Entropy, LogprobOutput, OutOfVocab, Reduction, Wgrad

if TYPE_CHECKING:
    import torch.distributed as dist


def linear_logprobs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    *,
    tp_group: dist.ProcessGroup | None = None,
    temperature: float | torch.Tensor = 1.0,
    logit_scale: float = 1.0,
    logit_softcap: float | None = None,
    vocab_size: int | None = None,
    entropy: Entropy = "grad",
    stats: bool = False,
    keep: torch.Tensor | None = None,
    ignore_index: int | None = None,
    out_of_vocab: OutOfVocab = "zero",
    reduce_grad_hidden: bool = False,
    wgrad: Wgrad = "return",
    cache_bytes: int = 0,
    implementation: str | tuple[str, ...] | None = None,
) -> LogprobOutput:
    """Per-token log-probability and entropy of a language-model head, without storing the logits.

    With ``z = cap(logit_scale · hidden · weightᵀ) / temperature`` in float32 and ``p = softmax(z)`` over the
    vocabulary: ``logprobs = z[label] - lse``, ``entropy = -Σ p ln p`` and ``lse = ln Σ exp(z)`` per token, all in nats.
    Differentiable, once, in ``hidden`` and ``weight`` through all three.

    Args:
        hidden: ``[..., H]``; any leading shape, also an empty one. bfloat16, float16 or float32; on a GPU or the CPU.
        weight: ``[V, H]``, this rank's rows of the head; copied for each call where it is not contiguous. Its dtype is
            that of the matrix products; under ``torch.autocast`` it is cast to autocast's dtype first, and the copy
            shared with all calls of the context, as ``torch.nn.functional.linear`` does.
        labels: ``[...]`` integers of any type, global vocabulary ids.
        tp_group: the process group over which the vocabulary is split into parts of the same size, rank r holding the
            r-th. All ranks pass the same ``hidden`` and ``labels`` and get the same results, to the last bit. None:
            ``weight`` is whole.
        temperature: divides the float32 logits: a positive number, or a float tensor of such that broadcasts to
            ``labels`` (one per token, or per sequence as ``[b, 1]``); its values are looked at on the CPU only, and a 0
            among them makes all of dweight NaN. No gradient.
        logit_scale: multiplies the float32 logits first (MuP, Cohere).
        logit_softcap: ``c`` in ``cap(x) = c·tanh(x / c)``. None: no cap.
        vocab_size: the true vocabulary of all ranks together. Columns from there on are padding, in no sum and with
            zero gradient. None: every column counts, as in Megatron's own cross entropy.
        entropy: "grad"; "metric" computes it without a gradient, which makes the backward cheaper; "none" leaves it
            out.
        stats: True fills ``.max_logit`` and ``.min_logit``, extremes of ``z``. They have no gradient.
        keep: which tokens to compute: bool of ``labels``' shape, or the rows of the flattened tokens, each at most once
            (int64 or int32). The others are 0 and have no gradient. Time and memory are those of the kept tokens,
            whose results are the same bits as without ``keep``. A bool tensor on a GPU waits for the GPU to count; an
            index does not, nor is it looked at there: a row that it holds twice counts twice in the gradients. A bool
            tensor that holds nothing (meta, fake) cannot be counted, and costs as much as all tokens. None: all.
        ignore_index: tokens with this label (-100) are left out, as those that ``keep`` leaves out. It makes ``keep`` a
            bool tensor. None: no label leaves its token out, and one outside the vocabulary has entropy and lse.
        out_of_vocab: what logprob a label outside the vocabulary (negative, -100, ≥ vocab_size) has: "zero", or
            "megatron" for ``max_logit - lse``, as its cross entropy. The gradient is that of ``-lse`` either way, as
            Megatron's.
        reduce_grad_hidden: True sums dhidden over ``tp_group``, in float32, rounded once. For tensor parallelism
            without sequence parallelism, where nobody else does; otherwise each rank's dhidden is its own part.
        wgrad: "return" gives the weight its gradient. "main_grad" adds it to ``weight.main_grad``, as Megatron's
            gradient-accumulation fusion does, once it is rounded to the weight's dtype, and sets
            ``grad_added_to_main_grad``. Not under ``torch.compile``.
        cache_bytes: bytes that the forward may keep to spare the backward its recomputation. 0 keeps nothing. An
            implementation that always recomputes ignores it. A forward that keeps takes all tokens at once, and its
            results may differ in the last bits from one that does not. Under ``torch.compile`` each count of tokens is
            a graph of its own with it, and ``keep`` must be an index.
        implementation: as in `lce_jax.linear_logprobs`: "xla", "mosaic_gpu", "reference" or a tuple of names tried in
            order. None: the best that can serve the call.

    Returns:
        A `LogprobOutput`, each field float32 of ``labels.shape`` or None.

    Raises:
        lce_jax.UnsupportedError: an implementation asked for by name cannot serve the call; the message says why.
        ValueError, TypeError: shapes, dtypes, devices or options that do not fit, with the offending values. Parts of
            the vocabulary of different sizes are found in a ``tp_group``'s first call; later, results are NaN.
        NotImplementedError: on a second derivative, in forward mode, and under ``torch.func.vmap``; ``torch.func.grad``
            and ``vjp`` work.
        RuntimeError: under CUDA graph capture; in a forked child of a process that has used it; when ``weight`` or
            ``hidden`` was changed in place between forward and backward.

    Memory:
        Forward, two copies of 8192 tokens' hidden and a tile of logits. Between forward and backward, the operands,
        four to six numbers of four bytes per token, and the cache; of a DTensor, what was gathered. Backward, beyond
        the gradients, dhidden in float32 and a tile of logits; for counts of tokens other than 4096, 8192 and 16384
        also copies of hidden and dhidden, padded to the next power of two (from 32,768 on, or to halfway there). JAX
        keeps its own pool of GPU memory: `init`. The gradients are in it: this function waits for the streams that may
        read one which torch has dropped, JAX code of your own in the same process does not.

    DTensors:
        ``weight`` is gathered in its own dtype over all dimensions of its mesh but that of ``tp_group``, over which it
        must be ``Shard(0)``. Its gradient is the mean over the ranks that gathered it: what FSDP2 and HSDP give their
        parameters, and where all have the same tokens, the gradient itself. Each rank of the mesh must make the call,
        and the backward. ``hidden`` and what is per token must be replicated; the gradient of ``hidden`` is then whole
        on every rank, whatever ``reduce_grad_hidden`` says. Results are plain tensors. ``torch.compile`` breaks the
        graph.

    Numerics:
        Every sum and softmax is float32, each gradient is rounded once. float32 products are as exact as
        ``torch.set_float32_matmul_precision`` or torch's ``fp32_precision`` says. Two runs are bitwise equal.

    Compilation:
        For each set of options XLA compiles one program for the forward (two with ``tp_group``) and, for each set of
        outputs and gradients that a loss uses, at most a dozen for the backward of up to 131,072 tokens, as they are
        met. With ``cache_bytes`` the forward has a dozen, too. A new temperature compiles nothing.

    Example:
        >>> import torch
        >>> from lce_torch_bridge import linear_logprobs
        >>> hidden = torch.randn(2, 3, 16, requires_grad=True)
        >>> weight = torch.zeros(50257, 16, requires_grad=True)   # a uniform distribution
        >>> out = linear_logprobs(hidden, weight, torch.tensor([[1, 2, 3], [4, 5, -100]]))
        >>> [round(x, 3) for x in out.logprobs[1].tolist()]       # -ln 50257, and 0 for a label out of vocabulary
        [-10.825, -10.825, 0.0]
        >>> (out.logprobs - 0.01 * out.entropy).sum().backward()
        >>> weight.grad.shape
        torch.Size([50257, 16])
    """
    _checks.group(tp_group)
    if _dtensor.spans(hidden, tp_group):
        reduce_grad_hidden = True  # its placement says that the gradient is whole
    hidden, labels, temperature, keep = _dtensor.tokens(
        hidden=hidden, labels=labels, temperature=temperature, keep=keep
    )
    _checks.tensors(hidden, weight, labels)
    _checks.temperature(temperature, hidden, labels)
    _checks.keep(keep, hidden, labels)
    keep = _without(ignore_index, keep, labels)
    scalars.one_of("entropy", entropy, ("grad", "metric", "none"))
    scalars.one_of("out_of_vocab", out_of_vocab, ("zero", "megatron"))
    scalars.one_of("wgrad", wgrad, ("return", "main_grad"))
    if _dtensor.is_dtensor(weight):
        weight = _dtensor.rows(weight, tp_group, wgrad)
    shards = 1 if tp_group is None else tp_group.size()
    group = tensor_parallel.name_of(tp_group)
    if not torch.compiler.is_compiling() and _checks.has_values(weight):  # the operator asks again, also compiled
        tensor_parallel.check_equal_parts(weight, group)
    call = Call(
        group=group,
        vocab_size=_checks.vocabulary(vocab_size, weight.shape[0] * shards),
        logit_scale=scalars.number("logit_scale", logit_scale),
        logit_softcap=None if logit_softcap is None else scalars.positive("logit_softcap", logit_softcap),
        entropy=entropy,
        stats=scalars.flag("stats", stats),
        megatron=out_of_vocab == "megatron",
        reduce_grad_hidden=scalars.flag("reduce_grad_hidden", reduce_grad_hidden),
        cache_bytes=scalars.num_bytes("cache_bytes", cache_bytes),
        implementation=_checks.implementation(implementation),
    )
    parameter = weight
    if wgrad == "main_grad":
        weight = accumulate_into_main_grad(weight)
    weight = autocast(weight, parameter)
    rows = None if keep is None else _rows_of(keep)
    flat_hidden = _kept(hidden.reshape(-1, hidden.shape[-1]), rows, 0.0)
    flat_labels = _kept(labels.reshape(-1), rows, 0)
    flat_temperature = _kept(_per_token(temperature, labels), rows, 1.0)
    differentiated = torch.is_grad_enabled() and (flat_hidden.requires_grad or weight.requires_grad)
    keep_cache = differentiated and call.cache_bytes > 0
    function = autograd.LinearLogprobs if torch.compiler.is_compiling() else autograd.Uncompiled
    found = function.apply(flat_hidden, weight, flat_labels, flat_temperature, keep_cache, *call)
    fields: dict[str, Any] = {name: _placed(x, rows, labels) for name, x in zip(call.fields, found, strict=False)}
    return LogprobOutput(**{"entropy": None, **fields})


def linear_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    temperature: float | None = 1.0,
    reduction: Reduction | None = "none",
    dist_process_group: dist.ProcessGroup | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``(logprobs, entropy)`` under the positional signature of verl's ``linear_cross_entropy``.

    The first result is what verl's is, a log-probability, ``z[label] - lse ≤ 0``: the loss is its negative.

    Args:
        hidden: ``[..., H]``, as in `linear_logprobs`.
        weight: ``[V, H]``, this rank's rows.
        labels: hidden's leading shape, or the same but for dimensions of 1, as ``[1, T]`` for ``[T, 1, H]``, or flat.
            ``[b, s]`` for ``[s, b, H]`` is refused. A label outside the vocabulary has logprob 0 (verl's kernel:
            ``-lse`` on a process group, and undefined without one).
        temperature: divides the logits. None: 1.
        reduction: of the log-probabilities: "none" for one per token, "sum", or "mean" over all tokens, out of
            vocabulary or not; in letters of either case. The entropy is never reduced. None: "none".
        dist_process_group: the group over which the vocabulary is split. Each rank's dhidden is its own part, which
            the caller sums, as with verl's kernel.

    Returns:
        Log-probabilities, ``[tokens]`` flat or a scalar, and entropies, ``[tokens]`` flat; float32, both
        differentiable.

    Raises:
        As `linear_logprobs`.

    Memory:
        As `linear_logprobs`.

    Example:
        >>> import torch
        >>> from lce_torch_bridge import linear_cross_entropy
        >>> logprobs, entropy = linear_cross_entropy(torch.ones(2, 3, 8), torch.zeros(100, 8), torch.ones(2, 3).long())
        >>> logprobs.shape, round(logprobs[0].item(), 3), round(entropy[0].item(), 3)
        (torch.Size([6]), -4.605, 4.605)
    """
    reduction = "none" if reduction is None else reduction
    reduction = reduction.lower() if isinstance(reduction, str) else reduction  # type: ignore[assignment]
    scalars.one_of("reduction", reduction, ("none", "sum", "mean"))
    temperature = 1.0 if temperature is None else temperature
    out = linear_logprobs(_like(labels, hidden), weight, labels, tp_group=dist_process_group, temperature=temperature)
    logprobs = out.logprobs.reshape(-1)
    if reduction == "sum":
        logprobs = logprobs.sum()
    elif reduction == "mean":
        logprobs = logprobs.mean()
    assert out.entropy is not None
    return logprobs, out.entropy.reshape(-1)


def _per_token(temperature: float | torch.Tensor, labels: torch.Tensor) -> torch.Tensor | None:
    """One temperature per token, because a number would be compiled in; None for 1.

    Under ``torch.compile`` a number that varies is symbolic. ``torch.full`` and a question whether it is 1 would each
    have the compiler take it for a constant.
    """
    if isinstance(temperature, torch.Tensor):
        return temperature.to(torch.float32).expand(labels.shape).reshape(-1)
    if statically_known_true(temperature == 1.0):
        return None
    return torch.ones(labels.numel(), dtype=torch.float32, device=labels.device) * temperature


def _without(ignore_index: int | None, keep: torch.Tensor | None, labels: torch.Tensor) -> torch.Tensor | None:
    """``keep`` without the tokens that have this label."""
    if ignore_index is None:
        return keep
    counts = labels != scalars.integer("ignore_index", ignore_index)
    if keep is None:
        return counts
    if keep.dtype != torch.bool:
        none = torch.zeros(labels.numel(), dtype=torch.bool, device=labels.device)
        keep = none.index_fill(0, keep.long(), True).view(labels.shape)
    return keep & counts


def _rows_of(keep: torch.Tensor) -> torch.Tensor:
    """The index of the kept rows; a mask, whose other rows are computed for nothing, where they cannot be counted."""
    if keep.dtype != torch.bool:
        return keep
    keep = keep.reshape(-1)
    return keep.nonzero().squeeze(1) if torch.compiler.is_compiling() or _checks.has_values(keep) else keep


def _kept(x: Any, rows: torch.Tensor | None, other: float) -> Any:
    """The kept rows of ``x``, or all with ``other`` in those that a mask leaves out."""
    if x is None or rows is None:
        return x
    if rows.dtype == torch.bool:
        return x.where(rows.view(-1, *(1,) * (x.ndim - 1)), other)
    return x.index_select(0, rows)


def _placed(x: torch.Tensor, rows: torch.Tensor | None, labels: torch.Tensor) -> torch.Tensor:
    """Results in the shape of labels, 0 on tokens that were not kept."""
    if rows is not None and rows.dtype == torch.bool:
        x = x.where(rows, 0.0)
    elif rows is not None:
        x = x.new_zeros(labels.numel()).index_copy(0, rows.long(), x)
    return x if x.shape == labels.shape else x.view(labels.shape)


def _like(labels: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
    """``hidden`` with the leading shape of labels, where the two hold the same tokens in the same order for sure."""
    tensors = isinstance(hidden, torch.Tensor) and isinstance(labels, torch.Tensor)
    if not tensors or not hidden.ndim or hidden.shape[:-1] == labels.shape:
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
