"""What training code wraps around the functions: jit, vmap, scan, remat, partial gradients, donation."""

from __future__ import annotations

import functools
import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

from lce_jax import (
    linear_cross_entropy,
    linear_kl,
    linear_logits,
    linear_logprobs,
    linear_loss,
    linear_topk,
    sharded_linear_kl,
    sharded_linear_logits,
    sharded_linear_logprobs,
    sharded_linear_loss,
    sharded_linear_topk,
)
from tests import cases, oracle

HIDDEN, WEIGHT, LABELS, _, SEEDS = cases.draw(cases.case("transforms", leading=(4, 6), H=16, V=50))


def loss(hidden, weight, labels=LABELS):
    return linear_cross_entropy(hidden, weight, labels, precision="highest")


@functools.cache
def plain() -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    """The loss and its gradients with nothing but ``jit`` around them."""
    return jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))(HIDDEN, WEIGHT)


def close(got, want) -> bool:
    return all(oracle.relative_norm(a, b) < 2e-6 for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize(
    "policy", [None, pytest.param(jax.checkpoint_policies.everything_saveable, marks=pytest.mark.slow)]
)
def test_remat(policy) -> None:
    assert close(jax.jit(jax.grad(jax.checkpoint(loss, policy=policy), argnums=(0, 1)))(HIDDEN, WEIGHT), plain()[1])


@pytest.mark.slow
def test_scan_over_microbatches() -> None:
    def step(carry, batch):
        value, grads = jax.value_and_grad(loss, argnums=(0, 1))(batch[0], WEIGHT, batch[1])
        return carry + grads[1], (value, grads[0])

    dweight, (values, dhidden) = jax.lax.scan(step, jnp.zeros_like(WEIGHT), (HIDDEN, LABELS))
    value, grads = plain()
    assert np.isclose(values.mean(), value)
    assert close((dhidden / 4, dweight / 4), grads)


def test_vmap() -> None:
    def logprobs(hidden, labels):
        return linear_logprobs(hidden, WEIGHT, labels, precision="highest").logprobs

    gradients = jax.vmap(jax.grad(loss, argnums=(0, 1)), in_axes=(0, None, 0))
    got, (dhidden, dweight) = jax.jit(lambda h, w, y: (jax.vmap(logprobs)(h, y), gradients(h, w, y)))(
        HIDDEN, WEIGHT, LABELS
    )
    assert oracle.value_error(got, oracle.logprobs(HIDDEN, WEIGHT, LABELS).logprobs) < 2e-6
    assert close((np.asarray(dhidden) / 4, np.asarray(dweight).mean(0)), plain()[1])


@pytest.mark.slow
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

    got, want = jax.jit(lambda weight: [jax.grad(tied)(weight, head) for head in (loss, plain)])(WEIGHT)
    assert close([got], [want])


def test_a_new_temperature_or_mask_compiles_nothing() -> None:
    function = jax.jit(lambda t, where: linear_logprobs(HIDDEN, WEIGHT, LABELS, temperature=t, where=where).entropy)
    for step in range(3):
        function(jnp.float32(0.5 + step), jnp.arange(24).reshape(4, 6) > step)
    assert function._cache_size() == 1


def negative(logprob, *_):
    return -logprob


TABLE = np.array([0.5, 2.0], np.float32)


def ratio(logprob, entropy, _, old, group):
    """With a custom derivative, an array that it closes over, and an integer per token."""
    return jax.nn.relu(jnp.exp(logprob - old)) * TABLE[1] - entropy * jnp.asarray(TABLE)[group % 2]


class Trainer:
    def loss(self, logprob, *_):
        return -logprob


@pytest.mark.fast("method", "linear_logprobs", "gradient", "sharded loss")
@pytest.mark.parametrize(
    "name",
    ["linear_logprobs", "gradient", "sharded", "loss", "gradient of a loss", "sharded loss", "method"],
)
def test_calls_outside_jit_compile_once(name: str) -> None:
    mesh = jax.make_mesh((2, 2), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices("cpu")[:4])
    calls = {
        "linear_logprobs": lambda: linear_logprobs(HIDDEN, WEIGHT, LABELS, temperature=0.7),
        "gradient": lambda: jax.grad(loss, argnums=(0, 1))(HIDDEN, WEIGHT),
        "sharded": lambda: sharded_linear_logprobs(HIDDEN, WEIGHT, LABELS, mesh=mesh, batch_axes="data"),
        "loss": lambda: linear_loss(negative, HIDDEN, WEIGHT, LABELS),
        "gradient of a loss": lambda: jax.grad(lambda h: linear_loss(ratio, h, WEIGHT, LABELS, SEEDS[0], LABELS)[0])(
            HIDDEN
        ),
        "sharded loss": lambda: sharded_linear_loss(ratio, *(HIDDEN, WEIGHT, LABELS, SEEDS[0], LABELS), mesh=mesh)[0],
        "method": lambda: linear_loss(Trainer().loss, HIDDEN, WEIGHT, LABELS)[0],  # a new object each time
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


ALONE = ["linear_logprobs", "options", "arrays", "loss", "jit", "linear_loss", "pullback", "linear_logits"]


@pytest.mark.fast("options", "linear_loss", "pullback", "over a mesh")
@pytest.mark.parametrize("name", [*ALONE, "no tokens", "sharded", "numbers over a mesh", "no labels over a mesh"])
def test_no_implicit_transfers(name: str) -> None:
    """Numbers and options are part of programs, or put on the device explicitly."""
    mesh = jax.make_mesh((2,), ("tensor",), axis_types=(AxisType.Auto,), devices=jax.devices("cpu")[:2])
    whole, split = (jax.NamedSharding(mesh, jax.P(*axes)) for axes in ((), ("tensor",)))
    placed = jax.device_put((HIDDEN, WEIGHT, LABELS), (whole, split, whole))
    where, temperature = LABELS > 3, jnp.full((4, 1), 0.7)
    options = dict(logit_softcap=30.0, logit_scale=0.5, stats=True, vocab_size=45)

    numbers = {name: jnp.float32(value) for name, value in (("logit_softcap", 30), ("logit_scale", 0.5), ("z_loss", 1))}
    bias, ids = jnp.ones(WEIGHT.shape[:1]), LABELS[..., None]
    placed_ids = jax.device_put(ids, whole)
    none = HIDDEN[:0], WEIGHT, LABELS[:0]

    def smoothed(hidden, weight, labels):
        return linear_cross_entropy(hidden, weight, labels, ignore_index=3, label_smoothing=0.1, z_loss=1e-4)

    calls = {
        "linear_logprobs": lambda: linear_logprobs(HIDDEN, WEIGHT, LABELS, temperature=0.7),
        "options": lambda: linear_logprobs(HIDDEN, WEIGHT, LABELS, where=where, temperature=temperature, **options),
        "arrays": lambda: linear_cross_entropy(HIDDEN, WEIGHT, LABELS, bias=bias, normalizer=7, **numbers),
        "loss": lambda: smoothed(HIDDEN, WEIGHT, LABELS),
        "jit": lambda: jax.jit(jax.value_and_grad(smoothed))(HIDDEN, WEIGHT, LABELS),
        "sharded": lambda: sharded_linear_logprobs(*placed, mesh=mesh),
        "linear_loss": lambda: linear_loss(
            ratio, HIDDEN, WEIGHT, LABELS, SEEDS[0], LABELS, where=where, temperature=0.7
        ),
        "pullback": lambda: jax.vjp(lambda h: linear_loss(negative, h, WEIGHT, LABELS)[0], HIDDEN)[1](
            numbers["z_loss"]
        ),
        "linear_logits": lambda: linear_logits(HIDDEN, WEIGHT, ids, temperature=0.7, where=where),
        "numbers over a mesh": lambda: (
            sharded_linear_logprobs(*placed, mesh=mesh, temperature=0.7, logit_floor=-1.0),
            sharded_linear_loss(negative, *placed, mesh=mesh, temperature=0.7),
        ),
        "no labels over a mesh": lambda: (
            sharded_linear_topk(*placed[:2], 3, mesh=mesh),
            sharded_linear_logits(*placed[:2], placed_ids, mesh=mesh),
            sharded_linear_kl(*placed[:2], *placed[:2], mesh=mesh, direction="jsd", beta=0.3),
        ),
        "no tokens": lambda: (linear_logprobs(*none), linear_loss(negative, *none), linear_topk(*none[:2], 3)),
    }
    jax.clear_caches()
    with jax.transfer_guard("disallow"):
        for _ in range(2):
            jax.block_until_ready(calls[name]())


@pytest.mark.slow
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


FUNCTIONS = {
    "linear_logprobs": lambda h: linear_logprobs(h, WEIGHT, LABELS).logprobs.sum(),
    "linear_cross_entropy": lambda h: loss(h, WEIGHT),
    "linear_loss": lambda h: linear_loss(negative, h, WEIGHT, LABELS)[0],
    "linear_logits": lambda h: linear_logits(h, WEIGHT, LABELS[..., None]).sum(),
    "linear_kl": lambda h: linear_kl(h, WEIGHT, HIDDEN, WEIGHT).sum(),
}
FORWARD_MODE = {
    "jvp": lambda f: jax.jvp(f, (HIDDEN,), (HIDDEN,)),
    "linearize": lambda f: jax.linearize(f, HIDDEN)[1](HIDDEN),
    "jacfwd": lambda f: jax.jacfwd(f)(HIDDEN),
    "of jit": lambda f: jax.jvp(jax.jit(f), (HIDDEN,), (HIDDEN,)),
    "under jit": lambda f: jax.jit(jax.jacfwd(f))(HIDDEN),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_forward_mode_is_refused(name: str) -> None:
    """The error names the function, and the derivatives that there are."""
    modes = FORWARD_MODE if name == "linear_logprobs" else {"jvp": FORWARD_MODE["jvp"]}
    for differentiate in modes.values():
        with pytest.raises(NotImplementedError, match=rf"^{name} has first derivatives in reverse mode \(jax\.grad, "):
            differentiate(FUNCTIONS[name])


def test_linearize_raises_where_its_function_is_called() -> None:
    value, linear = jax.linearize(FUNCTIONS["linear_logprobs"], HIDDEN)
    assert value == FUNCTIONS["linear_logprobs"](HIDDEN)
    with pytest.raises(NotImplementedError, match="linear_logprobs has first derivatives in reverse mode"):
        linear(HIDDEN)


def test_a_derivative_along_a_direction_as_the_refusal_of_forward_mode_advises() -> None:
    def plain(hidden):
        log_p = jax.nn.log_softmax(jnp.matmul(hidden, WEIGHT.T, precision="highest"))
        return jnp.take_along_axis(log_p, LABELS[..., None], axis=-1).sum()

    def both(hidden):
        direction = jnp.cos(hidden)
        found = jnp.vdot(jax.grad(FUNCTIONS["linear_logprobs"])(hidden), direction)
        return found, jax.jvp(plain, (hidden,), (direction,))[1]

    assert np.isclose(*jax.jit(both)(HIDDEN), rtol=1e-5)


def test_tangents_that_are_not_used_are_no_forward_mode() -> None:
    """Of a number that has no gradient, and of what other arguments are made of."""
    value, tangent = jax.jvp(
        lambda t: linear_logprobs(HIDDEN, WEIGHT, LABELS, temperature=t).lse.sum() + t, (2.0,), (1.0,)
    )
    assert tangent == 1.0
    assert np.isfinite(value)
