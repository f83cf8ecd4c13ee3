"""`cache_bytes` of the XLA implementation: exponentials that the forward keeps, and what the backward makes of them."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lce_jax import LogprobOutput, explain, linear_logprobs, linear_loss, sharded_linear_logprobs
from lce_jax.call import _describe, _options
from lce_jax.run import _shard
from lce_jax.types._types import Results
from lce_jax.xla import _walk
from tests import cases, oracle
from tests.ops.test_parity import GRADIENT_BOUND

pytestmark = pytest.mark.usefixtures("small_tiles")

ALL = 1 << 40
TILE = 100
STRUCT = jax.ShapeDtypeStruct


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Several tiles of columns, and a remainder; a device that jit knows when it traces, so that something is kept."""

    def tile_sizes(case: Any) -> tuple[int, int]:
        return max(case.num_tokens // 2 if case.partial_rows else case.num_tokens, 1), min(TILE, case.vocab_size)

    monkeypatch.setattr(_walk, "choose_tile_sizes", tile_sizes)
    jax.clear_caches()
    with jax.set_mesh(jax.sharding.Mesh(np.array(jax.devices()[:1]), ("device",))):
        yield
    jax.clear_caches()


def products(function: Any, *operands: Any) -> int:
    """Matrix products in the program; a loop over tiles has those of one."""
    return str(jax.make_jaxpr(function)(*operands)).count("dot_general")


def relative_errors(test: cases.TestCase, share: float) -> tuple[list[float], int]:
    """Those of the gradients against float64, and the bytes of what is kept, a share of all exponentials."""
    hidden, weight, labels, options, seeds = cases.draw(test)
    options = {"precision": "highest"} | options | {"implementation": "xla"}
    full = explain(hidden, weight, labels, **options).full_cache_bytes
    options["cache_bytes"] = int(share * full)
    plan = explain(hidden, weight, labels, **options)

    def objective(hidden: Any, weight: Any, bias: Any) -> jax.Array:
        given = options if bias is None else options | {"bias": bias}
        return cases.objective(linear_logprobs(hidden, weight, labels, **given), seeds)

    bias = options.get("bias")
    grads = jax.jit(jax.grad(objective, argnums=(0, 1) if bias is None else (0, 1, 2)))(hidden, weight, bias)
    del options["cache_bytes"], options["implementation"]
    want = oracle.gradients(hidden.astype(weight.dtype), weight, labels, seeds, **options)
    kept = plan.kept_bytes - plan.call.statistics_bytes
    return [oracle.relative_norm(got, true) for got, true in zip(grads, want, strict=True)], kept


EVERYTHING = next(test for test in cases.CANDIDATES if test.name == "candidates and everything")
FLOOR = next(test for test in cases.FLOORS if test.name == "floor and everything")
ACCURATE = [
    (cases.case("ragged", leading=(23,), H=31, V=497), 1.0, ()),  # overwritten, in one piece
    (cases.case("softcap, hv", V=400, spread=5.0, logit_softcap=3.0, weight_layout="hv", bias="float32"), 1.0, ()),
    (cases.case("half of it", V=497, K=5, temperature="token", labels="foreign", stats=True), 0.5, ()),
    (cases.case("padded, rows left out", V=497, vocab_size=431, where="nan", logit_scale=-1.5), 1.0, pytest.mark.slow),
    (EVERYTHING, 0.6, ()),
    (FLOOR, 1.0, pytest.mark.slow),
    (cases.case("bfloat16", dtype="bfloat16", leading=(64,), H=128, V=512), 1.0, ()),
    (cases.case("float16 peaked", dtype="float16", leading=(64,), H=128, V=512, spread=8.0), 0.5, pytest.mark.slow),
]


@pytest.mark.fast("candidates and everything")
@pytest.mark.usefixtures("optimized")  # rounding as users get it
@pytest.mark.parametrize(
    ("test", "share"), [pytest.param(test, share, marks=marks) for test, share, marks in ACCURATE], ids=str
)
def test_gradients_match_float64(test: cases.TestCase, share: float) -> None:
    """On a CPU neither exponentials nor dlogits are rounded to 16 bits."""
    errors, kept = relative_errors(test, share)
    assert kept > 0
    if test.dtype == "float32":
        assert max(errors) <= GRADIENT_BOUND
        return
    without, nothing = relative_errors(test, 0.0)
    assert nothing == 0
    assert all(got <= 1.1 * exact for got, exact in zip(errors, without, strict=True))


@pytest.mark.slow
@pytest.mark.usefixtures("optimized")
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("share", [1.0, pytest.param(0.5, marks=pytest.mark.slow)])
def test_rounded_as_on_a_gpu(dtype: str, share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Exponentials and dlogits in the dtype of the weight: two roundings beside the last one of each gradient."""
    test = cases.case("rounded", dtype=dtype, leading=(64,), H=64, V=500, spread=4.0, logit_softcap=8.0)
    without, _ = relative_errors(test, 0.0)
    of_a_cpu = relative_errors(test, share)[1]
    monkeypatch.setattr(_walk, "gradient_dtype", lambda case: case.dtype)
    errors, kept = relative_errors(test, share)
    assert kept < 0.6 * of_a_cpu
    assert all(1.01 * exact < got < 2 * exact for got, exact in zip(errors, without, strict=True)), (errors, without)


def gradient(hidden: Any, weight: Any, labels: Any, **options: Any) -> Any:
    def loss(hidden: Any, weight: Any) -> Any:
        out = linear_logprobs(hidden, weight, labels, implementation="xla", **options)
        return jnp.sum(out.logprobs + 0.3 * out.entropy)

    return jax.grad(loss, argnums=(0, 1))(hidden, weight)


def assert_near(got: Any, want: Any) -> None:
    for one, other in zip(got, want, strict=True):
        assert oracle.relative_norm(one, np.asarray(other, np.float64)) < GRADIENT_BOUND


CALL = cases.draw(cases.case("plain", leading=(24,), V=500))[:3]


def test_products_of_cached_tiles_are_spared() -> None:
    """A full cache spares the backward its logits; one that holds less than a tile changes nothing."""
    full, too_small = (functools.partial(gradient, cache_bytes=n) for n in (ALL, 24 * 4 * 100))
    assert products(full, *CALL) == products(gradient, *CALL) - 1
    assert products(too_small, *CALL) == products(gradient, *CALL)


@pytest.mark.slow
def test_linear_loss_spares_them_too() -> None:
    def loss(hidden: Any, weight: Any, labels: Any, **options: Any) -> Any:
        total, _ = linear_loss(lambda logprob, entropy, _: logprob + 0.3 * entropy, hidden, weight, labels, **options)
        return total

    for options in ({}, {"chunk_bytes": 1}):  # one chunk, whose dlogits are one piece; several, whose dweight are added
        hidden, weight, labels = cases.draw(cases.case("chunks", leading=(256,), V=500))[:3]
        step = jax.grad(functools.partial(loss, implementation="xla", **options), argnums=(0, 1))
        assert products(step, hidden, weight, labels) == products(gradient, *CALL) - 1
    assert_near(jax.jit(step)(hidden, weight, labels), jax.jit(gradient)(hidden, weight, labels))


def test_shards_keep_their_own() -> None:
    mesh = jax.make_mesh((2, 4), ("data", "tensor"), axis_types=(jax.sharding.AxisType.Auto,) * 2)

    def loss(hidden: Any, weight: Any, labels: Any, cache_bytes: int) -> Any:
        out = sharded_linear_logprobs(
            hidden, weight, labels, mesh=mesh, vocab_axis="tensor", batch_axes="data", vocab_size=450,
            implementation="xla", cache_bytes=cache_bytes,
        )  # fmt: skip
        return jnp.sum(out.logprobs + 0.3 * out.entropy)

    with jax.set_mesh(mesh):
        steps = [jax.jit(jax.grad(functools.partial(loss, cache_bytes=n), argnums=(0, 1))) for n in (ALL, 0)]
        assert_near(steps[0](*CALL), steps[1](*CALL))


@pytest.mark.slow
def test_a_cache_may_be_read_again() -> None:
    options = {"implementation": "xla", "cache_bytes": ALL}
    call, primals, rows, _ = _describe.bind_call(_describe.describe_call(_options.parse_arguments(options, *CALL)))
    part = _shard.Part.of(call, primals, rows)
    stats, cache, _ = part.statistics(keep_cache=True)
    seed = Results(LogprobOutput(logprobs=jnp.ones(24), entropy=jnp.full(24, 0.3), lse=jnp.zeros(24)))
    want = jax.jit(gradient)(*CALL)
    for overwrite in (False, True):
        found = part.gradients(stats, seed, cache, may_overwrite_cache=overwrite)
        assert_near(found[:2], want)


def test_what_keeps_nothing() -> None:
    smoothed = explain(*CALL, implementation="xla", logit_softcap=3.0, label_smoothing=0.1, cache_bytes=ALL)
    assert smoothed.kept_bytes == smoothed.call.statistics_bytes
    assert smoothed.full_cache_bytes == 0
    assert any("label smoothing needs the capped logits" in note for note in smoothed.notes)


@pytest.mark.fast("float32")
@pytest.mark.usefixtures("optimized")
@pytest.mark.parametrize(
    ("share", "dtype", "where"),
    [(1.0, "float32", False), pytest.param(0.5, "bfloat16", False, marks=pytest.mark.slow), (1.0, "bfloat16", True)],
)
def test_the_cache_is_not_copied(share: float, dtype: str, where: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """What XLA holds of both passes is what is kept, and a few tiles."""
    T, H, V = 512, 64, 4096
    monkeypatch.setattr(_walk, "choose_tile_sizes", lambda _: (256 if where else T, 512))
    operands = STRUCT((T, H), dtype), STRUCT((V, H), dtype), STRUCT((T,), "int32")
    mask = {"where": STRUCT((T,), "bool")} if where else {}
    full = explain(*operands, implementation="xla", **mask).full_cache_bytes
    plan = explain(*operands, implementation="xla", cache_bytes=int(share * full), **mask)
    step = functools.partial(gradient, cache_bytes=int(share * full))
    compiled = jax.jit(lambda *given: step(*given[:3], **given[3])).lower(*operands, mask).compile()
    held = compiled.memory_analysis().temp_size_in_bytes
    assert 0 < plan.kept_bytes - plan.call.statistics_bytes <= share * full
    assert held < plan.kept_bytes + 2 * plan.backward_bytes
