"""Checks and flattens the arguments of a call, and brings its results into the shape of labels.

A public function calls `parse_arguments`, then `flatten_operands`, and at the end `place_results`.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, TypedDict

import torch
from torch.fx.experimental.symbolic_shapes import statically_known_true

from lce_jax.types import defaults, messages, scalars, shared_checks
from lce_torch_bridge._types import Entropy, Lora, OutOfVocab, Tensors, TorchCall, Wgrad, make_call
from lce_torch_bridge.call import _checks, _dtensor
from lce_torch_bridge.launched_directly import _launch_with, _passes
from lce_torch_bridge.launched_directly._launch_with import choose_way
from lce_torch_bridge.tensors import _device, _tensor_parallel
from lce_torch_bridge.tensors._device import check_readable, is_readable
from lce_torch_bridge.tensors._weight import accumulate_into_main_grad, autocast

if TYPE_CHECKING:
    import torch.distributed as dist

    from lce_torch_bridge._types import Entropy


class Arguments(NamedTuple):
    """The checked arguments of a call."""

    hidden: torch.Tensor  # [..., H]
    weight: torch.Tensor  # [V, H], this rank's rows
    bias: torch.Tensor | None  # [V]
    labels: torch.Tensor  # [...]
    temperature: float | torch.Tensor  # broadcasts to labels
    candidates: torch.Tensor | None  # [..., K]
    floor: float | torch.Tensor | None  # broadcasts to labels
    where: torch.Tensor | None  # a mask or an index, without ignored labels
    lora: Lora | None
    call: TorchCall


class Options(NamedTuple):
    """The options of `linear_logprobs`, which documents them. Other functions have some of these options."""

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


NOT_IN_CALL = ("bias", "tp_group", "temperature", "candidates", "where", "ignore_index", "wgrad", "logit_floor", "lora")
CALL_OPTIONS = [i for i, name in enumerate(Options._fields) if name not in NOT_IN_CALL]  # indices into `Options`
CACHE = CALL_OPTIONS.index(Options._fields.index("cache_bytes"))


def check_names(
    function: Callable[..., Any],
    options: Mapping[str, Any],
    refused: Mapping[str, str],
    loss_fn: Callable[..., Any] | None = None,
) -> None:
    """Refuses unknown names in a function's ``**options``, and names that ``refused`` maps to a reason."""
    for name, reason in refused.items():
        if name in options:
            raise TypeError(f"{name}={_format_value(options[name])}: {reason}; linear_logprobs has this option")
    unknown = [name for name in options if name not in Options._fields]
    if unknown:
        keywords = [x.name for x in inspect.signature(function).parameters.values() if x.kind == x.KEYWORD_ONLY]
        known = dict.fromkeys([*keywords, *(name for name in Options._fields if name not in refused)])
        raise messages.unknown_options_error(function.__name__, unknown, list(known), loss_fn)


def check_unknown(function: Callable[..., Any], unknown: Mapping[str, Any]) -> None:
    """Refuses unknown names, for a function whose signature lists all its options."""
    if unknown:
        parameters = inspect.signature(function).parameters
        others = [name for name in Options._fields if name not in parameters]
        check_names(function, unknown, dict.fromkeys(others, f"{function.__name__} has no such option"))


def _format_value(value: Any) -> str:
    """Formats a value for a message: a tensor as its dtype and shape."""
    return f"{value.dtype} {tuple(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)


def format_options(options: Mapping[str, Any]) -> str:
    """Formats options as they are written in a call."""
    return ", ".join(f"{name}={_format_value(value)}" for name, value in options.items())


def parse_arguments(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, options: Options) -> Arguments:
    """Checks the arguments of a call, and returns them as plain tensors and a `TorchCall`."""
    tp_group, bias, temperature = options.tp_group, options.bias, options.temperature
    where, candidates, logit_floor = options.where, options.candidates, options.logit_floor
    if tp_group is not None:
        _checks.group(tp_group)
    description = None if torch.compiler.is_compiling() else _describe_operands(hidden, weight, labels)
    known = description is not None and description in _known
    if not known and _dtensor.spans(hidden, tp_group):
        options = options._replace(reduce_grad_hidden=True)  # a replicated DTensor has one gradient, the sum
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
        where = exclude_label(options.ignore_index, where, labels)
    scalars.check_choice("wgrad", options.wgrad, ("return", "main_grad"))
    if not (known and bias is None and tp_group is None):
        weight, bias = _read_head(weight, bias, tp_group, options.wgrad)
    rank = 0
    if options.lora is not None:
        rank = _checks.lora(options.lora, hidden, weight, bias=bias, tp_group=tp_group, wgrad=options.wgrad)
    if tp_group is not None:
        _check_group(tp_group, hidden, labels if candidates is None else candidates, where, weight, options.vocab_size)
    values = [options[i] for i in CALL_OPTIONS]
    if options.cache_bytes is None:
        values[CACHE], _ = choose_cache_bytes(hidden, weight, options)
    group = _tensor_parallel.NO_GROUP if tp_group is None else _tensor_parallel.name_group(tp_group)
    shards = 1 if tp_group is None else tp_group.size()
    call = _find_call(group, shards, weight.shape[0], num_candidates, has_floor, rank, *values)
    if description is not None and not known:
        if len(_known) >= MOST_KNOWN:
            _known.clear()
        _known.add(description)
    return Arguments(hidden, weight, bias, labels, temperature, candidates, logit_floor, where, options.lora, call)


