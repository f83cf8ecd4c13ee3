"""Computes results of torch functions of deferred logits with this package's functions, without the logits.

These are cross entropy, log-probabilities, lse, entropy, sums, means, and the largest and smallest logits. `make_table`
maps torch's functions to this module's, for `_dispatch.call`. Each function returns NotImplemented if it does not
support its arguments; the logits are then computed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from lce_jax.types import scalars
from lce_torch_bridge.deferred._recipe import NO_CONTEXT, Recipe, Step, make_layout_like
from lce_torch_bridge.ops._cross_entropy import linear_cross_entropy
from lce_torch_bridge.ops._logits import linear_logits
from lce_torch_bridge.ops._logprobs import linear_logprobs
from lce_torch_bridge.ops._topk import linear_topk
from lce_torch_bridge.tensors import _device

if TYPE_CHECKING:
    from lce_torch_bridge._types import LogprobOutput
    from lce_torch_bridge.deferred._recipe import RowSelection
    from lce_torch_bridge.deferred._traced import Deferred

F = torch.nn.functional


def _finish_result(x: Deferred, value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Counts a result, and returns it in ``dtype``. Hooks of torch.distributed on the logits move to the result."""
    _count_served(x)
    value = value.to(dtype)
    if value.requires_grad:
        for hook in x._hooks:
            value.register_hook(hook)
    return value


def _count_served(x: Deferred) -> None:
    if not torch.compiler.is_compiling():  # a counter in a graph would recompile the graph for each value
        x._used = True  # type: ignore[union-attr]
        x.recipe.source.deferral.served += 1


@_device.cache_results
def _probe_dtype(function: Callable[..., torch.Tensor], dtype: torch.dtype, device: str, _autocast: Any) -> torch.dtype:
    return function(torch.zeros(1, 2, dtype=dtype, device=device)).dtype


def _find_result_dtype(x: Deferred, function: Callable[..., torch.Tensor]) -> torch.dtype:
    """Returns ``function``'s result dtype in the head's autocast context, found by calling it on zeros [1, 2]."""
    device = x.recipe.source.device
    if (autocast := _device.autocast_dtype(device)) is None:
        return x.recipe.dtype
    return _probe_dtype(function, x.recipe.dtype, device, autocast)


