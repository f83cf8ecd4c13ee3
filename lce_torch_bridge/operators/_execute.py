"""What the two operators do: tensors in, kernels or programs of JAX and the collectives between them, tensors out."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import torch

from lce_torch_bridge import tensor_parallel
from lce_torch_bridge._types import PER_CANDIDATE, Call, Operands
from lce_torch_bridge.kernels import _passes, _rows
from lce_torch_bridge.tensors import _device
from lce_torch_bridge.tensors._readable import is_readable, readable
from lce_torch_bridge.through_jax import _programs, _run
from lce_torch_bridge.through_jax import _runtime as runtime
from lce_torch_bridge.through_jax._programs import Spec
from lce_torch_bridge.through_jax._sum import Sum


def forward(x: Operands, call: Call, keep_cache: bool, lend_cache: bool = True) -> list[Any]:
    """The outputs, what the backward needs per token ``[S, T]``, and the cache.

    Autograd keeps the cache as tensors. A caller who goes on to `gradients` at once takes JAX's own arrays if JAX runs
    the call, with ``lend_cache`` False: JAX reuses their memory as soon as they are dropped, in stream order, while a
    tensor that it was lent it holds until the GPU is done. The host may be many programs ahead.
    """
    tokens = x.labels.shape[0]
    if tokens == 0:
        return forward_structs(x, call, keep_cache)
    tensor_parallel.check_equal_parts(x.weight, call.group)
    direct = _passes.forward(x, call, keep_cache)
    if direct is not None:
        return direct
    spec = _spec(x.weight, call)

    def operands(piece: _rows.Piece) -> Inputs:
        hidden = _rows.pad(x.hidden[piece.tokens], piece.rows)
        return hidden, x.weight, x.bias, _tokens(x, piece, call)

    # The backward takes all tokens at once, so one cache must hold all of them.
    pieces = [_rows.whole(tokens)] if keep_cache else _rows.pieces(tokens)
    inputs = list(map(operands, pieces))
    run = _run_alone if call.group == tensor_parallel.NO_GROUP else _run_shard
    packed, cache = run(inputs, spec, call, keep_cache, lend_cache)
    return [*_unpacked(packed, call, tokens), *cache]


class Sums(NamedTuple):
    """What a backward may write to besides its results, where its kernels are launched directly."""

    total: Sum | None = None  # dweight, which must be wanted then, is added to it and not returned
    main_grad: torch.Tensor | None = None  # float32: dweight is added to it, and what is returned is empty and sparse
    owns_cache: bool = False  # whether nothing else reads the cache


NO_SUMS = Sums()


type Inputs = tuple[torch.Tensor | None, ...]  # hidden, weight, bias or None, what is per token
type Found = tuple[list[torch.Tensor], list[Any]]  # each piece's packed results, and the first one's cache


def _run_alone(inputs: list[Inputs], spec: Spec, call: Call, keep_cache: bool, lend: bool) -> Found:
    """The forward over a vocabulary that is not split."""
    found = _run.run(_programs.forward(spec, keep_cache, call.fields, call.megatron), *inputs, lend=lend)
    return [packed for packed, *_ in found], found[0][1:]


def _run_shard(inputs: list[Inputs], spec: Spec, call: Call, keep_cache: bool, lend: bool) -> Found:
    """The forward over a split vocabulary, with one collective for all pieces."""
    parts = _run.run(_programs.statistics(spec, keep_cache), *inputs, lend=lend)
    sent = [packed for packed, *_ in parts]
    gathered = tensor_parallel.gather(sent[0] if len(sent) == 1 else torch.cat(sent, 1), call.group)
    merge = _programs.results(spec, call.fields, call.megatron)
    shards = zip(inputs, gathered.split(sent[0].shape[1], 2), strict=True)
    found = _run.run(merge, *((each[3], of_shards) for each, of_shards in shards), waits=1)
    return [packed for (packed,) in found], parts[0][1:]


def _unpacked(parts: list[torch.Tensor], call: Call, tokens: int) -> list[torch.Tensor]:
    """The outputs, one by one, and what the backward needs, from the pieces' packed results without the padding.

    They are copies in torch's memory: a view could not be written in place, and ``record_stream`` does not reach JAX's.
    """
    packed = (parts[0] if len(parts) == 1 else torch.cat(parts, 1)).narrow(1, 0, tokens)
    row = len(call.fields) - (call.num_candidates > 0)
    outputs: Any = torch.unbind_copy(packed[:row].view(torch.float32))  # type: ignore[func-returns-value]
    outputs = list(outputs)
    if call.num_candidates:
        first, row = row, row + call.num_candidates
        of_candidates = packed[first:row].view(torch.float32).T
        outputs.insert(call.fields.index(PER_CANDIDATE), of_candidates.clone(memory_format=torch.contiguous_format))
    return [*outputs, packed[row:].clone(memory_format=torch.contiguous_format)]


def forward_structs(x: Operands, call: Call, keep_cache: bool) -> list[torch.Tensor]:
    """What `forward` returns, uninitialised."""
    tokens = x.labels.shape[0]
    shapes = [(tokens, call.num_candidates) if name == PER_CANDIDATE else (tokens,) for name in call.fields]
    outputs = [x.hidden.new_empty(shape, dtype=torch.float32) for shape in shapes]
    spec = _spec(x.weight, call)
    saved = x.hidden.new_empty((x.numbers + spec.num_merged, tokens), dtype=torch.int32)
    cache = []
    live = _passes.live_shape(x, call) if keep_cache and tokens else None
    if live is not None:
        cache = [x.hidden.new_empty(live, dtype=torch.int32)]
    elif keep_cache and tokens:
        structs = jax.tree.leaves(_cache_structure(x.hidden, x.weight, x.bias, x.numbers, spec))
        cache = [x.hidden.new_empty(struct.shape, dtype=getattr(torch, struct.dtype.name)) for struct in structs]
    return [*outputs, saved, *cache]


def gradients(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    saved: torch.Tensor,
    cache: Sequence[torch.Tensor | jax.Array],
    cotangents: dict[str, torch.Tensor],
    wanted: tuple[bool, ...],
    call: Call,
    sums: Sums = NO_SUMS,
) -> list[torch.Tensor]:
    """Those of dhidden, dweight and dbias that are wanted, in their operands' dtypes.

    With ``reduce_grad_hidden``, dhidden is summed over the group in float32 and rounded once. (With stored logits, each
    rank rounds before the sum.)
    """
    tokens = hidden.shape[0]
    if tokens == 0:
        return [y.new_zeros(y.shape) for y in those_wanted(hidden, weight, bias, wanted)]
    # The operands may have been freed since the forward.
    if bias is not None or not all(map(is_readable, (hidden, weight, *cotangents.values()))):
        hidden, weight, bias = readable("hidden", hidden), readable("weight", weight), readable("bias", bias)
        cotangents = {name: readable(f"the cotangent of {name}", seed) for name, seed in cotangents.items()}
    reduced = call.reduce_grad_hidden and call.group != tensor_parallel.NO_GROUP

    kept = [y for y in cache if isinstance(y, torch.Tensor)]
    if bias is None and len(kept) == len(cache):
        direct = _passes.gradients(hidden, weight, saved, kept, cotangents, wanted, call, sums)
        if direct is not None:
            return direct
    piece, spec = _rows.whole(tokens), _spec(weight, call)
    kept_as = None
    if cache:
        kept_as = jax.tree.structure(_cache_structure(hidden, weight, bias, len(saved) - spec.num_merged, spec))
    run = _programs.gradients(spec, tuple(cotangents), wanted, not reduced, kept_as)
    seeds = [seed.view(torch.int32) for seed in cotangents.values()]
    per_token = torch.cat([saved, *(seed[None] if seed.ndim == 1 else seed.T for seed in seeds)])
    rows = _rows.pad(hidden, piece.rows), weight, bias, _rows.with_count(per_token.T, piece.rows)
    if sums.total is None:
        (grads,) = _run.run(run, (*rows, None, *cache))
    else:
        *grads, _ = sums.total.after(run, (*rows, *cache), operand=len(rows), place=int(wanted[0]))
    if wanted[0]:
        grads[0] = grads[0][:tokens]
    if wanted[0] and reduced:
        grads[0] = tensor_parallel.all_reduce(grads[0], call.group).to(hidden.dtype)
    return grads


def those_wanted(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, wanted: tuple[bool, ...]
) -> list[torch.Tensor]:
    """The operands whose gradients are wanted."""
    return [x for x, want in zip((hidden, weight, bias), wanted, strict=True) if want and x is not None]


def _spec(weight: torch.Tensor, call: Call) -> Spec:
    """The key of the programs."""
    shards, rank = tensor_parallel.size_and_rank(call.group)
    if type(call.vocab_size) is not int:  # where torch.compile traces
        call = call.of_programs
    return _spec_of(call, int(weight.shape[0]), shards, rank, precision_of(weight))


@functools.cache
def _spec_of(call: Call, rows: int, shards: int, rank: int, precision: str | None) -> Spec:
    return Spec(call.of_programs, rank * rows, call.vocab_size < shards * rows, precision)


def precision_of(weight: torch.Tensor) -> str | None:
    """The option of `lce_jax`: float32 products are as exact as torch's settings ask."""
    if weight.dtype != torch.float32:
        return None
    # This tells what was set by any of torch's functions; torch.get_float32_matmul_precision raises after newer ones.
    products: Any = torch.backends.cuda.matmul if weight.is_cuda else torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    return "highest" if products.fp32_precision in ("none", "ieee") else None