def choose_cache_bytes(hidden: torch.Tensor, weight: torch.Tensor, options: Options) -> tuple[int, str]:
    """Returns the number of bytes that ``cache_bytes=None`` stands for, and the reason."""
    if not _device.is_differentiated(hidden, weight, options.bias, *(options.lora or ())[:2]):
        return 0, "no gradient is requested"
    if not _launch_with.is_on_gpu(hidden):
        return 0, "hidden is on no GPU"
    if options.vocab_part_size is not None or options.gradient_threshold:
        return 0, "with vocab_part_size no backward uses a cache, and with gradient_threshold it saves little"
    if _device.is_traced():
        return 0, "the call is traced"
    return defaults.CACHE_BYTES, "a gradient is requested, on a GPU"


MOST_KNOWN = 4096
_known: set[Any] = set()  # descriptions of operands that have passed the checks


def _describe_operands(hidden: Any, weight: Any, labels: Any) -> tuple[Any, ...] | None:
    """Returns everything that the checks of operands depend on; None if the operands must be checked in each call."""
    x, y, z = hidden, weight, labels
    try:
        if not (is_readable(x) and is_readable(y) and is_readable(z)):
            return None
        description = x.shape, x.dtype, x.device, y.shape, y.dtype, y.device, z.shape, z.dtype, z.device
        hash(description)
    except (RuntimeError, TypeError):  # a nested tensor has no shape, and traced sizes have no hash
        return None
    return description


def _find_call(*arguments: Any) -> TorchCall:
    """Returns the result of `_check_call`, cached, because the checks are slow compared with a small call."""
    try:
        return (_check_call if torch.compiler.is_compiling() else _check_call_once)(*arguments)
    except TypeError:  # options that have no hash, or a wrong type
        return _check_call(*arguments)


def check_values(options: Options, rows: int) -> None:
    """Refuses option values that a call on a head with ``rows`` rows would refuse, before the first call."""
    scalars.check_choice("wgrad", options.wgrad, ("return", "main_grad"))
    if not isinstance(options.temperature, torch.Tensor):
        scalars.positive("temperature", options.temperature)
    floor, group = options.logit_floor, options.tp_group
    if floor is not None and not isinstance(floor, torch.Tensor):
        scalars.bound("logit_floor", floor)
    if group is not None:
        _checks.group(group)
    values = [options[i] for i in CALL_OPTIONS]
    values[CACHE] = 0 if options.cache_bytes is None else options.cache_bytes
    shards = 1 if group is None else group.size()
    _find_call(_tensor_parallel.NO_GROUP, shards, rows, 0, floor is not None, 0, *values)


