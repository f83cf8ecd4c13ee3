"""The compiled programs: one jitted function for each static specification, over `lce_jax.local`.

    statistics   hidden, weight, bias, tokens               ->  this shard's statistics, packed [F, P], and its cache
    results      tokens, the shards' statistics [N, F, P]   ->  outputs and what the backward needs, packed [O + S, P]
    forward      both in one, for a vocabulary that is not split
    gradients    operands, cache and a sum of dweight       ->  those of dhidden, dweight and dbias that are wanted

P is the number of rows of a program. How many of them count is an operand, so that one program serves many counts of
tokens. Each array that crosses between the libraries costs the host as much time as many kernels. So everything per
token crosses as one int32 array, floats by their bits, as `tensors._padding.with_count` packs it. ``tokens`` has two
columns for the halves of each int64 label, one for the temperature and one for the floor, if there is one, and K for
candidates, if there are any. S is the label and the others as they are there, and the merged statistics; `gradients`
takes columns of S and the cotangents. What is [P, K] here is K rows of what is packed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from lce_jax import LogprobOutput, launch_lists, local
from lce_torch_bridge._types import PER_CANDIDATE, Call
from lce_torch_bridge.tensors import _tensor_parallel
from lce_torch_bridge.through_jax._runtime import NO_MESH


class ProgramKey(NamedTuple):
    """The static part of a program."""

    call: Call  # `Call.of_programs`
    vocab_start: int  # global id of the shard's first column
    padded: bool  # whether the shards have columns beyond the true vocabulary
    precision: str | None

    @property
    def statistics(self) -> dict[str, int]:
        """The statistics that are computed, and how many numbers per token each is."""
        call = self.call
        further: dict[str, Any] = {"stats": call.stats, "total": call.mean_logit, "has_floor": call.has_floor}
        return local.fields(entropy=call.entropy != "none", num_candidates=call.num_candidates, **further)

    @property
    def merged(self) -> dict[str, int]:
        """Those of them that the backward needs of the whole vocabulary."""
        return local.fields(entropy=self.call.entropy != "none", num_candidates=self.call.num_candidates)


@functools.cache
def num_merged(key: ProgramKey) -> int:
    """How many numbers per token `ProgramKey.merged` are."""
    return sum(key.merged.values())


@functools.cache
def statistics(key: ProgramKey, keep_cache: bool) -> Callable[..., Any]:
    """``(hidden, weight, bias, tokens) -> packed, cache leaves``. The last row of ``packed`` are the tokens' tags."""

    def run(hidden: Any, weight: Any, bias: Any, tokens: Any) -> Any:
        unpacked = _unpacked(key, tokens, hidden.shape[0])
        packed, leaves = statistics_of(key, keep_cache, hidden, weight, bias, unpacked)
        of_call = weight.shape[0], key.call.vocab_size, key.call.logit_scale, key.call.logit_softcap
        num_rows, *columns = unpacked
        return with_tags(packed, tags_of(columns, num_rows, *of_call)), leaves

    return jax.jit(run)


@functools.cache
def results(key: ProgramKey, fields: tuple[str, ...], megatron: bool) -> Callable[..., Any]:
    """``(tokens, gathered) -> packed``: ``fields`` of `LogprobOutput`, then S; NaN where tags differ."""

    def run(tokens: Any, gathered: Any) -> Any:
        unpacked, (parts, agree) = _unpacked(key, tokens, gathered.shape[-1]), of_equal_tags(gathered)
        found, saved = results_of(key, fields, megatron, unpacked, parts)
        found = {name: jnp.where(agree if x.ndim == 1 else agree[:, None], x, jnp.nan) for name, x in found.items()}
        return _packed(found, saved)

    return jax.jit(run)


@functools.cache
def forward(key: ProgramKey, keep_cache: bool, fields: tuple[str, ...], megatron: bool) -> Callable[..., Any]:
    """``(hidden, weight, bias, tokens) -> packed, cache leaves``, as `statistics` and `results` in one program."""

    def run(hidden: Any, weight: Any, bias: Any, tokens: Any) -> Any:
        unpacked = _unpacked(key, tokens, hidden.shape[0])
        packed, cache = statistics_of(key, keep_cache, hidden, weight, bias, unpacked)
        return _packed(*results_of(key, fields, megatron, unpacked, packed[None])), cache

    return jax.jit(run)


