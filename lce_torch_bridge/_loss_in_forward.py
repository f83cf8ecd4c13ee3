"""A per-token loss and its gradients in one pass: chunk of tokens by chunk of tokens, in the forward.

    results of the chunk, its exponentials kept ─ loss_fn ─ its derivatives ─ gradients of the chunk
    the next chunk: its dhidden in its own rows, its dweight added to one float32 sum

Everything is computed for a cotangent of 1, and the backward multiplies by the one that comes; or for the one that the
caller knows, so that dweight can be added to ``main_grad`` at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from lce_torch_bridge import _execute, autograd
from lce_torch_bridge._launch import Sum
from lce_torch_bridge._main_grad import nothing_like, placeholder
from lce_torch_bridge._types import Call, Operands

ALL = 1 << 62  # cache_bytes that no chunk exceeds


class Plan(NamedTuple):
    """What is static about a call."""

    loss_fn: Callable[..., torch.Tensor]
    call: Call
    rows: int  # of a chunk
    owner: torch.Tensor | None = None  # the weight whose main_grad gets the gradient; None: autograd gets it
    main_grad: torch.Tensor | None = None
    cotangent: float | None = None  # of the sum, where the caller knows it

    @property
    def into(self) -> torch.Tensor | None:
        """What the forward adds dweight to."""
        return None if self.cotangent is None else self.main_grad


def results(plan: Plan, x: Operands, keep_cache: bool) -> tuple[dict[str, torch.Tensor], list[Any]]:
    """The fields of `LogprobOutput` by name, and what `_execute.gradients` needs: saved numbers and the cache."""
    found = _execute.forward(x, plan.call, keep_cache, lend_cache=False)
    count = len(plan.call.fields)
    return dict(zip(plan.call.fields, found, strict=False)), found[count:]


def losses_of(plan: Plan, fields: dict[str, torch.Tensor], per_token: list[torch.Tensor]) -> torch.Tensor:
    """``loss_fn`` of these tokens, one number each."""
    losses = plan.loss_fn(fields["logprobs"], fields.get("entropy"), fields["lse"], *per_token)
    shape = fields["lse"].shape
    if not isinstance(losses, torch.Tensor):
        raise TypeError(f"loss_fn must return a tensor with one number per token, got {type(losses).__name__}")
    if losses.shape != shape or not losses.is_floating_point():
        raise ValueError(
            f"loss_fn must return one floating-point number per token, {tuple(shape)} for this chunk of tokens, got "
            f"{tuple(losses.shape)} of {losses.dtype}: sum over all other dimensions, and not over the tokens"
        )
    return losses


def without_gradients(
    plan: Plan, x: Operands, per_token: list[torch.Tensor]
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The sum, which autograd differentiates in what the loss uses besides results, and the fields."""
    with torch.no_grad():
        fields, _ = results(plan, x, keep_cache=False)
    if not len(x.labels):
        return x.hidden.new_zeros((), dtype=torch.float32), fields
    return losses_of(plan, dict(fields), per_token).sum(dtype=torch.float32), fields


class Found(NamedTuple):
    """The derivatives of a chunk's losses."""

    losses: torch.Tensor  # [t]
    cotangents: dict[str, torch.Tensor]  # by the name of a result, of those that matter
    per_token: list[torch.Tensor | None]


def _differentiated(
    plan: Plan, fields: dict[str, torch.Tensor], per_token: list[torch.Tensor], wanted: tuple[bool, ...]
) -> Found:
    with torch.enable_grad():
        leaves = {name: fields[name].detach().requires_grad_() for name in plan.call.differentiable}
        own = [x.detach().requires_grad_(want) for x, want in zip(per_token, wanted, strict=True)]
        losses = losses_of(plan, fields | leaves, own)
    inputs = [*leaves.values(), *(x for x in own if x.requires_grad)]
    if not losses.requires_grad:
        return Found(losses, {}, [None] * len(own))
    _refuse_others(losses, inputs)
    grads = list(torch.autograd.grad(losses, inputs, torch.ones_like(losses), allow_unused=True))
    if plan.cotangent is not None:
        grads = [None if x is None else x * plan.cotangent for x in grads]
    cotangents = {name: grads.pop(0) for name in leaves}
    given = {name: x for name, x in cotangents.items() if x is not None}
    return Found(losses.detach(), given, [grads.pop(0) if x.requires_grad else None for x in own])


