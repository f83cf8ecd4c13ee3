"""Rows of deferred logits: what leaves each of them whole, by torch's own functions on tensors without memory."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch

from lce_torch_bridge.deferred import _served
from lce_torch_bridge.deferred._recipe import Rows, Step, Taken, laid_out
from lce_torch_bridge.deferred._traced import DEFERRED, Deferred
from lce_torch_bridge.tensors import _device

T: Any = torch.Tensor
EXPANDS = {T.expand}
SIZED = {T.expand, T.view, T.reshape, torch.reshape}


def broadcast_tensors(args: tuple[Any, ...]) -> Any:
    """torch.broadcast_tensors with what is no larger."""
    shape = torch.broadcast_shapes(*(each.shape for each in args))
    if any(isinstance(each, DEFERRED) and each.shape != shape for each in args):
        return NotImplemented
    return tuple(each if isinstance(each, DEFERRED) else each.expand(shape) for each in args)


def take_rows(x: Deferred, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What leaves each row whole: views, splits, transposes of the leading dimensions, chosen rows."""
    shaped = _shape(x, func, args, kwargs)
    return NotImplemented if shaped is None else _row_steps(x, func, args, kwargs, shaped)


def _row_steps(x: Deferred, func: Any, args: Any, kwargs: Any, shaped: tuple[_Shape, ...]) -> Any:
    """One tensor, or the parts that a function returns: hidden states are parted once for all of them."""
    if not shaped:
        return ()
    if shaped[0].part is None:
        return _row_step(x, Step(func, args, kwargs), shaped[0])
    recipe, select = x.recipe, shaped[0].select
    if recipe.classes_first or not all(one.is_of_rows for one in shaped):
        return NotImplemented
    hidden, parts = select(recipe.hidden), []
    taken: Taken = {}
    of_logits: Taken = {}
    for i, one in enumerate(shaped):
        changes: dict[str, Any] = {"hidden": hidden[i], "rows_of": Rows(recipe, select, i, taken)}
        step = Step(_Nth(i, func), args, kwargs)
        if (of := recipe.logits) is not None:
            changes["logits"] = of.then(step, one.layout, hidden=hidden[i], rows_of=Rows(of, select, i, of_logits))
        parts.append(x.then(step, one.layout, one.is_view, **changes))
    return tuple(parts)


class _Shape(NamedTuple):
    """What one step makes of a layout."""

    layout: torch.Tensor
    select: Callable[[torch.Tensor], Any]  # the same rows of a tensor with other columns, or all parts of it
    is_view: bool
    is_of_rows: bool  # whether it leaves each row whole
    part: int | None = None  # which of several it is


def _shape(x: Deferred, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[_Shape, ...] | None:
    """What ``func`` makes of a layout, once or in parts; None where torch refuses it, and says why of the values."""
    layout, items = x.recipe.layout, tuple(kwargs.items())
    if _is_static(args) and _is_static(kwargs.values()):
        return _shaped_once(func, args, items, layout)
    if any(isinstance(each, (torch.dtype, *DEFERRED)) for each in (*args, *kwargs.values())):
        return None
    return _shaped(func, args, items, layout)


def _shaped(
    func: Any, args: tuple[Any, ...], items: tuple[Any, ...], before: torch.Tensor
) -> tuple[_Shape, ...] | None:
    kwargs = dict(items)
    select: Callable[[torch.Tensor], Any] = functools.partial(_select, func, args, kwargs)
    if func is T.__getitem__:
        index = _whole_index(args[0], before.ndim)
        if index is None or index[-1] != slice(None):
            return None
        select = functools.partial(_at, index)
    meta = tuple(map(_on_meta, args)), {name: _on_meta(each) for name, each in kwargs.items()}
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
        return (_shape_of(before, after, rows, select),)
    parts = rows if rows is not None and len(rows) == len(after) else [None] * len(after)
    return tuple([_shape_of(before, one, parts[i], select)._replace(part=i) for i, one in enumerate(after)])


_shaped_once = _device.once(_shaped)


def _shape_of(before: torch.Tensor, after: torch.Tensor, rows: torch.Tensor | None, select: Any) -> _Shape:
    """``rows`` is what the step makes of the first column."""
    columns = before.shape[-1]
    is_whole = columns > 1 and after.shape[-1:] == (columns,) and (after.stride(-1) == 1 or not after.numel())
    is_of_rows = is_whole and rows is not None and rows.shape == (*after.shape[:-1], 1)
    in_graph = torch.compiler.is_compiling()  # where it may be a view
    is_view = in_graph or after.untyped_storage()._cdata == before.untyped_storage()._cdata
    return _Shape(after, select, is_view, is_of_rows)


def _is_static(given: Iterable[Any]) -> bool:
    """Whether arguments are equal to others only where they do the same."""
    for x in given:
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


def _on_meta(x: Any) -> Any:
    """An argument for a tensor without memory."""
    return x.to("meta") if isinstance(x, torch.Tensor) else x


def transpose(x: Deferred, *_: Any) -> Any:
    return take_rows(x, T.transpose, (-1, -2), {})


class _Nth:
    """The i-th of what a function returns."""

    def __init__(self, i: int, function: Callable[..., Any]) -> None:
        self.i, self.function = i, function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)[self.i]


