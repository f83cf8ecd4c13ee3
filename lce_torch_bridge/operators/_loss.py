"""A per-token loss and its gradients in one pass: chunk of tokens by chunk of tokens, in the forward.

    results of the chunk, its exponentials kept ─ loss_fn ─ its derivatives ─ gradients of the chunk
    the next chunk: its dhidden in its own rows, its dweight added to one float32 sum

Everything is computed for a cotangent of 1, and the backward multiplies by the one that comes; or for the one that the
caller knows, so that dweight can be added to ``main_grad`` at once. In the first forward of an activation checkpoint,
which drops what is saved and runs the forward again, nothing but the losses is computed.

float16 has no numbers below 6e-8, and what keeps gradients away from there, the loss scale, is a part of the cotangent,
which is not known in the forward. So dlogits in float16 are computed in units of their own: all cotangents are
multiplied by the power of two that brings the largest dlogit of the call, so far as it is known, near float16's largest
number. What has been summed before a chunk with larger ones is brought to its units, and the backward divides.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from lce_torch_bridge._types import Sums, Tensors, TorchCall, call_with
from lce_torch_bridge.launched_directly._passes import scale
from lce_torch_bridge.launched_directly._way import Way
from lce_torch_bridge.operators import _execute
from lce_torch_bridge.operators._operators import Uncompiled, refuse_second_derivative, refuse_vmap
from lce_torch_bridge.tensors import _device, _weight
from lce_torch_bridge.through_jax._programs import DweightSum

ALL = 1 << 62  # cache_bytes that no chunk exceeds
HIGHEST = 15  # dlogits lie below 2^15, and float16 ends at 2^16
MOST = 100  # exponent of a unit, so that its inverse is a normal float32 number
LARGE = 1 << 24  # elements, from which on a kernel's speed counts more than its launch
CLOSE = 1e-6  # relative: eight of float32's steps, where each product on a cotangent's way rounds by half a step


class LossPlan(NamedTuple):
    """What is static about a call."""

    loss_fn: Callable[..., torch.Tensor]  # of the results by name, and of what is per token
    call: TorchCall
    rows: int  # of a chunk
    way: Way
    main_grad: torch.Tensor | None = None  # gets the weight's gradient; None: autograd gets it
    cotangent: float | None = None  # of the sum, where the caller knows it

    @property
    def into(self) -> torch.Tensor | None:
        """What the forward adds dweight to."""
        return None if self.cotangent is None else self.main_grad

    def parts(self, tokens: int) -> list[slice]:
        """The chunks of so many tokens."""
        return [slice(first, min(first + self.rows, tokens)) for first in range(0, tokens, self.rows)]

    def has_units(self, x: Tensors) -> bool:
        """Whether gradients are computed in units of their own."""
        return x.weight.dtype == torch.float16 and self.cotangent is None

    def sums(self, x: Tensors) -> bool:
        """Whether dweight is summed in float32.

        One chunk's may be rounded at once, but not to float16, because the cotangent is not known.
        """
        return len(self.parts(len(x.labels))) != 1 or x.weight.dtype == torch.float16 or self.into is not None


def results(plan: LossPlan, x: Tensors, keep: bool) -> tuple[dict[str, torch.Tensor], list[Any]]:
    """The fields of `LogprobOutput` by name, and what `_execute.gradients` needs: saved numbers and the cache."""
    found = _execute.forward(x, plan.call, keep, plan.way, lend_cache=False)
    fields = plan.call.fields
    return dict(zip(fields, found, strict=False)), found[len(fields) :]


def losses_of(plan: LossPlan, fields: dict[str, torch.Tensor], per_token: list[torch.Tensor]) -> torch.Tensor:
    """``loss_fn`` of these tokens, one number each."""
    losses = plan.loss_fn(fields, *per_token)
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
    plan: LossPlan, x: Tensors, per_token: list[torch.Tensor]
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The sum, which autograd differentiates in what the loss uses besides results, and the fields."""
    losses, fields = each_loss(plan, x, per_token)
    return losses.sum(dtype=torch.float32), fields


