"""The compiled programs: one jitted function for each static specification, over `lce_jax.local`.

    statistics   hidden, weight, bias, tokens               ->  this shard's statistics, packed [F, P], and its cache
    results      tokens, the shards' statistics [N, F, P]   ->  outputs and what the backward needs, packed [O + S, P]
    forward      both in one, for a vocabulary that is not split
    gradients    operands and cache                         ->  those of dhidden, dweight and dbias that are wanted

P is the number of rows of a program. How many of them count is an operand, so that one program serves many counts of
tokens. Each array that crosses between the libraries costs the host as much time as many kernels. So everything per
token crosses as one int32 array, floats by their bits, as `_rows.with_count` packs it. ``tokens`` has two columns for
the halves of each int64 label and one for the temperature, if there is one. S is the label, the temperature if there is
one, and the merged statistics; `gradients` takes columns of S and the cotangents.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from lce_jax import LogprobOutput, local
from lce_torch_bridge._types import Call


class Spec(NamedTuple):
    """The static part of a program."""

    call: Call  # `Call.of_programs`
    vocab_start: int  # global id of the shard's first column
    padded: bool  # whether the shards have columns beyond the true vocabulary
    precision: str | None
    masked: bool  # whether only as many rows count as its operand says

    @property
    def statistics(self) -> dict[str, int]:
        """The statistics that are computed, and how many numbers per token each is."""
        call = self.call
        return local.fields(entropy=call.entropy != "none", stats=call.stats, total=call.mean_logit)

    @property
    def merged(self) -> dict[str, int]:
        """Those of them that the backward needs of the whole vocabulary."""
        return local.fields(entropy=self.call.entropy != "none")

    @property
    def num_merged(self) -> int:
        """How many numbers per token that is."""
        return sum(self.merged.values())


@functools.cache
def statistics(spec: Spec, keep_cache: bool) -> Callable[..., Any]:
    """``(hidden, weight, bias, tokens) -> packed, cache leaves``. The last row of ``packed`` is this shard's V."""

    def run(hidden: Any, weight: Any, bias: Any, tokens: Any) -> Any:
        packed, cache = _statistics(spec, keep_cache, hidden, weight, bias, tokens)
        columns = jnp.full((1, packed.shape[1]), weight.shape[0], jnp.int32)
        return jnp.concatenate([packed, lax.bitcast_convert_type(columns, packed.dtype)]), cache

    return jax.jit(run)


@functools.cache
def results(spec: Spec, fields: tuple[str, ...], megatron: bool) -> Callable[..., Any]:
    """``(tokens, gathered) -> packed``: ``fields`` of `LogprobOutput`, then S; NaN where parts differ in size."""

    def run(tokens: Any, gathered: Any) -> Any:
        columns = lax.bitcast_convert_type(gathered[:, -1], jnp.int32)
        equal = (columns == columns[0]).all(0)
        return _results(spec, fields, megatron, tokens, jnp.where(equal, gathered[:, :-1], jnp.nan))

    return jax.jit(run)


@functools.cache
def forward(spec: Spec, keep_cache: bool, fields: tuple[str, ...], megatron: bool) -> Callable[..., Any]:
    """``(hidden, weight, bias, tokens) -> packed, cache leaves``, as `statistics` and `results` in one program."""

    def run(hidden: Any, weight: Any, bias: Any, tokens: Any) -> Any:
        packed, cache = _statistics(spec, keep_cache, hidden, weight, bias, tokens)
        return _results(spec, fields, megatron, tokens, packed[None]), cache

    return jax.jit(run)


@functools.cache
def gradients(
    spec: Spec, cotangents: tuple[str, ...], wanted: tuple[bool, ...], rounded: bool, cache: Any
) -> Callable[..., Any]:
    """``(hidden, weight, bias, S and the cotangents, *cache leaves) -> [dhidden, dweight, dbias]``, if wanted.

    A gradient that is not wanted is no output, and the compiler drops its product. Without a cotangent of the entropy,
    the entropy's part is left out. ``rounded``: dhidden is in hidden's dtype, because no sum over the group follows.
    """

    def run(hidden: Any, weight: Any, bias: Any, per_token: Any, *leaves: Any) -> list[Any]:
        kept = spec.num_merged
        num_rows, per_token = _counted(spec, per_token, hidden.shape[0])
        labels, floats = per_token[0], lax.bitcast_convert_type(per_token[1:], jnp.float32)
        temperature = floats[0] if len(floats) > kept + len(cotangents) else None
        floats = floats[0 if temperature is None else 1 :]
        merged, seeds = local.unpack(floats[:kept], spec.merged), dict(zip(cotangents, floats[kept:], strict=True))
        entropy = "entropy" in seeds
        dhidden, *of_head = local.gradients(
            hidden,
            weight,
            labels,
            merged if entropy else merged._replace(weighted=None),
            LogprobOutput(seeds.get("logprobs"), seeds.get("entropy"), seeds.get("lse")),  # type: ignore[arg-type]
            cache=None if cache is None else jax.tree.unflatten(cache, leaves),
            dtotal=seeds["mean_logit"] / spec.call.vocab_size if "mean_logit" in seeds else None,
            **_options(spec, bias, temperature, num_rows) | {"entropy": entropy},
        )
        dhidden = dhidden.astype(hidden.dtype) if rounded else dhidden
        grads = [dhidden, *of_head[:1], *(dbias.astype(bias.dtype) for dbias in of_head[1:])]
        return [grad for grad, want in zip(grads, wanted, strict=False) if want]  # without a bias, no dbias

    return jax.jit(run)


