"""Floors for ``logit_floor``: from a sampler's smallest logit, or from the distribution as top-k, top-p, min-p cut it.

    floor = floors.top_k(linear_topk(hidden, weight, k + 1, temperature=0.7))
    out = linear_logprobs(hidden, weight, labels, temperature=0.7, logit_floor=floor)

A floor is in logits, after temperature, scale and softcap, one per token. A token is in the set if its logit is at
least the floor. Sampler and trainer round the same logit differently, so a floor that equals the last kept one is a
coin toss for that token. `of_smallest`, `top_k` and `top_p` therefore put it between the last kept logit and the first
dropped one. Sets of several rules at once are those above the largest of their floors: ``jnp.maximum(a, b)``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax.numpy as jnp

from lce_jax import scalars
from lce_jax._types import TopK, is_array
from lce_jax.call import _checks

if TYPE_CHECKING:
    from lce_jax._shapes import Array, Float

__all__ = ["min_p", "of_smallest", "top_k", "top_p"]


def of_smallest(smallest: Float[Array, "..."], dtype: Any) -> Float[Array, "..."]:
    """The floor from the smallest logit that a sampler kept: half a step of the sampler's numbers below it.

    What rounds to ``smallest`` or above lies above ``smallest - step / 2``, so that the logits which the sampler
    rounded to ``dtype`` and kept are those that reach the floor before they are rounded.

    Args:
        smallest: ``[...]`` the smallest kept logit of each token, as the product gave it, before any temperature.
            With one, divide the floor by it: ``floors.of_smallest(smallest, "bfloat16") / temperature``.
        dtype: what the sampler's logits were rounded to, "bfloat16" in most engines, whatever they are converted to
            after that.

    Returns:
        ``[...]`` float32.

    Raises:
        TypeError: ``smallest`` that is no array of floats, or a ``dtype`` that is none.

    Example:
        >>> import jax.numpy as jnp
        >>> from lce_jax import floors
        >>> floors.of_smallest(jnp.array([16.0, 20.0]), "bfloat16").tolist()  # a step is 0.0625 below 16
        [15.96875, 19.9375]
    """
    _floats("smallest", smallest)
    dtype = jnp.dtype(dtype)
    if not jnp.issubdtype(dtype, jnp.floating):
        raise TypeError(f"dtype must be floating point, got {dtype}")
    kept = jnp.asarray(smallest).astype(dtype)
    below = jnp.nextafter(kept, jnp.full_like(kept, -jnp.inf))
    return _between(kept.astype(jnp.float32), below.astype(jnp.float32))


def top_k(top: TopK) -> Float[Array, "..."]:
    """The floor that the k most likely tokens reach, from the k + 1 most likely ones.

    It lies in the middle between the k-th logit and the next. Tokens whose logit equals the k-th are all in the set.

    Args:
        top: ``linear_topk(..., k + 1)``, with the options of the call that takes the floor.

    Returns:
        ``[...]`` float32.

    Raises:
        ValueError: fewer than two tokens in ``top``.

    Example:
        >>> import jax.numpy as jnp
        >>> from lce_jax import floors, linear_topk
        >>> weight = jnp.array([[1.0], [2.0], [4.0], [8.0]])
        >>> floors.top_k(linear_topk(jnp.ones((1, 1)), weight, 3)).tolist()  # of the 2 largest
        [3.0]
    """
    z = _logits(top)
    return _between(z[..., -2], z[..., -1])


def top_p(top: TopK, p: float | Float[Array, "..."], *, after_top_k: bool = False) -> Float[Array, "..."]:
    """The floor that the nucleus reaches: the fewest most likely tokens that have a probability of p together.

    It lies in the middle between the last logit of the nucleus and the next. A row whose nucleus is not followed by
    one more token in ``top`` is NaN, and so are its results: ask `linear_topk` for more.

    Args:
        top: ``linear_topk(..., n)``, with the options of the call that takes the floor.
        p: in (0, 1]: a number, or an array that broadcasts to ``[...]``. 1 keeps all: the floor is -inf.
        after_top_k: True for engines that cut to the k = n - 1 most likely tokens first: p is a share of what these
            have together, and the nucleus may be all of them, as it is for a p of 1. False: p is a share of the whole
            vocabulary.

    Returns:
        ``[...]`` float32.

    Raises:
        ValueError: fewer than two tokens in ``top``, or a p outside (0, 1].

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
    z = _logits(top)
    _share(p)
    mass = jnp.exp(top.logprobs[..., :-1])
    if after_top_k:
        mass = mass / jnp.sum(mass, axis=-1, keepdims=True)
    before = jnp.cumsum(mass, axis=-1)
    share = jnp.asarray(p, z.dtype)
    share = share[..., None] if share.ndim else share
    last = jnp.sum(before < share, axis=-1, keepdims=True)  # the place of the nucleus's last token
    most = mass.shape[-1] - 1
    ends = _between(*(jnp.take_along_axis(z, jnp.minimum(last, most) + i, axis=-1)[..., 0] for i in (0, 1)))
    if after_top_k:
        return ends
    ends = jnp.where(last[..., 0] <= most, ends, jnp.nan)
    return jnp.where(jnp.asarray(p, z.dtype) >= 1, -jnp.inf, ends)


def min_p(max_logit: Float[Array, "..."], p: float | Float[Array, "..."]) -> Float[Array, "..."]:
    """The floor of tokens with at least p times the largest probability: ``max_logit + ln p``.

    Args:
        max_logit: ``[...]`` the largest logit: ``linear_logprobs(..., stats=True).max_logit``, or of a ``TopK``
            ``top.logprobs[..., 0] + top.lse``.
        p: in (0, 1]: a number, or an array that broadcasts to ``[...]``.

    Returns:
        ``[...]`` float32. Unlike the other floors it is not halfway between two logits: a token within rounding of it
        may be in one program's set and not in the other's.

    Raises:
        TypeError: a ``max_logit`` that is no array of floats.
        ValueError: a p outside (0, 1].

    Example:
        >>> import jax.numpy as jnp
        >>> from lce_jax import floors
        >>> round(float(floors.min_p(jnp.array([2.0]), 0.1)[0]), 3)  # 2 - ln 10
        -0.303
    """
    _floats("max_logit", max_logit)
    _share(p)
    return jnp.asarray(max_logit) + jnp.log(jnp.asarray(p, jnp.float32))


def _logits(top: TopK) -> Float[Array, "*b k"]:
    """The logits of the most likely tokens, of which there must be one more than are kept."""
    if top.logprobs.shape[-1] < 2:
        raise ValueError(f"top has {top.logprobs.shape[-1]} token: give linear_topk(..., k + 1) for a floor of k")
    return top.logprobs + top.lse[..., None]


def _between(kept: Array, dropped: Array) -> Array:
    return dropped + (kept - dropped) / 2


def _share(p: Any) -> None:
    """A number must lie in (0, 1]. Values of an array are not looked at."""
    if not is_array(p) and scalars.positive("p", p) > 1:
        raise ValueError(f"p must lie in (0, 1], got {p}")


def _floats(name: str, x: Any) -> None:
    _checks.array(name, x)
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise TypeError(f"{name} must be floating point, got {x.dtype}")
