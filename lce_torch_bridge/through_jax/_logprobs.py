"""The forward and the backward of `linear_logprobs` as programs of JAX, and the collectives between the programs.

    statistics     hidden, weight, bias, tokens               ->  this shard's statistics, packed [F, P], and its cache
    results        tokens, the shards' statistics [N, F, P]   ->  results and saved values, packed [O + S, P]
    single_shard   `statistics` and `results` in one program, for a vocabulary that is not split
    pull_back      operands, cache and a sum of dweight       ->  those of dhidden, dweight, dbias that are requested

`operators._operators` calls `forward`, `make_empty` and `gradients`.

``tokens`` has two columns for the halves of each int64 label, then, if they were passed, one for the temperature, one
for the floor, and K for candidates. The saved values S are the label; the temperature, floor and candidates if they
were passed; and the merged statistics. `pull_back` gets the columns of S and of the cotangents. An array [P, K] takes K
rows of a packed array.
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
    append_tags,
    build_program,
    check_tags,
    logit_options,
    make_key,
    make_tags,
    pack_arrays,
    unpack_rows,
)

type Inputs = tuple[torch.Tensor | None, ...]  # hidden, weight, bias or None, packed tokens


def forward(x: Tensors, call: TorchCall, keep_cache: bool, lend_cache: bool) -> list[Any]:
    """Returns the results, the saved values and the cache, as `operators._operators.run_forward` does."""
    tokens, key, fields = x.labels.shape[0], make_key(call, x.weight), call.fields
    # The backward processes all tokens at once, so one cache must hold all of them.
    pieces = _padding.pieces(tokens, at_once=keep_cache)
    inputs = [
        (_padding.pad(x.hidden[piece.tokens], piece.rows), x.weight, x.bias, _pack_tokens(x, piece, call))
        for piece in pieces
    ]
    if key.shards == 1:
        program = build_program(single_shard, key, keep_cache, fields, call.megatron)
        outputs = _programs.run(program, *inputs, lend=lend_cache)
        packed = [first for first, *_ in outputs]
    else:
        outputs = _programs.run(build_program(statistics, key, keep_cache), *inputs, lend=lend_cache)
        packed = _merge_ranks([first for first, *_ in outputs], inputs, key, call)
    cache = outputs[0][1:]  # a forward that saves a cache has a single piece
    return [*_unpack_results(packed, fields, call.jax.num_candidates, tokens), *cache]


def _merge_ranks(
    sent: list[torch.Tensor], inputs: Sequence[Inputs], key: ProgramKey, call: TorchCall
) -> list[torch.Tensor]:
    """Merges this rank's statistics of each piece with the other ranks', in one collective. Returns packed results."""
    gathered = _tensor_parallel.gather(sent[0] if len(sent) == 1 else torch.cat(sent, 1), call.group)
    pieces = zip(inputs, gathered.split(sent[0].shape[1], 2), strict=True)
    merge = build_program(results, key, call.fields, call.megatron)
    outputs = _programs.run(merge, *[(operands[3], all_ranks) for operands, all_ranks in pieces], waits=1)
    return [packed for (packed,) in outputs]


def _unpack_results(
    pieces: list[torch.Tensor], fields: tuple[str, ...], num_candidates: int, tokens: int
) -> list[torch.Tensor]:
    """Unpacks the results of all pieces: returns each result, then the saved values, without padding.

    These are copies in torch's memory, because callers may write to results in place, and ``record_stream`` has no
    effect on JAX's memory.
    """
    packed = (pieces[0] if len(pieces) == 1 else torch.cat(pieces, 1)).narrow(1, 0, tokens)
    row = len(fields) - (num_candidates > 0)
    outputs: Any = torch.unbind_copy(packed[:row].view(torch.float32))  # type: ignore[func-returns-value]
    outputs = list(outputs)
    if num_candidates:
        first, row = row, row + num_candidates
        candidate_logprobs = packed[first:row].view(torch.float32).T
        outputs.insert(fields.index(PER_CANDIDATE), candidate_logprobs.clone(memory_format=torch.contiguous_format))
    return [*outputs, packed[row:].clone(memory_format=torch.contiguous_format)]


def _pack_tokens(x: Tensors, piece: _padding.Piece, call: TorchCall) -> torch.Tensor:
    """Returns labels, temperature, floor and candidates of a piece, packed."""
    labels = x.labels[piece.tokens].long()
    if labels.stride() != (1,):  # one label is contiguous with any stride, but a view of halves needs stride 1
        labels = labels.clone(memory_format=torch.contiguous_format)
    columns = [labels.view(torch.int32).view(-1, 2)]
    columns += [y[piece.tokens].view(torch.int32)[:, None] for y in (x.temperature, x.floor) if y is not None]
    if x.candidates is not None:
        columns.append(_padding.candidate_ids(x.candidates[piece.tokens], call.jax.vocab_size))
    return _padding.pack_rows(columns[0] if len(columns) == 1 else torch.cat(columns, 1), piece.rows)


def make_empty(x: Tensors, call: TorchCall, keep_cache: bool) -> list[torch.Tensor]:
    """Returns uninitialised tensors of the shapes and dtypes that `forward` returns."""
    tokens = x.hidden.shape[0]
    shapes = [(tokens, call.jax.num_candidates) if name == PER_CANDIDATE else (tokens,) for name in call.fields]
    cache = []
    if keep_cache:
        leaves = jax.tree.leaves(infer_cache(x.hidden, x.weight, x.bias, x.numbers_per_token, make_key(call, x.weight)))
        cache = [x.hidden.new_empty(leaf.shape, dtype=getattr(torch, leaf.dtype.name)) for leaf in leaves]
    outputs = [x.hidden.new_empty(shape, dtype=torch.float32) for shape in shapes]
    numbers = x.numbers_per_token + sum(merged_fields(call).values())
    return [*outputs, x.hidden.new_empty((numbers, tokens), dtype=torch.int32), *cache]


def gradients(
    x: Tensors,
    residuals: Sequence[torch.Tensor | jax.Array],
    cotangents: dict[str, torch.Tensor],
    requested_gradients: tuple[bool, ...],
    call: TorchCall,
    sums: Sums,
) -> list[torch.Tensor]:
    """Returns the requested gradients, as `operators._operators.run_backward` does."""
    (hidden, weight, bias, *_), (saved, *cache) = x, list[Any](residuals)
    rows, key = _padding.size(hidden.shape[0]), make_key(call, weight)
    tree = None
    if cache:
        numbers = len(saved) - sum(merged_fields(call).values())
        tree = jax.tree.structure(infer_cache(hidden, weight, bias, numbers, key))
    run = build_program(
        pull_back, key, tuple(cotangents), requested_gradients, not call.reduce_grad_hidden, tree, donate=(4,)
    )
    seeds = [seed.view(torch.int32) for seed in cotangents.values()]
    per_token = torch.cat([saved, *[seed[None] if seed.ndim == 1 else seed.T for seed in seeds]])
    operands = _padding.pad(hidden, rows), weight, bias, _padding.pack_rows(per_token.T, rows)
    if sums.total is None:
        (grads,) = _programs.run(run, (*operands, None, *cache))
    else:
        *grads, _ = sums.total.add_in_jax(
            run, (*operands, *cache), operand=len(operands), place=int(requested_gradients[0])
        )
    if requested_gradients[0]:
        grads[0] = grads[0][: hidden.shape[0]]
        if call.reduce_grad_hidden:
            grads[0] = _tensor_parallel.sum_dhidden(grads[0], hidden.dtype, call.group)
    return grads


def infer_cache(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, numbers: int, key: ProgramKey
) -> Any:
    """Returns the shapes of a forward's cache, as a tree. ``numbers`` is `Tensors.numbers_per_token`."""
    rows, struct = _padding.size(int(hidden.shape[0])), jax.ShapeDtypeStruct
    return runtime.infer_shapes(
        runtime.find_planning_device(hidden.device),
        _compute_cache,
        key,
        struct((rows, int(hidden.shape[1])), _device.name_dtype(hidden.dtype)),
        _device.describe_tensor(weight),
        None if bias is None else _device.describe_tensor(bias),
        struct((1 + (1 + numbers) * rows,), "int32"),
    )


