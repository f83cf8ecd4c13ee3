"""A small decoder-only transformer in Flax NNX: RMSNorm, rotary attention, SwiGLU, an embedding tied to the head.

The mesh axis "tensor" splits the blocks in the usual way (columns, then rows), and the embedding, which is also the
head, by vocabulary. The axis "data" splits activations. Letters: B batch, S sequence, H hidden size, N heads, D head
size, V vocabulary (padded).
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from lce_jax.flax.nnx import LMHead

if TYPE_CHECKING:
    from jax.sharding import Mesh

    from lce_jax.types._shapes import Array, Float, Int

_ROPE_BASE = 10_000.0


@dataclasses.dataclass(frozen=True)
class Config:
    """Sizes of the model. ``vocab_size`` is the tokenizer's; the embedding has `padded_vocab_size` rows."""

    vocab_size: int
    vocab_multiple: int  # so that all shards of the vocabulary have one size
    hidden_size: int = 128
    num_layers: int = 3
    num_heads: int = 4
    mlp_size: int = 512
    dtype: Any = jnp.float32  # of the matrix products; parameters are float32

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the embedding: rows from ``vocab_size`` on belong to no token."""
        return round_up(self.vocab_size, self.vocab_multiple)


def round_up(count: int, multiple: int) -> int:
    """Rounds ``count`` up to a multiple of ``multiple``."""
    return -(-count // multiple) * multiple


def make_mesh(num_heads: int = Config.num_heads) -> Mesh:
    """Returns a mesh data × tensor of all devices. "tensor" has as many as divide both devices and attention heads."""
    tensor = math.gcd(jax.device_count(), num_heads)
    return jax.make_mesh((jax.device_count() // tensor, tensor), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)


def put_on_mesh(mesh: Mesh, array: Any) -> Array:
    """Puts ``array`` on the mesh, with its first dimension split over "data"."""
    return jax.device_put(array, NamedSharding(mesh, P("data")))


class KVCache(NamedTuple):
    """One layer's keys and values of the positions so far."""

    key: Float[Array, "B S N D"]
    value: Float[Array, "B S N D"]


