"""A call's arguments, checked once, as plain tensors and one `TorchCall`; and its results in the shape of labels."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, TypedDict

import torch
from torch.fx.experimental.symbolic_shapes import statically_known_true

from lce_jax.types import scalars
from lce_torch_bridge._types import Entropy, Lora, OutOfVocab, Tensors, TorchCall, Wgrad, call_with
from lce_torch_bridge.call import _checks, _dtensor
from lce_torch_bridge.launched_directly import _passes, _way
from lce_torch_bridge.launched_directly._way import way_of
from lce_torch_bridge.tensors import _device, _tensor_parallel
from lce_torch_bridge.tensors._device import is_readable, readable
from lce_torch_bridge.tensors._weight import accumulate_into_main_grad, autocast

if TYPE_CHECKING:
    import torch.distributed as dist

    from lce_torch_bridge._types import Entropy


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
    lora: Lora | None
    call: TorchCall


class Options(NamedTuple):
    """The options of `linear_logprobs`, which says what each means; other functions have some of them."""

    bias: torch.Tensor | None = None
    tp_group: dist.ProcessGroup | None = None
    temperature: float | torch.Tensor = 1.0
    logit_scale: float = 1.0
    logit_softcap: float | None = None
    vocab_size: int | None = None
    entropy: Entropy = True
    stats: bool = False
    mean_logit: bool = False
    candidates: torch.Tensor | None = None
    where: torch.Tensor | None = None
    ignore_index: int | None = None
    out_of_vocab: OutOfVocab = "zero"
    reduce_grad_hidden: bool = False
    wgrad: Wgrad = "return"
    cache_bytes: int | None = None
    gradient_threshold: float = 0.0
    vocab_part_size: int | None = None
    logit_floor: float | torch.Tensor | None = None
    implementation: str | tuple[str, ...] | None = None
    lora: Lora | None = None


IN_NO_CALL = ("bias", "tp_group", "temperature", "candidates", "where", "ignore_index", "wgrad", "logit_floor", "lora")
OF_CALL = [i for i, name in enumerate(Options._fields) if name not in IN_NO_CALL]  # what a `TorchCall` holds
CACHE = OF_CALL.index(Options._fields.index("cache_bytes"))


def check_names(
    function: Callable[..., Any],
    given: Mapping[str, Any],
    refused: Mapping[str, str],
    loss_fn: Callable[..., Any] | None = None,
) -> None:
    """The names in a function's ``**options``: all `Options` but those ``refused``, with the reason for each."""
    for name, why in refused.items():
        if name in given:
            raise TypeError(f"{name}={_shown(given[name])}: {why}; linear_logprobs has this option")
    unknown = [name for name in given if name not in Options._fields]
    if unknown:
        own = [each.name for each in inspect.signature(function).parameters.values() if each.kind == each.KEYWORD_ONLY]
        known = dict.fromkeys([*own, *(name for name in Options._fields if name not in refused)])
        raise scalars.unknown_options_error(function.__name__, unknown, list(known), loss_fn)


def check_unknown(function: Callable[..., Any], unknown: Mapping[str, Any]) -> None:
    """Refuses names that a function with all its options in its signature does not have."""
    if unknown:
        has = inspect.signature(function).parameters
        others = [name for name in Options._fields if name not in has]
        check_names(function, unknown, dict.fromkeys(others, f"{function.__name__} has no such option"))


def _shown(value: Any) -> str:
    """A value in a message, without a tensor's numbers."""
    return f"{value.dtype} {tuple(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)


def shown(options: Mapping[str, Any]) -> str:
    """Options as they are written in a call."""
    return ", ".join(f"{name}={_shown(value)}" for name, value in options.items())


