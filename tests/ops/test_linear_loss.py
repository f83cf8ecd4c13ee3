"""`linear_loss`: any per-token loss, its gradients in the forward, against the two-pass path and the oracle."""

from __future__ import annotations

import contextlib
import functools
import gc
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from lce_jax import linear_logprobs, linear_loss, losses, rows, sharded_linear_logprobs, sharded_linear_loss
from tests import cases, oracle
from tests.pairs import values_of

# Sums in another order: a few units of the last place of float32, and of each dtype in which a gradient is rounded.
ROUNDING = {"float32": 2e-6, "bfloat16": 4e-3, "float16": 5e-4}


def ppo(logprob: Any, entropy: Any, lse: Any, old: Any, advantage: Any, group: Any) -> Any:
    ratio = jnp.exp(logprob - old)
    clipped = jnp.minimum(ratio * advantage, jnp.clip(ratio, 0.8, 1.2) * advantage)
    bonus = 0.0 if entropy is None else jnp.where(group == 0, 0.01, 0.02) * entropy
    return -clipped - bonus + 1e-3 * lse**2


def arguments(labels: jax.Array, seed: int = 3) -> tuple[jax.Array, ...]:
    """Old log-probabilities, advantages and a group per token."""
    rng = np.random.default_rng(seed)
    old, advantage = rng.uniform(-6, -4, labels.shape), rng.standard_normal(labels.shape)
    return (*(jnp.asarray(x, jnp.float32) for x in (old, advantage)), jnp.asarray(rng.integers(0, 2, labels.shape)))


def two_passes(loss_fn: Any, hidden: Any, weight: Any, labels: Any, *per_token: Any, **options: Any) -> jax.Array:
    """The same from `linear_logprobs`, by JAX's own derivative of the loss."""
    out = linear_logprobs(hidden, weight, labels, **options)
    flat = jax.tree.map(lambda x: x.reshape(-1, *x.shape[labels.ndim :]), (tuple(out[:3]), per_token))
    losses = jax.vmap(lambda results, own: loss_fn(*results, *own))(*flat)
    where = options.get("where")
    return jnp.sum(losses if where is None else jnp.where(where.reshape(-1), losses, 0.0))


def compare(
    loss_fn: Any, hidden: Any, weight: Any, labels: Any, *per_token: Any, chunk_bytes: int | None = 1, **options: Any
) -> None:
    """Value and all gradients of both."""
    floats = {name: options.pop(name) for name in ("bias",) if name in options}

    def one(hidden: Any, weight: Any, floats: Any, own: Any) -> jax.Array:
        per = (*own, *per_token[len(own) :])
        return linear_loss(loss_fn, hidden, weight, labels, *per, chunk_bytes=chunk_bytes, **floats, **options)[0]

    def two(hidden: Any, weight: Any, floats: Any, own: Any) -> jax.Array:
        return two_passes(loss_fn, hidden, weight, labels, *own, *per_token[len(own) :], **floats, **options)

    own = tuple(x for x in per_token if jnp.issubdtype(x.dtype, jnp.floating))
    steps = one, *(jax.value_and_grad(f, argnums=(0, 1, 2, 3)) for f in (one, two))
    alone, (value, got), (expected, want) = jax.jit(lambda *args: [step(*args) for step in steps])(
        hidden, weight, floats, own
    )
    assert oracle.value_error(value, expected) < 1e-5
    assert oracle.value_error(alone, expected) < 1e-5
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert x.dtype == y.dtype
        assert x.shape == y.shape
        bound = max(ROUNDING[x.dtype.name], ROUNDING[jnp.dtype(weight.dtype).name] if x.ndim == 1 else 0)
        assert oracle.relative_norm(x, y) < bound, (x.shape, oracle.relative_norm(x, y))


