"""The forward and backward of every function, as operators of torch and as an autograd Function.

    forward    Tensors, keep, TorchCall.text                                      ->  TorchCall.fields, saved tensors
    backward   Tensors, saved tensors, cotangents, requested gradients, text      ->  dhidden, dweight, dbias

`run_forward` and `run_backward` do the work, with kernels that are launched directly or with programs of JAX. The
public functions call `apply`. The operators are opaque to ``torch.compile``, which traces the Function and would
otherwise trace into DLPack. Everything that the backward needs is a tensor, so that autograd owns it, frees it, and
notices if an operand has changed.

The operators take a call's text instead of a number that stands for the call, because a graph may run in a process that
has not traced it: ``torch.export`` saves graphs, and so does Inductor's cache on disk, whose keys contain the
operators' arguments.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, NoReturn

import jax
import torch

from lce_torch_bridge._types import NO_SUMS, Sums, Tensors, TorchCall, make_call
from lce_torch_bridge.launched_directly import _kl as _direct_kl
from lce_torch_bridge.launched_directly import _passes
from lce_torch_bridge.launched_directly._launch_with import Way, choose_way, refuse_other_way
from lce_torch_bridge.tensors import _device, _tensor_parallel, _weight
from lce_torch_bridge.tensors._device import check_readable, is_differentiated, is_readable
from lce_torch_bridge.through_jax import _ids, _kl, _logprobs


class JaxFunction(NamedTuple):
    """How JAX runs a function other than `linear_logprobs`."""

    reason: str | None  # why it is never launched directly; None if it may be
    forward: Callable[[Tensors, TorchCall, bool], list[Any]]
    make_empty: Callable[[Tensors, TorchCall, bool], list[torch.Tensor]]
    gradients: Callable[..., list[torch.Tensor]] | None  # None: the function has no backward


NAME = "lce_torch_bridge"
JAX_FUNCTIONS = {
    "linear_kl": JaxFunction(None, _kl.forward, _kl.make_empty, _kl.gradients),
    "linear_logits": JaxFunction(
        "linear_logits runs no kernel", _ids.run_logits, _ids.make_empty_logits, _ids.gradients
    ),
    "linear_topk": JaxFunction("linear_topk runs no kernel", _ids.run_topk, _ids.make_empty_topk, None),
}
SAVED_OPERANDS = {  # for each function, the indices of the operands that autograd saves for the backward
    "linear_logprobs": (0, 1, 2),
    "linear_kl": tuple(map(Tensors._fields.index, ("hidden", "weight", "bias", *Tensors._fields[7:10]))),
    "linear_logits": tuple(map(Tensors._fields.index, ("hidden", "weight", "bias", "candidates", "temperature"))),
}
_library = torch.library.Library(NAME, "FRAGMENT")  # registrations last as long as this object


def run_forward(x: Tensors, call: TorchCall, keep: bool, way: Way, lend_cache: bool = True) -> list[Any]:
    """Returns the results named by ``TorchCall.fields``, then what the backward needs besides the operands.

    The backward of `linear_logprobs` needs ``[S, T]`` saved values and the cache. ``keep`` says whether a backward may
    follow.

    By default the cache consists of tensors, which autograd can save. A caller that runs the backward at once passes
    ``lend_cache=False``: if JAX runs the call, the cache then consists of JAX's own arrays, whose memory JAX reuses in
    stream order as soon as they are dropped. JAX would hold tensors until the GPU is done, while the host may be many
    programs ahead.
    """
    if call.group != _tensor_parallel.NO_GROUP:
        sums_dhidden = keep and call.reduce_grad_hidden and x.hidden.requires_grad
        options: Any = {"bias": x.bias is not None, "hidden.requires_grad": sums_dhidden}
        options |= {"launched directly": way.direct, "in_chunks": not lend_cache}
        _tensor_parallel.compare_options(call, x.hidden.device, **options)
        weights = [weight for weight in (x.weight, x.teacher_weight) if weight is not None]
        ids = x.candidates if call.jax.function == "linear_logits" else x.labels
        launches = functools.partial(_passes.launches_kernels, way)
        _tensor_parallel.check(call.group, launches, x.hidden, ids, call.jax.vocab_size, *weights)
    if x.hidden.shape[0] == 0:
        return make_empty_results(x, call, keep)
    by_jax = JAX_FUNCTIONS.get(call.jax.function)
    if by_jax is not None:
        if by_jax.reason is not None:
            way.refuse(by_jax.reason)
        elif way.direct and (results := _direct_kl.forward(x, call, keep and call.keeps_tiles, way)) is not None:
            return results
        return by_jax.forward(x, call, keep)
    keep = keep and call.keeps_tiles
    results = _passes.forward(x, call, keep, way) if way.direct else None
    return _logprobs.forward(x, call, keep, lend_cache) if results is None else results


def make_empty_results(x: Tensors, call: TorchCall, keep: bool) -> list[torch.Tensor]:
    """Returns uninitialised tensors of the shapes and dtypes that `run_forward` returns."""
    by_jax = JAX_FUNCTIONS.get(call.jax.function)
    if by_jax is not None:
        return by_jax.make_empty(x, call, keep)
    keep_cache = keep and call.keeps_tiles and bool(x.hidden.shape[0])
    active_tiles = _passes.active_tiles_shape(x, call, choose_way(x.hidden)) if keep_cache else None
    results = _logprobs.make_empty(x, call, keep_cache and active_tiles is None)
    return results if active_tiles is None else [*results, x.hidden.new_empty(active_tiles, dtype=torch.int32)]


def run_backward(
    x: Tensors,
    residuals: Sequence[torch.Tensor | jax.Array],
    cotangents: dict[str, torch.Tensor],
    requested_gradients: tuple[bool, ...],
    call: TorchCall,
    way: Way,
    sums: Sums = NO_SUMS,
) -> list[torch.Tensor]:
    """Returns the requested gradients among dhidden, dweight and dbias, in their operands' dtypes.

    ``residuals`` are what `run_forward` returned after the results. With ``reduce_grad_hidden``, dhidden is summed over
    the group in float32 and rounded once. (With stored logits, each rank rounds before the sum.)
    """
    if x.hidden.shape[0] == 0:
        return [y.new_zeros(y.shape) for y in select_requested(x, requested_gradients)]
    # The operands may have been freed since the forward.
    if not all(map(is_readable, [y for y in (*x, *cotangents.values()) if y is not None])):
        x = Tensors(*map(check_readable, Tensors._fields, x))
        cotangents = {name: check_readable(f"the cotangent of {name}", seed) for name, seed in cotangents.items()}
    by_jax = JAX_FUNCTIONS.get(call.jax.function)
    if by_jax is not None:
        assert by_jax.gradients is not None
        if by_jax.reason is not None:
            way.refuse(by_jax.reason)
        elif way.direct:
            (seed,) = cotangents.values()
            gradients = _direct_kl.gradients(x, list[Any](residuals), seed, requested_gradients, call, sums, way)
            if gradients is not None:
                return gradients
        return by_jax.gradients(x, residuals, cotangents, requested_gradients, call)
    tensors = [y for y in residuals if isinstance(y, torch.Tensor)]
    saved, *cache = tensors
    if way.direct and (x.bias is None or call.jax.rank) and len(tensors) == len(residuals):
        adapter = [x.bias] if call.jax.rank else []
        grads = _passes.gradients(
            x.hidden, x.weight, saved, cache, cotangents, requested_gradients, call, sums, way, *adapter
        )
        if grads is not None:
            return grads
    elif way.required:
        way.refuse("JAX ran the forward")
    if call.jax.gradient_threshold and _passes.are_active_tiles(cache):
        refuse_other_way()
    return _logprobs.gradients(x, residuals, cotangents, requested_gradients, call, sums)


def select_requested(x: Tensors, requested_gradients: Sequence[bool]) -> list[torch.Tensor]:
    """Returns the operands whose gradients are requested."""
    return [y for y, is_requested in zip(x[:3], requested_gradients, strict=True) if is_requested and y is not None]


def apply(x: Tensors, call: TorchCall) -> dict[str, torch.Tensor]:
    """Runs a call, and returns its results by name. They are differentiable."""
    keep = is_differentiated(x.hidden, x.weight, x.bias)
    if _device.nothing_watches() and not _device.any_is_watched(x):
        keep = keep and bool(call.differentiable)
        results = Eager.apply(*x, call) if keep else run_forward(x, call, False, choose_way(x.hidden))
        return dict(zip(call.fields, results, strict=False))
    traced = torch.compiler.is_compiling()
    if not call.differentiable or (traced and not keep):  # torch 2.11 cannot trace a Function here
        results = forward(list(x), keep, call.text)
    else:
        results = (Pass if traced else Uncompiled).apply(*x, keep, call)
    return dict(zip(call.fields, results, strict=False))


class Pass(torch.autograd.Function):
    """Computes ``(*Tensors, keep, TorchCall) -> results, saved tensors`` with the operator `forward`."""

    @staticmethod
    def forward(*inputs: Any) -> tuple[torch.Tensor, ...]:
        """Calls the operator."""
        *x, keep, call = inputs
        return tuple(forward(x, keep, call.text))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
        """Saves what the backward needs."""
        ctx.call = call = inputs[-1]
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*output[len(call.differentiable) :])
        ctx.save_for_backward(*[inputs[i] for i in SAVED_OPERANDS[call.jax.function]], *output[len(call.fields) :])

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        """Returns the requested gradients among dhidden, dweight and dbias."""
        return *differentiate(ctx, grads), *[None] * (len(Tensors._fields) - 1)

    @staticmethod
    def vmap(*_: Any) -> Any:
        """Refuses ``torch.func.vmap``."""
        refuse_vmap()


# torch binds the arguments of each call to this signature. If it is not set, torch derives it in each call, which takes
# longer than the rest of a Function.
Pass.forward.__signature__ = inspect.signature(Pass.forward)  # type: ignore[attr-defined]


class Uncompiled(Pass):
    """`Pass` outside of ``torch.compile``, which does not support a Function with a ``jvp``."""

    @staticmethod
    def jvp(*_: Any) -> Any:
        """Refuses forward-mode derivatives."""
        raise NotImplementedError(
            "lce_torch_bridge has no forward-mode derivatives (torch.func.jvp, jacfwd, linearize, forward_ad): use "
            "reverse mode, torch.func.vjp or torch.autograd.grad"
        )


class Eager(torch.autograd.Function):
    """Computes ``(*Tensors, TorchCall) -> results`` without operators, for calls that nothing traces or transforms.

    A Function without ``setup_context`` takes less time on the host, but torch.func does not support it.
    """

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[torch.Tensor, ...]:
        """Runs the call, and saves what the backward needs."""
        x, call = Tensors(*inputs[:-1]), inputs[-1]
        outputs = run_forward(x, call, True, choose_way(x.hidden))
        ctx.call, count = call, len(call.fields)
        results = tuple(outputs[:count])
        ctx.set_materialize_grads(False)
        if len(call.differentiable) < count:
            ctx.mark_non_differentiable(*results[len(call.differentiable) :])
        ctx.save_for_backward(*[x[i] for i in SAVED_OPERANDS[call.jax.function]], *outputs[count:])
        return results

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        """Returns the requested gradients among dhidden, dweight and dbias."""
        return *differentiate(ctx, grads), *[None] * (len(Tensors._fields) - 2)

    @staticmethod
    def jvp(*_: Any) -> Any:
        """Refuses forward-mode derivatives."""
        Uncompiled.jvp()


def differentiate(ctx: Any, grads: tuple[torch.Tensor | None, ...]) -> list[torch.Tensor | None]:
    """Returns dhidden, dweight and dbias, or None for a gradient that is not requested."""
    call, tensors = ctx.call, ctx.saved_tensors
    places, seeds = SAVED_OPERANDS[call.jax.function], grads[: len(call.differentiable)]
    cotangents = name_cotangents(call, seeds)
    if not cotangents:
        return [None] * 3
    x: list[Any] = [None] * len(Tensors._fields)
    for place, operand in zip(places, tensors, strict=False):
        x[place] = operand
    residuals, requested_gradients = list(tensors[len(places) :]), list(ctx.needs_input_grad[:3])
    if torch.is_grad_enabled():  # a second derivative may be requested, as always in torch.func
        results = Gradients.apply((len(x), len(residuals)), requested_gradients, call.text, *x, *residuals, *seeds)
    elif torch.compiler.is_compiling():
        results = backward(x, residuals, list(seeds), requested_gradients, call.text, None, False)
    else:
        watched = not _device.nothing_watches() or _device.any_is_watched(tensors + grads)
        with _device.lock_backward(ctx):
            sums = find_writable(ctx, len(residuals) - 1)
            if watched:
                results = backward(
                    x, residuals, list(seeds), requested_gradients, call.text, sums.main_grad, sums.owns_cache
                )
            else:
                operands = Tensors(*x)
                way = choose_way(operands.hidden)
                results = run_backward(operands, residuals, cotangents, tuple(requested_gradients), call, way, sums)
            ctx.is_spent = sums.owns_cache
    remaining = iter(results)
    return [next(remaining) if is_requested else None for is_requested in requested_gradients]


def name_cotangents(call: TorchCall, seeds: Sequence[torch.Tensor | None]) -> dict[str, torch.Tensor]:
    """Returns the cotangents that are not None, keyed by the names of the call's results."""
    return {name: seed for name, seed in zip(call.differentiable, seeds, strict=True) if seed is not None}


