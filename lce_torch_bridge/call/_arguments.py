"""A call's arguments, checked once, as plain tensors and one `Call`."""

from __future__ import annotations

import functools
import inspect
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from lce_jax import scalars
from lce_torch_bridge._types import Call, Entropy, OutOfVocab, Wgrad
from lce_torch_bridge.call import _checks, _dtensor, _tokens
from lce_torch_bridge.call._autocast import autocast
from lce_torch_bridge.launched_directly._way import way_of
from lce_torch_bridge.tensors import _tensor_parallel
from lce_torch_bridge.tensors._main_grad import accumulate_into_main_grad
from lce_torch_bridge.tensors._readable import is_readable, readable

if TYPE_CHECKING:
    import torch.distributed as dist


class Arguments(NamedTuple):
    """What the public functions make of what they are given."""

    hidden: torch.Tensor  # [..., H]
    weight: torch.Tensor  # [V, H] this rank's rows
    bias: torch.Tensor | None  # [V]
    labels: torch.Tensor  # [...]
    temperature: float | torch.Tensor  # broadcasts to labels
    candidates: torch.Tensor | None  # [..., K]
    floor: float | torch.Tensor | None  # broadcasts to labels
    where: torch.Tensor | None  # a mask or an index, without ignored labels
    call: Call


def of_call(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    tp_group: dist.ProcessGroup | None = None,
    temperature: float | torch.Tensor = 1.0,
    logit_scale: float = 1.0,
    logit_softcap: float | None = None,
    vocab_size: int | None = None,
    entropy: Entropy = True,
    stats: bool = False,
    mean_logit: bool = False,
    candidates: torch.Tensor | None = None,
    where: torch.Tensor | None = None,
    ignore_index: int | None = None,
    out_of_vocab: OutOfVocab = "zero",
    reduce_grad_hidden: bool = False,
    wgrad: Wgrad = "return",
    cache_bytes: int = 0,
    gradient_threshold: float = 0.0,
    vocab_part_size: int | None = None,
    logit_floor: float | torch.Tensor | None = None,
    implementation: str | tuple[str, ...] | None = None,
) -> Arguments:
    """The arguments of `linear_logprobs`, checked."""
    if tp_group is not None:
        _checks.group(tp_group)
    known = _fit(hidden, weight, labels)
    if not known and _dtensor.spans(hidden, tp_group):
        reduce_grad_hidden = True  # its placement says that the gradient is whole
    if not (known and where is None and candidates is logit_floor is None and type(temperature) is float):
        hidden, labels, temperature, where, candidates, logit_floor = _dtensor.tokens(
            hidden=hidden, labels=labels, temperature=temperature, where=where, candidates=candidates,
            logit_floor=logit_floor,
        )  # fmt: skip
    if not known:
        _checks.tensors(hidden, weight, labels)
    _checks.temperature(temperature, hidden, labels)
    if where is not None:
        _checks.where(where, hidden, labels)
    num_candidates = 0 if candidates is None else _checks.candidates(candidates, hidden, labels)
    if has_floor := logit_floor is not None:
        _checks.logit_floor(logit_floor, hidden, labels)
    if ignore_index is not None:
        where = _tokens.without(ignore_index, where, labels)
    scalars.one_of("wgrad", wgrad, ("return", "main_grad"))
    if not (known and bias is None and tp_group is None):
        weight, bias = _rows_of_head(weight, bias, tp_group, wgrad)
    if tp_group is not None:
        _check_group(tp_group, hidden, labels if candidates is None else candidates, where, weight, vocab_size)
    columns = weight.shape[0] * (1 if tp_group is None else tp_group.size())
    group = _tensor_parallel.NO_GROUP if tp_group is None else _tensor_parallel.name_of(tp_group)
    call = _cached_call(
        group, columns, vocab_size, logit_scale, logit_softcap, entropy, stats, mean_logit,
        num_candidates, has_floor, out_of_vocab, reduce_grad_hidden, cache_bytes, gradient_threshold, vocab_part_size,
        weight.shape[0], implementation,
    )  # fmt: skip
    if not known:
        _remember(hidden, weight, labels)
    return Arguments(hidden, weight, bias, labels, temperature, candidates, logit_floor, where, call)


OPTIONS = tuple(name for name, each in inspect.signature(of_call).parameters.items() if each.kind == each.KEYWORD_ONLY)
MOST_KNOWN = 4096
_known: set[Any] = set()  # shapes, dtypes and devices of operands that fit each other


def _fit(hidden: Any, weight: Any, labels: Any) -> bool:
    """Whether the three are plain tensors like those of an earlier call, so that they need no checks."""
    return not torch.compiler.is_compiling() and _described(hidden, weight, labels) in _known


def _remember(hidden: Any, weight: Any, labels: Any) -> None:
    """Notes that they fit each other, so that the next call need not check them."""
    described = None if torch.compiler.is_compiling() else _described(hidden, weight, labels)
    if described is None:
        return
    if len(_known) >= MOST_KNOWN:
        _known.clear()
    _known.add(described)


def _described(*tensors: Any) -> tuple[Any, ...] | None:
    """All that their checks look at. None if one is no plain tensor with memory, or has sizes that are traced."""
    x, y, z = tensors
    if not (is_readable(x) and is_readable(y) and is_readable(z)):
        return None
    try:
        described = x.shape, x.dtype, x.device, y.shape, y.dtype, y.device, z.shape, z.dtype, z.device
        hash(described)
    except (RuntimeError, TypeError):  # a nested tensor has no shape
        return None
    return described


