"""`linear_kl` on one device, against stored logits in float64."""

from __future__ import annotations

import math
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lce_jax import linear_kl
from lce_jax.xla import _kl
from tests import kl_cases, oracle
from tests.kl_cases import call, draw, evaluate, expected
from tests.pairs import combined, values_of


def assert_right(got: Any, want: kl_cases.Expected, operands: Any) -> None:
    kl, gradients = got
    assert (kl.shape, kl.dtype) == (want.kl.shape, jnp.float32)
    assert oracle.value_error(kl, want.kl) < 4e-6
    assert (np.asarray(kl) >= 0).all()
    for gradient, true, operand in zip(gradients, want.gradients, operands, strict=True):
        assert (gradient.shape, gradient.dtype) == (operand.shape, operand.dtype)
        rounding = 0.0 if gradient.dtype == jnp.float32 else float(jnp.finfo(gradient.dtype).eps) / 2
        assert oracle.relative_norm(gradient, true) < 2e-6 + rounding


@pytest.mark.fast("ragged, reverse", "bfloat16 jsd", "everything, ", "one column", "mixed", "the same cap", "ragged tv")
@pytest.mark.parametrize("test", kl_cases.CALLS, ids=str)
def test_matches_float64(test: kl_cases.Call) -> None:
    drawn = draw(test)
    assert_right(evaluate(drawn), expected(drawn), drawn.student)


