"""The Hopper kernels at real sizes on a GPU, against stored logits in float64."""

from __future__ import annotations

import dataclasses
import functools
import os
import pathlib
import re
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import lce_jax
from benchmarks.problem import TOPK_NAME, stored
from benchmarks.programs import KERNELS, use_kernels
from lce_jax import LogprobOutput
from lce_jax.call import _remembered
from lce_jax.mosaic import _generations, mma, sm90
from lce_jax.mosaic.mma import _pipeline

pytestmark = pytest.mark.gpu

# Nats. Tensor cores truncate a product's partial sums, in plain XLA too: its products are off by as much (6e-5 in a
# logprob at H = 5120). These results may add a third of that, and the rounding of their own sums.
VALUE_BOUND = 2e-5
VALUE_FACTOR = 1.33
GRADIENT_BOUND = {"bfloat16": 3.5e-3, "float16": 4.5e-4}  # one rounding of dlogits, one of the result
STATISTICS_BYTES = sm90.HOPPER.budget.statistics_bytes
FEW_ROWS_BOUND = 3 * 2.0**-9  # bfloat16's largest roundings, also of a cached exponential: few rows do not average them

CASES: dict[str, dict[str, Any]] = {
    "ragged": {"T": 1003, "H": 512, "V": 4032},
    "one token": {"T": 1, "H": 768, "V": 50257},
    "GPT-2": {"T": 777, "H": 768, "V": 50257},
    "Qwen3": {"T": 1024, "H": 1024, "V": 151936},
    "several launches": {"T": 4096, "H": 1024, "V": 32000, "stats": True, "statistics_bytes": 1 << 20},
    "wide": {"T": 640, "H": 5120, "V": 32000},
    "narrow": {"T": 600, "H": 64, "V": 4001},
    "odd steps": {"T": 300, "H": 448, "V": 18992},
    "where": {"T": 4096, "H": 1024, "V": 32000, "where": 0.3},
    "few rows": {"T": 4096, "H": 1024, "V": 32000, "where": 0.01},
    "no rows": {"T": 1024, "H": 1024, "V": 32000, "where": 0.0},
    "everything": {
        "T": 1500, "H": 2048, "V": 32000, "where": 0.5, "temperature": True, "logit_softcap": 5.0, "logit_scale": 1.5,
        "stats": True, "vocab_size": 31991, "cache_bytes": 30 << 20,
    },
    "no entropy": {"T": 512, "H": 2048, "V": 32000, "entropy": False},
    "cache": {"T": 1003, "H": 1024, "V": 32000, "cache_bytes": 1 << 32},
    "dhidden written once": {"T": 4096, "H": 2048, "V": 32000, "cache_bytes": 1 << 32},
    "padding up to a tail": {"T": 300, "H": 512, "V": 32003, "vocab_size": 31000},
    "part of a cache": {"T": 2048, "H": 1024, "V": 32008, "cache_bytes": 50 << 20},
    "chunks": {"T": 4096, "H": 1024, "V": 128256},
    "chunks that copy": {"T": 4096, "H": 1024, "V": 128251, "cache_bytes": 400 << 20},
    "float16": {"T": 520, "H": 1024, "V": 32000, "dtype": "float16", "cache_bytes": 10 << 20},
    "hv": {"T": 520, "H": 1024, "V": 32064, "weight_layout": "hv"},
    "hv, narrow swizzle": {"T": 520, "H": 1024, "V": 18992, "weight_layout": "hv", "cache_bytes": 1 << 32},
}  # fmt: skip


def draw(T: int, H: int, V: int, dtype: str = "bfloat16", seed: int = 0, **options: Any):
    """(hidden, weight, rows, static options): ``rows`` are the per-token arrays, seeds included."""
    rng = np.random.default_rng(seed)
    hidden = rng.standard_normal((T, H), np.float32)
    rows = {
        "labels": jnp.asarray(rng.integers(-1, options.get("vocab_size", V), T), jnp.int32),
        "seeds": jnp.asarray(rng.standard_normal((3, T)), jnp.float32),
    }
    share = options.pop("where", None)
    if share is not None:
        live = rng.random(T) < share
        rows["where"] = jnp.asarray(live)
        hidden[~live] = np.nan
    if options.pop("temperature", False):
        rows["temperature"] = jnp.asarray(rng.uniform(0.5, 2.0, T), jnp.float32)
    weight = rng.standard_normal((V, H), np.float32) * (2 / np.sqrt(H))
    weight = weight.T if options.get("weight_layout") == "hv" else weight
    return jnp.asarray(hidden, dtype), jnp.asarray(weight, dtype), rows, options