def _cached_call(*options: Any) -> Call:
    """The options checked and normalised, each set of them once in a process: `_call` is slow beside a small call."""
    try:
        return (_call if torch.compiler.is_compiling() else _checked_once)(*options)
    except TypeError:  # options that have no hash, and those of a wrong type
        return _call(*options)


def _call(
    group: str,
    columns: int,
    vocab_size: Any,
    logit_scale: Any,
    logit_softcap: Any,
    entropy: Any,
    stats: Any,
    mean_logit: Any,
    num_candidates: int,
    has_floor: bool,
    out_of_vocab: str,
    reduce_grad_hidden: Any,
    cache_bytes: Any,
    gradient_threshold: Any,
    vocab_part_size: Any,
    rows: int,
    implementation: Any,
) -> Call:
    scalars.one_of("out_of_vocab", out_of_vocab, ("zero", "megatron"))
    cache_bytes = scalars.num_bytes("cache_bytes", cache_bytes)
    gradient_threshold = scalars.fraction("gradient_threshold", gradient_threshold)
    vocab_part_size = scalars.part_size(vocab_part_size, cache_bytes, gradient_threshold)
    scalars.whole_parts(vocab_part_size, columns, rows)
    if has_floor:
        scalars.alone_with_floor(num_candidates, scalars.flag("mean_logit", mean_logit))
    return Call(
        group=group,
        vocab_size=_checks.vocabulary(vocab_size, columns),
        logit_scale=scalars.number("logit_scale", logit_scale),
        logit_softcap=None if logit_softcap is None else scalars.positive("logit_softcap", logit_softcap),
        entropy=_checks.entropy(entropy),
        stats=scalars.flag("stats", stats),
        mean_logit=scalars.flag("mean_logit", mean_logit),
        num_candidates=num_candidates,
        has_floor=has_floor,
        megatron=out_of_vocab == "megatron",
        reduce_grad_hidden=scalars.flag("reduce_grad_hidden", reduce_grad_hidden),
        cache_bytes=cache_bytes,
        gradient_threshold=gradient_threshold,
        vocab_part_size=vocab_part_size,
        implementation=_checks.implementation(implementation),
    )


_checked_once = functools.lru_cache(maxsize=1024, typed=True)(_call)  # typed: 1 is no flag, though it equals True


def _rows_of_head(
    weight: Any, bias: Any, tp_group: dist.ProcessGroup | None, wgrad: str
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """This rank's weight and bias, plain tensors that fit each other."""
    if _dtensor.is_dtensor(weight):
        weight = _dtensor.rows("weight", weight, tp_group, wgrad)
    if _dtensor.is_dtensor(bias):
        bias = _dtensor.rows("bias", bias, tp_group)
    weight, bias = readable("weight", weight), readable("bias", bias)
    _checks.bias(bias, weight)
    return weight, bias


def _check_group(group: dist.ProcessGroup, hidden: Any, ids: Any, where: Any, weight: Any, vocab_size: Any) -> None:
    """`_tensor_parallel.check`, in a group's first call. The operators check too, where it cannot be done here."""
    if torch.compiler.is_compiling() or not (_checks.has_values(weight) and _checks.has_values(hidden)):
        return
    name = _tensor_parallel.name_of(group)
    if _tensor_parallel.is_new(name):
        rows = None if where is None else _tokens.rows_of(where)
        size = vocab_size if scalars.is_integer(vocab_size) else None
        flat, ids = hidden.reshape(-1, hidden.shape[-1]), ids.reshape(-1, *ids.shape[hidden.ndim - 1 :])
        _tensor_parallel.check(name, way_of(weight).direct, flat, ids, size, weight, rows=rows)


def weight_of(given: Arguments, wgrad: Wgrad) -> torch.Tensor:
    """The weight of the products: in autocast's dtype, its gradient on its way to where ``wgrad`` says."""
    weight = accumulate_into_main_grad(given.weight) if wgrad == "main_grad" else given.weight
    return autocast(weight, given.weight)


class Flat(NamedTuple):
    """What is per token, flat, of the tokens that are computed."""

    hidden: torch.Tensor  # [T, H]
    labels: torch.Tensor  # [T]
    temperature: torch.Tensor | None  # [T] float32; None: 1
    candidates: torch.Tensor | None  # [T, K]
    floor: torch.Tensor | None  # [T] float32; None: there is none
    rows: torch.Tensor | None  # their places: an index, or a mask that cannot be counted; None: all are computed


def flat(given: Arguments) -> Flat:
    """The per-token arguments of the tokens that are computed."""
    hidden, labels, candidates = given.hidden, given.labels, given.candidates
    temperature = _tokens.per_token(given.temperature, labels)
    floor = None if given.floor is None else _tokens.floor_per_token(given.floor, labels)
    if labels.ndim != 1:  # otherwise both are flat, and a view costs the host time, in the backward too
        hidden, labels = hidden.reshape(-1, hidden.shape[-1]), labels.reshape(-1)
    if candidates is not None:
        candidates = candidates.reshape(-1, candidates.shape[-1])
    if given.where is None:
        return Flat(hidden, labels, temperature, candidates, floor, None)
    rows, of = _tokens.rows_of(given.where), _tokens.only_rows
    numbers = of(temperature, rows, 1.0), of(candidates, rows, -1), of(floor, rows, 0.0)
    return Flat(of(hidden, rows, 0.0), of(labels, rows, 0), *numbers, rows)
