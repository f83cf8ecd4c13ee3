"""`explain`: how a call would be run, without running it."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, Unpack

import jax
import torch

import lce_jax
from lce_jax.run import kernels
from lce_torch_bridge._types import Tensors
from lce_torch_bridge.call import _arguments
from lce_torch_bridge.launched_directly import _way
from lce_torch_bridge.launched_directly._passes import refusal
from lce_torch_bridge.tensors import _device, _tensor_parallel, _weight

if TYPE_CHECKING:
    from lce_jax import Plan
    from lce_torch_bridge.call._arguments import Arguments, ExplainOptions


@dataclasses.dataclass(frozen=True)
class Explanation:
    """How a call would be run. ``str()`` of it is for reading.

    Attributes:
        way: "direct" or "jax", as in `launch_with`.
        why_not_direct: why the call is not launched so; None if it is.
        plan: what `lce_jax.explain` says of this rank's part: implementation, tiles, bytes.
        cache: the bytes that ``cache_bytes=None`` stands for in this call, and why; None if the call says how many.
    """

    way: str
    why_not_direct: str | None
    plan: Plan
    cache: str | None = None

    def __str__(self) -> str:
        """A line about the launch, the plan, and a line about the cache."""
        ways = {
            "direct": "launched directly, in torch's stream and memory",
            "jax": f"run by JAX, not launched directly: {self.why_not_direct}",
        }
        return "\n".join([ways[self.way], str(self.plan), *([self.cache] if self.cache else [])])


def explain(
    hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, **options: Unpack[ExplainOptions]
) -> Explanation:
    """How `linear_logprobs` would run a call: launched directly or by JAX, and why; which implementation, what memory.

    Nothing is computed and nothing compiled.

    Args:
        hidden, weight, labels: as in `linear_logprobs`. A weight that does not require a gradient is planned as frozen
            if hidden requires one.
        **options: ``bias``, ``tp_group``, ``temperature``, ``logit_scale``, ``logit_softcap``, ``vocab_size``,
            ``entropy``, ``stats``, ``mean_logit``, ``candidates``, ``where``, ``ignore_index``, ``out_of_vocab``,
            ``reduce_grad_hidden``, ``wgrad``, ``cache_bytes``, ``gradient_threshold``, ``vocab_part_size``,
            ``logit_floor``, ``implementation`` and ``lora``, as in `linear_logprobs`.

    Returns:
        An `Explanation`.

    Raises:
        lce_jax.UnsupportedError: an implementation asked for by name cannot serve the call; the message says why.
        ValueError, TypeError: shapes, dtypes, devices or options that do not fit, with the offending values.

    Example:
        >>> import torch
        >>> from lce_torch_bridge import explain
        >>> how = explain(torch.ones(4, 64), torch.zeros(1000, 64), torch.zeros(4, dtype=torch.int64))
        >>> how.way, how.why_not_direct, how.plan.implementation
        ('jax', 'cpu is no CUDA device of this machine', 'xla')
    """
    _arguments.check_names(explain, options, {})
    told = _arguments.Options(**options)
    given = _arguments.of_call(hidden, weight, labels, told)
    cache = None
    if told.cache_bytes is None:
        cache_bytes, why = _arguments.cache_by_default(given.hidden, given.weight, told)
        cache = f"cache_bytes=None is {cache_bytes}: {why}"
    call = given.call
    # Its shape and dtype alone count: nothing is cast.
    weight = torch.empty_like(given.weight, dtype=_weight.dtype_of(given.weight), device="meta")
    operands, _ = _arguments.operands(given, weight)
    reason = refusal(operands, call)
    if _way.asks_for_jax():
        reason = 'launch_with("jax") asks for JAX'
    described = _device.device_of(hidden.device)
    with kernels.trace_for_device(described or kernels.Device()):
        hidden = operands.hidden[:, : weight.shape[1]]
        structs = _device.struct(hidden), _device.struct(weight), _ids(operands.labels)
        frozen = given.hidden.requires_grad and not given.weight.requires_grad
        plan = lce_jax.explain(*structs, frozen_weight=frozen, **_options(operands, given))
    return Explanation("jax" if reason else "direct", reason, plan, cache)


def _options(x: Tensors, given: Arguments) -> dict[str, Any]:
    """This rank's part of the call as keyword options of `lce_jax.explain`, its tensors as shapes."""
    call, columns = given.call, x.weight.shape[0]
    _, rank = _tensor_parallel.size_and_rank(call.group)
    names = "logit_scale", "logit_softcap", "entropy", "stats", "cache_bytes", "gradient_threshold", "vocab_part_size"
    return {name: getattr(call.jax, name) for name in names} | {
        "implementation": call.jax.requested,
        "lora": None if given.lora is None else (*map(_device.struct, given.lora[:2]), 1.0),
        "vocab_size": min(max(call.jax.vocab_size - rank * columns, 1), columns),  # there is no plan for padding alone
        "bias": None if given.bias is None else _device.struct(given.bias),
        "temperature": 1.0 if x.temperature is None else _device.struct(x.temperature),
        "candidates": None if x.candidates is None else _ids(x.candidates),
        "logit_floor": None if x.floor is None else _device.struct(x.floor),
    }


def _ids(x: torch.Tensor) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(tuple(x.shape), "int32")