@functools.cache
def cache_structure(spec: Spec, device: jax.Device, *inputs: jax.ShapeDtypeStruct | None) -> Any:
    """The cache of `statistics` for ``inputs`` like these: the shapes of its leaves, and its tree."""

    def cache(hidden: Any, weight: Any, bias: Any, tokens: Any) -> Any:
        num_rows, labels, temperature = _unpacked(spec, tokens, hidden.shape[0])
        options = _options(spec, bias, temperature, num_rows)
        return local.statistics(hidden, weight, labels, keep_cache=True, **options)[1]

    with jax.default_device(device):
        return jax.eval_shape(cache, *inputs)


def _statistics(
    spec: Spec, keep_cache: bool, hidden: Any, weight: Any, bias: Any, tokens: Any
) -> tuple[Any, list[Any]]:
    num_rows, labels, temperature = _unpacked(spec, tokens, hidden.shape[0])
    options = _options(spec, bias, temperature, num_rows) | {"total": spec.call.mean_logit}
    stats, cache = local.statistics(hidden, weight, labels, keep_cache=keep_cache, **options)
    return local.pack(stats), jax.tree.leaves(cache)


def _results(spec: Spec, fields: tuple[str, ...], megatron: bool, tokens: Any, gathered: Any) -> Any:
    num_rows, labels, temperature = _unpacked(spec, tokens, gathered.shape[-1])
    merged = local.merge(local.unpack(gathered, spec.statistics))
    out = local.finish(merged, labels, vocab_size=spec.call.vocab_size, where=_where(num_rows, labels.shape[0]))
    if megatron:
        # Its predicted logit is left at 0 once the maximum has been subtracted: -ln Σ e^(z - max), which is max - lse.
        outside = (labels < 0) | (labels >= spec.call.vocab_size)
        out = out._replace(logprobs=jnp.where(outside, -jnp.log(merged.sumexp), out.logprobs))
    found = out._asdict() | {"mean_logit": None if merged.total is None else merged.total / spec.call.vocab_size}
    numbers = [*(found[name] for name in fields), labels, *(() if temperature is None else (temperature,))]
    forward_only: dict[str, Any] = dict.fromkeys(spec.statistics.keys() - spec.merged.keys())
    kept = local.pack(merged._replace(**forward_only))
    bits = [lax.bitcast_convert_type(x, jnp.int32) for x in (*numbers, kept)]
    return jnp.concatenate([jnp.stack(bits[:-1]), bits[-1]])


def _counted(spec: Spec, packed: Any, rows: int) -> tuple[Any, Any]:
    """What `_rows.with_count` packed: how many rows count, or None where all do, and ``[K, P]``."""
    return packed[0] if spec.masked else None, packed[1:].reshape(rows, -1).T


def _unpacked(spec: Spec, tokens: Any, rows: int) -> tuple[Any, Any, Any]:
    """How many rows count, labels ``[P]``, at most one off the vocabulary, and the temperature ``[P]`` or None."""
    num_rows, (low, high, *bits) = _counted(spec, tokens, rows)
    far = jnp.where(high < 0, -1, spec.call.vocab_size)  # JAX would take int64 modulo 2³²: 2³² + 3 would become 3
    labels = jnp.where(high == low >> 31, jnp.clip(low, -1, spec.call.vocab_size), far)
    return num_rows, labels, lax.bitcast_convert_type(bits[0], jnp.float32) if bits else None


def _options(spec: Spec, bias: Any, temperature: Any, num_rows: Any) -> dict[str, Any]:
    return spec.call.options | {
        "vocab_start": spec.vocab_start,
        "vocab_size": spec.call.vocab_size if spec.padded else None,
        "num_rows": num_rows,
        "bias": bias,
        "temperature": 1.0 if temperature is None else temperature,
        "precision": spec.precision,
    }


def _where(num_rows: Any, rows: int) -> Any:
    return None if num_rows is None else jnp.arange(rows, dtype=jnp.int32) < num_rows