def _tokens(x: Operands, piece: _rows.Piece, call: Call) -> torch.Tensor:
    """Labels, temperature, floor and candidates as `through_jax._programs` describes them."""
    labels = x.labels[piece.tokens].long()
    if labels.stride() != (1,):  # one token counts as contiguous with any stride, and only with 1 has it halves
        labels = labels.clone(memory_format=torch.contiguous_format)
    columns = [labels.view(torch.int32).view(-1, 2)]
    if x.temperature is not None:
        columns.append(x.temperature[piece.tokens].view(torch.int32)[:, None])
    if x.floor is not None:
        columns.append(x.floor[piece.tokens].view(torch.int32)[:, None])
    if x.candidates is not None:
        columns.append(_rows.candidate_ids(x.candidates[piece.tokens], call.vocab_size))
    return _rows.with_count(columns[0] if len(columns) == 1 else torch.cat(columns, 1), piece.rows)


def _cache_structure(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, numbers: int, spec: Spec
) -> Any:
    piece, struct = _rows.whole(int(hidden.shape[0])), jax.ShapeDtypeStruct
    described = _device.device_of(hidden.device)
    return _programs.cache_structure(
        spec,
        runtime.jax_device(hidden.device) if described is None else described,
        struct((piece.rows, int(hidden.shape[1])), _device.struct(hidden).dtype),
        _device.struct(weight),
        None if bias is None else _device.struct(bias),
        struct((1 + (1 + numbers) * piece.rows,), "int32"),
    )