def _refuse_others(losses: torch.Tensor, inputs: list[torch.Tensor]) -> None:
    """Refuses a loss_fn that closes over a tensor whose gradient would be lost."""
    known = {id(x) for x in inputs}
    for leaf in _leaves(losses):
        if id(leaf) not in known:
            raise ValueError(
                f"loss_fn uses a tensor {tuple(leaf.shape)} that requires a gradient and is none of its arguments: "
                "give it as a per-token argument, or use its .detach(); for a parameter of the loss, apply loss_fn to "
                "the results of linear_logprobs, and sum"
            )


def _leaves(x: torch.Tensor) -> Iterator[torch.Tensor]:
    """The leaves from which ``x`` was made."""
    if x.grad_fn is None:
        yield x
    seen, ahead = set(), [x.grad_fn]
    while ahead:
        node: Any = ahead.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            yield node.variable
        ahead.extend(before for before, _ in node.next_functions)


class LossAndGradients(torch.autograd.Function):
    """``(plan, hidden, weight, bias, labels, temperature, *per_token) -> sum, *Call.fields``."""

    @staticmethod
    def forward(ctx: Any, plan: Plan, *inputs: Any) -> tuple[torch.Tensor, ...]:
        """The sum, the results, and the gradients for a cotangent of 1."""
        (hidden, weight, bias, labels, temperature), per_token = inputs[:5], inputs[5:]
        x = Operands(hidden, weight, bias, labels, temperature, None)
        losses, fields, grads = _walk(plan, _in_float32(x), per_token, ctx.needs_input_grad[1:])
        ctx.cotangent = plan.cotangent
        # Not through save_for_backward: other micro-batches may change both in place before this backward.
        ctx.main_grad = None if plan.owner is None else (plan.owner, plan.main_grad)
        ctx.dtypes = [None if y is None else y.dtype for y in (*x[:3], *per_token)]
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*fields)
        ctx.save_for_backward(*grads)
        return losses.sum(dtype=torch.float32), *fields

    @staticmethod
    def backward(ctx: Any, cotangent: torch.Tensor | None, *_: Any) -> tuple[torch.Tensor | None, ...]:
        """The gradients times the cotangent."""
        saved = ctx.saved_tensors
        if cotangent is None:
            return (None,) * (6 + len(saved) - 3)
        if torch.is_grad_enabled():  # create_graph=True: the gradients that are kept know nothing of the operands
            autograd.refuse_second_derivative(ctx)
        if ctx.cotangent is None:
            found = _scaled(ctx.main_grad, ctx.dtypes, cotangent, *saved)
        else:
            _check_cotangent(ctx.cotangent, cotangent)
            found = _as_computed(ctx.main_grad, ctx.dtypes, *saved)
        return None, *found[:3], None, None, *found[3:]


def _scaled(main_grad: Any, dtypes: list[Any], cotangent: torch.Tensor, *grads: Any) -> list[Any]:
    """``cotangent · grad`` in each dtype; the weight's is added to ``main_grad``, if there is one."""
    factor = cotangent.reshape(1)  # of one dimension: its float32 would be rounded to bfloat16 without
    found: list[torch.Tensor | None] = []
    for place, (grad, dtype) in enumerate(zip(grads, dtypes, strict=True)):
        if grad is None:
            found.append(None)
        elif place == 1 and main_grad is not None:
            weight, total = main_grad
            total.addcmul_(grad, factor)
            found.append(placeholder(weight, grad.new_empty(grad.shape, dtype=dtype)))
        else:
            found.append(_execute.scaled(grad, factor, dtype))
    return found


def _check_cotangent(known: float, cotangent: torch.Tensor) -> None:
    """Refuses another one than the gradients were computed for."""
    if not torch.equal(cotangent, torch.full_like(cotangent, known)):  # the host waits for it
        raise ValueError(
            f"linear_loss(cotangent={known!r}) was differentiated with a cotangent of {cotangent.item()!r}, which its "
            "gradients were not computed for: give the number that the sum is multiplied by, or leave cotangent out"
        )


