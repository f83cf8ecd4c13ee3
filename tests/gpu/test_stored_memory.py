"""`Plan.memory` on a GPU: what plain JAX code with stored logits takes. Nothing is run, only compiled."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from lce_jax import explain
from lce_jax.bench.candidates import materialised

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(
    ("T", "H", "dtype", "softcap"),
    [
        (4096, 1024, "bfloat16", None),
        (4096, 1024, "bfloat16", 30.0),
        (4096, 1024, "float32", None),
        (2048, 2048, "bfloat16", None),  # dweight holds one copy of the logits
        (1024, 2048, "bfloat16", None),  # all but one
    ],
)
def test_foretells_stored_logits(T: int, H: int, dtype: str, softcap: float | None) -> None:
    V, struct = 65536, jax.ShapeDtypeStruct
    call, seed = (struct((T, H), dtype), struct((V, H), dtype), struct((T,), jnp.int32)), struct((T,), jnp.float32)
    function = materialised(softcap)

    def both(hidden, weight, labels, a, b):
        def loss(hidden, weight):
            logprobs, entropy = function(hidden, weight, labels)
            return jnp.sum(a * logprobs + b * entropy), (logprobs, entropy)

        return jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)(hidden, weight)

    said = explain(*call, logit_softcap=softcap).memory.stored
    workspace = 40 << 20  # of the products
    for program, arguments, foretold in ((function, call, said.forward), (both, (*call, seed, seed), said.backward)):
        held = jax.jit(program).lower(*arguments).compile().memory_analysis().temp_size_in_bytes
        assert 0.95 * foretold <= held <= 1.05 * foretold + workspace, (foretold / T / V, held / T / V)
