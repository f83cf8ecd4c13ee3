"""`linear_kl`: the exact divergence of a student's distribution from its teacher's, from both models' hidden states."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, Unpack

from lce_jax import _kl_call, _options, _runner
from lce_jax._call import Place
from lce_jax._kl_call import KLArguments, KLCall, KLOptions
from lce_jax._options import Same, Unset
from lce_jax.mathematics._kl import Pair
from lce_jax.mesh import _collectives
from lce_jax.programs._kl import KL

if TYPE_CHECKING:
    from jax.lax import PrecisionLike
    from jax.sharding import AbstractMesh, Mesh

    from lce_jax._shapes import Array, Bool, Float
    from lce_jax.mesh._layout import Axes


def linear_kl(
    hidden: Float[Array, "*b H"],
    weight: Float[Array, "V H"],
    teacher_hidden: Float[Array, "*b G"],
    teacher_weight: Float[Array, "V G"],
    *,
    direction: Literal["forward", "reverse", "jsd"] = "forward",
    beta: float | Float[Array, ""] | None = None,
    where: Bool[Array, "*b"] | None = None,
    temperature: float | Float[Array, "..."] = 1.0,
    teacher_temperature: float | Float[Array, "..."] | Same = "same",
    logit_softcap: float | Float[Array, ""] | None = None,
    teacher_logit_softcap: float | Float[Array, ""] | Same | Unset | None = "unset",
    logit_scale: float | Float[Array, ""] = 1.0,
    teacher_logit_scale: float | Float[Array, ""] | Same | Unset = "unset",
    vocab_size: int | None = None,
    weight_layout: Literal["vh", "hv"] = "vh",
    teacher_weight_layout: Literal["vh", "hv"] | Same = "same",
    cache_bytes: int = 0,
    axis_name: Axes = None,
    precision: PrecisionLike = None,
    implementation: str | tuple[str, ...] | None = None,
    bias: Float[Array, "V"] | None = None,
    teacher_bias: Float[Array, "V"] | None = None,
) -> Float[Array, "*b"]:
    """Exact KL or JS divergence of two heads over one whole vocabulary, per token, without storing either's logits.

    With the teacher's probabilities p and the student's q, ``"forward"`` is ``KL(p ‖ q) = Σ p (ln p - ln q)``,
    ``"reverse"`` ``KL(q ‖ p) = Σ q (ln q - ln p)``, and ``"jsd"`` ``β KL(p ‖ m) + (1 - β) KL(q ‖ m)`` with
    ``m = β p + (1 - β) q``, the generalised Jensen-Shannon divergence. Differentiable, once, in the student's
    ``hidden``, ``weight`` and ``bias``; the teacher has no gradient. At a temperature τ, multiply by τ² to keep the
    size of the gradients. If only a teacher's top k is at hand, see `lce_jax.losses.distillation_loss`.

    Args:
        hidden: ``[..., H]`` hidden states; any leading shape, also an empty one. bfloat16, float16, float32 or
            float64. Cast to the weight's dtype for the matrix products.
        weight: ``[V, H]`` head (``[H, V]`` with ``weight_layout="hv"``). Its dtype is that of the matrix products.
        teacher_hidden: ``[..., G]`` the teacher's hidden states at the same tokens, of any size G and dtype.
        teacher_weight: ``[V, G]`` the teacher's head, over the same vocabulary.
        direction: "forward" spreads the student over all that the teacher does; "reverse" keeps it away from what the
            teacher does not do; "jsd" lies between them.
        beta: the teacher's weight β in (0, 1) in "jsd": a number, or an array of shape (), which may be traced. As β
            approaches 0, the gradient approaches β times that of the forward KL; as it approaches 1, 1 - β times that
            of the reverse KL. Exact to rounding up to both ends, where a number near 1 brings 1 - β along, of which a
            float32 array has few digits. No gradient. None: 0.5.
        where: ``[...]`` bool, the rows that count. The others are exactly 0 in outputs and gradients, whatever they
            hold, and cost no work. None: every row counts.
        temperature: divides the float32 logits: a positive number, or an array that broadcasts to ``[...]`` (one value
            per token, or per sequence as ``[b, 1]``). No gradient. A value that is not positive and finite is refused
            where it is known; in a traced array its row returns NaN and has no gradient, and the other rows are not
            affected.
        teacher_temperature: that of the teacher's logits. "same": the student's.
        logit_softcap: ``c`` in ``cap(x) = c·tanh(x / c)``, before the temperature (Gemma 2: 30): a positive number,
            or an array of shape (), which may be traced. None: no cap. No gradient.
        teacher_logit_softcap: that of the teacher's logits. None: no cap. "same": the student's. "unset": none, and
            refused if the student has one, because a cap belongs to its model.
        logit_scale: multiplies the float32 logits first (Cohere, MuP): a number, or an array of shape (), which may
            be traced. No gradient.
        teacher_logit_scale: that of the teacher's logits. "same": the student's. "unset": 1, and refused if the
            student's is another or an array.
        vocab_size: the true size of the vocabulary. Columns from it on are padding: in no sum, with zero gradient,
            whatever they hold. None: every column counts.
        weight_layout: "vh" for ``[V, H]`` (nnx.Embed, PyTorch, Megatron), "hv" for ``[H, V]`` (nnx.Linear kernel).
        teacher_weight_layout: that of the teacher's weight. "same": the student's.
        cache_bytes: bytes per device that the forward may keep, so that the backward recomputes less: two numbers of
            each column of the first vocabulary tiles. With bfloat16 weights these are 4 bytes per token and column of
            "forward", 6 of the others and where the student has a softcap; with float16 weights 6; 8 on a CPU and with
            float32 weights. ``explain(..., teacher=, direction=).full_cache_bytes`` is enough for all. The value keeps
            its bits, and the gradient in the logits is rounded once more. 0: nothing is kept.
        axis_name: inside ``shard_map``, the mesh axis (or tuple of axes) that splits the vocabulary. Each shard
            passes its own columns of both weights, as many of one as of the other, and the same hidden states of both
            models; all shards return bitwise-equal results. Rows that differ between shards are NaN, in gradients too;
            all are, if two shards pass the same columns. None: both weights are whole.
        precision: of the matrix products with float32 operands; "highest" is exact to float32 rounding where the
            default may be TF32 (GPU) or bfloat16 (TPU).
        implementation: "mosaic_gpu", "xla", or a tuple of them to try in order. None: the kernels where they serve the
            call, else "xla".
        bias: ``[V]``, added to the float32 products before the scale, and split as the weight's vocabulary is. Its
            gradient is summed in float32 and rounded once. None: no bias.
        teacher_bias: ``[V]``, the same for the teacher, without a gradient.

    Returns:
        ``[...]`` in nats, at least 0, float32 (float64 if one of the weights is).

    Raises:
        ValueError, TypeError: shapes, dtypes or options that do not fit, with the offending values. Also weights with
            different numbers of columns, unless ``vocab_size`` is given; over a split vocabulary they must be equal.
        NotImplementedError: on a second derivative, and on a first one in forward mode (``jax.jvp``).
        UnsupportedError: an implementation asked for by name cannot serve the call; the message says why.

    Memory:
        With kernels (16-bit heads on a Hopper GPU) nine numbers per token and 256 columns in the forward, at
        most 160 MiB, and in the backward a chunk of the gradient in the logits. Without, a tile of both models' logits,
        together at most 16 MiB on a CPU and 128 MiB elsewhere, and their exponentials. In the backward also ``dhidden``
        in float32. Six numbers per token are kept between the passes, eight of "jsd". On an H100 in bfloat16, at 4096
        tokens, hidden sizes of 4096 and a vocabulary of 151,936, forward and backward of a KL hold 328 MiB, and with
        stored logits 7.0 GiB. What ``cache_bytes`` lets the forward keep comes on top.

    Numerics:
        Every sum and exponential is float32, and each gradient is rounded once. The backward recomputes the logits, so
        that forward and backward are four products with the student's head and two with the teacher's; "jsd", whose
        mixture needs both normalisers first, takes five and three. A full cache spares the backward one of each: three
        and one, or four and two. Equal heads have a divergence and a gradient of 0 within rounding. At small
        temperatures too, value and gradients are as exact as those of stored float32 logits, and without a cache more
        exact in "reverse" and "jsd" where the student is nearly one-hot.

    Sharding:
        As `linear_logprobs`: under ``jit`` on a mesh it is partitioned by the operands' types (Explicit axes) or by XLA
        (Auto axes, where ``cache_bytes`` keeps nothing; not of TPUs); inside ``shard_map`` give ``axis_name``. ``vmap``
        adds its batch to the tokens; the gradients of its examples, which each have a dweight, are computed one by one,
        as is all of examples that have a weight of their own, and of those with a cache.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from lce_jax import linear_kl
        >>> keys = jax.random.split(jax.random.key(0), 2)
        >>> teacher_hidden, teacher_weight = jnp.ones((3, 16)), jax.random.normal(keys[0], (1000, 16))
        >>> hidden, weight = jnp.ones((3, 8)), jax.random.normal(keys[1], (1000, 8))
        >>> def loss(hidden, weight):
        ...     return linear_kl(hidden, weight, teacher_hidden, teacher_weight).mean()
        >>> value, (dhidden, dweight) = jax.value_and_grad(loss, argnums=(0, 1))(hidden, weight)
        >>> bool(value > 0), dhidden.shape, dweight.shape
        (True, (3, 8), (1000, 8))

    References:
        Hinton et al., "Distilling the Knowledge in a Neural Network" (2015), for the forward KL; Gu et al., "MiniLLM:
        Knowledge Distillation of Large Language Models" (2024), for the reverse one; Agarwal et al., "On-Policy
        Distillation of Language Models: Learning from Self-Generated Mistakes" (2024), eq. 1, for the generalised JSD,
        which TRL's ``GKDTrainer`` minimises with its own ``beta``.
    """
    given: KLOptions = {
        "beta": beta,
        "temperature": temperature,
        "teacher_temperature": teacher_temperature,
        "logit_softcap": logit_softcap,
        "teacher_logit_softcap": teacher_logit_softcap,
        "logit_scale": logit_scale,
        "teacher_logit_scale": teacher_logit_scale,
        "vocab_size": vocab_size,
        "weight_layout": weight_layout,
        "teacher_weight_layout": teacher_weight_layout,
        "cache_bytes": cache_bytes,
        "precision": precision,
        "implementation": implementation,
        "bias": bias,
        "teacher_bias": teacher_bias,
    }
    arrays = Pair((hidden, weight), (teacher_hidden, teacher_weight))
    return _divergence(_kl_call.bind(KLArguments.of(arrays, where, direction, given, axis_name)))


def _divergence(call: KLCall) -> Array:
    """Of a call, NaN in the rows of which its shards were given different ones."""
    found = _runner.run(KL, call.spec, call.primals.student, (call.primals.teacher, call.rows))
    return found if call.agree is None else _collectives.nan_where_different(call.agree, found)


def sharded_linear_kl(
    hidden: Float[Array, "*b H"],
    weight: Float[Array, "V H"],
    teacher_hidden: Float[Array, "*b G"],
    teacher_weight: Float[Array, "V G"],
    *,
    mesh: Mesh | AbstractMesh | None = None,
    vocab_axis: Axes = "tensor",
    batch_axes: Axes = None,
    sequence_axis: Axes = None,
    direction: Literal["forward", "reverse", "jsd"] = "forward",
    where: Bool[Array, "*b"] | None = None,
    **options: Unpack[KLOptions],
) -> Float[Array, "*b"]:
    """`linear_kl` over a mesh: the vocabulary split over one axis, the tokens over others, of both models alike.

    Operands and results are global arrays. In ``[T, H]`` the one dimension of tokens is batch and sequence at once.

    Args:
        hidden: ``[..., H]`` hidden states; any leading shape, also an empty one. bfloat16, float16, float32 or
            float64. Cast to the weight's dtype for the matrix products.
        weight: ``[V, H]`` head (``[H, V]`` with ``weight_layout="hv"``). Its dtype is that of the matrix products.
        teacher_hidden: ``[..., G]`` the teacher's hidden states at the same tokens, of any size G and dtype.
        teacher_weight: ``[V, G]`` the teacher's head, over the same vocabulary.
        mesh: the mesh. None: that of ``jax.set_mesh``.
        vocab_axis: the mesh axis (or axes) that splits the vocabulary. V must divide by its size: pad the weight and
            give the true ``vocab_size``. None: each device holds the whole vocabulary.
        batch_axes: the mesh axis (or axes) that splits the batch, hidden's first dimension. None: under Explicit axes
            those of hidden's own type, else the batch is not split.
        sequence_axis: the mesh axis (or axes) that splits the sequence, hidden's last dimension but one. If it is
            ``vocab_axis`` or ends with it (Megatron's sequence parallelism; ``("context", "tensor")`` adds context
            parallelism), hidden states are all-gathered over ``vocab_axis`` forward and their gradient is
            reduce-scattered backward. None: the sequence is not split.
        direction: "forward" spreads the student over all that the teacher does; "reverse" keeps it away from what the
            teacher does not do; "jsd" lies between them.
        where: ``[...]`` bool, the rows that count. The others are exactly 0 in outputs and gradients, whatever they
            hold, and cost no work. None: every row counts.
        **options: ``beta``, ``temperature``, ``teacher_temperature``, ``logit_softcap``, ``teacher_logit_softcap``,
            ``logit_scale``, ``teacher_logit_scale``, ``vocab_size``, ``weight_layout``, ``teacher_weight_layout``,
            ``cache_bytes``, ``precision``, ``implementation``, ``bias`` and ``teacher_bias``, as in `linear_kl`.

    Returns:
        ``[...]`` in nats, at least 0, split as ``hidden`` is.

    Raises:
        ValueError, TypeError: shapes, dtypes or options that do not fit, with the offending values. Also an axis
            that the mesh does not have, an axis used twice, or a dimension that does not divide.
        NotImplementedError: on a second derivative, and on a first one in forward mode (``jax.jvp``).
        UnsupportedError: an implementation asked for by name cannot serve the call; the message says why.

    Memory:
        Per device, that of `linear_kl` on the device's tokens and columns. One all-gather of six numbers per token
        merges the shards.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from lce_jax import sharded_linear_kl
        >>> mesh = jax.make_mesh((1, 1), ("data", "tensor"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
        >>> hidden, weight = jnp.ones((2, 4, 8)), jnp.zeros((1000, 8))
        >>> kl = sharded_linear_kl(hidden, weight, hidden, weight, mesh=mesh, batch_axes="data")
        >>> kl.shape, float(kl.max())
        ((2, 4), 0.0)
    """
    _options.check_names(sharded_linear_kl, options, known_names=KLOptions.__annotations__)
    arrays = Pair((hidden, weight), (teacher_hidden, teacher_weight))
    place = Place.of(mesh, vocab_axis, batch_axes, sequence_axis)
    return _divergence(_kl_call.bind(KLArguments.of(arrays, where, direction, options, None), place))
