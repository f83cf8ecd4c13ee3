"""What the two operators do: tensors in, JAX programs and the collectives between them, tensors out."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import torch

from lce_torch_bridge import _programs, _rows, runtime, tensor_parallel
from lce_torch_bridge._programs import Spec
from lce_torch_bridge._types import Call, Operands
from lce_torch_bridge.dlpack import to_jax, to_torch


def forward(x: Operands, call: Call, keep_cache: bool) -> list[torch.Tensor]:
    """The outputs ``[T]``, the merged statistics ``[F, T]`` and the cache."""
    tokens = x.labels.shape[0]
    if tokens == 0:
        return forward_structs(x, call, keep_cache)
    tensor_parallel.check_equal_parts(x.weight, call.group)
    spec = _spec(x.weight, call)
    with runtime.beside(x.hidden):
        weight = to_jax(x.weight)
        if keep_cache:  # the backward takes all tokens at once, and so their cache
            inputs = [_import_whole(x, weight)]
        else:
            inputs = [_import(x, weight, piece, _rows.FORWARD_ROWS) for piece in _rows.pieces(tokens)]
        run = _run_alone if call.group == tensor_parallel.NO_GROUP else _run_shard
        pieces, cache = run(inputs, spec, call, keep_cache)
        return [*(_join(parts, tokens) for parts in zip(*pieces, strict=True)), *map(to_torch, cache)]


type Found = tuple[list[list[torch.Tensor]], list[jax.Array]]  # each piece's outputs, and the first one's cache


def _run_alone(inputs: list[tuple[Any, ...]], spec: Spec, call: Call, keep_cache: bool) -> Found:
    """Of a vocabulary that is not split."""
    run = _programs.forward(spec, keep_cache, call.fields, call.megatron)
    found = [run(*each) for each in inputs]
    return [[to_torch(y) for y in outputs] for outputs, _ in found], found[0][1]


def _run_shard(inputs: list[tuple[Any, ...]], spec: Spec, call: Call, keep_cache: bool) -> Found:
    """Of one that is, with one collective for all pieces."""
    run = _programs.statistics(spec, keep_cache)
    parts = [run(*each) for each in inputs]
    gathered = tensor_parallel.gather(torch.stack([to_torch(packed) for packed, _ in parts]), call.group)
    imported = [to_jax(shards) for shards in gathered.unbind(1)]  # held until what reads them has been exported
    merge = _programs.results(spec, call.fields, call.megatron)
    found = [merge(each[2], each[4], shards) for each, shards in zip(inputs, imported, strict=True)]
    return [[to_torch(y) for y in outputs] for outputs in found], parts[0][1]


def forward_structs(x: Operands, call: Call, keep_cache: bool) -> list[torch.Tensor]:
    """What `forward` returns, its contents left open."""
    tokens = x.labels.shape[0]
    outputs = [x.hidden.new_empty((tokens,), dtype=torch.float32) for _ in call.fields]
    spec = _spec(x.weight, call)
    merged = x.hidden.new_empty((len(spec.merged), tokens), dtype=torch.float32)
    cache = []
    if keep_cache and tokens:
        structs = jax.tree.leaves(_cache_structure(x, spec))
        cache = [x.hidden.new_empty(struct.shape, dtype=getattr(torch, struct.dtype.name)) for struct in structs]
    return [*outputs, merged, *cache]


def gradients(
    x: Operands,
    merged: torch.Tensor,
    cache: list[torch.Tensor],
    cotangents: dict[str, torch.Tensor],
    wanted: tuple[bool, bool],
    call: Call,
) -> list[torch.Tensor]:
    """Those of dhidden and dweight that are wanted, in their operands' dtypes; dhidden summed over the group if asked.

    The sum is in float32 and rounded once, where the logits' path sums what each rank has rounded.
    """
    tokens = x.labels.shape[0]
    if tokens == 0:
        return [y.new_zeros(y.shape) for y, want in zip((x.hidden, x.weight), wanted, strict=True) if want]
    spec = _spec(x.weight, call)
    reduced = call.reduce_grad_hidden and call.group != tensor_parallel.NO_GROUP
    structure = jax.tree.structure(_cache_structure(x, spec)) if cache else None
    run = _programs.gradients(spec, tuple(cotangents), wanted, not reduced, structure)
    rows = torch.cat([merged, torch.stack([seed.float() for seed in cotangents.values()])])
    rows = _rows.pad(rows, _rows.size(tokens), dim=1)
    with runtime.beside(x.hidden):
        inputs = _import_whole(x, to_jax(x.weight))
        grads = [to_torch(grad) for grad in run(*inputs, to_jax(rows), [to_jax(leaf) for leaf in cache])]
        if wanted[0]:
            grads[0] = grads[0][:tokens]
        if wanted[0] and reduced:
            grads[0] = tensor_parallel.all_reduce(grads[0], call.group).to(x.hidden.dtype)
        return grads


def _spec(weight: torch.Tensor, call: Call) -> Spec:
    """The key of the programs. Products of float32 are as exact as torch's own are set to be."""
    shards, rank = tensor_parallel.size_and_rank(call.group)
    exact = weight.dtype == torch.float32 and torch.get_float32_matmul_precision() == "highest"
    return Spec(
        vocab_size=int(call.vocab_size),  # a SymInt where torch.compile traces
        vocab_start=rank * int(weight.shape[0]),
        padded=bool(call.vocab_size < shards * weight.shape[0]),
        logit_scale=call.logit_scale,
        logit_softcap=call.logit_softcap,
        entropy=call.entropy != "none",
        stats=call.stats,
        cache_bytes=call.cache_bytes,
        implementation=tuple(call.implementation.split(",")) if call.implementation else None,
        precision="highest" if exact else None,
    )


