"""`linear_kl`: the exact divergence of a student's distribution from its teacher's, from both models' hidden states."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, Unpack

from lce_jax.call import _options
from lce_jax.call._options import LogprobOptions, Same, Unset
from lce_jax.mathematics._kl import Pair
from lce_jax.mesh import _collectives
from lce_jax.run import _kl, _runner
from lce_jax.run._kl import KL, KLArguments

if TYPE_CHECKING:
    from lce_jax.types._shapes import Array, ArrayLike, Bool, Float


def linear_kl(
    hidden: Float[ArrayLike, "*b H"],
    weight: Float[ArrayLike, "V H"],
    teacher_hidden: Float[ArrayLike, "*b G"],
    teacher_weight: Float[ArrayLike, "V G"],
    *,
    direction: Literal["forward", "reverse", "jsd", "tv"] = "forward",
    beta: float | Float[ArrayLike, ""] | None = None,
    where: Bool[ArrayLike, "*b"] | None = None,
    teacher_temperature: float | Float[ArrayLike, "..."] | Same = "same",
    teacher_logit_softcap: float | Float[ArrayLike, ""] | Same | Unset | None = "unset",
    teacher_logit_scale: float | Float[ArrayLike, ""] | Same | Unset = "unset",
    teacher_weight_layout: Literal["vh", "hv"] | Same = "same",
    teacher_bias: Float[ArrayLike, "V"] | None = None,
    **options: Unpack[LogprobOptions],
) -> Float[Array, "*b"]:
    """Exact KL or JS divergence, or total variation, of two heads at each token, over the whole vocabulary.

    No logits of either head are stored.

    Let p be the teacher's probabilities and q the student's:

    - ``"forward"``: ``KL(p ‖ q) = Σ p (ln p - ln q)``;
    - ``"reverse"``: ``KL(q ‖ p) = Σ q (ln q - ln p)``;
    - ``"jsd"``: ``β KL(p ‖ m) + (1 - β) KL(q ‖ m)`` with ``m = β p + (1 - β) q``, the generalised Jensen-Shannon
      divergence;
    - ``"tv"``: ``½ Σ |p - q| = 1 - Σ min(p, q)``, the total variation.

    The result has first derivatives with respect to the student's ``hidden``, ``weight`` and ``bias``; the teacher has
    no gradient. At a temperature τ, multiply a KL or JSD by τ² to keep the size of its gradients. If you only have a
    teacher's top k, see `lce_jax.losses.distillation_loss`.

    Args:
        hidden, weight, where: the student's operands, and the rows that count, as in `linear_logprobs`.
        teacher_hidden: ``[..., G]`` the teacher's hidden states at the same tokens, of any size G and dtype.
        teacher_weight: ``[V, G]`` the teacher's head, over the same vocabulary.
        direction: "forward" spreads the student over everything that the teacher finds likely; "reverse" keeps it away
            from what the teacher finds unlikely; "jsd" lies between them. "tv" is the probability that speculative
            decoding rejects a token of the student, which is a draft of its teacher: see `lce_jax.losses.lk_alpha`.
        beta: the teacher's weight β in (0, 1) in "jsd": a number, or an array of shape (), which may be traced. As β
            approaches 0, the gradient approaches β times that of the forward KL; as β approaches 1, it approaches 1 - β
            times that of the reverse KL. The result is exact to rounding near both ends. For β near 1, give a Python
            number, because a float32 array has few digits of 1 - β. β has no gradient. None: 0.5.
        teacher_temperature: the temperature of the teacher's logits. "same": the student's.
        teacher_logit_softcap: the softcap of the teacher's logits. None: no cap. "same": the student's. "unset": no
            cap; the call is refused if the student has one, because each model has its own cap.
        teacher_logit_scale: the scale of the teacher's logits. "same": the student's. "unset": 1; the call is refused
            if the student's scale is another number or an array.
        teacher_weight_layout: the layout of the teacher's weight. "same": the student's.
        teacher_bias: ``[V]``, the bias of the teacher's logits, without a gradient. None: no bias.
        **options: those of `linear_logprobs` but ``entropy``, ``stats``, ``candidates``, ``gradient_threshold``,
            ``vocab_part_size``, ``logit_floor`` and ``lora``. ``axis_name`` splits both weights, which must have
            equally many columns on each shard. ``cache_bytes`` keeps two numbers for each token and column of the first
            vocabulary tiles. The two take 8 bytes on a CPU or with float32 weights, and 6 bytes otherwise; but with
            bfloat16 weights in "forward", 4 bytes if the student has no softcap.
            ``explain(..., teacher=, direction=).full_cache_bytes`` is enough for all tiles. A cache changes no bit of
            the result, but the gradient of the logits is rounded once more.

    Returns:
        ``[...]`` of at least 0, in nats ("tv": a probability), float32 (float64 if one of the weights is).

    Raises:
        ValueError, TypeError: shapes, dtypes or options do not fit; the message has the values. Also if the weights
            have different numbers of columns, unless ``vocab_size`` is given and the vocabulary is not split.
        NotImplementedError: for a second derivative, and for forward mode (``jax.jvp``).
        UnsupportedError: a requested implementation cannot serve the call; the message says why.

    Memory:
        With kernels (16-bit heads on a Hopper GPU), the forward takes six numbers for each token and each 256 columns,
        at most 160 MiB, and the backward takes a chunk of the gradient of the logits. Without kernels, each pass takes
        a tile of both models' logits (together at most 16 MiB on a CPU, 128 MiB elsewhere) and the exponentials of
        these logits. The backward also takes ``dhidden`` in float32. Between the passes, six numbers per token are
        kept, and eight with "jsd" and "tv". On an H100 in bfloat16, with 4096 tokens, hidden sizes of 4096 and a
        vocabulary of 151,936, the forward and backward of a KL take 328 MiB; with stored logits they take 7.0 GiB. A
        cache takes further memory, by default up to 1 GiB on a GPU.

    Numerics:
        Every sum and exponential is float32, and each gradient is rounded once. The backward recomputes the logits, so
        forward and backward together take four products with the student's head and two with the teacher's. "jsd" and
        "tv" take five and three, because they need both normalisers first. A full cache saves one product with each
        head in the backward: three and one, or four and two. Equal heads have a divergence and a gradient of 0 up to
        rounding. The gradient of "tv" contains the sign of q - p for each id, which is 0 if both are equal. If they
        differ only by rounding, rounding decides the sign. At small temperatures too, value and gradients are as exact
        as with stored float32 logits. With ``cache_bytes=0`` they are more exact in "reverse", "jsd" and "tv" where the
        student is nearly one-hot.

    Sharding:
        Under ``jit`` on a mesh, the call is partitioned by the operands' types (Explicit axes) or by XLA (Auto axes).
        Over Auto axes ``cache_bytes`` keeps nothing, and TPUs refuse Auto axes. Inside ``shard_map``, give
        ``axis_name``. ``vmap`` adds its batch to the tokens. The gradients of its examples are computed one by one,
        because each example has its own dweight. Examples with their own weights, and examples that ask for a cache,
        are computed one by one in the forward too.

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
        Knowledge Distillation of Large Language Models" (2024), for the reverse KL; Agarwal et al., "On-Policy
        Distillation of Language Models: Learning from Self-Generated Mistakes" (2024), eq. 1, for the generalised JSD,
        which TRL's ``GKDTrainer`` minimises, with its own ``beta``; Leviathan et al., "Fast Inference from Transformers
        via Speculative Decoding" (2023), section 3.3, for the acceptance 1 - TV.
    """
    _options.check_names(linear_kl, options)
    kl_options = {
        "beta": beta,
        "teacher_temperature": teacher_temperature,
        "teacher_logit_softcap": teacher_logit_softcap,
        "teacher_logit_scale": teacher_logit_scale,
        "teacher_weight_layout": teacher_weight_layout,
        "teacher_bias": teacher_bias,
    }
    arrays = Pair((hidden, weight), (teacher_hidden, teacher_weight))
    bound = _kl.bind(KLArguments.of(arrays, where, direction, options | kl_options))
    result = _runner.run(KL, bound.call, bound.primals.student, (bound.primals.teacher, bound.rows))
    return result if bound.agree is None else _collectives.set_nan_where_different(bound.agree, result)
