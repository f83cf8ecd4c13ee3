"""Launches `linear_kl` and its gradients on torch's current stream, and says why some calls cannot be launched.

A tape is the recorded steps of a pass. ``linear_kl`` saves ``[S, T]`` numbers: the temperatures of the call, and the
merged statistics of both heads.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import torch

from lce_jax.run import kernels, kl_kernels
from lce_jax.run.kl_kernels import Heads, LaunchedKL, Pair
from lce_torch_bridge._types import Sums, Tensors, TorchCall
from lce_torch_bridge.launched_directly import _passes
from lce_torch_bridge.launched_directly._launch_with import Way
from lce_torch_bridge.launched_directly._launches import Buffer, Launches, Tape, find_plan
from lce_torch_bridge.tensors import _device, _tensor_parallel
from lce_torch_bridge.tensors._device import name_dtype
from lce_torch_bridge.tensors._weight import empty_sparse_like

OPERANDS = "hidden", "weight", "teacher_hidden", "teacher_weight"


def _refuse_launch(x: Tensors, call: TorchCall, launched: LaunchedKL) -> str | None:
    """Returns why no kernels serve such calls; None if kernels do."""
    reason = _device.launch_refusal(x.hidden.device)
    if reason is not None:
        return reason
    for name in "bias", "teacher_bias":
        if getattr(x, name) is not None:
            return f"{name}: no kernel that is launched directly computes it"
    if call.jax.requested and call.jax.requested[0] != "mosaic_gpu":
        return f"implementation={','.join(call.jax.requested)!r}"
    return kl_kernels.refusal(launched)


def describe_launch(x: Tensors, call: TorchCall) -> LaunchedKL:
    """Returns the call with the shapes of its operands, as `lce_jax.run.kl_kernels` takes it."""

    def describe(prefix: str, of_head: kernels.Call, has_temperature: bool) -> kernels.LaunchedCall:
        hidden, weight = getattr(x, f"{prefix}hidden"), getattr(x, f"{prefix}weight")
        launched = _passes.describe_launch(hidden, weight, call, has_temperature)
        options = {"logit_scale": of_head.logit_scale, "logit_softcap": of_head.logit_softcap}
        return dataclasses.replace(launched, call=launched.call.replace(teacher=None, **options))

    student, teacher = call.jax.heads
    heads = describe("", student, call.has_temperature), describe("teacher_", teacher, call.has_teacher_temperature)
    return LaunchedKL(heads=Pair(*heads), beta=call.beta)


def forward(x: Tensors, call: TorchCall, keep_cache: bool, way: Way) -> list[torch.Tensor] | None:
    """Returns what `operators._operators.run_forward` returns; None if JAX must run the call."""
    device, tokens = x.hidden.get_device(), x.hidden.shape[0]
    if device != _device.current_device():
        with torch.cuda.device(device):
            return forward(x, call, keep_cache, way)
    plan = _find_plan(x, call, lambda launched: forward_tape(launched, keep_cache, call.group), "kl", keep_cache)
    if isinstance(plan, str):
        way.refuse(plan)
        return None
    temperatures = [_passes.pad_tokens(y) for y in (x.temperature, x.teacher_temperature) if y is not None]
    divergence, saved, *cache = plan.run(device, [*_usable_operands(x), *temperatures])
    if tokens < kernels.THREADS:  # copies: a caller must be able to write to the results in place
        divergence, saved = divergence[:tokens].clone(), saved[:, :tokens].clone(memory_format=torch.contiguous_format)
    return [divergence, saved, *cache]


def gradients(
    x: Tensors,
    residuals: Sequence[torch.Tensor],
    cotangent: torch.Tensor,
    requested: tuple[bool, ...],
    call: TorchCall,
    sums: Sums,
    way: Way,
) -> list[torch.Tensor] | None:
    """Returns what `operators._operators.run_backward` returns without biases; None if JAX must run the call."""
    saved, *cache = residuals
    device, owns_cache, adds = x.hidden.get_device(), sums.owns_cache and bool(cache), sums.main_grad is not None
    if device != _device.current_device():
        with torch.cuda.device(device):
            return gradients(x, residuals, cotangent, requested, call, sums, way)
    dtype = torch.float32 if call.reduce_grad_hidden else x.hidden.dtype
    structs, options = tuple(map(_device.describe_tensor, cache)), (requested, dtype, adds, owns_cache)
    plan = _find_plan(
        x, call, lambda launched: gradients_tape(launched, structs, *options), "gradients of kl", *options,
        *(y.shape for y in cache),
    )  # fmt: skip
    if isinstance(plan, str):
        way.refuse(plan)
        return None
    target = [] if sums.main_grad is None else [sums.main_grad]
    if target or owns_cache:  # autograd notices a change in place by the version
        torch.autograd.graph.increment_version([*target, *cache] if owns_cache else target)
    operands = [*_usable_operands(x), _passes.pad_tokens(saved, 1), _passes.pad_tokens(cotangent)]
    grads = plan.run(device, [*operands, *target, *map(_device.make_usable, cache)])
    if requested[0] and call.reduce_grad_hidden:
        grads[0] = _tensor_parallel.sum_dhidden(grads[0], x.hidden.dtype, call.group)
    if sums.main_grad is not None:
        grads[-1] = empty_sparse_like(sums.main_grad, x.weight.dtype)
    return grads


def _usable_operands(x: Tensors) -> list[torch.Tensor]:
    return [_device.make_usable(getattr(x, name)) for name in OPERANDS]


def _find_plan(
    x: Tensors, call: TorchCall, make_tape: Callable[[LaunchedKL], Tape], *options: object
) -> Launches | str:
    """Returns the launches of such calls; or, as text, why kernels do not serve them."""

    def make() -> Launches | str:
        launched = describe_launch(x, call)
        return _refuse_launch(x, call, launched) or Launches(make_tape(launched), launched.heads.student.call.device)

    operands = [y for y in (*(getattr(x, name) for name in OPERANDS), x.bias, x.teacher_bias) if y is not None]
    ranks = call.group and _tensor_parallel.size_and_rank(call.group)
    shapes = ((y.shape, y.dtype) for y in operands)
    return find_plan((*options, x.hidden.get_device(), call, ranks, *shapes), make)


def forward_tape(launched: LaunchedKL, keep_cache: bool, group: str = "") -> Tape:
    """Returns the tape of a forward: ``hidden, weight, their teacher's, temperatures -> divergence, saved, cache``."""
    tape, student = Tape(), launched.heads.student
    heads = _add_operands(tape, launched)
    temperatures = tuple(tape.input((student.rows,), jnp.float32) for _ in range(launched.rows.num_temperatures))
    exchange = functools.partial(_exchange, tape, launched, temperatures, group) if group else None
    out = kl_kernels.forward(launched, tape, heads, temperatures, keep_cache, exchange)
    tape.output(out.divergence, (student.stride,), torch.float32)
    tape.output(out.saved, (launched.rows.num_saved, student.stride), torch.int32)
    tape.outputs += out.cached
    return tape


