"""`linear_kl` and its gradients by programs of JAX.

    statistics   operands, tokens                                ->  this shard's statistics, [7, P], and its cache
    mixture      operands, tokens, every shard's statistics      ->  this shard's sums of a mixture, [2, P]
    finish       the same, and every shard's sums                ->  the divergence and S, [1 + S, P]
    whole        all in one, for a vocabulary that is not split
    pull_back    operands, tokens with S and a cotangent, cache  ->  those of dhidden, dweight and dbias that are wanted

The operands are hidden, weight and bias of the student, then of the teacher. ``tokens`` has the temperatures. S is the
merged statistics and, of a "jsd", the sums. The last row of a shard's statistics are the tokens' tags, the same on all
shards. Over a group, one all-gather of seven numbers per token merges the shards' statistics, and of a "jsd" one of two
numbers their sums. Every rank merges them alike.
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
    as_rows,
    counted,
    key_of,
    of_equal_tags,
    program,
    tags_of,
    with_tags,
)

NUM_OPERANDS = 6


def forward(x: Tensors, call: TorchCall, keep: bool) -> list[Any]:
    """The divergence ``[T]`` in float32, ``[T, S]`` with the temperatures first, and the leaves of the cache."""
    tokens, key, keep_cache = x.hidden.shape[0], key_of(call, x.weight, _teacher_weight(x)), keep and call.keeps_tiles
    bits = torch.cat([x.hidden.new_empty((tokens, 0), dtype=torch.float32), *_temperatures(x)], 1).view(torch.int32)
    given = _inputs(x, bits)
    if key.shards == 1:
        packed, *cache = _run_one(program(whole, key, keep_cache), given)
    else:
        stats, *cache = _run_one(program(statistics, key, keep_cache), given)
        every, sums = _tensor_parallel.gather(stats, call.group), None
        if call.jax.direction == "jsd":
            (part,) = _run_one(program(mixture, key), (*given, every))
            sums = _tensor_parallel.gather(part, call.group)
        (packed,) = _run_one(program(finish, key), (*given, every, sums))
    found = packed[:, :tokens]
    return [found[0].view(torch.float32).clone(), torch.cat([bits, found[1:].T], 1), *cache]


def structs(x: Tensors, call: TorchCall, keep: bool) -> list[torch.Tensor]:
    """What `forward` returns, uninitialised."""
    tokens = x.hidden.shape[0]
    cache = jax.tree.leaves(_cache_structure(x, call)) if keep and call.keeps_tiles and tokens else []
    numbers = call.num_temperatures + (8 if call.jax.direction == "jsd" else 6)
    return [
        x.hidden.new_empty((tokens,), dtype=torch.float32),
        x.hidden.new_empty((tokens, numbers), dtype=torch.int32),
        *(x.hidden.new_empty(leaf.shape, dtype=getattr(torch, leaf.dtype.name)) for leaf in cache),
    ]


def gradients(
    x: Tensors,
    kept: Sequence[torch.Tensor],
    cotangents: dict[str, torch.Tensor],
    requested_gradients: tuple[bool, ...],
    call: TorchCall,
) -> list[torch.Tensor]:
    """Those of dhidden, dweight and dbias that are wanted."""
    (saved, *cache), (cotangent,) = kept, cotangents.values()
    tree = jax.tree.structure(_cache_structure(x, call)) if cache else None
    key = key_of(call, x.weight, _teacher_weight(x))
    run = program(pull_back, key, requested_gradients, not call.reduce_grad_hidden, tree)
    per_token = torch.cat([saved, cotangent.contiguous().view(torch.int32)[:, None]], 1)
    grads = _run_one(run, (*_inputs(x, per_token), *cache))
    if requested_gradients[0]:
        grads[0] = grads[0][: x.hidden.shape[0]]
        if call.reduce_grad_hidden:
            grads[0] = _tensor_parallel.total_dhidden(grads[0], x.hidden.dtype, call.group)
    return grads


def _teacher_weight(x: Tensors) -> torch.Tensor:
    assert x.teacher_weight is not None
    return x.teacher_weight


def _temperatures(x: Tensors) -> list[torch.Tensor]:
    return [y[:, None] for y in (x.temperature, x.teacher_temperature) if y is not None]


def _inputs(x: Tensors, per_token: torch.Tensor) -> tuple[Any, ...]:
    """The inputs of a program, padded to its rows."""
    assert x.teacher_hidden is not None
    rows = _padding.size(x.hidden.shape[0])
    hidden, teacher_hidden = _padding.pad(x.hidden, rows), _padding.pad(x.teacher_hidden, rows)
    operands = hidden, x.weight, x.bias, teacher_hidden, x.teacher_weight, x.teacher_bias
    return *operands, _padding.with_count(per_token, rows)


def _run_one(run: Any, given: Sequence[Any]) -> list[torch.Tensor]:
    (found,) = _programs.run(run, given, waits=NUM_OPERANDS)
    return found


def _cache_structure(x: Tensors, call: TorchCall) -> Any:
    rows, struct = _padding.size(int(x.hidden.shape[0])), jax.ShapeDtypeStruct
    given = [x.hidden, x.weight, x.bias, x.teacher_hidden, x.teacher_weight, x.teacher_bias]
    operands = [None if y is None else _device.struct(y) for y in given]
    for i in 0, 3:  # which are padded
        operands[i] = struct((rows, *operands[i].shape[1:]), operands[i].dtype)  # type: ignore[union-attr]
    key, tokens = key_of(call, x.weight, _teacher_weight(x)), struct((1 + rows * call.num_temperatures,), "int32")
    return runtime.shapes_on(runtime.planned_on(x.hidden.device), _cache, key, *operands, tokens)


def statistics(key: ProgramKey, keep_cache: bool, *given: Any) -> Any:
    """``(*operands, tokens) -> [7, P], cache leaves``."""
    stats, cache = _unpacked(key, given).part.statistics(keep_cache)
    num_rows, columns = counted(given[-1], given[0].shape[0])
    of_call = given[1].shape[0], given[4].shape[0], key.call.text
    return with_tags(jnp.stack(stats), tags_of([columns.T], num_rows, *of_call)), jax.tree.leaves(cache)


def mixture(key: ProgramKey, *given: Any) -> Any:
    """``(*operands, tokens, [N, 7, P]) -> [2, P]``."""
    *operands, gathered = given
    part = _unpacked(key, operands).part
    return jnp.stack(part.mixture_sums(_merged(part, gathered)))


def finish(key: ProgramKey, *given: Any) -> Any:
    """``(*operands, tokens, [N, 7, P], [N, 2, P] or None) -> [1 + S, P]``; NaN where tags differ."""
    *operands, gathered, sums = given
    part = _unpacked(key, operands).part
    total = None if sums is None else _local.MixtureSums(*sums.sum(0))
    return _results(part, _merged(part, gathered), total)


def whole(key: ProgramKey, keep_cache: bool, *given: Any) -> Any:
    """``(*operands, tokens) -> [1 + S, P], cache leaves``."""
    part = _unpacked(key, given).part
    stats, cache = part.statistics(keep_cache)
    sums = part.mixture_sums(stats) if part.has_mixture else None
    return _results(part, stats, sums), jax.tree.leaves(cache)


def pull_back(
    key: ProgramKey, requested_gradients: tuple[bool, ...], rounded: bool, cache: Any, *given: Any
) -> list[Any]:
    """``(*operands, tokens with S and the cotangent, *cache leaves) -> [dhidden, dweight, dbias]``, if wanted.

    ``rounded``: dhidden is in hidden's dtype, because no sum over the group follows.
    """
    operands, leaves = given[: NUM_OPERANDS + 1], given[NUM_OPERANDS + 1 :]
    part, columns = _unpacked(key, operands)
    *saved, cotangent = columns
    merged = _local.KLStatistics(*saved[:6])
    sums = _local.MixtureSums(*saved[6:]) if saved[6:] else None
    kept = None if cache is None else jax.tree.unflatten(cache, leaves)
    found = part.gradients(merged, sums, kept, cotangent)
    dhidden = found.hidden.astype(operands[0].dtype) if rounded else found.hidden
    left = operands[1].shape[0] - found.weight.shape[0]
    of_head = [found.weight, *([] if found.bias is None else [found.bias.astype(operands[2].dtype)])]
    grads = [dhidden, *(jnp.pad(x, ((0, left), *((0, 0),) * (x.ndim - 1))) for x in of_head)]
    return [grad for grad, want in zip(grads, requested_gradients, strict=False) if want]  # without a bias, no dbias


def _cache(key: ProgramKey, *given: Any) -> Any:
    """The cache of `statistics`."""
    return _unpacked(key, given).part.statistics(keep_cache=True)[1]


class _Unpacked(NamedTuple):
    part: _local.KLPart
    columns: Any  # [K, P] float32, what tokens hold besides temperatures


def _unpacked(key: ProgramKey, given: Any) -> _Unpacked:
    hidden, weight, bias, teacher_hidden, teacher_weight, teacher_bias, tokens = given
    rows, call = hidden.shape[0], key.call
    num_rows, bits = counted(tokens, rows)
    columns, size = lax.bitcast_convert_type(bits, jnp.float32), weight.shape[0]
    # Weights with different rows are those of a group whose parts are uneven: all results are NaN (`finish`).
    least = min(size, teacher_weight.shape[0])
    (weight, bias), (teacher_weight, teacher_bias) = (
        (w[:least], None if b is None else b[:least]) for w, b in ((weight, bias), (teacher_weight, teacher_bias))
    )
    options: dict[str, Any] = {"bias": bias, "teacher_bias": teacher_bias, "beta": call.beta}
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


def _merged(part: _local.KLPart, gathered: Any) -> Any:
    """The statistics of all shards; NaN where their tags differ."""
    return part.merge(of_equal_tags(gathered)[0])


def _results(part: _local.KLPart, merged: Any, sums: Any) -> Any:
    return as_rows(part.finish(merged, sums), *merged, *(sums or ()))
