"""What the programs of all functions share: their one builder, their key, and what is per token, packed.

A step of a function is plain code over `lce_jax`: ``step(key, *static, *arrays)``. `program` compiles it.

P is the number of rows of a program. How many of them count is an operand, so that one program serves many counts of
tokens. Each array that crosses between the libraries costs the host as much time as many kernels. So everything per
token crosses as one int32 array, floats by their bits, as `tensors._padding.with_count` packs it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import torch
from jax import lax

from lce_jax import local
from lce_torch_bridge.tensors import _tensor_parallel


@functools.cache
def program(step: Callable[..., Any], key: ProgramKey, *static: Any, donate: tuple[int, ...] = ()) -> Any:
    """``step`` for one static part, compiled: a function of its arrays. Those of the places in ``donate`` may go."""
    return jax.jit(functools.partial(step, key, *static), donate_argnums=donate)


class ProgramKey(NamedTuple):
    """The static part of a program, whatever its function."""

    call: Any  # a function's call, without what its programs do not depend on
    shard: int  # of the vocabulary: this rank's
    shards: int
    precision: str | None  # of float32 products

    def part(self, rows: int) -> dict[str, Any]:
        """The global id of the first of the shard's columns; the true vocabulary, if the shards have columns beyond."""
        padded = self.call.vocab_size < self.shards * rows
        return {"vocab_start": self.shard * rows, "vocab_size": self.call.vocab_size if padded else None}


def key_of(call: Any, *weights: torch.Tensor) -> ProgramKey:
    """The key of a call's programs, over one head or several."""
    shards, rank = _tensor_parallel.size_and_rank(call.group)
    precision = next(filter(None, map(precision_of, weights)), None)
    if type(call.vocab_size) is not int:  # where torch.compile traces
        call = call.of_programs
    return _made_once(call, rank, shards, precision)


@functools.cache
def _made_once(call: Any, rank: int, shards: int, precision: str | None) -> ProgramKey:
    return ProgramKey(call.of_programs, rank, shards, precision)


def precision_of(weight: torch.Tensor) -> str | None:
    """The option of `lce_jax`: float32 products are as exact as torch's settings ask."""
    if weight.dtype != torch.float32:
        return None
    # This tells what was set by any of torch's functions; torch.get_float32_matmul_precision raises after newer ones.
    products: Any = torch.backends.cuda.matmul if weight.is_cuda else torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    return "highest" if products.fp32_precision in ("none", "ieee") else None


def counted(packed: Any, rows: int) -> tuple[Any, Any]:
    """What `tensors._padding.with_count` packed: how many rows count, and ``[K, P]``."""
    return packed[0], packed[1:].reshape(rows, -1).T


def as_rows(*columns: Any) -> Any:
    """Arrays ``[P]`` and ``[P, K]`` as rows of one int32 array, floats by their bits."""
    rows = [x[None] if x.ndim == 1 else x.T for x in columns]
    return jnp.concatenate([lax.bitcast_convert_type(x, jnp.int32) for x in rows])


def tags_of(columns: Any, num_rows: Any, *of_call: object) -> Any:
    """`lce_jax.local.tags` of what tokens come with, None left out, of how many count, and of the rest of the call."""
    columns = [x for x in columns if x is not None]
    numbers = num_rows, jnp.int32(_tensor_parallel.number_of(*of_call))
    return local.tags([*(jnp.broadcast_to(x, columns[0].shape[:1]) for x in numbers), *columns])


def with_tags(packed: Any, tags: Any) -> Any:
    """``packed [F, P]``, and a row with the tags, by their bits."""
    return jnp.concatenate([packed, lax.bitcast_convert_type(tags[None], packed.dtype)])


def of_equal_tags(gathered: Any) -> tuple[Any, Any]:
    """What `with_tags` made of all shards, without the tags, and in which rows these are equal; NaN in the others."""
    tags = lax.bitcast_convert_type(gathered[:, -1], jnp.int32)
    agree = (tags == tags[:1]).all(0)
    return jnp.where(agree, gathered[:, :-1], jnp.nan), agree
