"""The compiled programs of `linear_kl`: one jitted function for each static specification, over `lce_jax.local`.

    statistics   operands, tokens                                ->  this shard's statistics, [7, P], and its cache
    mixture      operands, tokens, every shard's statistics      ->  this shard's sums of a mixture, [2, P]
    finish       the same, and every shard's sums                ->  the divergence and S, [1 + S, P]
    forward      all in one, for a vocabulary that is not split
    gradients    operands, tokens with S and a cotangent, cache  ->  those of dhidden, dweight and dbias that are wanted

The operands are hidden, weight and bias of the student, then of the teacher. P is the number of rows of a program;
everything per token crosses as one int32 array, as in `through_jax._programs`: ``tokens`` has the temperatures. S is
the merged statistics and, of a "jsd", the sums. The last row of a shard's statistics are the tokens' tags, the same on
all shards.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, get_type_hints

import jax
import jax.numpy as jnp
from jax import lax

from lce_jax import launch_lists, local
from lce_torch_bridge._types import KINDS
from lce_torch_bridge.through_jax import _programs

NUM_OPERANDS = 6


class KLCall(NamedTuple):
    """All about a call that is no tensor: the trailing arguments of both operators."""

    group: str  # `tensors._tensor_parallel.name_of`
    vocab_size: int  # the true size of the whole vocabulary
    direction: str
    beta: float | None
    logit_scale: float
    teacher_logit_scale: float
    logit_softcap: float | None
    teacher_logit_softcap: float | None
    has_temperature: bool  # for each token
    has_teacher_temperature: bool
    reduce_grad_hidden: bool
    cache_bytes: int
    implementation: str  # names joined by commas; empty for lce_jax's choice

    @property
    def num_temperatures(self) -> int:
        """Of each token."""
        return self.has_temperature + self.has_teacher_temperature

    @property
    def num_statistics(self) -> int:
        """S."""
        return 8 if self.direction == "jsd" else 6


CALL_SCHEMA = ", ".join(f"{KINDS[kind]} {name}" for name, kind in get_type_hints(KLCall).items())


class KLKey(NamedTuple):
    """The static part of a program."""

    call: KLCall  # without what programs do not depend on
    vocab_start: int  # global id of the shard's first column
    padded: bool  # whether the shards have columns beyond the true vocabulary
    precision: str | None


@functools.cache
def statistics(key: KLKey, keep_cache: bool) -> Callable[..., Any]:
    """``(*operands, tokens) -> [7, P], cache leaves``."""

    def run(*given: Any) -> Any:
        stats, cache = _unpacked(key, given).shard.statistics(keep_cache)
        num_rows, columns = _programs.counted(given[-1], given[0].shape[0])
        of_call = given[1].shape[0], given[4].shape[0], *key.call
        tags = _programs.tags_of([columns.T], num_rows, *of_call)
        return _programs.with_tags(jnp.stack(stats), tags), jax.tree.leaves(cache)

    return jax.jit(run)


@functools.cache
def mixture(key: KLKey) -> Callable[..., Any]:
    """``(*operands, tokens, [N, 7, P]) -> [2, P]``."""

    def run(*given: Any) -> Any:
        *operands, gathered = given
        shard = _unpacked(key, operands).shard
        sums: Any = shard.mixture_sums(_merged(shard, gathered))  # not None: of a "jsd" alone
        return jnp.stack(sums)

    return jax.jit(run)


@functools.cache
def finish(key: KLKey) -> Callable[..., Any]:
    """``(*operands, tokens, [N, 7, P], [N, 2, P] or None) -> [1 + S, P]``; NaN where tags differ."""

    def run(*given: Any) -> Any:
        *operands, gathered, sums = given
        shard = _unpacked(key, operands).shard
        total = None if sums is None else local.MixtureSums(*sums.sum(0))
        return _results(shard, _merged(shard, gathered), total)

    return jax.jit(run)


@functools.cache
def forward(key: KLKey, keep_cache: bool) -> Callable[..., Any]:
    """``(*operands, tokens) -> [1 + S, P], cache leaves``."""

    def run(*given: Any) -> Any:
        shard = _unpacked(key, given).shard
        stats, cache = shard.statistics(keep_cache)
        return _results(shard, stats, shard.mixture_sums(stats)), jax.tree.leaves(cache)

    return jax.jit(run)


@functools.cache
def gradients(key: KLKey, wanted: tuple[bool, ...], rounded: bool, cache: Any) -> Callable[..., Any]:
    """``(*operands, tokens with S and the cotangent, *cache leaves) -> [dhidden, dweight, dbias]``, if wanted.

    ``rounded``: dhidden is in hidden's dtype, because no sum over the group follows.
    """

    def run(*given: Any) -> list[Any]:
        operands, leaves = given[: NUM_OPERANDS + 1], given[NUM_OPERANDS + 1 :]
        shard, columns = _unpacked(key, operands)
        *saved, cotangent = columns
        merged = local.KLStatistics(*saved[:6])
        sums = local.MixtureSums(*saved[6:]) if saved[6:] else None
        kept = None if cache is None else jax.tree.unflatten(cache, leaves)
        dhidden, dweight, *of_bias = shard.gradients(merged, sums, cotangent, kept)
        dhidden = dhidden.astype(operands[0].dtype) if rounded else dhidden
        left = operands[1].shape[0] - dweight.shape[0]
        of_head = [dweight, *(dbias.astype(operands[2].dtype) for dbias in of_bias)]
        grads = [dhidden, *(jnp.pad(x, ((0, left), *((0, 0),) * (x.ndim - 1))) for x in of_head)]
        return [grad for grad, want in zip(grads, wanted, strict=False) if want]  # without a bias, no dbias

    return jax.jit(run)


@functools.cache
def cache_structure(key: KLKey, device: jax.Device | launch_lists.Device, *inputs: jax.ShapeDtypeStruct | None) -> Any:
    """The cache of a forward for ``inputs`` like these: the shapes of its leaves, and its tree."""

    def cache(*given: Any) -> Any:
        return _unpacked(key, given).shard.statistics(keep_cache=True)[1]

    return _programs.shapes_on(device, cache, *inputs)


class _Unpacked(NamedTuple):
    shard: local.KLShard
    columns: Any  # [K, P] float32, what tokens hold besides temperatures


def _unpacked(key: KLKey, given: Any) -> _Unpacked:
    hidden, weight, bias, teacher_hidden, teacher_weight, teacher_bias, tokens = given
    rows, call = hidden.shape[0], key.call
    num_rows, bits = _programs.counted(tokens, rows)
    columns = lax.bitcast_convert_type(bits, jnp.float32)
    # Weights with different rows are those of a group whose parts are uneven: all results are NaN (`finish`).
    least = min(weight.shape[0], teacher_weight.shape[0])
    (weight, bias), (teacher_weight, teacher_bias) = (
        (w[:least], None if b is None else b[:least]) for w, b in ((weight, bias), (teacher_weight, teacher_bias))
    )
    direction: Any = call.direction
    shard = local.KLShard(
        hidden,
        weight,
        teacher_hidden,
        teacher_weight,
        direction=direction,
        beta=call.beta,
        bias=bias,
        teacher_bias=teacher_bias,
        vocab_start=key.vocab_start,
        vocab_size=call.vocab_size if key.padded else None,
        where=jnp.arange(rows, dtype=jnp.int32) < num_rows,
        temperature=columns[0] if call.has_temperature else 1.0,
        teacher_temperature=columns[call.num_temperatures - 1] if call.has_teacher_temperature else 1.0,
        logit_scale=call.logit_scale,
        teacher_logit_scale=call.teacher_logit_scale,
        logit_softcap=call.logit_softcap,
        teacher_logit_softcap=call.teacher_logit_softcap,
        cache_bytes=call.cache_bytes,
        precision=key.precision,
        implementation=tuple(call.implementation.split(",")) if call.implementation else None,
    )
    return _Unpacked(shard, columns[call.num_temperatures :])


def _merged(shard: local.KLShard, gathered: Any) -> Any:
    """The statistics of all shards; NaN where their tags differ."""
    return shard.merge(_programs.of_equal_tags(gathered)[0])


def _results(shard: local.KLShard, merged: Any, sums: Any) -> Any:
    return _programs.as_rows(shard.finish(merged, sums), *merged, *(sums or ()))
