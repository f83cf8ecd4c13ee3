"""What the two operators do: tensors in, JAX programs and the collectives between them, tensors out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import torch

from lce_torch_bridge import _programs, _rows, runtime, tensor_parallel
from lce_torch_bridge._programs import Spec
from lce_torch_bridge._types import PER_CANDIDATE, Call, Operands
from lce_torch_bridge.dlpack import to_jax, to_torch_all


def forward(x: Operands, call: Call, keep_cache: bool, lend_cache: bool = True) -> list[Any]:
    """The outputs, what the backward needs per token ``[S, T]``, and the cache.

    Autograd keeps the cache as tensors. A caller who goes on to `gradients` at once takes JAX's own arrays, with
    ``lend_cache`` False: JAX reuses their memory as soon as they are dropped, in stream order, while a tensor that it
    was lent it holds until the GPU is done. The host may be many programs ahead.
    """
    tokens = x.labels.shape[0]
    if tokens == 0:
        return forward_structs(x, call, keep_cache)
    tensor_parallel.check_equal_parts(x.weight, call.group)
    # The backward takes all tokens at once, so one cache must hold all of them.
    pieces = [_rows.whole(tokens)] if keep_cache else _rows.pieces(tokens)
    spec = _spec(x.weight, call, pieces[0].masked)
    with runtime.beside(x.hidden):
        inputs = _import(x.hidden, x.weight, x.bias, [_tokens(x, piece, call) for piece in pieces], pieces)
        run = _run_alone if call.group == tensor_parallel.NO_GROUP else _run_shard
        packed, cache = run(inputs, spec, call, keep_cache)
        return [*_unpacked(packed, call, tokens), *(to_torch_all(cache) if lend_cache else cache)]


type Inputs = tuple[Any, ...]  # hidden, weight, bias or None, what is per token, leaves of the cache
type Found = tuple[list[torch.Tensor], list[jax.Array]]  # each piece's packed results, and the first one's cache


def _run_alone(inputs: list[Inputs], spec: Spec, call: Call, keep_cache: bool) -> Found:
    """The forward over a vocabulary that is not split."""
    run = _programs.forward(spec, keep_cache, call.fields, call.megatron)
    found = [run(*each) for each in inputs]
    return to_torch_all([packed for packed, _ in found]), found[0][1]


def _run_shard(inputs: list[Inputs], spec: Spec, call: Call, keep_cache: bool) -> Found:
    """The forward over a split vocabulary, with one collective for all pieces."""
    run = _programs.statistics(spec, keep_cache)
    parts = [run(*each) for each in inputs]
    gathered = tensor_parallel.gather(torch.stack(to_torch_all([packed for packed, _ in parts])), call.group)
    imported = [to_jax(shards) for shards in gathered.unbind(1)]  # kept until the results of their readers are exported
    merge = _programs.results(spec, call.fields, call.megatron)
    found = [merge(each[3], shards) for each, shards in zip(inputs, imported, strict=True)]
    return to_torch_all(found), parts[0][1]


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
    spec = _spec(x.weight, call, masked=True)
    saved = x.hidden.new_empty((x.numbers + spec.num_merged, tokens), dtype=torch.int32)
    cache = []
    if keep_cache and tokens:
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
    total: WeightSum | None = None,
) -> list[torch.Tensor]:
    """Those of dhidden, dweight and dbias that are wanted, in their operands' dtypes.

    With ``reduce_grad_hidden``, dhidden is summed over the group in float32 and rounded once. (With stored logits, each
    rank rounds before the sum.) With ``total``, dweight, which must be wanted then, is added to it and not returned.
    """
    tokens = hidden.shape[0]
    if tokens == 0:
        return [y.new_zeros(y.shape) for y in those_wanted(hidden, weight, bias, wanted)]
    piece = _rows.whole(tokens)
    spec = _spec(weight, call, piece.masked)
    reduced = call.reduce_grad_hidden and call.group != tensor_parallel.NO_GROUP
    structure = None
    if cache:
        structure = jax.tree.structure(_cache_structure(hidden, weight, bias, len(saved) - spec.num_merged, spec))
    run = _programs.gradients(spec, tuple(cotangents), wanted, not reduced, structure)
    seeds = [seed.view(torch.int32) for seed in cotangents.values()]
    per_token = torch.cat([saved, *(seed[None] if seed.ndim == 1 else seed.T for seed in seeds)])
    with runtime.beside(hidden):
        (inputs,) = _import(hidden, weight, bias, [_rows.with_count(per_token.T, piece.rows)], [piece], cache)
        if total is None:
            grads = to_torch_all(run(*inputs[:4], None, *inputs[4:]))
        else:
            grads = total.after(run, inputs, place=int(wanted[0]))
        if wanted[0]:
            grads[0] = grads[0][:tokens]
        if wanted[0] and reduced:
            grads[0] = tensor_parallel.all_reduce(grads[0], call.group).to(hidden.dtype)
        return grads


class WeightSum:
    """A sum of dweight in float32: an array of JAX's, which each call of `gradients` overwrites."""

    def __init__(self, weight: torch.Tensor) -> None:
        with runtime.beside(weight):
            self._array = jnp.zeros(tuple(weight.shape), jnp.float32)

    def after(self, run: Callable[..., list[jax.Array]], inputs: Inputs, place: int) -> list[torch.Tensor]:
        """What a program returns besides the sum, which stands at ``place`` among its results."""
        found = run(*inputs[:4], self._array, *inputs[4:])
        self._array = found.pop(place)
        return to_torch_all(found)[:-1]  # the last one says that the program is done

    def taken(self) -> torch.Tensor:
        """The sum. Nothing can be added to it afterwards."""
        (total,) = to_torch_all([self._array])
        del self._array
        return total


