"""The two passes of a call as kernels on torch's current stream, and which calls have them.

What depends on shapes and options alone is a plan. Here is what surrounds it: the caller's tensors as kernels read
them, and the collectives of a vocabulary that is split.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import torch

from lce_jax.run import kernels
from lce_torch_bridge._types import PER_CANDIDATE, Sums, Tensors, TorchCall
from lce_torch_bridge.launched_directly import _first_call
from lce_torch_bridge.launched_directly._host import Buffer, Launches, Tape, plan_of
from lce_torch_bridge.launched_directly._way import Way
from lce_torch_bridge.tensors import _device, _padding, _tensor_parallel
from lce_torch_bridge.tensors._device import name_of
from lce_torch_bridge.tensors._weight import empty_sparse_like

ODD = 0x01000193  # a product with an odd number loses nothing modulo 2³²


def refusal(x: Tensors, call: TorchCall) -> str | None:
    """Why no kernels serve such calls; None if some do."""
    reason = _device.why_not(x.hidden.device)
    if reason is not None:
        return reason
    options = {"bias": x.bias is not None and not call.jax.rank, "mean_logit": call.jax.mean_logit}
    for name, asked in options.items():
        if asked:
            return f"{name}: no kernel computes what it needs between the others"
    if call.jax.requested and call.jax.requested[0] != "mosaic_gpu":
        return f"implementation={','.join(call.jax.requested)!r}"
    launched = launched_call(x.hidden, x.weight, call, x.temperature is not None)
    device, reason = launched.call.device, kernels.refusal(launched)
    is_known = reason is not None or kernels.unchecked(device) is None
    return reason if is_known else _compared(device, x.hidden.device)


def launches(way: Way, device: torch.device) -> bool:
    """Whether kernels are launched on ``device``: after a card's first call, in which the ranks of a group may part."""
    described = _device.device_of(device) if way.direct and _device.why_not(device) is None else None
    return described is not None and _compared(described, device) is None


def _compared(described: kernels.Device, device: torch.device) -> str | None:
    return kernels.check_once(described, functools.partial(_first_call.compare, device, _launched))


