"""Floors for ``logit_floor``: from a sampler's smallest logit, or from the distribution as top-k, top-p, min-p cut it.

    floor = floors.top_k(linear_topk(hidden, weight, k + 1, temperature=0.7))
    out = linear_logprobs(hidden, weight, labels, temperature=0.7, logit_floor=floor)

A floor is in logits, after temperature, scale and softcap, one per token. A token is in the set if its logit is at
least the floor. Two programs round the same logit differently, so a floor that equals the last kept one is a coin toss
for that token, and for all whose logit is the same. Every floor here therefore lies lower than the last kept logit: by
half the distance to the first dropped one, or by 2⁻¹⁶ of its size where they are closer than rounding can tell apart.
Sets of several rules at once are those above the largest of their floors: ``jnp.maximum(a, b)``.
"""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from lce_jax.call import _checks, _describe
from lce_jax.types import scalars
from lce_jax.types._types import TopK, is_array

if TYPE_CHECKING:
    from lce_jax.types._shapes import Array, ArrayLike, Float

__all__ = ["min_p", "of_smallest", "top_k", "top_p"]


def __dir__() -> list[str]:
    return [*__all__, "__doc__"]


# How far two programs may round a logit apart, in units in the last place of the larger of |ln p| and |lse|, whose sum
# it is. A GPU's tensor cores cut a sum every 16 terms, which is up to 128 units at a hidden size of 4096. An H100 shows
# 61 there, where one token's product is another kind of program than that of many, and 2 where both are of one kind.
ROOM = 128
MOST_NATS = math.log(scalars.INT32_MAX)  # between the largest logit and the lse, of any vocabulary


def of_smallest(smallest: Float[ArrayLike, "..."], dtype: Any) -> Float[Array, "..."]:
    """The floor from the smallest logit that a sampler kept: half a step of the sampler's numbers below it.

    What rounds to ``smallest`` or above lies above ``smallest - step / 2``, so that the logits which the sampler
    rounded to ``dtype`` and kept are those that reach the floor before they are rounded. In float32 a step is smaller
    than the rounding of the sums, so there the floor lies 2⁻¹⁶ of the logit lower.

    Args:
        smallest: ``[...]`` the smallest kept logit of each token, as the product gave it, before any temperature.
            With one, divide the floor by it: ``floors.of_smallest(smallest, "bfloat16") / temperature``. -inf where
            the sampler kept everything: so is its floor.
        dtype: what the sampler's logits were rounded to, "bfloat16" in most engines, whatever they are converted to
            after that: "bfloat16", "float16", "float32" or "float64".

    Returns:
        ``[...]`` float32 (float64 if ``smallest`` is). NaN where ``smallest`` is NaN, or finite and beyond ``dtype``.

    Raises:
        TypeError: ``smallest`` that is no array of floats, or a ``dtype`` that is none of the four.
        ValueError: a known ``smallest`` that is finite and beyond ``dtype``.

    Example:
        >>> import jax.numpy as jnp
        >>> from lce_jax import floors
        >>> floors.of_smallest(jnp.array([16.0, 20.0]), "bfloat16").tolist()  # a step is 0.0625 below 16
        [15.96875, 19.9375]
    """
    _floats("smallest", smallest)
    try:
        name = None if dtype is None else jnp.dtype(dtype).name
    except TypeError:
        name = None
    if name not in _checks.FLOATS:
        raise TypeError(f"dtype must be one of {', '.join(_checks.FLOATS)}, got {dtype!r}")
    most = float(jnp.finfo(name).max)
    _checks.known_values(
        f"smallest must be within {name}, whose largest number is {most:g}",
        smallest,
        lambda x: ~(np.isfinite(x) & (np.abs(x) > most)),
        smallest.shape,
        advice="give the dtype that the sampler's logits were rounded to",
    )
    return _of_smallest(_describe.on_device(smallest), jax.dtypes.canonicalize_dtype(name))


@functools.partial(jax.jit, static_argnums=1, inline=True)
def _of_smallest(smallest: Array, dtype: Any) -> Array:
    kept, rounded = _at_least_float32(smallest), smallest.astype(dtype)
    step = kept - jnp.nextafter(rounded, jnp.full_like(rounded, -jnp.inf)).astype(kept.dtype)
    floor = kept - jnp.maximum(step / 2, _eps(kept) * ROOM * jnp.abs(kept))
    return jnp.where(jnp.isfinite(rounded), floor, jnp.where(jnp.isinf(kept), kept, jnp.nan))


