"""The forward and the backward of `linear_logprobs` by programs of JAX, and the collectives between them.

    statistics   hidden, weight, bias, tokens               ->  this shard's statistics, packed [F, P], and its cache
    results      tokens, the shards' statistics [N, F, P]   ->  outputs and what the backward needs, packed [O + S, P]
    whole        both in one, for a vocabulary that is not split
    pull_back    operands, cache and a sum of dweight       ->  those of dhidden, dweight and dbias that are wanted

``tokens`` has two columns for the halves of each int64 label, one for the temperature and one for the floor, if there
is one, and K for candidates, if there are any. S is the label and the others as they are there, and the merged
statistics; `pull_back` takes columns of S and the cotangents. What is [P, K] here is K rows of what is packed.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import torch
from jax import lax

from lce_jax.run import _local
from lce_jax.run._local import Primals
from lce_torch_bridge._types import PER_CANDIDATE, Sums, Tensors, TorchCall
from lce_torch_bridge.tensors import _device, _padding, _tensor_parallel
from lce_torch_bridge.through_jax import _programs
from lce_torch_bridge.through_jax import _runtime as runtime
from lce_torch_bridge.through_jax._programs import (
    ProgramKey,
    as_rows,
    counted,
    key_of,
    logit_options,
    of_equal_tags,
    program,
    tags_of,
    with_tags,
)

type Inputs = tuple[torch.Tensor | None, ...]  # hidden, weight, bias or None, what is per token


def forward(x: Tensors, call: TorchCall, keep_cache: bool, lend_cache: bool) -> list[Any]:
    """What `operators._execute.forward` returns."""
    tokens, key, fields = x.labels.shape[0], key_of(call, x.weight), call.fields
    # The backward takes all tokens at once, so one cache must hold all of them.
    pieces = _padding.pieces(tokens, at_once=keep_cache)
    inputs = [
        (_padding.pad(x.hidden[piece.tokens], piece.rows), x.weight, x.bias, _tokens(x, piece, call))
        for piece in pieces
    ]
    if key.shards == 1:
        whole_of = program(whole, key, keep_cache, fields, call.megatron)
        found = _programs.run(whole_of, *inputs, lend=lend_cache)
        packed = [first for first, *_ in found]
    else:
        found = _programs.run(program(statistics, key, keep_cache), *inputs, lend=lend_cache)
        packed = _merged([first for first, *_ in found], inputs, key, call)
    cache = found[0][1:]  # a forward that keeps one takes a single piece
    return [*_unpacked(packed, fields, call.jax.num_candidates, tokens), *cache]


def _merged(sent: list[torch.Tensor], inputs: Sequence[Inputs], key: ProgramKey, call: TorchCall) -> list[torch.Tensor]:
    """The pieces' results from the statistics of all ranks, with one collective for all pieces."""
    gathered = _tensor_parallel.gather(sent[0] if len(sent) == 1 else torch.cat(sent, 1), call.group)
    of_pieces = zip(inputs, gathered.split(sent[0].shape[1], 2), strict=True)
    merge = program(results, key, call.fields, call.megatron)
    return [packed for (packed,) in _programs.run(merge, *[(given[3], every) for given, every in of_pieces], waits=1)]


def _unpacked(
    parts: list[torch.Tensor], fields: tuple[str, ...], num_candidates: int, tokens: int
) -> list[torch.Tensor]:
    """The outputs, one by one, and what the backward needs, from the pieces' packed results without the padding.

    They are copies in torch's memory: a view could not be written in place, and ``record_stream`` does not reach JAX's.
    """
    packed = (parts[0] if len(parts) == 1 else torch.cat(parts, 1)).narrow(1, 0, tokens)
    row = len(fields) - (num_candidates > 0)
    outputs: Any = torch.unbind_copy(packed[:row].view(torch.float32))  # type: ignore[func-returns-value]
    outputs = list(outputs)
    if num_candidates:
        first, row = row, row + num_candidates
        of_candidates = packed[first:row].view(torch.float32).T
        outputs.insert(fields.index(PER_CANDIDATE), of_candidates.clone(memory_format=torch.contiguous_format))
    return [*outputs, packed[row:].clone(memory_format=torch.contiguous_format)]


