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
from lce_torch_bridge.launched_directly import _launch_with
from lce_torch_bridge.launched_directly._passes import refusal
from lce_torch_bridge.tensors import _device, _tensor_parallel, _weight

if TYPE_CHECKING:
    from lce_jax import Plan
    from lce_torch_bridge.call._arguments import Arguments, ExplainOptions


@dataclasses.dataclass(frozen=True)
class Explanation:
    """How a call would be run. ``str()`` returns it as text.

    Attributes:
        way: "direct" if kernels are launched directly, "jax" if JAX runs the call.
        why_not_direct: why the call is not launched directly; None if it is.
        plan: the result of `lce_jax.explain` for this rank's part: implementation, tiles, bytes.
        cache: the bytes that ``cache_bytes=None`` stands for in this call, and why; None if ``cache_bytes`` is a
            number.
    """

    way: str
    why_not_direct: str | None
    plan: Plan
    cache: str | None = None

    def __str__(self) -> str:
        """Returns a line about the launch, then the plan, then a line about the cache."""
        ways = {
            "direct": "launched directly, in torch's stream and memory",
            "jax": f"run by JAX, not launched directly: {self.why_not_direct}",
        }
        return "\n".join([ways[self.way], str(self.plan), *([self.cache] if self.cache else [])])


def explain(
    hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, **options: Unpack[ExplainOptions]
) -> Explanation:
    """Returns how `linear_logprobs` would run a call: the way and the reason, the implementation, and the memory.

    Nothing is computed or compiled.

    Args:
        hidden, weight, labels: as in `linear_logprobs`. If hidden requires a gradient and weight does not, the plan is
            for a frozen weight.
        **options: ``bias``, ``tp_group``, ``temperature``, ``logit_scale``, ``logit_softcap``, ``vocab_size``,
            ``entropy``, ``stats``, ``mean_logit``, ``candidates``, ``where``, ``ignore_index``, ``out_of_vocab``,
            ``reduce_grad_hidden``, ``wgrad``, ``cache_bytes``, ``gradient_threshold``, ``vocab_part_size``,
            ``logit_floor``, ``implementation`` and ``lora``, as in `linear_logprobs`.

    Returns:
        An `Explanation`.

    Raises:
        lce_jax.UnsupportedError: an implementation requested by name cannot run the call; the message says why.
        ValueError, TypeError: shapes, dtypes, devices or options do not fit; the message has their values.

    Example:
        >>> import torch
        >>> from lce_torch_bridge import explain
        >>> how = explain(torch.ones(4, 64), torch.zeros(1000, 64), torch.zeros(4, dtype=torch.int64))
        >>> how.way, how.why_not_direct, how.plan.implementation
        ('jax', 'cpu is no CUDA device of this machine', 'xla')
    """
    _arguments.check_names(explain, options, {})
    all_options = _arguments.Options(**options)
    arguments = _arguments.parse_arguments(hidden, weight, labels, all_options)
    cache = None
    if all_options.cache_bytes is None:
        cache_bytes, why = _arguments.choose_cache_bytes(arguments.hidden, arguments.weight, all_options)
        cache = f"cache_bytes=None is {cache_bytes}: {why}"
    # Only the weight's shape and dtype count, so nothing is cast.
    dtype = _weight.find_cast_dtype(arguments.weight)
    weight = torch.empty_like(arguments.weight, dtype=dtype, device="meta")
    operands, _ = _arguments.flatten_operands(arguments, weight)
    reason = refusal(operands, arguments.call)
    if _launch_with.is_jax_requested():
        reason = 'launch_with("jax") asks for JAX'
    described = _device.describe_device(hidden.device)
    with kernels.trace_for_device(described or kernels.Device()):
        hidden = operands.hidden[:, : weight.shape[1]]
        structs = _device.describe_tensor(hidden), _device.describe_tensor(weight), _describe_ids(operands.labels)
        frozen = arguments.hidden.requires_grad and not arguments.weight.requires_grad
        plan = lce_jax.explain(*structs, frozen_weight=frozen, **_list_options(operands, arguments))
    return Explanation("jax" if reason else "direct", reason, plan, cache)


def _list_options(x: Tensors, arguments: Arguments) -> dict[str, Any]:
    """Returns this rank's part of the call as options of `lce_jax.explain`, with shapes instead of tensors."""
    call, columns, lora = arguments.call, x.weight.shape[0], arguments.lora
    _, rank = _tensor_parallel.size_and_rank(call.group)
    names = "logit_scale", "logit_softcap", "entropy", "stats", "cache_bytes", "gradient_threshold", "vocab_part_size"
    return {name: getattr(call.jax, name) for name in names} | {
        "implementation": call.jax.requested,
        "lora": None if lora is None else (*map(_device.describe_tensor, lora[:2]), 1.0),
        "vocab_size": min(max(call.jax.vocab_size - rank * columns, 1), columns),  # padding alone has no plan
        "bias": None if arguments.bias is None else _device.describe_tensor(arguments.bias),
        "temperature": 1.0 if x.temperature is None else _device.describe_tensor(x.temperature),
        "candidates": None if x.candidates is None else _describe_ids(x.candidates),
        "logit_floor": None if x.floor is None else _device.describe_tensor(x.floor),
    }


def _describe_ids(x: torch.Tensor) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(tuple(x.shape), "int32")