CASES = [
    cases.case("one chunk", leading=(24,)),
    cases.case("equal chunks", leading=(384,)),
    cases.case("a shorter last chunk", leading=(3, 100), V=97, H=31),
    cases.case("rows left out", leading=(3, 130), where="nan", labels="foreign"),
    cases.case("no row counts", leading=(300,), where="none"),
    cases.case("every row counts", leading=(300,), where="all"),
    cases.case("no tokens", leading=(2, 0)),
    cases.case("no leading dimension", leading=()),
    cases.case("no entropy", leading=(300,), entropy=False),
    cases.case("bias", leading=(300,), bias="float32", where="some", vocab_size=97),
    cases.case("bfloat16", dtype="bfloat16", leading=(320,), H=128, V=512),
    cases.case("float32 hidden, bfloat16 weight", dtype="bfloat16", hidden_dtype="float32", leading=(320,), H=64),
    cases.case(
        "everything", leading=(4, 96), V=128, vocab_size=113, temperature="token", where="nan", labels="foreign",
        logit_softcap=4.0, logit_scale=1.3, stats=True, weight_layout="hv", spread=3.0,
    ),
]  # fmt: skip


# Those that are slow have a half of what another one has.
@pytest.mark.fast("everything", "a shorter last chunk", "no row counts", "no tokens")
@values_of(
    "test", CASES, slow=[test for test in CASES if test.name in ("one chunk", "equal chunks", "every row counts")]
)
def test_equals_two_passes(test: cases.TestCase) -> None:
    hidden, weight, labels, options, _ = cases.draw(test)
    compare(ppo, hidden, weight, labels, *arguments(labels), **options)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_gradients_against_the_oracle(dtype: str) -> None:
    """A linear loss has the seeds as its cotangents, so the oracle knows its gradients."""
    test = cases.case("oracle", leading=(400,), where="some", dtype=dtype, H=64, V=300)
    hidden, weight, labels, options, seeds = cases.draw(test)

    def total(hidden: Any, weight: Any) -> Any:
        return linear_loss(
            lambda logprob, entropy, lse, a, b, c: a * logprob + b * entropy + c * lse,
            hidden, weight, labels, *seeds, chunk_bytes=1, **options,
        )[0]  # fmt: skip

    got = jax.jit(jax.grad(total, argnums=(0, 1)))(hidden, weight)
    want = oracle.gradients(hidden, weight, labels, seeds, **options)
    for x, y in zip(got, want, strict=True):
        # bfloat16: 2^-9 / sqrt(3) for the rounding of the gradient; on a CPU dlogits are not rounded
        assert oracle.relative_norm(x, y) < {"float32": 1e-6, "bfloat16": 1.7e-3}[dtype]


@pytest.mark.slow
def test_the_results_are_those_of_linear_logprobs_and_carry_no_gradient() -> None:
    hidden, weight, labels, options, _ = cases.draw(
        cases.case("x", leading=(3, 100), where="some", stats=True, temperature="token", labels="foreign")
    )
    want = linear_logprobs(hidden, weight, labels, **options)

    def call(hidden: Any) -> Any:
        return linear_loss(ppo, hidden, weight, labels, *arguments(labels), chunk_bytes=1, **options)

    for out in (jax.jit(call)(hidden)[1], jax.jit(jax.value_and_grad(call, has_aux=True))(hidden)[0][1]):
        assert jax.tree.structure(out) == jax.tree.structure(want)
        for field, true in zip(jax.tree.leaves(out), jax.tree.leaves(want), strict=True):
            assert field.dtype == true.dtype
            np.testing.assert_allclose(field, true, rtol=2e-6, atol=2e-6)
    gradient = jax.jit(jax.grad(lambda hidden: jnp.sum(call(hidden)[1].logprobs)))(hidden)
    assert not np.asarray(gradient).any()


@pytest.mark.fast("some")
@pytest.mark.parametrize("where", [None, "some"])
def test_what_the_loss_closes_over(where: str | None) -> None:
    """Traced numbers have their gradients, integers and known arrays take part."""
    hidden, weight, labels, options, _ = cases.draw(cases.case("x", leading=(300,), where=where))
    table, which = jnp.asarray([0.5, 2.0]), jnp.int32(1)

    def total(of: Any, hidden: Any, scale: Any, which: Any) -> Any:
        def loss_fn(logprob: Any, entropy: Any, lse: Any) -> Any:
            return -scale * logprob * table[which] + jnp.exp(-scale) * entropy + lse

        return of(loss_fn, hidden, weight, labels, **options)

    def one(*args: Any, **rest: Any) -> Any:
        return linear_loss(*args, chunk_bytes=1, **rest)[0]

    args = (hidden, jnp.float32(0.7), which)
    value, got = jax.jit(jax.value_and_grad(lambda *x: total(one, *x), argnums=(0, 1)))(*args)
    expected, want = jax.jit(jax.value_and_grad(lambda *x: total(two_passes, *x), argnums=(0, 1)))(*args)
    assert oracle.value_error(value, expected) < 1e-5
    assert all(oracle.relative_norm(x, y) < 2e-6 for x, y in zip(got, want, strict=True))