def step(implementation: str | None, options: dict[str, Any]):
    """(outputs, gradients) of one call, compiled."""
    return gradients_of(
        functools.partial(lce_jax.linear_logprobs, implementation=implementation), {"cache_bytes": 0} | options
    )


def of_stored(options: dict[str, Any]):
    """The same from stored logits."""
    exact = {name: options[name] for name in ("logit_softcap", "logit_scale", "vocab_size") if name in options}

    def function(hidden, weight, labels, where=True, **rows):
        live = jnp.broadcast_to(where, labels.shape)
        weight = weight.T if options.get("weight_layout") == "hv" else weight
        out = stored(jnp.where(live[:, None], hidden, 0), weight, labels, where=live, **rows, **exact)
        correct = (labels >= 0) & live & (out.pop(TOPK_NAME)[:, 0] == out["logprobs"])
        out |= {} if options.get("entropy", True) else {"entropy": None}
        return LogprobOutput(**out, correct=correct)

    return gradients_of(function, {})


def gradients_of(function: Any, options: dict[str, Any]):
    def objective(hidden, weight, rows):
        rest = {name: rows[name] for name in ("where", "temperature") if name in rows}
        out = function(hidden, weight, rows["labels"], **rest, **options)
        pairs = zip(rows["seeds"].astype(out.lse.dtype), out[:3], strict=True)
        return sum(jnp.sum(seed * field) for seed, field in pairs if field is not None), out

    return jax.jit(jax.grad(objective, argnums=(0, 1), has_aux=True))


def supported(hidden: Any, weight: Any, options: dict[str, Any]) -> None:
    labels = jax.ShapeDtypeStruct(hidden.shape[:-1], jnp.int32)
    try:
        lce_jax.explain(hidden, weight, labels, **options, implementation="mosaic_gpu")
    except lce_jax.UnsupportedError as error:
        pytest.skip(str(error))


