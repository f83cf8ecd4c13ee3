"""The two operators of torch that run all functions, and their derivative, one ``torch.autograd.Function``.

    forward    Operands, keep, TorchCall.text                          ->  TorchCall.fields, and what is kept
    backward   Operands, kept, cotangents, which are wanted, the text  ->  dhidden, dweight, dbias, as wanted

The operators are opaque to ``torch.compile``, which traces the Function and would otherwise trace into DLPack.
Everything that the backward needs is a tensor: autograd owns it, frees it, and notices if an operand has changed.

The operators take a call's text and no number that stands for it. A graph may run in a process that has traced no call:
``torch.export`` saves it, and Inductor's cache on disk, whose keys hold the operators' arguments, serves all processes.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, NoReturn

import torch

from lce_torch_bridge._types import Sums, Tensors, TorchCall, call_with
from lce_torch_bridge.launched_directly._way import way_of
from lce_torch_bridge.operators import _execute
from lce_torch_bridge.tensors import _device, _tensor_parallel, _weight
from lce_torch_bridge.tensors._device import is_differentiated, is_readable, readable

NAME = "lce_torch_bridge"
KEEPS = {  # places of the operands that autograd keeps for the backward
    "linear_logprobs": (0, 1, 2),
    "linear_kl": tuple(map(Tensors._fields.index, ("hidden", "weight", "bias", *Tensors._fields[7:10]))),
    "linear_logits": tuple(map(Tensors._fields.index, ("hidden", "weight", "bias", "candidates", "temperature"))),
}
_library = torch.library.Library(NAME, "FRAGMENT")  # registrations last as long as this object


def apply(x: Tensors, call: TorchCall) -> dict[str, torch.Tensor]:
    """The call's results by name, differentiable."""
    keep = is_differentiated(x.hidden, x.weight, x.bias)
    if _device.nothing_watches() and not _device.any_is_watched(x):
        keep = keep and bool(call.differentiable)
        found = Eager.apply(*x, call) if keep else _execute.forward(x, call, False, way_of(x.hidden))
        return dict(zip(call.fields, found, strict=False))
    traced = torch.compiler.is_compiling()
    if not call.differentiable or (traced and not keep):  # torch 2.11 traces no Function that nothing differentiates
        found = forward(list(x), keep, call.text)
    else:
        found = (Pass if traced else Uncompiled).apply(*x, keep, call)
    return dict(zip(call.fields, found, strict=False))


class Pass(torch.autograd.Function):
    """``(*Operands, keep, TorchCall)`` to the results, and what the backward needs."""

    @staticmethod
    def forward(*inputs: Any) -> tuple[torch.Tensor, ...]:
        """Runs the operator."""
        *x, keep, call = inputs
        return tuple(forward(x, keep, call.text))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
        """Keeps what the backward needs."""
        ctx.call = call = inputs[-1]
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*output[len(call.differentiable) :])
        ctx.save_for_backward(*[inputs[i] for i in KEEPS[call.jax.function]], *output[len(call.fields) :])

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        """Those of dhidden, dweight and dbias that are wanted."""
        return *derivative(ctx, grads), *[None] * (len(Tensors._fields) - 1)

    @staticmethod
    def vmap(*_: Any) -> Any:
        """Refuses ``torch.func.vmap``."""
        refuse_vmap()


# What torch binds the arguments of each call by. To find it takes torch longer than the rest of a Function.
Pass.forward.__signature__ = inspect.signature(Pass.forward)  # type: ignore[attr-defined]


class Uncompiled(Pass):
    """The same outside of ``torch.compile``, which takes no Function that has a ``jvp``."""

    @staticmethod
    def jvp(*_: Any) -> Any:
        """Refuses the derivative along tangents."""
        raise NotImplementedError(
            "lce_torch_bridge has no forward-mode derivatives (torch.func.jvp, jacfwd, linearize, forward_ad): use "
            "reverse mode, torch.func.vjp or torch.autograd.grad"
        )


