"""Checks of the arguments of public functions, before anything is computed. The errors show the values.

A check is named after its argument: `temperature` checks ``temperature``. `lce_jax.types.scalars` has the checks of
numbers and flags.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import torch
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from lce_jax.types import messages, scalars, shared_checks
from lce_torch_bridge._types import Lora
from lce_torch_bridge.call import _dtensor
from lce_torch_bridge.tensors._device import GATHER, check_readable, is_traced

# A warning names the line outside of these packages.
PACKAGES = (os.path.dirname(os.path.dirname(__file__)), os.path.dirname(torch.__file__))
FLOATS = (torch.bfloat16, torch.float16, torch.float32)


def tensors(hidden: Any, weight: Any, labels: Any) -> None:
    """Checks hidden, weight and labels, and that their shapes and devices fit."""
    floats("hidden", hidden)
    floats("weight", weight)
    shared_checks.require_labels(labels, "linear_entropy serves tokens without labels")
    integers("labels", labels)
    if weight.ndim != 2 or 0 in weight.shape:
        part = f". {GATHER}" if weight.ndim == 1 or 0 in weight.shape else ""  # a shard of FSDP
        raise ValueError(f"weight must be [V, H], neither of them 0, got shape {tuple(weight.shape)}{part}")
    if hidden.ndim < 1 or hidden.shape[-1] != weight.shape[1]:
        hint = messages.hint_at_logits(hidden.shape, weight.shape, weight.shape[0], "weight.T")
        raise ValueError(
            f"hidden {tuple(hidden.shape)} must end in the H of weight [V, H] = {tuple(weight.shape)}{hint}"
        )
    shared_checks.check_labels_shape(labels.shape, hidden.shape[:-1])
    same_device(hidden, weight=weight, labels=labels)
    if hidden.device.type not in ("cpu", "cuda", "meta"):
        raise ValueError(f"hidden must be on a CUDA GPU or the CPU, got {hidden.device}")


def tensor(name: str, x: Any, what: str = "a torch.Tensor") -> None:
    """Checks that ``x`` is a tensor, and that its memory can be read."""
    if not isinstance(x, torch.Tensor):
        write = (
            f": pass torch.as_tensor({name}, device=hidden.device)" if isinstance(x, list | tuple | np.ndarray) else ""
        )
        raise TypeError(f"{name} must be {what}, got {type(x).__name__}{write}")
    check_readable(name, x)


def floats(name: str, x: Any) -> None:
    """Checks that ``x`` is a tensor of a floating-point dtype that JAX takes without conversion."""
    tensor(name, x)
    if x.dtype not in FLOATS:
        reason = ", which JAX would round to float32" if x.dtype == torch.float64 else ""
        raise TypeError(f"{name} must be bfloat16, float16 or float32, got {x.dtype}{reason}")


def integers(name: str, x: Any) -> None:
    """Checks that ``x`` is a tensor of integers."""
    tensor(name, x)
    if x.dtype != torch.int64 and (x.dtype == torch.bool or x.is_floating_point() or x.is_complex()):
        raise TypeError(f"{name} must be integers, got {x.dtype}: write {name}.long()")


def candidates(value: Any, hidden: torch.Tensor, labels: torch.Tensor) -> int:
    """Checks candidates ``[..., K]``, and returns K."""
    return ids("candidates", value, hidden, labels.shape, "labels")


def ids(name: str, value: Any, hidden: torch.Tensor, leading: torch.Size, operand: str) -> int:
    """Checks ids ``[*leading, K]``, and returns K. ``operand`` names what has the shape ``leading``, for messages."""
    integers(name, value)
    count = shared_checks.count_candidates(name, value.shape)
    shared_checks.check_candidate_shape(name, value.shape, leading, operand)
    same_device(hidden, **{name: value})
    return count


def hidden(x: Any) -> None:
    """Checks hidden states alone: floats of shape ``[..., H]``."""
    floats("hidden", x)
    if x.ndim < 1:
        raise ValueError("hidden must be [..., H], got a tensor without dimensions")


def head(layer: Any) -> tuple[Any, Lora | None]:
    """Returns a linear layer, and the LoRA adapter if PEFT has wrapped the layer.

    Only weight, bias and the adapter's A and B are used. So a layer with hooks or with another wrapper is refused,
    because hooks and wrappers would have no effect and would not be trained.
    """
    kind = type(layer)
    if kind.__module__.startswith("peft.tuners.lora.") and kind.__name__ == "Linear":
        return _read_adapter(layer)
    _refuse_wrapped(layer, torch.nn.Linear.forward)
    return layer, None


def _read_adapter(layer: Any) -> tuple[Any, Lora | None]:
    """Returns the layer in a ``peft.tuners.lora.Linear``, and its active adapter or None."""
    base, names = layer.base_layer, [name for name in layer.active_adapters if name in layer.lora_A]
    _refuse_wrapped(layer, type(layer).forward)
    _refuse_wrapped(base, torch.nn.Linear.forward)
    if layer.merged != layer.disable_adapters or not names:
        return base, None
    name = names[0]
    a, b, dropout = layer.lora_A[name], layer.lora_B[name], getattr(layer.lora_dropout[name], "p", 0.0)
    variants = {name for name, is_used in layer.use_dora.items() if is_used} | {*getattr(layer, "lora_variant", {})}
    for reason, advice in {
        f"{len(names)} active adapters": "call set_adapter with one of them" if len(names) > 1 else "",
        f"lora_dropout={dropout}": "give LoraConfig(lora_dropout=0)" if dropout and layer.training else "",
        "a variant of LoRA": "give LoraConfig(use_dora=False)" if name in variants else "",
        "a bias": "merge_and_unload() it" if base.bias is not None or b.bias is not None else "",
        "been merged and disabled": "unmerge_adapter() first" if layer.merged else "",
    }.items():
        if advice:
            raise NotImplementedError(f"the head's adapter is not supported, because it has {reason}: {advice}")
    _refuse_wrapped(a, torch.nn.Linear.forward)
    _refuse_wrapped(b, torch.nn.Linear.forward)
    return base, (a.weight, b.weight, layer.scaling[name])


def _refuse_wrapped(layer: Any, function: Any) -> None:
    """Refuses a layer that has hooks, or whose forward is not ``function``."""
    copies = getattr(layer, "modules_to_save", None)  # PEFT trains copies, and ``layer.weight`` is a copy's
    for module in [layer] if copies is None else copies.values():
        forward = getattr(module, "_old_forward", module.forward)  # accelerate's name for a wrapped forward
        hooks = (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
        hooked = any(not hook.__module__.startswith("torch.distributed") for hook in hooks)
        # This compares bound methods, because torch.compile does not guard on ``__func__``.
        is_unchanged = forward == function.__get__(module) or _is_deferring(forward, function)
        if hooked or not is_unchanged:
            raise NotImplementedError(
                f"the head, {type(module)}, is more than its weight and bias: leave it out of target_modules, "
                "target_parameters (modules_to_save trains all of it), trainable_token_indices, quantization and "
                "hooks, or merge_and_unload() an adapter; the only supported adapter is PEFT's lora.Linear"
            )


def _is_deferring(forward: Any, function: Any) -> bool:
    """Whether ``forward`` is `defer_logits`'s replacement of ``function``."""
    return getattr(getattr(forward, "__func__", None), "__wrapped__", None) is function