@functools.cache
def merged_fields(call: TorchCall) -> dict[str, int]:
    """Returns the names of the merged statistics that the backward needs, and how many values per token each has."""
    return call.jax.replace(stats=False, mean_logit=False).statistics


def statistics(key: ProgramKey, keep_cache: bool, hidden: Any, weight: Any, bias: Any, packed: Any) -> Any:
    """Returns packed statistics, whose last row has the tokens' tags, and the leaves of the cache."""
    tokens = _unpack_tokens(key, packed, hidden.shape[0])
    stats, leaves = _compute_statistics(key, keep_cache, hidden, weight, bias, tokens)
    num_rows, *columns = tokens
    return append_tags(stats, make_tags(columns, num_rows, weight.shape[0], *logit_options(key.call))), leaves


def results(key: ProgramKey, fields: tuple[str, ...], megatron: bool, packed: Any, gathered: Any) -> Any:
    """Returns the results named in ``fields``, then S, packed. Results are NaN where tags differ."""
    tokens, (parts, agree) = _unpack_tokens(key, packed, gathered.shape[-1]), check_tags(gathered)
    by_name, saved = _compute_results(key, fields, megatron, tokens, parts)
    by_name = {name: jnp.where(agree if x.ndim == 1 else agree[:, None], x, jnp.nan) for name, x in by_name.items()}
    return _pack_results(by_name, saved)