def _select(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], x: torch.Tensor) -> Any:
    """The same rows of a tensor with other columns."""
    return func(x, *args, **kwargs)


def _select_sized(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], columns: int) -> Any:
    """`_select` of a function that is given the new sizes."""
    sizes = kwargs.get("shape", kwargs.get("size", args[0] if args and not isinstance(args[0], int) else args))
    keeps_last = sizes[-1] == columns or (sizes[-1] == -1 and func not in EXPANDS)
    return functools.partial(_resize, T.expand if func in EXPANDS else T.reshape, tuple(sizes), keeps_last)


def _resize(func: Any, sizes: tuple[int, ...], keeps_last: bool, x: torch.Tensor) -> Any:
    return func(x, (*sizes[:-1], x.shape[-1]) if keeps_last else sizes)


def _row_step(x: Deferred, step: Step, shape: _Shape) -> Any:
    recipe, layout, select = x.recipe, shape.layout, shape.select
    if recipe.classes_first:
        return NotImplemented
    if not shape.is_of_rows:
        return _classes_first(x, step, layout)
    hidden = select(recipe.hidden)
    changes: dict[str, Any] = {"hidden": hidden, "rows_of": Rows(recipe, select)}
    if (of := recipe.logits) is not None:
        changes["logits"] = of.then(step, layout, hidden=hidden, rows_of=Rows(of, select))
    return x.then(step, layout, shape.is_view, **changes)


def _classes_first(x: Deferred, step: Step, layout: torch.Tensor) -> Any:
    """[b, s, V] as [b, V, s], for cross entropy."""
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
    return x.then(step, layout, True, classes_first=True)


def getitem(x: Deferred, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Rows by slices, numbers, masks and tensors; the first columns; one number of each row."""
    del kwargs
    recipe = x.recipe
    if _is_static(args) and (shaped := _shape(x, T.__getitem__, args, {})) is not None:
        return _row_step(x, Step(func, args), shaped[0])
    index = _whole_index(args[0], recipe.layout.ndim)
    if index is None or recipe.classes_first:
        return NotImplemented
    if all(isinstance(each, torch.Tensor) and each.dtype not in (torch.bool, torch.uint8) for each in index):
        return _served.chosen(x, index, getitem)
    *rows, last = index
    if isinstance(last, slice) and last == slice(None):
        return _choose_rows(x, func, args[0], tuple(rows))
    whole = all(isinstance(each, slice) and each == slice(None) for each in rows)
    if whole and isinstance(last, slice) and last.start in (None, 0) and last.step in (None, 1):
        layout = (_columns_once if _is_static((last,)) else _columns)(recipe.layout, last)
        if recipe.kind == "logits" and layout.shape[-1] > 1:
            return x.then(Step(func, args), layout, True, vocab_size=layout.shape[-1])
    return NotImplemented


def _columns(layout: torch.Tensor, columns: slice) -> torch.Tensor:
    return layout[..., columns]


_columns_once = _device.once(_columns)


def _choose_rows(x: Deferred, func: Any, index: Any, rows: tuple[Any, ...]) -> Any:
    """Rows by masks, tensors or lists, which are copies; by tensors of one number alone they would be views."""
    if not any(isinstance(each, list | range) or (isinstance(each, torch.Tensor) and each.ndim) for each in rows):
        shaped = _shape(x, T.__getitem__, (index,), {})
        return NotImplemented if shaped is None else _row_step(x, Step(func, (index,)), shaped[0])
    recipe, select = x.recipe, functools.partial(_at, (*rows, slice(None)))
    hidden = select(recipe.hidden[..., :1])
    layout = laid_out((*hidden.shape[:-1], recipe.layout.shape[-1]), recipe.dtype)
    return _row_step(x, Step(func, (index,)), _Shape(layout, select, False, True))


def _at(index: tuple[Any, ...], x: torch.Tensor) -> torch.Tensor:
    return x[index]


def _whole_index(index: Any, ndim: int) -> tuple[Any, ...] | None:
    """An index with one entry for each dimension, and for None; None where that is not known."""
    entries = index if isinstance(index, tuple) else (index,)
    known = (int, slice, list, range, types.EllipsisType, types.NoneType, torch.Tensor)
    if any(isinstance(each, (bool, *DEFERRED)) or not isinstance(each, known) for each in entries):
        return None
    taken = 0
    for each in entries:
        is_mask = isinstance(each, torch.Tensor) and each.dtype in (torch.bool, torch.uint8)
        taken += each.ndim if is_mask else 0 if each is None or each is Ellipsis else 1
    rest = (slice(None),) * (ndim - taken)
    at = [i for i, each in enumerate(entries) if each is Ellipsis]
    if len(at) > 1 or taken > ndim:
        return None
    found = (*entries[: at[0]], *rest, *entries[at[0] + 1 :]) if at else (*entries, *rest)
    return found or None


def iterate(x: Deferred, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    del func
    found = take_rows(x, T.unbind, args, kwargs) if x.dim() > 1 else NotImplemented
    return NotImplemented if found is NotImplemented else iter(found)
