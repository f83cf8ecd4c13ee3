"""What a forward keeps of the tiles for a backward: some exponentials, or which tiles carry gradient."""

from __future__ import annotations

from typing import Any

from lce_jax.launch_lists import _candidates
from lce_jax.launch_lists._call_kind import CallKind
from lce_jax.launch_lists._recorder import ROWS, STRIDE, Recorder
from lce_jax.mosaic import _cache, _threshold
from lce_jax.mosaic._cache import Cache
from lce_jax.mosaic._call import KernelCall
from lce_jax.mosaic.common import _tiles
from lce_jax.mosaic.common._select import dropped_mass, select

type Buffer = Any  # a `_recorder.Buffer`, which the host code takes for an array


def cached_tiles(kind: CallKind, keep_cache: bool) -> int:
    """The vocabulary tiles whose exponentials a forward keeps."""
    if not keep_cache:
        return 0
    shape = kind.shape
    live = kind.num_columns if kind.live_columns is None else max(kind.live_columns, 1)
    return min(_cache.num_cached_tiles(kind.case, shape), -(-live // shape.tile))


def live_shape(kind: CallKind) -> tuple[int, int]:
    """The shape of the live tiles, in int32, that a forward keeps with a threshold."""
    return _tiles.live_shape(kind.case)


def cache_input(recording: Any) -> Cache:
    """The operands that are a cache."""
    structs = _cache.empty(Recorder(), recording.kind.case, recording.shape, cached_tiles(recording.kind, True))
    exponentials, highest = (recording.input(*x.shape, dtype=x.dtype) for x in structs)
    return Cache(exponentials, highest)


def fields_of_tiles(kind: CallKind, keep_cache: bool) -> int:
    """How many numbers of each token a forward keeps of each tile until it knows which are live."""
    if not kind.gradient_threshold:
        return 0
    return 2 if kind.dropped_mass else int(keep_cache)


def selected(
    recording: Any, call: KernelCall, maxima: Buffer | None, saved: Buffer
) -> tuple[list[Buffer], list[Buffer]]:
    """The dropped mass, if it is a result, and the live tiles, if there is a threshold."""
    if maxima is None:
        return [], []
    case, of_tokens, field = call.case, (call.prepared.targets, call.prepared.scale), recording.kind.first_statistic
    more, ids = _candidates.selecting(recording, saved, call.prepared.num_columns)
    numbers = recording.host.numbers(ROWS, STRIDE, _threshold.always_live(call), *more)
    live, masses = recording.host.launch(select, case, maxima, *of_tokens, saved, field, numbers, *ids)
    if masses is None:
        return [], [live]
    dropped = recording.host.launch(dropped_mass, masses, recording.of_rows)
    return [dropped.view((case.num_tokens,))], [live]
