"""What is computed of deferred logits without the logits: losses, log-probabilities, lse, entropy, the largest."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from lce_jax.types import scalars
from lce_torch_bridge.deferred._recipe import NOTHING, Recipe, Step, laid_out_alike
from lce_torch_bridge.ops._cross_entropy import linear_cross_entropy
from lce_torch_bridge.ops._logits import linear_logits
from lce_torch_bridge.ops._logprobs import linear_logprobs
from lce_torch_bridge.ops._topk import linear_topk
from lce_torch_bridge.tensors import _device

if TYPE_CHECKING:
    from lce_torch_bridge._types import LogprobOutput
    from lce_torch_bridge.deferred._recipe import Rows
    from lce_torch_bridge.deferred._traced import Deferred

F = torch.nn.functional


def _result(x: Deferred, value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A result in stock's dtype, which hooks of torch.distributed on the logits hear of in a backward."""
    _count(x)
    value = value.to(dtype)
    if value.requires_grad:
        for hook in x._hooks:
            value.register_hook(hook)
    return value


def _count(x: Deferred) -> None:
    if not torch.compiler.is_compiling():  # which would compile anew for each number
        x._used = True  # type: ignore[union-attr]
        x.recipe.source.deferral.served += 1


@_device.once
def _probed(function: Callable[..., torch.Tensor], dtype: torch.dtype, device: str, _autocast: Any) -> torch.dtype:
    return function(torch.zeros(1, 2, dtype=dtype, device=device)).dtype


def _dtype(x: Deferred, function: Callable[..., torch.Tensor]) -> torch.dtype:
    """The dtype that ``function``, of [1, 2], returns here: autocast knows which functions it makes float32."""
    device = x.recipe.source.device
    if (autocast := _device.autocast_dtype(device)) is None:
        return x.recipe.dtype
    return _probed(function, x.recipe.dtype, device, autocast)


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


def _recording(recipe: Recipe) -> contextlib.AbstractContextManager[None]:
    """Inside, autograd records what it records of the logits."""
    return NOTHING if recipe.grad else torch.no_grad()


def _is_last(x: Deferred, dim: Any) -> bool:
    dim = dim[0] if isinstance(dim, tuple | list) and len(dim) == 1 else dim
    return type(dim) is int and dim in (-1, x.recipe.layout.ndim - 1) and not x.recipe.classes_first


def _dim_and_keepdim(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, bool]:
    """None for what has other arguments too, such as NumPy's names of these."""
    if not kwargs.keys() <= {"dim", "keepdim", "dtype"}:
        return None, False
    given = dict(zip(("dim", "keepdim"), args, strict=False)) | kwargs
    return given.get("dim"), given.get("keepdim", False)


# Ids out of range: torch raises on the CPU, and ends the process on a GPU, where its rows are NaN here


def _outside(ids: torch.Tensor, vocab_size: int) -> Any:
    """Which ids are out of range, where nothing may look at them; else None, or NotImplemented where one is."""
    if torch.compiler.is_compiling() or not ids.is_cpu:
        return _is_outside(ids, vocab_size)
    least, most = map(int, torch.aminmax(ids)) if ids.numel() else (0, 0)
    return None if least >= 0 and most < vocab_size else NotImplemented


def _is_outside(ids: torch.Tensor, vocab_size: int) -> torch.Tensor:
    return ids // vocab_size != 0


type Counted = tuple[dict[str, Any], torch.Tensor | None]


def _counted(labels: torch.Tensor, vocab_size: int, ignored: int, reduction: str) -> Counted | None:
    """Options that say which tokens count, and where a loss is NaN, None: nowhere. None where a label is out of range.

    The host reads the labels: it waits for a GPU once, as the loss does to count tokens, and then launches nothing
    for labels that are in range. Out of range they have NaN on a GPU.
    """
    if torch.compiler.is_compiling():
        return _counted_unseen(labels, vocab_size, ignored, reduction)
    options: dict[str, Any] = {"ignore_index": None}
    ids = labels.cpu()
    least, most = map(int, torch.aminmax(ids)) if ids.numel() else (ignored, ignored)
    if least <= ignored <= most:
        options["ignore_index"] = ignored
        if least == most:
            return options, labels.new_ones((), dtype=torch.bool) if reduction == "mean" else None
        counts = most if least == ignored else least
        least, most = map(int, torch.aminmax(ids.masked_fill(ids == ignored, counts)))
    if least >= 0 and most < vocab_size:
        return options, None
    return None if labels.is_cpu else _counted_unseen(labels, vocab_size, ignored, reduction)


