"""`linear_kl` on a GPU: its kernels at real sizes, against plain XLA and float64."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.programs import KERNELS, use_kernels
from lce_jax import linear_kl, mosaic
from tests import oracle
from tests.kl_cases import Call, call, draw, evaluate, expected

pytestmark = pytest.mark.gpu

BFLOAT16, FLOAT16 = ("bfloat16",) * 4, ("float16",) * 4
CALLS = [
    call("forward", leading=(300,), H=512, G=256, V=4000, dtypes=BFLOAT16, temperature=True),
    call("reverse", leading=(300,), H=512, G=256, V=4000, dtypes=FLOAT16, direction="reverse", logit_softcap=5.0,
         teacher_logit_softcap="same"),
    call("padding", leading=(7, 100), H=256, G=512, V=4000, teachers_columns=4096, vocab_size=3100, dtypes=BFLOAT16,
         where=True),
    call("jsd", leading=(300,), H=512, G=256, V=4000, dtypes=BFLOAT16, temperature=True, direction="jsd", beta=0.3),
    call("jsd, padding", leading=(7, 100), H=256, G=512, V=4000, teachers_columns=4096, vocab_size=3100, where=True,
         dtypes=BFLOAT16, direction="jsd", logit_softcap=5.0, teacher_logit_softcap="same"),
    call("tv", leading=(300,), H=512, G=256, V=4000, dtypes=BFLOAT16, temperature=True, direction="tv"),
    call("tv, padding", leading=(7, 100), H=256, G=512, V=4000, teachers_columns=4096, vocab_size=3100, where=True,
         dtypes=FLOAT16, direction="tv", logit_softcap=5.0, teacher_logit_softcap="same"),
    call("clusters", leading=(2200,), H=192, V=2048, G=64, dtypes=BFLOAT16, where=True, direction="reverse"),
]  # fmt: skip


KEPT = [
    test._replace(name=f"{test.name}, {words}", options=(*test.options, ("cache_bytes", number)))
    for test in CALLS
    for words, number in (("all kept", 1 << 30), ("some kept", 3 << 20))
]
OF_OTHERS = "reverse, some kept", "jsd, padding, some kept", "tv, padding, some kept"


@pytest.mark.parametrize("test", [*CALLS, *KEPT], ids=str)
def test_matches_float64(test: Call) -> None:
    check(test)


@pytest.mark.parametrize("kernels", [name for name in KERNELS if name != "wgmma"])
@pytest.mark.parametrize("test", [CALLS[0], *(one for one in KEPT if one.name in OF_OTHERS)], ids=str)
def test_kernels_of_other_generations(test: Call, kernels: str) -> None:
    """A Hopper GPU runs mma.sync and cp.async too, which reads a weight in pieces of 128 rows."""
    if jax.devices()[0].compute_capability != "9.0":
        pytest.skip("Hopper alone runs the instructions of all generations")
    with use_kernels(KERNELS[kernels]):
        check(test._replace(V=4096), implementation="mosaic_gpu")


def check(test: Call, **more: Any) -> None:
    """Twice the same bits, near float64."""
    drawn = draw(test)
    want, (kl, gradients), again = expected(drawn), evaluate(drawn, **more), evaluate(drawn, **more)
    # Tensor cores truncate a product's partial sums: `tests.gpu.test_mosaic_gpu.VALUE_BOUND`.
    assert oracle.value_error(kl, want.kl) < 2e-5
    bound = {"bfloat16": 4e-3, "float16": 5e-4}[test.dtypes[0]] * (1.25 if "cache_bytes" in drawn.options else 1.0)
    for got, true in zip(gradients, want.gradients, strict=True):
        assert oracle.relative_norm(got, true) < bound
    for one, other in zip((kl, *gradients), (again[0], *again[1]), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("cache_bytes", [0, 3 << 30])
@pytest.mark.parametrize("direction", ["forward", "reverse", "jsd", "tv"])
def test_a_real_head(direction: str, cache_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As plain XLA, within 0.4 GiB and the cache."""
    T, H, V = 4096, 4096, 151936
    keys = jax.random.split(jax.random.key(0), 4)
    sizes = ((T, H), 1.0), ((V, H), 2 / H**0.5), ((T, H), 1.0), ((V, H), 2 / H**0.5)

    @jax.jit
    def drawn(keys: jax.Array) -> list[jax.Array]:
        of_each = zip(keys, sizes, strict=True)
        return [(jax.random.normal(key, shape, jnp.bfloat16) * factor) for key, (shape, factor) in of_each]

    operands = drawn(keys)

    def compiled() -> Any:
        def loss(hidden: Any, weight: Any, *teacher: Any) -> Any:
            kl = linear_kl(hidden, weight, *teacher, direction=direction, cache_bytes=cache_bytes)
            return jnp.sum(kl), kl

        return jax.jit(jax.grad(loss, argnums=(0, 1), has_aux=True)).lower(*operands).compile()

    with_kernels = compiled()
    assert "mosaic_gpu" in with_kernels.as_text()
    assert with_kernels.memory_analysis().temp_size_in_bytes < 0.4 * 2**30 + cache_bytes
    monkeypatch.setattr(mosaic, "supports", lambda _: "not here")
    jax.clear_caches()
    (dhidden, dweight), kl = with_kernels(*operands)
    (dhidden_of_xla, dweight_of_xla), kl_of_xla = compiled()(*operands)
    assert oracle.relative_norm(kl, kl_of_xla) < 1e-5
    assert oracle.relative_norm(dhidden, dhidden_of_xla) < 6e-3
    difference, whole = (jnp.linalg.norm(x.astype(jnp.float32)) for x in (dweight - dweight_of_xla, dweight_of_xla))
    assert float(difference / whole) < 6e-3
