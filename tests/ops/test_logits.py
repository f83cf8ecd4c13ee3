"""Logits at chosen ids alone, and the softmax over a set of them, against stored logits in float64."""

from __future__ import annotations

import functools
import math
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from lce_jax import linear_logits, masked_logprobs
from lce_jax.xla import _logits
from tests import cases, oracle
from tests.pairs import combined, values_of

CALLS = [
    cases.case("plain", K=5),
    cases.case("one id", K=1, leading=()),
    cases.case("ragged", K=64, leading=(23,), H=31, V=97),
    cases.case("512 ids", K=512, leading=(2, 3)),
    cases.case("where hides NaN, hv", K=5, leading=(4, 6), where="nan", weight_layout="hv", bias="float32"),
    cases.case("scale 0", K=3, logit_scale=0.0),
    cases.case("one column, hv", K=5, leading=(16,), H=512, V=1, weight_layout="hv"),
    cases.case(
        "everything", K=7, leading=(4, 6), V=128, vocab_size=113, temperature="token", where="some", logit_softcap=4.0,
        logit_scale=-1.3, weight_layout="hv", spread=3.0, bias="bfloat16",
    ),
    cases.case("bfloat16", K=8, dtype="bfloat16", leading=(64,), H=128, V=512),
    cases.case("float32 hidden, bfloat16 weight", K=8, dtype="bfloat16", hidden_dtype="float32", leading=(64,)),
]  # fmt: skip


def call(test: cases.TestCase) -> tuple[Any, Any, Any, dict[str, Any]]:
    """(operands, ids, seed, options); the operands are hidden, weight and the bias, if there is one."""
    hidden, weight, _, options, seeds = cases.draw(test)
    ids, bias = options.pop("candidates"), options.pop("bias", None)
    operands = (hidden, weight) if bias is None else (hidden, weight, bias)
    return operands, ids, seeds[3], options


def expected(operands: Any, ids: Any, seed: Any, options: dict[str, Any]) -> tuple[np.ndarray, list[np.ndarray]]:
    """The logits and the gradients of Σ seed · logits, in float64."""
    hidden, weight, *bias = (np.asarray(x, np.float64) for x in operands)
    matrix = weight if options.get("weight_layout", "vh") == "vh" else weight.T
    where = np.asarray(options.get("where", np.ones(ids.shape[:-1], bool)))[..., None]
    ids = np.where(where, np.asarray(ids), -1)
    hidden = np.where(where, np.asarray(jnp.asarray(hidden).astype(operands[1].dtype), np.float64), 0)
    valid = (ids >= 0) & (ids < (options.get("vocab_size") or matrix.shape[0]))
    column = np.where(valid, ids, 0)
    raw = np.einsum("...h,...kh->...k", hidden, matrix[column]) + (bias[0][column] if bias else 0)
    x = options.get("logit_scale", 1.0) * raw
    slope = np.full_like(x, options.get("logit_scale", 1.0))
    if cap := options.get("logit_softcap"):
        slope /= np.cosh(x / cap) ** 2
        x = cap * np.tanh(x / cap)
    temperature = np.broadcast_to(np.asarray(options.get("temperature", 1.0), np.float64), ids.shape[:-1])[..., None]
    terms = np.where(valid, np.asarray(seed, np.float64) * slope / temperature, 0)
    dweight, dbias = np.zeros_like(matrix), np.zeros(len(matrix))
    np.add.at(dweight, column, terms[..., None] * hidden[..., None, :])
    np.add.at(dbias, column, terms)
    dhidden = np.einsum("...k,...kh->...h", terms, matrix[column])
    gradients = [dhidden, dweight if options.get("weight_layout", "vh") == "vh" else dweight.T, dbias]
    return np.where(valid, x / temperature, 0), gradients[: len(operands)]