class Gradients(torch.autograd.Function):
    """The operator `backward` as a Function, because torch.func does not use derivative rules of operators.

    Its own derivative, a second derivative, is refused.
    """

    @staticmethod
    def forward(*inputs: Any) -> tuple[torch.Tensor, ...]:
        """Calls the operator."""
        (num_operands, num_residuals), requested_gradients, text, *tensors = inputs
        last = num_operands + num_residuals
        return tuple(
            backward(tensors[:num_operands], tensors[num_operands:last], tensors[last:], requested_gradients, text)
        )

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
        """Saves nothing."""

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        """Refuses the second derivative."""
        refuse_second_derivative(ctx)

    @staticmethod
    def vmap(*_: Any) -> Any:
        """Refuses ``torch.func.vmap``."""
        refuse_vmap()


def find_writable(ctx: Any, num_cached: int) -> Sums:
    """Returns which memory this backward may write to: a float32 ``main_grad``, if there is one, and the cache."""
    if ctx.call.jax.function not in ("linear_logprobs", "linear_kl"):
        return NO_SUMS
    main_grad = _weight.find_main_grad(ctx, 1) if ctx.needs_input_grad[1] else None
    return Sums(main_grad=main_grad, owns_cache=num_cached > 0 and not _device.graph_is_kept())