def each_loss(
    plan: LossPlan, x: Tensors, per_token: list[torch.Tensor]
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The losses and the fields."""
    with torch.no_grad():
        fields, _ = results(plan, x, keep=False)
    given = {name: field.clone() for name, field in fields.items()}  # loss_fn may overwrite what it gets
    return losses_of(plan, given, per_token), fields


class LossDerivatives(NamedTuple):
    """The derivatives of a chunk's losses."""

    losses: torch.Tensor  # [t]
    cotangents: dict[str, torch.Tensor]  # by the name of a result, of those that matter
    per_token: list[torch.Tensor | None]


def _differentiated(
    plan: LossPlan,
    fields: dict[str, torch.Tensor],
    per_token: list[torch.Tensor],
    requested_gradients: tuple[bool, ...],
) -> LossDerivatives:
    hooks = contextlib.nullcontext() if _device.top_hooks(False) is None else _device.without_hooks()
    with hooks, torch.enable_grad():
        leaves = {name: fields[name].detach().requires_grad_() for name in plan.call.differentiable}
        own = [x.detach().requires_grad_(want) for x, want in zip(per_token, requested_gradients, strict=True)]
        losses = losses_of(plan, fields | leaves, own)
        inputs = [*leaves.values(), *[x for x in own if x.requires_grad]]
        if not losses.requires_grad:
            return LossDerivatives(losses, {}, [None] * len(own))
        _refuse_others(losses, inputs)
        grads = list(torch.autograd.grad(losses, inputs, torch.ones_like(losses), allow_unused=True))
    if plan.cotangent is not None:
        grads = [None if x is None else x * plan.cotangent for x in grads]
    cotangents = {name: grads.pop(0) for name in leaves}
    given = {name: x for name, x in cotangents.items() if x is not None}
    return LossDerivatives(losses.detach(), given, [grads.pop(0) if x.requires_grad else None for x in own])


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
    """``(plan, hidden, weight, bias, labels, temperature, floor, *per_token) -> sum, *Call.fields``."""

    @staticmethod
    def forward(ctx: Any, plan: LossPlan, *inputs: Any) -> tuple[torch.Tensor, ...]:
        """The sum, the results, and the gradients for the cotangent that is known, or 1."""
        (hidden, weight, bias, labels, temperature, floor), per_token = inputs[:6], inputs[6:]
        x = Tensors(hidden, weight, bias, labels, temperature, None, floor)
        run = _first_forward if _device.will_be_recomputed() else _walk
        losses, fields, grads, unit = run(plan, _in_float32(x), per_token, ctx.needs_input_grad[1:])
        ctx.cotangent, ctx.way = plan.cotangent, plan.way
        ctx.main_grad = plan.main_grad  # not through save_for_backward: other micro-batches may change it before
        ctx.dtypes = [None if y is None else y.dtype for y in (*x[:3], *per_token)]
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*fields)
        ctx.save_for_backward(unit, *grads)
        return losses.sum(dtype=torch.float32), *fields

    @staticmethod
    @torch.compiler.disable(reason="it asks whether autograd keeps the graph")  # type: ignore[untyped-decorator]
    def backward(ctx: Any, cotangent: torch.Tensor | None, *_: Any) -> tuple[torch.Tensor | None, ...]:
        """The gradients times the cotangent."""
        unit, *grads = ctx.saved_tensors
        if cotangent is None:
            return (None,) * (7 + len(grads) - 3)
        if _device.is_batched(cotangent):
            refuse_vmap()
        if torch.is_grad_enabled():  # create_graph=True: the gradients that are kept know nothing of the operands
            refuse_second_derivative(ctx)
        if ctx.main_grad is None:
            _weight.refuse_partitioned(ctx, 1)
        # One dimension: otherwise products with bfloat16 would round its float32.
        came = _device.readable("the cotangent", cotangent).reshape(1)
        factor = came if ctx.cotangent is None else _relative(ctx.cotangent, came, ctx.main_grad is not None)
        of_operands = factor if unit is None else came / unit
        factors = [*[of_operands] * 3, *[factor] * (len(grads) - 3)]
        with _device.in_turn(ctx):
            if ctx.main_grad is not None:
                if ctx.cotangent is None and _weight.is_asked_for(ctx, 1):
                    ctx.main_grad.addcmul_(grads[1], of_operands)
                grads[1] = None
            found = [_scaled(*each, ctx.way) for each in zip(grads, factors, ctx.dtypes, strict=True)]
            ctx.is_spent = not _device.graph_is_kept()
        if ctx.main_grad is not None:
            found[1] = _weight.empty_sparse_like(ctx.main_grad, ctx.dtypes[1])
        return None, *found[:3], None, None, None, *found[3:]

    @staticmethod
    def jvp(*_: Any) -> Any:
        """Refuses forward mode."""
        Uncompiled.jvp()


