"""What overloads of public functions take by keyword. ``entropy``, which decides a result's type, they name apart."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypedDict

from lce_jax._types import CommonOptions

if TYPE_CHECKING:
    from jax.sharding import AbstractMesh, Mesh

    from lce_jax._shapes import Array, Bool
    from lce_jax.mesh._layout import Axes


class MeshKeywords(TypedDict, total=False):
    """How a ``sharded_`` function names the mesh."""

    mesh: Mesh | AbstractMesh | None
    vocab_axis: Axes
    batch_axes: Axes
    sequence_axis: Axes


class LogprobKeywords(CommonOptions, total=False):
    """Of `linear_logprobs`."""

    where: Bool[Array, "*b"] | None


class LossKeywords(LogprobKeywords, total=False):
    """Of `linear_loss`."""

    chunk_bytes: int | None


class ShardedKeywords(LogprobKeywords, MeshKeywords, total=False):
    """Of `sharded_linear_logprobs`."""


class ShardedLossKeywords(LossKeywords, MeshKeywords, total=False):
    """Of `sharded_linear_loss`."""
