"""Selections and reshapes of deferred logits that leave each row of V logits complete.

Each torch function is called on a layout, a tensor without memory. The result shows what the function does to the rows,
and the same is then done to the hidden states.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch

from lce_torch_bridge.deferred import _fused_functions
from lce_torch_bridge.deferred._recipe import PartStatistics, RowSelection, Step, make_layout
from lce_torch_bridge.deferred._traced import DEFERRED, Deferred
from lce_torch_bridge.tensors import _device

T: Any = torch.Tensor
EXPANDS = {T.expand}
SIZED = {T.expand, T.view, T.reshape, torch.reshape}


def broadcast_tensors(args: tuple[Any, ...]) -> Any:
    """Computes torch.broadcast_tensors if it leaves the shape of deferred logits unchanged."""
    shape = torch.broadcast_shapes(*(each.shape for each in args))
    if any(isinstance(each, DEFERRED) and each.shape != shape for each in args):
        return NotImplemented
    return tuple(each if isinstance(each, DEFERRED) else each.expand(shape) for each in args)


def take_rows(x: Deferred, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Adds a view, split, transpose or selection that leaves each row complete."""
    steps = _describe_step(x, func, args, kwargs)
    return NotImplemented if steps is None else _add_row_steps(x, func, args, kwargs, steps)


def _add_row_steps(x: Deferred, func: Any, args: Any, kwargs: Any, steps: tuple[_RowStep, ...]) -> Any:
    """Returns the function's result, one tensor or several parts. Hidden states are split once, for all parts."""
    if not steps:
        return ()
    if steps[0].part is None:
        return _add_row_step(x, Step(func, args, kwargs), steps[0])
    recipe, select = x.recipe, steps[0].select
    if recipe.classes_first or not all(row_step.keeps_rows for row_step in steps):
        return NotImplemented
    hidden, parts = select(recipe.hidden), []
    statistics: PartStatistics = {}
    logits_statistics: PartStatistics = {}
    for i, row_step in enumerate(steps):
        changes: dict[str, Any] = {"hidden": hidden[i], "selection": RowSelection(recipe, select, i, statistics)}
        step = Step(_TakePart(i, func), args, kwargs)
        if (logits := recipe.logits) is not None:
            selection = RowSelection(logits, select, i, logits_statistics)
            changes["logits"] = logits.add_step(step, row_step.layout, hidden=hidden[i], selection=selection)
        parts.append(x.add_step(step, row_step.layout, row_step.is_view, **changes))
    return tuple(parts)


class _RowStep(NamedTuple):
    """What one step does to the rows."""

    layout: torch.Tensor  # of the result
    select: Callable[[torch.Tensor], Any]  # takes the same rows, or all parts, from a tensor with other columns
    is_view: bool
    keeps_rows: bool  # whether the result's rows are complete
    part: int | None = None  # the index among several results