def _tokens(x: Tensors, piece: _padding.Piece, call: TorchCall) -> torch.Tensor:
    """Labels, temperature, floor and candidates, packed."""
    labels = x.labels[piece.tokens].long()
    if labels.stride() != (1,):  # one token counts as contiguous with any stride, and only with 1 has it halves
        labels = labels.clone(memory_format=torch.contiguous_format)
    columns = [labels.view(torch.int32).view(-1, 2)]
    columns += [y[piece.tokens].view(torch.int32)[:, None] for y in (x.temperature, x.floor) if y is not None]
    if x.candidates is not None:
        columns.append(_padding.candidate_ids(x.candidates[piece.tokens], call.jax.vocab_size))
    return _padding.with_count(columns[0] if len(columns) == 1 else torch.cat(columns, 1), piece.rows)


def structs(x: Tensors, call: TorchCall, keep_cache: bool) -> list[torch.Tensor]:
    """What `forward` returns, uninitialised."""
    tokens = x.hidden.shape[0]
    shapes = [(tokens, call.jax.num_candidates) if name == PER_CANDIDATE else (tokens,) for name in call.fields]
    cache = []
    if keep_cache:
        structs = jax.tree.leaves(cache_structure(x.hidden, x.weight, x.bias, x.numbers, key_of(call, x.weight)))
        cache = [x.hidden.new_empty(struct.shape, dtype=getattr(torch, struct.dtype.name)) for struct in structs]
    outputs = [x.hidden.new_empty(shape, dtype=torch.float32) for shape in shapes]
    numbers = x.numbers + sum(merged_fields(call).values())
    return [*outputs, x.hidden.new_empty((numbers, tokens), dtype=torch.int32), *cache]


def gradients(
    x: Tensors,
    kept: Sequence[torch.Tensor | jax.Array],
    cotangents: dict[str, torch.Tensor],
    requested_gradients: tuple[bool, ...],
    call: TorchCall,
    sums: Sums,
) -> list[torch.Tensor]:
    """What `operators._execute.gradients` returns."""
    (hidden, weight, bias, *_), (saved, *cache) = x, list[Any](kept)
    rows, key = _padding.size(hidden.shape[0]), key_of(call, weight)
    tree = None
    if cache:
        numbers = len(saved) - sum(merged_fields(call).values())
        tree = jax.tree.structure(cache_structure(hidden, weight, bias, numbers, key))
    run = program(
        pull_back, key, tuple(cotangents), requested_gradients, not call.reduce_grad_hidden, tree, donate=(4,)
    )
    seeds = [seed.view(torch.int32) for seed in cotangents.values()]
    per_token = torch.cat([saved, *[seed[None] if seed.ndim == 1 else seed.T for seed in seeds]])
    given = _padding.pad(hidden, rows), weight, bias, _padding.with_count(per_token.T, rows)
    if sums.total is None:
        (grads,) = _programs.run(run, (*given, None, *cache))
    else:
        *grads, _ = sums.total.after(run, (*given, *cache), operand=len(given), place=int(requested_gradients[0]))
    if requested_gradients[0]:
        grads[0] = grads[0][: hidden.shape[0]]
        if call.reduce_grad_hidden:
            grads[0] = _tensor_parallel.total_dhidden(grads[0], hidden.dtype, call.group)
    return grads


def cache_structure(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, numbers: int, key: ProgramKey
) -> Any:
    """The cache of a forward whose tokens come with so many numbers: the shapes of its leaves, and its tree."""
    rows, struct = _padding.size(int(hidden.shape[0])), jax.ShapeDtypeStruct
    return runtime.shapes_on(
        runtime.planned_on(hidden.device),
        _cache,
        key,
        struct((rows, int(hidden.shape[1])), _device.name_of(hidden.dtype)),
        _device.struct(weight),
        None if bias is None else _device.struct(bias),
        struct((1 + (1 + numbers) * rows,), "int32"),
    )


@functools.cache
def merged_fields(call: TorchCall) -> dict[str, int]:
    """The statistics that the backward needs of the whole vocabulary, and how many numbers per token each is."""
    return call.jax.replace(stats=False, mean_logit=False).statistics


def statistics(key: ProgramKey, keep_cache: bool, hidden: Any, weight: Any, bias: Any, packed: Any) -> Any:
    """``packed statistics, cache leaves``. The last row of the packed ones are the tokens' tags."""
    tokens = _given(key, packed, hidden.shape[0])
    stats, leaves = _statistics(key, keep_cache, hidden, weight, bias, tokens)
    num_rows, *columns = tokens
    return with_tags(stats, tags_of(columns, num_rows, weight.shape[0], *logit_options(key.call))), leaves


