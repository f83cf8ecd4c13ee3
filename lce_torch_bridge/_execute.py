"""What the two operators do: tensors in, JAX programs and the collectives between them, tensors out."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import torch

from lce_torch_bridge import _direct, _kernels, _launch, _programs, _rows, runtime, tensor_parallel
from lce_torch_bridge import _prepared_forward as prepared_forward
from lce_torch_bridge import _prepared_gradients as prepared_gradients
from lce_torch_bridge._launch import Sum
from lce_torch_bridge._main_grad import nothing_like
from lce_torch_bridge._programs import Spec
from lce_torch_bridge._readable import is_readable, readable
from lce_torch_bridge._types import PER_CANDIDATE, Call, Operands


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
    if _launch.asked() == "kernels" and _direct.on_gpu(x.hidden):
        found = _kernels.forward(x, call, keep_cache)
        if found is not None:
            return found
    if x.bias is None:
        direct = prepared_forward.forward(x, call, keep_cache, lambda: _described(x, call, keep_cache))
        if direct is not None:
            return direct
    pieces = _pieces(tokens, keep_cache)
    spec = _spec(x.weight, call, pieces[0].masked)

    def operands(piece: _rows.Piece) -> Inputs:
        hidden = _rows.pad(x.hidden[piece.tokens], piece.rows)
        return hidden, x.weight, x.bias, _tokens(x, piece, call)

    inputs = list(map(operands, pieces))
    run = _run_alone if call.group == tensor_parallel.NO_GROUP else _run_shard
    packed, cache = run(inputs, spec, call, keep_cache, lend_cache)
    return [*_unpacked(packed, call, tokens), *cache]


def _pieces(tokens: int, keep_cache: bool) -> list[_rows.Piece]:
    """The backward takes all tokens at once, so one cache must hold all of them."""
    return [_rows.whole(tokens)] if keep_cache else _rows.pieces(tokens)


def _described(x: Operands, call: Call, keep_cache: bool) -> prepared_forward.Described:
    """What direct launches are planned from. The ranks of a group send as much as where JAX runs the programs."""
    pieces = _pieces(x.labels.shape[0], keep_cache)
    launched = [_rows.whole(x.labels.shape[0])] if _may_be_exact(x) else pieces
    rows_sent = sum(piece.rows for piece in pieces)
    return prepared_forward.Described(launched, rows_sent, _spec(x.weight, call, launched[0].masked))


class Sums(NamedTuple):
    """What a backward may write to besides its results, where its programs are launched directly."""

    total: Sum | None = None  # dweight, which must be wanted then, is added to it and not returned
    main_grad: torch.Tensor | None = None  # float32: dweight is added to it, and what is returned is empty and sparse
    owns_cache: bool = False  # whether nothing else reads the cache


NO_SUMS = Sums()


type Inputs = tuple[torch.Tensor | None, ...]  # hidden, weight, bias or None, what is per token
type Found = tuple[list[torch.Tensor], list[Any]]  # each piece's packed results, and the first one's cache


def _may_be_exact(x: Operands) -> bool:
    """Whether a program without padding gives each token the same bits as the one with padding, if it is launched.

    XLA adds up in an order that depends on the shapes. Kernels do not, if one launch covers the vocabulary.
    """
    return x.labels.shape[0] in _rows.WHOLE and x.weight.shape[0] <= _rows.ONE_LAUNCH


def _run_alone(inputs: list[Inputs], spec: Spec, call: Call, keep_cache: bool, lend: bool) -> Found:
    """The forward over a vocabulary that is not split."""
    found = _launch.run(_programs.forward(spec, keep_cache, call.fields, call.megatron), *inputs, lend=lend)
    return [packed for packed, *_ in found], found[0][1:]


def _run_shard(inputs: list[Inputs], spec: Spec, call: Call, keep_cache: bool, lend: bool) -> Found:
    """The forward over a split vocabulary, with one collective for all pieces."""
    parts = _launch.run(_programs.statistics(spec, keep_cache), *inputs, lend=lend)
    sent = [packed for packed, *_ in parts]
    gathered = tensor_parallel.gather(sent[0] if len(sent) == 1 else torch.cat(sent, 1), call.group)
    merge = _programs.results(spec, call.fields, call.megatron)
    shards = zip(inputs, gathered.split(sent[0].shape[1], 2), strict=True)
    found = _launch.run(merge, *((each[3], of_shards) for each, of_shards in shards), waits=1)
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

    def described() -> tuple[_rows.Piece, Spec, Callable[[], Any]]:
        piece = _rows.whole(tokens)
        spec = _spec(weight, call, piece.masked)
        operands = hidden, weight, bias, len(saved) - spec.num_merged, spec
        return piece, spec, lambda: jax.tree.structure(_cache_structure(*operands))

    kept = [y for y in cache if isinstance(y, torch.Tensor)]
    if _launch.asked() == "kernels" and bias is None and len(kept) == len(cache):
        found = _kernels.gradients(hidden, weight, saved, kept, cotangents, wanted, call, sums)
        if found is not None:
            return found
    if bias is None and sums.total is None and len(kept) == len(cache):
        owns_cache, adds = sums.owns_cache and bool(kept), sums.main_grad is not None
        how = prepared_gradients.Backward(call, tuple(cotangents), wanted, adds, owns_cache, reduced)
        operands = prepared_gradients.Operands(hidden, weight, saved, kept)
        direct = prepared_gradients.gradients(operands, list(cotangents.values()), sums.main_grad, how, described)
        if direct is not None:
            return direct
    piece, spec, structure = described()
    kept_as = structure() if cache else None
    run = functools.partial(_programs.gradients, spec, tuple(cotangents), wanted, not reduced, kept_as)
    seeds = [seed.view(torch.int32) for seed in cotangents.values()]
    per_token = torch.cat([saved, *(seed[None] if seed.ndim == 1 else seed.T for seed in seeds)])
    rows = _rows.pad(hidden, piece.rows), weight, bias, _rows.with_count(per_token.T, piece.rows)
    grads = _run_backward(run, rows, cache, sums, int(wanted[0]), weight.dtype)
    if wanted[0]:
        grads[0] = grads[0][:tokens]
    if wanted[0] and reduced:
        grads[0] = tensor_parallel.all_reduce(grads[0], call.group).to(hidden.dtype)
    return grads


def _run_backward(
    run: Callable[..., Any], rows: Inputs, cache: Sequence[Any], sums: Sums, place: int, dtype: torch.dtype
) -> list[Any]:
    """The results of a program that `_programs.gradients` makes; dweight is the one at ``place``, of that dtype."""
    overwriting = run(overwrite_cache=sums.owns_cache and bool(cache))
    if sums.total is not None:
        *grads, _ = sums.total.after(run(), overwriting, (*rows, *cache), operand=len(rows), place=place)
        return grads
    operands = (*rows, sums.main_grad, *cache)
    found = None
    if sums.main_grad is not None or (sums.owns_cache and cache):
        owned = range(len(rows) + (sums.main_grad is None), len(operands) if sums.owns_cache else len(rows) + 1)
        given = {} if sums.main_grad is None else {place: sums.main_grad}
        found = _launch.in_place(overwriting, operands, owned, given)
    if found is None:
        return _launch.run(run(), (*rows, None, *cache))[0]
    if sums.main_grad is None:
        return found
    left = nothing_like(sums.main_grad, dtype)
    return [*found[:place], left, *found[place:-1]]


def programs(x: Operands, call: Call) -> list[tuple[Any, list[Any]]]:
    """The programs of a forward and of a backward through all results, with the shapes of their inputs."""
    tokens, keep_cache = x.labels.shape[0], call.keeps_tiles
    whole = _rows.whole(tokens)
    piece = whole if keep_cache or _may_be_exact(x) else _rows.pieces(tokens)[0]
    spec, back = (_spec(x.weight, call, each.masked) for each in (piece, whole))
    structs = [None if y is None else _direct.struct(y) for y in (x.weight, x.bias)]

    def inputs(rows: int, columns: int) -> list[Any]:
        hidden = jax.ShapeDtypeStruct((rows, x.hidden.shape[1]), _direct.struct(x.hidden).dtype)
        return [hidden, *structs, jax.ShapeDtypeStruct((1 + rows * columns,), "int32")]

    alone = call.group == tensor_parallel.NO_GROUP
    of_fields = call.fields, call.megatron
    forward = _programs.forward(spec, keep_cache, *of_fields) if alone else _programs.statistics(spec, keep_cache)
    structure = cache = None
    if keep_cache:
        cache = _cache_structure(x.hidden, x.weight, x.bias, x.numbers, back)
        structure = jax.tree.structure(cache)
    seeds = sum(call.num_candidates if name == PER_CANDIDATE else 1 for name in call.differentiable)
    wanted = (True, True, x.bias is not None)
    backward = _programs.gradients(back, call.differentiable, wanted, not call.reduce_grad_hidden, structure)
    saved = x.numbers + back.num_merged + seeds
    return [
        (forward, inputs(piece.rows, 1 + x.numbers)),
        (backward, [*inputs(whole.rows, saved), None, *jax.tree.leaves(cache)]),
    ]


def those_wanted(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, wanted: tuple[bool, ...]
) -> list[torch.Tensor]:
    """The operands whose gradients are wanted."""
    return [x for x, want in zip((hidden, weight, bias), wanted, strict=True) if want and x is not None]


def _spec(weight: torch.Tensor, call: Call, masked: bool) -> Spec:
    """The key of the programs."""
    shards, rank = tensor_parallel.size_and_rank(call.group)
    if type(call.vocab_size) is not int:  # where torch.compile traces
        call = call.of_programs
    return _spec_of(call, int(weight.shape[0]), shards, rank, precision_of(weight), masked)


@functools.cache
def _spec_of(call: Call, rows: int, shards: int, rank: int, precision: str | None, masked: bool) -> Spec:
    return Spec(call.of_programs, rank * rows, call.vocab_size < shards * rows, precision, masked)


def precision_of(weight: torch.Tensor) -> str | None:
    """The option of `lce_jax`: float32 products are as exact as torch's settings ask."""
    if weight.dtype != torch.float32:
        return None
    # This tells what was set by any of torch's functions; torch.get_float32_matmul_precision raises after newer ones.
    products: Any = torch.backends.cuda.matmul if weight.is_cuda else torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    return "highest" if products.fp32_precision in ("none", "ieee") else None