def _describe_step(
    x: Deferred, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[_RowStep, ...] | None:
    """Returns what ``func`` does to the rows, for each part of its result; None if ``func`` raises."""
    layout, items = x.recipe.layout, tuple(kwargs.items())
    if _is_static(args) and _is_static(kwargs.values()):
        return _trace_step_once(func, args, items, layout)
    if any(isinstance(each, (torch.dtype, *DEFERRED)) for each in (*args, *kwargs.values())):
        return None
    return _trace_step(func, args, items, layout)


def _trace_step(
    func: Any, args: tuple[Any, ...], items: tuple[Any, ...], before: torch.Tensor
) -> tuple[_RowStep, ...] | None:
    kwargs = dict(items)
    select: Callable[[torch.Tensor], Any] = functools.partial(_select, func, args, kwargs)
    if func is T.__getitem__:
        index = _expand_index(args[0], before.ndim)
        if index is None or index[-1] != slice(None):
            return None
        select = functools.partial(_index, index)
    meta = tuple(map(_to_meta, args)), {name: _to_meta(each) for name, each in kwargs.items()}
    errors = RuntimeError, IndexError, TypeError, ValueError, NotImplementedError
    try:
        after = func(before, *meta[0], **meta[1])
    except errors:
        return None
    try:
        select = _select_sized(func, args, kwargs, before.shape[-1]) if func in SIZED else select
        rows = select(before[..., :1])
    except errors:
        rows = None
    if isinstance(after, torch.Tensor):
        return (_make_row_step(before, after, rows, select),)
    parts = rows if rows is not None and len(rows) == len(after) else [None] * len(after)
    return tuple([_make_row_step(before, x, parts[i], select)._replace(part=i) for i, x in enumerate(after)])


_trace_step_once = _device.cache_results(_trace_step)


def _make_row_step(before: torch.Tensor, after: torch.Tensor, rows: torch.Tensor | None, select: Any) -> _RowStep:
    """Derives a `_RowStep` from the layouts before and after a step, and from ``rows``, its result on one column."""
    columns = before.shape[-1]
    is_whole = columns > 1 and after.shape[-1:] == (columns,) and (after.stride(-1) == 1 or not after.numel())
    keeps_rows = is_whole and rows is not None and rows.shape == (*after.shape[:-1], 1)
    in_graph = torch.compiler.is_compiling()  # a graph cannot compare storages, so assume a view
    is_view = in_graph or after.untyped_storage()._cdata == before.untyped_storage()._cdata
    return _RowStep(after, select, is_view, keeps_rows)


def _is_static(arguments: Iterable[Any]) -> bool:
    """Whether the arguments consist of ints, slices and tuples, so that they can be the key of a cache."""
    for x in arguments:
        kind = type(x)
        if kind is slice:
            if not _is_static((x.start, x.stop, x.step)):
                return False
        elif kind is tuple or kind is torch.Size:
            if not _is_static(x):
                return False
        elif kind is not int and x is not None and x is not Ellipsis:
            return False
    return True


def _to_meta(x: Any) -> Any:
    """Returns an argument for a call on a tensor without memory."""
    return x.to("meta") if isinstance(x, torch.Tensor) else x


def transpose(x: Deferred, *_: Any) -> Any:
    return take_rows(x, T.transpose, (-1, -2), {})


class _TakePart:
    """A function that returns the i-th result of another function."""

    def __init__(self, i: int, function: Callable[..., Any]) -> None:
        self.i, self.function = i, function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)[self.i]


def _select(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], x: torch.Tensor) -> Any:
    """Selects the same rows from ``x``, a tensor with other columns."""
    return func(x, *args, **kwargs)


def _select_sized(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], columns: int) -> Any:
    """Returns `_select` for a function that takes the new sizes, with sizes that also fit other columns."""
    sizes = kwargs.get("shape", kwargs.get("size", args[0] if args and not isinstance(args[0], int) else args))
    keeps_last = sizes[-1] == columns or (sizes[-1] == -1 and func not in EXPANDS)
    return functools.partial(_resize, T.expand if func in EXPANDS else T.reshape, tuple(sizes), keeps_last)


def _resize(func: Any, sizes: tuple[int, ...], keeps_last: bool, x: torch.Tensor) -> Any:
    return func(x, (*sizes[:-1], x.shape[-1]) if keeps_last else sizes)


def _add_row_step(x: Deferred, step: Step, row_step: _RowStep) -> Any:
    recipe, layout, select = x.recipe, row_step.layout, row_step.select
    if recipe.classes_first:
        return NotImplemented
    if not row_step.keeps_rows:
        return _move_classes_first(x, step, layout)
    hidden = select(recipe.hidden)
    changes: dict[str, Any] = {"hidden": hidden, "selection": RowSelection(recipe, select)}
    if (logits := recipe.logits) is not None:
        changes["logits"] = logits.add_step(step, layout, hidden=hidden, selection=RowSelection(logits, select))
    return x.add_step(step, layout, row_step.is_view, **changes)