def bias(x: Any, weight: torch.Tensor) -> None:
    """Checks a bias: None, or one element for each of this rank's rows of the weight."""
    if x is None:
        return
    floats("bias", x)
    if x.shape != weight.shape[:1]:
        raise ValueError(
            f"bias {tuple(x.shape)} must have one number for each of this rank's rows of weight {tuple(weight.shape)}: "
            f"({weight.shape[0]},)"
        )
    if x.device != weight.device:
        raise ValueError(f"bias is on {x.device}, weight on {weight.device}{_advise_loading(x, weight)}")


def lora(value: Any, hidden: torch.Tensor, weight: torch.Tensor, **others: Any) -> int:
    """Checks an adapter against its frozen weight, and returns the adapter's padded rank.

    ``others`` are values of options that must not be used with an adapter.
    """
    if not isinstance(value, tuple | list) or len(value) != 3:
        raise TypeError(f"lora must be a tuple (A [r, H], B [V, r], scale), got {type(value).__name__}")
    a, b, scale = value
    for name, x in (("lora's A", a), ("lora's B", b)):
        if _dtensor.is_dtensor(x):
            raise ValueError(f"{name} is a DTensor: leave the head's adapter out of what is sharded (ignored_params)")
        floats(name, x)
    scalars.number("lora's scale", scale)
    (vocab, size), rank = weight.shape, a.shape[0] if a.ndim == 2 else 0
    if not rank or a.shape != (rank, size) or b.shape != (vocab, rank):
        raise ValueError(
            f"lora's A {tuple(a.shape)} and B {tuple(b.shape)} must be [r, {size}] and [{vocab}, r], of weight "
            f"{tuple(weight.shape)}"
        )
    same_device(hidden, **{"lora's A": a, "lora's B": b})
    for name, x in others.items():
        if x is not None and x != "return":
            shown = repr(x) if isinstance(x, str) else type(x).__name__
            raise ValueError(
                f"{name}={shown} with lora: leave {name} out, or give weight + scale * B @ A as weight, without lora"
            )
    if weight.requires_grad and torch.is_grad_enabled():
        raise ValueError(
            "lora is an adapter of a frozen weight, and weight requires a gradient: give weight.detach(), or call "
            "weight.requires_grad_(False)"
        )
    return scalars.padded_rank(int(rank))