def _tokens(x: Operands, piece: _rows.Piece, call: Call) -> torch.Tensor:
    """Labels, temperature and candidates as `_programs` describes them."""
    labels = x.labels[piece.tokens].long()
    if labels.stride() != (1,):  # one token counts as contiguous with any stride, and only with 1 has it halves
        labels = labels.clone(memory_format=torch.contiguous_format)
    columns = [labels.view(torch.int32).view(-1, 2)]
    if x.temperature is not None:
        columns.append(x.temperature[piece.tokens].view(torch.int32)[:, None])
    if x.candidates is not None:
        columns.append(_rows.candidate_ids(x.candidates[piece.tokens], call.vocab_size))
    return _rows.with_count(columns[0] if len(columns) == 1 else torch.cat(columns, 1), piece.rows)


def _cache_structure(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, numbers: int, spec: Spec
) -> Any:
    piece, struct = _rows.whole(int(hidden.shape[0])), jax.ShapeDtypeStruct
    described = _direct.device_of(hidden.device)
    return _programs.cache_structure(
        spec._replace(masked=piece.masked),
        runtime.jax_device(hidden.device) if described is None else described,
        struct((piece.rows, int(hidden.shape[1])), _direct.struct(hidden).dtype),
        _direct.struct(weight),
        None if bias is None else _direct.struct(bias),
        struct((1 + (1 + numbers) * piece.rows,), "int32"),
    )
