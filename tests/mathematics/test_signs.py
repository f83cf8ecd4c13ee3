"""No log-probability is above 0, and none is NaN: peaked rows, with temperatures from 10 down to 1e-8."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lce_jax import linear_logits, linear_logprobs, linear_topk, masked_logprobs
from tests.pairs import combined

CALLS, T, H, V, K = 80, 64, 16, 1003, 6  # those of `make test` have 100,000 rows together


def topk_results(hidden: Any, weight: Any, ids: Any, **options: Any) -> list[Any]:
    del ids
    return [linear_topk(hidden, weight, K, **options).logprobs]


def candidate_results(hidden: Any, weight: Any, ids: Any, **options: Any) -> list[Any]:
    out = linear_logprobs(hidden, weight, ids[..., 0], candidates=ids, entropy=False, **options)
    return [out.logprobs, out.candidate_logprobs]


def masked_results(hidden: Any, weight: Any, ids: Any, **options: Any) -> list[Any]:
    return [masked_logprobs(linear_logits(hidden, weight, ids, **options), ids, ids[..., 0]).logprobs]


FUNCTIONS = {"top-k": topk_results, "candidates": candidate_results, "masked": masked_results}
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("optimized")]
BIAS, WHERE = 1e-3 * jnp.arange(V), jnp.arange(T) % 5 > 0
MORE: dict[str, dict[str, Any]] = {
    "vh": {},
    "hv and all else": {"vocab_size": 901, "weight_layout": "hv", "bias": BIAS, "where": WHERE},
}


@combined(
    function=list(FUNCTIONS),
    scale_and_softcap=[(1.0, None), (0.7, 30.0), (-1.3, jnp.float32(3.0)), (jnp.float32(0.7), None)],
    rest=list(MORE),
)
def test_no_logprob_is_above_zero(function: str, scale_and_softcap: Any, rest: str) -> None:
    keys = jax.random.split(jax.random.key(0), 2)
    weight = jax.random.normal(keys[0], (V, H))
    (scale, softcap), more = scale_and_softcap, MORE[rest]
    options = {"logit_scale": scale, "logit_softcap": softcap, **more}

    @jax.jit
    def draw(key: Any) -> Any:
        of_hidden, of_temperature = jax.random.split(key)
        hidden = jax.random.normal(of_hidden, (T, H))
        _, ids = jax.lax.top_k(scale * (hidden @ weight.T), K)  # the likeliest
        ids = jnp.where(ids < more.get("vocab_size", V), ids, -1)
        return hidden, ids, 10 ** jax.random.uniform(of_temperature, (T,), minval=-8.0, maxval=1.0)

    @jax.jit
    def logprobs(hidden: Any, ids: Any, temperature: Any) -> Any:
        own = weight.T if "weight_layout" in more else weight
        return FUNCTIONS[function](hidden, own, ids, temperature=temperature, **options)

    calls = [logprobs(*draw(key)) for key in jax.random.split(keys[1], CALLS)]
    found = [np.concatenate(x) for x in zip(*calls, strict=True)]
    for values in found:
        assert not np.isnan(values).any()
        assert (values > 0).sum() == 0
