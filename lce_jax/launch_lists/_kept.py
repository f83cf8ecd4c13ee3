"""What a forward keeps of the tiles for a backward: some exponentials, or which tiles carry gradient."""

from __future__ import annotations

from typing import Any

from lce_jax.launch_lists import _candidates
from lce_jax.launch_lists._head import Head
from lce_jax.launch_lists._recorder import ROWS, STRIDE, Recorder
from lce_jax.mosaic import _cache, _threshold
from lce_jax.mosaic._cache import Cache
from lce_jax.mosaic._call import Call

type Buffer = Any  # a `_recorder.Buffer`, which the host code takes for an array


def cached_tiles(head: Head, keep_cache: bool) -> int:
    """The vocabulary tiles whose exponentials a forward keeps."""
    if not keep_cache:
        return 0
    shape = head.shape
    live = head.num_columns if head.live_columns is None else max(head.live_columns, 1)
    return min(_cache.num_cached_tiles(head.case, shape), -(-live // shape.tile))


def live_shape(head: Head) -> tuple[int, int]:
    """The shape of the live tiles, in int32, that a forward keeps with a threshold."""
    return head.kernels.live_shape(head.case)


def cache_input(made: Any) -> Cache:
    """The operands that are a cache."""
    structs = _cache.empty(Recorder(), made.head.case, made.shape, cached_tiles(made.head, True))
    exponentials, highest = (made.input(*x.shape, dtype=x.dtype) for x in structs)
    return Cache(exponentials, highest)


def fields_of_tiles(head: Head, keep_cache: bool) -> int:
    """How many numbers of each token a forward keeps of each tile until it knows which are live."""
    if not head.gradient_threshold:
        return 0
    return 2 if head.dropped_mass else int(keep_cache)


def selected(made: Any, call: Call, maxima: Buffer | None, kept: Buffer) -> tuple[list[Buffer], list[Buffer]]:
    """The dropped mass, if it is a result, and the live tiles, if there is a threshold."""
    if maxima is None:
        return [], []
    case, of_tokens, field = call.case, (call.prepared.targets, call.prepared.scale), made.head.first_statistic
    more, ids = _candidates.selecting(made, kept, call.prepared.num_columns)
    numbers = made.host.numbers(ROWS, STRIDE, _threshold.always_live(call), *more)
    live, masses = made.kernels.select(case, maxima, *of_tokens, kept, field, numbers, *ids)
    if masses is None:
        return [], [live]
    return [made.kernels.dropped_mass(masses, made.of_rows).view((case.num_tokens,))], [live]