@pytest.mark.fast("(7, 50)")
@values_of("tile", [(1, 1), (7, 50), (23, 113), (24, 16)], slow=[(1, 1), (24, 16)])
def test_any_tiling(tile: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles of tokens that overlap, and that hold no row that counts; a remainder of the vocabulary, or none."""
    monkeypatch.setattr(_kl.KLPlan, "tiles", tile)
    drawn = draw(kl_cases.MIXED if tile[0] == 7 else kl_cases.EVERYTHING, seed=1)
    jax.clear_caches()
    assert_right(evaluate(drawn), expected(drawn), drawn.student)


@pytest.mark.slow
@pytest.mark.parametrize("direction", ["forward", "reverse"])
def test_models_far_apart(direction: str) -> None:
    """Logits in the hundreds, of which both softmaxes make one-hots: as near to float64 as stored float32 logits are.

    These round to 3e-5, and what that shifts from one token to another counts hundreds of nats. The backward's logits
    are recomputed, and may round otherwise than the forward's.
    """
    drawn = draw(call("far", leading=(50,), V=600, spread=100.0, direction=direction))

    def stored(hidden, weight, teacher_hidden, teacher_weight, **_):
        student = jax.nn.log_softmax(jnp.matmul(hidden, weight.T, precision="highest"))
        teacher = jax.nn.log_softmax(jnp.matmul(teacher_hidden, teacher_weight.T, precision="highest"))
        p, q = (student, teacher) if direction == "reverse" else (teacher, student)
        return jnp.sum(jnp.exp(p) * (p - q), axis=-1)

    want, got, plain = expected(drawn), evaluate(drawn), evaluate(drawn, stored)

    def errors(found):
        pairs = zip((found[0], *found[1]), (want.kl, *want.gradients), strict=True)
        return [oracle.relative_norm(a, b) for a, b in pairs]

    assert max(errors(plain)) < 1e-4
    assert all(a <= 4 * b for a, b in zip(errors(got), errors(plain), strict=True))


@pytest.mark.slow
def test_huge_logits_are_finite() -> None:
    drawn = draw(call("huge", V=600, spread=1e4))
    for direction in ("forward", "reverse", "tv", "jsd"):
        kl, gradients = evaluate(drawn, direction=direction)
        assert all(np.isfinite(np.asarray(x)).all() for x in (kl, *gradients))
    assert abs(float(jnp.max(kl)) - math.log(2)) < 4e-3  # disjoint one-hots; logits of 3e4 round to 2e-3


@pytest.mark.slow
@values_of("direction", ["forward", "reverse", "jsd", "tv"], slow=["forward"])
def test_equal_heads(direction: str) -> None:
    """Divergence and gradient are rounding, beside probabilities that sum to 1."""
    cap = {"logit_softcap": 5.0, "teacher_logit_softcap": "same"}
    drawn = draw(call("equal", V=600, temperature=True, spread=3.0, direction=direction, **cap))
    kl, (dhidden, dweight) = evaluate(drawn._replace(teacher=drawn.student))
    assert float(jnp.max(kl)) < 1e-6
    most = 0.0 if direction == "tv" else 1e-6  # the sign of a rounding error would not be small
    assert float(jnp.max(jnp.abs(dhidden))) <= most
    assert float(jnp.max(jnp.abs(dweight))) <= most


def test_a_head_shifted_by_a_constant_is_equal() -> None:
    """A bias of 3 on every column of the teacher changes no probability."""
    drawn = draw(call("shifted", spread=3.0))
    hidden, weight = drawn.student
    kl = linear_kl(hidden, weight, hidden, weight, teacher_bias=jnp.full(104, 3.0))
    assert float(jnp.max(kl)) < 1e-6


def test_rows_and_tokens_that_do_not_count() -> None:
    drawn = draw(call("none", leading=(5,), where=True))
    none = drawn._replace(options={"where": jnp.zeros(5, bool)})
    empty = draw(call("no tokens", leading=(2, 0)))
    for one in (none, empty):
        kl, gradients = evaluate(one)
        assert kl.shape == one.seed.shape
        assert all((np.asarray(x) == 0).all() for x in (kl, *gradients))


def test_traced_options_and_a_wrong_temperature() -> None:
    """A temperature of 0 makes its own row NaN, without a gradient, whichever model has it."""
    cap = {"logit_softcap": 4.0, "teacher_logit_softcap": "same"}
    drawn = draw(call("traced", leading=(6,), logit_scale=-1.3, teacher_logit_scale=0.7, **cap))
    scales = {name: jnp.float32(drawn.options[name]) for name in ("logit_scale", "teacher_logit_scale")}
    want = expected(drawn._replace(seed=drawn.seed.at[2].set(0).at[4].set(0)))

    @jax.jit
    def run(temperature: Any, teachers: Any, scales: Any) -> Any:
        def objective(*student: Any) -> Any:
            more = {"temperature": temperature, "teacher_temperature": teachers, **cap, **scales}
            kl = linear_kl(*student, *drawn.teacher, precision="highest", **more)
            return jnp.sum(jnp.where(jnp.isnan(kl), 0.0, drawn.seed * kl)), kl

        return jax.grad(objective, argnums=(0, 1), has_aux=True)(*drawn.student)

    gradients, kl = run(jnp.ones(6).at[2].set(0.0), jnp.ones(6).at[4].set(-1.0), scales)
    assert np.flatnonzero(np.isnan(np.asarray(kl))).tolist() == [2, 4]
    others = np.array([0, 1, 3, 5])
    assert oracle.value_error(np.asarray(kl)[others], want.kl[others]) < 2e-6
    assert all(oracle.relative_norm(a, b) < 2e-6 for a, b in zip(gradients, want.gradients, strict=True))


def test_a_traced_beta_and_its_ends() -> None:
    """Near its ends the gradient is that of a KL times β or 1 - β, as the docstring says."""
    drawn = draw(call("ends", leading=(6,), spread=0.5))

    @jax.jit
    def run(beta: Any) -> Any:
        return evaluate(drawn, direction="jsd", beta=beta)[1]

    for beta, direction, factor in ((1e-3, "forward", 1e-3), (1 - 1e-3, "reverse", 1e-3)):
        wanted = evaluate(drawn, direction=direction)[1]
        for got, want in zip(run(jnp.float32(beta)), wanted, strict=True):
            assert oracle.relative_norm(got, factor * np.asarray(want)) < 0.02
    mixed = drawn._replace(options={"direction": "jsd", "beta": 0.3})
    for got, want in zip(run(jnp.float32(0.3)), expected(mixed).gradients, strict=True):
        assert oracle.relative_norm(got, want) < 2e-6


@pytest.mark.slow
@combined(direction=["forward", "reverse", "jsd", "tv"], softcap=[None, 3.0])
def test_padding_temperatures(direction: str, softcap: float | None) -> None:
    """A row at 1e-8 without a cotangent adds nothing to the gradients, and one with a cotangent keeps to itself."""
    cap = {"logit_softcap": softcap, "teacher_logit_softcap": "same"}
    drawn = draw(call("padding", leading=(64,), V=1000, spread=20.0, direction=direction, **cap))
    padding = np.arange(64) % 3 == 0
    drawn = drawn._replace(seed=jnp.where(padding, 0.0, drawn.seed))
    kl, (dhidden, dweight) = evaluate(drawn, temperature=jnp.where(padding, 1e-8, 1.0))
    _, (_, without) = evaluate(drawn)
    assert np.isfinite(kl).all()
    assert (np.asarray(dhidden)[padding] == 0).all()
    assert oracle.relative_norm(dweight, without) < 1e-6


@values_of("direction", ["forward", "reverse", "jsd", "tv"], slow=["forward", "reverse", "tv"])
def test_a_wrong_temperature_beside_a_tiny_one(direction: str) -> None:
    """The row has no gradient, and the others theirs: its distances overflow, and 0 · inf is NaN."""
    drawn = draw(call("wrong", leading=(6,), direction=direction))
    drawn = drawn._replace(seed=drawn.seed.at[2].set(0))
    ones = jnp.ones(6)

    @jax.jit
    def run(temperature: Any, teachers: Any) -> Any:
        return evaluate(drawn, temperature=temperature, teacher_temperature=teachers)

    for student, teacher in ((0.0, 1e-15), (1e-15, 0.0)):
        kl, gradients = run(ones.at[2].set(student), ones.at[2].set(teacher))
        assert np.flatnonzero(np.isnan(kl)).tolist() == [2]
        assert all(oracle.relative_norm(a, b) < 2e-6 for a, b in zip(gradients, expected(drawn).gradients, strict=True))


@pytest.mark.parametrize(
    "beta",
    [1e-8, *(pytest.param(beta, marks=pytest.mark.slow) for beta in (1e-6, 1e-4, 0.5, 1 - 1e-4, 1 - 1e-6, 1 - 1e-8))],
)
def test_a_jsd_is_exact_to_its_ends(beta: float) -> None:
    """Also where one model's probabilities are e^20 times the other's; at 0.5 stored logits are off by 4e-6."""
    drawn = draw(call("ends", leading=(40,), V=300, spread=5.0, where=True, direction="jsd", beta=beta))
    want, (kl, gradients) = expected(drawn), evaluate(drawn)
    assert oracle.relative_norm(kl, want.kl) < 4e-6
    assert all(oracle.relative_norm(a, b) < 1e-5 for a, b in zip(gradients, want.gradients, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize(("beta", "direction", "factor"), [(1e-30, "forward", 1e-30), (1 - 2**-50, "reverse", 2**-50)])
def test_the_ends_of_a_jsd_are_divergences(beta: float, direction: str, factor: float) -> None:
    drawn = draw(call("ends", leading=(40,), V=300))
    (kl, gradients), (want, wanted) = evaluate(drawn, direction="jsd", beta=beta), evaluate(drawn, direction=direction)
    for a, b in zip((kl, *gradients), (want, *wanted), strict=True):
        assert oracle.relative_norm(np.asarray(a, np.float64) / factor, b) < 4e-6


def test_no_implicit_transfers() -> None:
    drawn = draw(call("guard", leading=(3,), where=True, vocab_size=100, direction="jsd", beta=0.2))
    with jax.transfer_guard("disallow"):
        linear_kl(*drawn.student, *drawn.teacher, **drawn.options)


def test_under_vmap() -> None:
    drawn = draw(call("vmap", leading=(3, 5), direction="reverse", where=True))
    (hidden, weight), teacher, where = drawn.student, drawn.teacher, drawn.options["where"]

    def one(hidden: Any, weight: Any, teacher_hidden: Any, where: Any, seed: Any) -> Any:
        def objective(hidden: Any, weight: Any) -> Any:
            kl = linear_kl(hidden, weight, teacher_hidden, teacher[1], where=where, direction="reverse")
            return jnp.sum(seed * kl)

        return jax.grad(objective, argnums=(0, 1))(hidden, weight)

    mapped = jax.jit(jax.vmap(one, in_axes=(0, None, 0, 0, 0)))
    dhidden, dweight = mapped(hidden, weight, teacher[0], where, drawn.seed)
    want = expected(drawn)
    assert oracle.relative_norm(dhidden, want.gradients[0]) < 2e-6
    assert oracle.relative_norm(jnp.sum(dweight, axis=0), want.gradients[1]) < 2e-6


def test_the_teacher_has_no_gradient_and_a_second_derivative_is_refused() -> None:
    (hidden, weight), teacher, *_ = draw(call("x", leading=(3,)))
    gradients = jax.grad(lambda *x: linear_kl(hidden, weight, *x).sum(), argnums=(0, 1))(*teacher)
    assert all((np.asarray(x) == 0).all() for x in gradients)
    with pytest.raises(NotImplementedError, match="first derivatives only"):
        jax.hessian(lambda h: linear_kl(h, weight, *teacher).sum())(hidden)


@pytest.mark.slow
@pytest.mark.parametrize(("where", "direction"), [(True, "forward"), (False, "jsd"), (True, "tv")])
def test_memory(where: bool, direction: str) -> None:
    """No array of T x V; the temporary bytes are tiles, and do not grow with the vocabulary."""
    T, H, G, struct = 2048, 128, 256, jax.ShapeDtypeStruct

    def step(V: int) -> Any:
        def objective(hidden, weight, teacher_hidden, teacher_weight, where):
            kl = linear_kl(hidden, weight, teacher_hidden, teacher_weight, where=where, direction=direction)
            return jnp.sum(kl)

        shapes = (T, H), (V, H), (T, G), (V, G)
        arrays = [struct(shape, "bfloat16") for shape in shapes]
        mask = struct((T,), "bool") if where else None
        return jax.jit(jax.value_and_grad(objective, argnums=(0, 1))).lower(*arrays, mask).compile()

    small, large = step(16384), step(65536)
    for V, compiled in ((16384, small), (65536, large)):
        found = re.findall(r"\b(?:pred|[suf]\d+|bf16)\[([\d,]+)\]", compiled.as_text())
        assert max(math.prod(map(int, dims.split(","))) for dims in found) <= V * G  # the teacher's weight
    held, of_more = (compiled.memory_analysis().temp_size_in_bytes for compiled in (small, large))
    assert held < 2 * (16 << 20) + 8 * T * (H + G)
    assert of_more <= held + (2 << 20)


@pytest.mark.fast("jsd--inf")
@combined(direction=["forward", "reverse", "jsd", "tv"], lowest=[-jnp.inf, -3e38])
def test_ids_that_both_biases_rule_out(direction: str, lowest: float) -> None:
    drawn = draw(call("ruled out", bias=True, temperature=True, direction=direction))
    out = jnp.arange(104) % 3 == 1
    left, heads = np.flatnonzero(~np.asarray(out)), (drawn.student, drawn.teacher)
    student, teacher = ((hidden, weight[left], bias[left]) for hidden, weight, bias in heads)
    want = expected(drawn._replace(student=student, teacher=teacher))
    student, teacher = ((hidden, weight, jnp.where(out, lowest, bias)) for hidden, weight, bias in heads)
    kl, (dhidden, *of_head) = evaluate(drawn._replace(student=student, teacher=teacher))
    assert max(oracle.value_error(kl, want.kl), oracle.relative_norm(dhidden, want.gradients[0])) < 4e-6
    for got, true in zip(of_head, want.gradients[1:], strict=True):
        assert oracle.relative_norm(got[left], true) < 2e-6
        assert not got[out].any()
