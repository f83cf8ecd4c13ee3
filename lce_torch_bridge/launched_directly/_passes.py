"""Launches the forward and the backward of a call on torch's current stream, or says why that is impossible.

`operators._operators` calls `forward` and `gradients`. A tape is the recorded steps of a pass. Everything that depends
only on shapes and options is in a plan, which is made once (`_launches.find_plan`). This module brings the caller's
tensors into the layout that kernels read, and runs the collectives of a split vocabulary.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import torch

from lce_jax.run import kernels
from lce_torch_bridge._types import PER_CANDIDATE, Sums, Tensors, TorchCall
from lce_torch_bridge.launched_directly import _first_call
from lce_torch_bridge.launched_directly._launch_with import Way
from lce_torch_bridge.launched_directly._launches import Buffer, Launches, Tape, find_plan
from lce_torch_bridge.tensors import _device, _padding, _tensor_parallel
from lce_torch_bridge.tensors._device import name_dtype
from lce_torch_bridge.tensors._weight import empty_sparse_like

ODD = 0x01000193  # odd, so that a product modulo 2³² loses no information


def refusal(x: Tensors, call: TorchCall) -> str | None:
    """Returns why a call cannot be launched directly; None if it can."""
    reason = _device.launch_refusal(x.hidden.device)
    if reason is not None:
        return reason
    options = {"bias": x.bias is not None and not call.jax.rank, "mean_logit": call.jax.mean_logit}
    for name, is_used in options.items():
        if is_used:
            return f"{name}: no kernel that is launched directly computes it"
    if call.jax.requested and call.jax.requested[0] != "mosaic_gpu":
        return f"implementation={','.join(call.jax.requested)!r}"
    launched = describe_launch(x.hidden, x.weight, call, x.temperature is not None)
    device, reason = launched.call.device, kernels.refusal(launched)
    is_known = reason is not None or kernels.unchecked(device) is None
    return reason if is_known else _check_first_call(device, x.hidden.device)


def launches_kernels(way: Way, device: torch.device) -> bool:
    """Whether kernels are launched directly on ``device``. A card that has never run them checks them first.

    The answer may differ between the ranks of a group.
    """
    described = _device.describe_device(device) if way.direct and _device.launch_refusal(device) is None else None
    return described is not None and _check_first_call(described, device) is None


def _check_first_call(described: kernels.Device, device: torch.device) -> str | None:
    """Returns what is wrong with the kernels' results on a card; None if nothing is."""
    compare = functools.partial(_first_call.compare, device, _launch_first_call)
    return kernels.check_once(described, compare, compared_by="PyTorch")


