"""`linear_logprobs`."""

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

    With ``z = cap(logit_scale · (hidden · weightᵀ + bias)) / temperature`` in float32 and ``p = softmax(z)`` over the
    vocabulary, returns ``logprobs = z[label] - lse``, ``entropy = -Σ p ln p`` and ``lse = ln Σ exp(z)`` per token,
    all in nats; with ``candidates``, also ``candidate_logprobs = z[candidates] - lse``. Differentiable, once, in
    ``hidden``, ``weight`` and ``bias`` through all four.

    No label is ignored unless ``ignore_index`` says so: -100 is PyTorch's.

    Args:
        hidden: ``[..., H]`` hidden states; any leading shape, also an empty one. bfloat16, float16, float32 or
            float64. Cast to the weight's dtype for the matrix products.
        weight: ``[V, H]`` head (``[H, V]`` with ``weight_layout="hv"``). Its dtype is that of the matrix products.
        labels: ``[...]`` integer vocabulary ids, global also when the vocabulary is split. A label outside the
            vocabulary (negative, ≥ V) has logprob 0, whose gradient is that of ``-lse``; its row counts unless it is
            ignored (``ignore_index``).
        where: ``[...]`` bool, the rows that count. The others are exactly 0 in outputs and gradients, whatever they
            hold, and cost no work. None: every row counts.
        ignore_index: rows with this label do not count, as in PyTorch. None: every label counts, and one outside the
            vocabulary has logprob 0.
        temperature: divides the float32 logits: a positive number, or an array that broadcasts to ``labels`` (one
            value per token, or per sequence as ``[b, 1]``). No gradient. A value that is not positive and finite is
            refused where it is known; in a traced array its row returns NaN and has no gradient, and the other rows
            are not affected.
        logit_softcap: ``c`` in ``cap(x) = c·tanh(x / c)``, before the temperature (Gemma 2: 30): a positive number,
            or an array of shape (), which may be traced. None: no cap. No gradient.
        logit_scale: multiplies the float32 logits first (Cohere, MuP): a number, or an array of shape (), which may
            be traced. No gradient.
        entropy: False: ``.entropy`` is None and costs nothing.
        stats: True fills ``.max_logit`` and ``.min_logit``, extremes of ``z``, ``.correct``, whether the label's
            logit is the largest (token accuracy: ``out.correct.mean()``), ``.sum_p_squared``, Σ p² over the vocabulary,
            and with a ``gradient_threshold`` ``.dropped_mass``. They have no gradient.
        vocab_size: the true size of the vocabulary. Columns from it on are padding: in no sum, with zero gradient,
            whatever they hold. None: every column counts.
        weight_layout: "vh" for ``[V, H]`` (nnx.Embed, PyTorch, Megatron), "hv" for ``[H, V]`` (nnx.Linear kernel).
        axis_name: inside ``shard_map``, the mesh axis (or tuple of axes) that splits the vocabulary. Each shard
            passes its own columns of ``weight`` and the same ``hidden`` and ``labels``; all shards return
            bitwise-equal results. Rows that differ between shards are NaN, in gradients too; all are, if two shards
            pass the same columns. None: ``weight`` is whole.
        cache_bytes: bytes per device that the forward may keep, so that the backward recomputes less: exponentials of
            the first tiles of the vocabulary, in the weight's dtype (float32 on a CPU). 0 keeps nothing, and so does a
            call that is not differentiated. None: up to 1 GiB on a GPU, 0 elsewhere, under ``vmap``, over Auto axes,
            and where a machine has several devices and tracing sees no mesh. The kernels, if V is a multiple of 8 (128
            before Hopper), and "xla", if it keeps all tiles and no row or column is left out, overwrite the cache
            inside ``jit`` and a copy of it outside.
        precision: of the matrix products with float32 operands; "highest" is exact to float32 rounding where the
            default may be TF32 (GPU) or bfloat16 (TPU).
        implementation: "mosaic_gpu" (kernels for NVIDIA GPUs), "xla" (every device), or a tuple of both, tried in
            order. None: the best one that can serve the call; its name is logged once (logger ``lce_jax``). `explain`
            gives the choice and the reasons.
        bias: ``[V]``, added to the float32 products before the scale, and split as the weight's vocabulary is. Its
            gradient is summed in float32 and rounded once. "mosaic_gpu" does not serve it. None: no bias.
        candidates: ``[..., K]`` integer vocabulary ids per token, global as labels are, K from 1 to 512: fills
            ``.candidate_logprobs``. -1 stands for none; such an id, and any out of vocabulary, returns 0 and has no
            gradient. An id may occur twice in a token. None: no candidates.
        gradient_threshold: tiles (128 tokens by 256 vocabulary columns) whose every probability is below it, and that
            hold no label and no candidate, are left out of the gradients: a number in [0, 1). Results never change. 0
            is exact. "mosaic_gpu" alone leaves tiles out; the gradients of the others stay exact.
        vocab_part_size: columns of a part of the vocabulary, a multiple of 8 (128 before Hopper). The kernels' tiles
            begin anew at each part's first column, so results have the same bits over any number of shards: give the
            columns of the smallest shard that any mesh or process group has. Shards must have whole parts; only a
            vocabulary that is not split may end inside one. Not with ``cache_bytes`` or ``gradient_threshold``.
            "mosaic_gpu" alone makes such a promise; the others ignore it. None: each shard is one part.
        logit_floor: f: the distribution is that over the tokens v with ``z[v] >= f`` and the label, as top-k, top-p or
            min-p leave it: a number, or an array that broadcasts to ``labels``, in logits. ``lse`` and a probability
            are sums over V that another program rounds otherwise; a logit is one product. `lce_jax.floors` makes
            floors and says what happens at the boundary. -inf leaves all. ``logprobs``, ``entropy``, ``lse`` and the
            extremes are those of the set, gradients are 0 outside, and ``stats=True`` fills ``.support``, the tokens
            in it. A row with no token in its set (its label is out of vocabulary) is 0 in outputs and gradients. A NaN
            is refused where it is known; in a traced array its row returns NaN and has no gradient. Not with
            ``candidates``. No gradient. None: every token.
        lora: ``(A, B, scale)``, an adapter of a frozen weight: A ``[r, H]`` and B ``[V, r]``, as PEFT's
            ``lora_A.weight`` and ``lora_B.weight``, and a number. The products are ``hidden · weightᵀ + u · Bᵀ`` with
            ``u = scale · hidden · Aᵀ``. The weight is not copied and has no gradient
            (``jax.lax.stop_gradient(weight)``); A and B have theirs in their own dtypes, the scale has none.
            ``scale · A``, B and u are rounded to the weight's dtype; r is padded to whole 64, and hidden is copied
            beside u. Not with ``bias``. None: no adapter.
        **unknown: refused; the message names the option that may be meant.

    Returns:
        A `LogprobOutput`, each field of ``labels.shape`` in float32 (float64 for a float64 weight) or bool, or None.

    Raises:
        UnsupportedError: an implementation asked for by name cannot serve the call; the message says why.
        ValueError, TypeError: shapes, dtypes or options that do not fit, with the offending values.
        NotImplementedError: on a second derivative, and on a first one in forward mode (``jax.jvp``).
        RuntimeWarning: no label that counts lies in the vocabulary, of a call whose labels can be read without waiting:
            outside ``jit``, where they are NumPy's, or computed already and on a CPU. -100 alone is padding, and does
            not warn.

    Memory:
        Forward O(T + tile) beyond the operands, backward O(T·H + tile) beyond the gradients; never T·V. From forward
        to backward it keeps a few numbers per token, and the cache. `explain` gives the bytes. Candidates add O(T·K).
        An operand that is not differentiated has no gradient, and costs no product.

    Numerics:
        Every sum and softmax is float32. dlogits are rounded at most once, to the weight's dtype, before the gradient
        products, and each gradient once, to its operand's dtype. (Data parallel shards round dweight before their sum,
        as JAX's own transposes do.) Two runs are bitwise equal. Logits must be finite and within ±1e30.

    Sharding:
        Under ``jit`` on a mesh the call is partitioned as a matrix product is, over batch, sequence and vocabulary: by
        the operands' types under Explicit axes, by XLA under Auto axes (where ``cache_bytes`` keeps nothing; TPUs
        refuse them). An axis that splits both tokens and vocabulary gathers hidden or weight, whichever a device holds
        less of; a split H is gathered. `sharded_linear_logprobs` takes the axes by name. Inside ``shard_map``, give
        ``axis_name``: labels, ``where`` and temperature may be typed as varying over it if every shard holds the same;
        rows that differ are NaN.

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
        Milakov & Gimelshein, "Online normalizer calculation for softmax" (2018), for the running maximum; the
        entropy's shifted sum and the gradients are derived in ``lce_jax/mathematics/_logprobs.py``.
    """
    arguments = locals()
    options = {name: arguments[name] for name in _options.list_options("linear_logprobs")} | unknown
    _options.check_names(linear_logprobs, options)
    parsed = _options.parse_arguments(options, hidden, weight, labels, where, ignore_index)
    return compute_results(_describe.describe_call(parsed)).public


def compute_results(arguments: Arguments, numbers: tuple[Array, ...] = ()) -> Results:
    """What `linear_logprobs` returns, and losses are made of.

    The results are NaN if shards were given different ``numbers``, arrays of shape ().
    """
    call, primals, rows, agree = _describe.bind_call(arguments)
    if call.axis_name is not None:
        rows = _describe.tag_arrays(call, rows, tuple(jnp.broadcast_to(x, rows.labels.shape) for x in numbers))
    found = _runner.run(LOGPROBS, call, primals, rows)
    return found if agree is None else _collectives.set_nan_where_different(agree, found)
