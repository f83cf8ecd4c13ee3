"""A per-token loss and its gradients, computed together in the forward, one chunk of tokens after another.

    a chunk's results, exponentials cached  ->  loss_fn  ->  derivatives of the loss  ->  the chunk's gradients

dhidden goes to the chunk's rows, and dweight is added to one float32 sum. Then the next chunk begins.

The forward computes all gradients for a cotangent of 1, and the backward multiplies them by the actual cotangent. If
the caller passes the cotangent, the forward uses it, so that it can add dweight to ``main_grad`` at once.

An activation checkpoint drops what its first forward saves, and runs the forward again. So the first forward computes
only losses.

float16 has no positive values below 6e-8. A loss scale keeps gradients above that, but it is part of the cotangent,
which the forward does not know. So float16 dlogits, the derivatives of the logits, have a unit of their own: cotangents
are multiplied by the power of two that brings the call's largest dlogit so far near float16's maximum. When a chunk has
larger dlogits, the sums are rescaled to that chunk's unit. The backward divides by the unit.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from lce_torch_bridge._types import Sums, Tensors, TorchCall, make_call
from lce_torch_bridge.launched_directly._launch_with import Way
from lce_torch_bridge.launched_directly._passes import scale
from lce_torch_bridge.operators import _operators
from lce_torch_bridge.operators._operators import Uncompiled, refuse_second_derivative, refuse_vmap
from lce_torch_bridge.tensors import _device, _weight
from lce_torch_bridge.through_jax._programs import DweightSum

ALL = 1 << 62  # a value of cache_bytes that no chunk exceeds
HIGHEST = 15  # an exponent: dlogits stay below 2^15, and float16 ends at 2^16
MOST = 100  # the largest exponent of a unit, so that the inverse of a unit is a normal float32 value
LARGE = 1 << 24  # elements; in larger tensors a kernel's speed matters more than its launch
CLOSE = 1e-6  # relative: eight ulps of float32. Each product in a cotangent rounds by half an ulp


class LossPlan(NamedTuple):
    """How a loss and its gradients are computed: everything except the call's operands."""

    loss_fn: Callable[..., torch.Tensor]  # takes a dict of results, and the per-token arguments
    call: TorchCall
    rows: int  # the number of tokens in a chunk
    way: Way
    main_grad: torch.Tensor | None = None  # dweight is added to it; None: autograd gets dweight
    cotangent: float | None = None  # the cotangent of the sum, if the caller has passed it

    @property
    def target(self) -> torch.Tensor | None:
        """The ``main_grad`` to which the forward adds dweight; None if the forward does not add dweight."""
        return None if self.cotangent is None else self.main_grad

    def chunks(self, tokens: int) -> list[slice]:
        """Returns the slices that divide ``tokens`` tokens into chunks."""
        return [slice(first, min(first + self.rows, tokens)) for first in range(0, tokens, self.rows)]

    def has_unit(self, x: Tensors) -> bool:
        """Whether cotangents are multiplied by a unit, so that small float16 gradients do not become 0."""
        return x.weight.dtype == torch.float16 and self.cotangent is None

    def sums_dweight(self, x: Tensors) -> bool:
        """Whether dweight is summed in float32.

        Otherwise a single chunk rounds dweight at once, which float16 cannot do before the cotangent is known.
        """
        return len(self.chunks(len(x.labels))) != 1 or x.weight.dtype == torch.float16 or self.target is not None


def compute_results(plan: LossPlan, x: Tensors, keep: bool) -> tuple[dict[str, torch.Tensor], list[Any]]:
    """Returns the results by name, and the residuals for `_operators.run_backward`: saved values and the cache."""
    outputs = _operators.run_forward(x, plan.call, keep, plan.way, lend_cache=False)
    fields = plan.call.fields
    return dict(zip(fields, outputs, strict=False)), outputs[len(fields) :]