def _as_computed(main_grad: Any, dtypes: list[Any], *grads: Any) -> list[Any]:
    """The gradients in each dtype, the weight's as what stands in for it if it has been added to ``main_grad``."""
    found = [None if grad is None else grad.to(dtype) for grad, dtype in zip(grads, dtypes, strict=True)]
    if main_grad is not None:
        found[1] = placeholder(main_grad[0], nothing_like(main_grad[0], dtypes[1]))
    return found


def _in_float32(x: Operands) -> Operands:
    """The operands whose gradients must not be rounded before the cotangent is known, in float32.

    float16 has few small numbers, from which loss scaling, a part of the cotangent, keeps away. And dbias is a sum over
    the chunks.
    """
    hidden = x.hidden.float() if x.hidden.dtype == torch.float16 else x.hidden
    bias = None if x.bias is None else x.bias.float()
    return x._replace(hidden=hidden.contiguous(), weight=x.weight.contiguous(), bias=bias)


def _walk(
    plan: Plan, x: Operands, per_token: tuple[torch.Tensor, ...], wanted: tuple[bool, ...]
) -> tuple[torch.Tensor, list[torch.Tensor], list[torch.Tensor | None]]:
    """The losses ``[T]``, the fields ``[T]``, and the gradients in hidden, weight, bias and the per-token arguments."""
    tokens = len(x.labels)
    parts = [slice(first, min(first + plan.rows, tokens)) for first in range(0, tokens, plan.rows)]
    sums = _Sums(x, per_token, wanted, len(parts), plan.into)
    losses, fields = [x.hidden.new_empty(0, dtype=torch.float32)], []
    for part in parts:
        temperature = None if x.temperature is None else x.temperature[part]
        chunk = x._replace(hidden=x.hidden[part], labels=x.labels[part], temperature=temperature)
        found, (saved, *cache) = results(plan, chunk, keep_cache=True)
        given = _differentiated(plan, found, [y[part] for y in per_token], wanted[5:])
        losses.append(given.losses.float())
        fields.append([found[name].detach() for name in plan.call.fields])
        sums.add(plan, part, chunk, saved, cache, given)
        del saved, cache, found  # before the next chunk's exponentials are kept
    whole = map(torch.cat, zip(*fields, strict=True)) if fields else (losses[0].clone() for _ in plan.call.fields)
    return torch.cat(losses), list(whole), sums.finish(x.weight)


class _Sums:
    """The gradients of all chunks."""

    def __init__(
        self,
        x: Operands,
        per_token: tuple[torch.Tensor, ...],
        wanted: tuple[bool, ...],
        chunks: int,
        into: torch.Tensor | None,
    ) -> None:
        hidden, weight, bias, *_ = x
        self.wanted = wanted[:3]
        self.hidden = torch.zeros_like(hidden) if wanted[0] else None
        # One chunk's dweight may be rounded at once, but not to float16, as `_in_float32` says.
        summed = chunks != 1 or weight.dtype == torch.float16 or into is not None
        self.total = Sum(weight, into) if wanted[1] and summed else None
        self._kept = into is None
        self.weight: torch.Tensor | None = None
        self.bias = torch.zeros_like(bias) if wanted[2] and bias is not None else None
        self.per_token = [torch.zeros_like(y) if want else None for y, want in zip(per_token, wanted[5:], strict=True)]

    def add(
        self, plan: Plan, part: slice, chunk: Operands, saved: torch.Tensor, cache: list[Any], given: Found
    ) -> None:
        """The gradients of the tokens in ``part``."""
        for whole, grad in zip(self.per_token, given.per_token, strict=True):
            if whole is not None and grad is not None:
                whole[part] = grad
        if not given.cotangents or not any(self.wanted):
            return
        sums = _execute.Sums(self.total, owns_cache=True)
        grads = _execute.gradients(*chunk[:3], saved, cache, given.cotangents, self.wanted, plan.call, sums)
        if self.hidden is not None:
            self.hidden[part] = grads.pop(0)
        if self.wanted[1] and self.total is None:
            self.weight = grads.pop(0)
        if self.bias is not None:
            self.bias += grads.pop(0)

    def finish(self, weight: torch.Tensor) -> list[torch.Tensor | None]:
        """Those in hidden, weight and bias, and in the per-token arguments."""
        if self.wanted[1] and self.weight is None:
            self.weight = torch.zeros_like(weight) if self.total is None else self.total.taken()
        return [self.hidden, self.weight if self._kept else None, self.bias, *self.per_token]