def top_k(top: TopK) -> Float[Array, "..."]:
    """The floor that the k most likely tokens reach, from the k + 1 most likely ones.

    It lies in the middle between the k-th logit and the next, or 2⁻¹⁶ of the larger of |ln p| and |lse| below the k-th
    if that is lower. So tokens whose logit equals the k-th are all in the set, and those that differ from it by
    rounding alone.

    Args:
        top: ``linear_topk(..., k + 1)``, with the options of the call that takes the floor.

    Returns:
        ``[...]`` float32 (float64 if ``top`` is).

    Raises:
        TypeError: a ``top`` that is no `TopK`.
        ValueError: fewer than two tokens in ``top``.

    Example:
        >>> import jax.numpy as jnp
        >>> from lce_jax import floors, linear_topk
        >>> weight = jnp.array([[1.0], [2.0], [4.0], [8.0]])
        >>> floors.top_k(linear_topk(jnp.ones((1, 1)), weight, 3)).tolist()  # of the 2 largest
        [3.0]
    """
    return _top_k(_checked(top))


@functools.partial(jax.jit, inline=True)
def _top_k(top: TopK) -> Array:
    return _after(top, jnp.full((*top.lse.shape, 1), top.logprobs.shape[-1] - 2, jnp.int32))


def top_p(top: TopK, p: float | Float[ArrayLike, "..."], *, after_top_k: bool = False) -> Float[Array, "..."]:
    """The floor that the nucleus reaches: the fewest most likely tokens that have a probability of p together.

    It lies below the last logit of the nucleus as that of `top_k` below the k-th. A row whose nucleus is not followed
    by one more token in ``top`` is NaN, and so are its results: ask `linear_topk` for more.

    Args:
        top: ``linear_topk(..., n)``, with the options of the call that takes the floor.
        p: in (0, 1]: a number, or a float array that broadcasts to ``[...]``. 1 keeps all: the floor is -inf. A value
            outside is refused where it is known; in a traced array its row is NaN.
        after_top_k: True for engines that cut to the k = n - 1 most likely tokens first: p is a share of what these
            have together, and the nucleus may be all of them, as it is for a p of 1, whose floor is that of `top_k`.
            False: p is a share of the whole vocabulary.

    Returns:
        ``[...]`` float32 (float64 if ``top`` is).

    Raises:
        TypeError: a ``top`` that is no `TopK`, or a p that is no number and no array of floats.
        ValueError: fewer than two tokens in ``top``, a p outside (0, 1], or of a shape that does not fit.

    Example:
        >>> import jax.numpy as jnp
        >>> from lce_jax import floors, linear_topk
        >>> weight = jnp.log(jnp.array([[0.4], [0.3], [0.2], [0.1]]))
        >>> top = linear_topk(jnp.ones((1, 1)), weight, 3)
        >>> float(jnp.exp(floors.top_p(top, 0.6))[0]) > 0.2  # 0.4 and 0.3 are the nucleus
        True
        >>> floors.top_p(top, 0.95).tolist()                 # it has four tokens
        [nan]
    """
    top = _checked(top)
    return _top_p(top, _share(p, top.lse.shape), scalars.flag("after_top_k", after_top_k))


@functools.partial(jax.jit, static_argnums=2, inline=True)
def _top_p(top: TopK, p: Array, after_top_k: bool) -> Array:
    mass = jnp.exp(_at_least_float32(top.logprobs)[..., :-1])
    if after_top_k:
        mass = mass / jnp.sum(mass, axis=-1, keepdims=True)
    share = _per_row(p, top.lse.shape, mass.dtype)
    reached = jnp.sum(jnp.cumsum(mass, axis=-1) < share[..., None], axis=-1, keepdims=True, dtype=jnp.int32)
    most = mass.shape[-1] - 1
    last = jnp.minimum(reached, most)
    if after_top_k:  # rounding must not end the nucleus of a p of 1 before the last token
        floor = _after(top, jnp.where(share[..., None] == 1, most, last))
    else:
        floor = jnp.where(reached[..., 0] <= most, _after(top, last), jnp.nan)
        floor = jnp.where(share == 1, -jnp.inf, floor)
    return jnp.where(share > 0, floor, jnp.nan)


