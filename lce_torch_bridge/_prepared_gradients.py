"""The backward of calls that are launched directly."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import torch

from lce_jax import launch
from lce_torch_bridge import _direct, _prepared, _programs_of_rows, _rows, _torch, tensor_parallel
from lce_torch_bridge._direct import Loaded, struct
from lce_torch_bridge._main_grad import nothing_like
from lce_torch_bridge._prepared import Allocated, Array, Piece, allocated, copies
from lce_torch_bridge._prepared_forward import MASKED
from lce_torch_bridge._programs import Spec
from lce_torch_bridge._types import PER_CANDIDATE, Call


class Backward(NamedTuple):
    """What is static about a backward besides the shapes of its operands."""

    call: Call
    cotangents: tuple[str, ...]
    wanted: tuple[bool, ...]
    adds: bool  # dweight is added to a float32 sum
    owns_cache: bool  # the cache may be overwritten
    reduced: bool  # dhidden is summed over the group, in float32


class Operands(NamedTuple):
    """The tensors of a backward."""

    hidden: torch.Tensor
    weight: torch.Tensor
    saved: torch.Tensor  # S
    cache: Sequence[torch.Tensor]


class Plan(NamedTuple):
    """What a backward allocates and launches."""

    pieces: list[Piece]
    results: list[Allocated]


type Described = Callable[[], tuple[_rows.Piece, Spec, Callable[[], Any]]]  # all rows, the key, the cache's tree


def gradients(
    x: Operands,
    cotangents: Sequence[torch.Tensor],
    main_grad: torch.Tensor | None,
    how: Backward,
    described: Described,
) -> list[torch.Tensor] | None:
    """What `_execute.gradients` returns of a call without a bias; None if JAX is to run it."""
    hidden, device = x.hidden, x.hidden.get_device()
    if _direct.on_gpu(hidden) and device != _torch.current_device():
        with torch.cuda.device(device):
            return gradients(x, cotangents, main_grad, how, described)
    if main_grad is not None and not _direct.is_usable(main_grad):
        return None
    seeds = [y if y.ndim == 1 else y.contiguous() for y in cotangents]
    strides, shapes = [y.stride() for y in seeds], (hidden.shape, x.weight.shape, x.saved.shape, len(x.cache))
    ranks = how.call.group and tensor_parallel.size_and_rank(how.call.group)
    if x.cache:
        x = x._replace(cache=list(map(_direct.usable, x.cache)))  # a hook on saved tensors may lay them elsewhere
    key = ("gradients", device, shapes, hidden.dtype, x.weight.dtype, how, x.saved.stride(), *strides, ranks)
    plan = _prepared.found(key, hidden, lambda: _planned(x, seeds, how, *described()))
    if plan is None:
        return None
    sums = [] if main_grad is None else [main_grad]
    if sums or how.owns_cache:
        torch.autograd.graph.increment_version([*sums, *x.cache] if how.owns_cache else sums)  # as any change in place
    usable, weight = _direct.usable(hidden), _direct.usable(x.weight)
    grads = [_torch.empty(*each) for each in plan.results]
    operands = [y.data_ptr() for y in (usable, weight, x.saved, *seeds, *sums, *x.cache)]
    operands.insert(2, 0)  # the number of rows
    _prepared.run(plan.pieces, device, [*grads, *sums], operands)
    if how.reduced and how.wanted[0]:
        grads[0] = tensor_parallel.all_reduce(grads[0], how.call.group).to(hidden.dtype)
    return grads if main_grad is None else [*grads, nothing_like(main_grad, weight.dtype)]


def _planned(
    x: Operands,
    seeds: Sequence[torch.Tensor],
    how: Backward,
    piece: _rows.Piece,
    spec: Spec,
    structure: Callable[[], Any],
) -> Plan | str:
    """The plan, or why JAX is to run such calls."""
    program = _program(x, how, piece, spec, structure)
    if isinstance(program, str):
        return program
    (tokens, H), copied = x.hidden.shape, _copied(x, piece)
    of_number, of_token = x.saved.stride()
    lines = Array(0, (0, H)) if copied else Array()
    of_seeds = [Array(0, (0, y.stride()[0])) for y in seeds]
    further = [Array()] * (how.adds + len(x.cache))
    operands = [lines, Array(), Array(), Array(0, (of_number, of_token)), *of_seeds, *further]
    results = [allocated((tokens, H), _dtype_of_dhidden(x, how))] if how.wanted[0] else []
    written = [lines] * len(results) + [Array()] * how.wanted[1]
    if how.wanted[1] and not how.adds:
        results.append(allocated(x.weight.shape, x.weight.dtype))
    return Plan([_prepared.piece(program, piece.tokens, written, operands)], results)


def _dtype_of_dhidden(x: Operands, how: Backward) -> torch.dtype:
    return torch.float32 if how.reduced else x.hidden.dtype


def _copied(x: Operands, piece: _rows.Piece) -> bool:
    return copies(x.hidden.shape[0], piece.rows, piece.masked, bool(x.cache))


def _program(x: Operands, how: Backward, piece: _rows.Piece, spec: Spec, structure: Callable[[], Any]) -> Loaded | str:
    hidden, weight, saved, cache = x
    copied, H = _copied(x, piece), hidden.shape[1]
    operands = H, hidden.dtype, weight.shape, weight.dtype, saved.shape[0], len(cache)
    key = ("gradients", hidden.get_device(), *operands, *how[1:], piece.rows, copied, *spec[:MASKED])

    def plan(device: launch.Device) -> launch.Program:
        P, K, array = piece.rows, spec.call.num_candidates, jax.ShapeDtypeStruct
        whole = [array((P, H), struct(hidden).dtype), struct(weight), array((), "int32")]
        seeds = [array((P, K) if name == PER_CANDIDATE else (P,), "float32") for name in how.cotangents]
        given = spec._replace(masked=copied), how.cotangents, how.wanted, structure() if cache else None
        function = _programs_of_rows.gradients(*given, how.owns_cache, not how.reduced)
        first = 4 + len(seeds)  # after what is per token
        rows = dict.fromkeys([0] * copied, 0) | {3: 1} | dict.fromkeys(range(4, first), 0)
        total = array(weight.shape, "float32") if how.adds else None
        arrays = [*whole, array((saved.shape[0], P), "int32"), seeds, total, *map(struct, cache)]
        donated = range(first, first + how.adds + len(cache) * how.owns_cache)
        results = {0: 0} if copied and how.wanted[0] else {}
        return launch.program(function, arrays, device, donated, rows=launch.Rows(2, rows, results))

    return _direct.loaded(key, hidden, plan)