@functools.cache
def gradients(
    key: ProgramKey, cotangents: tuple[str, ...], wanted: tuple[bool, ...], rounded: bool, cache: Any
) -> Callable[..., Any]:
    """``(hidden, weight, bias, S and the cotangents, sum, *cache leaves) -> [dhidden, dweight, dbias]``, if wanted.

    A gradient that is not wanted is no output, and the compiler drops its product. Without a cotangent of the entropy,
    the entropy's part is left out. ``rounded``: dhidden is in hidden's dtype, because no sum over the group follows.

    With a float32 sum, which it overwrites, dweight is added to that. The results end in one number of dweight then:
    what torch reads to know that the program is done.
    """
    entropy = "entropy" in cotangents

    def run(hidden: Any, weight: Any, bias: Any, per_token: Any, total: Any, *leaves: Any) -> list[Any]:
        num_rows, saved, seeds = _split(key, per_token, hidden.shape[0], cotangents)
        tokens, merged = _of_saved(key, num_rows, saved)
        if PER_CANDIDATE not in seeds:  # they add nothing to any gradient
            tokens, merged = tokens._replace(candidates=None), merged._replace(candidates=None)
        seed: Any = {name: seeds.get(name) for name in LogprobOutput._fields}
        dhidden, dweight, *of_bias = local.gradients(
            hidden,
            weight,
            tokens.labels,
            merged if entropy else merged._replace(weighted=None),
            LogprobOutput(**seed),
            dtotal=seeds["mean_logit"] / key.call.vocab_size if "mean_logit" in seeds else None,
            cache=None if cache is None else jax.tree.unflatten(cache, leaves),
            dweight=total,
            round_dhidden=rounded,
            **_options(key, bias, tokens) | {"entropy": entropy},
        )
        grads = [dhidden, dweight, *(dbias.astype(bias.dtype) for dbias in of_bias)]
        found = [grad for grad, want in zip(grads, wanted, strict=False) if want]  # without a bias, no dbias
        return found if total is None else [*found, dweight[0, :1]]

    return jax.jit(run, donate_argnums=4)


@functools.cache
def cache_structure(
    key: ProgramKey, device: jax.Device | launch_lists.Device, *inputs: jax.ShapeDtypeStruct | None
) -> Any:
    """The cache of `statistics` for ``inputs`` like these: the shapes of its leaves, and its tree."""

    def cache(hidden: Any, weight: Any, bias: Any, tokens: Any) -> Any:
        unpacked = _unpacked(key, tokens, hidden.shape[0])
        options = _options(key, bias, unpacked)
        return local.statistics(hidden, weight, unpacked.labels, keep_cache=True, **options)[1]

    return shapes_on(device, cache, *inputs)


def shapes_on(device: jax.Device | launch_lists.Device, function: Callable[..., Any], *inputs: Any) -> Any:
    """The shapes of what ``function`` returns where it is planned for ``device``, whatever mesh the caller has set."""
    described = isinstance(device, launch_lists.Device)
    planned = launch_lists.for_device(device) if described else jax.default_device(device)
    with planned, jax.sharding.use_abstract_mesh(NO_MESH.abstract_mesh):
        return jax.eval_shape(function, *inputs)


def statistics_of(
    key: ProgramKey, keep_cache: bool, hidden: Any, weight: Any, bias: Any, tokens: Tokens
) -> tuple[Any, list[Any]]:
    """The statistics of a shard, packed, and the cache's leaves."""
    options = _options(key, bias, tokens) | {"total": key.call.mean_logit}
    stats, cache = local.statistics(hidden, weight, tokens.labels, keep_cache=keep_cache, **options)
    return local.pack(stats), jax.tree.leaves(cache) if keep_cache else []


def tags_of(columns: Any, num_rows: Any, *of_call: object) -> Any:
    """`lce_jax.local.tags` of what tokens come with, None left out, of how many count, and of the rest of the call."""
    columns = [x for x in columns if x is not None]
    numbers = num_rows, jnp.int32(_tensor_parallel.number_of(*of_call))
    return local.tags([*(jnp.broadcast_to(x, columns[0].shape[:1]) for x in numbers), *columns])


def with_tags(packed: Any, tags: Any) -> Any:
    """``packed [F, P]``, and a row with the tags, by their bits."""
    return jnp.concatenate([packed, lax.bitcast_convert_type(tags[None], packed.dtype)])


def of_equal_tags(gathered: Any) -> tuple[Any, Any]:
    """What `with_tags` made of all shards, without the tags, and in which rows these are equal; NaN in the others."""
    tags = lax.bitcast_convert_type(gathered[:, -1], jnp.int32)
    agree = (tags == tags[:1]).all(0)
    return jnp.where(agree, gathered[:, :-1], jnp.nan), agree


def results_of(
    key: ProgramKey, fields: tuple[str, ...], megatron: bool, tokens: Tokens, gathered: Any
) -> tuple[dict[str, Any], Any]:
    """``fields`` by name, and S."""
    num_rows, labels, temperature, floor, candidates = tokens
    factors, size = _factors(key, tokens), {"vocab_size": key.call.vocab_size}
    merged = local.merge(local.unpack(gathered, key.statistics), **factors)
    out = local.finish(merged, labels, where=jnp.arange(labels.shape[0], dtype=jnp.int32) < num_rows, **size, **factors)
    if megatron:
        # Its predicted logit is left at 0 once the maximum has been subtracted: -ln Σ e^(z - max), which is max - lse.
        outside = (labels < 0) | (labels >= key.call.vocab_size)
        sumexp = jnp.where(merged.sumexp == 0, 1.0, merged.sumexp)  # no token reaches the floor: 0, as elsewhere
        out = out._replace(logprobs=jnp.where(outside, -jnp.log(sumexp), out.logprobs))
    mean = None if merged.total is None else local.mean_logit(merged, **size, **factors)
    support = None if out.support is None else jnp.where(out.support < 0, jnp.nan, out.support.astype(jnp.float32))
    found = out._asdict() | {"mean_logit": mean, "support": support}
    forward_only: dict[str, Any] = dict.fromkeys(key.statistics.keys() - key.merged.keys())
    kept = local.pack(merged._replace(**forward_only))
    saved = as_rows(*(x for x in (labels, temperature, floor, candidates) if x is not None), kept.T)
    return {name: found[name] for name in fields}, saved