def _counted_unseen(labels: torch.Tensor, vocab_size: int, ignored: int, reduction: str) -> Counted:
    """`_counted` where nothing looks at the labels: NaN is of a label out of range, and of a mean of no tokens."""
    counts = labels != ignored
    outside, options = counts & _is_outside(labels, vocab_size), {"where": counts, "ignore_index": None}
    if reduction == "none":
        return options, outside
    return options, outside.any() if reduction == "sum" else outside.any() | ~counts.any()


def _poisoned(value: torch.Tensor, outside: torch.Tensor | None) -> torch.Tensor:
    return value if outside is None else value.masked_fill(outside, float("nan"))


def _cross_entropy(x: Deferred, target: Any, ignore_index: int, reduction: str, smoothing: float) -> torch.Tensor | Any:
    """`linear_cross_entropy`, with torch's NaN where no token counts."""
    recipe, options = x.recipe, x.recipe.options()
    wrong = (
        not isinstance(target, torch.Tensor) or target.dtype != torch.int64 or target.shape != recipe.hidden.shape[:-1]
    )
    if options is None or wrong or reduction not in ("mean", "sum", "none") or target.device != recipe.hidden.device:
        return NotImplemented
    if (recipe.layout.ndim > 2 and not recipe.classes_first) or not 0 <= smoothing < 1:
        return NotImplemented
    counted = _counted(target, recipe.vocab_size, ignore_index, reduction)
    if counted is None:
        return NotImplemented
    tokens, poison = counted
    with recipe.source.ready(), _recording(recipe):
        loss = linear_cross_entropy(
            recipe.hidden, recipe.source.weight, target, reduction=reduction, label_smoothing=smoothing, **tokens,  # type: ignore[arg-type]
            **options,
        )  # fmt: skip
        return _poisoned(loss, poison)