def single_shard(
    key: ProgramKey, keep_cache: bool, fields: tuple[str, ...], megatron: bool,
    hidden: Any, weight: Any, bias: Any, packed: Any,
) -> Any:  # fmt: skip
    """Returns packed results and the leaves of the cache: `statistics` and `results` in one program."""
    tokens = _unpack_tokens(key, packed, hidden.shape[0])
    stats, cache = _compute_statistics(key, keep_cache, hidden, weight, bias, tokens)
    return _pack_results(*_compute_results(key, fields, megatron, tokens, stats[None])), cache


def pull_back(
    key: ProgramKey, cotangents: tuple[str, ...], requested_gradients: tuple[bool, ...], rounded: bool, cache: Any,
    hidden: Any, weight: Any, bias: Any, per_token: Any, total: Any, *leaves: Any,
) -> list[Any]:  # fmt: skip
    """Returns the requested gradients among dhidden, dweight and dbias, from the saved values and the cotangents.

    The compiler drops the matrix product of a gradient that is not requested. Without a cotangent of the entropy, the
    entropy's terms are left out. With ``rounded``, dhidden has hidden's dtype, because no sum over the group follows.

    With a float32 sum ``total``, dweight is added to it in place. One element of dweight is then the last result, which
    torch imports to wait until the program is done.
    """
    entropy = "entropy" in cotangents
    num_rows, saved, seeds = _unpack_seeds(key, per_token, hidden.shape[0], cotangents)
    first = len(saved) - sum(merged_fields(key.call).values())
    tokens = ShardTokens(num_rows, saved[0], *_split_per_token(key, saved[1:first]))
    merged = _local.unpack(lax.bitcast_convert_type(saved[first:], jnp.float32), merged_fields(key.call))
    if PER_CANDIDATE not in seeds:  # candidates add nothing to any gradient
        tokens, merged = tokens._replace(candidates=None), merged._replace(candidates=None)
    part = _make_part(key, hidden, weight, bias, tokens, entropy=entropy, mean_logit="mean_logit" in seeds)
    zero = jnp.zeros(tokens.labels.shape, jnp.float32)
    seed = _local.LogprobOutput(*(seeds.get(name, zero) for name in _local.LogprobOutput._fields[:3]))
    seed = seed._replace(candidate_logprobs=seeds.get(PER_CANDIDATE))
    dmean = seeds["mean_logit"] / key.call.jax.vocab_size * part.call.vocab_size if part.call.mean_logit else None
    primals = part.gradients(
        merged if entropy else merged._replace(weighted=None),
        _local.Results(seed, dmean),
        None if cache is None else jax.tree.unflatten(cache, leaves),
        dweight=total,
        may_round_dhidden=rounded and hidden.dtype == weight.dtype,
    )
    dhidden = primals.hidden.astype(hidden.dtype) if rounded else primals.hidden
    dbias = primals.adapter if key.call.jax.rank else primals.bias
    grads = [dhidden, primals.weight, None if dbias is None else dbias.astype(bias.dtype)]
    grads = [grad for grad, flag in zip(grads, requested_gradients, strict=False) if flag]  # there may be no dbias
    return grads if total is None else [*grads, primals.weight[0, :1]]


def _compute_cache(key: ProgramKey, hidden: Any, weight: Any, bias: Any, packed: Any) -> Any:
    """Returns the cache of `statistics`."""
    tokens = _unpack_tokens(key, packed, hidden.shape[0])
    return _make_part(key, hidden, weight, bias, tokens).statistics(keep_cache=True)[1]


class ShardTokens(NamedTuple):
    """The per-token inputs of a program."""

    num_rows: Any  # how many rows count
    labels: Any  # [P] global ids in [-1, vocab_size]; -1 and vocab_size stand for a label out of the vocabulary
    temperature: Any  # [P], or None
    floor: Any  # [P], or None
    candidates: Any  # [P, K] global ids in [-1, vocab_size], or None


def _compute_statistics(
    key: ProgramKey, keep_cache: bool, hidden: Any, weight: Any, bias: Any, tokens: ShardTokens
) -> tuple[Any, list[Any]]:
    """Returns the statistics of a shard, packed, and the leaves of the cache."""
    part = _make_part(key, hidden, weight, bias, tokens, mean_logit=key.call.jax.mean_logit)
    stats, cache = part.statistics(keep_cache)
    return _local.pack(stats), jax.tree.leaves(cache) if keep_cache else []