def of_call(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, options: Options) -> Arguments:
    """The arguments of a call, checked."""
    tp_group, bias, temperature = options.tp_group, options.bias, options.temperature
    where, candidates, logit_floor = options.where, options.candidates, options.logit_floor
    if tp_group is not None:
        _checks.group(tp_group)
    described = None if torch.compiler.is_compiling() else _described(hidden, weight, labels)
    known = described is not None and described in _known
    if not known and _dtensor.spans(hidden, tp_group):
        options = options._replace(reduce_grad_hidden=True)  # its placement says that the gradient is whole
    if not (known and where is None and candidates is logit_floor is None and type(temperature) is float):
        hidden, labels, temperature, where, candidates, logit_floor = _dtensor.tokens(
            hidden=hidden, labels=labels, temperature=temperature, where=where, candidates=candidates,
            logit_floor=logit_floor,
        )  # fmt: skip
    if not known:
        _checks.tensors(hidden, weight, labels)
    if not known or type(temperature) is not float or temperature != 1.0:
        _checks.temperature(temperature, hidden, labels)
    if where is not None:
        _checks.where(where, hidden, labels)
    num_candidates = 0 if candidates is None else _checks.candidates(candidates, hidden, labels)
    if has_floor := logit_floor is not None:
        _checks.logit_floor(logit_floor, hidden, labels)
    if options.ignore_index is not None:
        where = without(options.ignore_index, where, labels)
    scalars.check_choice("wgrad", options.wgrad, ("return", "main_grad"))
    if not (known and bias is None and tp_group is None):
        weight, bias = _rows_of_head(weight, bias, tp_group, options.wgrad)
    rank = 0
    if options.lora is not None:
        rank = _checks.lora(options.lora, hidden, weight, bias=bias, tp_group=tp_group, wgrad=options.wgrad)
    if tp_group is not None:
        _check_group(tp_group, hidden, labels if candidates is None else candidates, where, weight, options.vocab_size)
    given = [options[i] for i in OF_CALL]
    if options.cache_bytes is None:
        given[CACHE], _ = cache_by_default(hidden, weight, options)
    group = _tensor_parallel.NO_GROUP if tp_group is None else _tensor_parallel.name_of(tp_group)
    shards = 1 if tp_group is None else tp_group.size()
    call = _cached_call(group, shards, weight.shape[0], num_candidates, has_floor, rank, *given)
    if described is not None and not known:
        if len(_known) >= MOST_KNOWN:
            _known.clear()
        _known.add(described)
    return Arguments(hidden, weight, bias, labels, temperature, candidates, logit_floor, where, options.lora, call)


def cache_by_default(hidden: torch.Tensor, weight: torch.Tensor, options: Options) -> tuple[int, str]:
    """What ``cache_bytes=None`` stands for, and why."""
    if not _device.is_differentiated(hidden, weight, options.bias, *(options.lora or ())[:2]):
        return 0, "no gradient is asked for"
    if not _way.on_gpu(hidden):
        return 0, "hidden is on no GPU"
    if options.vocab_part_size is not None or options.gradient_threshold:
        return 0, "with vocab_part_size no backward uses a cache, and with gradient_threshold it saves little"
    if _device.is_traced():
        return 0, "the call is traced"
    return scalars.CACHE_BYTES, "a gradient is asked for, on a GPU"


MOST_KNOWN = 4096
_known: set[Any] = set()  # shapes, dtypes and devices of operands that fit each other


def _described(x: Any, y: Any, z: Any) -> tuple[Any, ...] | None:
    """All that their checks look at; None where they must be checked in each call."""
    try:
        if not (is_readable(x) and is_readable(y) and is_readable(z)):
            return None
        described = x.shape, x.dtype, x.device, y.shape, y.dtype, y.device, z.shape, z.dtype, z.device
        hash(described)
    except (RuntimeError, TypeError):  # a nested tensor has no shape, and sizes that are traced no hash
        return None
    return described


def _cached_call(*given: Any) -> TorchCall:
    """The options checked and normalised, each set of them once in a process: `_call` is slow beside a small call."""
    try:
        return (_call if torch.compiler.is_compiling() else _checked_once)(*given)
    except TypeError:  # options that have no hash, and those of a wrong type
        return _call(*given)


def check_values(options: Options, rows: int) -> None:
    """Refuses a number, flag or name that a call would refuse, before there is a call of a head of so many rows."""
    scalars.check_choice("wgrad", options.wgrad, ("return", "main_grad"))
    if not isinstance(options.temperature, torch.Tensor):
        scalars.positive("temperature", options.temperature)
    floor, group = options.logit_floor, options.tp_group
    if floor is not None and not isinstance(floor, torch.Tensor):
        scalars.bound("logit_floor", floor)
    if group is not None:
        _checks.group(group)
    given = [options[i] for i in OF_CALL]
    given[CACHE] = 0 if options.cache_bytes is None else options.cache_bytes
    shards = 1 if group is None else group.size()
    _cached_call(_tensor_parallel.NO_GROUP, shards, rows, 0, floor is not None, 0, *given)


