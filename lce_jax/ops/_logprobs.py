"""`linear_logprobs`: each token's log-probability and entropy; `compute_results`: the same results, for losses."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, Never, Unpack, overload

import jax.numpy as jnp

from lce_jax.call import _describe, _options
from lce_jax.call._options import Arguments
from lce_jax.mesh import _collectives
from lce_jax.run import _runner
from lce_jax.run._shard import LOGPROBS
from lce_jax.types._types import LogprobOutput, Results

if TYPE_CHECKING:
    from jax.lax import PrecisionLike

    from lce_jax.call._options import OptionsWithoutEntropy
    from lce_jax.mesh._layout import Axes
    from lce_jax.types._shapes import Array, ArrayLike, Bool, Float, Int
    from lce_jax.types._types import PerhapsWithoutEntropy


@overload
def linear_logprobs(  # type: ignore[overload-overlap]  # bool has True in it
    hidden: Float[ArrayLike, "*b H"], weight: Float[ArrayLike, "V H"], labels: Int[ArrayLike, "*b"], *,
    where: Bool[ArrayLike, "*b"] | None = None, ignore_index: int | None = None,
    entropy: Literal[True] = True, **options: Unpack[OptionsWithoutEntropy],
) -> LogprobOutput: ...  # fmt: skip
@overload
def linear_logprobs(
    hidden: Float[ArrayLike, "*b H"], weight: Float[ArrayLike, "V H"], labels: Int[ArrayLike, "*b"], *,
    where: Bool[ArrayLike, "*b"] | None = None, ignore_index: int | None = None,
    entropy: bool, **options: Unpack[OptionsWithoutEntropy],
) -> PerhapsWithoutEntropy: ...  # fmt: skip
def linear_logprobs(
    hidden: Float[ArrayLike, "*b H"],
    weight: Float[ArrayLike, "V H"],
    labels: Int[ArrayLike, "*b"],
    *,
    where: Bool[ArrayLike, "*b"] | None = None,
    ignore_index: int | None = None,
    temperature: float | Float[ArrayLike, "..."] = 1.0,
    logit_softcap: float | Float[ArrayLike, ""] | None = None,
    logit_scale: float | Float[ArrayLike, ""] = 1.0,
    entropy: bool = True,
    stats: bool = False,
    vocab_size: int | None = None,
    weight_layout: Literal["vh", "hv"] = "vh",
    axis_name: Axes = None,
    cache_bytes: int | None = None,
    precision: PrecisionLike = None,
    implementation: str | tuple[str, ...] | None = None,
    bias: Float[ArrayLike, "V"] | None = None,
    candidates: Int[ArrayLike, "*b K"] | None = None,
    gradient_threshold: float = 0.0,
    vocab_part_size: int | None = None,
    logit_floor: float | Float[ArrayLike, "..."] | None = None,
    lora: tuple[Float[ArrayLike, "r H"], Float[ArrayLike, "V r"], float | Float[ArrayLike, ""]] | None = None,
    **unknown: Never,
) -> LogprobOutput:
    """Per-token log-probability and entropy of a language-model head, without storing the logits.

    The logits are ``z = cap(logit_scale · (hidden · weightᵀ + bias)) / temperature`` in float32, and ``p = softmax(z)``
    over the vocabulary. Returns ``logprobs = z[label] - lse``, ``entropy = -Σ p ln p`` and ``lse = ln Σ exp(z)`` per
    token, all in nats, and with ``candidates`` also ``candidate_logprobs = z[candidates] - lse``. All four have first
    derivatives with respect to ``hidden``, ``weight`` and ``bias``.

    No label is ignored by default. Give ``ignore_index=-100`` to ignore the labels that PyTorch ignores.

    Args:
        hidden: ``[..., H]`` hidden states with any leading shape, even an empty one, in bfloat16, float16, float32 or
            float64. They are cast to the weight's dtype for the matrix products.
        weight: ``[V, H]`` weight of the head (``[H, V]`` with ``weight_layout="hv"``). Its dtype is that of the matrix
            products.
        labels: ``[...]`` integer vocabulary ids; they stay global ids if the vocabulary is split. A label outside the
            vocabulary (negative, or at least V) has logprob 0, with the gradient of ``-lse``; its row counts unless
            ``ignore_index`` excludes it.
        where: ``[...]`` bool, the rows that count. The others are exactly 0 in outputs and gradients, whatever they
            hold, and cost no work. None: every row counts.
        ignore_index: rows with this label do not count, as in PyTorch. None: every label counts; a label outside the
            vocabulary has logprob 0.
        temperature: the divisor of the float32 logits: a positive number, or an array that broadcasts to ``labels``
            (one value per token, or per sequence as ``[b, 1]``). It has no gradient. A value that is not positive and
            finite raises an error; in a traced array it makes its row NaN, without a gradient, and other rows are not
            affected.
        logit_softcap: ``c`` in ``cap(x) = c·tanh(x / c)``, which is applied before the temperature (Gemma 2: 30): a
            positive number, or an array of shape (), which may be traced. It has no gradient. None: no cap.
        logit_scale: the factor by which the float32 logits are first multiplied (Cohere, MuP): a number, or an array of
            shape (), which may be traced. It has no gradient.
        entropy: False: ``.entropy`` is None and costs nothing.
        stats: True adds ``.max_logit`` and ``.min_logit`` (the extremes of ``z``), ``.correct`` (whether the label's
            logit is the largest; token accuracy is ``out.correct.mean()``), ``.sum_p_squared`` (Σ p² over the
            vocabulary), ``.dropped_mass`` (only with a ``gradient_threshold``) and ``.support`` (only with a
            ``logit_floor``). These fields have no gradient.
        vocab_size: the true size of the vocabulary. Columns from this index on are padding: no sum includes them, and
            their gradient is zero, whatever they hold. None: every column counts.
        weight_layout: "vh" for ``[V, H]`` (nnx.Embed, PyTorch, Megatron), "hv" for ``[H, V]`` (nnx.Linear kernel).
        axis_name: inside ``shard_map``, the mesh axis (or tuple of axes) that splits the vocabulary. Each shard passes
            its own columns of ``weight`` and the same ``hidden`` and ``labels``, and all shards return bitwise-equal
            results. Rows in which the shards differ return NaN, and so do their gradients. If two shards pass the same
            columns, all rows return NaN. None: ``weight`` has the full vocabulary.
        cache_bytes: bytes per device that the forward may keep, so that the backward recomputes less. The forward keeps
            the exponentials of the first vocabulary tiles, in the weight's dtype (float32 on a CPU). 0 keeps nothing. A
            call that is not differentiated keeps nothing either. None: up to 1 GiB on a GPU; 0 elsewhere, under
            ``vmap``, over Auto axes, and on a machine with several devices if tracing sees no mesh. Inside ``jit``, the
            backward may overwrite the cache; outside ``jit``, it overwrites a copy. Kernels overwrite it if V is a
            multiple of 8 (128 before Hopper), and "xla" does if all tiles are cached and no row or column is masked.
        precision: precision of the matrix products with float32 operands. The default may be TF32 (GPU) or bfloat16
            (TPU); "highest" is exact to float32 rounding.
        implementation: "mosaic_gpu" (kernels for NVIDIA GPUs), "xla" (every device), or a tuple of both, tried in
            order. None: the best one that can serve the call; its name is logged once (logger ``lce_jax``). `explain`
            shows the choice and the reasons.
        bias: ``[V]``, added to the float32 products before the scale, and split like the weight's vocabulary. Its
            gradient is summed in float32 and rounded once. "mosaic_gpu" does not support it. None: no bias.
        candidates: ``[..., K]`` integer vocabulary ids per token, global like labels, with K from 1 to 512. The call
            then returns ``.candidate_logprobs`` too. -1 stands for no candidate. The result is 0, without a gradient,
            for -1 and for an id outside the vocabulary. A token may have the same id twice. None: no candidates.
        gradient_threshold: a number in [0, 1). The gradients leave out a tile (128 tokens by 256 vocabulary columns) if
            all its probabilities are below this number and it holds no label or candidate. All other tiles contribute
            exactly, and results never change. With 0, no tile is left out. Only "mosaic_gpu" leaves tiles out.
        vocab_part_size: how many columns each part of the vocabulary has, a multiple of 8 (128 before Hopper). The
            kernels begin a new tile at the first column of each part, so results have the same bits over any number of
            shards. Give the number of columns of the smallest shard that any of your meshes or process groups has. A
            shard must consist of complete parts; only a vocabulary that is not split may end inside a part. It is
            refused with ``cache_bytes`` or ``gradient_threshold``. Only "mosaic_gpu" guarantees these bits; other
            implementations ignore the option.
            None: each shard is one part.
        logit_floor: a logit f, as a number or an array that broadcasts to ``labels``. The softmax then covers only the
            label and the tokens v with ``z[v] >= f``, as after top-k, top-p or min-p sampling. The floor is a logit
            because a logit is one product. A probability contains a sum over V, which another program may round
            differently. `lce_jax.floors` makes floors and says what happens at the boundary. ``logprobs``, ``entropy``,
            ``lse`` and the extremes refer to this set, gradients outside the set are 0, and ``stats=True`` returns the
            size of the set as ``.support``. If the set is empty (no logit reaches f, and the label is outside the
            vocabulary), the row's outputs and gradients are 0. With -inf, every token is in the set. A NaN raises an
            error; in a traced array it makes its row NaN, without a gradient. The floor has no gradient, and is refused
            with ``candidates``.
            None: every token.
        lora: ``(A, B, scale)``, an adapter of a frozen weight. A is ``[r, H]`` and B is ``[V, r]``, like PEFT's
            ``lora_A.weight`` and ``lora_B.weight``; scale is a scalar. The products are ``hidden · weightᵀ + u · Bᵀ``
            with ``u = scale · hidden · Aᵀ``. The weight is not copied and has no gradient
            (``jax.lax.stop_gradient(weight)``). A and B have gradients in their own dtypes; the scale has none.
            ``scale · A``, B and u are rounded to the weight's dtype. r is padded to a multiple of 64, and hidden is
            copied, because u is appended to it. An adapter is refused with ``bias``. None: no adapter.
        **unknown: raises an error that suggests the intended option.

    Returns:
        A `LogprobOutput`. Its fields have the shape of ``labels`` (``.candidate_logprobs`` is ``[..., K]``) and are
        float32 (float64 for a float64 weight) or bool. A field that was not requested is None.

    Raises:
        UnsupportedError: a requested implementation cannot serve the call; the message says why.
        ValueError, TypeError: shapes, dtypes or options do not fit; the message has the values.
        NotImplementedError: for a second derivative, and for forward mode (``jax.jvp``).
        RuntimeWarning: no row that counts has a label in the vocabulary. This is checked only outside ``jit``, and only
            for labels that can be read without waiting: NumPy arrays, and arrays that are on a CPU and already
            computed. There is no warning if all labels are -100, because they are padding.

    Memory:
        The forward takes O(T + tile) beyond the operands, and the backward O(T·H + tile) beyond the gradients. Neither
        takes T·V. Between the passes, the call keeps a few values per token, and the cache. Candidates add O(T·K).
        `explain` gives the bytes. An operand that is not differentiated has no gradient, and costs no matrix product.

    Numerics:
        Every sum and softmax is float32. dlogits are rounded at most once, to the weight's dtype, before the gradient
        products. Each gradient is rounded once, to its operand's dtype. (Data-parallel shards round dweight before it
        is summed over them, as JAX's own transposes do.) Two runs are bitwise equal. Logits must be finite and within
        ±1e30.

    Sharding:
        Under ``jit`` on a mesh, the call is partitioned like a matrix product, over batch, sequence and vocabulary: by
        the operands' types over Explicit axes, by XLA over Auto axes. Over Auto axes ``cache_bytes`` keeps nothing, and
        TPUs refuse Auto axes. If an axis splits both tokens and vocabulary, hidden or weight is gathered over it,
        whichever takes less memory. A split H is gathered. `sharded_linear_logprobs` takes the axes by name. Inside
        ``shard_map``, give ``axis_name``. Labels, ``where`` and temperature may have types that vary over this axis if
        every shard holds the same values. Rows with different values return NaN.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from lce_jax import linear_logprobs
        >>> hidden = jax.random.normal(jax.random.key(0), (2, 3, 16))
        >>> weight = jnp.zeros((50257, 16))                 # a uniform distribution
        >>> out = linear_logprobs(hidden, weight, jnp.array([[1, 2, 3], [4, 5, -100]]))
        >>> [round(float(x), 3) for x in out.logprobs[1]]   # -ln 50257, and 0 for a label out of vocabulary
        [-10.825, -10.825, 0.0]
        >>> round(float(out.entropy[0, 0]), 3)              # ln 50257
        10.825
        >>> top = jnp.array([[[7, 8, -1]] * 3] * 2)         # the same two ids at every token
        >>> out = linear_logprobs(hidden, weight, jnp.zeros((2, 3), int), candidates=top)
        >>> [round(float(x), 3) for x in out.candidate_logprobs[0, 0]]
        [-10.825, -10.825, 0.0]

    References:
        Milakov & Gimelshein, "Online normalizer calculation for softmax" (2018), for the running maximum.
        ``lce_jax/mathematics/_logprobs.py`` derives the entropy's shifted sum and the gradients.
    """
    arguments = locals()
    options = {name: arguments[name] for name in _options.list_options("linear_logprobs")} | unknown
    _options.check_names(linear_logprobs, options)
    parsed = _options.parse_arguments(options, hidden, weight, labels, where, ignore_index)
    return compute_results(_describe.describe_call(parsed)).public


def compute_results(arguments: Arguments, numbers: tuple[Array, ...] = ()) -> Results:
    """Returns the results of a call of `linear_logprobs`, from which losses are computed.

    ``numbers`` are arrays of shape () that the loss uses. If one of them differs between shards, all results are NaN.
    """
    call, primals, rows, agree = _describe.bind_call(arguments)
    if call.axis_name is not None:
        rows = _describe.tag_arrays(call, rows, tuple(jnp.broadcast_to(x, rows.labels.shape) for x in numbers))
    results = _runner.run(LOGPROBS, call, primals, rows)
    return results if agree is None else _collectives.set_nan_where_different(agree, results)