def those_wanted(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, wanted: tuple[bool, ...]
) -> list[torch.Tensor]:
    """The operands whose gradients are wanted."""
    return [x for x, want in zip((hidden, weight, bias), wanted, strict=True) if want and x is not None]


def _spec(weight: torch.Tensor, call: Call, masked: bool) -> Spec:
    """The key of the programs."""
    shards, rank = tensor_parallel.size_and_rank(call.group)
    return Spec(
        call=call.of_programs,
        vocab_start=rank * int(weight.shape[0]),
        padded=bool(call.vocab_size < shards * weight.shape[0]),
        precision=precision_of(weight),
        masked=masked,
    )


def precision_of(weight: torch.Tensor) -> str | None:
    """The option of `lce_jax`: float32 products are as exact as torch's settings ask."""
    # This tells what was set by any of torch's functions; torch.get_float32_matmul_precision raises after newer ones.
    products: Any = torch.backends.cuda.matmul if weight.is_cuda else torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    return "highest" if weight.dtype == torch.float32 and products.fp32_precision in ("none", "ieee") else None


def _import(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    per_token: list[torch.Tensor],
    pieces: list[_rows.Piece],
    cache: Sequence[torch.Tensor | jax.Array] = (),
) -> list[Inputs]:
    """The inputs of each piece's program. Only ``per_token`` waits for torch's stream: every program uses it."""
    shared = [None if x is None else to_jax(x, wait=False) for x in (weight, bias)]
    leaves = [leaf if isinstance(leaf, jax.Array) else to_jax(leaf, wait=False) for leaf in cache]

    def operands(piece: _rows.Piece, rows: torch.Tensor) -> Inputs:
        padded, waiting = to_jax(_rows.pad(hidden[piece.tokens], piece.rows), wait=False), to_jax(rows)
        return padded, *shared, waiting, *leaves

    return list(map(operands, pieces, per_token))


def _tokens(x: Operands, piece: _rows.Piece, call: Call) -> torch.Tensor:
    """Labels, temperature and candidates as `_programs` describes them."""
    columns = [x.labels[piece.tokens].long().contiguous().view(torch.int32).view(-1, 2)]
    if x.temperature is not None:
        columns.append(x.temperature[piece.tokens].view(torch.int32)[:, None])
    if x.candidates is not None:
        columns.append(x.candidates[piece.tokens].long().clamp(-1, call.vocab_size).int())  # 2³² + 3 stays outside
    return _rows.with_count(columns[0] if len(columns) == 1 else torch.cat(columns, 1), piece.rows)


def _cache_structure(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, numbers: int, spec: Spec
) -> Any:
    piece, struct = _rows.whole(int(hidden.shape[0])), jax.ShapeDtypeStruct
    return _programs.cache_structure(
        spec._replace(masked=piece.masked),
        runtime.jax_device(hidden.device),
        struct((piece.rows, int(hidden.shape[1])), _dtype_name(hidden)),
        struct(tuple(map(int, weight.shape)), _dtype_name(weight)),
        None if bias is None else struct(tuple(map(int, bias.shape)), _dtype_name(bias)),
        struct((1 + (1 + numbers) * piece.rows,), "int32"),
    )


def _dtype_name(x: torch.Tensor) -> str:
    return str(x.dtype).removeprefix("torch.")