def _call(
    group: str, shards: int, rows: int, num_candidates: int, has_floor: bool, rank: int, *given: Any
) -> TorchCall:
    names, columns = [Options._fields[i] for i in OF_CALL], shards * rows
    options = Options(**dict(zip(names, given, strict=True)))
    scalars.check_choice("out_of_vocab", options.out_of_vocab, ("zero", "megatron"))
    cache_bytes = scalars.num_bytes("cache_bytes", options.cache_bytes)
    gradient_threshold = scalars.fraction("gradient_threshold", options.gradient_threshold)
    vocab_part_size = scalars.check_part_size(options.vocab_part_size, cache_bytes, gradient_threshold)
    scalars.check_vocab_parts(vocab_part_size, columns, rows)
    if has_floor:
        scalars.check_floor_options(num_candidates, scalars.flag("mean_logit", options.mean_logit))
    softcap, size = options.logit_softcap, _checks.vocabulary(options.vocab_size, columns)
    traced = torch.compiler.is_compiling() or type(columns) is not int
    return call_with(
        group=group,
        vocab_size=0 if traced and options.vocab_size is None else size,
        logit_scale=scalars.number("logit_scale", options.logit_scale),
        logit_softcap=None if softcap is None else scalars.positive("logit_softcap", softcap),
        entropy=_checks.entropy(options.entropy),
        metric_entropy=options.entropy == "metric",
        stats=scalars.flag("stats", options.stats),
        mean_logit=scalars.flag("mean_logit", options.mean_logit),
        num_candidates=int(num_candidates),
        has_floor=has_floor,
        megatron=options.out_of_vocab == "megatron",
        reduce_grad_hidden=scalars.flag("reduce_grad_hidden", options.reduce_grad_hidden)
        and group != _tensor_parallel.NO_GROUP,
        cache_bytes=cache_bytes,
        gradient_threshold=gradient_threshold,
        vocab_part_size=vocab_part_size,
        requested=_checks.implementation(options.implementation),
        rank=rank,
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
        rows = None if where is None else rows_of(where)
        size = vocab_size if scalars.is_integer(vocab_size) else None
        flat, ids = hidden.reshape(-1, hidden.shape[-1]), ids.reshape(-1, *ids.shape[hidden.ndim - 1 :])
        launches = functools.partial(_passes.launches, way_of(weight))
        _tensor_parallel.check(name, launches, flat, ids, size, weight, rows=rows)


def weight_of(given: Arguments, wgrad: Wgrad) -> torch.Tensor:
    """The weight of the products: in autocast's dtype, its gradient on its way to where ``wgrad`` says."""
    weight = accumulate_into_main_grad(given.weight) if wgrad == "main_grad" else given.weight
    return autocast(weight, given.weight)


def operands(given: Arguments, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor | None]:
    """The operands, flat, of the tokens that are computed.

    And their places: an index, or a mask that cannot be counted; None: all are computed.
    """
    hidden, labels, candidates = given.hidden, given.labels, given.candidates
    temperature = _temperatures(given.temperature, labels)
    floor = None if given.floor is None else _floors(given.floor, labels)
    if labels.ndim != 1:  # otherwise both are flat, and a view costs the host time, in the backward too
        hidden, labels = hidden.reshape(-1, hidden.shape[-1]), labels.reshape(-1)
    if candidates is not None:
        candidates = candidates.reshape(-1, candidates.shape[-1])
    rows, of = None if given.where is None else rows_of(given.where), only_rows
    x = Tensors(hidden, weight, given.bias, labels, temperature, candidates, floor)
    if rows is not None:
        numbers = of(temperature, rows, 1.0), of(candidates, rows, -1), of(floor, rows, 0.0)
        x = Tensors(of(hidden, rows, 0.0), weight, given.bias, of(labels, rows, 0), *numbers)
    return x if given.lora is None else _with_adapter(x, *given.lora, given.call.jax.rank), rows


def _with_adapter(x: Tensors, a: torch.Tensor, b: torch.Tensor, scale: float, rank: int) -> Tensors:
    """With u = hidden · (scale · A)ᵀ beside hidden, and B, both padded. Autograd differentiates it."""
    dtype, missing = x.weight.dtype, rank - a.shape[0]
    a = torch.nn.functional.pad((a.float() * scalars.number("lora's scale", scale)).to(dtype), (0, 0, 0, missing))
    u = torch.nn.functional.linear(x.hidden.to(dtype), a)
    return x._replace(hidden=torch.cat([x.hidden, u], 1), bias=torch.nn.functional.pad(b, (0, missing)))


def _temperatures(temperature: float | torch.Tensor, labels: torch.Tensor) -> torch.Tensor | None:
    """One temperature per token, because a number would be compiled in; None for 1.

    Under ``torch.compile`` a varying number is symbolic. ``torch.full`` of it, or a comparison with 1, would make it
    a constant of the graph.
    """
    if isinstance(temperature, torch.Tensor):
        return temperature.to(torch.float32).expand(labels.shape).reshape(-1)
    known = statically_known_true if torch.compiler.is_compiling() else bool
    if known(temperature == 1.0):
        return None
    return torch.ones(labels.numel(), dtype=torch.float32, device=labels.device) * temperature


def _floors(floor: float | torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """One floor per token, for the same reason."""
    if isinstance(floor, torch.Tensor):
        return floor.to(torch.float32).expand(labels.shape).reshape(-1)
    return torch.ones(labels.numel(), dtype=torch.float32, device=labels.device) * floor


def without(ignore_index: int, where: torch.Tensor | None, labels: torch.Tensor) -> torch.Tensor:
    """``where`` without the tokens that have this label."""
    # torch compares in the type of labels: in uint8, which does not hold -100, it would leave out 156.
    counts = labels.long() != scalars.integer("ignore_index", ignore_index)
    if where is None:
        return counts
    if where.dtype != torch.bool:
        none = torch.zeros(labels.numel(), dtype=torch.bool, device=labels.device)
        where = none.index_fill(0, where.long(), True).view(labels.shape)
    return where & counts


def count(rows: torch.Tensor | None, tokens: int) -> int | torch.Tensor:
    """How many of so many tokens are computed, at least 1; of a mask that cannot be counted, a tensor."""
    if rows is None or rows.dtype != torch.bool:
        return max(tokens if rows is None else len(rows), 1)
    return rows.sum().clamp(min=1)


def rows_of(where: torch.Tensor) -> torch.Tensor | None:
    """The index of the rows that are computed; None: all are. A mask that cannot be counted stays a mask."""
    if where.dtype != torch.bool:
        return where
    where, compiles = where.reshape(-1), torch.compiler.is_compiling()
    if not (compiles or _checks.has_values(where)):
        return where
    rows = where.nonzero().squeeze(1)
    return rows if compiles or len(rows) < len(where) else None


def only_rows(x: Any, rows: torch.Tensor | None, other: float) -> Any:
    """The rows of ``x`` that are computed: those of an index, or all with ``other`` in those that a mask leaves out."""
    if x is None or rows is None:
        return x
    if rows.dtype == torch.bool:
        return x.where(rows.view(-1, *(1,) * (x.ndim - 1)), other)
    return x.index_select(0, rows)


def placed(x: torch.Tensor, rows: torch.Tensor | None, labels: torch.Tensor) -> torch.Tensor:
    """Results in the shape of labels (with K more for candidates), 0 on tokens that are left out."""
    if rows is not None and rows.dtype == torch.bool:
        x = x.where(rows.view(-1, *(1,) * (x.ndim - 1)), 0)
    elif rows is not None:
        x = x.new_zeros((labels.numel(), *x.shape[1:])).index_copy(0, rows.long(), x)
    return x if labels.ndim == 1 else x.view(labels.shape + x.shape[1:])


class CommonOptions(TypedDict, total=False):
    """Of every function; `linear_logprobs` says what each means."""

    temperature: float | torch.Tensor
    logit_softcap: float | None
    vocab_size: int | None
    gradient_threshold: float
    implementation: str | tuple[str, ...] | None


class HeadOptions(CommonOptions, total=False):
    """Of functions that no model has told about its head."""

    bias: torch.Tensor | None
    tp_group: dist.ProcessGroup | None
    logit_scale: float
    reduce_grad_hidden: bool


class CrossEntropyOptions(HeadOptions, total=False):
    """Of `linear_cross_entropy`."""

    wgrad: Wgrad
    cache_bytes: int | None
    vocab_part_size: int | None
    logit_floor: float | torch.Tensor | None
    lora: Lora | None


class EntropyOptions(CrossEntropyOptions, total=False):
    """Of `linear_entropy`."""

    where: torch.Tensor | None


class OptionsWithoutEntropy(EntropyOptions, total=False):
    """Of `linear_logprobs`, but one."""

    stats: bool
    mean_logit: bool
    candidates: torch.Tensor | None
    ignore_index: int | None
    out_of_vocab: OutOfVocab


class ExplainOptions(OptionsWithoutEntropy, total=False):
    """Of `explain`."""

    entropy: Entropy


class ModelOptions(CommonOptions, total=False):
    """Of `lce_torch_bridge.megatron.fused_output_layer`."""

    entropy: Entropy
    stats: bool
    mean_logit: bool
    candidates: torch.Tensor | None
    where: torch.Tensor | None
    ignore_index: int | None
    out_of_vocab: OutOfVocab
    wgrad: Wgrad
    cache_bytes: int | None
    vocab_part_size: int | None
    logit_floor: float | torch.Tensor | None


class LossesOptions(TypedDict, total=False):
    """Of `lce_torch_bridge.megatron.fused_losses`."""

    cache_bytes: int | None
    gradient_threshold: float
    vocab_part_size: int | None
    implementation: str | tuple[str, ...] | None