def test_per_token_arguments_with_more_dimensions_in_a_tree() -> None:
    hidden, weight, labels, *_ = cases.draw(cases.case("x", leading=(2, 150)))
    own = {"w": jnp.asarray(np.random.default_rng(5).standard_normal((2, 150, 3)), jnp.float32)}

    def loss_fn(logprob: Any, entropy: Any, lse: Any, own: Any) -> Any:
        return own["w"][0] * logprob + own["w"][1] ** 2 * entropy + own["w"][2] * lse

    def grad(of: Any) -> Any:
        return jax.jit(jax.grad(lambda own: of(loss_fn, hidden, weight, labels, own)))(own)["w"]

    got = grad(lambda *args: linear_loss(*args, chunk_bytes=1)[0])
    assert oracle.relative_norm(got, grad(two_passes)) < 2e-6


def test_another_cotangent() -> None:
    hidden, weight, labels, *_ = cases.draw(cases.case("x", leading=(300,)))
    args = arguments(labels)

    def run(of: Any) -> Any:
        return jax.jit(jax.grad(lambda h, w: jnp.tanh(of(ppo, h, w, labels, *args) / 300), argnums=(0, 1)))

    got = run(lambda *args: linear_loss(*args, chunk_bytes=1)[0])(hidden, weight)
    for x, y in zip(got, run(two_passes)(hidden, weight), strict=True):
        assert oracle.relative_norm(x, y) < 4e-6  # the factor, and a value whose rounding it follows
    _, pull = jax.vjp(lambda hidden: linear_loss(ppo, hidden, weight, labels, *args)[0], hidden)
    np.testing.assert_array_equal(pull(2.0)[0], pull(jnp.float32(2))[0])  # JAX takes a Python number too


@pytest.mark.slow
def test_vmap_over_tokens_and_over_weights() -> None:
    hidden, weight, labels, *_ = cases.draw(cases.case("x", leading=(3, 130)))
    args, weights = arguments(labels), jnp.stack([weight, 2 * weight, -weight])

    def gradient(of: Any, axis: int | None) -> Any:
        single = jax.value_and_grad(lambda h, w, y, *args: of(ppo, h, w, y, *args), argnums=(0, 1))
        return jax.jit(jax.vmap(single, in_axes=(0, axis, 0, 0, 0, 0)))

    for axis, head in ((None, weight), (0, weights)):
        got = gradient(lambda *args: linear_loss(*args, chunk_bytes=1)[0], axis)(hidden, head, labels, *args)
        want = gradient(two_passes, axis)(hidden, head, labels, *args)
        for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            assert oracle.relative_norm(x, y) < 2e-6


def test_second_derivatives_are_refused() -> None:
    hidden, weight, labels, *_ = cases.draw(cases.case("x", leading=(24,)))

    def total(hidden: Any) -> Any:
        return linear_loss(lambda logprob, *_: logprob**2, hidden, weight, labels)[0]

    with pytest.raises(NotImplementedError, match="first derivatives only"):
        jax.jit(jax.grad(lambda hidden: jnp.sum(jax.grad(total)(hidden) ** 2)))(hidden)


def closing(of: Any, scale: Any) -> Any:
    """A loss that closes over a number, and has functions in it that JAX traces by themselves."""
    hidden, weight, labels, *_ = cases.draw(cases.case("x", leading=(300,)))

    def loss_fn(logprob: Any, entropy: Any, lse: Any) -> Any:
        together = jax.nn.relu(-scale * logprob) + jax.scipy.special.logsumexp(jnp.stack([entropy, lse]))
        return together + lax.cond(logprob < -4, jnp.square, jnp.negative, logprob)

    return of(loss_fn, hidden, weight, labels)


def one_pass(*args: Any) -> Any:
    return linear_loss(*args, chunk_bytes=1)[0]