def _probe_cross_entropy(z: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(z, torch.zeros(1, dtype=torch.int64, device=z.device))


def _probe_log_softmax(z: torch.Tensor) -> torch.Tensor:
    return F.log_softmax(z, -1)


def _probe_softmax(z: torch.Tensor) -> torch.Tensor:
    return F.softmax(z, -1)


def _probe_logsumexp(z: torch.Tensor) -> torch.Tensor:
    return torch.logsumexp(z, -1)


def _probe_sum(z: torch.Tensor) -> torch.Tensor:
    return z.sum(-1)


def _probe_mean(z: torch.Tensor) -> torch.Tensor:
    return z.mean(-1)


def _grad_mode(recipe: Recipe) -> contextlib.AbstractContextManager[None]:
    """Returns a context without autograd if autograd does not record the logits."""
    return NO_CONTEXT if recipe.grad else torch.no_grad()


def _is_vocab_dim(x: Deferred, dim: Any) -> bool:
    dim = dim[0] if isinstance(dim, tuple | list) and len(dim) == 1 else dim
    return type(dim) is int and dim in (-1, x.recipe.layout.ndim - 1) and not x.recipe.classes_first


def _parse_dim(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, bool]:
    """Returns dim and keepdim; dim is None if there are other arguments, such as NumPy's axis and keepdims."""
    if not kwargs.keys() <= {"dim", "keepdim", "dtype"}:
        return None, False
    arguments = dict(zip(("dim", "keepdim"), args, strict=False)) | kwargs
    return arguments.get("dim"), arguments.get("keepdim", False)


# For ids out of range, torch raises on the CPU, and aborts the process on a GPU. Here, such rows are NaN on a GPU.


def _find_out_of_range(ids: torch.Tensor, vocab_size: int) -> Any:
    """On the CPU, returns NotImplemented if an id is out of range, else None. On a GPU, returns a mask of such ids."""
    if torch.compiler.is_compiling() or not ids.is_cpu:
        return _are_out_of_range(ids, vocab_size)
    least, most = map(int, torch.aminmax(ids)) if ids.numel() else (0, 0)
    return None if least >= 0 and most < vocab_size else NotImplemented


def _are_out_of_range(ids: torch.Tensor, vocab_size: int) -> torch.Tensor:
    return ids // vocab_size != 0


type LabelMask = tuple[dict[str, Any], torch.Tensor | None]


def _mask_labels(labels: torch.Tensor, vocab_size: int, ignored: int, reduction: str) -> LabelMask | None:
    """Returns the options that select the tokens that count, and a mask of NaN losses; None if none is NaN.

    Returns None altogether if a label on the CPU is out of range. On a GPU, the loss of such a label is NaN.

    The host reads the labels, so it waits for a GPU once. A loss must wait anyway, to count its tokens. In exchange,
    labels that are all in range need no kernel.
    """
    if torch.compiler.is_compiling():
        return _mask_unread_labels(labels, vocab_size, ignored, reduction)
    options: dict[str, Any] = {"ignore_index": None}
    ids = labels.cpu()
    least, most = map(int, torch.aminmax(ids)) if ids.numel() else (ignored, ignored)
    if least <= ignored <= most:
        options["ignore_index"] = ignored
        if least == most:
            return options, labels.new_ones((), dtype=torch.bool) if reduction == "mean" else None
        unmasked = most if least == ignored else least  # any label that is not ignored
        least, most = map(int, torch.aminmax(ids.masked_fill(ids == ignored, unmasked)))
    if least >= 0 and most < vocab_size:
        return options, None
    return None if labels.is_cpu else _mask_unread_labels(labels, vocab_size, ignored, reduction)


def _mask_unread_labels(labels: torch.Tensor, vocab_size: int, ignored: int, reduction: str) -> LabelMask:
    """Does the same as `_mask_labels`, but computes the mask on the device, because the host cannot read the labels."""
    where = labels != ignored
    is_nan, options = where & _are_out_of_range(labels, vocab_size), {"where": where, "ignore_index": None}
    if reduction == "none":
        return options, is_nan
    return options, is_nan.any() if reduction == "sum" else is_nan.any() | ~where.any()


def _fill_nan(value: torch.Tensor, is_nan: torch.Tensor | None) -> torch.Tensor:
    return value if is_nan is None else value.masked_fill(is_nan, float("nan"))


def _cross_entropy(x: Deferred, target: Any, ignore_index: int, reduction: str, smoothing: float) -> torch.Tensor | Any:
    """Calls `linear_cross_entropy`, but the mean is NaN if no token counts, as in torch."""
    recipe, options = x.recipe, x.recipe.options()
    unsupported = (
        not isinstance(target, torch.Tensor) or target.dtype != torch.int64 or target.shape != recipe.hidden.shape[:-1]
    )
    if (
        options is None
        or unsupported
        or reduction not in ("mean", "sum", "none")
        or target.device != recipe.hidden.device
    ):
        return NotImplemented
    if (recipe.layout.ndim > 2 and not recipe.classes_first) or not 0 <= smoothing < 1:
        return NotImplemented
    mask = _mask_labels(target, recipe.vocab_size, ignore_index, reduction)
    if mask is None:
        return NotImplemented
    tokens, is_nan = mask
    with recipe.source.restore_context(), _grad_mode(recipe):
        loss = linear_cross_entropy(
            recipe.hidden, recipe.source.weight, target, reduction=reduction, label_smoothing=smoothing, **tokens,  # type: ignore[arg-type]
            **options,
        )  # fmt: skip
        return _fill_nan(loss, is_nan)


def cross_entropy(x: Deferred, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Computes torch.nn.functional.cross_entropy of logits, or nll_loss of a log_softmax."""
    is_nll = func.__name__ == "nll_loss"
    names = ("target", "weight", "size_average", "ignore_index", "reduce", "reduction", "label_smoothing")
    arguments = {
        "ignore_index": -100,
        "reduction": "mean",
        "label_smoothing": 0.0,
        **dict(zip(names, args, strict=False)),
    }
    arguments |= kwargs
    others = [arguments.get(name) for name in ("weight", "size_average", "reduce")]
    if x.recipe.kind != ("log_softmax" if is_nll else "logits") or any(other is not None for other in others):
        return NotImplemented
    loss = _cross_entropy(
        x, arguments.get("target"), arguments["ignore_index"], arguments["reduction"], arguments["label_smoothing"]
    )
    if loss is NotImplemented:
        return NotImplemented
    if is_nll:
        return _finish_result(x, x.recipe.coefficient * loss, x.recipe.dtype)
    return _finish_result(x, loss, _find_result_dtype(x, _probe_cross_entropy))


# Softmax


def log_softmax(x: Deferred, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Returns the log_softmax of the logits, also deferred."""
    return softmax(x, func, args, kwargs, is_log=True)


def softmax(x: Deferred, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], is_log: bool = False) -> Any:
    """Returns the softmax of the logits, or with ``is_log`` their log_softmax, also deferred."""
    dims = [each for each in args if type(each) is int]
    dim = kwargs.get("dim", dims[0] if dims else None)
    dtype = kwargs.get("dtype", next((each for each in args if isinstance(each, torch.dtype)), None))
    kinds = ("logits", "log_softmax") if x.recipe.coefficient == 1 else ("logits",)
    if x.recipe.kind not in kinds or not _is_vocab_dim(x, dim):
        return NotImplemented
    if dtype is None:
        dtype = _find_result_dtype(x, _probe_log_softmax if is_log else _probe_softmax)
    layout = make_layout_like(x.recipe.layout, dtype)
    logits = x.recipe if x.recipe.logits is None else x.recipe.logits
    step = Step(func, (dim,), {"dtype": dtype})  # explicit, because it may come from autocast
    return x.add_step(
        step, layout, kind="log_softmax" if is_log else "softmax", logits=logits, selection=x.recipe.selection
    )


def exp_or_log(x: Deferred, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Turns exp of a log_softmax into the softmax, and log of a softmax into the log_softmax, also deferred."""
    before, after = ("log_softmax", "softmax") if func.__name__ == "exp" else ("softmax", "log_softmax")
    if x.recipe.kind != before or x.recipe.coefficient != 1 or args or kwargs:
        return NotImplemented
    layout = make_layout_like(x.recipe.layout)
    return x.add_step(Step(func), layout, kind=after, selection=x.recipe.selection)


# Statistics of each row: one pass computes lse and entropy


def compute_statistics(x: Deferred, recipe: Recipe) -> LogprobOutput | None:
    """Returns lse and entropy of each row, computed once for all tensors that share these rows."""
    with _grad_mode(x.recipe):
        return _compute_statistics(recipe)


def _compute_statistics(recipe: Recipe) -> LogprobOutput | None:
    out = _find_statistics(recipe)
    if out is not None:
        return out
    rows = recipe.selection
    if rows is not None and rows.parts is not None:  # one of several parts: compute all parts at once
        all_rows = _compute_statistics(rows.recipe)
        return None if all_rows is None else _take_statistics(all_rows, rows)
    options = recipe.options()
    if options is None:
        return None
    labels = _make_ignored_labels(recipe.hidden)
    with recipe.source.restore_context(), recipe.source.suspend_checkpoint():
        out = linear_logprobs(recipe.hidden, recipe.source.weight, labels, **options)
    recipe.results[torch.is_grad_enabled()] = out
    return out


def _make_ignored_labels(rows: torch.Tensor) -> torch.Tensor:
    """Returns labels [...] for ``rows`` [..., K], all -100, for calls of which only statistics are needed."""
    return rows.new_full(rows.shape[:-1], -100, dtype=torch.int64)


def _find_statistics(recipe: Recipe) -> LogprobOutput | None:
    """Returns statistics that are already computed, for these rows or for rows that contain them; else None.

    While autograd is off, statistics that it has recorded are detached and used too.
    """
    out = recipe.results.get(torch.is_grad_enabled())
    if out is None and (recorded := recipe.results.get(True)) is not None:
        lse, entropy = (field.detach() for field in (recorded.lse, recorded.entropy))
        out = recipe.results[False] = recorded._replace(logprobs=lse, lse=lse, entropy=entropy)
    if out is None and (rows := recipe.selection) is not None:
        all_rows = _find_statistics(rows.recipe)
        out = None if all_rows is None else _take_statistics(all_rows, rows)
    return out


def _take_statistics(out: LogprobOutput, rows: RowSelection) -> LogprobOutput:
    """Returns the statistics of the selected rows, taken from ``out``, the statistics of all rows."""
    if rows.parts is None:
        lse, entropy = (rows.select(field.unsqueeze(-1)).squeeze(-1) for field in (out.lse, out.entropy))
        return out._replace(logprobs=lse, lse=lse, entropy=entropy)
    is_recorded = torch.is_grad_enabled()
    if is_recorded not in rows.parts:
        fields = [[x.squeeze(-1) for x in rows.select(field.unsqueeze(-1))] for field in (out.lse, out.entropy)]
        rows.parts[is_recorded] = list(zip(*fields, strict=True))
    lse, entropy = rows.parts[is_recorded][rows.part]
    return out._replace(logprobs=lse, lse=lse, entropy=entropy)


def logsumexp(x: Deferred, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Computes torch.logsumexp over the vocabulary."""
    del func
    dim, keepdim = _parse_dim(args, kwargs)
    if x.recipe.kind != "logits" or not _is_vocab_dim(x, dim) or (out := compute_statistics(x, x.recipe)) is None:
        return NotImplemented
    lse = out.lse.clone()  # because the caller may write into it
    lse = _finish_result(x, lse.unsqueeze(-1) if keepdim else lse, _find_result_dtype(x, _probe_logsumexp))
    if not (torch.compiler.is_compiling() or lse.is_inference()):
        lse._lse_of = x.recipe.results, lse._version  # type: ignore[attr-defined] # logits minus this lse are a log_softmax
    return lse


def equal(x: Deferred, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Computes ``logits == logits``, torch.distributions' NaN check: a row with a NaN also has an lse of NaN."""
    del func
    recipe = x.recipe if x.recipe.logits is None else x.recipe.logits
    if (
        len(args) != 1
        or args[0] is not x
        or kwargs
        or x.recipe.kind not in ("logits", "log_softmax")
        or recipe.classes_first
    ):
        return NotImplemented
    with torch.no_grad():
        out = compute_statistics(x, recipe)
    return NotImplemented if out is None else (out.lse == out.lse)[..., None].expand(x.shape)


def reduce(x: Deferred, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Computes sums and means over the vocabulary, for entropies and mean logits, and the mean of all elements."""
    recipe, is_mean = x.recipe, func.__name__ == "mean"
    dim, keepdim = _parse_dim(args, kwargs)
    over_all = is_mean and not (args or kwargs or recipe.classes_first)
    with _grad_mode(recipe):
        value = _sum_over_vocab(x, recipe) if over_all or _is_vocab_dim(x, dim) else None
    if value is None:
        return NotImplemented
    value = value / recipe.vocab_size if is_mean else value
    value = value if recipe.coefficient == 1 else recipe.coefficient * value
    value = value.mean() if over_all else value.unsqueeze(-1) if keepdim else value
    return _finish_result(
        x, value, kwargs.get("dtype") or _find_result_dtype(x, _probe_mean if is_mean else _probe_sum)
    )


def _sum_over_vocab(x: Deferred, recipe: Recipe) -> torch.Tensor | None:
    """Returns the sum over the vocabulary, without the recipe's coefficient."""
    if recipe.kind in ("p_log_p", "p_logits"):
        assert recipe.logits is not None
        out = compute_statistics(x, recipe.logits)
        if out is None or out.entropy is None:
            return None
        return -out.entropy if recipe.kind == "p_log_p" else out.lse - out.entropy
    options = recipe.options()
    if recipe.kind not in ("log_softmax", "logits") or options is None:
        return None
    if "logit_softcap" in options or "lora" in options:
        return None
    labels = _make_ignored_labels(recipe.hidden)
    with recipe.source.restore_context(), _grad_mode(recipe):
        out = linear_logprobs(recipe.hidden, recipe.source.weight, labels, entropy=False, mean_logit=True, **options)
    assert out.mean_logit is not None
    return recipe.vocab_size * (out.mean_logit if recipe.kind == "logits" else out.mean_logit - out.lse)


# One element, or several, of each row


def gather(x: Deferred, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Computes torch.gather and take_along_dim over the vocabulary."""
    is_take = func.__name__ == "take_along_dim"
    index = kwargs.get("indices" if is_take else "index", (*args, None, None)[0 if is_take else 1])
    dim = kwargs.get("dim", (*args, None, None)[1 if is_take else 0])
    if not isinstance(index, torch.Tensor) or index.shape[:-1] != x.shape[:-1] or not _is_vocab_dim(x, dim):
        return NotImplemented
    values = _compute_values_at(x, index)
    return values if values is NotImplemented else _finish_result(x, values, x.dtype)


def index_logits(x: Deferred, index: tuple[torch.Tensor, ...], getitem: Callable[..., Any]) -> Any:
    """Returns the elements at one index tensor per dimension. ``getitem`` selects rows of deferred logits."""
    *rows, ids = index
    shape = torch.broadcast_shapes(*(each.shape for each in index))
    if not rows or shape != torch.broadcast_shapes(*(each.shape for each in rows)):
        return NotImplemented
    part = getitem(x, torch.Tensor.__getitem__, ((*rows, slice(None)),), {})
    if part is NotImplemented:
        return NotImplemented
    ids = ids.to(torch.int64).expand(shape)
    values = _compute_values_at(part, torch.where(ids < 0, ids + x.shape[-1], ids)[..., None])
    return values if values is NotImplemented else _finish_result(x, values[..., 0], x.dtype)


def _compute_values_at(x: Deferred, ids: torch.Tensor) -> Any:
    """Returns [..., K] logits, log-probabilities or probabilities at ids, times the recipe's coefficient."""
    recipe, options = x.recipe, x.recipe.options()
    count = ids.shape[-1] if ids.ndim else 0
    supported = options is not None and recipe.kind in ("logits", "log_softmax", "softmax")
    if (
        not supported
        or ids.dtype != torch.int64
        or not 1 <= count <= scalars.MOST_CANDIDATES
        or ids.device != recipe.hidden.device
    ):
        return NotImplemented
    out_of_range = _find_out_of_range(ids, recipe.vocab_size)
    if out_of_range is NotImplemented:
        return NotImplemented
    with recipe.source.restore_context(), _grad_mode(recipe):
        value = (
            _compute_logits_at(recipe, ids, options)
            if recipe.kind == "logits"
            else _compute_logprobs_at(recipe, ids, options)
        )
        if value is None:
            return NotImplemented
        value = value.exp() if recipe.kind == "softmax" else value
        return _fill_nan(recipe.coefficient * value if recipe.coefficient != 1 else value, out_of_range)


def _compute_logits_at(recipe: Recipe, ids: torch.Tensor, options: Any) -> torch.Tensor | None:
    """Returns [..., K] logits at ids. For K = 1, also computes and saves lse and entropy if they are not saved yet."""
    if ids.shape[-1] > 1 or recipe.source.is_in_other_checkpoint() or _find_statistics(recipe) is not None:
        return None if "lora" in options else linear_logits(recipe.hidden, recipe.source.weight, ids, **options)
    out = linear_logprobs(recipe.hidden, recipe.source.weight, ids[..., 0], **options)
    recipe.results[torch.is_grad_enabled()] = out
    return (out.logprobs + out.lse)[..., None]


def _compute_logprobs_at(recipe: Recipe, ids: torch.Tensor, options: Any) -> torch.Tensor | None:
    """Returns [..., K] log-probabilities at ids: logits minus a saved lse, or results of a new pass."""
    assert recipe.logits is not None
    other_checkpoint = recipe.source.is_in_other_checkpoint()
    out = (_compute_statistics if other_checkpoint else _find_statistics)(recipe.logits)
    if out is not None and "lora" not in options:
        return linear_logits(recipe.hidden, recipe.source.weight, ids, **options) - out.lse[..., None]
    if ids.shape[-1] == 1:
        out = linear_logprobs(recipe.hidden, recipe.source.weight, ids[..., 0], **options)
        logprobs = out.logprobs[..., None]
    else:
        labels = _make_ignored_labels(ids)
        out = linear_logprobs(recipe.hidden, recipe.source.weight, labels, candidates=ids, **options)
        assert out.candidate_logprobs is not None
        logprobs = out.candidate_logprobs
    if not other_checkpoint:
        recipe.logits.results[torch.is_grad_enabled()] = out
    return logprobs


# The largest and smallest logits


def argmax(x: Deferred, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Computes torch.argmax over the vocabulary."""
    del func
    dim, keepdim = _parse_dim(args, kwargs)
    ids = _find_largest_ids(x, 1) if _is_vocab_dim(x, dim) else None
    if ids is None:
        return NotImplemented
    _count_served(x)
    return ids if keepdim else ids[..., 0]


def find_extreme(x: Deferred, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Computes torch.max and torch.min over the vocabulary, with their ids."""
    dim, keepdim = _parse_dim(args, kwargs)
    sign = -1.0 if func.__name__ == "min" else 1.0
    ids = _find_largest_ids(x, 1, sign) if _is_vocab_dim(x, dim) and "out" not in kwargs else None
    if ids is None or (values := _compute_values_at(x, ids)) is NotImplemented:
        return NotImplemented
    values = _finish_result(x, values, x.dtype)
    return getattr(torch.return_types, func.__name__)(
        (values, ids) if keepdim else (values.squeeze(-1), ids.squeeze(-1))
    )


def aminmax(x: Deferred, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Computes torch.aminmax over the vocabulary in one pass, for logits without a gradient."""
    del func
    recipe, options = x.recipe, x.recipe.options()
    unsupported = (
        recipe.kind != "logits" or args or set(kwargs) - {"dim", "keepdim"} or not _is_vocab_dim(x, kwargs.get("dim"))
    )
    if unsupported or options is None or x.requires_grad:
        return NotImplemented
    labels = _make_ignored_labels(recipe.hidden)
    with recipe.source.restore_context(), torch.no_grad():
        out = linear_logprobs(recipe.hidden, recipe.source.weight, labels, entropy=False, stats=True, **options)
    assert out.min_logit is not None
    assert out.max_logit is not None
    low, high = (_finish_result(x, each, x.dtype) for each in (out.min_logit, out.max_logit))
    return torch.return_types.aminmax((low[..., None], high[..., None]) if kwargs.get("keepdim") else (low, high))


def topk(x: Deferred, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Computes torch.topk over the vocabulary, for the largest logits in descending order."""
    del func
    arguments = {"dim": -1, "largest": True, "sorted": True} | dict(
        zip(("k", "dim", "largest", "sorted"), args, strict=False)
    )
    arguments |= kwargs
    if not (_is_vocab_dim(x, arguments["dim"]) and arguments["largest"] and type(arguments.get("k")) is int):
        return NotImplemented
    ids = _find_largest_ids(x, arguments["k"])
    if ids is None or (values := _compute_values_at(x, ids)) is NotImplemented:
        return NotImplemented
    return torch.return_types.topk((_finish_result(x, values, x.dtype), ids))


def _find_largest_ids(x: Deferred, k: int, sign: float = 1.0) -> torch.Tensor | None:
    """Returns the ids of the k largest logits, or of the k smallest if ``sign`` is -1; None if not supported."""
    recipe, options = x.recipe, x.recipe.options()
    unsupported = recipe.kind not in ("logits", "log_softmax", "softmax") or recipe.coefficient <= 0
    if (
        unsupported
        or options is None
        or "lora" in options
        or not 1 <= k <= min(scalars.MOST_CANDIDATES, recipe.vocab_size)
    ):
        return None
    with recipe.source.restore_context(), torch.no_grad():
        options["logit_scale"] = sign * options.get("logit_scale", 1.0)
        return linear_topk(recipe.hidden, recipe.source.weight, k, **options).ids


def make_table(functions: Callable[..., list[Any]]) -> dict[Any, Callable[..., Any]]:
    """Returns a dict from torch's functions to this module's. ``functions`` finds torch's functions by name."""
    return {
        **dict.fromkeys(functions("cross_entropy", "nll_loss"), cross_entropy),
        **dict.fromkeys(functions("softmax"), softmax),
        **dict.fromkeys(functions("log_softmax"), log_softmax),
        **dict.fromkeys(functions("exp", "log"), exp_or_log),
        **dict.fromkeys(functions("logsumexp"), logsumexp),
        **dict.fromkeys(functions("sum", "mean"), reduce),
        **dict.fromkeys(functions("gather", "take_along_dim"), gather),
        **dict.fromkeys(functions("argmax"), argmax),
        **dict.fromkeys(functions("topk"), topk),
        **dict.fromkeys(functions("max", "min"), find_extreme),
        **dict.fromkeys(functions("aminmax"), aminmax),
        **dict.fromkeys(functions("__eq__", "eq"), equal),
    }
