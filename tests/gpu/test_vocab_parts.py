"""A vocabulary in parts has the same bits over any number of shards, each computed on this GPU."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lce_jax import linear_logprobs
from tests import one_device_shards, oracle

pytestmark = pytest.mark.gpu
H, V, PART = 1024, 151936, 18992
SHARDS = (1, 2, 4, 8)
NAMES = ("logprobs", "entropy", "lse", "max_logit", "min_logit")


class Drawn(NamedTuple):
    hidden: jax.Array
    weight: jax.Array
    labels: jax.Array
    temperature: jax.Array


def drawn(tokens: int, vocab_size: int) -> Drawn:
    """Labels at borders of parts and of tiles first."""
    keys = jax.random.split(jax.random.key(tokens), 4)
    labels = jax.random.randint(keys[2], (tokens,), 0, vocab_size)
    borders = jnp.asarray([PART - 1, PART, PART + 255, PART + 256, vocab_size - 1, 2 * PART - 1, 0, -1], jnp.int32)
    return Drawn(
        jax.random.normal(keys[0], (tokens, H), jnp.bfloat16),
        (jax.random.normal(keys[1], (V, H), jnp.bfloat16) * 3 / H**0.5).astype(jnp.bfloat16),
        labels.at[: len(borders)].set(borders[:tokens]),
        jax.random.uniform(keys[3], (tokens,), minval=0.3, maxval=3.0),
    )


def by_lists(given: Drawn, shards: int, **options: Any) -> Any:
    """From PyTorch, launched directly: a whole vocabulary, or ranks that take turns."""
    torch = pytest.importorskip("torch")
    import lce_torch_bridge as lb
    from lce_torch_bridge._types import Tensors
    from lce_torch_bridge.launched_directly._launch_with import choose_way
    from lce_torch_bridge.operators import _operators
    from tests.torch import problem
    from tests.torch.as_gpu import Ranks

    hidden, weight, labels, temperature = (torch.from_dlpack(x).clone() for x in given)
    call = problem.told(V, group="all", requested=("mosaic_gpu",), **options)
    lb.launch_with("direct")
    try:
        if shards == 1:
            return lb.linear_logprobs(hidden, weight, labels, temperature=temperature, **options)
        with pytest.MonkeyPatch.context() as patch:
            ranks = Ranks(patch, shards)
            for ranks.rank in (*range(shards), 0):  # what all send, the first one receives
                own = Tensors(hidden, weight.chunk(shards)[ranks.rank], None, labels, temperature, None)
                found = _operators.run_forward(own, call, False, choose_way(own.hidden))
        return lb.LogprobOutput(**dict(zip(call.fields, found, strict=False)))
    finally:
        lb.launch_with(None)


@pytest.mark.parametrize("vocab_size", [V, 151643])
@pytest.mark.parametrize("tokens", [1, 77, 4096])
def test_same_bits(tokens: int, vocab_size: int) -> None:
    """Of JAX over 1, 2, 4 and 8 shards, of a jitted call, and of kernels launched from PyTorch over as many shards."""
    given = drawn(tokens, vocab_size)
    options: dict[str, Any] = {"stats": True, "vocab_size": vocab_size, "vocab_part_size": PART}
    run = jax.jit(lambda x: linear_logprobs(*x[:3], temperature=x[3], implementation="mosaic_gpu", **options))
    whole = run(given)
    others: dict[str, Any] = {}
    for shards in SHARDS:
        of_jax = one_device_shards.linear_logprobs(shards, *given[:3], temperature=given[3], **options)
        others |= {f"JAX, {shards}": of_jax, f"lists, {shards}": by_lists(given, shards, **options)}
    for how, other in others.items():
        for name in NAMES:
            x = getattr(other, name)
            x = np.asarray(x) if isinstance(x, jax.Array) else x.cpu().numpy()
            assert np.array_equal(getattr(whole, name), x), (how, name)


@pytest.mark.parametrize("vocab_size", [V, 151643])
def test_results_and_gradients(vocab_size: int) -> None:
    """Results against float64; gradients against those of a call without parts."""
    given = drawn(77, vocab_size)

    def objective(hidden: Any, weight: Any, rest: Any, **options: Any) -> Any:
        options = {"vocab_size": vocab_size, "implementation": "mosaic_gpu", **options}
        out = linear_logprobs(hidden, weight, rest[0], temperature=rest[1], **options)
        return jnp.sum(out.logprobs - 0.1 * out.entropy), out

    step = jax.jit(jax.value_and_grad(objective, argnums=(0, 1), has_aux=True), static_argnames="vocab_part_size")
    (_, out), grads = step(*given[:2], given[2:], vocab_part_size=PART)
    _, wanted = step(*given[:2], given[2:])
    exact = oracle.logprobs(*given[:3], temperature=given[3], vocab_size=vocab_size)
    for name in NAMES[:3]:
        assert oracle.value_error(getattr(out, name), getattr(exact, name)) < 2e-5, name
    assert max(map(oracle.relative_norm, grads, wanted)) < 1e-3  # a last digit of lse rounds some dlogits otherwise