@pytest.mark.fast("grad of jit", "checkpoint", "scan", "leaks")
@pytest.mark.parametrize("how", ["grad of jit", "eager", "checkpoint", "scan", "leaks"])
def test_transformations(how: str) -> None:
    def gradient(of: Any) -> Any:
        run = functools.partial(closing, of)
        if how == "grad of jit":
            return jax.grad(jax.jit(run))(1.5)
        if how == "eager":
            return jax.grad(run)(1.5)
        if how == "checkpoint":
            return jax.jit(jax.grad(jax.checkpoint(lambda x: run(jnp.sin(x)))))(1.5)
        if how == "scan":
            steps = jnp.asarray([1.0, 2.0])
            return jax.jit(jax.grad(lambda x: lax.scan(lambda c, y: (c + run(x * y), None), 0.0, steps)[0]))(1.5)
        return jax.jit(jax.grad(run))(1.5)

    want = gradient(two_passes)
    if how == "leaks":  # JAX looks for them in all objects that are not frozen, many times
        gc.collect()
        gc.freeze()
    with jax.checking_leaks() if how == "leaks" else contextlib.nullcontext():
        assert oracle.relative_norm(gradient(one_pass), want) < 4e-6


def live_programs() -> int:
    gc.collect()
    return len(jax.devices()[0].client.live_executables())


@pytest.mark.slow
def test_calls_outside_jit_keep_a_program_as_long_as_its_loss_fn_lives() -> None:
    """One of each kind; none of a loss_fn that is gone."""
    hidden, weight, labels, *_ = cases.draw(cases.case("x", leading=(24,)))

    def calls(loss_fn: Any) -> None:
        jax.block_until_ready(linear_loss(loss_fn, hidden, weight, labels))
        jax.block_until_ready(jax.grad(lambda *x: linear_loss(loss_fn, *x, labels)[0], (0, 1))(hidden, weight))

    def fresh() -> Any:
        return lambda logprob, entropy, lse: jax.nn.relu(-logprob) + 0.1 * entropy + lse

    calls(fresh())  # compiles what no loss_fn is a part of
    before, loss_fn = live_programs(), fresh()
    calls(loss_fn)
    kept = live_programs()
    assert kept > before
    for _ in range(3):
        calls(loss_fn)
    assert live_programs() == kept
    del loss_fn
    assert live_programs() == before
    for _ in range(3):
        calls(fresh())
    assert live_programs() == before


@pytest.mark.slow
def test_what_a_loss_fn_reads_may_change_between_calls_outside_jit() -> None:
    """Numbers, arrays, NumPy's in place, what a function of ``jit`` closes over, and the rule of a derivative."""
    hidden, weight, labels, *_ = cases.draw(cases.case("x", leading=(24,)))
    now: dict[str, Any] = {"number": 1.0, "array": jnp.float32(2), "numpy": np.ones(2, np.float32), "limit": 1.0}

    @jax.custom_vjp
    def limited(x: Any) -> Any:
        return x

    limited.defvjp(lambda x: (x, None), lambda _, gradient: (gradient * now["limit"],))

    def loss_fn(logprob: Any, entropy: Any, lse: Any) -> Any:
        inner = jax.jit(lambda x: x * now["array"])
        return -now["number"] * limited(logprob) * jnp.asarray(now["numpy"])[1] + inner(entropy) + lse * now["array"]

    def value_and_gradient() -> Any:
        return jax.value_and_grad(lambda hidden: linear_loss(loss_fn, hidden, weight, labels)[0])(hidden)

    def change_numpy() -> None:
        now["numpy"][1] = 3.0

    changes = [
        lambda: None, lambda: now.update(number=2.0), lambda: now.update(array=jnp.float32(5)), change_numpy,
        lambda: now.update(limit=0.25),
    ]  # fmt: skip
    for change in changes:
        change()
        value, gradient = value_and_gradient()
        want, wanted = jax.jit(lambda: value_and_gradient())()  # traced anew
        assert np.isclose(value, want, rtol=1e-6)
        assert oracle.relative_norm(gradient, wanted) < 1e-6


