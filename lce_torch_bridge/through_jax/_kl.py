"""`linear_kl` and its gradients by programs of JAX.

    statistics     operands, tokens                             ->  this shard's statistics, [7, P], and its cache
    mixture        operands, tokens, all shards' statistics     ->  this shard's sums of a mixture, [2, P]
    finish         the same, and all shards' sums               ->  the divergence and S, [1 + S, P]
    single_shard   all of them in one program, for a vocabulary that is not split
    pull_back      operands, tokens with S and the cotangent, cache  ->  the requested ones of dhidden, dweight, dbias

`operators._operators` calls `forward`, `make_empty` and `gradients`.

The operands are hidden, weight and bias of the student, then of the teacher. ``tokens`` has the temperatures. S stands
for the merged statistics and, for a mixture (the ``m`` of "jsd" and "tv"), its sums. The last row of a shard's
statistics holds the tokens' tags, which must be the same on all shards. Over a group, one all-gather of seven numbers
per token collects the shards' statistics, and for a mixture another one of two numbers collects their sums. All ranks
merge them in the same way.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import torch
from jax import lax

from lce_jax.run import _local
from lce_torch_bridge._types import Tensors, TorchCall
from lce_torch_bridge.tensors import _device, _padding, _tensor_parallel
from lce_torch_bridge.through_jax import _programs
from lce_torch_bridge.through_jax import _runtime as runtime
from lce_torch_bridge.through_jax._programs import (
    ProgramKey,
    append_tags,
    build_program,
    check_tags,
    make_key,
    make_tags,
    pack_arrays,
    unpack_rows,
)

NUM_OPERANDS = 6


def forward(x: Tensors, call: TorchCall, keep: bool) -> list[Any]:
    """Returns the divergence ``[T]`` in float32, temperatures and S ``[…, T]``, and the leaves of the cache."""
    tokens, key, keep_cache = x.hidden.shape[0], make_key(call, x.weight, _teacher_weight(x)), keep and call.keeps_tiles
    bits = torch.cat([x.hidden.new_empty((tokens, 0), dtype=torch.float32), *_temperatures(x)], 1).view(torch.int32)
    inputs = _pad_inputs(x, bits)
    if key.shards == 1:
        packed, *cache = _run_one(build_program(single_shard, key, keep_cache), inputs)
    else:
        stats, *cache = _run_one(build_program(statistics, key, keep_cache), inputs)
        all_ranks, sums = _tensor_parallel.gather(stats, call.group), None
        if call.beta is not None:
            (part,) = _run_one(build_program(mixture, key), (*inputs, all_ranks))
            sums = _tensor_parallel.gather(part, call.group)
        (packed,) = _run_one(build_program(finish, key), (*inputs, all_ranks, sums))
    packed = packed[:, :tokens]
    return [packed[0].view(torch.float32).clone(), torch.cat([bits.T, packed[1:]]), *cache]


def make_empty(x: Tensors, call: TorchCall, keep: bool) -> list[torch.Tensor]:
    """Returns uninitialised tensors of the shapes and dtypes that `forward` returns."""
    tokens = x.hidden.shape[0]
    cache = jax.tree.leaves(_infer_cache(x, call)) if keep and call.keeps_tiles and tokens else []
    numbers = call.num_temperatures + (6 if call.beta is None else 8)
    return [
        x.hidden.new_empty((tokens,), dtype=torch.float32),
        x.hidden.new_empty((numbers, tokens), dtype=torch.int32),
        *(x.hidden.new_empty(leaf.shape, dtype=getattr(torch, leaf.dtype.name)) for leaf in cache),
    ]


def gradients(
    x: Tensors,
    residuals: Sequence[torch.Tensor],
    cotangents: dict[str, torch.Tensor],
    requested_gradients: tuple[bool, ...],
    call: TorchCall,
) -> list[torch.Tensor]:
    """Returns dhidden, dweight and dbias, those that are requested."""
    (saved, *cache), (cotangent,) = residuals, cotangents.values()
    tree = jax.tree.structure(_infer_cache(x, call)) if cache else None
    key = make_key(call, x.weight, _teacher_weight(x))
    run = build_program(pull_back, key, requested_gradients, not call.reduce_grad_hidden, tree)
    per_token = torch.cat([saved, cotangent.contiguous().view(torch.int32)[None]])
    grads = _run_one(run, (*_pad_inputs(x, per_token.T), *cache))
    if requested_gradients[0]:
        grads[0] = grads[0][: x.hidden.shape[0]]
        if call.reduce_grad_hidden:
            grads[0] = _tensor_parallel.sum_dhidden(grads[0], x.hidden.dtype, call.group)
    return grads


def _teacher_weight(x: Tensors) -> torch.Tensor:
    assert x.teacher_weight is not None
    return x.teacher_weight


def _temperatures(x: Tensors) -> list[torch.Tensor]:
    return [y[:, None] for y in (x.temperature, x.teacher_temperature) if y is not None]


def _pad_inputs(x: Tensors, per_token: torch.Tensor) -> tuple[Any, ...]:
    """Returns the inputs of a program, padded to its rows."""
    assert x.teacher_hidden is not None
    rows = _padding.size(x.hidden.shape[0])
    hidden, teacher_hidden = _padding.pad(x.hidden, rows), _padding.pad(x.teacher_hidden, rows)
    operands = hidden, x.weight, x.bias, teacher_hidden, x.teacher_weight, x.teacher_bias
    return *operands, _padding.pack_rows(per_token, rows)


def _run_one(run: Any, inputs: Sequence[Any]) -> list[torch.Tensor]:
    (results,) = _programs.run(run, inputs, waits=NUM_OPERANDS)
    return results


def _infer_cache(x: Tensors, call: TorchCall) -> Any:
    """Returns the shapes of a forward's cache, as a tree."""
    rows, struct = _padding.size(int(x.hidden.shape[0])), jax.ShapeDtypeStruct
    tensors = [x.hidden, x.weight, x.bias, x.teacher_hidden, x.teacher_weight, x.teacher_bias]
    operands = [None if y is None else _device.describe_tensor(y) for y in tensors]
    for i in 0, 3:  # both hidden states are padded
        operands[i] = struct((rows, *operands[i].shape[1:]), operands[i].dtype)  # type: ignore[union-attr]
    key, tokens = make_key(call, x.weight, _teacher_weight(x)), struct((1 + rows * call.num_temperatures,), "int32")
    device = runtime.find_planning_device(x.hidden.device)
    return runtime.infer_shapes(device, _compute_cache, key, *operands, tokens)