def _launched(x: Tensors, call: TorchCall, seeds: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """What `_first_call.compare` asks for, of few blocks: each walks over several tiles."""
    device, names = x.hidden.get_device(), call.differentiable
    if device != _device.current_device():
        with torch.cuda.device(device):
            return _launched(x, call, seeds)
    launched = launched_call(x.hidden, x.weight, call, False)
    of_gpu = launched.call.device._replace(core_count=_first_call.BLOCKS)
    launched = dataclasses.replace(launched, call=launched.call.replace(device=of_gpu))
    given = [_device.usable(x.hidden), _device.usable(x.weight)]
    found = Launches(forward_tape(launched, True, names), launched.call.device).run(device, [*given, in_rows(x.labels)])
    results, saved, kept = found[: len(names)], found[len(names)], found[len(names) + 1 :]
    given += [in_rows(saved, 1), *map(in_rows, seeds)]
    tape_of = functools.partial(
        gradients_tape, launched, names, dtype=x.hidden.dtype, kept=[*map(_device.struct, kept)]
    )
    kept, total = [_device.usable(y) for y in kept], x.weight.float()
    Launches(tape_of(requested_gradients=(False, True), adds=True), launched.call.device).run(
        device, [*given, total, *kept]
    )
    last = Launches(tape_of(requested_gradients=(True, True), owns_cache=True), launched.call.device)
    return [*results, *last.run(device, [*given, *kept]), total - x.weight.float()]


def launched_call(
    hidden: torch.Tensor, weight: torch.Tensor, call: TorchCall, has_temperature: bool
) -> kernels.LaunchedCall:
    """The call with the shapes of its operands, as `lce_jax.run.kernels` takes it."""
    (tokens, columns), (_, rank) = (hidden.shape[0], weight.shape[0]), _tensor_parallel.size_and_rank(call.group)
    shaped = call.jax.replace(
        num_tokens=int(tokens),
        hidden_size=int(weight.shape[1]),
        columns=int(columns),
        dtype=jnp.dtype(name_of(weight.dtype)),
        caller_dtype=jnp.dtype(name_of(hidden.dtype)),
        device=_device.device_of(hidden.device),
    )
    return kernels.LaunchedCall(
        call=shaped,
        rows=_padding.size(int(tokens)),
        start=rank * int(columns),
        has_temperature=has_temperature,
        megatron=call.megatron,
    )


def forward(x: Tensors, call: TorchCall, keep_cache: bool, way: Way) -> list[torch.Tensor] | None:
    """What `operators._execute.forward` returns; None if JAX is to run the call."""
    hidden, weight, device = x.hidden, x.weight, x.hidden.get_device()
    if device != _device.current_device():
        with torch.cuda.device(device):
            return forward(x, call, keep_cache, way)
    ranks = call.group and _tensor_parallel.size_and_rank(call.group)
    options = call, ranks, keep_cache, x.bias is None, x.temperature is None, x.candidates is None
    key = "forward", device, hidden.shape, hidden.dtype, weight.shape, weight.dtype, *options
    plan = plan_of(key, lambda: _plan_of_forward(x, call, keep_cache))
    if isinstance(plan, str):
        way.refuse(plan)
        return None
    labels = in_rows(x.labels if x.labels.dtype is torch.int64 else x.labels.long())
    ids = None if x.candidates is None else _padding.candidate_ids(x.candidates, call.jax.vocab_size)
    per_token = [in_rows(y) for y in (x.temperature, x.floor, ids) if y is not None]
    operands = [_device.usable(hidden), _device.usable(weight)]
    if x.bias is not None:  # B of an adapter
        operands.append(_device.usable(x.bias.to(weight.dtype)))
    found = plan.run(device, [*operands, labels, *per_token])
    tokens, count = hidden.shape[0], len(call.fields)
    if tokens < kernels.THREADS:  # copies, because views are not written to
        saved = found[count][:, :tokens].clone(memory_format=torch.contiguous_format)
        found[: count + 1] = [*[y[:tokens].clone() for y in found[:count]], saved]
    return found


def _plan_of_forward(x: Tensors, call: TorchCall, keep_cache: bool) -> Launches | str:
    reason = refusal(x, call)
    if reason is not None:
        return reason
    launched = launched_call(x.hidden, x.weight, call, x.temperature is not None)
    return Launches(forward_tape(launched, keep_cache, call.fields, call.group), launched.call.device)


def forward_tape(launched: kernels.LaunchedCall, keep_cache: bool, fields: Sequence[str], group: str = "") -> Tape:
    """``hidden, weight, B, labels, temperature, floor, candidates -> fields, saved, kept``, those that there are."""
    tape, rows, call = Tape(), launched.rows, launched.call
    hidden, weight, *adapter = _inputs(tape, launched)
    labels = tape.input((rows, 2), jnp.int32)  # the halves of int64 numbers
    temperature, floor = (
        tape.input((rows,), jnp.float32) if there else None for there in (launched.has_temperature, call.has_floor)
    )
    ids = tape.input((rows, call.num_candidates), jnp.int32) if call.num_candidates else None
    tokens = kernels.Tokens(labels, temperature, floor, ids)
    exchange = functools.partial(_exchange, tape, call, tokens, group) if group else None
    found = kernels.forward(launched, tape, hidden, weight, tokens, keep_cache, exchange, *adapter)
    for name in fields:
        more = (call.num_candidates,) if name == PER_CANDIDATE else ()
        tape.output(found.results[name], (launched.stride, *more), torch.float32)
    tape.output(found.saved, (launched.saved_layout.size, launched.stride), torch.int32)
    tape.outputs += found.cached
    return tape


def _inputs(tape: Tape, launched: kernels.LaunchedCall) -> tuple[Buffer, ...]:
    """Hidden and the weight, and the B of an adapter."""
    call = launched.call
    hidden = tape.input((launched.rows, call.hidden_size + call.rank), call.hidden_dtype)
    widths = [call.hidden_size, call.rank] if call.rank else [call.hidden_size]
    return hidden, *(tape.input((call.columns, width), call.dtype) for width in widths)


def _exchange(
    tape: Tape, call: kernels.Call, given: kernels.Tokens, group: str, sent: Buffer, x: Buffer | None, saved: Buffer
) -> tuple[Buffer, Buffer | None]:
    """The statistics and candidates' x of all ranks. Beside them each rank sends a tag for each token."""
    (ranks, _), tokens = _tensor_parallel.size_and_rank(group), call.num_tokens
    number = _tensor_parallel.number_of(tokens, call.columns, call.vocab_size, call.logit_scale, call.logit_softcap)

    def put_tags(sent: torch.Tensor, saved: torch.Tensor, *given: torch.Tensor) -> list[torch.Tensor]:
        """What must be the same on all ranks, in the last field of the first group."""
        tags = sent[0, -1, :tokens].view(torch.int32)
        torch.add(saved[0, :tokens], number, out=tags)
        for y in given:
            bits = y[:tokens].view(torch.int32)
            torch.add(tags, bits if y.ndim == 1 else bits.sum(1, dtype=torch.int32), alpha=ODD, out=tags)
        return [sent]

    def gathered(x: Buffer) -> Buffer:
        every = tape.empty((ranks * x.shape[0], *x.shape[1:]), x.dtype)
        return tape.call(lambda x: [_tensor_parallel.gather(x, group).flatten(0, 1)], [x], every)[0]

    def highest(x: torch.Tensor) -> list[torch.Tensor]:
        return [_tensor_parallel.gather(x, group).amax(0)]

    tape.call(put_tags, [sent, saved, *[y for y in given[1:] if y is not None]], sent)
    return gathered(sent), None if x is None else tape.call(highest, [x], tape.empty(x.shape, x.dtype))[0]


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
    """What `operators._execute.gradients` returns of a call without a bias; None if JAX is to run it.

    ``b``: the B of an adapter.
    """
    adds = sums.main_grad if sums.total is None else sums.total
    device, owns_cache = hidden.get_device(), sums.owns_cache and bool(cache) and not call.jax.gradient_threshold
    if sums.total is not None and not sums.total.is_torchs:
        way.refuse("JAX has added to the sum of dweight")
        return None
    if device != _device.current_device():
        with torch.cuda.device(device):
            return gradients(hidden, weight, saved, cache, cotangents, requested_gradients, call, sums, way, b)
    ranks = call.group and _tensor_parallel.size_and_rank(call.group)
    shapes = hidden.shape, hidden.dtype, weight.shape, weight.dtype, saved.shape, len(cache), ranks
    writes = sums.total is not None and not sums.total.is_begun and not call.jax.gradient_threshold
    how = call, tuple(cotangents), requested_gradients, None if adds is None else not writes, owns_cache
    key = "gradients", device, *shapes, *how, call.jax.gradient_threshold and are_live_tiles(cache)
    plan = plan_of(key, lambda: _plan_of_gradients(hidden, weight, saved, cache, *how))
    if isinstance(plan, str):
        way.refuse(plan)
        return None
    into: Any = [] if adds is None else [sums.main_grad if sums.total is None else sums.total.tensor(writes)]
    if into or owns_cache:
        torch.autograd.graph.increment_version([*into, *cache] if owns_cache else into)  # as any change in place
    seeds = [in_rows(x) for x in cotangents.values()]
    operands = [_device.usable(hidden), _device.usable(weight)]
    operands += [] if b is None else [_device.usable(b.to(weight.dtype))]
    grads = plan.run(device, [*operands, in_rows(saved, 1), *seeds, *into, *map(_device.usable, cache)])
    if b is not None:
        grads = _of_adapter(grads, requested_gradients, b.dtype)
    if requested_gradients[0] and call.reduce_grad_hidden:
        grads[0] = _tensor_parallel.total_dhidden(grads[0], hidden.dtype, call.group)
    if adds is not None and requested_gradients[1]:
        grads.pop()
    return grads if sums.main_grad is None else [*grads, empty_sparse_like(sums.main_grad, weight.dtype)]


def _of_adapter(
    found: list[torch.Tensor], requested_gradients: tuple[bool, ...], dtype: torch.dtype
) -> list[torch.Tensor]:
    """Both parts of dhidden as one, and the gradient of B; those that are wanted."""
    grads = [torch.cat([found[0], found[1].to(found[0].dtype)], 1)] if requested_gradients[0] else []
    return [*grads, found[-1].to(dtype)] if requested_gradients[2] else grads


def _plan_of_gradients(
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
    has_temperature = len(saved) > 1 + 3 + (call.jax.entropy) + call.jax.has_floor + 2 * call.jax.num_candidates
    reason = refusal(Tensors(hidden, weight, None, saved[0], None, None), call)
    if reason is not None:
        return reason
    if call.jax.gradient_threshold and not are_live_tiles(cache):
        return "gradient_threshold: JAX ran the forward, and kept other things than kernels do"
    launched = launched_call(hidden, weight, call, has_temperature)
    dtype = torch.float32 if call.reduce_grad_hidden else hidden.dtype
    kept = [_device.struct(x) for x in cache]
    return Launches(
        gradients_tape(launched, seeds, requested_gradients, dtype, kept, adds, owns_cache), launched.call.device
    )


def gradients_tape(
    launched: kernels.LaunchedCall,
    seeds: Sequence[str],
    requested_gradients: Sequence[bool],
    dtype: torch.dtype,
    kept: Sequence[jax.ShapeDtypeStruct | Buffer] = (),
    adds: bool | None = None,
    owns_cache: bool = False,
) -> Tape:
    """``hidden, weight, B, saved, cotangents, sum, kept -> dhidden, du, dweight, dB``, those that are wanted.

    dhidden is rounded to ``dtype``. ``adds``: dweight is added to the sum, or written there; None: it is
    in the weight's dtype. du and dB, of an adapter, are float32.
    """
    tape, rows = Tape(), launched.rows
    hidden, weight, *adapter = _inputs(tape, launched)
    saved = tape.input((launched.saved_layout.size * rows,), jnp.float32)
    shapes = {name: (rows, launched.call.num_candidates) if name == PER_CANDIDATE else (rows,) for name in seeds}
    given = {name: tape.input(shape, jnp.float32) for name, shape in shapes.items()}
    total = tape.input(weight.shape, jnp.float32) if adds is not None else None
    of_forward = [tape.input(x.shape, x.dtype) for x in kept]
    dhidden, dweight, *of_adapter = kernels.backward(
        launched, tape, hidden, weight, saved, given, of_forward, name_of(dtype), *adapter,
        owns_cache=owns_cache, total=total, adds_total=adds is True,
    )  # fmt: skip
    if requested_gradients[0]:
        tape.output(dhidden, (launched.call.num_tokens, launched.call.hidden_size), dtype)
        tape.outputs += of_adapter[:1]
    if requested_gradients[1]:
        tape.outputs.append(dweight)
    if of_adapter and requested_gradients[2]:
        tape.outputs.append(of_adapter[1])
    return tape


def scale(x: torch.Tensor, factor: torch.Tensor, dtype: torch.dtype, in_place: bool = False) -> torch.Tensor | None:
    """``factor [1] · x`` in float32, rounded once; None where no kernel computes that.

    For large tensors: torch's own kernel for mixed dtypes takes twice as long. ``in_place`` needs x's own dtype, and a
    factor of 1 takes no time then.
    """
    device = x.get_device()
    if device != _device.current_device():
        with torch.cuda.device(device):
            return scale(x, factor, dtype, in_place)
    plan = None
    if _device.is_usable(x):
        key = "scale", device, x.shape, x.dtype, dtype, in_place
        plan = plan_of(key, lambda: _plan_of_scale(x, dtype, in_place))
    if plan is None or isinstance(plan, str):
        return None
    if in_place:
        torch.autograd.graph.increment_version(x)
    found: torch.Tensor = plan.run(device, [x, _device.usable(factor)])[0]
    return found


def _plan_of_scale(x: torch.Tensor, dtype: torch.dtype, in_place: bool) -> Launches | str:
    device, reason = _device.device_of(x.device), _device.why_not(x.device)
    if device is None or reason is not None:
        return str(reason)
    refusal = kernels.refusal_to_scale(x.numel(), device)
    return refusal or Launches(scale_tape(x.shape, name_of(x.dtype), dtype, in_place), device)


def scale_tape(shape: torch.Size, dtype: str, to: torch.dtype, in_place: bool = False) -> Tape:
    """``x, factor -> factor · x``, ``in_place`` where ``x`` lies."""
    tape = Tape()
    x: Any = tape.input((shape.numel(),), dtype)
    factor: Any = tape.input((1,), jnp.float32)
    found: Any = tape.launch(kernels.scale, x, factor, jnp.dtype(name_of(to)), in_place)
    if in_place:
        tape.outputs.append(found)
    else:
        tape.output(found, shape, to)
    return tape


def live_shape(x: Tensors, call: TorchCall, way: Way) -> tuple[int, int] | None:
    """The shape of the live tiles, where a forward keeps these."""
    if not (call.jax.gradient_threshold and way.direct) or refusal(x, call) is not None:
        return None
    return kernels.active_tiles_shape(launched_call(x.hidden, x.weight, call, x.temperature is not None))


def are_live_tiles(cache: Sequence[torch.Tensor]) -> bool:
    """Whether, with a threshold, kernels kept this: which tiles are live. JAX keeps the tiles' maxima, or nothing."""
    return bool(cache) and cache[0].dtype is torch.int32


def in_rows(x: torch.Tensor, dim: int = 0) -> torch.Tensor:
    """What is per token, contiguous, with as many tokens in a dimension as kernels read."""
    tokens = x.shape[dim]
    if tokens >= kernels.THREADS:
        return _device.usable(x)
    padded = x.new_zeros((*x.shape[:dim], kernels.THREADS, *x.shape[dim + 1 :]))
    padded.narrow(dim, 0, tokens).copy_(x)
    return padded