@pytest.mark.parametrize("shape", [(6, 1), (1, 4), (), (1, 1)], ids=str)
def test_an_argument_that_is_the_same_for_many_tokens(shape: tuple[int, ...]) -> None:
    """It broadcasts as a temperature does, and its gradient is the sum over them; so does a random key."""
    hidden, weight, labels, *_ = cases.draw(cases.case("x", leading=(6, 4)))
    factor = jnp.asarray(np.random.default_rng(0).normal(size=shape), jnp.float32)
    keys = jax.random.split(jax.random.key(0), shape)

    def loss(logprob: Any, _: Any, __: Any, factor: Any, key: Any) -> Any:
        return logprob * factor * jax.random.uniform(key)

    def total(of: Any, factor: Any) -> Any:
        return of(loss, hidden, weight, labels, factor=factor, key=keys)[0]

    def each(*operands: Any, factor: Any, key: Any) -> Any:
        return linear_loss(*operands, *(jnp.broadcast_to(x, labels.shape) for x in (factor, key)))

    value, got = jax.value_and_grad(functools.partial(total, linear_loss))(factor)
    want, wanted = jax.value_and_grad(functools.partial(total, each))(factor)
    assert got.shape == shape
    assert value == want
    np.testing.assert_allclose(got, wanted, rtol=1e-6)


OWN = {"old": np.zeros((6, 4), np.float32), "advantage": np.ones((6, 1), np.float32)}


@pytest.mark.parametrize(
    ("by_place", "by_name", "message"),
    [
        (["x", OWN["advantage"]], {}, "per-token argument 0 of loss_fn .*array, got str"),
        ([], {**OWN, "old": np.zeros((5, 4))}, r"argument old of loss_fn \(5, 4\) must begin .* labels \(6, 4\), or"),
        ([], {**OWN, "advantage": np.zeros(6)}, r"argument advantage of loss_fn \(6,\) must begin with .* labels"),
        ([], {**OWN, "old": {"a": np.zeros(4)}}, r"argument old.a of loss_fn \(4,\) must begin"),
        ([], {"old": OWN["old"]}, "missing a required argument: 'advantage'.* old"),
        ([OWN["old"]], OWN, "loss_fn: multiple values for argument 'old'.* old"),
        (
            [], {"old": OWN["old"], "advantages": OWN["advantage"]},
            r"unknown option advantages \(did you mean advantage\?\); known: where, .*; arguments of loss_fn: old, adv",
        ),
        ([], {**OWN, "temprature": 0.7}, r"unknown option temprature \(did you mean temperature\?\)"),
        ([], {**OWN, "precision": "highest"}, "precision is an option"),
    ],
)  # fmt: skip
def test_errors(by_place: list[Any], by_name: dict[str, Any], message: str) -> None:
    hidden, weight, labels, *_ = cases.draw(cases.case("x", leading=(6, 4)))

    def loss(
        logprob: Any, _: Any, __: Any, old: Any, advantage: Any, *, low: float = 0.0, precision: Any = None
    ) -> Any:
        del low, precision
        return (logprob - old) * advantage

    with pytest.raises((TypeError, ValueError), match=message):
        linear_loss(loss, hidden, weight, labels, *by_place, **by_name)


def test_a_loss_that_names_no_arguments_takes_none_by_name() -> None:
    hidden, weight, labels, *_ = cases.draw(cases.case("x", leading=(24,)))
    with pytest.raises(TypeError, match=r"unknown option factor; known: .*; arguments of loss_fn: none by name"):
        linear_loss(lambda logprob, *_, **__: logprob, hidden, weight, labels, factor=labels)


def test_a_name_that_an_option_takes_from_the_loss_is_refused() -> None:
    hidden, weight, labels, *_ = cases.draw(cases.case("x", leading=(24,)))

    def loss(
        logprob: Any, _: Any, __: Any, where: Any = 1.0, ignore_index: int = 0, chunk_bytes: int = 0, mesh: Any = None
    ) -> Any:
        del ignore_index, chunk_bytes, mesh
        return where * logprob

    mesh = jax.make_mesh((1,), ("tensor",))
    for name, x in {"where": labels > 3, "ignore_index": 3, "chunk_bytes": 1, "mesh": mesh}.items():
        of = sharded_linear_loss if name == "mesh" else linear_loss
        with pytest.raises(
            TypeError, match=f"{name} is an option, .* has an argument of that name: rename the argument"
        ):
            of(loss, hidden, weight, labels, **{name: x})