def statistics(key: ProgramKey, keep_cache: bool, *inputs: Any) -> Any:
    """``*operands, tokens -> [7, P], cache leaves``."""
    stats, cache = _unpack(key, inputs).part.statistics(keep_cache)
    num_rows, columns = unpack_rows(inputs[-1], inputs[0].shape[0])
    options = inputs[1].shape[0], inputs[4].shape[0], key.call.text
    return append_tags(jnp.stack(stats), make_tags([columns.T], num_rows, *options)), jax.tree.leaves(cache)


def mixture(key: ProgramKey, *inputs: Any) -> Any:
    """``*operands, tokens, [N, 7, P] -> [2, P]``."""
    *operands, gathered = inputs
    part = _unpack(key, operands).part
    return jnp.stack(part.mixture_sums(_merge_shards(part, gathered)))


def finish(key: ProgramKey, *inputs: Any) -> Any:
    """``*operands, tokens, [N, 7, P], [N, 2, P] or None -> [1 + S, P]``; NaN where tags differ."""
    *operands, gathered, sums = inputs
    part = _unpack(key, operands).part
    total = None if sums is None else _local.MixtureSums.merge(sums)
    return _pack_results(part, _merge_shards(part, gathered), total)


def single_shard(key: ProgramKey, keep_cache: bool, *inputs: Any) -> Any:
    """``*operands, tokens -> [1 + S, P], cache leaves``."""
    part = _unpack(key, inputs).part
    stats, cache = part.statistics(keep_cache)
    sums = part.mixture_sums(stats) if part.has_mixture else None
    return _pack_results(part, stats, sums), jax.tree.leaves(cache)


