"""`linear_logprobs`, which checks and flattens its arguments, and calls the operator."""

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
def linear_logprobs(  # type: ignore[overload-overlap]  # True is a bool
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
    """Returns per-token log-probability and entropy of a language-model head, without storing the logits.

    With ``z = cap(logit_scale · (hidden · weightᵀ + bias)) / temperature`` in float32 and ``p = softmax(z)`` over the
    vocabulary: ``logprobs = z[label] - lse``, ``entropy = -Σ p ln p`` and ``lse = ln Σ exp(z)`` per token, all in nats.
    With ``candidates``, ``candidate_logprobs[k] = z[candidates[k]] - lse``. All of these results are differentiable,
    once, in ``hidden``, ``weight`` and ``bias``.

    Args:
        hidden: ``[..., H]`` hidden states with any leading shape, including an empty one. bfloat16, float16 or float32,
            on a GPU or the CPU.
        weight: ``[V, H]``, this rank's rows of the head. A weight that is not contiguous is copied in each call. Matrix
            products run in the weight's dtype. Under ``torch.autocast`` the weight is first cast to autocast's dtype,
            and all calls within the context share this copy, as with ``torch.nn.functional.linear``.
        labels: ``[...]`` integers of any type: vocabulary ids, global even when the vocabulary is split.
        bias: ``[V]``, this rank's part; bfloat16, float16 or float32. It is added to the products in float32, also
            under autocast, which does not cast it. Its gradient is returned to autograd, whatever ``wgrad`` is. The
            kernels do not support a bias: ``implementation=None`` then uses "xla". None: no bias.
        tp_group: the process group over which the vocabulary is split into parts of the same size. Rank r holds part r.
            All ranks pass the same ``hidden``, ``labels`` and options, and get bitwise-equal results. None: ``weight``
            is the full weight.
        temperature: divides the float32 logits. It is a positive number, or a float tensor that broadcasts to
            ``labels`` (one value per token, or per sequence as ``[b, 1]``), and has no gradient. A tensor's values must
            be positive and finite. They are checked only on the CPU and outside of ``torch.compile``; elsewhere, a
            token with an invalid temperature gets NaN results and no gradient, and other tokens are unaffected.
        logit_scale: multiplies the float32 logits, before cap and temperature (MuP, Cohere).
        logit_softcap: ``c`` in ``cap(x) = c·tanh(x / c)``, before the temperature (Gemma 2: 30). None: no cap.
        vocab_size: the true size of the vocabulary of all ranks together. Columns from ``vocab_size`` on are padding:
            no sum includes them, and their gradient is zero, whatever values they hold. None: every column counts, as
            in Megatron's own cross entropy.
        entropy: True computes it with a gradient; "metric" without a gradient, which makes the backward cheaper. False:
            ``.entropy`` is None and costs nothing.
        stats: True fills ``.max_logit`` and ``.min_logit``, the largest and smallest ``z``, and ``.sum_p_squared``, Σ
            p² over the vocabulary (verl's ``sum_pi_squared``). They have no gradient.
        mean_logit: True fills ``.mean_logit``, the mean of ``z`` over the true vocabulary, with a gradient. Label
            smoothing needs it (`linear_cross_entropy`). The kernels do not support it together with a cap.
        candidates: ``[..., K]`` integers of any type, K from 1 to 512: further vocabulary ids of each token, such as a
            teacher's most likely ones. The ids are global even when the vocabulary is split. Their log-probabilities
            under the full vocabulary are returned too. -1 stands for no id. None: ``.candidate_logprobs`` is None and
            costs nothing.
        where: the tokens that count: a bool tensor of ``labels``' shape, or the row indices of the flattened tokens,
            without repetitions (int64 or int32). Other tokens have 0 as results and no gradient. Time and memory
            decrease with the number of tokens that count, and results of these tokens have the same bits as without
            ``where``. For a bool tensor, the host waits until the GPU has counted it; no rows are copied if it masks no
            token. For an index on a GPU, the host does not wait and does not check: a row that occurs twice counts
            twice in the gradients. A bool tensor without values (meta, fake) cannot be counted, so the call costs as
            much as with all tokens. None: all tokens count.
        ignore_index: tokens with this label (-100 is PyTorch's) do not count, as with a bool ``where``. The host waits
            until the GPU has counted them. None: all tokens count, even those with a label outside the vocabulary.
        out_of_vocab: the logprob of a label outside the vocabulary (negative, -100, ≥ vocab_size): 0 with "zero",
            ``max_logit - lse`` with "megatron", as in Megatron's cross entropy. In both cases the logprob's gradient is
            that of ``-lse``, as in Megatron.
        reduce_grad_hidden: True sums dhidden, the gradient of ``hidden``, over ``tp_group`` in float32, and rounds the
            sum once. Use it for tensor parallelism without sequence parallelism, where no later step sums dhidden.
            False: each rank's dhidden is its own term of the sum.
        wgrad: "return" returns the weight's gradient to autograd. "main_grad" adds it to ``weight.main_grad``, as
            Megatron's gradient-accumulation fusion does, and sets ``grad_added_to_main_grad``. A call that is launched
            directly (see `explain`) adds unrounded products if ``main_grad`` is float32, contiguous and aligned to 16
            bytes, and if autocast does not cast the weight. Otherwise the gradient is rounded to the weight's dtype
            before it is added. ``torch.compile`` does not support "main_grad".
        cache_bytes: the bytes that the forward may cache, so that the backward recomputes less. 0: no cache. None: 1
            GiB on a GPU if a gradient is requested, else 0; in a traced call and with ``gradient_threshold`` or
            ``vocab_part_size``, always 0. `explain` shows the value. A non-reentrant activation checkpoint drops the
            cache until it runs the forward again. A forward with a cache processes all tokens at once. If JAX runs this
            forward, results may differ in the last bits from results without a cache. Under ``torch.compile`` a call
            with a cache needs one graph for each number of tokens, and ``where`` must be an index.
        gradient_threshold: a number in [0, 1). A tile (128 tokens by 256 vocabulary columns) is left out of the
            gradients if all its probabilities are below the threshold and it contains no label or candidate. Results
            never change. With 0, gradients are exact. Only "mosaic_gpu" leaves tiles out; its forward then saves V / 64
            bytes per token. `lce_jax` reports how much probability was left out (``dropped_mass``). Under
            ``torch.compile`` a threshold has the same limits as ``cache_bytes``.
        vocab_part_size: the number of columns of a part of the vocabulary, a multiple of 8 (128 before Hopper). The
            kernels' tiles start again at each part's first column, so calls that are launched directly (see `explain`)
            have the same bits for any number of ranks. Pass the number of rows of the smallest shard over all
            ``tp_group`` sizes that you use. Shards must consist of full parts; only a vocabulary that is not split may
            end inside a part. This option is an error with ``cache_bytes`` or ``gradient_threshold``. None: each rank's
            rows are one part.
        logit_floor: a number f, or a float tensor that broadcasts to ``labels``, in logits. The distribution is then
            over a set: the label and all vocabulary tokens v with ``z[v] >= f``, such as those that top-k, top-p or
            min-p sampling leaves. -inf leaves all tokens. Gradients are 0 outside of the set, and ``stats=True`` fills
            ``support``, the size of the set. A row whose set is empty (its label is out of vocabulary too) has outputs
            and gradients of 0. If the host can read the floor, a NaN raises; otherwise its row returns NaN. The floor
            has no gradient, and is an error with ``candidates`` or ``mean_logit``. `lce_jax.floors` computes floors.
            None: no floor.
        implementation: "mosaic_gpu" (kernels for NVIDIA GPUs), "xla" (every device), or a tuple of both, tried in
            order. None: the best one that supports the call.
        lora: ``(A, B, scale)``, an adapter of a weight that requires no gradient: A ``[r, H]`` and B ``[V, r]`` as in
            PEFT's ``lora_A.weight`` and ``lora_B.weight``; scale is a number. The products are ``hidden · weightᵀ + u ·
            Bᵀ`` with ``u = scale · hidden · Aᵀ``. The weight is not copied and has no gradient. A and B have gradients
            in their own dtypes. ``scale · A``, B and u are rounded to the weight's dtype, r is padded to a multiple of
            64, and hidden and u are copied into one tensor. An adapter is an error with ``bias``, ``tp_group`` or
            ``wgrad="main_grad"``. None: no adapter.
        **unknown: an error; the message names the option that may be meant.

    Returns:
        A `LogprobOutput`, each field float32 of ``labels.shape`` (``[..., K]`` for candidates) or None.

    Raises:
        lce_jax.UnsupportedError: an implementation requested by name cannot run the call; the message says why.
        ValueError, TypeError: shapes, dtypes, devices or options do not fit; the message has their values. The first
            call of a ``tp_group`` also raises if the ranks' vocabulary parts differ in size or overlap, or if the
            ranks' tokens differ. In later calls, such a difference gives NaN results and gradients on all ranks: in
            rows whose labels, temperatures, floors or candidates differ, and in all rows if the sizes differ. Different
            options on the ranks raise in the group's first call, in the first call of each function, and whenever the
            options are new on every rank. If one rank repeats options while another has new ones, the difference is not
            noticed.
        NotImplementedError: a second derivative, a forward-mode derivative or ``torch.func.vmap`` is requested
            (``torch.func.grad`` and ``vjp`` work).
        RuntimeError: under CUDA graph capture, unless the call is launched directly (`explain`) and has run before with
            tensors of these shapes; in a forked child of a process that has used JAX; if ``weight`` or ``hidden`` was
            changed in place between forward and backward; if the memory of a tensor was freed, as FSDP and ZeRO free
            parameters that are not in use; if two threads differentiate one graph, unless both use ``retain_graph``.
        RuntimeWarning: no label that counts lies in the vocabulary. Labels are checked only if they can be read without
            waiting: on the CPU, and outside of a trace. Labels that are all -100 are padding, and do not warn.

    Memory:
        The forward holds a tile of logits and two copies of the hidden states of 8192 tokens. A call of exactly 4096 or
        8192 tokens that is launched directly without ``tp_group`` makes no copies. Between forward and backward the
        call saves the operands (for a DTensor, the gathered tensor), four to six values of four bytes per token, two
        more per candidate, and the cache. Besides the gradients, the backward holds a tile of logits, and dhidden in
        float32. If the number of tokens is not a power of two, it also holds copies of hidden and dhidden, padded to
        128, 512, or a power of two from 2048 on (from 32,768 on, also to sizes halfway between two powers). If the call
        is launched directly, all memory comes from torch's allocator, and a backward without ``retain_graph`` computes
        in the memory of the cache. Otherwise JAX keeps its own pool of GPU memory (`init`), which also holds the
        gradients. Before JAX reuses the memory of a gradient that torch has dropped, this function waits for the
        streams that may still read the gradient; JAX code of your own does not wait.

    DTensors:
        ``weight`` and ``bias`` are gathered in their own dtypes over all dimensions of their mesh except the dimension
        of ``tp_group``, over which they must be ``Shard(0)``. Their gradients are means over the ranks that gathered
        them, as FSDP2 and HSDP define a parameter's gradient; if all ranks have the same tokens, the mean is each
        rank's gradient. Every rank of the mesh must make the call and run the backward. ``hidden`` and the per-token
        arguments must be replicated. The gradient of a replicated ``hidden`` is replicated too, whatever
        ``reduce_grad_hidden`` is. Results are plain tensors. A DTensor breaks the graph of ``torch.compile``.

    Numerics:
        Every sum and softmax is float32, and each gradient is rounded once. float32 products are as exact as
        ``torch.set_float32_matmul_precision`` or torch's ``fp32_precision`` asks. Two runs are bitwise equal.

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
    arguments = _arguments.parse_arguments(hidden, weight, labels, options)
    _checks.warn_of_labels(arguments.labels, arguments.where, arguments.call.jax.vocab_size)
    return compute(arguments, wgrad)


def compute(arguments: Arguments, wgrad: Wgrad) -> LogprobOutput:
    """Runs the call that ``arguments`` describes, and returns its results in the shape of the labels."""
    x, rows = _arguments.flatten_operands(arguments, _arguments.prepare_weight(arguments, wgrad))
    results: dict[str, Any] = _operators.apply(x, arguments.call)
    if rows is not None or arguments.labels.ndim != 1:
        results = {name: _arguments.place_results(y, rows, arguments.labels) for name, y in results.items()}
    return LogprobOutput(entropy=results.pop("entropy", None), **results)