def min_p(max_logit: Float[ArrayLike, "..."], p: float | Float[ArrayLike, "..."]) -> Float[Array, "..."]:
    """The floor of tokens with at least p times the largest probability: ``max_logit + ln p``, less some rounding.

    That is 2⁻¹⁶ of ``|max_logit| + 21.5``, which no lse exceeds. So a token that has p times the largest probability
    in exact arithmetic is in the set, and the most likely one always.

    Args:
        max_logit: ``[...]`` the largest logit: ``linear_logprobs(..., stats=True).max_logit``, or of a ``TopK``
            ``top.logprobs[..., 0] + top.lse``.
        p: in (0, 1]: a number, or a float array that broadcasts to ``[...]``. A value outside is refused where it is
            known; in a traced array its row is NaN.

    Returns:
        ``[...]`` float32 (float64 if ``max_logit`` is).

    Raises:
        TypeError: a ``max_logit`` that is no array of floats, or a p that is no number and no array of floats.
        ValueError: a p outside (0, 1], or of a shape that does not fit.

    Example:
        >>> import jax.numpy as jnp
        >>> from lce_jax import floors
        >>> round(float(floors.min_p(jnp.array([2.0]), 0.1)[0]), 3)  # 2 - ln 10
        -0.303
    """
    _floats("max_logit", max_logit)
    return _min_p(_describe.on_device(max_logit), _share(p, max_logit.shape))


@functools.partial(jax.jit, inline=True)
def _min_p(max_logit: Array, p: Array) -> Array:
    highest = _at_least_float32(max_logit)
    size = jnp.abs(highest)
    room = _eps(highest) * ROOM * (size + MOST_NATS) + _eps(max_logit) * size
    return highest + jnp.log(_per_row(p, highest.shape, highest.dtype)) - room


def _after(top: TopK, last: Array) -> Array:
    """The floor below the first tokens of ``top``, of which ``last``, ``[..., 1]``, is the last one's place."""
    lse = _at_least_float32(top.lse)
    z = _at_least_float32(top.logprobs) + lse[..., None]
    inside = lax.broadcasted_iota(jnp.int32, z.shape, z.ndim - 1) <= last
    kept = jnp.min(jnp.where(inside, z, jnp.inf), axis=-1)
    dropped = jnp.max(jnp.where(inside, -jnp.inf, z), axis=-1)
    room = (_eps(lse) * ROOM + _eps(top.lse)) * jnp.maximum(jnp.abs(kept - lse), jnp.abs(lse))
    return kept - jnp.maximum((kept - dropped) / 2, room)


def _eps(x: Array) -> float:
    return float(jnp.finfo(x.dtype).eps)


def _at_least_float32(x: Array) -> Array:
    return x if x.dtype == jnp.float64 else x.astype(jnp.float32)


def _per_row(p: Array, shape: tuple[int, ...], dtype: Any) -> Array:
    """The shares, NaN where they are none."""
    share = _describe.per_token(p, shape, dtype)
    return jnp.where(_is_share(share), share, jnp.nan)


def _is_share(p: Any) -> Any:
    return (p >= scalars.FLOAT32_TINY) & (p <= 1)


def _checked(top: Any) -> TopK:
    """``top`` must be what `linear_topk` returns, with one token more than are kept."""
    if not isinstance(top, TopK):
        raise TypeError(
            f"top must be what lce_jax.linear_topk returns, got {type(top).__module__}.{type(top).__qualname__}"
        )
    _floats("top.logprobs", top.logprobs)
    _floats("top.lse", top.lse)
    if top.logprobs.ndim < 1 or tuple(top.logprobs.shape[:-1]) != tuple(top.lse.shape):
        raise ValueError(
            f"top.logprobs {tuple(top.logprobs.shape)} must be [..., k] with the shape of top.lse "
            f"{tuple(top.lse.shape)} before k"
        )
    if top.logprobs.shape[-1] < 2:
        raise ValueError(f"top has {top.logprobs.shape[-1]} token: give linear_topk(..., k + 1) for a floor of k")
    return TopK(*map(_describe.on_device, top))


def _share(p: Any, shape: tuple[int, ...]) -> Any:
    """A p in (0, 1], where its values are known, as an array that broadcasts."""
    if is_array(p) and not isinstance(p, np.generic):
        _checks.per_token("p", p, shape, "the rows")
        _checks.known_values("p must lie in (0, 1]", p, _is_share, shape, advice="1 keeps all of a row")
    elif scalars.positive("p", p) > 1:
        raise ValueError(f"p must lie in (0, 1], got {p}")
    return _describe.on_device(p)


def _floats(name: str, x: Any) -> None:
    _checks.array(name, x)
    if jnp.dtype(x.dtype).name not in _checks.FLOATS:
        raise TypeError(f"{name} must be one of {', '.join(_checks.FLOATS)}, got {x.dtype}")