def pull_back(
    key: ProgramKey, requested_gradients: tuple[bool, ...], rounded: bool, cache: Any, *inputs: Any
) -> list[Any]:
    """``*operands, tokens with S and the cotangent, *cache leaves -> dhidden, dweight, dbias``, if requested.

    With ``rounded``, dhidden has hidden's dtype, because no sum over the group follows.
    """
    operands, leaves = inputs[: NUM_OPERANDS + 1], inputs[NUM_OPERANDS + 1 :]
    part, columns = _unpack(key, operands)
    *saved, cotangent = columns
    merged = _local.KLStatistics(*saved[:6])
    sums = _local.MixtureSums(*saved[6:]) if saved[6:] else None
    cached = None if cache is None else jax.tree.unflatten(cache, leaves)
    primals = part.gradients(merged, sums, cached, cotangent)
    dhidden = primals.hidden.astype(operands[0].dtype) if rounded else primals.hidden
    missing = operands[1].shape[0] - primals.weight.shape[0]
    head_grads = [primals.weight, *([] if primals.bias is None else [primals.bias.astype(operands[2].dtype)])]
    grads = [dhidden, *(jnp.pad(x, ((0, missing), *((0, 0),) * (x.ndim - 1))) for x in head_grads)]
    return [grad for grad, flag in zip(grads, requested_gradients, strict=False) if flag]  # there may be no dbias


def _compute_cache(key: ProgramKey, *inputs: Any) -> Any:
    """Returns the cache of `statistics`."""
    return _unpack(key, inputs).part.statistics(keep_cache=True)[1]


class _Unpacked(NamedTuple):
    part: _local.KLPart
    columns: Any  # [K, P] float32: the other per-token numbers, without the temperatures, which come first


def _unpack(key: ProgramKey, inputs: Any) -> _Unpacked:
    """Returns this shard's part of the call, as `lce_jax.run._local` takes it, and further per-token numbers."""
    hidden, weight, bias, teacher_hidden, teacher_weight, teacher_bias, tokens = inputs
    rows, call = hidden.shape[0], key.call
    num_rows, bits = unpack_rows(tokens, rows)
    columns, size = lax.bitcast_convert_type(bits, jnp.float32), weight.shape[0]
    # If the weights have different numbers of rows, the group's parts are uneven, and `finish` makes all results NaN.
    least = min(size, teacher_weight.shape[0])
    (weight, bias), (teacher_weight, teacher_bias) = (
        (w[:least], None if b is None else b[:least]) for w, b in ((weight, bias), (teacher_weight, teacher_bias))
    )
    options: dict[str, Any] = {"bias": bias, "teacher_bias": teacher_bias}
    options["beta"] = call.beta if call.jax.direction == "jsd" else None
    for prefix, head in zip(("", "teacher_"), call.jax.heads, strict=True):
        options |= {f"{prefix}logit_scale": head.logit_scale, f"{prefix}logit_softcap": head.logit_softcap}
    options |= {"cache_bytes": call.jax.cache_bytes, "precision": key.precision, "implementation": call.jax.requested}
    options |= {"temperature": columns[0]} if call.has_temperature else {}
    options["teacher_temperature"] = columns[call.num_temperatures - 1] if call.has_teacher_temperature else 1.0
    start, options["vocab_size"] = key.part(size)
    where, pair = jnp.arange(rows, dtype=jnp.int32) < num_rows, _local.Pair
    arrays = pair(hidden, teacher_hidden), pair(weight, teacher_weight)
    part = _local.kl_part(options, *arrays, start, where, call.jax.direction)
    return _Unpacked(part, columns[call.num_temperatures :])


def _merge_shards(part: _local.KLPart, gathered: Any) -> Any:
    """Returns the merged statistics of all shards; NaN where their tags differ."""
    return part.merge(check_tags(gathered)[0])


def _pack_results(part: _local.KLPart, merged: Any, sums: Any) -> Any:
    return pack_arrays(part.finish(merged, sums), *merged, *(sums or ()))