def _launch_first_call(x: Tensors, call: TorchCall, seeds: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Returns the tensors that `_first_call.compare` compares. Few blocks run, so that each visits several tiles."""
    device, names = x.hidden.get_device(), call.differentiable
    if device != _device.current_device():
        with torch.cuda.device(device):
            return _launch_first_call(x, call, seeds)
    launched = describe_launch(x.hidden, x.weight, call, False)
    card = launched.call.device
    few_blocks = launched.call.replace(device=card._replace(core_count=_first_call.BLOCKS))
    launched = dataclasses.replace(launched, call=few_blocks)
    operands = [_device.make_usable(x.hidden), _device.make_usable(x.weight)]
    outputs = Launches(forward_tape(launched, True, names), few_blocks.device).run(
        device, [*operands, pad_tokens(x.labels)]
    )
    results, saved, cached = outputs[: len(names)], outputs[len(names)], outputs[len(names) + 1 :]
    operands += [pad_tokens(saved, 1), *map(pad_tokens, seeds)]
    make_tape, total = functools.partial(gradients_tape, launched, names, dtype=x.hidden.dtype), x.weight.float()
    adding = make_tape(requested_gradients=(False, True), adds=True)  # without the cache, which takes fewer kernels
    Launches(adding, few_blocks.device).run(device, [*operands, total])
    described = [*map(_device.describe_tensor, cached)]
    overwriting = make_tape(requested_gradients=(True, True), cached=described, owns_cache=True)
    gradients = Launches(overwriting, few_blocks.device).run(device, [*operands, *map(_device.make_usable, cached)])
    return [*results, *gradients, total - x.weight.float()]


def describe_launch(
    hidden: torch.Tensor, weight: torch.Tensor, call: TorchCall, has_temperature: bool
) -> kernels.LaunchedCall:
    """Returns the call with the shapes of its operands, as `lce_jax.run.kernels` takes it."""
    (tokens, columns), (_, rank) = (hidden.shape[0], weight.shape[0]), _tensor_parallel.size_and_rank(call.group)
    shaped = call.jax.replace(
        num_tokens=int(tokens),
        hidden_size=int(weight.shape[1]),
        columns=int(columns),
        dtype=jnp.dtype(name_dtype(weight.dtype)),
        caller_dtype=jnp.dtype(name_dtype(hidden.dtype)),
        device=_device.describe_device(hidden.device),
    )
    return kernels.LaunchedCall(
        call=shaped,
        rows=_padding.size(int(tokens)),
        start=rank * int(columns),
        has_temperature=has_temperature,
        megatron=call.megatron,
    )


def forward(x: Tensors, call: TorchCall, keep_cache: bool, way: Way) -> list[torch.Tensor] | None:
    """Returns what `operators._operators.run_forward` returns; None if JAX must run the call."""
    hidden, weight, device = x.hidden, x.weight, x.hidden.get_device()
    if device != _device.current_device():
        with torch.cuda.device(device):
            return forward(x, call, keep_cache, way)
    ranks = call.group and _tensor_parallel.size_and_rank(call.group)
    options = call, ranks, keep_cache, x.bias is None, x.temperature is None, x.candidates is None
    key = "forward", device, hidden.shape, hidden.dtype, weight.shape, weight.dtype, *options
    plan = find_plan(
        key,
        lambda: _make_plan(
            x,
            call,
            x.temperature is not None,
            lambda launched: forward_tape(launched, keep_cache, call.fields, call.group),
        ),
    )
    if isinstance(plan, str):
        way.refuse(plan)
        return None
    labels = pad_tokens(x.labels if x.labels.dtype is torch.int64 else x.labels.long())
    ids = None if x.candidates is None else _padding.candidate_ids(x.candidates, call.jax.vocab_size)
    per_token = [pad_tokens(y) for y in (x.temperature, x.floor, ids) if y is not None]
    operands = [_device.make_usable(hidden), _device.make_usable(weight)]
    if x.bias is not None:  # the B of an adapter
        operands.append(_device.make_usable(x.bias.to(weight.dtype)))
    outputs = plan.run(device, [*operands, labels, *per_token])
    tokens, count = hidden.shape[0], len(call.fields)
    if tokens < kernels.THREADS:  # copies, because a caller may write to the results in place
        saved = outputs[count][:, :tokens].clone(memory_format=torch.contiguous_format)
        outputs[: count + 1] = [*[y[:tokens].clone() for y in outputs[:count]], saved]
    return outputs


def _make_plan(
    x: Tensors, call: TorchCall, has_temperature: bool, make_tape: Callable[[kernels.LaunchedCall], Tape | str]
) -> Launches | str:
    """Returns the launches of ``make_tape(launched)``; or, as text, why the call cannot be launched directly."""
    reason = refusal(x, call)
    if reason is not None:
        return reason
    launched = describe_launch(x.hidden, x.weight, call, has_temperature)
    tape = make_tape(launched)
    return tape if isinstance(tape, str) else Launches(tape, launched.call.device)


def forward_tape(launched: kernels.LaunchedCall, keep_cache: bool, fields: Sequence[str], group: str = "") -> Tape:
    """Returns the tape of a forward: ``hidden, weight, B, labels, temperature, floor, ids -> fields, saved, cache``.

    Inputs that were not passed are left out.
    """
    tape, rows, call = Tape(), launched.rows, launched.call
    hidden, weight, *adapter = add_operands(tape, launched)
    labels = tape.input((rows, 2), jnp.int32)  # the halves of int64 labels
    temperature = tape.input((rows,), jnp.float32) if launched.has_temperature else None
    floor = tape.input((rows,), jnp.float32) if call.has_floor else None
    ids = tape.input((rows, call.num_candidates), jnp.int32) if call.num_candidates else None
    tokens = kernels.Tokens(labels, temperature, floor, ids)
    exchange = functools.partial(_exchange_statistics, tape, call, tokens, group) if group else None
    outputs = kernels.forward(launched, tape, hidden, weight, tokens, keep_cache, exchange, *adapter)
    for name in fields:
        candidates = (call.num_candidates,) if name == PER_CANDIDATE else ()
        tape.output(outputs.results[name], (launched.stride, *candidates), torch.float32)
    tape.output(outputs.saved, (launched.saved_layout.size, launched.stride), torch.int32)
    tape.outputs += outputs.cached
    return tape


def add_operands(tape: Tape, launched: kernels.LaunchedCall) -> tuple[Buffer, ...]:
    """Adds the inputs hidden, weight and, with an adapter, its B."""
    call = launched.call
    hidden = tape.input((launched.rows, call.hidden_size + call.rank), call.hidden_dtype)
    widths = [call.hidden_size, call.rank] if call.rank else [call.hidden_size]
    return hidden, *(tape.input((call.columns, width), call.dtype) for width in widths)


def _exchange_statistics(
    tape: Tape, call: kernels.Call, tokens: kernels.Tokens, group: str, sent: Buffer, x: Buffer | None, saved: Buffer
) -> tuple[Buffer, Buffer | None]:
    """Returns the statistics of all ranks, and for candidates the largest x over the ranks.

    With its statistics, each rank sends a tag per token: a hash of everything that must be equal on all ranks.
    """
    count = call.num_tokens
    options = count, call.columns, call.vocab_size, call.logit_scale, call.logit_softcap
    checksum = _tensor_parallel.compute_checksum(*options)

    def put_tags(sent: torch.Tensor, saved: torch.Tensor, *per_token: torch.Tensor) -> list[torch.Tensor]:
        """Writes the tags to the last field of the first tile group."""
        tags = sent[0, -1, :count].view(torch.int32)
        torch.add(saved[0, :count], checksum, out=tags)
        for y in per_token:
            bits = y[:count].view(torch.int32)
            torch.add(tags, bits if y.ndim == 1 else bits.sum(1, dtype=torch.int32), alpha=ODD, out=tags)
        return [sent]

    def take_largest(x: torch.Tensor) -> list[torch.Tensor]:
        return [_tensor_parallel.gather(x, group).amax(0)]

    tape.call(put_tags, [sent, saved, *[y for y in tokens[1:] if y is not None]], sent)
    return add_gather(tape, sent, group), None if x is None else tape.call(
        take_largest, [x], tape.empty(x.shape, x.dtype)
    )[0]


def add_gather(tape: Tape, x: Buffer, group: str) -> Buffer:
    """Adds a step that gathers the arrays of all ranks, and returns them concatenated."""
    ranks, _ = _tensor_parallel.size_and_rank(group)
    all_ranks = tape.empty((ranks * x.shape[0], *x.shape[1:]), x.dtype)
    return tape.call(lambda x: [_tensor_parallel.gather(x, group).flatten(0, 1)], [x], all_ranks)[0]


def gradients(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    saved: torch.Tensor,
    cache: Sequence[torch.Tensor],
    cotangents: dict[str, torch.Tensor],
    requested_gradients: tuple[bool, ...],
    call: TorchCall,
    sums: Sums,
    way: Way,
    b: torch.Tensor | None = None,
) -> list[torch.Tensor] | None:
    """Returns what `operators._operators.run_backward` returns without a bias; None if JAX must run the backward.

    ``b`` is the B of an adapter.
    """
    adds = sums.main_grad if sums.total is None else sums.total
    device, owns_cache = hidden.get_device(), sums.owns_cache and bool(cache) and not call.jax.gradient_threshold
    if sums.total is not None and not sums.total.is_in_torch:
        way.refuse("JAX has added to the sum of dweight")
        return None
    if device != _device.current_device():
        with torch.cuda.device(device):
            return gradients(hidden, weight, saved, cache, cotangents, requested_gradients, call, sums, way, b)
    ranks = call.group and _tensor_parallel.size_and_rank(call.group)
    shapes = hidden.shape, hidden.dtype, weight.shape, weight.dtype, saved.shape, len(cache), ranks
    writes = sums.total is not None and not sums.total.is_begun and not call.jax.gradient_threshold
    options = call, tuple(cotangents), requested_gradients, None if adds is None else not writes, owns_cache
    key = "gradients", device, *shapes, *options, call.jax.gradient_threshold and are_active_tiles(cache)
    plan = find_plan(key, lambda: _plan_gradients(hidden, weight, saved, cache, *options))
    if isinstance(plan, str):
        way.refuse(plan)
        return None
    target: Any = [] if adds is None else [sums.main_grad if sums.total is None else sums.total.tensor(writes)]
    if target or owns_cache:  # so that autograd notices the change in place
        torch.autograd.graph.increment_version([*target, *cache] if owns_cache else target)
    seeds = [pad_tokens(x) for x in cotangents.values()]
    operands = [_device.make_usable(hidden), _device.make_usable(weight)]
    operands += [] if b is None else [_device.make_usable(b.to(weight.dtype))]
    grads = plan.run(device, [*operands, pad_tokens(saved, 1), *seeds, *target, *map(_device.make_usable, cache)])
    if b is not None:
        grads = _join_adapter_gradients(grads, requested_gradients, b.dtype)
    if requested_gradients[0] and call.reduce_grad_hidden:
        grads[0] = _tensor_parallel.sum_dhidden(grads[0], hidden.dtype, call.group)
    if adds is not None and requested_gradients[1]:
        grads.pop()
    return grads if sums.main_grad is None else [*grads, empty_sparse_like(sums.main_grad, weight.dtype)]


def _join_adapter_gradients(
    grads: list[torch.Tensor], requested_gradients: tuple[bool, ...], dtype: torch.dtype
) -> list[torch.Tensor]:
    """Returns the requested gradients: dhidden and du as one tensor, and the gradient of B."""
    joined = [torch.cat([grads[0], grads[1].to(grads[0].dtype)], 1)] if requested_gradients[0] else []
    return [*joined, grads[-1].to(dtype)] if requested_gradients[2] else joined


def _plan_gradients(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    saved: torch.Tensor,
    cache: Sequence[torch.Tensor],
    call: TorchCall,
    seeds: tuple[str, ...],
    requested_gradients: tuple[bool, ...],
    adds: bool | None,
    owns_cache: bool,
) -> Launches | str:
    """Returns the launches of a backward; or, as text, why it cannot be launched directly."""
    num_fields = 3 + call.jax.entropy + call.jax.has_floor + 2 * call.jax.num_candidates  # not counting a temperature
    dtype = torch.float32 if call.reduce_grad_hidden else hidden.dtype
    cached = [_device.describe_tensor(x) for x in cache]
    by_jax = call.jax.gradient_threshold and not are_active_tiles(cache)
    return _make_plan(
        Tensors(hidden, weight, None, saved[0]),
        call,
        len(saved) > 1 + num_fields,
        lambda launched: (
            "gradient_threshold: JAX ran the forward, and saved other numbers than kernels do"
            if by_jax
            else gradients_tape(launched, seeds, requested_gradients, dtype, cached, adds, owns_cache)
        ),
    )


def gradients_tape(
    launched: kernels.LaunchedCall,
    seeds: Sequence[str],
    requested_gradients: Sequence[bool],
    dtype: torch.dtype,
    cached: Sequence[jax.ShapeDtypeStruct | Buffer] = (),
    adds: bool | None = None,
    owns_cache: bool = False,
) -> Tape:
    """Returns the tape of a backward: ``hidden, weight, B, saved, cotangents, sum, cache -> dhidden, du, dweight, dB``.

    Only requested gradients are outputs. dhidden is rounded to ``dtype``. du and dB, the gradients of an adapter, are
    float32. If ``adds`` is True, dweight is added to the float32 sum; if False, dweight overwrites the sum; if None,
    there is no sum, and dweight has the weight's dtype.
    """
    tape, rows, candidates = Tape(), launched.rows, launched.call.num_candidates
    hidden, weight, *adapter = add_operands(tape, launched)
    saved = tape.input((launched.saved_layout.size * rows,), jnp.float32)
    shapes = {name: (rows, candidates) if name == PER_CANDIDATE else (rows,) for name in seeds}
    cotangents = {name: tape.input(shape, jnp.float32) for name, shape in shapes.items()}
    total = tape.input(weight.shape, jnp.float32) if adds is not None else None
    cache = [tape.input(x.shape, x.dtype) for x in cached]
    dhidden, dweight, *adapter_gradients = kernels.backward(
        launched, tape, hidden, weight, saved, cotangents, cache, name_dtype(dtype), *adapter,
        owns_cache=owns_cache, total=total, adds_total=adds is True,
    )  # fmt: skip
    if requested_gradients[0]:
        tape.output(dhidden, (launched.call.num_tokens, launched.call.hidden_size), dtype)
        tape.outputs += adapter_gradients[:1]
    if requested_gradients[1]:
        tape.outputs.append(dweight)
    if adapter_gradients and requested_gradients[2]:
        tape.outputs.append(adapter_gradients[1])
    return tape


def scale(x: torch.Tensor, factor: torch.Tensor, dtype: torch.dtype, in_place: bool = False) -> torch.Tensor | None:
    """Returns ``factor [1] · x``, computed in float32 and rounded once to ``dtype``; None if no kernel can compute it.

    Use it for large tensors: torch's own kernel takes twice as long when dtypes are mixed. With ``in_place``, ``x``
    must have ``dtype``; a factor of 1 then takes no time.
    """
    device = x.get_device()
    if device != _device.current_device():
        with torch.cuda.device(device):
            return scale(x, factor, dtype, in_place)
    plan = None
    if _device.is_usable(x):
        key = "scale", device, x.shape, x.dtype, dtype, in_place
        plan = find_plan(key, lambda: _plan_scale(x, dtype, in_place))
    if plan is None or isinstance(plan, str):
        return None
    if in_place:
        torch.autograd.graph.increment_version(x)
    return plan.run(device, [x, _device.make_usable(factor)])[0]


def _plan_scale(x: torch.Tensor, dtype: torch.dtype, in_place: bool) -> Launches | str:
    device, reason = _device.describe_device(x.device), _device.launch_refusal(x.device)
    if device is None or reason is not None:
        return str(reason)
    refusal = kernels.refusal_to_scale(x.numel(), device)
    return refusal or Launches(scale_tape(x.shape, name_dtype(x.dtype), dtype, in_place), device)


def scale_tape(shape: torch.Size, dtype: str, to: torch.dtype, in_place: bool = False) -> Tape:
    """Returns the tape of ``x, factor -> factor · x``. With ``in_place`` the result overwrites ``x``."""
    tape = Tape()
    x: Any = tape.input((shape.numel(),), dtype)
    factor: Any = tape.input((1,), jnp.float32)
    product: Any = tape.launch(kernels.scale, x, factor, jnp.dtype(name_dtype(to)), in_place)
    if in_place:
        tape.outputs.append(product)
    else:
        tape.output(product, shape, to)
    return tape


def active_tiles_shape(x: Tensors, call: TorchCall, way: Way) -> tuple[int, int] | None:
    """Returns the shape of the list of active tiles that a directly launched forward saves; None if it saves none."""
    if not (call.jax.gradient_threshold and way.direct) or refusal(x, call) is not None:
        return None
    return kernels.active_tiles_shape(describe_launch(x.hidden, x.weight, call, x.temperature is not None))


def are_active_tiles(cache: Sequence[torch.Tensor]) -> bool:
    """Whether the cache of a call with a threshold is a list of active tiles, which only direct launches save.

    JAX saves the tiles' maxima or nothing.
    """
    return bool(cache) and cache[0].dtype is torch.int32


def pad_tokens(x: torch.Tensor, dim: int = 0) -> torch.Tensor:
    """Returns ``x`` as a contiguous tensor, with ``dim`` padded to at least as many tokens as kernels read."""
    tokens = x.shape[dim]
    if tokens >= kernels.THREADS:
        return _device.make_usable(x)
    padded = x.new_zeros((*x.shape[:dim], kernels.THREADS, *x.shape[dim + 1 :]))
    padded.narrow(dim, 0, tokens).copy_(x)
    return padded