def same_device(hidden: torch.Tensor, **others: torch.Tensor) -> None:
    """Checks that the other tensors are on hidden's device."""
    for name, x in others.items():
        if x.device != hidden.device:
            raise ValueError(f"{name} is on {x.device}, hidden on {hidden.device}{_advise_loading(x, hidden)}")


def _advise_loading(*tensors: torch.Tensor) -> str:
    """Returns advice for a message if one of the tensors is on the meta device; else an empty string."""
    if not any(x.is_meta for x in tensors):
        return ""
    return ": a meta tensor has no numbers. Call model.to_empty(device=...) and load_state_dict before the first step"


def group(value: Any, name: str = "tp_group") -> None:
    """Checks that ``value`` is a process group that contains this rank."""
    if not isinstance(value, torch.distributed.ProcessGroup):
        raise TypeError(f"{name} must be a torch.distributed.ProcessGroup with this rank in it, or None, got {value!r}")


def temperature(value: Any, hidden: torch.Tensor, labels: torch.Tensor) -> None:
    """Checks a temperature: a positive number, or a float tensor that broadcasts to labels."""
    if isinstance(value, list | tuple | np.ndarray):
        tensor("temperature", value, "a number or a torch.Tensor")
    if not isinstance(value, torch.Tensor):
        scalars.positive("temperature", value)
        return
    _check_per_token_number("temperature", value, hidden)
    if can_read_values(value):
        wrong = value[~((value >= scalars.FLOAT32_TINY) & (value <= scalars.FLOAT32_MAX))]
        if wrong.numel():
            raise ValueError(f"temperature must be positive and finite in float32, got {float(wrong[0])} in its values")
    _check_broadcast("temperature", value, labels)


def logit_floor(value: Any, hidden: torch.Tensor, labels: torch.Tensor) -> None:
    """Checks a floor: a number, which may be infinite, or a float tensor that broadcasts to labels."""
    if isinstance(value, list | tuple | np.ndarray):
        tensor("logit_floor", value, "a number or a torch.Tensor")
    if not isinstance(value, torch.Tensor):
        scalars.bound("logit_floor", value)
        return
    _check_per_token_number("logit_floor", value, hidden)
    if can_read_values(value) and bool(value.isnan().any()):
        raise ValueError(f"logit_floor must be a number or infinite, but is nan in {int(value.isnan().sum())} places")
    _check_broadcast("logit_floor", value, labels)


def _check_per_token_number(name: str, value: torch.Tensor, hidden: torch.Tensor) -> None:
    if not value.is_floating_point():
        raise TypeError(f"{name} must be floating point, got {value.dtype}")
    if value.requires_grad:
        raise ValueError(f"{name} requires a gradient, but gets none: pass {name}.detach()")
    same_device(hidden, **{name: value})


def _check_broadcast(name: str, value: torch.Tensor, labels: torch.Tensor) -> None:
    try:
        fits = torch.broadcast_shapes(value.shape, labels.shape) == labels.shape
    except RuntimeError:
        fits = False
    if not fits:
        fitting = messages.suggest_broadcasts(name, value.shape, labels.shape)
        hint = f": write {fitting[0]} for one number per sequence" if fitting else ""
        raise ValueError(f"{name} {tuple(value.shape)} must broadcast to the tokens' shape {tuple(labels.shape)}{hint}")


