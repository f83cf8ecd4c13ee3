"""A language-model head for Flax Linen, over the functions of `lce_jax`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Self, Unpack

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from lce_jax.flax import _head

if TYPE_CHECKING:
    from jax.lax import PrecisionLike
    from jax.sharding import Mesh
    from jax.typing import DTypeLike

    from lce_jax.mesh._layout import Axes
    from lce_jax.types._shapes import Array, ArrayLike, Float


class LinenTiedOptions(_head.TiedOptions, total=False):
    """`TiedOptions`, and the name that every Linen module may have."""

    name: str | None


class LMHead(_head.LMHead, nn.Module):
    """A language-model head that need not store logits: ``head.logprobs``, ``kl``, ``loss``, ``linear_loss``, ``topk``.

    The head has a parameter ``weight [rows, H]``, or uses that of an embedding (`tied`). With ``use_bias``, it also has
    a parameter ``bias [rows]``. Scale, cap, bias, padding, dtype and mesh are set once, here. So sampling
    (``head(hidden)``) and every method use the same.

    Attributes:
        embed: an ``nn.Embed`` of the parent whose parameter is the head's weight. None: the head creates its weight.
        mesh: the mesh of ``vocab_axis``, ``batch_axes`` and ``sequence_axis``. None: the mesh of ``jax.set_mesh``.
        vocab_axis: the mesh axis that splits the vocabulary. The head annotates its new weight with this axis, or as
            ``weight_init`` says (``nn.with_partitioning(initializer, ("tensor", "fsdp"))``).
        others: as in `lce_jax.flax.nnx.LMHead`: ``hidden_size``, ``vocab_size``, ``pad_to_multiple``, ``use_bias``,
            ``logit_scale``, ``logit_softcap``, ``dtype``, ``param_dtype``, ``weight_init``, ``precision``,
            ``batch_axes``, ``sequence_axis``.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from lce_jax.flax.linen import LMHead
        >>> head = LMHead(16, 1000, pad_to_multiple=128)
        >>> hidden, labels = jnp.ones((2, 5, 16)), jnp.zeros((2, 5), jnp.int32)
        >>> variables = head.init(jax.random.key(0), hidden, labels, method="loss")
        >>> variables["params"]["weight"].shape
        (1024, 16)
        >>> head.apply(variables, hidden).shape
        (2, 5, 1000)
        >>> head.apply(variables, hidden, labels, method="logprobs").entropy.shape
        (2, 5)
        >>> loss = head.apply(variables, hidden, labels, z_loss=1e-4, method="loss")
        >>> loss.shape
        ()
    """

    hidden_size: int
    vocab_size: int
    embed: nn.Embed | None = None
    pad_to_multiple: int = 1
    use_bias: bool = False
    logit_scale: float = 1.0
    logit_softcap: float | None = None
    dtype: DTypeLike | None = None
    param_dtype: DTypeLike = jnp.float32
    weight_init: nn.initializers.Initializer = _head.WEIGHT_INIT
    precision: PrecisionLike = None
    mesh: Mesh | None = None
    vocab_axis: Axes = None
    batch_axes: Axes = None
    sequence_axis: Axes = None

    @classmethod
    def tied(cls, embed: nn.Embed, *, vocab_size: int | None = None, **options: Unpack[LinenTiedOptions]) -> Self:
        """Returns a head that shares the weight of an embedding.

        Args:
            embed: an ``nn.Embed`` of the same parent. Over a mesh, give it the head's sharding:
                ``embedding_init=nn.with_partitioning(initializer, ("tensor", None))``.
            vocab_size: the true vocabulary. None: all of the embedding's rows.
            **options: the options of the class. By default, ``dtype`` is that of the embedding.

        Example:
            >>> import flax.linen as nn, jax, jax.numpy as jnp
            >>> from lce_jax.flax.linen import LMHead
            >>> class Model(nn.Module):
            ...     def setup(self):
            ...         self.embed = nn.Embed(1000, 16)
            ...         self.head = LMHead.tied(self.embed)
            ...     def __call__(self, tokens, labels):
            ...         return self.head.loss(self.embed(tokens), labels)
            >>> tokens = jnp.zeros((2, 5), jnp.int32)
            >>> variables = Model().init(jax.random.key(0), tokens, tokens)
            >>> jax.tree.map(jnp.shape, variables)
            {'params': {'embed': {'embedding': (1000, 16)}}}
        """
        if not isinstance(embed, nn.Embed):
            raise TypeError(f"tied takes an nn.Embed, and not {type(embed).__name__}")
        vocab_size = embed.num_embeddings if vocab_size is None else vocab_size
        options.setdefault("dtype", embed.dtype)
        return cls(embed.features, vocab_size, embed=embed, **options)

    def setup(self) -> None:
        """Creates the weight, or takes the embedding's, and collects the options that all methods share."""
        _head.check_dtype("param_dtype", self.param_dtype)
        if self.embed is not None:
            self.weight = self.embed.embedding
            _head.check_tied(self.weight, self.hidden_size, self.vocab_size, self.pad_to_multiple)
        else:
            rows = _head.count_rows(self.vocab_size, self.pad_to_multiple, self.vocab_axis, self.mesh)
            weight_init = _partitioned(self.weight_init, self.vocab_axis, self.mesh)
            self.weight = self.param("weight", weight_init, (rows, self.hidden_size), self.param_dtype)
        self.bias = None
        if self.use_bias:
            bias_init = _partitioned(nn.initializers.zeros_init(), self.vocab_axis, self.mesh, dims=1)
            self.bias = self.param("bias", bias_init, self.weight.shape[:1], self.param_dtype)
        self.options = _head.HeadSettings.collect(vars(self))

    def __call__(self, hidden: Float[ArrayLike, "*b H"]) -> Float[Array, "*b vocab_size"]:
        """Returns logits for sampling: float32, after scale and cap, over the true vocabulary (without padding).

        This is the only method that stores ``[..., V]``. JAX differentiates it as usual. Over Explicit axes, the tokens
        are split as in ``hidden``, and the vocabulary is not split. Over Auto axes, the compiler decides.

        Args:
            hidden: ``[..., H]``.
        """
        return self.options.logits(hidden, self.weight, self.bias)

    def parts(self) -> tuple[Float[Array, "V H"], Float[Array, "V"] | None]:
        """Returns the head's weight and bias."""
        return self.weight, self.bias

    # Linen wraps only functions in the class itself, and not inherited ones.
    logprobs, topk, kl = _head.LMHead.logprobs, _head.LMHead.topk, _head.LMHead.kl
    loss, linear_loss = _head.LMHead.loss, _head.LMHead.linear_loss