KEY = jax.random.key(0)
MIXING: dict[str, Any] = {  # of one number of a token, which stands for those of all
    "mean": jnp.mean,
    "mean without a gradient": lambda x: x * lax.stop_gradient(jnp.mean(x)),
    "mean of some": lambda x: jnp.mean(x, where=x > 0),
    "jit": jax.jit(lambda x: jax.jit(jnp.mean)(x)),
    "checkpoint": jax.checkpoint(lambda x: x.sum()),
    "branch": lambda x: lax.cond(x > 0, lambda x: x - jnp.sum(x), jnp.negative, x),
    "largest": lambda x: x - jnp.max(x),
    "weights": lambda x: x / jnp.sum(x > 0),
    "standard deviation": lambda x: (x - 1) / (jnp.std(x) + 1e-6),
    "logsumexp": jax.nn.logsumexp,
    "softmax": lambda x: jax.nn.softmax(x, axis=None),
    "running sum": lambda x: jnp.cumsum(x)[0],
    "sorted": lambda x: jnp.sort(x, axis=None)[0],
    "median": jnp.median,
    "position of the largest": lambda x: x * jnp.argmax(x),
    "flat": lambda x: jnp.sum(jnp.exp(jnp.ravel(x) - 1)),
    "product": lambda x: jnp.dot(x, x),
    "neighbour": lambda x: x - jnp.roll(x, 1),
    "backwards": jnp.flip,
    "sequence": lambda x: jax.ops.segment_sum(x, jnp.int32(1), 4)[1],
}
HONEST: dict[str, Any] = {  # of the number, and of K numbers
    "all that there are": lambda x, k: x * jnp.mean(k) + jax.nn.logsumexp(k * x) + jnp.cumsum(k)[-1] * jnp.max(k),
    "one that there is": lambda x, k: x * jnp.sum(k[:1]) + jnp.cumsum(k[:1])[0] + jnp.sort(k[:1])[0],
    "together": lambda x, k: jnp.mean(jnp.stack([x, 2 * x])) + jnp.vdot(k, k),
    "choice": lambda x, k: jnp.where(x > 0, x, k[0]) + jnp.clip(x, -1, 1) + jnp.select([x > 0], [x], -x),
    "added to a row": lambda x, k: k.at[1].add(x)[1] + jnp.zeros(3).at[1].set(x)[1],
    "each": lambda x, k: jnp.sum(jax.vmap(lambda each: jnp.sum(each) * x)(k)),
    "random": lambda x, _: x * jax.random.poisson(KEY, jnp.exp(x)) + jax.random.gamma(KEY, jnp.exp(x)),
    "condition": lambda x, _: x * jnp.all(x > 0) * jnp.allclose(x, 1.0),
    "root": lambda x, _: x * lax.while_loop(lambda c: jnp.max(jnp.abs(c - 2)) > 1e-3, lambda c: (c + 2) / 2, x),
    "closed over": lambda x, _: x * jnp.mean(jnp.float32(3)),
}


def test_a_loss_that_mixes_tokens_is_refused() -> None:
    """It is given one token's numbers, and a reduction of these over no axis leaves them as they are."""
    hidden, weight, labels, *_ = cases.draw(cases.case("x", leading=(6, 4)))
    advantage, several = jnp.ones((6, 1)), jnp.ones((6, 4, 3))

    def call(of: Any, loss: Any, **own: Any) -> None:
        jax.eval_shape(lambda hidden: of(loss, hidden, weight, labels, advantage=advantage, **own)[0], hidden)

    for name, reduce in MIXING.items():

        def loss(logprob: Any, _: Any, __: Any, advantage: Any, reduce: Any = reduce) -> Any:
            return -advantage * reduce(logprob)

        with pytest.raises(ValueError, match=r"loss_fn mixes tokens: .* a scalar reduces no axis.*linear_logprobs\("):
            pytest.fail(f"{name}: {call(linear_loss, loss)}")
    for reduce in HONEST.values():

        def honest(logprob: Any, _: Any, __: Any, advantage: Any, several: Any, reduce: Any = reduce) -> Any:
            return -advantage * reduce(logprob, several)

        call(linear_loss, honest, several=several)
    with pytest.raises(ValueError, match="loss_fn mixes tokens"):  # what comes with a token is the token's too
        call(linear_loss, lambda logprob, _, __, advantage: (advantage - jnp.mean(advantage)) * logprob)
    with pytest.raises(ValueError, match=r"out = sharded_linear_logprobs.*mesh=mesh, vocab_axis=vocab_axis"):
        call(sharded_linear_loss, lambda logprob, *_, advantage: jnp.mean(logprob) * advantage, mesh=mesh_of_one())