def use_statistics_bytes(statistics_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Few make the forward take several launches."""
    sets: list[Any] = list(_generations.GENERATIONS)
    budgets = [dataclasses.replace(one.budget, statistics_bytes=statistics_bytes) for one in sets]
    replaced = tuple(dataclasses.replace(one, budget=budget) for one, budget in zip(sets, budgets, strict=True))
    monkeypatch.setattr(_generations, "GENERATIONS", replaced)


def poison() -> None:
    """Fills the memory that the next allocations get with NaN."""
    jax.block_until_ready(jnp.full((256 << 20,), jnp.nan, jnp.float32))


def compare(got: Any, plain: Any, want: Any, gradient_bound: float) -> None:
    """``plain`` is the same call through XLA's own products."""
    (gradients, out), (true_gradients, true_out) = got, want
    for name, field in out._asdict().items():
        if field is not None:
            error, plain_error = (
                np.abs(np.asarray(x, np.float64) - np.asarray(getattr(true_out, name))).max(initial=0)
                for x in (field, getattr(plain[1], name))
            )
            assert error <= VALUE_BOUND + VALUE_FACTOR * plain_error, name
    for name, field, true in zip(("dhidden", "dweight"), gradients, true_gradients, strict=True):
        field, true = np.asarray(field, np.float64), np.asarray(true, np.float64)
        assert np.linalg.norm(field - true) <= gradient_bound * np.linalg.norm(true), name


def double(tree: Any) -> Any:
    return jax.tree.map(lambda x: x.astype(jnp.float64) if jnp.issubdtype(x.dtype, jnp.floating) else x, tree)


@pytest.mark.parametrize("name", CASES)
def test_matches_float64(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check_case(name, monkeypatch)


@pytest.mark.parametrize("kernels", [name for name in KERNELS if name != "wgmma"])
@pytest.mark.parametrize("name", CASES)
def test_kernels_of_other_generations(name: str, kernels: str) -> None:
    """A Hopper GPU runs mma.sync and cp.async too."""
    if jax.devices()[0].compute_capability != "9.0":
        pytest.skip("Hopper alone runs the instructions of all generations")
    # The patch ends first. If it outlived `use_kernels`, its end would bring the other generation back for later tests.
    with use_kernels(KERNELS[kernels]), pytest.MonkeyPatch.context() as patch:
        check_case(name, patch)


@pytest.mark.parametrize("right", [True, False])
def test_the_first_call_checks_itself(right: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """With kernels that count as never run on this card, and with a fault that is planted in them."""
    device = jax.devices()[0]
    generation = dataclasses.replace(mma.SM120, compute_capabilities=(device.compute_capability,))
    if not right:
        exchanged = _pipeline._exchange
        monkeypatch.setattr(_pipeline, "_exchange", lambda own, given, *more: exchanged(given, own, *more))
    hidden, weight, rows, options = draw(T=100, H=128, V=1000)
    jax.clear_caches()
    with _generations.using(generation):
        jax.block_until_ready(step(None, options)(hidden, weight, rows))
        plan = lce_jax.explain(hidden, weight, rows["labels"])
    assert (plan.implementation == "mosaic_gpu") == right
    assert right or f"its first call on {device.device_kind} is off by" in plan.refused["mosaic_gpu"]
    (found,) = [reason for (of, _, _), reason in _generations.FAULTS.items() if of is generation]
    assert (found is None) == right


def test_what_the_first_call_has_compared_is_remembered(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    """With this machine's driver, and with kernels that count as never run on this card."""
    assert re.fullmatch(r"\d+\.[\d.]+, CUDA \d+\.\d+", _remembered.find_driver() or "")
    device = jax.devices()[0]
    generation = dataclasses.replace(mma.SM120, compute_capabilities=(device.compute_capability,))
    monkeypatch.setenv(_remembered.VARIABLE, str(tmp_path))
    monkeypatch.setattr(_generations, "RELEASED", (generation,))
    hidden, weight, rows, _ = draw(T=100, H=128, V=1000)
    for compared in (True, False):
        monkeypatch.setattr(_generations, "FAULTS", {})
        jax.clear_caches()
        with _generations.using(generation):
            plan = lce_jax.explain(hidden, weight, rows["labels"])
        assert plan.implementation == "mosaic_gpu"
        assert ("this process compares" in plan.notes[-1]) == compared
    assert len([*tmp_path.glob("*.json")]) == 1


def check_case(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Twice the same bits, near float64."""
    call = dict(CASES[name])
    use_statistics_bytes(call.pop("statistics_bytes", STATISTICS_BYTES), monkeypatch)
    hidden, weight, rows, options = draw(**call)
    supported(hidden, weight, options)
    run = step("mosaic_gpu", options)
    poison()
    got = jax.device_get(run(hidden, weight, rows))
    poison()
    for first, second in zip(jax.tree.leaves(got), jax.tree.leaves(run(hidden, weight, rows)), strict=True):
        np.testing.assert_array_equal(first, second)
    with jax.enable_x64(True):
        want = jax.device_get(of_stored(options)(*double((hidden, weight, rows))))
    plain = jax.device_get(step("xla", options)(hidden, weight, rows))
    compare(got, plain, want, GRADIENT_BOUND[CASES[name].get("dtype", "bfloat16")])


@pytest.mark.slow
@pytest.mark.parametrize("shape", range(25))
def test_random_calls(shape: int) -> None:
    """Forty draws of each of 25 random shapes: labels, live rows and temperatures change, the programs do not."""
    rng = np.random.default_rng(shape)
    fixed = {
        "T": int(rng.integers(1, 700)),
        "H": 64 * int(rng.integers(1, 12)),
        "V": int(rng.integers(256, 3000)),
        "temperature": bool(rng.random() < 0.5),
        "cache_bytes": int(rng.choice([0, 200_000, 1 << 30])),
        "entropy": bool(rng.random() < 0.8),
        "stats": bool(rng.random() < 0.3),
    }
    runs = None
    for seed in range(40):
        hidden, weight, rows, options = draw(**fixed, seed=seed, where=float(rng.random()))
        supported(hidden, weight, options)
        runs = runs or (step("mosaic_gpu", options), step("xla", options), of_stored(options))
        got, plain = (jax.device_get(run(hidden, weight, rows)) for run in runs[:2])
        with jax.enable_x64(True):
            want = jax.device_get(runs[2](*double((hidden, weight, rows))))
        few = int(rows["where"].sum()) < 10
        compare(got, plain, want, FEW_ROWS_BOUND if few else GRADIENT_BOUND["bfloat16"])


@pytest.mark.parametrize("implementation", ["mosaic_gpu", "xla"])
@pytest.mark.parametrize("temperature", [1.0, 0.1])
@pytest.mark.parametrize("more", [{}, {"cache_bytes": 1 << 32}, {"logit_softcap": 50.0, "logit_scale": 1.7}], ids=str)
def test_no_probability_is_above_one(more: dict[str, Any], temperature: float, implementation: str) -> None:
    """Labels are the likeliest, among logits with deviations of 5 to 40, in tiles and in columns that are no atom."""
    T, H, V = 4096, 256, 8195
    hidden, weight, _, options = draw(T, H, V, **more)
    supported(hidden, weight, options)
    hidden = (hidden * jnp.linspace(2.5, 20, T)[:, None]).astype(hidden.dtype)  # the weight's deviations are 2
    raw = jnp.matmul(hidden, weight.T, preferred_element_type=jnp.float32)
    labels = jnp.argmax(raw, axis=1).astype(jnp.int32)

    def logprobs(hidden, weight):
        out = lce_jax.linear_logprobs(
            hidden, weight, labels, temperature=temperature, **options, implementation=implementation
        )
        return jnp.sum(out.logprobs), out

    (_, out), _ = jax.jit(jax.value_and_grad(logprobs, has_aux=True))(hidden, weight)  # what keeps the cache
    assert np.all(np.asarray(out.logprobs) <= 0)
    assert np.all(np.asarray(out.entropy) >= 0)
    certain = np.asarray(out.logprobs) > -1e-6
    assert np.any(certain) or "logit_softcap" in more  # many logits lie at the cap


def test_one_cache_serves_two_backwards() -> None:
    """The first overwrites the cache, so XLA must copy it before."""
    hidden, weight, rows, options = draw(512, 1024, 32000, cache_bytes=1 << 32)
    supported(hidden, weight, options)

    def logprobs(hidden, weight):
        return lce_jax.linear_logprobs(hidden, weight, rows["labels"], **options, implementation="mosaic_gpu").logprobs

    def backward(hidden, weight, *seeds):
        _, pull = jax.vjp(logprobs, hidden, weight)
        return [pull(seed) for seed in seeds]

    one, other, _ = rows["seeds"]
    run = jax.jit(backward)
    alone = jax.device_get((run(hidden, weight, one)[0], run(hidden, weight, other)[0]))
    together = jax.device_get(run(hidden, weight, one, other, one))
    _, pull = jax.vjp(logprobs, hidden, weight)  # outside jit, where the cache is an operand of the backward
    eager = jax.device_get([pull(one), pull(other), pull(one)])
    for got in (together, eager):
        for gradients, want in zip(got, (*alone, alone[0]), strict=True):
            for x, y in zip(gradients, want, strict=True):
                np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("statistics_bytes", [STATISTICS_BYTES, 1 << 20])
def test_the_cache_is_not_copied(statistics_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither where one launch of the forward fills it nor where several do."""
    use_statistics_bytes(statistics_bytes, monkeypatch)
    jax.clear_caches()  # they are read while tracing
    hidden, weight, rows, options = draw(2048, 512, 32000, cache_bytes=1 << 32)
    supported(hidden, weight, options)
    compiled = step("mosaic_gpu", options).lower(hidden, weight, rows).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 1.2 * 2048 * 32000 * 2


def test_the_weight_is_not_copied() -> None:
    hidden, weight, rows, options = draw(512, 4096, 32000)
    supported(hidden, weight, options)
    compiled = step("mosaic_gpu", options).lower(hidden, weight, rows).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < weight.nbytes // 2


COMPILE = """
import jax.numpy as jnp
from benchmarks import candidates, problem

drawn = problem.random_problem((4096, 4096, 151936), jnp.bfloat16)
for one in candidates.jax_candidates(drawn, "mosaic_gpu"):
    if one.key.startswith("ours"):
        print(one.key, one.direction, one.compile().compile_seconds, sep=",")
"""


def test_how_long_compiling_takes(tmp_path: pathlib.Path) -> None:
    """In a process, and in a later one that finds JAX's persistent cache."""
    if os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1") != "1":
        pytest.skip("other tests compile meanwhile")
    hidden, weight, _, options = draw(64, 64, 512)
    supported(hidden, weight, options)
    cache = {"JAX_COMPILATION_CACHE_DIR": str(tmp_path), "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    for bound in (15.0, 3.0):
        done = subprocess.run(
            [sys.executable, "-c", COMPILE], env=os.environ | cache, capture_output=True, text=True, timeout=200
        )
        assert done.returncode == 0, done.stderr
        print(done.stdout)
        seconds = [float(line.rsplit(",", 1)[1]) for line in done.stdout.splitlines()]
        assert len(seconds) >= 4
        assert max(seconds) < bound