def results(key: ProgramKey, fields: tuple[str, ...], megatron: bool, packed: Any, gathered: Any) -> Any:
    """``fields`` of `LogprobOutput`, then S, packed; NaN where tags differ."""
    tokens, (parts, agree) = _given(key, packed, gathered.shape[-1]), of_equal_tags(gathered)
    found, saved = _results(key, fields, megatron, tokens, parts)
    found = {name: jnp.where(agree if x.ndim == 1 else agree[:, None], x, jnp.nan) for name, x in found.items()}
    return _packed(found, saved)


def whole(
    key: ProgramKey, keep_cache: bool, fields: tuple[str, ...], megatron: bool,
    hidden: Any, weight: Any, bias: Any, packed: Any,
) -> Any:  # fmt: skip
    """``packed, cache leaves``, as `statistics` and `results` in one program."""
    tokens = _given(key, packed, hidden.shape[0])
    stats, cache = _statistics(key, keep_cache, hidden, weight, bias, tokens)
    return _packed(*_results(key, fields, megatron, tokens, stats[None])), cache


def pull_back(
    key: ProgramKey, cotangents: tuple[str, ...], requested_gradients: tuple[bool, ...], rounded: bool, cache: Any,
    hidden: Any, weight: Any, bias: Any, per_token: Any, total: Any, *leaves: Any,
) -> list[Any]:  # fmt: skip
    """Those of dhidden, dweight and dbias that are ``wanted``, from S and the cotangents.

    A gradient that is not wanted is no output, and the compiler drops its product. Without a cotangent of the entropy,
    the entropy's part is left out. ``rounded``: dhidden is in hidden's dtype, because no sum over the group follows.

    With a float32 sum, which it overwrites, dweight is added to that. The results end in one number of dweight then:
    what torch reads to know that the program is done.
    """
    entropy = "entropy" in cotangents
    num_rows, saved, seeds = _seeds(key, per_token, hidden.shape[0], cotangents)
    first = len(saved) - sum(merged_fields(key.call).values())
    tokens = ShardTokens(num_rows, saved[0], *_beside_labels(key, saved[1:first]))
    merged = _local.unpack(lax.bitcast_convert_type(saved[first:], jnp.float32), merged_fields(key.call))
    if PER_CANDIDATE not in seeds:  # they add nothing to any gradient
        tokens, merged = tokens._replace(candidates=None), merged._replace(candidates=None)
    part = _part(key, hidden, weight, bias, tokens, entropy=entropy, mean_logit="mean_logit" in seeds)
    zero = jnp.zeros(tokens.labels.shape, jnp.float32)
    seed = _local.LogprobOutput(*(seeds.get(name, zero) for name in _local.LogprobOutput._fields[:3]))
    seed = seed._replace(candidate_logprobs=seeds.get(PER_CANDIDATE))
    dmean = seeds["mean_logit"] / key.call.jax.vocab_size * part.call.vocab_size if part.call.mean_logit else None
    found = part.gradients(
        merged if entropy else merged._replace(weighted=None),
        _local.Results(seed, dmean),
        None if cache is None else jax.tree.unflatten(cache, leaves),
        dweight=total,
        may_round_dhidden=rounded and hidden.dtype == weight.dtype,
    )
    dhidden = found.hidden.astype(hidden.dtype) if rounded else found.hidden
    dbias = found.adapter if key.call.jax.rank else found.bias
    grads = [dhidden, found.weight, None if dbias is None else dbias.astype(bias.dtype)]
    given = [grad for grad, want in zip(grads, requested_gradients, strict=False) if want]  # without a bias, no dbias
    return given if total is None else [*given, found.weight[0, :1]]


def _cache(key: ProgramKey, hidden: Any, weight: Any, bias: Any, packed: Any) -> Any:
    """The cache of `statistics`."""
    tokens = _given(key, packed, hidden.shape[0])
    return _part(key, hidden, weight, bias, tokens).statistics(keep_cache=True)[1]


class ShardTokens(NamedTuple):
    """What is per token, unpacked."""

    num_rows: Any  # how many rows count
    labels: Any  # [P] at most one off the vocabulary
    temperature: Any  # [P], or None
    floor: Any  # [P], or None
    candidates: Any  # [P, K] likewise, or None


def _statistics(
    key: ProgramKey, keep_cache: bool, hidden: Any, weight: Any, bias: Any, tokens: ShardTokens
) -> tuple[Any, list[Any]]:
    """The statistics of a shard, packed, and the cache's leaves."""
    part = _part(key, hidden, weight, bias, tokens, mean_logit=key.call.jax.mean_logit)
    stats, cache = part.statistics(keep_cache)
    return _local.pack(stats), jax.tree.leaves(cache) if keep_cache else []