def _scaled(
    grad: torch.Tensor | None, factor: torch.Tensor | None, dtype: torch.dtype, way: Way
) -> torch.Tensor | None:
    """``factor · grad``, without a factor ``grad``, rounded to a dtype; where it lies, unless a kept graph holds it."""
    if grad is None:
        return None
    kept = _device.graph_is_kept()
    if factor is None:
        return grad.to(dtype, copy=kept)
    in_place = grad.dtype == dtype and not kept
    if way.direct and grad.numel() >= LARGE:  # torch's own kernel takes twice as long for mixed dtypes, and for 1
        found = scale(grad, factor, dtype, in_place)
        if found is not None:
            return found
    return torch.mul(grad, factor, out=grad if in_place else grad.new_empty(grad.shape, dtype=dtype))


def _relative(known: float, cotangent: torch.Tensor, added: bool) -> torch.Tensor | None:
    """The cotangent by the one that the gradients were computed for; None if they are the same.

    Raises:
        ValueError: they differ by more than what a few products round.
    """
    came, told = cotangent.item(), cotangent.new_tensor(known)  # the host waits for it
    if came == told.item():
        return None
    if abs(came - known) <= CLOSE * abs(known):
        return cotangent / told
    held = f"weight.main_grad holds the gradient for {known!r} already: zero it, and " if added else ""
    raise ValueError(
        f"linear_loss(cotangent={known!r}) was differentiated with a cotangent of {came!r}, which its gradients were "
        f"not computed for: {held}give the number that the sum is multiplied by, or leave cotangent out"
    )


def _in_float32(x: Tensors) -> Tensors:
    """The operands whose gradients must not be rounded before the cotangent is known, in float32.

    float16 has few small numbers, from which loss scaling, a part of the cotangent, keeps away. And dbias is a sum over
    the chunks.
    """
    hidden = x.hidden.float() if x.hidden.dtype == torch.float16 else x.hidden
    bias = None if x.bias is None else x.bias.float()
    return x._replace(hidden=hidden.contiguous(), weight=x.weight.contiguous(), bias=bias)


def _walk(
    plan: LossPlan, x: Tensors, per_token: tuple[torch.Tensor, ...], requested_gradients: tuple[bool, ...]
) -> tuple[torch.Tensor, list[torch.Tensor], list[torch.Tensor | None], torch.Tensor | None]:
    """The losses ``[T]``, the fields ``[T]``, and the gradients in hidden, weight, bias and the per-token arguments.

    And what those of hidden, weight and bias are to be divided by, if it is not 1.
    """
    tokens, names = len(x.labels), plan.call.fields
    parts, sums = plan.parts(tokens), ChunkSums(plan, x, requested_gradients[:3])
    own = [torch.zeros_like(y) if want else None for y, want in zip(per_token, requested_gradients[6:], strict=True)]
    losses = x.hidden.new_empty(tokens, dtype=torch.float32)
    fields = [torch.empty_like(losses) for _ in names]
    with _saying_what_was_added(sums, tokens):
        for part in parts:
            temperature, floor = [None if y is None else y[part] for y in (x.temperature, x.floor)]
            chunk = x._replace(hidden=x.hidden[part], labels=x.labels[part], temperature=temperature, floor=floor)
            found, kept = results(plan, chunk, keep=True)
            for field, name in zip(fields, names, strict=True):
                field[part] = found[name]  # before loss_fn, which may overwrite what it gets
            given = _differentiated(plan, found, [y[part] for y in per_token], requested_gradients[6:])
            losses[part] = given.losses
            for whole, grad in zip(own, given.per_token, strict=True):
                if whole is not None and grad is not None:
                    whole[part] = grad
            sums.add(part, chunk, kept, given.cotangents, plan.call, plan.way)
            del kept, found  # before the next chunk's exponentials are kept
    grads = [*sums.finish(x.weight), *own]  # before the unit, which is there then
    return losses, fields, grads, sums.unit


def _first_forward(
    plan: LossPlan, x: Tensors, per_token: tuple[torch.Tensor, ...], requested_gradients: tuple[bool, ...]
) -> tuple[torch.Tensor, list[torch.Tensor], list[torch.Tensor | None], torch.Tensor | None]:
    """What `_walk` returns, but of gradients and unit only what a checkpoint compares: shapes and dtypes, no memory."""
    losses, fields = each_loss(plan._replace(call=call_with(plan.call.text, cache_bytes=0)), x, list(per_token))
    weight = x.weight[:0].float() if plan.sums(x) else x.weight
    makers = x.hidden, None if plan.into is not None else weight, x.bias, *per_token
    shapes = [None if y is None else y.shape for y in (*x[:3], *per_token)]
    grads = [
        y.new_empty(()).expand(shape) if want and y is not None and shape is not None else None
        for y, shape, want in zip(makers, shapes, (*requested_gradients[:3], *requested_gradients[6:]), strict=True)
    ]
    return losses, list(fields.values()), grads, losses.new_empty(1) if plan.has_units(x) else None