class Eager(torch.autograd.Function):
    """``(*Operands, TorchCall)`` to the results where nothing watches: what it runs is no operator.

    A Function without ``setup_context`` costs the host less, and is not for torch.func.
    """

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[torch.Tensor, ...]:
        """Runs the call, and keeps what the backward needs."""
        x, call = Tensors(*inputs[:-1]), inputs[-1]
        found = _execute.forward(x, call, True, way_of(x.hidden))
        ctx.call, count = call, len(call.fields)
        results = tuple(found[:count])
        ctx.set_materialize_grads(False)
        if len(call.differentiable) < count:
            ctx.mark_non_differentiable(*results[len(call.differentiable) :])
        ctx.save_for_backward(*[x[i] for i in KEEPS[call.jax.function]], *found[count:])
        return results

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        """Those of dhidden, dweight and dbias that are wanted."""
        return *derivative(ctx, grads), *[None] * (len(Tensors._fields) - 2)

    @staticmethod
    def jvp(*_: Any) -> Any:
        """Refuses forward mode."""
        Uncompiled.jvp()


def derivative(ctx: Any, grads: tuple[torch.Tensor | None, ...]) -> list[torch.Tensor | None]:
    """dhidden, dweight and dbias, None where it is not wanted."""
    call, saved = ctx.call, ctx.saved_tensors
    places, seeds = KEEPS[call.jax.function], list(grads[: len(call.differentiable)])
    if not [seed for seed in seeds if seed is not None]:
        return [None] * 3
    x: list[Any] = [None] * len(Tensors._fields)
    for place, operand in zip(places, saved, strict=False):
        x[place] = operand
    kept, requested_gradients = list(saved[len(places) :]), list(ctx.needs_input_grad[:3])
    if torch.is_grad_enabled():  # as always in torch.func: a second derivative may be asked for
        found = Gradients.apply((len(x), len(kept)), requested_gradients, call.text, *x, *kept, *seeds)
    elif torch.compiler.is_compiling():
        found = backward(x, kept, seeds, requested_gradients, call.text, None, False)
    else:
        watched = not _device.nothing_watches() or _device.any_is_watched(saved + grads)
        with _device.in_turn(ctx):
            main_grad, owns_cache = may_write(ctx, len(kept) - 1)
            told = x, kept, seeds, requested_gradients
            if watched:
                found = backward(*told, call.text, main_grad, owns_cache)
            else:
                found = run_backward(*told, call, main_grad, owns_cache)
            ctx.is_spent = owns_cache
    left = iter(found)
    return [next(left) if want else None for want in requested_gradients]


class Gradients(torch.autograd.Function):
    """`backward` where its own derivative may be asked for, which is refused: torch.func knows no rule of operators."""

    @staticmethod
    def forward(*inputs: Any) -> tuple[torch.Tensor, ...]:
        """Runs the operator."""
        (first, second), requested_gradients, text, *tensors = inputs
        last = first + second
        return tuple(backward(tensors[:first], tensors[first:last], tensors[last:], requested_gradients, text))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
        """Keeps nothing."""

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        """Refuses the second derivative."""
        refuse_second_derivative(ctx)

    @staticmethod
    def vmap(*_: Any) -> Any:
        """Refuses ``torch.func.vmap``."""
        refuse_vmap()


def may_write(ctx: Any, cached: int) -> tuple[torch.Tensor | None, bool]:
    """The float32 ``main_grad`` that this backward may add to, and whether it may compute in the cache's memory."""
    if ctx.call.jax.function != "linear_logprobs":
        return None, False
    main_grad = _weight.sum_at(ctx, 1) if ctx.needs_input_grad[1] else None
    return main_grad, cached > 0 and not _device.graph_is_kept()


def call_of(text: str, weight: torch.Tensor) -> TorchCall:
    """The call of a `TorchCall.text`, with the size of the vocabulary."""
    call = call_with(text)
    return call if call.jax.vocab_size else _tensor_parallel.with_vocabulary(call, weight)