def as_rows(*columns: Any) -> Any:
    """Arrays ``[P]`` and ``[P, K]`` as rows of one int32 array, floats by their bits."""
    rows = [x[None] if x.ndim == 1 else x.T for x in columns]
    return jnp.concatenate([lax.bitcast_convert_type(x, jnp.int32) for x in rows])


def _packed(found: dict[str, Any], saved: Any) -> Any:
    """The results ``[O + S, P]``, those of candidates after the others."""
    return as_rows(*(found[name] for name in sorted(found, key=PER_CANDIDATE.__eq__)), saved.T)


def counted(packed: Any, rows: int) -> tuple[Any, Any]:
    """What `tensors._padding.with_count` packed: how many rows count, and ``[K, P]``."""
    return packed[0], packed[1:].reshape(rows, -1).T


class Tokens(NamedTuple):
    """What is per token, unpacked."""

    num_rows: Any  # how many rows count
    labels: Any  # [P] at most one off the vocabulary
    temperature: Any  # [P], or None
    floor: Any  # [P], or None
    candidates: Any  # [P, K] likewise, or None


def _unpacked(key: ProgramKey, tokens: Any, rows: int) -> Tokens:
    """``tokens`` of a forward."""
    num_rows, columns = counted(tokens, rows)
    return Tokens(num_rows, labels_of(key, *columns[:2]), *_beside_labels(key, columns[2:]))


def labels_of(key: ProgramKey, low: Any, high: Any) -> Any:
    """Labels from the halves of int64 numbers. JAX would take these modulo 2³²: 2³² + 3 would become 3."""
    far = jnp.where(high < 0, -1, key.call.vocab_size)
    return jnp.where(high == low >> 31, jnp.clip(low, -1, key.call.vocab_size), far)


def _beside_labels(key: ProgramKey, bits: Any) -> tuple[Any, Any, Any]:
    """The temperature, the floor and the candidates."""
    count, has_floor = key.call.num_candidates, key.call.has_floor
    floats = lax.bitcast_convert_type(bits[: len(bits) - count], jnp.float32)
    temperature = floats[0] if len(floats) > has_floor else None
    return temperature, floats[-1] if has_floor else None, bits[len(bits) - count :].T if count else None


def _split(key: ProgramKey, packed: Any, rows: int, names: tuple[str, ...]) -> tuple[Any, Any, dict[str, Any]]:
    """How many rows count, S, and the cotangents by name."""
    num_rows, columns = counted(packed, rows)
    width = sum(key.call.num_candidates if name == PER_CANDIDATE else 1 for name in names)
    row, seeds = len(columns) - width, {}
    for name in names:
        last = row + (key.call.num_candidates if name == PER_CANDIDATE else 1)
        floats = lax.bitcast_convert_type(columns[row:last], jnp.float32)
        seeds[name], row = floats.T if name == PER_CANDIDATE else floats[0], last
    return num_rows, columns[: len(columns) - width], seeds


def _of_saved(key: ProgramKey, num_rows: Any, saved: Any) -> tuple[Tokens, local.ShardStatistics]:
    """What S holds: labels, temperature and candidates, and the merged statistics."""
    first = len(saved) - num_merged(key)
    tokens = Tokens(num_rows, saved[0], *_beside_labels(key, saved[1:first]))
    return tokens, local.unpack(lax.bitcast_convert_type(saved[first:], jnp.float32), key.merged)


def _options(key: ProgramKey, bias: Any, tokens: Tokens) -> dict[str, Any]:
    return key.call.options | {
        "vocab_start": key.vocab_start,
        "vocab_size": key.call.vocab_size if key.padded else None,
        "num_rows": tokens.num_rows,
        "bias": bias,
        "candidates": tokens.candidates,
        "logit_floor": tokens.floor,
        "precision": key.precision,
        **_factors(key, tokens),
    }


def _factors(key: ProgramKey, tokens: Tokens) -> dict[str, Any]:
    """What the logits are multiplied by and capped at."""
    temperature = 1.0 if tokens.temperature is None else tokens.temperature
    return {
        "temperature": temperature,
        "logit_softcap": key.call.logit_softcap,
        "logit_scale": key.call.logit_scale,
    }