@contextlib.contextmanager
def _saying_what_was_added(sums: ChunkSums, tokens: int) -> Iterator[None]:
    """Inside, errors say what ``main_grad`` holds of the tokens before."""
    try:
        yield
    except BaseException as error:
        if sums.are_in_main_grad:
            error.add_note(
                f"weight.main_grad holds the gradients of the first {sums.tokens} of {tokens} tokens: zero it, or "
                "restore what it held"
            )
        raise


def unit_of(cotangents: dict[str, torch.Tensor], x: Tensors, call: TorchCall) -> torch.Tensor:
    """The power of two, ``[1]``, by which the cotangents are multiplied. Bounds of dlogits make it, not dlogits.

    Each dlogit is at most ``|logit_scale| / temperature`` times the sum of the cotangents' absolute values. That of the
    entropy counts ln V + 1 times, because it is multiplied by p (ln p + entropy), at most ln V + 1/e.
    """
    bound = torch.zeros(len(x.labels), dtype=torch.float32, device=x.labels.device)
    for name, cotangent in cotangents.items():
        bound += cotangent.abs() * (math.log(call.jax.vocab_size) + 1 if name == "entropy" else 1)
    bound = bound * abs(call.jax.logit_scale)
    if x.temperature is not None:
        bound = bound / x.temperature
    _, exponent = torch.frexp(bound.where(bound.isfinite(), 0).amax(0, keepdim=True))
    exponent = (HIGHEST - exponent).clamp(-MOST, MOST).where(bound.any(), MOST)
    return torch.ldexp(torch.ones_like(bound[:1]), exponent)


class ChunkSums:
    """The gradients of all chunks: of hidden row by row, of weight and bias added up."""

    def __init__(self, plan: LossPlan, x: Tensors, requested_gradients: tuple[bool, ...]) -> None:
        hidden, weight, bias, *_ = x
        self._requested_gradients = requested_gradients
        self._hidden = torch.zeros_like(hidden) if requested_gradients[0] else None
        self._total = DweightSum(weight, plan.into) if requested_gradients[1] and plan.sums(x) else None
        self._kept = plan.into is None
        self._weight: torch.Tensor | None = None
        self._bias = torch.zeros_like(bias) if requested_gradients[2] and bias is not None else None
        self.tokens = 0  # whose gradients are here
        self._has_units = plan.has_units(x)
        self.unit: torch.Tensor | None = None  # by which everything here is to be divided; None: 1

    @property
    def are_in_main_grad(self) -> bool:
        """Whether something has been added to what was given."""
        return self._total is not None and self._total.is_given

    def add(
        self,
        part: slice,
        chunk: Tensors,
        kept: list[Any],
        cotangents: dict[str, torch.Tensor],
        call: TorchCall,
        way: Way,
    ) -> None:
        """The gradients of the tokens in ``part``."""
        if not cotangents or not any(self._requested_gradients):
            return
        if self._has_units:
            unit = self._fitted(unit_of(cotangents, chunk, call))
            cotangents = {name: cotangent * unit for name, cotangent in cotangents.items()}
        sums = Sums(self._total, owns_cache=True)
        grads = _execute.gradients(chunk, kept, cotangents, self._requested_gradients, call, way, sums)
        if self._hidden is not None:
            self._hidden[part] = grads.pop(0)
        if self._requested_gradients[1] and self._total is None:
            self._weight = grads.pop(0)
        if self._bias is not None:
            self._bias += grads.pop(0)
        self.tokens = part.stop

    def _fitted(self, unit: torch.Tensor) -> torch.Tensor:
        """The unit of everything from now on: this one, or the one before if that is smaller."""
        if self.unit is not None:
            unit = torch.minimum(unit, self.unit)
            change = unit / self.unit
            for grad in (self._hidden, self._total, self._bias):
                if grad is not None:
                    grad.mul_(change)
        self.unit = unit
        return unit

    def finish(self, weight: torch.Tensor) -> list[torch.Tensor | None]:
        """Those in hidden, weight and bias."""
        if self._has_units and self.unit is None:
            self.unit = weight.new_ones(1, dtype=torch.float32)
        if self._requested_gradients[1] and self._weight is None:
            self._weight = torch.zeros_like(weight) if self._total is None else self._total.taken()
        return [self._hidden, self._weight if self._kept else None, self._bias]
