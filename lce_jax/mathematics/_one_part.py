"""What the implementations have in common that XLA compiles whole: a shard is one part, and no tile is left out."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from lce_jax._types import Case, ShardStatistics
from lce_jax.mathematics import _logprobs, _statistics
from lce_jax.mathematics._statistics import Normalizer, Parts

if TYPE_CHECKING:
    from lce_jax._shapes import Array


def merged(parts: Parts, case: Case, inverse_temperature: Array | None, num_rows: Any) -> ShardStatistics:
    """Eq. 2, all rows."""
    del num_rows
    scale = _logprobs.row_scale(case.options, inverse_temperature)
    return _statistics.merge_parts(parts, case.options, case.num_tokens, scale)


def per_token(function: Callable[..., Any], case: Case, *operands: Any) -> Any:
    """As XLA rounds."""
    del case
    return function(*operands)


def selected(case: Case, cache: Any, of_rows: Normalizer, num_rows: Any) -> tuple[Any, None]:
    """No tile is left out, whatever the threshold."""
    del case, of_rows, num_rows
    return cache, None