def _results(
    key: ProgramKey, fields: tuple[str, ...], megatron: bool, tokens: ShardTokens, gathered: Any
) -> tuple[dict[str, Any], Any]:
    """``fields`` by name, and S."""
    num_rows, labels, temperature, floor, candidates = tokens
    outside = (labels < 0) | (labels >= key.call.jax.vocab_size)
    logit_options = {name: getattr(key.call.jax, name) for name in ("vocab_size", "logit_scale", "logit_softcap")}
    where = jnp.arange(labels.shape[0], dtype=jnp.int32) < num_rows
    parts = _local.unpack(gathered, key.call.jax.statistics)
    merged, (out, mean) = _local.results(parts, jnp.where(outside, -1, labels), where, temperature, **logit_options)
    if megatron:
        # Its predicted logit is left at 0 once the maximum has been subtracted: -ln Σ e^(z - max), which is max - lse.
        sumexp = jnp.where(merged.sumexp == 0, 1.0, merged.sumexp)  # no token reaches the floor: 0, as elsewhere
        out = out._replace(logprobs=jnp.where(outside, -jnp.log(sumexp), out.logprobs))
    by_name = out._asdict() | {"mean_logit": mean}
    forward_only: dict[str, Any] = dict.fromkeys(key.call.jax.statistics.keys() - merged_fields(key.call).keys())
    kept = _local.pack(merged._replace(**forward_only))
    saved = as_rows(*(x for x in (labels, temperature, floor, candidates) if x is not None), kept.T)
    return {name: by_name[name] for name in fields}, saved


def _packed(found: dict[str, Any], saved: Any) -> Any:
    """The results ``[O + S, P]``, those of candidates after the others."""
    return as_rows(*(found[name] for name in sorted(found, key=PER_CANDIDATE.__eq__)), saved.T)


def _given(key: ProgramKey, packed: Any, rows: int) -> ShardTokens:
    """What is per token in a forward."""
    num_rows, columns = counted(packed, rows)
    low, high = columns[:2]  # the halves of int64 numbers, which JAX would take modulo 2³²: 2³² + 3 would become 3
    far = jnp.where(high < 0, -1, key.call.jax.vocab_size)
    labels = jnp.where(high == low >> 31, jnp.clip(low, -1, key.call.jax.vocab_size), far)
    return ShardTokens(num_rows, labels, *_beside_labels(key, columns[2:]))


def _beside_labels(key: ProgramKey, bits: Any) -> tuple[Any, Any, Any]:
    """The temperature, the floor and the candidates."""
    count, has_floor = key.call.jax.num_candidates, key.call.jax.has_floor
    floats = lax.bitcast_convert_type(bits[: len(bits) - count], jnp.float32)
    temperature = floats[0] if len(floats) > has_floor else None
    return temperature, floats[-1] if has_floor else None, bits[len(bits) - count :].T if count else None


def _seeds(key: ProgramKey, packed: Any, rows: int, names: tuple[str, ...]) -> tuple[Any, Any, dict[str, Any]]:
    """How many rows count, S, and the cotangents by name."""
    num_rows, columns = counted(packed, rows)
    width = sum(key.call.jax.num_candidates if name == PER_CANDIDATE else 1 for name in names)
    row, seeds = len(columns) - width, {}
    for name in names:
        last = row + (key.call.jax.num_candidates if name == PER_CANDIDATE else 1)
        floats = lax.bitcast_convert_type(columns[row:last], jnp.float32)
        seeds[name], row = floats.T if name == PER_CANDIDATE else floats[0], last
    return num_rows, columns[: len(columns) - width], seeds


def _part(
    key: ProgramKey, hidden: Any, weight: Any, bias: Any, tokens: ShardTokens, **options: Any
) -> _local.LogprobPart:
    start, vocab_size = key.part(weight.shape[0])
    options = {"mean_logit": False, "num_candidates": key.call.jax.num_candidates, **options}
    if tokens.candidates is None:
        options["num_candidates"] = 0
    call = key.call.jax.replace(caller_vocab_size=vocab_size, precision=key.precision, **options)
    per_token = tokens.labels, tokens.temperature, tokens.candidates, tokens.floor
    primals = Primals(hidden, weight, adapter=bias) if call.rank else Primals(hidden, weight, bias)
    return _local.LogprobPart.of(call, primals, *per_token, start, tokens.num_rows)
