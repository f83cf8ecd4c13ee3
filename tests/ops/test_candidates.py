"""Log-probabilities at chosen ids: shards, transformations, published losses. `test_parity` has their values."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from lce_jax import explain, linear_logprobs
from tests import cases, oracle
from tests.agreement import assert_same, call_on_one_device, evaluate
from tests.pairs import values_of

CALLS = [
    cases.case("plain", leading=(4, 8), H=16, V=128, K=3),
    cases.case(
        "everything", leading=(4, 8), H=16, V=128, vocab_size=113, labels="foreign", where="nan", temperature="token",
        logit_softcap=4.0, logit_scale=1.3, stats=True, weight_layout="hv", spread=3.0, K=5,
    ),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("shards", [*(pytest.param(n, marks=pytest.mark.slow) for n in (1, 2)), 8])
def test_every_shard_holds_the_same_bits(shards: int) -> None:
    test = cases.case("shards", leading=(24,), V=1096, K=6)
    mesh = jax.make_mesh((shards,), ("tensor",), axis_types=(AxisType.Auto,), devices=jax.devices()[:shards])

    def mapped(hidden, weight, labels, **options):
        def body(hidden, weight, labels, ids):
            out = linear_logprobs(hidden, weight, labels, candidates=ids, axis_name="tensor", precision="highest")
            return jax.tree.map(lambda x: x[None], out)

        ids = options["candidates"]
        # Stacked over the shards. Without check_vma the cotangent of each shard's copy is its own.
        return jax.shard_map(
            body, mesh=mesh, in_specs=(P(), P("tensor"), P(), P()), out_specs=P("tensor"), check_vma=False
        )(hidden, weight, labels, ids)

    hidden, weight, labels, options, seeds = cases.draw(test)
    out = jax.jit(mapped)(hidden, weight, labels, **options)
    for field in jax.tree.leaves(out):
        assert all(np.array_equal(field[0], field[i]) for i in range(shards))

    def objective(hidden, weight):
        first = jax.tree.map(lambda x: x[0], mapped(hidden, weight, labels, **options))
        return cases.objective(first, seeds), first

    grads, first = jax.jit(jax.grad(objective, argnums=(0, 1), has_aux=True))(hidden, weight)
    assert_same((first, grads), call_on_one_device(test))


@pytest.mark.slow
def test_inside_shard_map_where_ids_are_typed_as_varying() -> None:
    """An id that differs between the shards makes its row NaN, and no other."""
    test = cases.case("varying", leading=(8,), V=128, K=3)
    mesh = jax.make_mesh((4,), ("tensor",), axis_types=(AxisType.Auto,), devices=jax.devices()[:4])
    hidden, weight, labels, options, _ = cases.draw(test)

    def body(hidden, weight, labels, ids, wrong):
        ids = jnp.where(wrong, ids.at[2, 1].set(jax.lax.axis_index("tensor")), ids)
        ids = jax.lax.pcast(ids, ("tensor",), to="varying") if "tensor" not in jax.typeof(ids).mat.varying else ids
        return linear_logprobs(hidden, weight, labels, candidates=ids, axis_name="tensor")

    specs = (P(), P("tensor"), P(), P(), P())
    mapped = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=specs, out_specs=P()))
    right, wrong = (mapped(hidden, weight, labels, options["candidates"], jnp.asarray(x)) for x in (False, True))
    want = linear_logprobs(hidden, weight, labels, **options)
    assert oracle.value_error(right.candidate_logprobs, want.candidate_logprobs) < 2e-6
    assert np.isnan(np.asarray(wrong.candidate_logprobs)).any(axis=1).tolist() == [i == 2 for i in range(8)]
    assert np.isnan(np.asarray(wrong.logprobs)).tolist() == [i == 2 for i in range(8)]


@values_of("test", CALLS, slow=[CALLS[0]])
def test_under_vmap(test: cases.TestCase) -> None:
    hidden, weight, labels, options, seeds = cases.draw(test)
    per_token = {name: options.pop(name) for name in ("where", "temperature", "candidates") if name in options}

    def one(hidden, weight, labels, rows, seeds):
        def objective(hidden, weight):
            out = linear_logprobs(hidden, weight, labels, precision="highest", **rows, **options)
            return cases.objective(out, seeds), out

        return jax.grad(objective, argnums=(0, 1), has_aux=True)(hidden, weight)

    (dhidden, dweight), out = jax.jit(jax.vmap(one, in_axes=(0, None, 0, 0, 0)))(
        hidden, weight, labels, per_token, seeds
    )
    assert_same((out, (dhidden, jnp.sum(dweight, axis=0))), call_on_one_device(test))


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"logit_scale": -1.3}, {"logit_scale": 1.3, "logit_softcap": 4.0}], ids=str)
def test_traced_scale_and_softcap(options: dict[str, float]) -> None:
    traced = {name: jnp.float32(value) for name, value in options.items()}
    assert_same(evaluate(CALLS[0], **traced), evaluate(CALLS[0], **options))


def test_a_wrong_temperature_affects_its_own_row_alone() -> None:
    hidden, weight, labels, options, _ = cases.draw(cases.case("temperature", leading=(6,), K=4, logit_softcap=3.0))

    @jax.jit
    def run(hidden, weight, temperature):
        def objective(hidden, weight):
            out = linear_logprobs(hidden, weight, labels, temperature=temperature, **options)
            return jnp.sum(jnp.where(jnp.isnan(out.candidate_logprobs), 0, out.candidate_logprobs)), out

        return jax.grad(objective, argnums=(0, 1), has_aux=True)(hidden, weight)

    temperature = jnp.ones(6).at[3].set(0.0)
    grads, out = run(hidden, weight, temperature)
    _, right = run(hidden, weight, jnp.ones(6))
    others = np.arange(6) != 3
    assert np.isnan(np.asarray(out.candidate_logprobs)[3]).all()
    assert np.array_equal(np.asarray(out.candidate_logprobs)[others], np.asarray(right.candidate_logprobs)[others])
    assert all(np.isfinite(np.asarray(x)).all() for x in grads)
    assert np.all(np.asarray(grads[0])[3] == 0)


def test_no_tokens() -> None:
    out = linear_logprobs(
        jnp.ones((2, 0, 8)), jnp.ones((32, 8)), jnp.zeros((2, 0), int), candidates=jnp.zeros((2, 0, 5), int)
    )
    assert out.candidate_logprobs.shape == (2, 0, 5)


def test_ids_of_every_integer_type() -> None:
    hidden, weight, labels, options, _ = cases.draw(cases.case("types", leading=(6,), K=4))
    want = linear_logprobs(hidden, weight, labels, **options).candidate_logprobs
    ids = np.asarray(options["candidates"])
    wide = np.where(ids < 0, 2**32 + 3, ids.astype(np.int64))  # JAX would wrap it to 3
    assert np.array_equal(linear_logprobs(hidden, weight, labels, candidates=wide).candidate_logprobs, want)
    small = linear_logprobs(hidden, weight, labels, candidates=np.clip(ids, -1, 127).astype(np.int8))
    assert np.array_equal(small.candidate_logprobs, want)


@pytest.mark.slow
def test_top_k_distillation_of_verl() -> None:
    """verl's forward KL on a teacher's top k: Σ_k p_k (ln p_k - log_softmax(logits)[k]), from stored logits."""
    hidden, weight, labels, _, _ = cases.draw(cases.case("verl", leading=(2, 30), H=64, V=1500, K=64))
    teacher = jax.random.normal(jax.random.key(1), (2, 30, 1500)) * 2
    top, ids = jax.lax.top_k(jax.nn.log_softmax(teacher), 64)

    def stored(hidden, weight):
        logprobs = jnp.take_along_axis(jax.nn.log_softmax(jnp.matmul(hidden, weight.T, precision="highest")), ids, -1)
        return jnp.mean(jnp.sum(jnp.exp(top) * (top - logprobs), axis=-1))

    def ours(hidden, weight):
        out = linear_logprobs(hidden, weight, labels, candidates=ids, entropy=False, precision="highest")
        return jnp.mean(jnp.sum(jnp.exp(top) * (top - out.candidate_logprobs), axis=-1))

    got, want = (jax.jit(jax.value_and_grad(f, argnums=(0, 1)))(hidden, weight) for f in (ours, stored))
    assert oracle.value_error(got[0], want[0]) < 2e-6
    assert all(oracle.relative_norm(a, b) < 2e-6 for a, b in zip(got[1], want[1], strict=True))


@pytest.mark.usefixtures("hopper")
def test_explain_names_the_bytes() -> None:
    struct, T, K = jax.ShapeDtypeStruct, 4096, 64
    call = struct((T, 4096), jnp.bfloat16), struct((151936, 4096), jnp.bfloat16), struct((T,), jnp.int32)
    for implementation in ("mosaic_gpu", "xla"):
        plan = explain(*call, candidates=struct((T, K), jnp.int32), implementation=implementation)
        without = explain(*call, implementation=implementation)
        assert plan.kept_bytes - without.kept_bytes == T * K * 4
        assert plan.forward_bytes - without.forward_bytes >= 3 * T * K * 4
        assert "64 candidates per token" in str(plan)
        assert not any("candidates" in note for note in without.notes)
