"""`xla._logits` without chunks: all rows of the weight that the ids name are stored. For tests and small problems."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax.numpy as jnp

from lce_jax._types import Options

if TYPE_CHECKING:
    from lce_jax._shapes import Array, Float, Int


def products(
    hidden: Float[Array, "T H"], weight: Float[Array, "V H"], columns: Int[Array, "T K"], options: Options, dtype: Any
) -> Float[Array, "T K"]:
    """H · w of each token's columns, summed in ``dtype``; 0 for the column -1."""
    raw = jnp.einsum("th,tkh->tk", hidden.astype(dtype), _rows(weight, columns, options, dtype), precision="highest")
    return jnp.where(columns >= 0, raw, 0.0)


def dhidden(
    terms: Float[Array, "T K"], weight: Float[Array, "V H"], columns: Int[Array, "T K"], options: Options
) -> Float[Array, "T H"]:
    """Σ_k terms · w of each token's columns, summed in the dtype of ``terms``."""
    return jnp.einsum("tk,tkh->th", terms, _rows(weight, columns, options, terms.dtype), precision="highest")


def dweight(
    terms: Float[Array, "T K"], hidden: Float[Array, "T H"], columns: Int[Array, "T K"], weight: Array, options: Options
) -> Float[Array, "V H"]:
    """Σ terms · h of each column, summed in the dtype of ``terms`` and rounded once."""
    parts = terms[:, :, None] * hidden.astype(terms.dtype)[:, None, :]
    parts = jnp.where((columns >= 0)[:, :, None], parts, 0.0)
    sums = jnp.zeros((weight.shape[options.vocab_dim], hidden.shape[1]), terms.dtype)
    sums = sums.at[jnp.maximum(columns, 0)].add(parts)
    return (sums if options.vocab_dim == 0 else sums.T).astype(weight.dtype)


def _rows(weight: Array, columns: Int[Array, "T K"], options: Options, dtype: Any) -> Float[Array, "T K H"]:
    """Those of each token's columns; 0 for the column -1."""
    vocab_by_hidden = weight if options.vocab_dim == 0 else weight.T
    rows = jnp.take(vocab_by_hidden, columns, axis=0, mode="clip").astype(dtype)
    return jnp.where((columns >= 0)[:, :, None], rows, 0.0)