def entropy(value: Any) -> bool:
    """Checks ``entropy``, and returns whether an entropy is computed, with or without a gradient."""
    if isinstance(value, bool) or (isinstance(value, str) and value == "metric"):
        return bool(value)
    raise TypeError(f'entropy must be True, False or "metric", got {value!r}')


def where(value: Any, hidden: torch.Tensor, labels: torch.Tensor) -> None:
    """Checks ``where``: a bool tensor of labels' shape, or a one-dimensional index of the flattened labels."""
    tensor("where", value)
    same_device(hidden, where=value)
    if value.dtype == torch.bool:
        if value.shape != labels.shape:
            fitting = messages.suggest_broadcasts("where", value.shape, labels.shape)
            write = " or ".join(f"{each}.expand{tuple(labels.shape)}" for each in fitting)
            hint = f": write {write}" if write else ""
            raise ValueError(f"where {tuple(value.shape)} must have the tokens' shape {tuple(labels.shape)}{hint}")
        return
    hint = "; a mask of zeros and ones must be bool: pass where.bool()" if value.shape == labels.shape else ""
    if value.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"where must be bool, or an int64 or int32 index of rows, got {value.dtype}{hint}")
    if value.ndim != 1:
        raise ValueError(f"where as an index of rows must have one dimension, got shape {tuple(value.shape)}{hint}")
    if not can_read_values(value):
        return
    outside = value[(value < 0) | (value >= labels.numel())]
    if outside.numel():
        raise ValueError(f"where holds row {int(outside[0])}, and there are {labels.numel()} rows")
    repeats = value.numel() - value.unique().numel()
    if repeats:
        raise ValueError(f"where as an index must hold each row at most once, got {repeats} repeats{hint}")


def expand_per_token(name: str, value: Any, hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Checks a per-token argument of a loss, and expands it to a shape that begins with labels' shape.

    The argument may have 1 in place of each size of labels, or have no dimensions.
    """
    shared_checks.require_value(name, value)
    tensor(name, value)
    shared_checks.check_per_token_shape(name, value.shape, labels.shape)
    same_device(hidden, **{name: value})
    return value.expand(labels.shape + value.shape[labels.ndim :])


def warn_of_labels(
    labels: torch.Tensor, where: torch.Tensor | None, vocab_size: int, is_cross_entropy: bool = False
) -> None:
    """Warns if no label that counts lies in the vocabulary. Only for labels on the CPU, and not in a trace."""
    if labels.device.type != "cpu" or is_traced() or not has_values(labels) or not labels.numel():
        return
    ids = labels.reshape(-1).long()
    if shared_checks.all_in_vocabulary(ids, vocab_size):
        return
    ids = ids if where is None else ids[where.reshape(-1)]
    shared_checks.warn_outside(ids, vocab_size, *PACKAGES, is_cross_entropy=is_cross_entropy)


def can_read_values(x: torch.Tensor) -> bool:
    """Whether the values of ``x`` can be read without waiting for a GPU or breaking a trace."""
    traced = torch.compiler.is_compiling() or get_proxy_mode() is not None
    return x.device.type == "cpu" and not traced and has_values(x)


def has_values(x: torch.Tensor) -> bool:
    """Whether ``x`` has values: it is not a meta or fake tensor, nor a tensor inside a transform of torch.func."""
    try:
        return x.untyped_storage().device.type != "meta"
    except NotImplementedError:  # inside a transform of torch.func
        return False


def vocabulary(value: Any, columns: int) -> int:
    """Checks ``vocab_size`` against the columns of all shards, and returns the size of the true vocabulary."""
    if columns > scalars.INT32_MAX:
        raise ValueError(f"{columns} vocabulary columns are more than an int32 can count")
    if value is None:
        return columns
    value = scalars.integer("vocab_size", value)
    if not 1 <= value <= columns:
        raise ValueError(f"vocab_size must lie in [1, {columns}], the columns of weight over all ranks, got {value}")
    return value


def implementation(value: Any) -> tuple[str, ...] | None:
    """Returns the requested implementations as a tuple of names, which `lce_jax` checks later."""
    names = (value,) if isinstance(value, str) else value
    if names is None:
        return None
    if not isinstance(names, tuple) or not names or not all(isinstance(name, str) for name in names):
        raise TypeError(f"implementation must be None, a name or a tuple of names, got {value!r}")
    return names