def _add_operands(tape: Tape, launched: LaunchedKL) -> Heads:
    """Adds the inputs hidden and weight of both heads."""
    each = [_passes.add_operands(tape, head) for head in launched.heads]
    return Heads(*(Pair(*x) for x in zip(*each, strict=True)))


def _exchange(
    tape: Tape, launched: LaunchedKL, temperatures: Sequence[Buffer], group: str, sent: Buffer, saved: Buffer | None
) -> Buffer:
    """Gathers the statistics that the ranks send, a stack of tile groups from each rank.

    If the call has ``saved``, the last field of the first tile group has each token's tag, a hash of what must be equal
    on all ranks.
    """
    calls = [head.call for head in launched.heads]
    options = [(x.num_tokens, x.columns, x.vocab_size, x.logit_scale, x.logit_softcap, x.direction) for x in calls]
    checksum, count = _tensor_parallel.compute_checksum(*options, launched.beta), calls[0].num_tokens

    def put_tags(sent: torch.Tensor, *temperatures: torch.Tensor) -> list[torch.Tensor]:
        """Writes the tags to the last field of the first group."""
        tags = sent[0, -1, :count].view(torch.int32).fill_(checksum)
        for y in temperatures:
            tags.mul_(_passes.ODD).add_(y[:count].view(torch.int32))
        return [sent]

    if saved is not None:
        tape.call(put_tags, [sent, *temperatures], sent)
    return _passes.add_gather(tape, sent, group)


def gradients_tape(
    launched: LaunchedKL,
    cached: Sequence[Any],
    requested: Sequence[bool],
    dtype: torch.dtype,
    adds: bool = False,
    owns_cache: bool = False,
) -> Tape:
    """Returns the tape of a backward: ``hidden, weight, their teacher's, saved, cotangent, sum, cache -> gradients``.

    The gradients are the requested ones of dhidden, which is rounded to ``dtype``, and dweight. With ``adds`` dweight
    is added to the float32 sum; else there is no sum, and dweight has the weight's dtype.
    """
    tape, student = Tape(), launched.heads.student
    heads = _add_operands(tape, launched)
    saved = tape.input((launched.rows.num_saved * student.rows,), jnp.float32)
    seed = tape.input((student.rows,), jnp.float32)
    total = tape.input(heads.weight.student.shape, jnp.float32) if adds else None
    cache = [tape.input(x.shape, x.dtype) for x in cached]
    dhidden, dweight = kl_kernels.backward(
        launched, tape, heads, saved, seed, cache, name_dtype(dtype), owns_cache=owns_cache, total=total
    )
    if requested[0]:
        tape.output(dhidden, (student.call.num_tokens, student.call.hidden_size), dtype)
    if requested[1]:
        tape.outputs.append(dweight)
    return tape
