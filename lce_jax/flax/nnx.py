"""A language-model head for Flax NNX, over the functions of `lce_jax`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Self, Unpack

import jax.numpy as jnp
from flax import nnx

from lce_jax.flax import _head

if TYPE_CHECKING:
    from jax.lax import PrecisionLike
    from jax.sharding import Mesh
    from jax.typing import DTypeLike

    from lce_jax.mesh._layout import Axes
    from lce_jax.types._shapes import Array, ArrayLike, Float


class LMHead(_head.LMHead, nnx.Module):
    """A language-model head that need not store logits: ``head.logprobs``, ``kl``, ``loss``, ``linear_loss``, ``topk``.

    The head has a parameter ``weight [rows, H]``, which it creates or shares with an embedding (`tied`). With
    ``use_bias``, it also has a parameter ``bias [rows]``. Scale, cap, bias, padding, dtype and mesh are set once, here.
    So sampling (``head(hidden)``) and every method use the same.

    Args:
        hidden_size: H.
        vocab_size: the true vocabulary, V.
        embed: an ``nnx.Embed`` (or any module with a parameter ``embedding [rows, H]``) whose parameter is the head's
            weight. Both share one `nnx.Param`, which is in the model's state once. Its gradient is the sum over both
            uses. None: the head creates its weight.
        pad_to_multiple: the rows of a weight that the head creates are rounded up to a multiple of this number, such as
            the number of shards. Rows from ``vocab_size`` on are padding: no logits and no sum include them, and their
            gradient is zero. A tied weight is not padded.
        use_bias: whether the head also has a parameter ``bias [rows]``, initially zero, which is added to the products
            before the scale (GPT-J, Phi). The kernels do not support it.
        logit_scale: the factor of the float32 logits (Cohere, MuP).
        logit_softcap: ``c`` in ``c·tanh(logits / c)`` (Gemma 2: 30). None: no cap.
        dtype: the dtype of the matrix products; each call casts the weight and the hidden states to it. With bfloat16,
            the kernels serve float32 parameters. None: the dtype of the weight.
        param_dtype: the dtype of the bias, and of a weight that the head creates.
        weight_init: the initializer of a weight that the head creates.
        precision: precision of the matrix products with float32 operands.
        mesh: the mesh of the axes below. None: the mesh of ``jax.set_mesh``, at construction and in each call.
        vocab_axis: the mesh axis (or axes) that splits the vocabulary. The head creates its weight split over this
            axis, or as ``weight_init`` says (``nnx.with_partitioning(initializer, ("tensor", "fsdp"))``). With this
            argument or one of the next two, every method calls a sharded function, such as
            `lce_jax.sharded_linear_logprobs`. Without these arguments it calls `lce_jax.linear_logprobs`: on one
            device, under ``jit`` on a mesh, or inside ``jax.shard_map``.
        batch_axes: the mesh axis (or axes) that splits the first dimension of the hidden states.
        sequence_axis: the mesh axis (or axes) that splits the sequence of the hidden states. It may be ``vocab_axis``,
            or end with it.
        rngs: random numbers for a weight that the head creates.

    Example:
        >>> import jax.numpy as jnp
        >>> from flax import nnx
        >>> from lce_jax.flax.nnx import LMHead
        >>> head = LMHead(16, 1000, pad_to_multiple=128, rngs=nnx.Rngs(0))
        >>> head.weight.shape
        (1024, 16)
        >>> hidden, labels = jnp.ones((2, 5, 16)), jnp.zeros((2, 5), jnp.int32)
        >>> head(hidden).shape
        (2, 5, 1000)
        >>> head.logprobs(hidden, labels).entropy.shape
        (2, 5)
        >>> from lce_jax import losses
        >>> per_token = {"old_logprob": jnp.full((2, 5), -7.0), "advantage": jnp.array([[1.0], [-1.0]])}
        >>> total, out = head.linear_loss(losses.ppo_clip, hidden, labels, **per_token)
        >>> loss, grads = nnx.value_and_grad(lambda head: head.loss(hidden, labels, z_loss=1e-4))(head)
        >>> grads["weight"].shape
        (1024, 16)
    """

    def __init__(
        self,
        hidden_size: int,
        vocab_size: int,
        *,
        embed: _head.Embedding | None = None,
        pad_to_multiple: int = 1,
        use_bias: bool = False,
        logit_scale: float = 1.0,
        logit_softcap: float | None = None,
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        weight_init: nnx.Initializer = _head.WEIGHT_INIT,
        precision: PrecisionLike = None,
        mesh: Mesh | None = None,
        vocab_axis: Axes = None,
        batch_axes: Axes = None,
        sequence_axis: Axes = None,
        rngs: nnx.Rngs | None = None,
    ) -> None:
        arguments = locals()
        _head.check_dtype("param_dtype", param_dtype)
        self.hidden_size = hidden_size
        self.vocab_size = vocab_size
        if embed is not None:
            _head.check_tied(embed.embedding, hidden_size, vocab_size, pad_to_multiple)
            self.weight = embed.embedding
        elif rngs is None:
            raise TypeError(
                "LMHead needs rngs=nnx.Rngs(...) to initialise its weight, or embed= to share an embedding's"
            )
        else:
            rows = _head.count_rows(vocab_size, pad_to_multiple, vocab_axis, mesh)
            weight = weight_init(rngs.params(), (rows, hidden_size), param_dtype)
            if isinstance(weight, nnx.VariableMetadata):
                _head.check_same_axes(weight.metadata.get("out_sharding") or (), vocab_axis)
            elif vocab_axis is not None:
                weight = nnx.with_partitioning(lambda: weight, (vocab_axis, None), mesh)()
            self.weight = nnx.Param(weight)
        if not use_bias:
            self.bias = None
        else:
            bias = jnp.zeros(self.weight.shape[:1], param_dtype)
            annotated = bias if vocab_axis is None else nnx.with_partitioning(lambda: bias, (vocab_axis,), mesh)()
            self.bias = nnx.Param(annotated)
        self.options = _head.HeadSettings.collect(arguments)

    @classmethod
    def tied(cls, embed: nnx.Embed, *, vocab_size: int | None = None, **options: Unpack[_head.TiedOptions]) -> Self:
        """Returns a head that shares the weight of an embedding.

        Args:
            embed: the ``nnx.Embed``. Over a mesh, give it the head's sharding:
                ``embedding_init=nnx.with_partitioning(initializer, ("tensor", None))``.
            vocab_size: the true vocabulary. None: all of the embedding's rows.
            **options: the options of the class. By default, ``dtype`` is that of the embedding.

        Example:
            >>> from flax import nnx
            >>> from lce_jax.flax.nnx import LMHead
            >>> class Model(nnx.Module):
            ...     def __init__(self, rngs):
            ...         self.embed = nnx.Embed(1000, 16, rngs=rngs)
            ...         self.head = LMHead.tied(self.embed)
            >>> model = Model(nnx.Rngs(0))
            >>> model.head.weight is model.embed.embedding
            True
            >>> len(nnx.to_flat_state(nnx.state(model, nnx.Param)))
            1
        """
        if not isinstance(embed, nnx.Embed):
            raise TypeError(f"tied takes an nnx.Embed, and not {type(embed).__name__}")
        vocab_size = embed.num_embeddings if vocab_size is None else vocab_size
        options.setdefault("dtype", embed.dtype)
        return cls(embed.features, vocab_size, embed=embed, **options)

    def parts(self) -> tuple[Float[Array, "V H"], Float[Array, "V"] | None]:
        """Returns weight and bias. Refuses a head with an adapter, such as qwix's, which only logits would include."""
        if adapters := [name for name, x in vars(self).items() if isinstance(x, nnx.LoRAParam)]:
            raise NotImplementedError(
                f"the head holds {' and '.join(adapters)}, which only the model's logits contain: leave the head out "
                "of the adapter's modules, or add the scaled product of the two to the weight, or call the functions "
                "of lce_jax with lora= (docs/recipes/lora.md)"
            )
        return self.weight[...], self._bias

    @property
    def _bias(self) -> Float[Array, "V"] | None:
        return None if self.bias is None else self.bias[...]

    def __call__(self, hidden: Float[ArrayLike, "*b H"]) -> Float[Array, "*b vocab_size"]:
        """Returns logits for sampling: float32, after scale and cap, over the true vocabulary (without padding).

        This is the only method that stores ``[..., V]``. JAX differentiates it as usual. Over Explicit axes, the tokens
        are split as in ``hidden``, and the vocabulary is not split. Over Auto axes, the compiler decides.

        Args:
            hidden: ``[..., H]``.
        """
        return self.options.logits(hidden, self.weight[...], self._bias)