def _partitioned(initializer: Any, vocab_axis: Any, mesh: Any, dims: int = 2) -> Any:
    """Returns an initializer of annotated weights: with the annotation of ``initializer``, or the vocabulary's axis.

    Under Explicit axes Flax asserts that the weight is split as annotated, so the weight is created split. The
    annotation that is added here has no mesh, because with a mesh Flax would add a sharding constraint, which is an
    error under Explicit axes.
    """

    def initialize(*args: Any) -> Any:
        weight = initializer(*args)
        if isinstance(weight, nn.LogicallyPartitioned):  # it names logical axes, not mesh axes
            return weight
        if isinstance(weight, nn.Partitioned):
            _head.check_same_axes(weight.names, vocab_axis)
            return weight.replace_boxed(_split(weight.value, weight.names, weight.mesh or mesh))
        if vocab_axis is None:
            return weight
        names = (vocab_axis, None)[:dims]
        return nn.Partitioned(_split(weight, names, mesh), names)

    return initialize


def _split(weight: Array, names: Any, mesh: Any) -> Array:
    axes = (jax.sharding.get_abstract_mesh() if mesh is None else mesh).axis_types
    if AxisType.Explicit not in axes:
        return weight
    return jax.sharding.reshard(weight, P(*names) if mesh is None else NamedSharding(mesh, P(*names)))