def _import(x: Operands, weight: jax.Array, piece: slice, rows: int) -> tuple[Any, ...]:
    """``hidden, weight, labels, temperature, num_rows`` of a piece of the tokens, for a program of ``rows``."""
    hidden, labels, temperature = (
        None if t is None else to_jax(_rows.pad(t[piece], rows)) for t in (x.hidden, x.labels, x.temperature)
    )
    return hidden, weight, labels, temperature, np.int32(piece.stop - piece.start)


def _import_whole(x: Operands, weight: jax.Array) -> tuple[Any, ...]:
    """The same of all tokens, for the program that takes them at once: ``num_rows`` is None where it masks no rows."""
    tokens = x.labels.shape[0]
    *operands, num_rows = _import(x, weight, slice(0, tokens), _rows.size(tokens))
    return *operands, None if _rows.is_whole(tokens) else num_rows


def _cache_structure(x: Operands, spec: Spec) -> Any:
    tokens = int(x.labels.shape[0])
    rows = _rows.size(tokens)
    struct = jax.ShapeDtypeStruct
    return _programs.cache_structure(
        spec,
        runtime.jax_device(x.hidden.device),
        struct((rows, int(x.hidden.shape[1])), _dtype_name(x.hidden)),
        struct(tuple(map(int, x.weight.shape)), _dtype_name(x.weight)),
        struct((rows,), "int32"),
        None if x.temperature is None else struct((rows,), "float32"),
        None if _rows.is_whole(tokens) else struct((), "int32"),
    )


def _dtype_name(x: torch.Tensor) -> str:
    return str(x.dtype).removeprefix("torch.")


def _join(parts: tuple[torch.Tensor, ...], tokens: int) -> torch.Tensor:
    """One tensor of the pieces' parts along their last dimension, without the padding.

    A copy, in torch's memory: a view could not be written in place, and JAX's memory knows no other stream.
    """
    joined = parts[0] if len(parts) == 1 else torch.cat(parts, -1)
    return joined[..., :tokens].clone(memory_format=torch.contiguous_format)