def mesh_of_one() -> Any:
    return jax.make_mesh((1,), ("tensor",))


@pytest.mark.fast("both-sharded_linear_loss")
@pytest.mark.parametrize("of", [linear_loss, sharded_linear_loss])
@pytest.mark.parametrize("selects", ["all", "both"])
def test_a_sequence_mean_as_the_message_says(selects: str, of: Any) -> None:
    """GSPO's ratio of sequences, by the lines of the message, against stored logits in float64."""
    hidden, weight, labels, *_ = cases.draw(cases.case("x", leading=(3, 7)))
    old = jnp.asarray(np.random.default_rng(1).uniform(-6, -4, labels.shape), jnp.float32)
    advantage, mask = np.asarray([1.0, -0.5, 2.0]), np.ones((3, 7), bool)
    options: dict[str, Any] = {"temperature": 0.7}
    if of is sharded_linear_loss:
        options |= {"mesh": mesh_of_one(), "vocab_axis": "tensor"}
    if selects == "both":
        labels, options["ignore_index"] = np.array(labels), -100
        labels[0, 4:] = -100
        options["where"] = np.arange(7) < np.asarray([[7], [5], [6]])
        mask = options["where"] & (labels != -100)

    def sequences(logprob: Any, _: Any, __: Any, old: Any) -> Any:
        return jnp.exp(jnp.mean(logprob - old))

    with pytest.raises(ValueError, match="mixes tokens") as error:
        of(sequences, hidden, weight, labels, old=old, **options)
    lines, mean = re.findall("`(.*?)`", str(error.value))
    functions = {"rows": rows, "linear_logprobs": linear_logprobs, "sharded_linear_logprobs": sharded_linear_logprobs}

    def total(hidden: Any, weight: Any) -> Any:
        names = functions | options | {"hidden": hidden, "weight": weight, "labels": labels}
        exec(lines, names)
        return jnp.sum(advantage * jnp.exp(eval(mean, names | {"x": names["out"].logprobs - old}))[:, -1])

    value, got = jax.jit(jax.value_and_grad(total, (0, 1)))(hidden, weight)
    options = {name: x for name, x in options.items() if name in ("temperature", "where")} | {"where": mask}
    exact = oracle.logprobs(hidden, weight, labels, **options)
    count = mask.sum(-1)
    ratio = np.exp(np.where(mask, np.asarray(exact.logprobs) - np.asarray(old, float), 0).sum(-1) / count)
    np.testing.assert_allclose(value, (advantage * ratio).sum(), rtol=1e-5)
    seed = np.where(mask, (advantage * ratio / count)[:, None], 0)
    zero = np.zeros_like(seed)
    for x, y in zip(got, oracle.gradients(hidden, weight, labels, (seed, zero, zero), **options), strict=True):
        assert oracle.relative_norm(x, y) < 1e-5


def test_losses_of_libraries_do_not_mix_tokens() -> None:
    hidden, weight, labels, *_ = cases.draw(cases.case("x", leading=(24,)))
    own = {"old_logprob": jnp.zeros(24), "advantage": jnp.ones(24)}
    calls: dict[Any, Any] = {
        losses.cross_entropy: {}, losses.ppo_clip: own, losses.dapo: own, losses.cispo: own | {"clip_high": 1.0},
        losses.grpo: own | {"reference_logprob": jnp.zeros(24)}, losses.with_entropy_bonus(losses.dapo, 0.1): own,
    }  # fmt: skip
    optax = pytest.importorskip("optax").losses
    row = jnp.ones((24, 3))
    calls |= {
        lambda x, _, __, y: optax.huber_loss(x) + optax.sigmoid_focal_loss(x, y): {"y": jnp.zeros(24)},
        lambda x, _, __, row: x * optax.softmax_cross_entropy_with_integer_labels(row, 1): {"row": row},
        lambda x, _, __, row: x * optax.kl_divergence(jax.nn.log_softmax(row * x), jax.nn.softmax(row)): {"row": row},
    }
    for loss_fn, given in calls.items():
        jax.eval_shape(lambda hidden, f=loss_fn, x=given: linear_loss(f, hidden, weight, labels, **x)[0], hidden)
