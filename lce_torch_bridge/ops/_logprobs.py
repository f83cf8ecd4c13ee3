"""`linear_logprobs`: validate, flatten, call the operator."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, Never, Unpack, overload

import torch

from lce_torch_bridge._types import Entropy, LogprobOutput, Lora, OutOfVocab, Wgrad
from lce_torch_bridge.call import _arguments, _checks
from lce_torch_bridge.call._arguments import Arguments, Options
from lce_torch_bridge.operators import _operators

if TYPE_CHECKING:
    import torch.distributed as dist

    from lce_torch_bridge._types import PerhapsWithoutEntropy
    from lce_torch_bridge.call._arguments import OptionsWithoutEntropy


@overload
def linear_logprobs(  # type: ignore[overload-overlap]  # bool has True in it
    hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, *,
    entropy: Literal[True, "metric"] = True, **options: Unpack[OptionsWithoutEntropy],
) -> LogprobOutput: ...  # fmt: skip
@overload
def linear_logprobs(
    hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, *,
    entropy: Entropy, **options: Unpack[OptionsWithoutEntropy],
) -> PerhapsWithoutEntropy: ...  # fmt: skip
def linear_logprobs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    tp_group: dist.ProcessGroup | None = None,
    temperature: float | torch.Tensor = 1.0,
    logit_scale: float = 1.0,
    logit_softcap: float | None = None,
    vocab_size: int | None = None,
    entropy: Entropy = True,
    stats: bool = False,
    mean_logit: bool = False,
    candidates: torch.Tensor | None = None,
    where: torch.Tensor | None = None,
    ignore_index: int | None = None,
    out_of_vocab: OutOfVocab = "zero",
    reduce_grad_hidden: bool = False,
    wgrad: Wgrad = "return",
    cache_bytes: int | None = None,
    gradient_threshold: float = 0.0,
    vocab_part_size: int | None = None,
    logit_floor: float | torch.Tensor | None = None,
    implementation: str | tuple[str, ...] | None = None,
    lora: Lora | None = None,
    **unknown: Never,
) -> LogprobOutput:
    """Per-token log-probability and entropy of a language-model head, without storing the logits.

    With ``z = cap(logit_scale · (hidden · weightᵀ + bias)) / temperature`` in float32 and ``p = softmax(z)`` over the
    vocabulary: ``logprobs = z[label] - lse``, ``entropy = -Σ p ln p`` and ``lse = ln Σ exp(z)`` per token, all in nats.
    With ``candidates``, ``candidate_logprobs[k] = z[candidates[k]] - lse``. Differentiable, once, in ``hidden``,
    ``weight`` and ``bias`` through all of them.

    Args:
        hidden: ``[..., H]`` hidden states; any leading shape, also an empty one. bfloat16, float16 or float32, on a GPU
            or the CPU.
        weight: ``[V, H]``, this rank's rows of the head; copied for each call if it is not contiguous. Its dtype is
            that of the matrix products. Under ``torch.autocast`` it is cast to autocast's dtype first, and all calls
            of the context share the copy, as with ``torch.nn.functional.linear``.
        labels: ``[...]`` integers of any type: vocabulary ids, global also when the vocabulary is split.
        bias: ``[V]``, this rank's part; bfloat16, float16 or float32. Added to the raw products in float32, also under
            autocast, which leaves it as it is. Its gradient goes to autograd, whatever ``wgrad`` says. The kernels do
            not serve it: ``implementation=None`` then takes "xla". None: no bias.
        tp_group: the process group over which the vocabulary is split into parts of the same size; rank r holds the
            r-th. All ranks pass the same ``hidden``, ``labels`` and options, and get bitwise-equal results. None:
            ``weight`` is whole.
        temperature: divides the float32 logits: a positive number, or a float tensor that broadcasts to ``labels`` (one
            value per token, or per sequence as ``[b, 1]``). No gradient. A tensor's values are looked at only on the
            CPU and outside ``torch.compile``: there, one that is not positive and finite is refused. Elsewhere its
            token's results are NaN without a gradient, and the other tokens are not affected.
        logit_scale: multiplies the float32 logits first (MuP, Cohere).
        logit_softcap: ``c`` in ``cap(x) = c·tanh(x / c)``, before the temperature (Gemma 2: 30). None: no cap.
        vocab_size: the true size of the vocabulary of all ranks together. Columns from it on are padding: in no sum,
            with zero gradient, whatever they hold. None: every column counts, as in Megatron's own cross entropy.
        entropy: True; "metric" computes it without a gradient, which makes the backward cheaper; False: ``.entropy`` is
            None and costs nothing.
        stats: True fills ``.max_logit`` and ``.min_logit``, extremes of ``z``, and ``.sum_p_squared``, Σ p² over the
            vocabulary (verl's ``sum_pi_squared``). They have no gradient.
        mean_logit: True fills ``.mean_logit``, the mean of ``z`` over the true vocabulary, with a gradient. Label
            smoothing needs it (`linear_cross_entropy`). The kernels do not serve it together with a cap.
        candidates: ``[..., K]`` integers of any type: vocabulary ids per token, global also when the vocabulary is
            split, whose log-probabilities under the whole vocabulary are wanted too, such as a teacher's most likely
            tokens; K from 1 to 512. -1 stands for none. None: ``.candidate_logprobs`` is None and costs nothing.
        where: the tokens that count: bool of ``labels``' shape, or the rows of the flattened tokens, each at most once
            (int64 or int32). The others are 0 and have no gradient. Time and memory fall with the tokens that count,
            whose results have the same bits as without ``where``. The host waits for the GPU to count a bool tensor,
            and copies no rows where it leaves none out. It does not wait for an index on a GPU, nor check it: a row
            that is named twice counts twice in the gradients.
            A bool tensor without values (meta, fake) cannot be counted, and costs as much as all tokens. None: all.
        ignore_index: tokens with this label (-100 is PyTorch's) are left out, as with a bool ``where``; the host waits
            for their count. None: no label leaves its token out, not even one outside the vocabulary.
        out_of_vocab: the logprob of a label outside the vocabulary (negative, -100, ≥ vocab_size): 0 with "zero",
            ``max_logit - lse`` with "megatron", as in Megatron's cross entropy. Either way the gradient is the gradient
            of ``-lse``, as in Megatron.
        reduce_grad_hidden: True sums dhidden, the gradient of ``hidden``, over ``tp_group`` in float32, rounded once:
            for tensor parallelism without sequence parallelism, where no later step sums it. False: each rank's dhidden
            is its own part of the sum.
        wgrad: "return" gives the weight its gradient. "main_grad" adds it to ``weight.main_grad``, as Megatron's
            gradient-accumulation fusion does, and sets ``grad_added_to_main_grad``. A call that is launched directly
            (`explain`) adds the gradient to a float32 ``main_grad`` as it computes, if ``main_grad`` is contiguous,
            aligned to 16 bytes and autocast does not cast the weight. Otherwise the gradient is rounded to the weight's
            dtype first. Not under ``torch.compile``.
        cache_bytes: bytes that the forward may keep, so that the backward recomputes less. 0 keeps nothing. None: 1 GiB
            on a GPU where a gradient is asked for, nothing elsewhere, nor with ``gradient_threshold`` or
            ``vocab_part_size``, nor in what is traced (`explain` says which). A non-reentrant activation checkpoint
            drops it until it runs the forward again. A forward that keeps something takes all tokens at once, and its
            results may differ in the last bits from one that does not, if JAX runs it. Under ``torch.compile`` each
            count of tokens then has a graph of its own, and ``where`` must be an index.
        gradient_threshold: a number in [0, 1). A tile (128 tokens by 256 vocabulary columns) is left out of the
            gradients if all its probabilities are below the threshold and it holds no label and no candidate. Results
            never change. 0 is exact. "mosaic_gpu" alone leaves tiles out; its forward then keeps V / 64 bytes per
            token. `lce_jax` tells how much probability was left out (``dropped_mass``). Under ``torch.compile``: as
            ``cache_bytes``.
        vocab_part_size: columns of a part of the vocabulary, a multiple of 8 (128 before Hopper). The kernels' tiles
            begin anew at each part's first column, so calls that are launched directly (`explain`) have the same bits
            over any number of ranks. Give the rows of the smallest shard that any ``tp_group`` has. Ranks must have
            whole parts; only a vocabulary that is not split may end inside one. Not with ``cache_bytes`` or
            ``gradient_threshold``. None: each rank's rows are one part.
        logit_floor: a number f, or a float tensor that broadcasts to ``labels``, in logits. The distribution is then
            over the set of the tokens v with ``z[v] >= f`` and the label, as top-k, top-p or min-p sampling leaves it.
            -inf leaves all. Gradients are 0 outside of the set, and ``stats=True`` fills ``support``, the number of
            tokens in it. An empty set, of a label out of vocabulary, has 0 in outputs and gradients. A NaN is refused
            where its value is known; elsewhere its row returns NaN. Not with ``candidates`` or ``mean_logit``. No
            gradient. `lce_jax.floors` says where floors come from. None: every token.
        implementation: "mosaic_gpu" (kernels for NVIDIA GPUs), "xla" (every device), or a tuple of both, tried in
            order. None: the best one that can serve the call.
        lora: ``(A, B, scale)``, an adapter of a weight that requires no gradient: A ``[r, H]`` and B ``[V, r]``, as
            PEFT's ``lora_A.weight`` and ``lora_B.weight``, and a number. The products are ``hidden · weightᵀ + u · Bᵀ``
            with ``u = scale · hidden · Aᵀ``. The weight is not copied and has no gradient; A and B have theirs in their
            own dtypes. ``scale · A``, B and u are rounded to the weight's dtype; r is padded to whole 64, and hidden is
            copied beside u. Not with ``bias``, ``tp_group`` or ``wgrad="main_grad"``. None: no adapter.
        **unknown: refused; the message names the option that may be meant.

    Returns:
        A `LogprobOutput`, each field float32 of ``labels.shape`` (``[..., K]`` for candidates) or None.

    Raises:
        lce_jax.UnsupportedError: an implementation asked for by name cannot serve the call; the message says why.
        ValueError, TypeError: shapes, dtypes, devices or options that do not fit, with the offending values. Over a
            ``tp_group`` also, in its first call, ranks whose parts of the vocabulary are of different sizes or the same
            columns, or whose tokens differ. In later calls results and gradients are NaN on all ranks: in rows whose
            labels, temperatures, floors or candidates differ between ranks, and in all rows if the sizes do. Ranks
            whose options differ raise in the group's first call, in the first call of each function, and whenever every
            rank's options are new to the group. A rank that repeats options while another has new ones is not noticed.
        NotImplementedError: on a second derivative, in forward mode, and under ``torch.func.vmap``
            (``torch.func.grad`` and ``vjp`` work).
        RuntimeError: under CUDA graph capture, unless the call is launched directly (`explain`) and has run before with
            tensors of these shapes; in a forked child of a process that has used JAX; if ``weight`` or
            ``hidden`` was changed in place between forward and backward; if the memory of a tensor was freed, as FSDP
            and ZeRO free parameters that are not in use; if two threads differentiate one graph, not both with
            ``retain_graph``.
        RuntimeWarning: no label that counts lies in the vocabulary, of a call whose labels can be read without waiting:
            they are on the CPU, and nothing traces the call. -100 alone is padding, and does not warn.

    Memory:
        The forward holds a tile of logits and two copies of 8192 tokens' hidden. There are no copies of exactly 4096 or
        8192 tokens that are launched directly without ``tp_group``. Between forward and backward the call keeps the
        operands (of a DTensor, what was gathered), four to six numbers of four bytes per token, two more per candidate,
        and the cache. The backward holds, beyond the gradients, a tile of logits and dhidden in float32. If the count
        of tokens is no power of two, it also holds copies of hidden and dhidden, padded to 128, 512, or the next power
        of two from 2048 on (from 32,768 on, or to halfway there).
        If the call is launched directly, torch's allocator gives all memory, and a backward without ``retain_graph``
        computes in the memory of the cache. Otherwise JAX keeps its own pool of GPU memory (`init`), which also holds
        the gradients. Before JAX reuses a gradient that torch has dropped, this function waits for the streams that may
        still read the gradient; JAX code of your own does not.

    DTensors:
        ``weight`` is gathered in its own dtype over all dimensions of its mesh but that of ``tp_group``, over which it
        must be ``Shard(0)``; ``bias`` likewise. Their gradients are the mean over the ranks that gathered them: what
        FSDP2 and HSDP give their parameters, and the gradient itself if all ranks have the same tokens. Each rank of
        the mesh must make the call, and the backward. ``hidden`` and the per-token arguments must be replicated; the
        gradient of ``hidden`` is then whole on every rank, whatever ``reduce_grad_hidden`` says. Results are plain
        tensors. A DTensor breaks the graph of ``torch.compile``.

    Numerics:
        Every sum and softmax is float32, each gradient is rounded once. float32 products are as exact as
        ``torch.set_float32_matmul_precision`` or torch's ``fp32_precision`` says. Two runs are bitwise equal.

    Compilation:
        Programs are compiled when they are first needed. Each set of options has one program for the forward (two with
        ``tp_group``, up to three if it is launched directly, up to a dozen with ``cache_bytes``). For each set of
        outputs and gradients that a loss uses, the backward of up to 131,072 tokens has at most a dozen programs. A new
        temperature compiles nothing.

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
    _arguments.check_unknown(linear_logprobs, unknown)
    options = Options(
        bias=bias,
        tp_group=tp_group,
        temperature=temperature,
        logit_scale=logit_scale,
        logit_softcap=logit_softcap,
        vocab_size=vocab_size,
        entropy=entropy,
        stats=stats,
        mean_logit=mean_logit,
        candidates=candidates,
        where=where,
        ignore_index=ignore_index,
        out_of_vocab=out_of_vocab,
        reduce_grad_hidden=reduce_grad_hidden,
        wgrad=wgrad,
        cache_bytes=cache_bytes,
        gradient_threshold=gradient_threshold,
        vocab_part_size=vocab_part_size,
        logit_floor=logit_floor,
        implementation=implementation,
        lora=lora,
    )
    given = _arguments.of_call(hidden, weight, labels, options)
    _checks.warn_of_labels(given.labels, given.where, given.call.jax.vocab_size)
    return compute(given, wgrad)


def compute(given: Arguments, wgrad: Wgrad) -> LogprobOutput:
    """The results of checked arguments."""
    x, rows = _arguments.operands(given, _arguments.weight_of(given, wgrad))
    found: dict[str, Any] = _operators.apply(x, given.call)
    if rows is not None or given.labels.ndim != 1:
        found = {name: _arguments.placed(result, rows, given.labels) for name, result in found.items()}
    return LogprobOutput(entropy=found.pop("entropy", None), **found)