def evaluate(operands: Any, ids: Any, seed: Any, options: dict[str, Any], function: Any = linear_logits) -> Any:
    def objective(*operands: Any) -> Any:
        bias = {"bias": operands[2]} if len(operands) == 3 else {}
        z = function(*operands[:2], ids, **bias, **options)
        return jnp.sum(seed * z), z

    argnums = tuple(range(len(operands)))
    gradients, z = jax.jit(jax.grad(objective, argnums=argnums, has_aux=True))(*operands)
    return z, gradients


@pytest.mark.fast("everything", "bfloat16", "hv", "512")
@pytest.mark.parametrize("test", CALLS, ids=str)
def test_matches_float64(test: cases.TestCase) -> None:
    check(test)


@pytest.mark.fast("everything")
@values_of("test", CALLS, slow=[test for test in CALLS if test.name not in ("ragged", "everything", "bfloat16")])
def test_chunks(test: cases.TestCase, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_logits, "GATHERED_BYTES", 3000)
    jax.clear_caches()  # the bytes are read while tracing
    check(test)
    jax.clear_caches()


def check(test: cases.TestCase) -> None:
    operands, ids, seed, options = call(test)
    z, gradients = evaluate(operands, ids, seed, {**options, "precision": "highest"})
    want, wanted = expected(operands, ids, seed, options)
    assert (z.shape, z.dtype) == (ids.shape, jnp.float32)
    assert oracle.value_error(z, want) <= 2e-6 * max(1.0, test.spread)
    for got, true, operand in zip(gradients, wanted, operands, strict=True):
        assert (got.shape, got.dtype) == (operand.shape, operand.dtype)
        rounding = 0.0 if got.dtype == jnp.float32 else float(jnp.finfo(got.dtype).eps) / 2
        assert oracle.relative_norm(got, true) <= 1e-6 + rounding


@pytest.mark.parametrize("axis_name", [None, "tensor"])
def test_ids_that_all_data_shards_share(axis_name: str | None) -> None:
    """Typed as replicated beside hidden states that the mesh splits."""
    (hidden, weight), ids, seed, _ = call(cases.case("shared ids", leading=(8,), V=104, K=6))
    ids = jnp.tile(ids[:4], (2, 1))
    mesh = jax.make_mesh((2, 4), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)

    def mapped(hidden: Any, weight: Any, ids: Any) -> Any:
        run = functools.partial(linear_logits, axis_name=axis_name)
        specs = (P("data"), P(axis_name), P())
        return jax.shard_map(run, mesh=mesh, in_specs=specs, out_specs=P("data"))(hidden, weight, ids[:4])

    z, gradients = evaluate((hidden, weight), ids, seed, {}, mapped)
    want, wanted = expected((hidden, weight), ids, seed, {})
    assert oracle.value_error(z, want) < 2e-6
    assert all(oracle.relative_norm(a, b) < 1e-6 for a, b in zip(gradients, wanted, strict=True))


