"""`lce_jax.local.KLShard`: one shard's part of `lce_jax.linear_kl`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Unpack

import jax
import jax.numpy as jnp

from lce_jax import _call, _jax, _kl_call, _options, scalars
from lce_jax._call import Rows
from lce_jax._kl_call import KLArguments, KLSpec
from lce_jax._options import KLOptions
from lce_jax._types import Primals
from lce_jax.mathematics import _kl
from lce_jax.mathematics._kl import KLStatistics, Pair
from lce_jax.mathematics._kl_mixture import MixtureSums
from lce_jax.programs._kl import Part

if TYPE_CHECKING:
    from lce_jax._shapes import Array, Bool, Float, Int


class KLShard:
    """One shard of the vocabulary of `lce_jax.linear_kl`, without collectives.

        shard = local.KLShard(hidden, weight, teacher_hidden, teacher_weight, vocab_start=start, vocab_size=V)
        stats, cache = shard.statistics()
        merged = shard.merge(<jnp.stack(stats) of all shards, in their order: [N, 6, T]>)
        sums = shard.mixture_sums(merged)             # of "jsd" alone; to be added up over the shards
        kl = shard.finish(merged, sums)
        dhidden, dweight = shard.gradients(merged, sums, cotangent, cache)

    ``dhidden`` is this shard's part, to be summed over the shards; ``dweight`` is whole. The methods are plain
    functions of arrays, to be called under ``jit``, and none is differentiable itself. A shard may be made anew from
    the same arguments between two of them.

    Args:
        hidden: ``[T, H]`` the student's hidden states, the same on every shard.
        weight: this shard's ``[V, H]`` (or ``[H, V]``) of the student's head.
        teacher_hidden: ``[T, G]``, the same on every shard.
        teacher_weight: this shard's ``[V, G]``, the same columns.
        direction: "forward", "reverse" or "jsd", as in `lce_jax.linear_kl`.
        vocab_start: global id of the shard's first column; may be traced.
        where: ``[T]`` bool, the rows that count. The others are 0 in what `finish` and `gradients` return, whatever
            they hold. None: all.
        **options: ``beta``, ``temperature``, ``teacher_temperature``, ``logit_softcap``, ``teacher_logit_softcap``,
            ``logit_scale``, ``teacher_logit_scale``, ``vocab_size``, ``weight_layout``, ``teacher_weight_layout``,
            ``cache_bytes``, ``precision``, ``implementation``, ``bias`` and ``teacher_bias``, as in
            `lce_jax.linear_kl`; ``vocab_size`` is that of the whole vocabulary.

    Raises:
        UnsupportedError: an implementation asked for by name cannot serve the call; the message says why.
        ValueError, TypeError: shapes, dtypes or options that do not fit, with the offending values.

    Memory:
        That of `lce_jax.linear_kl` on these columns.

    Example:
        >>> import jax.numpy as jnp
        >>> from lce_jax import local
        >>> hidden, weight, other = jnp.ones((2, 4)), jnp.zeros((100, 4)), jnp.eye(100, 4)
        >>> shard = local.KLShard(hidden, weight, hidden, other, direction="reverse")
        >>> stats, _ = shard.statistics()
        >>> merged = shard.merge(jnp.stack([jnp.stack(stats)] * 3))           # three equal shards
        >>> [round(float(kl), 4) for kl in shard.finish(merged)]
        [0.0265, 0.0265]
        >>> dhidden, dweight = shard.gradients(merged, None, jnp.ones(2))
        >>> dhidden.shape, dweight.shape
        ((2, 4), (100, 4))
    """

    def __init__(
        self,
        hidden: Float[Array, "T H"],
        weight: Float[Array, "V H"],
        teacher_hidden: Float[Array, "T G"],
        teacher_weight: Float[Array, "V G"],
        *,
        direction: Literal["forward", "reverse", "jsd"] = "forward",
        vocab_start: int | Int[Array, ""] = 0,
        where: Bool[Array, "T"] | None = None,
        **options: Unpack[KLOptions],
    ) -> None:
        _options.check_names(KLShard, options, "sharded_linear_kl")
        start = _call.count_of("vocab_start", vocab_start, scalars.INT32_MAX - 1)
        arrays = Pair((hidden, weight), (teacher_hidden, teacher_weight))
        call = _kl_call.bind_shard(KLArguments.of(arrays, where, direction, options))
        self._spec = call.spec
        self._arrays = _Arrays(call.primals, call.rows, start)

    def statistics(self, keep_cache: bool = False) -> tuple[KLStatistics, object]:
        """Six numbers per token over the columns of this shard.

        Args:
            keep_cache: whether a backward will follow, so that the forward may keep ``cache_bytes`` of cache for it.

        Returns:
            A named tuple of ``[T]`` arrays, and the cache for `gradients` (a pytree, None if nothing is kept).
        """
        if self._spec.case.num_tokens == 0:
            return _kl.no_columns(0, self._spec.dtype), None
        keeps = keep_cache and self._spec.case.options.cache_bytes > 0
        return _run(self._spec, Part.statistics, (keeps,), self._arrays)

    def merge(self, parts: Float[Array, "N 6 T"]) -> KLStatistics:
        """The whole vocabulary's statistics.

        Args:
            parts: those of all shards, each stacked, in their order.

        Raises:
            ValueError: another shape.
        """
        shape, T = getattr(parts, "shape", None), self._spec.case.num_tokens
        if shape is None or len(shape) != 3 or tuple(shape[1:]) != (len(KLStatistics._fields), T):
            raise ValueError(f"parts must be an array [N, 6, T = {T}], got {type(parts).__name__} of shape {shape}")
        return _run(self._spec, Part.merge, (), self._arrays, parts)

    def mixture_sums(self, merged: KLStatistics) -> MixtureSums | None:
        """Of "jsd", two numbers per token over the columns of this shard, to be added up over the shards. Else None."""
        if not self._has_sums:
            return None
        return _run(self._spec, Part.mixture_sums, (), self._arrays, merged)

    def finish(self, merged: KLStatistics, sums: MixtureSums | None = None) -> Float[Array, "T"]:
        """The divergence of each token, in nats.

        Args:
            merged: the statistics of the whole vocabulary.
            sums: of "jsd", those of the whole vocabulary.

        Raises:
            ValueError: a "jsd" without sums, or another divergence with them.
        """
        self._check(sums)
        return _run(self._spec, Part.finish, (), self._arrays, merged, sums)

    def gradients(
        self, merged: KLStatistics, sums: MixtureSums | None, cotangent: Float[Array, "T"], cache: object = None
    ) -> (
        tuple[Float[Array, "T H"], Float[Array, "V H"]]
        | tuple[Float[Array, "T H"], Float[Array, "V H"], Float[Array, "V"]]
    ):
        """The shard's part of the student's dhidden, in float32, and its dweight, in the weight's dtype.

        Args:
            merged: the statistics of the whole vocabulary.
            sums: of "jsd", those of the whole vocabulary.
            cotangent: ``[T]``, the derivative of the objective in the divergence.
            cache: what `statistics` returned with its statistics.

        Returns:
            dhidden ``[T, H]`` and dweight. With a bias, also dbias ``[V]`` in float32. (All of a float64 head are
            float64.)

        Raises:
            ValueError: a cotangent of another shape, a "jsd" without sums, or another divergence with them.
        """
        self._check(sums)
        if tuple(jnp.shape(cotangent)) != (self._spec.case.num_tokens,):
            raise ValueError(f"cotangent {tuple(jnp.shape(cotangent))} must be [T = {self._spec.case.num_tokens}]")
        if self._spec.case.num_tokens == 0:
            own = self._arrays.primals.student
            zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, self._spec.dtype), own)
            found = zeros._replace(weight=jnp.zeros_like(own.weight))
        else:
            found = _run(self._spec, Part.gradients, (), self._arrays, merged, sums, cache, cotangent)
        return (found.hidden, found.weight) if found.bias is None else (found.hidden, found.weight, found.bias)

    @property
    def _has_sums(self) -> bool:
        return self._arrays.rows.student.weights is not None and self._spec.case.num_tokens > 0

    def _check(self, sums: MixtureSums | None) -> None:
        """Without its sums, a JSD would be a KL."""
        if self._has_sums != (sums is not None):
            which = "needs" if self._has_sums else "has no"
            raise ValueError(f'direction="{self._spec.direction}" {which} sums: those that `mixture_sums` returns')


class _Arrays(NamedTuple):
    primals: Pair[Primals]
    rows: Pair[Rows]
    start: Int[Array, ""]


@functools.partial(jax.jit, static_argnums=(0, 1, 2), inline=True)
def _run(spec: KLSpec, method: Callable[..., Any], static: tuple[Any, ...], arrays: _Arrays, *more: Any) -> Any:
    """A method of `Part`, with ``static`` as its last arguments. Not differentiable."""

    def run(arrays: _Arrays, *more: Any) -> Any:
        return method(Part.of(spec, *arrays), *more, *static)

    return _jax.not_differentiable(run)(arrays, *more)