def cross_entropy(x: Deferred, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """torch.nn.functional.cross_entropy of logits, and nll_loss of a log_softmax."""
    is_nll = func.__name__ == "nll_loss"
    names = ("target", "weight", "size_average", "ignore_index", "reduce", "reduction", "label_smoothing")
    given = {"ignore_index": -100, "reduction": "mean", "label_smoothing": 0.0, **dict(zip(names, args, strict=False))}
    given |= kwargs
    others = [given.get(name) for name in ("weight", "size_average", "reduce")]
    if x.recipe.kind != ("log_softmax" if is_nll else "logits") or any(other is not None for other in others):
        return NotImplemented
    found = _cross_entropy(x, given.get("target"), given["ignore_index"], given["reduction"], given["label_smoothing"])
    if found is NotImplemented:
        return NotImplemented
    if is_nll:
        return _result(x, x.recipe.coefficient * found, x.recipe.dtype)
    return _result(x, found, _dtype(x, _probe_cross_entropy))


# Softmax


def log_softmax(x: Deferred, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The logarithm of the softmax, deferred too."""
    return softmax(x, func, args, kwargs, is_log=True)


def softmax(x: Deferred, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], is_log: bool = False) -> Any:
    """The softmax, deferred too."""
    dims = [each for each in args if type(each) is int]
    dim = kwargs.get("dim", dims[0] if dims else None)
    dtype = kwargs.get("dtype", next((each for each in args if isinstance(each, torch.dtype)), None))
    kinds = ("logits", "log_softmax") if x.recipe.coefficient == 1 else ("logits",)
    if x.recipe.kind not in kinds or not _is_last(x, dim):
        return NotImplemented
    if dtype is None:
        dtype = _dtype(x, _probe_log_softmax if is_log else _probe_softmax)
    layout = laid_out_alike(x.recipe.layout, dtype)
    logits = x.recipe if x.recipe.logits is None else x.recipe.logits
    step = Step(func, (dim,), {"dtype": dtype})  # which may be autocast's
    return x.then(step, layout, kind="log_softmax" if is_log else "softmax", logits=logits, rows_of=x.recipe.rows_of)


def exponential(x: Deferred, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The softmax of its logarithm, and back."""
    of, gives = ("log_softmax", "softmax") if func.__name__ == "exp" else ("softmax", "log_softmax")
    if x.recipe.kind != of or x.recipe.coefficient != 1 or args or kwargs:
        return NotImplemented
    layout = laid_out_alike(x.recipe.layout)
    return x.then(Step(func), layout, kind=gives, rows_of=x.recipe.rows_of)


# Statistics of each row: lse and entropy come from one pass


def statistics(x: Deferred, recipe: Recipe) -> LogprobOutput | None:
    """Lse and entropy of each row of logits, computed once for all that share the rows, and recorded as ``x`` is."""
    with _recording(x.recipe):
        return _statistics(recipe)


def _statistics(recipe: Recipe) -> LogprobOutput | None:
    found = _known_statistics(recipe)
    if found is not None:
        return found
    rows = recipe.rows_of
    if rows is not None and rows.taken is not None:  # one of several parts: all of them at once
        of_whole = _statistics(rows.of)
        return None if of_whole is None else _of_rows(of_whole, rows)
    options = recipe.options()
    if options is None:
        return None
    nothing = _no_labels(recipe.hidden)
    with recipe.source.ready(), recipe.source.kept():
        out = linear_logprobs(recipe.hidden, recipe.source.weight, nothing, **options)
    recipe.results[torch.is_grad_enabled()] = out
    return out


def _no_labels(rows: torch.Tensor) -> torch.Tensor:
    """For the rows of [..., H] or [..., K], whose labels nobody asks for."""
    return rows.new_full(rows.shape[:-1], -100, dtype=torch.int64)


def _known_statistics(recipe: Recipe) -> LogprobOutput | None:
    """Those of these rows, or of rows that they were taken from, if they are computed already.

    Without autograd those that it has recorded serve too, detached.
    """
    found = recipe.results.get(torch.is_grad_enabled())
    if found is None and (recorded := recipe.results.get(True)) is not None:
        lse, entropy = (field.detach() for field in (recorded.lse, recorded.entropy))
        found = recipe.results[False] = recorded._replace(logprobs=lse, lse=lse, entropy=entropy)
    if found is None and (rows := recipe.rows_of) is not None:
        of_whole = _known_statistics(rows.of)
        found = None if of_whole is None else _of_rows(of_whole, rows)
    return found


def _of_rows(out: LogprobOutput, rows: Rows) -> LogprobOutput:
    """The statistics of some rows, from those of all."""
    if rows.taken is None:
        lse, entropy = (rows.select(field.unsqueeze(-1)).squeeze(-1) for field in (out.lse, out.entropy))
        return out._replace(logprobs=lse, lse=lse, entropy=entropy)
    recorded = torch.is_grad_enabled()
    if recorded not in rows.taken:
        fields = [[x.squeeze(-1) for x in rows.select(field.unsqueeze(-1))] for field in (out.lse, out.entropy)]
        rows.taken[recorded] = list(zip(*fields, strict=True))
    lse, entropy = rows.taken[recorded][rows.part]
    return out._replace(logprobs=lse, lse=lse, entropy=entropy)


def logsumexp(x: Deferred, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """torch.logsumexp over the vocabulary."""
    del func
    dim, keepdim = _dim_and_keepdim(args, kwargs)
    if x.recipe.kind != "logits" or not _is_last(x, dim) or (out := statistics(x, x.recipe)) is None:
        return NotImplemented
    lse = out.lse.clone()  # which may be written into
    lse = _result(x, lse.unsqueeze(-1) if keepdim else lse, _dtype(x, _probe_logsumexp))
    if not (torch.compiler.is_compiling() or lse.is_inference()):
        lse._lse_of = x.recipe.results, lse._version  # type: ignore[attr-defined] # logits minus it are a log_softmax
    return lse


def equal(x: Deferred, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """With themselves, as torch.distributions looks for NaN: a row that has one has no lse either."""
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
        out = statistics(x, recipe)
    return NotImplemented if out is None else (out.lse == out.lse)[..., None].expand(x.shape)


def total(x: Deferred, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Sums and means over the vocabulary: entropy, and the mean logit."""
    recipe, is_mean = x.recipe, func.__name__ == "mean"
    dim, keepdim = _dim_and_keepdim(args, kwargs)
    of_all = is_mean and not (args or kwargs or recipe.classes_first)
    with _recording(recipe):
        value = _sum_of_row(x, recipe) if of_all or _is_last(x, dim) else None
    if value is None:
        return NotImplemented
    value = value / recipe.vocab_size if is_mean else value
    value = value if recipe.coefficient == 1 else recipe.coefficient * value
    value = value.mean() if of_all else value.unsqueeze(-1) if keepdim else value
    return _result(x, value, kwargs.get("dtype") or _dtype(x, _probe_mean if is_mean else _probe_sum))


def _sum_of_row(x: Deferred, recipe: Recipe) -> torch.Tensor | None:
    """The sum over the vocabulary of what the recipe makes, without its coefficient."""
    if recipe.kind in ("p_log_p", "p_logits"):
        assert recipe.logits is not None
        out = statistics(x, recipe.logits)
        if out is None or out.entropy is None:
            return None
        return -out.entropy if recipe.kind == "p_log_p" else out.lse - out.entropy
    options = recipe.options()
    if recipe.kind not in ("log_softmax", "logits") or options is None:
        return None
    if "logit_softcap" in options or "lora" in options:
        return None
    nothing = _no_labels(recipe.hidden)
    with recipe.source.ready(), _recording(recipe):
        out = linear_logprobs(recipe.hidden, recipe.source.weight, nothing, entropy=False, mean_logit=True, **options)
    assert out.mean_logit is not None
    return recipe.vocab_size * (out.mean_logit if recipe.kind == "logits" else out.mean_logit - out.lse)


# One number, or some, of each row


def gather(x: Deferred, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """torch.gather and take_along_dim over the vocabulary."""
    along = func.__name__ == "take_along_dim"
    index = kwargs.get("indices" if along else "index", (*args, None, None)[0 if along else 1])
    dim = kwargs.get("dim", (*args, None, None)[1 if along else 0])
    if not isinstance(index, torch.Tensor) or index.shape[:-1] != x.shape[:-1] or not _is_last(x, dim):
        return NotImplemented
    found = _values_at(x, index)
    return found if found is NotImplemented else _result(x, found, x.dtype)


def chosen(x: Deferred, index: tuple[torch.Tensor, ...], getitem: Callable[..., Any]) -> Any:
    """One number of each row, by tensors for all dimensions; ``getitem`` is that of deferred logits."""
    *rows, ids = index
    shape = torch.broadcast_shapes(*(each.shape for each in index))
    if not rows or shape != torch.broadcast_shapes(*(each.shape for each in rows)):
        return NotImplemented
    part = getitem(x, torch.Tensor.__getitem__, ((*rows, slice(None)),), {})
    if part is NotImplemented:
        return NotImplemented
    ids = ids.to(torch.int64).expand(shape)
    found = _values_at(part, torch.where(ids < 0, ids + x.shape[-1], ids)[..., None])
    return found if found is NotImplemented else _result(x, found[..., 0], x.dtype)


def _values_at(x: Deferred, ids: torch.Tensor) -> Any:
    """[..., K] logits or log-probabilities at ids, times the coefficient."""
    recipe, options = x.recipe, x.recipe.options()
    count = ids.shape[-1] if ids.ndim else 0
    known = options is not None and recipe.kind in ("logits", "log_softmax", "softmax")
    if (
        not known
        or ids.dtype != torch.int64
        or not 1 <= count <= scalars.MOST_CANDIDATES
        or ids.device != recipe.hidden.device
    ):
        return NotImplemented
    outside = _outside(ids, recipe.vocab_size)
    if outside is NotImplemented:
        return NotImplemented
    with recipe.source.ready(), _recording(recipe):
        value = _logits_at(recipe, ids, options) if recipe.kind == "logits" else _logprobs_at(recipe, ids, options)
        if value is None:
            return NotImplemented
        value = value.exp() if recipe.kind == "softmax" else value
        return _poisoned(recipe.coefficient * value if recipe.coefficient != 1 else value, outside)


def _logits_at(recipe: Recipe, ids: torch.Tensor, options: Any) -> torch.Tensor | None:
    """One logit of each row from a pass whose lse and entropy are kept for who asks next, as log-probabilities do."""
    if ids.shape[-1] > 1 or recipe.source.is_outside() or _known_statistics(recipe) is not None:
        return None if "lora" in options else linear_logits(recipe.hidden, recipe.source.weight, ids, **options)
    out = linear_logprobs(recipe.hidden, recipe.source.weight, ids[..., 0], **options)
    recipe.results[torch.is_grad_enabled()] = out
    return (out.logprobs + out.lse)[..., None]


def _logprobs_at(recipe: Recipe, ids: torch.Tensor, options: Any) -> torch.Tensor | None:
    """From one pass, whose lse and entropy are kept for who asks next; from an lse that is there, no pass at all."""
    assert recipe.logits is not None
    is_outside = recipe.source.is_outside()
    out = (_statistics if is_outside else _known_statistics)(recipe.logits)
    if out is not None and "lora" not in options:
        return linear_logits(recipe.hidden, recipe.source.weight, ids, **options) - out.lse[..., None]
    if ids.shape[-1] == 1:
        out = linear_logprobs(recipe.hidden, recipe.source.weight, ids[..., 0], **options)
        found = out.logprobs[..., None]
    else:
        nothing = _no_labels(ids)
        out = linear_logprobs(recipe.hidden, recipe.source.weight, nothing, candidates=ids, **options)
        assert out.candidate_logprobs is not None
        found = out.candidate_logprobs
    if not is_outside:
        recipe.logits.results[torch.is_grad_enabled()] = out
    return found


# The largest and the smallest


def argmax(x: Deferred, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """torch.argmax over the vocabulary."""
    del func
    dim, keepdim = _dim_and_keepdim(args, kwargs)
    ids = _largest(x, 1) if _is_last(x, dim) else None
    if ids is None:
        return NotImplemented
    _count(x)
    return ids if keepdim else ids[..., 0]


def extreme(x: Deferred, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """torch.max and torch.min over the vocabulary, with their ids."""
    dim, keepdim = _dim_and_keepdim(args, kwargs)
    sign = -1.0 if func.__name__ == "min" else 1.0
    ids = _largest(x, 1, sign) if _is_last(x, dim) and "out" not in kwargs else None
    if ids is None or (values := _values_at(x, ids)) is NotImplemented:
        return NotImplemented
    values = _result(x, values, x.dtype)
    return getattr(torch.return_types, func.__name__)(
        (values, ids) if keepdim else (values.squeeze(-1), ids.squeeze(-1))
    )


def aminmax(x: Deferred, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """torch.aminmax over the vocabulary, of logits without a gradient: one pass for both."""
    del func
    recipe, options = x.recipe, x.recipe.options()
    wrong = recipe.kind != "logits" or args or set(kwargs) - {"dim", "keepdim"} or not _is_last(x, kwargs.get("dim"))
    if wrong or options is None or x.requires_grad:
        return NotImplemented
    nothing = _no_labels(recipe.hidden)
    with recipe.source.ready(), torch.no_grad():
        out = linear_logprobs(recipe.hidden, recipe.source.weight, nothing, entropy=False, stats=True, **options)
    assert out.min_logit is not None
    assert out.max_logit is not None
    low, high = (_result(x, each, x.dtype) for each in (out.min_logit, out.max_logit))
    return torch.return_types.aminmax((low[..., None], high[..., None]) if kwargs.get("keepdim") else (low, high))


def topk(x: Deferred, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """torch.topk over the vocabulary, of the largest in order."""
    del func
    given = {"dim": -1, "largest": True, "sorted": True} | dict(
        zip(("k", "dim", "largest", "sorted"), args, strict=False)
    )
    given |= kwargs
    if not (_is_last(x, given["dim"]) and given["largest"] and type(given.get("k")) is int):
        return NotImplemented
    ids = _largest(x, given["k"])
    if ids is None or (values := _values_at(x, ids)) is NotImplemented:
        return NotImplemented
    return torch.return_types.topk((_result(x, values, x.dtype), ids))


def _largest(x: Deferred, k: int, sign: float = 1.0) -> torch.Tensor | None:
    """The ids of the k largest, or of the smallest with ``sign`` -1."""
    recipe, options = x.recipe, x.recipe.options()
    wrong = recipe.kind not in ("logits", "log_softmax", "softmax") or recipe.coefficient <= 0
    if wrong or options is None or "lora" in options or not 1 <= k <= min(scalars.MOST_CANDIDATES, recipe.vocab_size):
        return None
    with recipe.source.ready(), torch.no_grad():
        options["logit_scale"] = sign * options.get("logit_scale", 1.0)
        return linear_topk(recipe.hidden, recipe.source.weight, k, **options).ids


def table(functions: Callable[..., list[Any]]) -> dict[Any, Callable[..., Any]]:
    """These by torch's functions, which ``functions`` finds by their names."""
    return {
        **dict.fromkeys(functions("cross_entropy", "nll_loss"), cross_entropy),
        **dict.fromkeys(functions("softmax"), softmax),
        **dict.fromkeys(functions("log_softmax"), log_softmax),
        **dict.fromkeys(functions("exp", "log"), exponential),
        **dict.fromkeys(functions("logsumexp"), logsumexp),
        **dict.fromkeys(functions("sum", "mean"), total),
        **dict.fromkeys(functions("gather", "take_along_dim"), gather),
        **dict.fromkeys(functions("argmax"), argmax),
        **dict.fromkeys(functions("topk"), topk),
        **dict.fromkeys(functions("max", "min"), extreme),
        **dict.fromkeys(functions("aminmax"), aminmax),
        **dict.fromkeys(functions("__eq__", "eq"), equal),
    }