def read_call(text: str, weight: torch.Tensor) -> TorchCall:
    """Parses ``text``, a `TorchCall.text`, into the call, and fills in the vocabulary size if it is unknown."""
    call = make_call(text)
    return call if call.jax.vocab_size else _tensor_parallel.set_vocab_size(call, weight)


def operator(name: str, schema: str) -> Callable[[Callable[..., Any]], Any]:
    """Returns a decorator that registers a function of tensors as an operator for every device.

    The operator refuses ``torch.func.vmap``. ``torch.library.custom_op`` is not used, because it checks the function's
    results, which takes 20 µs per call on the host.
    """

    def register(function: Callable[..., Any]) -> Any:
        torch.library.define(f"{NAME}::{name}", schema, tags=(torch.Tag.pt2_compliant_tag,))
        uncompiled = torch.compiler.disable(function)  # so that torch.compile does not look into the function
        torch.library.impl(f"{NAME}::{name}", "default", uncompiled)
        torch.library.register_vmap(f"{NAME}::{name}", refuse_vmap)
        return getattr(getattr(torch.ops, NAME), name).default

    return register


def refuse_vmap(*_: Any) -> NoReturn:
    """Raises under ``torch.func.vmap``. The message says what to do instead."""
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
    """Checks the operands' memory, and calls `run_forward`."""
    if not all(map(is_readable, [y for y in x if y is not None])):
        x = list(map(check_readable, Tensors._fields, x))
    operands = Tensors(*x)  # type: ignore[arg-type]
    return run_forward(operands, read_call(text, operands.weight), keep, choose_way(operands.hidden))