@pytest.mark.fast("2-False")  # tests/mesh/test_every_function has it with types
@combined(shards=[8, 2, 1], check_vma=[True, False])
def test_inside_shard_map(shards: int, check_vma: bool) -> None:
    test = cases.case("shards", leading=(8, 3), V=104, K=6, temperature="token", logit_softcap=3.0, bias="float32")
    operands, ids, seed, options = call(test)
    mesh = jax.make_mesh((8 // shards, shards), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)
    temperature = options.pop("temperature")

    def mapped(hidden, weight, ids, bias):
        def body(hidden, weight, ids, bias, temperature):
            return linear_logits(hidden, weight, ids, bias=bias, temperature=temperature, axis_name="tensor", **options)

        specs = (P("data"), P("tensor"), P("data"), P("tensor"), P("data"))
        run = jax.shard_map(body, mesh=mesh, in_specs=specs, out_specs=P("data"), check_vma=check_vma)
        return run(hidden, weight, ids, bias, temperature)

    z, gradients = evaluate(operands, ids, seed, {}, mapped)
    want, wanted = expected(operands, ids, seed, {**options, "temperature": temperature})
    assert oracle.value_error(z, want) < 2e-6
    assert all(oracle.relative_norm(a, b) < 1e-6 for a, b in zip(gradients, wanted, strict=True))


def test_under_vmap() -> None:
    operands, ids, seed, _ = call(cases.case("vmap", leading=(4, 6), K=5))

    def one(hidden, weight, ids, seed):
        return jax.grad(lambda *x: jnp.sum(seed * linear_logits(*x, ids)), argnums=(0, 1))(hidden, weight)

    dhidden, dweight = jax.jit(jax.vmap(one, in_axes=(0, None, 0, 0)))(*operands, ids, seed)
    _, (of_hidden, of_weight) = expected(operands, ids, seed, {})
    assert oracle.relative_norm(dhidden, of_hidden) < 1e-6
    assert oracle.relative_norm(np.sum(dweight, axis=0), of_weight) < 1e-6


@pytest.mark.parametrize("options", [{"logit_scale": -1.3}, {"logit_scale": 1.3, "logit_softcap": 4.0}], ids=str)
def test_traced_scale_and_softcap(options: dict[str, float]) -> None:
    operands, ids, seed, _ = call(CALLS[0])
    z, gradients = evaluate(operands, ids, seed, {name: jnp.float32(value) for name, value in options.items()})
    want, wanted = expected(operands, ids, seed, options)
    assert oracle.value_error(z, want) < 2e-6
    assert all(oracle.relative_norm(a, b) < 1e-6 for a, b in zip(gradients, wanted, strict=True))


def test_a_traced_temperature_of_zero_stays_in_its_row() -> None:
    operands, ids, seed, _ = call(cases.case("temperature", leading=(6,), K=4))
    values = np.float32(np.arange(6) != 3)

    @jax.jit
    def run(hidden, weight, temperature):
        def objective(hidden, weight):
            z = linear_logits(hidden, weight, ids, temperature=temperature)
            return jnp.sum(jnp.where(jnp.isnan(z), 0.0, seed * z)), z

        return jax.grad(objective, argnums=(0, 1), has_aux=True)(hidden, weight)

    gradients, z = run(*operands, values)
    assert np.isnan(np.asarray(z)).all(axis=1).tolist() == [i == 3 for i in range(6)]
    want, wanted = expected(operands, ids, np.where(values[:, None] == 0, 0, seed), {})
    assert oracle.value_error(np.delete(z, 3, 0), np.delete(want, 3, 0)) < 2e-6
    assert all(oracle.relative_norm(a, b) < 1e-6 for a, b in zip(gradients, wanted, strict=True))


def test_no_tokens() -> None:
    operands, ids, seed, _ = call(cases.case("none", leading=(2, 0), K=3))
    z, (dhidden, dweight) = evaluate(operands, ids, seed, {})
    assert (z.shape, dhidden.shape) == ((2, 0, 3), (2, 0, 32))
    assert np.all(np.asarray(dweight) == 0)


def test_a_second_derivative_is_refused() -> None:
    operands, ids, _, _ = call(CALLS[0])
    with pytest.raises(NotImplementedError, match="first derivatives only"):
        jax.hessian(lambda h: jnp.sum(linear_logits(h, operands[1], ids) ** 2))(operands[0])


def test_memory_and_determinism() -> None:
    """No array of T x V, none of T x K x H, and no scatter that adds to one place in an order of its own."""
    T, H, V, K = 4096, 512, 65536, 64
    struct = jax.ShapeDtypeStruct

    def objective(hidden, weight, ids):
        return jnp.sum(linear_logits(hidden, weight, ids))

    step = jax.jit(jax.value_and_grad(objective, argnums=(0, 1)))
    lowered = step.lower(struct((T, H), "bfloat16"), struct((V, H), "bfloat16"), struct((T, K), "int32"))
    text = lowered.as_text()
    assert text.count('"stablehlo.scatter"') == len(re.findall('"stablehlo.scatter".*unique_indices = true', text)) > 0
    compiled = lowered.compile()
    shapes = re.findall(r"\b(?:pred|[suf]\d+|bf16)\[([\d,]+)\]", compiled.as_text())
    largest = max(math.prod(map(int, dims.split(","))) for dims in shapes)
    assert largest <= V * H  # dweight
    assert compiled.memory_analysis().temp_size_in_bytes < 4 * _logits.GATHERED_BYTES
    assert T * K * H * 2 > 3 * _logits.GATHERED_BYTES
    assert not any(dims.startswith(f"{T},{K},") for dims in shapes)


@pytest.mark.slow
def test_sampling_mask_of_skyrl() -> None:
    """SkyRL's masked log-probability: log_softmax of the stored logits with -inf outside the set, at the label."""
    (hidden, weight), ids, _, _ = call(cases.case("skyrl", leading=(2, 30), H=64, V=1500, K=40))
    scores = np.random.default_rng(5).random((2, 30, 1500))
    ids = jnp.asarray(np.argsort(scores, axis=-1)[..., :40])  # all different
    ids = jnp.where(jnp.arange(40) < jnp.arange(60).reshape(2, 30, 1) % 41, ids, -1)  # sets of 0 to 40
    labels = ids[..., 0].at[0, 5].set(7).at[0, 0].set(5).at[1, 2].set(-100)  # outside, without a set, of a prompt
    in_set = jnp.any(ids[..., None] == jnp.arange(1500), axis=-2)
    found = jnp.take_along_axis(in_set, jnp.maximum(labels, 0)[..., None], -1)[..., 0] & (labels >= 0)

    def stored(hidden, weight):
        z = jnp.matmul(hidden, weight.T, precision="highest") / 0.7
        some = jnp.any(ids >= 0, axis=-1)
        z = jnp.where(in_set | ~some[..., None], z, -jnp.inf)
        log_p = jax.nn.log_softmax(z)
        picked = jnp.take_along_axis(log_p, jnp.maximum(labels, 0)[..., None], -1)[..., 0]
        entropy = jnp.where(some, -jnp.sum(jnp.exp(log_p) * jnp.where(jnp.isfinite(log_p), log_p, 0.0), -1), 0.0)
        of_set = entropy, jnp.where(some, jax.nn.logsumexp(z, axis=-1), 0.0)
        total = jnp.sum(jnp.where(found, picked, 0.0)) + sum(map(jnp.sum, of_set))
        return total, (jnp.where(found, picked, -jnp.inf), *of_set)

    def ours(hidden, weight):
        out = masked_logprobs(linear_logits(hidden, weight, ids, temperature=0.7), ids, labels)
        total = jnp.sum(out.logprobs.at[0, 5].set(0.0)) + jnp.sum(out.entropy) + jnp.sum(out.lse)
        return total, out[:3]

    got, want = (jax.jit(jax.grad(f, argnums=(0, 1), has_aux=True))(hidden, weight) for f in (ours, stored))
    assert 0 < np.asarray(found).sum() < found.size
    kept, values = np.asarray(found), np.asarray(got[1][0])
    assert values[0, 5] == -np.inf
    assert values[0, 0] == values[1, 2] == values[1, 11] == 0  # the last one has neither ids nor a label
    assert np.sum(~kept) == 4
    assert oracle.value_error(values[kept], np.asarray(want[1][0])[kept]) < 2e-6
    assert all(oracle.value_error(a, b) < 2e-6 for a, b in zip(got[1][1:], want[1][1:], strict=True))
    assert all(oracle.relative_norm(a, b) < 2e-6 for a, b in zip(got[0], want[0], strict=True))


IDS = jnp.zeros((4, 3), int)


def test_mistakes_of_masked_logprobs() -> None:
    with pytest.raises(ValueError, match=r"logits \(4, 2\) of float32 must be .* ids \(4, 3\)"):
        masked_logprobs(jnp.ones((4, 2)), IDS, jnp.zeros(4, int))
    with pytest.raises(ValueError, match=r"ids \(4, 3\) must be .* labels \(5,\)"):
        masked_logprobs(jnp.ones((4, 3)), IDS, jnp.zeros(5, int))