def apply_loss(plan: LossPlan, fields: dict[str, torch.Tensor], per_token: list[torch.Tensor]) -> torch.Tensor:
    """Returns the losses of some tokens, after checking that ``loss_fn`` returns one value per token."""
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


def sum_losses(
    plan: LossPlan, x: Tensors, per_token: list[torch.Tensor]
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Returns the sum of the losses and the results by name, if no operand requires a gradient.

    Autograd differentiates the sum with respect to the per-token arguments.
    """
    losses, fields = compute_losses(plan, x, per_token)
    return losses.sum(dtype=torch.float32), fields


def compute_losses(
    plan: LossPlan, x: Tensors, per_token: list[torch.Tensor]
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Returns the losses, and the results by name."""
    with torch.no_grad():
        fields, _ = compute_results(plan, x, keep=False)
    copies = {name: field.clone() for name, field in fields.items()}  # loss_fn may overwrite its arguments
    return apply_loss(plan, copies, per_token), fields


class LossDerivatives(NamedTuple):
    """The losses of a chunk, and their derivatives."""

    losses: torch.Tensor  # [t]
    cotangents: dict[str, torch.Tensor]  # by name, for the results that the losses depend on
    per_token: list[torch.Tensor | None]


def _differentiate(
    plan: LossPlan,
    fields: dict[str, torch.Tensor],
    per_token: list[torch.Tensor],
    requested_gradients: tuple[bool, ...],
) -> LossDerivatives:
    hooks = contextlib.nullcontext() if _device.top_hooks(False) is None else _device.disable_hooks()
    with hooks, torch.enable_grad():
        leaves = {name: fields[name].detach().requires_grad_() for name in plan.call.differentiable}
        arguments = [x.detach().requires_grad_(flag) for x, flag in zip(per_token, requested_gradients, strict=True)]
        losses = apply_loss(plan, fields | leaves, arguments)
        inputs = [*leaves.values(), *[x for x in arguments if x.requires_grad]]
        if not losses.requires_grad:
            return LossDerivatives(losses, {}, [None] * len(arguments))
        _refuse_closure(losses, inputs)
        grads = list(torch.autograd.grad(losses, inputs, torch.ones_like(losses), allow_unused=True))
    if plan.cotangent is not None:
        grads = [None if x is None else x * plan.cotangent for x in grads]
    cotangents = {name: grads.pop(0) for name in leaves}
    used = {name: x for name, x in cotangents.items() if x is not None}
    return LossDerivatives(losses.detach(), used, [grads.pop(0) if x.requires_grad else None for x in arguments])


def _refuse_closure(losses: torch.Tensor, inputs: list[torch.Tensor]) -> None:
    """Refuses a loss_fn that closes over a tensor that requires a gradient, because the gradient would be lost."""
    known = {id(x) for x in inputs}
    for leaf in _find_leaves(losses):
        if id(leaf) not in known:
            raise ValueError(
                f"loss_fn uses a tensor {tuple(leaf.shape)} that requires a gradient and is none of its arguments: "
                "give it as a per-token argument, or use its .detach(); for a parameter of the loss, apply loss_fn to "
                "the results of linear_logprobs, and sum"
            )


def _find_leaves(x: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yields the leaves of the autograd graph of ``x``."""
    if x.grad_fn is None:
        yield x
    seen, queue = set(), [x.grad_fn]
    while queue:
        node: Any = queue.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            yield node.variable
        queue.extend(next_node for next_node, _ in node.next_functions)


class LossAndGradients(torch.autograd.Function):
    """Computes ``(plan, hidden, weight, bias, labels, temperature, floor, *per_token) -> sum, *results``."""

    @staticmethod
    def forward(ctx: Any, plan: LossPlan, *inputs: Any) -> tuple[torch.Tensor, ...]:
        """Returns the sum and the results. Saves the gradients for the plan's cotangent, by default 1."""
        (hidden, weight, bias, labels, temperature, floor), per_token = inputs[:6], inputs[6:]
        x = Tensors(hidden, weight, bias, labels, temperature, None, floor)
        run = _run_first_forward if _device.will_be_recomputed() else _run_chunks
        losses, fields, grads, unit = run(plan, _cast_operands(x), per_token, ctx.needs_input_grad[1:])
        ctx.cotangent, ctx.way = plan.cotangent, plan.way
        ctx.main_grad = plan.main_grad  # not saved by autograd: other micro-batches may change it in place
        ctx.dtypes = [None if y is None else y.dtype for y in (*x[:3], *per_token)]
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*fields)
        ctx.save_for_backward(unit, *grads)
        return losses.sum(dtype=torch.float32), *fields

    @staticmethod
    @torch.compiler.disable(reason="it asks whether autograd keeps the graph")  # type: ignore[untyped-decorator]
    def backward(ctx: Any, cotangent: torch.Tensor | None, *_: Any) -> tuple[torch.Tensor | None, ...]:
        """Returns the gradients times the cotangent."""
        unit, *grads = ctx.saved_tensors
        if cotangent is None:
            return (None,) * (7 + len(grads) - 3)
        if _device.is_batched(cotangent):
            refuse_vmap()
        if torch.is_grad_enabled():  # create_graph=True, but the saved gradients are not connected to the operands
            refuse_second_derivative(ctx)
        if ctx.main_grad is None:
            _weight.refuse_partitioned(ctx, 1)
        # One dimension, because a product with bfloat16 would round a float32 tensor without dimensions.
        actual = _device.check_readable("the cotangent", cotangent).reshape(1)
        known, added = ctx.cotangent, ctx.main_grad is not None
        factor = actual if known is None else _compare_cotangents(known, actual, added)
        operand_factor = factor if unit is None else actual / unit
        factors = [*[operand_factor] * 3, *[factor] * (len(grads) - 3)]
        with _device.lock_backward(ctx):
            if ctx.main_grad is not None:
                if known is None and _weight.is_requested(ctx, 1):
                    ctx.main_grad.addcmul_(grads[1], operand_factor)
                grads[1] = None
            scaled = [_scale(*each, ctx.way) for each in zip(grads, factors, ctx.dtypes, strict=True)]
            ctx.is_spent = not _device.graph_is_kept()
        if ctx.main_grad is not None:
            scaled[1] = _weight.empty_sparse_like(ctx.main_grad, ctx.dtypes[1])
        return None, *scaled[:3], None, None, None, *scaled[3:]

    @staticmethod
    def jvp(*_: Any) -> Any:
        """Refuses forward-mode derivatives."""
        Uncompiled.jvp()


def _scale(grad: torch.Tensor | None, factor: torch.Tensor | None, dtype: torch.dtype, way: Way) -> torch.Tensor | None:
    """Returns ``factor · grad`` rounded to ``dtype``, or ``grad`` in ``dtype`` if ``factor`` is None.

    The result overwrites ``grad``, unless the graph is kept.
    """
    if grad is None:
        return None
    is_kept = _device.graph_is_kept()
    if factor is None:
        return grad.to(dtype, copy=is_kept)
    in_place = grad.dtype == dtype and not is_kept
    if way.direct and grad.numel() >= LARGE:  # torch takes twice as long if dtypes differ, and time for 1
        product = scale(grad, factor, dtype, in_place)
        if product is not None:
            return product
    return torch.mul(grad, factor, out=grad if in_place else grad.new_empty(grad.shape, dtype=dtype))


def _compare_cotangents(known: float, cotangent: torch.Tensor, added: bool) -> torch.Tensor | None:
    """Returns the actual cotangent divided by ``known``, for which gradients were computed; None if they are equal.

    Raises:
        ValueError: the cotangents differ by more than the rounding of a few products.
    """
    actual, rounded = cotangent.item(), cotangent.new_tensor(known)  # the host waits for the cotangent
    if actual == rounded.item():
        return None
    if abs(actual - known) <= CLOSE * abs(known):
        return cotangent / rounded
    advice = f"weight.main_grad holds the gradient for {known!r} already: zero it, and " if added else ""
    raise ValueError(
        f"linear_loss(cotangent={known!r}) was differentiated with a cotangent of {actual!r}, which its gradients were "
        f"not computed for: {advice}give the number that the sum is multiplied by, or leave cotangent out"
    )


def _cast_operands(x: Tensors) -> Tensors:
    """Casts operands to float32 if their gradients must not be rounded before the cotangent is known.

    Float16 hidden states are cast because float16 has no small values and the loss scale is part of the cotangent. The
    bias is cast because its gradient is a sum over the chunks.
    """
    hidden = x.hidden.float() if x.hidden.dtype == torch.float16 else x.hidden
    bias = None if x.bias is None else x.bias.float()
    return x._replace(hidden=hidden.contiguous(), weight=x.weight.contiguous(), bias=bias)


def _run_chunks(
    plan: LossPlan, x: Tensors, per_token: tuple[torch.Tensor, ...], requested_gradients: tuple[bool, ...]
) -> tuple[torch.Tensor, list[torch.Tensor], list[torch.Tensor | None], torch.Tensor | None]:
    """Returns the losses ``[T]``, the results ``[T]``, the gradients, and the unit.

    The gradients are those of hidden, weight, bias and the per-token arguments. The backward divides the first three by
    the unit; None stands for 1.
    """
    tokens, names = len(x.labels), plan.call.fields
    sums = ChunkSums(plan, x, requested_gradients[:3])
    token_grads = [
        torch.zeros_like(y) if flag else None for y, flag in zip(per_token, requested_gradients[6:], strict=True)
    ]
    losses = x.hidden.new_empty(tokens, dtype=torch.float32)
    fields = [torch.empty_like(losses) for _ in names]
    with _note_added_gradients(sums, tokens):
        for rows in plan.chunks(tokens):
            temperature, floor = [None if y is None else y[rows] for y in (x.temperature, x.floor)]
            chunk = x._replace(hidden=x.hidden[rows], labels=x.labels[rows], temperature=temperature, floor=floor)
            results, residuals = compute_results(plan, chunk, keep=True)
            for field, name in zip(fields, names, strict=True):
                field[rows] = results[name]  # loss_fn, which runs later, may overwrite its arguments
            derivatives = _differentiate(plan, results, [y[rows] for y in per_token], requested_gradients[6:])
            losses[rows] = derivatives.losses
            for token_grad, chunk_grad in zip(token_grads, derivatives.per_token, strict=True):
                if token_grad is not None and chunk_grad is not None:
                    token_grad[rows] = chunk_grad
            sums.add(rows, chunk, residuals, derivatives.cotangents, plan.call, plan.way)
            del residuals, results  # before the next chunk's exponentials are cached
    grads = [*sums.finish(x.weight), *token_grads]  # `finish` sets the unit if no chunk has
    return losses, fields, grads, sums.unit


def _run_first_forward(
    plan: LossPlan, x: Tensors, per_token: tuple[torch.Tensor, ...], requested_gradients: tuple[bool, ...]
) -> tuple[torch.Tensor, list[torch.Tensor], list[torch.Tensor | None], torch.Tensor | None]:
    """Returns the same as `_run_chunks`, but without gradients, for the first forward of an activation checkpoint.

    A checkpoint compares only the shapes and dtypes of saved tensors, so gradients and unit are tensors without memory.
    """
    losses, fields = compute_losses(plan._replace(call=make_call(plan.call.text, cache_bytes=0)), x, list(per_token))
    weight = x.weight[:0].float() if plan.sums_dweight(x) else x.weight
    makers = x.hidden, None if plan.target is not None else weight, x.bias, *per_token
    shapes = [None if y is None else y.shape for y in (*x[:3], *per_token)]
    grads = [
        y.new_empty(()).expand(shape) if flag and y is not None and shape is not None else None
        for y, shape, flag in zip(makers, shapes, (*requested_gradients[:3], *requested_gradients[6:]), strict=True)
    ]
    return losses, list(fields.values()), grads, losses.new_empty(1) if plan.has_unit(x) else None


@contextlib.contextmanager
def _note_added_gradients(sums: ChunkSums, tokens: int) -> Iterator[None]:
    """Adds a note to errors that says for how many tokens ``main_grad`` already contains gradients."""
    try:
        yield
    except BaseException as error:
        if sums.are_in_main_grad:
            error.add_note(
                f"weight.main_grad holds the gradients of the first {sums.tokens} of {tokens} tokens: zero it, or "
                "restore what it held"
            )
        raise


def choose_unit(cotangents: dict[str, torch.Tensor], x: Tensors, call: TorchCall) -> torch.Tensor:
    """Returns the unit, an array ``[1]`` with a power of two, by which the cotangents are multiplied.

    The unit follows from a bound on the dlogits.

    A dlogit is at most ``|logit_scale| / temperature`` times the sum of the cotangents' absolute values. The cotangent
    of the entropy counts ln V + 1 times, because it is multiplied by p (ln p + entropy), which is at most ln V + 1/e.
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
    """Collects the gradients of all chunks: dhidden row by row, dweight and dbias as sums."""

    def __init__(self, plan: LossPlan, x: Tensors, requested_gradients: tuple[bool, ...]) -> None:
        hidden, weight, bias, *_ = x
        self._requested_gradients = requested_gradients
        self._hidden = torch.zeros_like(hidden) if requested_gradients[0] else None
        self._total = DweightSum(weight, plan.target) if requested_gradients[1] and plan.sums_dweight(x) else None
        self._returns_dweight = plan.target is None
        self._weight: torch.Tensor | None = None
        self._bias = torch.zeros_like(bias) if requested_gradients[2] and bias is not None else None
        self.tokens = 0  # the number of tokens whose gradients have been added
        self._has_unit = plan.has_unit(x)
        self.unit: torch.Tensor | None = None  # the backward divides all gradients by it; None: 1

    @property
    def are_in_main_grad(self) -> bool:
        """Whether gradients have been added to ``main_grad``."""
        return self._total is not None and self._total.is_in_target

    def add(
        self,
        rows: slice,
        chunk: Tensors,
        residuals: list[Any],
        cotangents: dict[str, torch.Tensor],
        call: TorchCall,
        way: Way,
    ) -> None:
        """Adds the gradients of the tokens in ``rows``."""
        if not cotangents or not any(self._requested_gradients):
            return
        if self._has_unit:
            unit = self._update_unit(choose_unit(cotangents, chunk, call))
            cotangents = {name: cotangent * unit for name, cotangent in cotangents.items()}
        sums = Sums(self._total, owns_cache=True)
        grads = _operators.run_backward(chunk, residuals, cotangents, self._requested_gradients, call, way, sums)
        if self._hidden is not None:
            self._hidden[rows] = grads.pop(0)
        if self._requested_gradients[1] and self._total is None:
            self._weight = grads.pop(0)
        if self._bias is not None:
            self._bias += grads.pop(0)
        self.tokens = rows.stop

    def _update_unit(self, unit: torch.Tensor) -> torch.Tensor:
        """Returns the smaller of ``unit`` and the current unit, and rescales all sums to it."""
        if self.unit is not None:
            unit = torch.minimum(unit, self.unit)
            change = unit / self.unit
            for grad in (self._hidden, self._total, self._bias):
                if grad is not None:
                    grad.mul_(change)
        self.unit = unit
        return unit

    def finish(self, weight: torch.Tensor) -> list[torch.Tensor | None]:
        """Returns the gradients of hidden, weight and bias."""
        if self._has_unit and self.unit is None:
            self.unit = weight.new_ones(1, dtype=torch.float32)
        if self._requested_gradients[1] and self._weight is None:
            self._weight = torch.zeros_like(weight) if self._total is None else self._total.finish()
        return [self._hidden, self._weight if self._returns_dweight else None, self._bias]