def _move_classes_first(x: Deferred, step: Step, layout: torch.Tensor) -> Any:
    """Adds the transpose of [b, s, V] to [b, V, s], which cross entropy expects."""
    recipe, before = x.recipe, x.recipe.layout
    if (
        before.ndim != 3
        or recipe.kind != "logits"
        or layout.shape != (before.shape[0], before.shape[2], before.shape[1])
    ):
        return NotImplemented
    first, second, third = before.stride()
    if layout.stride() != (first, third, second):
        return NotImplemented
    return x.add_step(step, layout, True, classes_first=True)


def getitem(x: Deferred, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Adds an index, which selects rows (by slices, ints, masks, tensors), first columns, or one element per row."""
    del kwargs
    recipe = x.recipe
    if _is_static(args) and (steps := _describe_step(x, T.__getitem__, args, {})) is not None:
        return _add_row_step(x, Step(func, args), steps[0])
    index = _expand_index(args[0], recipe.layout.ndim)
    if index is None or recipe.classes_first:
        return NotImplemented
    if all(isinstance(each, torch.Tensor) and each.dtype not in (torch.bool, torch.uint8) for each in index):
        return _fused_functions.index_logits(x, index, getitem)
    *rows, last = index
    if isinstance(last, slice) and last == slice(None):
        return _choose_rows(x, func, args[0], tuple(rows))
    all_rows = all(isinstance(each, slice) and each == slice(None) for each in rows)
    if all_rows and isinstance(last, slice) and last.start in (None, 0) and last.step in (None, 1):
        layout = (_take_columns_once if _is_static((last,)) else _take_columns)(recipe.layout, last)
        if recipe.kind == "logits" and layout.shape[-1] > 1:
            return x.add_step(Step(func, args), layout, True, vocab_size=layout.shape[-1])
    return NotImplemented


def _take_columns(layout: torch.Tensor, columns: slice) -> torch.Tensor:
    return layout[..., columns]


_take_columns_once = _device.cache_results(_take_columns)


def _choose_rows(x: Deferred, func: Any, index: Any, rows: tuple[Any, ...]) -> Any:
    """Adds an index of rows. Masks, tensors and lists make a copy; scalar tensors alone make a view."""
    if not any(isinstance(each, list | range) or (isinstance(each, torch.Tensor) and each.ndim) for each in rows):
        steps = _describe_step(x, T.__getitem__, (index,), {})
        return NotImplemented if steps is None else _add_row_step(x, Step(func, (index,)), steps[0])
    recipe, select = x.recipe, functools.partial(_index, (*rows, slice(None)))
    hidden = select(recipe.hidden[..., :1])
    layout = make_layout((*hidden.shape[:-1], recipe.layout.shape[-1]), recipe.dtype)
    return _add_row_step(x, Step(func, (index,)), _RowStep(layout, select, False, True))


def _index(index: tuple[Any, ...], x: torch.Tensor) -> torch.Tensor:
    return x[index]


def _expand_index(index: Any, ndim: int) -> tuple[Any, ...] | None:
    """Expands an index to one entry per dimension and per new axis. Returns None if an entry is not supported."""
    entries = index if isinstance(index, tuple) else (index,)
    supported = (int, slice, list, range, types.EllipsisType, types.NoneType, torch.Tensor)
    if any(isinstance(each, (bool, *DEFERRED)) or not isinstance(each, supported) for each in entries):
        return None
    num_indexed = 0
    for each in entries:
        is_mask = isinstance(each, torch.Tensor) and each.dtype in (torch.bool, torch.uint8)
        num_indexed += each.ndim if is_mask else 0 if each is None or each is Ellipsis else 1
    rest = (slice(None),) * (ndim - num_indexed)
    ellipses = [i for i, each in enumerate(entries) if each is Ellipsis]
    if len(ellipses) > 1 or num_indexed > ndim:
        return None
    if not ellipses:
        return (*entries, *rest) or None
    return (*entries[: ellipses[0]], *rest, *entries[ellipses[0] + 1 :]) or None


def iterate(x: Deferred, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    del func
    rows = take_rows(x, T.unbind, args, kwargs) if x.dim() > 1 else NotImplemented
    return NotImplemented if rows is NotImplemented else iter(rows)
