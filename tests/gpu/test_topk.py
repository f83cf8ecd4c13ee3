"""`linear_topk` on a GPU: exact logits of which many are equal, real shapes, and its memory."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lce_jax import floors, linear_logprobs, linear_topk
from tests.topk_cases import assert_exact, integers

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(
    ("num_tokens", "V", "k", "dtype"),
    [
        (300, 50257, 64, "bfloat16"),
        (128, 151936, 1, "float16"),
        (5, 1201, 512, "float32"),
        (700, 50257, 512, "bfloat16"),
    ],
)
def test_equal_logits_come_by_id(num_tokens: int, V: int, k: int, dtype: str) -> None:
    hidden, weight = integers(num_tokens, V, dtype, H=64)
    assert_exact(jax.jit(linear_topk, static_argnums=2)(hidden, weight, k), hidden, weight, k)


@pytest.mark.parametrize(
    "options", [{}, {"logit_softcap": 30.0}, {"logit_scale": -2.0}, {"weight_layout": "hv"}], ids=str
)
def test_a_real_head(options: dict[str, object]) -> None:
    """The ids of stored logits, within 200 MiB."""
    T, H, V, k = 1024, 4096, 151936, 64
    keys = jax.random.split(jax.random.key(0))
    hidden = jax.random.normal(keys[0], (T, H), jnp.bfloat16)
    weight = (jax.random.normal(keys[1], (V, H), jnp.bfloat16) / 32).astype(jnp.bfloat16)
    given = weight.T if options.get("weight_layout") == "hv" else weight
    compiled = jax.jit(lambda h, w: linear_topk(h, w, k, **options)).lower(hidden, given).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 200 << 20
    out = compiled(hidden, given)

    @jax.jit
    def stored(hidden: jax.Array, weight: jax.Array) -> tuple[jax.Array, ...]:
        z = jnp.matmul(hidden, weight.T, preferred_element_type=jnp.float32) * options.get("logit_scale", 1.0)
        cap = options.get("logit_softcap")
        z = z if cap is None else cap * jnp.tanh(z / cap)
        return *jax.lax.top_k(z, k), jax.nn.logsumexp(z, axis=1), jnp.take_along_axis(z, out.ids, axis=1)

    largest, ids, lse, at_ids = stored(hidden, weight)
    assert np.mean(np.asarray(ids) == np.asarray(out.ids)) > 0.999  # two programs may round two logits differently
    bound = H / 16 * 2.0**-24 * float(jnp.max(jnp.abs(largest)))  # the tensor cores' own, as in `benchmarks.problem`
    for z in (largest, at_ids):
        assert np.max(np.abs(np.asarray(out.logprobs) - np.asarray(z - lse[:, None]))) < bound
    assert np.max(np.abs(np.asarray(out.lse) - np.asarray(lse))) < bound


@pytest.mark.parametrize("num_tokens", [1, 7, 300])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_equal_logits_reach_their_floor(num_tokens: int, dtype: str) -> None:
    """In the kernels and in XLA's way, whose product of few tokens may be another kind of program than `linear_topk`'s.

    For float32 operands that may mean TF32 in one of them alone.
    """
    H, V = 4096, 8192
    keys = jax.random.split(jax.random.key(num_tokens))
    hidden = jax.random.normal(keys[0], (num_tokens, H)).astype(dtype)
    weight = (jax.random.normal(keys[1], (V, H)) * 3 / H**0.5).astype(dtype)
    twice, none = jnp.concatenate([weight, weight]), jnp.full(num_tokens, -100)
    for temperature in (1.0, 0.1):
        options = {"temperature": temperature, "precision": "highest"}
        top = linear_topk(hidden, twice, 4, **options)
        for implementation in ("mosaic_gpu", "xla") if dtype == "bfloat16" else ("xla",):
            given = {"stats": True, "implementation": implementation, **options}
            support = np.asarray(linear_logprobs(hidden, twice, none, logit_floor=floors.top_k(top), **given).support)
            assert np.all(support >= 4)
            assert np.mean(support == 4) > 0.98
            floor = floors.min_p(top.logprobs[:, 0] + top.lse, 1.0)
            assert np.all(linear_logprobs(hidden, twice, none, logit_floor=floor, **given).support >= 2)