def operator(name: str, schema: str) -> Callable[[Callable[..., Any]], Any]:
    """Makes a function of tensors an operator on every device, which has no rule for ``torch.func.vmap``.

    Like ``torch.library.custom_op`` without its checks of what the function returns, which cost the host 20 µs a call.
    """

    def register(function: Callable[..., Any]) -> Any:
        torch.library.define(f"{NAME}::{name}", schema, tags=(torch.Tag.pt2_compliant_tag,))
        undisturbed = torch.compiler.disable(function)  # the compiler of the caller's frames skips this one
        torch.library.impl(f"{NAME}::{name}", "default", undisturbed)
        torch.library.register_vmap(f"{NAME}::{name}", refuse_vmap)
        return getattr(getattr(torch.ops, NAME), name).default

    return register


def refuse_vmap(*_: Any) -> NoReturn:
    """Refuses ``torch.func.vmap``, and says what to do instead."""
    raise NotImplementedError(
        "lce_torch_bridge does not run under torch.func.vmap, nor under what uses it (jacrev, jacobian with "
        "vectorize=True, grad with is_grads_batched=True): hidden takes any leading shape, so give it the whole batch, "
        "and loop where each part has a weight or a gradient of its own"
    )


def refuse_second_derivative(ctx: Any, *_: Any) -> None:
    """Refuses the derivative of a gradient."""
    del ctx
    raise NotImplementedError(
        "lce_torch_bridge computes first derivatives only, and this is a derivative of a gradient (create_graph=True): "
        "differentiate plain PyTorch code that stores the logits instead"
    )


@operator("forward", "(Tensor?[] x, bool keep, str call) -> Tensor[]")
def forward(x: list[torch.Tensor | None], keep: bool, text: str) -> list[torch.Tensor]:
    """``TorchCall.fields``, and what is kept."""
    if not all(map(is_readable, [y for y in x if y is not None])):
        x = list(map(readable, Tensors._fields, x))
    operands = Tensors(*x)  # type: ignore[arg-type]
    return _execute.forward(operands, call_of(text, operands.weight), keep, way_of(operands.hidden))


@torch.library.register_fake(f"{NAME}::forward")  # type: ignore[untyped-decorator]
def _(x: list[Any], keep: bool, text: str) -> list[torch.Tensor]:
    return _execute.forward_structs(Tensors(*x), call_with(text), keep)


def run_backward(
    x: list[Any],
    kept: list[torch.Tensor],
    seeds: list[torch.Tensor | None],
    requested_gradients: list[bool],
    call: TorchCall,
    main_grad: torch.Tensor | None,
    owns_cache: bool,
) -> list[torch.Tensor]:
    """Those of dhidden, dweight and dbias that are wanted."""
    operands = Tensors(*x)
    given = {name: seed for name, seed in zip(call.differentiable, seeds, strict=True) if seed is not None}
    sums = Sums(main_grad=main_grad, owns_cache=owns_cache)
    return _execute.gradients(operands, kept, given, tuple(requested_gradients), call, way_of(operands.hidden), sums)


@operator(
    "backward",
    "(Tensor?[] x, Tensor[] kept, Tensor?[] seeds, bool[] requested_gradients, str call, Tensor? main_grad=None, "
    "bool owns_cache=False) -> Tensor[]",
)
def backward(
    x: list[Any],
    kept: Any,
    seeds: Any,
    requested_gradients: Any,
    text: str,
    main_grad: Any = None,
    owns_cache: bool = False,
) -> list[torch.Tensor]:
    """`run_backward`. It may write to main_grad and the cache, which the schema does not say.

    A trace, which gives neither, would make copies of what is said to be written to.
    """
    return run_backward(x, kept, seeds, requested_gradients, call_of(text, x[1]), main_grad, owns_cache)


@torch.library.register_fake(f"{NAME}::backward")  # type: ignore[untyped-decorator]
def _(x: list[Any], _kept: Any, _seeds: Any, requested_gradients: list[bool], *_: Any) -> list[torch.Tensor]:
    return [y.new_empty(y.shape) for y in _execute.those_wanted(Tensors(*x), requested_gradients)]


torch.library.register_autograd(f"{NAME}::backward", refuse_second_derivative)
_library.impl("backward", refuse_vmap, "Batched")  # the older vmap, of is_grads_batched=True