def _compute_results(
    key: ProgramKey, fields: tuple[str, ...], megatron: bool, tokens: ShardTokens, gathered: Any
) -> tuple[dict[str, Any], Any]:
    """Returns the results in ``fields`` by name, and S."""
    num_rows, labels, temperature, floor, candidates = tokens
    outside = (labels < 0) | (labels >= key.call.jax.vocab_size)
    logit_options = {name: getattr(key.call.jax, name) for name in ("vocab_size", "logit_scale", "logit_softcap")}
    where = jnp.arange(labels.shape[0], dtype=jnp.int32) < num_rows
    parts = _local.unpack(gathered, key.call.jax.statistics)
    merged, (out, mean) = _local.results(parts, jnp.where(outside, -1, labels), where, temperature, **logit_options)
    if megatron:
        # Megatron subtracts the maximum, then uses 0 as the label's logit. The logprob is -ln Σ e^(z - max) = max -
        # lse.
        sumexp = jnp.where(merged.sumexp == 0, 1.0, merged.sumexp)  # 0 if no logit reaches the floor
        out = out._replace(logprobs=jnp.where(outside, -jnp.log(sumexp), out.logprobs))
    by_name = out._asdict() | {"mean_logit": mean}
    forward_only: dict[str, Any] = dict.fromkeys(key.call.jax.statistics.keys() - merged_fields(key.call).keys())
    packed = _local.pack(merged._replace(**forward_only))
    saved = pack_arrays(*(x for x in (labels, temperature, floor, candidates) if x is not None), packed.T)
    return {name: by_name[name] for name in fields}, saved


def _pack_results(by_name: dict[str, Any], saved: Any) -> Any:
    """Packs the results and S as ``[O + S, P]``. The results of candidates come after all other results."""
    return pack_arrays(*(by_name[name] for name in sorted(by_name, key=PER_CANDIDATE.__eq__)), saved.T)


def _unpack_tokens(key: ProgramKey, packed: Any, rows: int) -> ShardTokens:
    """Unpacks the per-token inputs of a forward."""
    num_rows, columns = unpack_rows(packed, rows)
    low, high = columns[:2]  # halves of int64 labels: JAX itself would take 2³² + 3 as 3
    beyond_int32 = jnp.where(high < 0, -1, key.call.jax.vocab_size)
    labels = jnp.where(high == low >> 31, jnp.clip(low, -1, key.call.jax.vocab_size), beyond_int32)
    return ShardTokens(num_rows, labels, *_split_per_token(key, columns[2:]))


def _split_per_token(key: ProgramKey, bits: Any) -> tuple[Any, Any, Any]:
    """Returns the temperature, the floor and the candidates; None for each that was not passed."""
    count, has_floor = key.call.jax.num_candidates, key.call.jax.has_floor
    floats = lax.bitcast_convert_type(bits[: len(bits) - count], jnp.float32)
    temperature = floats[0] if len(floats) > has_floor else None
    return temperature, floats[-1] if has_floor else None, bits[len(bits) - count :].T if count else None


def _unpack_seeds(key: ProgramKey, packed: Any, rows: int, names: tuple[str, ...]) -> tuple[Any, Any, dict[str, Any]]:
    """Returns how many rows count, S, and the cotangents by name."""
    num_rows, columns = unpack_rows(packed, rows)
    width = sum(key.call.jax.num_candidates if name == PER_CANDIDATE else 1 for name in names)
    row, seeds = len(columns) - width, {}
    for name in names:
        last = row + (key.call.jax.num_candidates if name == PER_CANDIDATE else 1)
        floats = lax.bitcast_convert_type(columns[row:last], jnp.float32)
        seeds[name], row = floats.T if name == PER_CANDIDATE else floats[0], last
    return num_rows, columns[: len(columns) - width], seeds


def _make_part(
    key: ProgramKey, hidden: Any, weight: Any, bias: Any, tokens: ShardTokens, **options: Any
) -> _local.LogprobPart:
    """Returns this shard's part of the call, as `lce_jax.run._local` takes it."""
    start, vocab_size = key.part(weight.shape[0])
    options = {"mean_logit": False, "num_candidates": key.call.jax.num_candidates, **options}
    if tokens.candidates is None:
        options["num_candidates"] = 0
    call = key.call.jax.replace(caller_vocab_size=vocab_size, precision=key.precision, **options)
    per_token = tokens.labels, tokens.temperature, tokens.candidates, tokens.floor
    primals = Primals(hidden, weight, adapter=bias) if call.rank else Primals(hidden, weight, bias)
    return _local.LogprobPart.of(call, primals, *per_token, start, tokens.num_rows)
