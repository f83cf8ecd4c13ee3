"""What training code wraps around the functions: jit, vmap, scan, remat, partial gradients, donation."""

from __future__ import annotations

import functools
import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

from lce_jax import linear_cross_entropy, linear_logprobs, local, sharded_linear_logprobs
from tests import cases, oracle

HIDDEN, WEIGHT, LABELS, _, SEEDS = cases.draw(cases.case("transforms", leading=(4, 6), H=16, V=50))


def loss(hidden, weight, labels=LABELS):
    return linear_cross_entropy(hidden, weight, labels, precision="highest")


@functools.cache
def plain() -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    """The loss and its gradients without anything around them."""
    return jax.value_and_grad(loss, argnums=(0, 1))(HIDDEN, WEIGHT)


def close(got, want) -> bool:
    return all(oracle.relative_norm(a, b) < 2e-6 for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("policy", [None, jax.checkpoint_policies.everything_saveable], ids=["nothing", "everything"])
def test_remat(policy) -> None:
    assert close(jax.jit(jax.grad(jax.checkpoint(loss, policy=policy), argnums=(0, 1)))(HIDDEN, WEIGHT), plain()[1])


def test_scan_over_microbatches() -> None:
    def step(carry, batch):
        value, grads = jax.value_and_grad(loss, argnums=(0, 1))(batch[0], WEIGHT, batch[1])
        return carry + grads[1], (value, grads[0])

    dweight, (values, dhidden) = jax.lax.scan(step, jnp.zeros_like(WEIGHT), (HIDDEN, LABELS))
    value, grads = plain()
    assert np.isclose(values.mean(), value)
    assert close((dhidden / 4, dweight / 4), grads)


def test_vmap() -> None:
    out = jax.vmap(lambda h, y: linear_logprobs(h, WEIGHT, y, precision="highest"))(HIDDEN, LABELS)
    want = linear_logprobs(HIDDEN, WEIGHT, LABELS, precision="highest")
    assert oracle.value_error(out.logprobs, want.logprobs) < 2e-6
    grads = jax.vmap(jax.grad(loss, argnums=(0, 1)), in_axes=(0, None, 0))(HIDDEN, WEIGHT, LABELS)
    assert close((grads[0] / 4, grads[1].mean(0)), plain()[1])


@pytest.mark.parametrize("argnums", [0, 1])
def test_one_operand_frozen(argnums: int) -> None:
    assert close([jax.jit(jax.grad(loss, argnums=argnums))(HIDDEN, WEIGHT)], [plain()[1][argnums]])


def test_a_frozen_weight_costs_no_weight_gradient() -> None:
    """The compiler drops the third product: counted in the program's own FLOPs."""
    T, H, V = 256, 64, 2048
    structs = [jax.ShapeDtypeStruct(s, d) for s, d in [((T, H), "float32"), ((V, H), "float32"), ((T,), "int32")]]

    def products(argnums) -> int:
        compiled = jax.jit(jax.grad(loss, argnums=argnums)).lower(*structs).compile()
        return compiled.as_text().count(" dot(") + compiled.as_text().count('custom_call_target="__onednn$matmul"')

    assert products(0) == products((0, 1)) - 1


@pytest.mark.parametrize("field", ["logprobs", "entropy", "lse"])
def test_one_output_used(field: str) -> None:
    index = ("logprobs", "entropy", "lse").index(field)
    seeds = [SEEDS[i] if i == index else 0 * SEEDS[i] for i in range(3)]
    grads = jax.grad(
        lambda h, w: jnp.sum(SEEDS[index] * getattr(linear_logprobs(h, w, LABELS, precision="highest"), field)),
        argnums=(0, 1),
    )(HIDDEN, WEIGHT)
    assert all(
        oracle.relative_norm(a, b) < 1e-5
        for a, b in zip(grads, oracle.gradients(HIDDEN, WEIGHT, LABELS, seeds), strict=True)
    )


def test_extremes_have_no_gradient() -> None:
    def objective(hidden):
        out = linear_logprobs(hidden, WEIGHT, LABELS, stats=True)
        return jnp.sum(out.max_logit + out.min_logit)

    assert np.all(np.asarray(jax.grad(objective)(HIDDEN)) == 0)


def test_no_gradient_for_temperature() -> None:
    def objective(temperature):
        return linear_logprobs(HIDDEN, WEIGHT, LABELS, temperature=temperature).logprobs.sum()

    assert float(jax.grad(objective)(jnp.float32(0.7))) == 0


def test_tied_weight_gets_both_gradients() -> None:
    """The embedding is used twice: on the way in and as the head."""

    def tied(embedding, head):
        return head(embedding[LABELS], embedding)

    def plain(hidden, weight):
        log_p = jax.nn.log_softmax(jnp.matmul(hidden, weight.T, precision="highest"))
        return -jnp.take_along_axis(log_p, LABELS[..., None], axis=-1).mean()

    assert close([jax.grad(tied)(WEIGHT, loss)], [jax.grad(tied)(WEIGHT, plain)])


def test_a_new_temperature_or_mask_compiles_nothing() -> None:
    function = jax.jit(lambda t, where: linear_logprobs(HIDDEN, WEIGHT, LABELS, temperature=t, where=where).entropy)
    for step in range(3):
        function(jnp.float32(0.5 + step), jnp.arange(24).reshape(4, 6) > step)
    assert function._cache_size() == 1


@pytest.mark.parametrize("name", ["linear_logprobs", "gradient", "local", "sharded"])
def test_calls_outside_jit_compile_once(name: str) -> None:
    mesh = jax.make_mesh((2, 2), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices("cpu")[:4])
    calls = {
        "linear_logprobs": lambda: linear_logprobs(HIDDEN, WEIGHT, LABELS, temperature=0.7),
        "gradient": lambda: jax.grad(loss, argnums=(0, 1))(HIDDEN, WEIGHT),
        "local": lambda: local.statistics(HIDDEN[0], WEIGHT, LABELS[0]),
        "sharded": lambda: sharded_linear_logprobs(HIDDEN, WEIGHT, LABELS, mesh=mesh, batch_axes="data"),
    }
    compiled: list[str] = []
    logger = logging.getLogger("jax._src.interpreters.pxla")
    jax.clear_caches()
    with jax.log_compiles(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(logger, "handle", lambda record: compiled.append(record.getMessage()))
        jax.block_until_ready(calls[name]())
        assert compiled
        compiled.clear()
        jax.block_until_ready(calls[name]())
    assert compiled == []


@pytest.mark.parametrize("name", ["linear_logprobs", "options", "arrays", "loss", "jit", "sharded"])
def test_no_implicit_transfers(name: str) -> None:
    """Numbers and options are part of programs, or put on the device explicitly."""
    mesh = jax.make_mesh((2,), ("tensor",), axis_types=(AxisType.Auto,), devices=jax.devices("cpu")[:2])
    whole, split = (jax.NamedSharding(mesh, jax.P(*axes)) for axes in ((), ("tensor",)))
    placed = jax.device_put((HIDDEN, WEIGHT, LABELS), (whole, split, whole))
    where, temperature = LABELS > 3, jnp.full((4, 1), 0.7)
    options = dict(logit_softcap=30.0, logit_scale=0.5, stats=True, vocab_size=45)

    numbers = {name: jnp.float32(value) for name, value in (("logit_softcap", 30), ("logit_scale", 0.5), ("z_loss", 1))}
    bias = jnp.ones(WEIGHT.shape[:1])

    def smoothed(hidden, weight, labels):
        return linear_cross_entropy(hidden, weight, labels, ignore_index=3, label_smoothing=0.1, z_loss=1e-4)

    calls = {
        "linear_logprobs": lambda: linear_logprobs(HIDDEN, WEIGHT, LABELS, temperature=0.7),
        "options": lambda: linear_logprobs(HIDDEN, WEIGHT, LABELS, where=where, temperature=temperature, **options),
        "arrays": lambda: linear_cross_entropy(HIDDEN, WEIGHT, LABELS, bias=bias, normalizer=7, **numbers),
        "loss": lambda: smoothed(HIDDEN, WEIGHT, LABELS),
        "jit": lambda: jax.jit(jax.value_and_grad(smoothed))(HIDDEN, WEIGHT, LABELS),
        "sharded": lambda: sharded_linear_logprobs(*placed, mesh=mesh),
    }
    jax.clear_caches()
    with jax.transfer_guard("disallow"):
        for _ in range(2):
            jax.block_until_ready(calls[name]())


def test_strict_promotion_and_debug_modes() -> None:
    """Nothing is promoted by accident, and no NaN is computed on the way, not even in rows left out."""
    where = jnp.arange(24).reshape(4, 6) < 2
    with (
        jax.numpy_dtype_promotion("strict"),
        jax.numpy_rank_promotion("raise"),
        jax.debug_nans(True),
        jax.debug_infs(True),
    ):
        for dtype in (jnp.float32, jnp.bfloat16):
            value, grads = jax.value_and_grad(
                lambda w, dtype=dtype: linear_cross_entropy(
                    HIDDEN.astype(dtype), w, LABELS, where=where, label_smoothing=0.1, z_loss=1e-3, logit_softcap=5.0,
                    temperature=jnp.ones((4, 1), dtype), vocab_size=40,
                )
            )(WEIGHT.astype(dtype))  # fmt: skip
            assert np.isfinite(value)
            assert np.all(np.isfinite(np.asarray(grads, np.float32)))


def test_jvp_is_refused_by_jax() -> None:
    with pytest.raises(TypeError, match="custom_vjp"):
        jax.jvp(lambda h: loss(h, WEIGHT), (HIDDEN,), (HIDDEN,))
