"""Floors for ``logit_floor``: from the smallest logit that a sampler kept, or for top-k, top-p and min-p.

    floor = floors.top_k(linear_topk(hidden, weight, k + 1, temperature=0.7))
    out = linear_logprobs(hidden, weight, labels, temperature=0.7, logit_floor=floor)

Each row has one floor, a logit after temperature, scale and softcap. The row's set consists of the vocabulary tokens
whose logit is at least the floor.

Two programs may round the same logit differently. If a floor were equal to the smallest logit of the set, rounding
would decide whether that token, and every token with the same logit, is in the set. So every floor here lies below the
smallest logit of the set: by half the distance to the next smaller logit or by 2⁻¹⁶ of the logit's size, whichever is
larger. To apply several rules at once, take the largest of their floors: ``jnp.maximum(a, b)``.
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


# How much rounding may change a logit between two programs. The unit is one in the last place of |ln p| or |lse|,
# whichever is larger, because the logit is the sum ln p + lse. A GPU's tensor cores truncate a sum every 16 terms,
# which makes up to 128 units at a hidden size of 4096. At that size on an H100, a program for one token and a program
# for many tokens differ by 61 units, and two programs of the same kind by 2.
ROOM = 128
MOST_NATS = math.log(scalars.INT32_MAX)  # the largest difference between lse and the largest logit, in any vocabulary


def of_smallest(smallest: Float[ArrayLike, "..."], dtype: Any) -> Float[Array, "..."]:
    """Returns a floor half a step of the sampler's dtype below ``smallest``, the smallest logit that the sampler kept.

    A logit that ``dtype`` rounds to ``smallest`` or above lies above ``smallest - step / 2``. So the unrounded logits
    that reach the floor are those of the tokens that the sampler kept. In float32, a step is smaller than the rounding
    errors of the sums, so there the floor is lower than ``smallest`` by 2⁻¹⁶ of the logit.

    Args:
        smallest: ``[...]`` the smallest logit that the sampler kept for each token, before any temperature. With a
            temperature, divide the floor by it: ``floors.of_smallest(smallest, "bfloat16") / temperature``. Give -inf
            where the sampler kept the whole vocabulary; the floor is then -inf.
        dtype: the dtype that the sampler's logits were rounded to, even if they were later converted to another one:
            "bfloat16" (in most engines), "float16", "float32" or "float64".

    Returns:
        ``[...]`` float32 (float64 if ``smallest`` is). The floor is NaN where ``smallest`` is NaN, or is finite but too
        large for ``dtype``.

    Raises:
        TypeError: ``smallest`` is not an array of floats, or ``dtype`` is none of the four.
        ValueError: ``smallest`` is not traced, and has a finite value that is too large for ``dtype``.

    Example:
        >>> import jax.numpy as jnp
        >>> from lce_jax import floors
        >>> floors.of_smallest(jnp.array([16.0, 20.0]), "bfloat16").tolist()  # a step is 0.0625 below 16
        [15.96875, 19.9375]
    """
    _check_floats("smallest", smallest)
    try:
        name = None if dtype is None else jnp.dtype(dtype).name
    except TypeError:
        name = None
    if name not in _checks.FLOATS:
        raise TypeError(f"dtype must be one of {', '.join(_checks.FLOATS)}, got {dtype!r}")
    most = float(jnp.finfo(name).max)
    _checks.check_known_values(
        f"smallest must be within {name}, whose largest number is {most:g}",
        smallest,
        lambda x: ~(np.isfinite(x) & (np.abs(x) > most)),
        smallest.shape,
        advice="give the dtype that the sampler's logits were rounded to",
    )
    return _floor_of_smallest(_describe.put_on_device(smallest), jax.dtypes.canonicalize_dtype(name))


@functools.partial(jax.jit, static_argnums=1, inline=True)
def _floor_of_smallest(smallest: Array, dtype: Any) -> Array:
    logit, rounded = _widen_to_float32(smallest), smallest.astype(dtype)
    step = logit - jnp.nextafter(rounded, jnp.full_like(rounded, -jnp.inf)).astype(logit.dtype)
    floor = logit - jnp.maximum(step / 2, _eps(logit) * ROOM * jnp.abs(logit))
    return jnp.where(jnp.isfinite(rounded), floor, jnp.where(jnp.isinf(logit), logit, jnp.nan))


def top_k(top: TopK) -> Float[Array, "..."]:
    """Returns the floor for the k most likely tokens, computed from the k + 1 most likely tokens.

    The floor is the lower of two numbers: one halfway between the k-th logit and the next, the other below the k-th
    logit by 2⁻¹⁶ of |ln p| or |lse|, whichever is larger. So every token whose logit equals the k-th, or differs from
    it only by rounding, is in the set.

    Args:
        top: ``linear_topk(..., k + 1)``, with the options of the call that takes the floor.

    Returns:
        ``[...]`` float32 (float64 if ``top`` is).

    Raises:
        TypeError: ``top`` is not a `TopK`.
        ValueError: ``top`` has fewer than two tokens.

    Example:
        >>> import jax.numpy as jnp
        >>> from lce_jax import floors, linear_topk
        >>> weight = jnp.array([[1.0], [2.0], [4.0], [8.0]])
        >>> floors.top_k(linear_topk(jnp.ones((1, 1)), weight, 3)).tolist()  # k = 2
        [3.0]
    """
    return _top_k(_check_top(top))


@functools.partial(jax.jit, inline=True)
def _top_k(top: TopK) -> Array:
    return _floor_below(top, jnp.full((*top.lse.shape, 1), top.logprobs.shape[-1] - 2, jnp.int32))


def top_p(top: TopK, p: float | Float[ArrayLike, "..."], *, after_top_k: bool = False) -> Float[Array, "..."]:
    """Returns the floor for the nucleus: the smallest set of most likely tokens whose probabilities sum to p or more.

    The floor lies below the smallest logit of the nucleus, as far as the floor of `top_k` lies below the k-th logit. If
    ``top`` has no token after the nucleus of a row, the row's floor is NaN, and so are its results: ask `linear_topk`
    for more tokens.

    Args:
        top: ``linear_topk(..., n)``, with the options of the call that takes the floor.
        p: in (0, 1]: a number, or a float array that broadcasts to ``[...]``. 1 keeps the whole vocabulary, with a
            floor of -inf. A value outside (0, 1] is refused; in a traced array it makes its row NaN.
        after_top_k: True for engines that first reduce the vocabulary to the k = n - 1 most likely tokens. Then p is a
            share of these k tokens' probability, and the nucleus may have all k. With p = 1 it has, and the floor is
            that of `top_k`. False: p is a share of the whole vocabulary's probability.

    Returns:
        ``[...]`` float32 (float64 if ``top`` is).

    Raises:
        TypeError: ``top`` is not a `TopK`, or p is neither a number nor an array of floats.
        ValueError: ``top`` has fewer than two tokens, or p lies outside (0, 1] or has a shape that does not fit.

    Example:
        >>> import jax.numpy as jnp
        >>> from lce_jax import floors, linear_topk
        >>> weight = jnp.log(jnp.array([[0.4], [0.3], [0.2], [0.1]]))
        >>> top = linear_topk(jnp.ones((1, 1)), weight, 3)
        >>> float(jnp.exp(floors.top_p(top, 0.6))[0]) > 0.2  # 0.4 and 0.3 are the nucleus
        True
        >>> floors.top_p(top, 0.95).tolist()                 # the nucleus has four tokens
        [nan]
    """
    top = _check_top(top)
    return _top_p(top, _check_share(p, top.lse.shape), scalars.flag("after_top_k", after_top_k))


@functools.partial(jax.jit, static_argnums=2, inline=True)
def _top_p(top: TopK, p: Array, after_top_k: bool) -> Array:
    mass = jnp.exp(_widen_to_float32(top.logprobs)[..., :-1])
    if after_top_k:
        mass = mass / jnp.sum(mass, axis=-1, keepdims=True)
    share = _broadcast_share(p, top.lse.shape, mass.dtype)
    reached = jnp.sum(jnp.cumsum(mass, axis=-1) < share[..., None], axis=-1, keepdims=True, dtype=jnp.int32)
    most = mass.shape[-1] - 1
    last = jnp.minimum(reached, most)
    if after_top_k:  # with p = 1 the nucleus has all k tokens, whatever the rounding
        floor = _floor_below(top, jnp.where(share[..., None] == 1, most, last))
    else:
        floor = jnp.where(reached[..., 0] <= most, _floor_below(top, last), jnp.nan)
        floor = jnp.where(share == 1, -jnp.inf, floor)
    return jnp.where(share > 0, floor, jnp.nan)


def min_p(max_logit: Float[ArrayLike, "..."], p: float | Float[ArrayLike, "..."]) -> Float[Array, "..."]:
    """Returns the floor for tokens with at least p times the largest probability: a little below ``max_logit + ln p``.

    To allow for rounding, the floor is lower than this sum by 2⁻¹⁶ of ``|max_logit| + 21.5``, an upper bound of |lse|.
    So the set contains the most likely token, and each token that in exact arithmetic has p times the largest
    probability.

    Args:
        max_logit: ``[...]`` the largest logit: ``linear_logprobs(..., stats=True).max_logit``, or
            ``top.logprobs[..., 0] + top.lse`` from a `TopK`.
        p: in (0, 1]: a number, or a float array that broadcasts to ``[...]``. A value outside (0, 1] is refused; in a
            traced array it makes its row NaN.

    Returns:
        ``[...]`` float32 (float64 if ``max_logit`` is).

    Raises:
        TypeError: ``max_logit`` is not an array of floats, or p is neither a number nor an array of floats.
        ValueError: p lies outside (0, 1] or has a shape that does not fit.

    Example:
        >>> import jax.numpy as jnp
        >>> from lce_jax import floors
        >>> round(float(floors.min_p(jnp.array([2.0]), 0.1)[0]), 3)  # 2 - ln 10
        -0.303
    """
    _check_floats("max_logit", max_logit)
    return _min_p(_describe.put_on_device(max_logit), _check_share(p, max_logit.shape))


@functools.partial(jax.jit, inline=True)
def _min_p(max_logit: Array, p: Array) -> Array:
    highest = _widen_to_float32(max_logit)
    size = jnp.abs(highest)
    room = _eps(highest) * ROOM * (size + MOST_NATS) + _eps(max_logit) * size
    return highest + jnp.log(_broadcast_share(p, highest.shape, highest.dtype)) - room


def _floor_below(top: TopK, last: Array) -> Array:
    """Returns the floor for the tokens of ``top`` up to and including index ``last``, which is ``[..., 1]``."""
    lse = _widen_to_float32(top.lse)
    z = _widen_to_float32(top.logprobs) + lse[..., None]
    inside = lax.broadcasted_iota(jnp.int32, z.shape, z.ndim - 1) <= last
    smallest = jnp.min(jnp.where(inside, z, jnp.inf), axis=-1)
    next_smaller = jnp.max(jnp.where(inside, -jnp.inf, z), axis=-1)
    room = (_eps(lse) * ROOM + _eps(top.lse)) * jnp.maximum(jnp.abs(smallest - lse), jnp.abs(lse))
    return smallest - jnp.maximum((smallest - next_smaller) / 2, room)


def _eps(x: Array) -> float:
    return float(jnp.finfo(x.dtype).eps)


def _widen_to_float32(x: Array) -> Array:
    return x if x.dtype == jnp.float64 else x.astype(jnp.float32)


def _broadcast_share(p: Array, shape: tuple[int, ...], dtype: Any) -> Array:
    """Broadcasts p to all rows, with NaN in place of invalid values."""
    share = _describe.broadcast_to_tokens(p, shape, dtype)
    return jnp.where(_is_share(share), share, jnp.nan)


def _is_share(p: Any) -> Any:
    return (p >= scalars.FLOAT32_TINY) & (p <= 1)


def _check_top(top: Any) -> TopK:
    """Returns ``top`` on the device. Refuses a value that is not a `TopK` of two or more tokens."""
    if not isinstance(top, TopK):
        raise TypeError(
            f"top must be what lce_jax.linear_topk returns, got {type(top).__module__}.{type(top).__qualname__}"
        )
    _check_floats("top.logprobs", top.logprobs)
    _check_floats("top.lse", top.lse)
    if top.logprobs.ndim < 1 or tuple(top.logprobs.shape[:-1]) != tuple(top.lse.shape):
        raise ValueError(
            f"top.logprobs {tuple(top.logprobs.shape)} must be [..., k] with the shape of top.lse "
            f"{tuple(top.lse.shape)} before k"
        )
    if top.logprobs.shape[-1] < 2:
        raise ValueError(f"top has {top.logprobs.shape[-1]} token: give linear_topk(..., k + 1) for a floor of k")
    return TopK(*map(_describe.put_on_device, top))


def _check_share(p: Any, shape: tuple[int, ...]) -> Any:
    """Returns p as an array that broadcasts to the rows. Refuses known values outside (0, 1]."""
    if is_array(p) and not isinstance(p, np.generic):
        _checks.check_per_token("p", p, shape, "the rows")
        _checks.check_known_values("p must lie in (0, 1]", p, _is_share, shape, advice="1 keeps the whole vocabulary")
    elif scalars.positive("p", p) > 1:
        raise ValueError(f"p must lie in (0, 1], got {p}")
    return _describe.put_on_device(p)


def _check_floats(name: str, x: Any) -> None:
    _checks.check_array(name, x)
    if jnp.dtype(x.dtype).name not in _checks.FLOATS:
        raise TypeError(f"{name} must be one of {', '.join(_checks.FLOATS)}, got {x.dtype}")