@torch.library.register_fake(f"{NAME}::forward")  # type: ignore[untyped-decorator]
def _(x: list[Any], keep: bool, text: str) -> list[torch.Tensor]:
    return make_empty_results(Tensors(*x), make_call(text), keep)


@operator(  # graphs that torch.export has saved contain this schema's argument names
    "backward",
    "(Tensor?[] x, Tensor[] kept, Tensor?[] seeds, bool[] wanted, str call, Tensor? main_grad=None, "
    "bool owns_cache=False) -> Tensor[]",
)
def backward(
    x: list[Any],
    residuals: Any,
    seeds: Any,
    requested_gradients: Any,
    text: str,
    main_grad: Any = None,
    owns_cache: bool = False,
) -> list[torch.Tensor]:
    """Calls `run_backward`, which may write to main_grad and to the cache, although the schema does not say so.

    A trace passes neither of them. If the schema declared them as mutated, the trace would copy them.
    """
    operands, call = Tensors(*x), read_call(text, x[1])
    cotangents, sums = name_cotangents(call, seeds), Sums(main_grad=main_grad, owns_cache=owns_cache)
    way = choose_way(operands.hidden)
    return run_backward(operands, residuals, cotangents, tuple(requested_gradients), call, way, sums)


@torch.library.register_fake(f"{NAME}::backward")  # type: ignore[untyped-decorator]
def _(x: list[Any], _residuals: Any, _seeds: Any, requested_gradients: list[bool], *_: Any) -> list[torch.Tensor]:
    return [y.new_empty(y.shape) for y in select_requested(Tensors(*x), requested_gradients)]


torch.library.register_autograd(f"{NAME}::backward", refuse_second_derivative)
_library.impl("backward", refuse_vmap, "Batched")  # the older vmap, which is_grads_batched=True uses