def _check_call(
    group: str, shards: int, rows: int, num_candidates: int, has_floor: bool, rank: int, *values: Any
) -> TorchCall:
    """Checks and normalises options, and returns the call. ``values`` are the values of the options `CALL_OPTIONS`."""
    names, columns = [Options._fields[i] for i in CALL_OPTIONS], shards * rows
    options = Options(**dict(zip(names, values, strict=True)))
    scalars.check_choice("out_of_vocab", options.out_of_vocab, ("zero", "megatron"))
    cache_bytes = scalars.num_bytes("cache_bytes", options.cache_bytes)
    gradient_threshold = scalars.fraction("gradient_threshold", options.gradient_threshold)
    vocab_part_size = scalars.check_part_size(options.vocab_part_size, cache_bytes, gradient_threshold)
    shared_checks.check_vocab_parts(vocab_part_size, columns, rows)
    if has_floor:
        shared_checks.check_floor_options(num_candidates, scalars.flag("mean_logit", options.mean_logit))
    softcap, size = options.logit_softcap, _checks.vocabulary(options.vocab_size, columns)
    traced = torch.compiler.is_compiling() or type(columns) is not int
    return make_call(
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


# Typed, because 1 equals True but is not a flag.
_check_call_once = functools.lru_cache(maxsize=1024, typed=True)(_check_call)


def _read_head(
    weight: Any, bias: Any, tp_group: dist.ProcessGroup | None, wgrad: str
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Checks weight and bias, and returns this rank's rows as plain tensors."""
    if _dtensor.is_dtensor(weight):
        weight = _dtensor.rows("weight", weight, tp_group, wgrad)
    if _dtensor.is_dtensor(bias):
        bias = _dtensor.rows("bias", bias, tp_group)
    weight, bias = check_readable("weight", weight), check_readable("bias", bias)
    _checks.bias(bias, weight)
    return weight, bias


def read_class_weights(class_weights: Any, weight: torch.Tensor, group: str) -> torch.Tensor:
    """Checks class weights except for their shape, and returns this rank's part as a plain tensor."""
    if _dtensor.is_dtensor(class_weights):
        tp_group = None if group == _tensor_parallel.NO_GROUP else _device.group_of(group)
        class_weights = _dtensor.rows("class_weights", class_weights, tp_group)
    _checks.floats("class_weights", class_weights)
    if class_weights.requires_grad:
        raise ValueError("class_weights requires a gradient, but gets none, as in torch: pass class_weights.detach()")
    _checks.same_device(weight, class_weights=class_weights)
    return check_readable("class_weights", class_weights)


def _check_group(group: dist.ProcessGroup, hidden: Any, ids: Any, where: Any, weight: Any, vocab_size: Any) -> None:
    """Calls `_tensor_parallel.check` in a group's first call. While tracing, the operators do this at run time."""
    if torch.compiler.is_compiling() or not (_checks.has_values(weight) and _checks.has_values(hidden)):
        return
    name = _tensor_parallel.name_group(group)
    if _tensor_parallel.is_new(name):
        rows = None if where is None else find_rows(where)
        size = vocab_size if scalars.is_integer(vocab_size) else None
        flat, ids = hidden.reshape(-1, hidden.shape[-1]), ids.reshape(-1, *ids.shape[hidden.ndim - 1 :])
        launches = functools.partial(_passes.launches_kernels, choose_way(weight))
        _tensor_parallel.check(name, launches, flat, ids, size, weight, rows=rows)


def prepare_weight(arguments: Arguments, wgrad: Wgrad) -> torch.Tensor:
    """Returns the weight in autocast's dtype, with a backward that sends its gradient where ``wgrad`` says."""
    weight = accumulate_into_main_grad(arguments.weight) if wgrad == "main_grad" else arguments.weight
    return autocast(weight, arguments.weight)


def flatten_operands(arguments: Arguments, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor | None]:
    """Returns the flattened operands of the unmasked tokens, and the rows of these tokens.

    The rows are an index, or a mask whose values cannot be counted; None if no token is masked.
    """
    hidden, labels, candidates = arguments.hidden, arguments.labels, arguments.candidates
    temperature = _expand_temperature(arguments.temperature, labels)
    floor = None if arguments.floor is None else _expand_floor(arguments.floor, labels)
    if labels.ndim != 1:  # only if needed, because views take host time in the forward and the backward
        hidden, labels = hidden.reshape(-1, hidden.shape[-1]), labels.reshape(-1)
    if candidates is not None:
        candidates = candidates.reshape(-1, candidates.shape[-1])
    rows, select = None if arguments.where is None else find_rows(arguments.where), select_rows
    x = Tensors(hidden, weight, arguments.bias, labels, temperature, candidates, floor)
    if rows is not None:
        per_token = select(temperature, rows, 1.0), select(candidates, rows, -1), select(floor, rows, 0.0)
        x = Tensors(select(hidden, rows, 0.0), weight, arguments.bias, select(labels, rows, 0), *per_token)
    return x if arguments.lora is None else _append_adapter(x, *arguments.lora, arguments.call.jax.rank), rows


def _append_adapter(x: Tensors, a: torch.Tensor, b: torch.Tensor, scale: float, rank: int) -> Tensors:
    """Returns the operands of an adapter: hidden with the further columns u = hidden · (scale · A)ᵀ, and B as ``bias``.

    The rank of u and B is padded to ``rank``. Autograd differentiates u.
    """
    dtype, missing = x.weight.dtype, rank - a.shape[0]
    a = torch.nn.functional.pad((a.float() * scalars.number("lora's scale", scale)).to(dtype), (0, 0, 0, missing))
    u = torch.nn.functional.linear(x.hidden.to(dtype), a)
    return x._replace(hidden=torch.cat([x.hidden, u], 1), bias=torch.nn.functional.pad(b, (0, missing)))


def _expand_temperature(temperature: float | torch.Tensor, labels: torch.Tensor) -> torch.Tensor | None:
    """Returns one temperature per token, because a number would be compiled into programs; None for 1.

    Under ``torch.compile`` a number that varies is symbolic. ``torch.full`` or a comparison with 1 would make it a
    constant of the graph.
    """
    if isinstance(temperature, torch.Tensor):
        return temperature.to(torch.float32).expand(labels.shape).reshape(-1)
    known = statically_known_true if torch.compiler.is_compiling() else bool
    if known(temperature == 1.0):
        return None
    return torch.ones(labels.numel(), dtype=torch.float32, device=labels.device) * temperature


def _expand_floor(floor: float | torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Returns one floor per token, because a number would be compiled into programs."""
    if isinstance(floor, torch.Tensor):
        return floor.to(torch.float32).expand(labels.shape).reshape(-1)
    return torch.ones(labels.numel(), dtype=torch.float32, device=labels.device) * floor


def exclude_label(ignore_index: int, where: torch.Tensor | None, labels: torch.Tensor) -> torch.Tensor:
    """Returns ``where`` as a mask that also leaves out the tokens with the label ``ignore_index``."""
    # torch compares in the labels' type. In uint8, which has no -100, it would leave out the label 156.
    mask = labels.long() != scalars.integer("ignore_index", ignore_index)
    if where is None:
        return mask
    if where.dtype != torch.bool:
        no_token = torch.zeros(labels.numel(), dtype=torch.bool, device=labels.device)
        where = no_token.index_fill(0, where.long(), True).view(labels.shape)
    return where & mask


def count_tokens(rows: torch.Tensor | None, tokens: int) -> int | torch.Tensor:
    """Returns the number of unmasked tokens among ``tokens``, at least 1; as a tensor if ``rows`` is a mask."""
    if rows is None or rows.dtype != torch.bool:
        return max(tokens if rows is None else len(rows), 1)
    return rows.sum().clamp(min=1)


def find_rows(where: torch.Tensor) -> torch.Tensor | None:
    """Returns the indices of the unmasked rows; None if no row is masked; the mask itself if it has no values."""
    if where.dtype != torch.bool:
        return where
    where, compiles = where.reshape(-1), torch.compiler.is_compiling()
    if not (compiles or _checks.has_values(where)):
        return where
    rows = where.nonzero().squeeze(1)
    return rows if compiles or len(rows) < len(where) else None


def select_rows(x: Any, rows: torch.Tensor | None, fill: float) -> Any:
    """Returns the rows of ``x`` at an index; for a mask, all rows, with ``fill`` in the masked ones."""
    if x is None or rows is None:
        return x
    if rows.dtype == torch.bool:
        return x.where(rows.view(-1, *(1,) * (x.ndim - 1)), fill)
    return x.index_select(0, rows)


def place_results(x: torch.Tensor, rows: torch.Tensor | None, labels: torch.Tensor) -> torch.Tensor:
    """Returns results in the shape of labels (plus an axis of size K for candidates), with 0 for masked tokens."""
    if rows is not None and rows.dtype == torch.bool:
        x = x.where(rows.view(-1, *(1,) * (x.ndim - 1)), 0)
    elif rows is not None:
        x = x.new_zeros((labels.numel(), *x.shape[1:])).index_copy(0, rows.long(), x)
    return x if labels.ndim == 1 else x.view(labels.shape + x.shape[1:])


class CommonOptions(TypedDict, total=False):
    """Options of every function. `linear_logprobs` documents them."""

    temperature: float | torch.Tensor
    logit_softcap: float | None
    vocab_size: int | None
    gradient_threshold: float
    implementation: str | tuple[str, ...] | None


class HeadOptions(CommonOptions, total=False):
    """Options of functions whose head is not part of a known model."""

    bias: torch.Tensor | None
    tp_group: dist.ProcessGroup | None
    logit_scale: float
    reduce_grad_hidden: bool


class CrossEntropyOptions(HeadOptions, total=False):
    """Options of `linear_cross_entropy`."""

    wgrad: Wgrad
    cache_bytes: int | None
    vocab_part_size: int | None
    logit_floor: float | torch.Tensor | None
    lora: Lora | None


class EntropyOptions(CrossEntropyOptions, total=False):
    """Options of `linear_entropy`."""

    where: torch.Tensor | None


class OptionsWithoutEntropy(EntropyOptions, total=False):
    """Options of `linear_logprobs`, except ``entropy``."""

    stats: bool
    mean_logit: bool
    candidates: torch.Tensor | None
    ignore_index: int | None
    out_of_vocab: OutOfVocab


class ExplainOptions(OptionsWithoutEntropy, total=False):
    """Options of `explain`."""

    entropy: Entropy


class ModelOptions(CommonOptions, total=False):
    """Options of `lce_torch_bridge.megatron.fused_output_layer`."""

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
    """Options of `lce_torch_bridge.megatron.fused_losses`."""

    cache_bytes: int | None
    gradient_threshold: float
    vocab_part_size: int | None
    implementation: str | tuple[str, ...] | None
