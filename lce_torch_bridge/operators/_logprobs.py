"""The derivative, as a ``torch.autograd.Function`` over two operators.

    forward    hidden [T, H], weight [V, H], bias [V], labels [T]        ->  outputs [T], saved [S, T], cache
    gradients  hidden, weight, bias, saved [S, T], cache, cotangents [T]  ->  dhidden, dweight, dbias, as wanted

Outputs and cotangents of candidates are [T, K].

The operators are opaque to ``torch.compile``, which traces the Function and would otherwise trace into DLPack.
Everything that the backward needs is a tensor: autograd owns it, frees it, and notices if an operand has changed.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from lce_torch_bridge._types import CALL_SCHEMA, DIFFERENTIABLE, NO_SUMS, PLAIN, Call, Operands, Sums, names_of
from lce_torch_bridge.launched_directly._way import way_of
from lce_torch_bridge.operators import _execute
from lce_torch_bridge.operators._derivatives import (
    gradients_function,
    is_differentiated,
    refuse_derivatives_of,
    refuse_forward_mode,
    without_forward_mode,
)
from lce_torch_bridge.operators._registered import NAME, operator, refuse_vmap
from lce_torch_bridge.tensors import _main_grad

NUM_OPERANDS = len(Operands._fields)


def apply(x: Operands, keep_cache: bool, call: Call) -> tuple[torch.Tensor, ...]:
    """``Call.fields``, differentiable."""
    if _nothing_watches() and not _any_is_watched(x):
        return Eager.apply(*x, keep_cache, call)
    if not torch.compiler.is_compiling():
        return Uncompiled.apply(*x, keep_cache, *call)
    function = LinearLogprobs.apply if is_differentiated(*x) else forward
    return tuple(function(*x, keep_cache, *call))


def _nothing_watches() -> bool:
    """Whether nothing traces, transforms or counts operators, so that none need be called: each costs the host time."""
    return not (
        torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack()
        or torch._C._are_functorch_transforms_active()
        or torch._C._get_tracing_state()
        or torch._C._autograd._profiler_enabled()
    )


class LinearLogprobs(torch.autograd.Function):
    """``(*Operands, keep_cache, *Call) -> Call.fields``, and what the backward needs."""

    @staticmethod
    def forward(*inputs: Any) -> tuple[torch.Tensor, ...]:
        """Runs the operator."""
        return tuple(forward(*inputs))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
        """Keeps what the backward needs."""
        ctx.call = call = Call(*inputs[NUM_OPERANDS + 1 :])
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*output[len(call.differentiable) :])
        ctx.save_for_backward(*inputs[:3], *output[len(call.fields) :])

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        """Those of dhidden, dweight and dbias that are wanted."""
        return *_backward(ctx, ctx.call.differentiable, grads), *(None,) * (NUM_OPERANDS - 2 + len(ctx.call))

    @staticmethod
    def vmap(*_: Any) -> Any:
        """Refuses ``torch.func.vmap``."""
        refuse_vmap()


def _sums(ctx: Any, cache: list[torch.Tensor]) -> Sums:
    """What this backward may write to; `NO_SUMS` if it writes to nothing but its results, as an operator must."""
    main_grad = _main_grad.sum_at(ctx, 1) if ctx.needs_input_grad[1] else None
    owns_cache = bool(cache) and not graph_is_kept()
    if main_grad is None and not owns_cache:
        return NO_SUMS
    return Sums(main_grad=main_grad, owns_cache=owns_cache)


def graph_is_kept() -> bool:
    """Whether this backward may be followed by another one over the same graph (``retain_graph``)."""
    asked = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", None)
    return asked is None or bool(asked())


Uncompiled = without_forward_mode(LinearLogprobs)


class Eager(torch.autograd.Function):
    """``(*Operands, keep_cache, Call) -> Call.fields``: the same where nothing watches. What it runs is no operator.

    A Function without ``setup_context`` costs the host less, and is not for torch.func.
    """

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[torch.Tensor, ...]:
        """Runs the call, and keeps what the backward needs."""
        *operands, keep_cache, call = inputs
        found = _execute.forward(Operands(*operands), call, keep_cache, way_of(operands[0]))
        fields, differentiable = names_of(call)
        results = tuple(found[: len(fields)])
        ctx.call = call
        ctx.set_materialize_grads(False)
        if len(differentiable) < len(fields):
            ctx.mark_non_differentiable(*results[len(differentiable) :])
        ctx.save_for_backward(*operands[:3], *found[len(fields) :])
        return results

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        """Those of dhidden, dweight and dbias that are wanted."""
        return *_backward(ctx, names_of(ctx.call)[1], grads), *(None,) * (NUM_OPERANDS - 1)

    @staticmethod
    def jvp(*_: Any) -> Any:
        """Refuses forward mode."""
        refuse_forward_mode()


def _backward(ctx: Any, names: tuple[str, ...], grads: tuple[torch.Tensor | None, ...]) -> list[torch.Tensor | None]:
    """dhidden, dweight and dbias, each None if it is not wanted, from the cotangents of the differentiable fields."""
    hidden, weight, bias, saved, *cache = ctx.saved_tensors
    given = {name: grad for name, grad in zip(names, grads, strict=False) if grad is not None}
    wanted = ctx.needs_input_grad[:3]
    if not given:
        return [None] * 3
    # If gradients are recorded, as always in torch.func, a second derivative may be asked for.
    recorded = torch.is_grad_enabled()
    # The compiler cannot trace what follows.
    plain = not (torch.compiler.is_compiling() or recorded or _any_is_watched((hidden, weight, *given.values())))
    sums = _sums(ctx, cache) if plain else NO_SUMS
    if sums is not NO_SUMS or (plain and _nothing_watches()):
        found = _execute.gradients(hidden, weight, bias, saved, cache, given, wanted, ctx.call, way_of(hidden), sums)
    else:
        cotangents = [given.get(name) for name in DIFFERENTIABLE]
        run = Gradients.apply if recorded else gradients
        found = run(hidden, weight, bias, saved, cache, *cotangents, *wanted, *ctx.call)
    left = iter(found)
    return [next(left) if want else None for want in wanted]


def _any_is_watched(tensors: Iterable[torch.Tensor | None]) -> bool:
    """Whether one needs operators: a subclass, one without values, or a batch of is_grads_batched=True."""
    for x in tensors:
        if x is None:
            continue
        if type(x) not in PLAIN or x.is_meta or torch._C._functorch.is_legacy_batchedtensor(x):
            return True
    return False


@operator(
    "forward",
    "(Tensor hidden, Tensor weight, Tensor? bias, Tensor labels, Tensor? temperature, Tensor? candidates, "
    f"Tensor? floor, bool keep_cache, {CALL_SCHEMA}) -> Tensor[]",
)
def forward(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    labels: torch.Tensor,
    temperature: torch.Tensor | None,
    candidates: torch.Tensor | None,
    floor: torch.Tensor | None,
    keep_cache: bool,
    *call: Any,
) -> list[torch.Tensor]:
    """``Call.fields``, what the backward needs per token, and the leaves of the cache."""
    operands = Operands(hidden, weight, bias, labels, temperature, candidates, floor)
    return _execute.forward(operands, Call(*call), keep_cache, way_of(hidden))


@torch.library.register_fake(f"{NAME}::forward")  # type: ignore[untyped-decorator]
def _(*inputs: Any) -> list[torch.Tensor]:
    operands, (keep_cache, *call) = Operands(*inputs[:NUM_OPERANDS]), inputs[NUM_OPERANDS:]
    return _execute.forward_structs(operands, Call(*call), keep_cache)


COTANGENTS = ", ".join(f"Tensor? d{name}" for name in DIFFERENTIABLE)


def _split(rest: tuple[Any, ...]) -> tuple[dict[str, Any], tuple[bool, ...], Call]:
    """What follows the cache among the arguments of `gradients`: cotangents, which gradients are wanted, the call."""
    first, last = len(DIFFERENTIABLE), len(Call._fields)
    return dict(zip(DIFFERENTIABLE, rest, strict=False)), rest[first:-last], Call(*rest[-last:])


@operator(
    "gradients",
    f"(Tensor hidden, Tensor weight, Tensor? bias, Tensor saved, Tensor[] cache, {COTANGENTS}, "
    f"bool want_hidden, bool want_weight, bool want_bias, {CALL_SCHEMA}) -> Tensor[]",
)
def gradients(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    saved: torch.Tensor,
    cache: list[torch.Tensor],
    *rest: Any,
) -> list[torch.Tensor]:
    """Those of dhidden, dweight and dbias that are wanted."""
    given, wanted, call = _split(rest)
    cotangents = {name: cotangent for name, cotangent in given.items() if cotangent is not None}
    return _execute.gradients(hidden, weight, bias, saved, cache, cotangents, wanted, call, way_of(hidden))


@torch.library.register_fake(f"{NAME}::gradients")  # type: ignore[untyped-decorator]
def _(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *rest: Any) -> list[torch.Tensor]:
    _, wanted, _ = _split(rest[2:])
    return [x.new_empty(x.shape) for x in _execute.those_wanted(hidden, weight, bias, wanted)]


Gradients = gradients_function(gradients)
refuse_derivatives_of("gradients")