class Transformer(nnx.Module):
    """Maps token ids to final hidden states. Its `head` maps these to log-probabilities, a loss or logits."""

    def __init__(self, config: Config, *, rngs: nnx.Rngs) -> None:
        self.config = config
        self.embed = nnx.Embed(
            config.padded_vocab_size,
            config.hidden_size,
            dtype=config.dtype,
            embedding_init=nnx.with_partitioning(nnx.initializers.normal(config.hidden_size**-0.5), ("tensor", None)),
            rngs=rngs,
        )
        self.blocks = nnx.List([Block(config, rngs=rngs) for _ in range(config.num_layers)])
        self.norm = nnx.RMSNorm(config.hidden_size, dtype=config.dtype, rngs=rngs)
        self.head = LMHead.tied(self.embed, vocab_size=config.vocab_size, vocab_axis="tensor", batch_axes="data")

    def __call__(self, tokens: Int[Array, "B S"]) -> Float[Array, "B S H"]:
        """Returns the final hidden states of whole sequences."""
        return self.extend(tokens, [None] * self.config.num_layers, 0)[0]

    def extend(
        self, tokens: Int[Array, "B S"], cache: list[Any], start: int | Int[Array, ""]
    ) -> tuple[Float[Array, "B S H"], list[KVCache]]:
        """Returns final hidden states of the tokens from position ``start`` on, and the cache extended by them."""
        x = self.embed(tokens)
        extended = []
        for block, layer_cache in zip(self.blocks, cache, strict=True):
            x, layer_cache = block(x, layer_cache, start)
            extended.append(layer_cache)
        return self.norm(x), extended

    def num_parameters(self) -> int:
        """Returns the number of parameters. The embedding, which is also the head, counts once."""
        return sum(leaf.size for leaf in jax.tree.leaves(nnx.state(self, nnx.Param)))

    def empty_cache(self, batch: int, length: int) -> list[KVCache]:
        """Returns caches of all layers with space for ``length`` positions."""
        config = self.config
        shape = (batch, length, config.num_heads, config.hidden_size // config.num_heads)
        return [KVCache(jnp.zeros(shape, config.dtype), jnp.zeros(shape, config.dtype)) for _ in self.blocks]


class Block(nnx.Module):
    """Attention, then an MLP, each on a normalised copy of the residual stream."""

    def __init__(self, config: Config, *, rngs: nnx.Rngs) -> None:
        norm = functools.partial(nnx.RMSNorm, config.hidden_size, dtype=config.dtype, rngs=rngs)
        self.attention_norm, self.mlp_norm = norm(), norm()
        self.attention = Attention(config, rngs=rngs)
        self.mlp = SwiGLU(config, rngs=rngs)

    def __call__(
        self, x: Float[Array, "B S H"], cache: KVCache | None, start: int | Int[Array, ""]
    ) -> tuple[Float[Array, "B S H"], KVCache]:
        """Returns the residual stream after the block, and the keys and values that it attended to."""
        attended, cache = self.attention(self.attention_norm(x), cache, start)
        x = x + attended
        return x + self.mlp(self.mlp_norm(x)), cache


class Attention(nnx.Module):
    """Causal self-attention with rotary positions."""

    def __init__(self, config: Config, *, rngs: nnx.Rngs) -> None:
        self.num_heads = config.num_heads
        size = config.hidden_size
        self.query, self.key, self.value = (_linear(size, size, (None, "tensor"), config, rngs) for _ in range(3))
        self.out = _linear(size, size, ("tensor", None), config, rngs)

    def __call__(
        self, x: Float[Array, "B S H"], cache: KVCache | None, start: int | Int[Array, ""]
    ) -> tuple[Float[Array, "B S H"], KVCache]:
        """Attends to the positions in ``cache``, if there is one, and to those of ``x``."""
        heads = (*x.shape[:2], self.num_heads, -1)
        positions = start + jnp.arange(x.shape[1])
        query = rotate(self.query(x).reshape(heads), positions)
        key = rotate(self.key(x).reshape(heads), positions)
        value = self.value(x).reshape(heads)
        if cache is not None:
            key = jax.lax.dynamic_update_slice_in_dim(cache.key, key, start, axis=1)
            value = jax.lax.dynamic_update_slice_in_dim(cache.value, value, start, axis=1)
        causal = positions[:, None] >= jnp.arange(key.shape[1])
        attended = jax.nn.dot_product_attention(query, key, value, mask=causal[None, None])
        return self.out(attended.reshape(x.shape)), KVCache(key, value)


class SwiGLU(nnx.Module):
    """An MLP: down(silu(gate(x)) · up(x))."""

    def __init__(self, config: Config, *, rngs: nnx.Rngs) -> None:
        outer, inner = config.hidden_size, config.mlp_size
        self.gate, self.up = (_linear(outer, inner, (None, "tensor"), config, rngs) for _ in range(2))
        self.down = _linear(inner, outer, ("tensor", None), config, rngs)

    def __call__(self, x: Float[Array, "B S H"]) -> Float[Array, "B S H"]:
        """Returns the MLP's term of the residual stream."""
        return self.down(nnx.silu(self.gate(x)) * self.up(x))


def rotate(x: Float[Array, "B S N D"], positions: Int[Array, "S"]) -> Float[Array, "B S N D"]:
    """Applies rotary position embedding: turns the pair (i, i + D/2) by position · base^(-2i/D)."""
    half = x.shape[-1] // 2
    angles = positions[:, None] * _ROPE_BASE ** (-jnp.arange(half) / half)
    cos, sin = jnp.cos(angles)[:, None], jnp.sin(angles)[:, None]
    left, right = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([left * cos - right * sin, right * cos + left * sin], axis=-1).astype(x.dtype)


def _linear(inputs: int, outputs: int, split: tuple[str | None, ...], config: Config, rngs: nnx.Rngs) -> nnx.Linear:
    init = nnx.with_partitioning(nnx.initializers.lecun_normal(), split)
    return nnx.Linear(inputs, outputs, use_bias=False, dtype=config.dtype, kernel_init=init, rngs=rngs)
