"""Programs as lists of launches: generated code against XLA, and the plan's memory."""

from __future__ import annotations

import functools
import pathlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from lce_jax import LogprobOutput, _repeats, launch, local
from lce_jax.launch import _graph, _reads, _source
from lce_jax.mosaic import _generations, sm90
from lce_jax.mosaic._chunks import Budget
from tests import launch_emulator

H200 = launch.Device("gpu", "NVIDIA H200", "9.0", 132)
needs_compiler = pytest.mark.skipif(launch_emulator.COMPILER is None, reason="no C++ compiler")


@pytest.fixture
def few_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of few threads, which a CPU can run."""
    monkeypatch.setattr(_source, "THREADS", launch_emulator.THREADS)


def normal(*shape: int, seed: int = 0) -> Any:
    return jax.random.normal(jax.random.key(seed), shape)


def bits(x: Any) -> Any:
    return lax.bitcast_convert_type(x, jnp.int32)


def running_sum(x: Any) -> Any:
    """A loop with a carry that is updated in place."""

    def step(i: Any, carry: Any) -> Any:
        total, rows = carry
        total = total + x[i]
        return total, lax.dynamic_update_slice(rows, total[None], (i, 0))

    return lax.fori_loop(0, 5, step, (jnp.zeros(7), jnp.full((6, 7), -1.0)))


def shifted(x: Any, count: Any) -> Any:
    """Indices that are known at run time only, out of range too."""
    moved = lax.dynamic_slice(x, (count[0], count[1]), (2, 3))
    return moved, lax.dynamic_update_slice(x, moved * 2, (count[1], count[0]))


def otherwise(x: Any, y: Any, n: Any) -> Any:
    """Unsigned numbers and indices, far shifts, and what is known when the program is made: NaN as an integer."""
    unsigned = jnp.maximum(x, x[2]), jnp.clip(x, x[4], x[2]), lax.shift_right_arithmetic(x, jnp.uint32(1))
    indexed = lax.dynamic_slice(x, (x[3],), (2,)), jnp.take(x[:, None], x, 0, mode="clip")
    known = y + jnp.array([jnp.nan, jnp.inf, -jnp.inf, 3e9, -2.7]).astype(jnp.int32)
    return *unsigned, *indexed, lax.shift_left(y, n), lax.shift_right_arithmetic(y, n), known


GLUE: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "long reductions": (lambda x: (jnp.max(x, 0), jnp.sum(x * 2, 0), jnp.sum(x, (0, 1)), x.min(1)), (normal(200, 90),)),
    "short reductions": (lambda x: (x.sum(0), x.max((0, 2)), (x > 0).any(1)), (normal(3, 5, 4),)),
    "concatenation": (lambda x: jnp.concatenate([x, x[:2] * 2, -x[:, ::-1]]), (normal(4, 5),)),
    "padding": (lambda x: (jnp.pad(x, ((1, 2), (0, 3))), lax.pad(x, 1.0, ((-1, 2, 0), (2, -2, 0)))), (normal(4, 5),)),
    "reshapes": (lambda x: (x.T.reshape(2, 10) + 1, x.reshape(-1)[1::3], x[None, :, None].sum(0)), (normal(4, 5),)),
    "bits": (lambda x: (bits(x), lax.bitcast_convert_type(bits(x) ^ 1, jnp.float32)), (normal(9),)),
    "integers": (lambda x: (x // 7, x % 7, x >> 2, jnp.sign(x), jnp.clip(x, -3, 5), abs(x)), (jnp.arange(-20, 20),)),
    "what C++ does otherwise": (
        otherwise,
        (jnp.array([0, 7, 2**31, 2**32 - 1, 5], jnp.uint32), jnp.arange(-2, 3), jnp.array([0, 31, 32, 33, 100])),
    ),
    "nan and infinity": (
        lambda x: (jnp.maximum(x, 0), jnp.minimum(x, x[::-1]), jnp.where(jnp.isfinite(x), x, -1), x.max(), x == x),
        (jnp.array([1.0, jnp.nan, -jnp.inf, jnp.inf, -2.0]),),
    ),
    "functions": (lambda x: (jnp.exp(x), jnp.log(jnp.abs(x)), jnp.tanh(x), x / 3), (normal(50),)),
    "16 bits": (
        lambda x: (x.astype(jnp.bfloat16), x.astype(jnp.float16) * 3, lax.reduce_precision(x, 8, 7)),
        (normal(50),),
    ),
    "rows": (
        lambda x, i: (jnp.take(x, i, 0, mode="clip"), jnp.take(x, i, 0, mode="fill")),
        (normal(4, 5), jnp.array([3, 9, 0])),
    ),
    "elements": (
        lambda x, i, j: (
            x.at[i, j].get(mode="fill", fill_value=7),
            x.at[i, jnp.arange(4)].set(0.5, mode="drop", unique_indices=True),
            (2 * x).astype(jnp.bfloat16).at[jnp.arange(4)[:, None], j].add(0.5, mode="drop", unique_indices=True),
        ),
        (normal(4, 5), jnp.array([[3], [9], [-1], [0]]), jnp.array([[3, 9], [0, 4], [8, 1], [2, 3]])),
    ),
    "sorted rows": (_repeats.add_repeats, (jax.random.randint(jax.random.key(1), (3, 40), -1, 30), normal(3, 40))),
    "a loop": (running_sum, (normal(5, 7),)),
    "indices": (shifted, (normal(4, 5), jnp.array([3, -2]))),
    "results that are operands": (lambda x: (x, x, x.reshape(5, 4), x[0] * 2), (normal(4, 5),)),
    "constants": (
        lambda x: (
            jnp.where(jnp.array([True, False, True]), x, 7) + jnp.array([1.0, 2.5, -3.0]),
            jnp.arange(3),
            jnp.zeros((2, 2)),
        ),
        (normal(3),),
    ),
    "products with a vector": (lambda x, y: (x @ y, y @ x.T, x.T @ (x @ y)), (normal(50, 40), normal(40))),
}


@needs_compiler
@pytest.mark.usefixtures("few_threads")
@pytest.mark.parametrize("name", GLUE)
def test_generated_code_equals_xla(name: str, tmp_path: pathlib.Path) -> None:
    function, operands = GLUE[name]
    program = launch.program(function, operands, H200)
    assert program.num_kernels == 0
    wanted = jax.tree.leaves(jax.jit(function)(*operands))
    for found, want in zip(launch_emulator.run(program, operands, tmp_path), wanted, strict=True):
        assert found.shape == want.shape
        assert found.dtype == want.dtype
        # Sums in another order: their rounding errors beside the largest of what is summed, 18,000 elements at most.
        error = {
            "functions": 1e-6,
            "products with a vector": 2e-5,
            "short reductions": 1e-6,
            "long reductions": 2e-5,
        }.get(name, 0.0)
        found, want = np.asarray(found, np.float64), np.asarray(want, np.float64)
        np.testing.assert_allclose(found, want, rtol=error, atol=error)


ONE_LAUNCH = Budget(dhidden_waves=0.0)
SEVERAL = Budget(dhidden_waves=0.0, temporary_bytes=1, chunk_columns=512, statistics_bytes=20_000)
T, H, V = 300, launch_emulator.HIDDEN_SIZE, 1008


def operands() -> tuple[Any, ...]:
    hidden, weight = normal(T, H).astype(jnp.bfloat16), normal(V, H, seed=1).astype(jnp.bfloat16) / 4
    labels = jax.random.randint(jax.random.key(2), (T,), 0, V).at[jnp.array([1, 2])].set(jnp.array([-1, V]))
    temperature = jax.random.uniform(jax.random.key(3), (T,), minval=0.5, maxval=2.0)
    return hidden, weight, labels, temperature, jnp.int32(270), normal(T, seed=4), normal(T, seed=5)


def whole_call(implementation: str, vocab_size: int, *x: Any) -> Any:
    """A forward and its backward, as the bridge writes them, in one program."""
    hidden, weight, labels, temperature, count, *seeds = x
    options: Any = {"temperature": temperature, "num_rows": count, "implementation": implementation}
    options["vocab_size"] = None if vocab_size == V else vocab_size
    where, mean = jnp.arange(T) < count, vocab_size < V  # of the logits, as for label smoothing
    stats, _ = local.statistics(hidden, weight, labels, total=mean, **options)
    merged = local.merge(jax.tree.map(lambda field: field[None], stats), temperature=temperature)
    out = local.finish(merged, labels, vocab_size=vocab_size, where=where, temperature=temperature)
    seed = LogprobOutput(seeds[0], seeds[1], None)  # type: ignore[arg-type]
    dtotal = seeds[1] / vocab_size if mean else None
    dhidden, dweight = local.gradients(hidden, weight, labels, merged, seed, dtotal=dtotal, **options)
    known = {"vocab_size": vocab_size, "temperature": temperature}
    total = jnp.where(where, local.mean_logit(merged, **known), 0) if mean else out.lse
    return out.logprobs, out.entropy, out.lse, total, dhidden.astype(hidden.dtype), dweight


@needs_compiler
@pytest.mark.usefixtures("few_threads")
@pytest.mark.parametrize(
    ("budget", "vocab_size"),
    [(ONE_LAUNCH, V), pytest.param(SEVERAL, V, marks=pytest.mark.slow), (ONE_LAUNCH, 990)],  # 12 s
)
def test_a_whole_call(budget: Budget, vocab_size: int, tmp_path: pathlib.Path) -> None:
    """Kernels, by NumPy, between generated code, in memory that starts as NaN: the results of "xla"."""
    jax.clear_caches()  # they know the other budget
    with _generations.using(sm90.Kernels(budget=budget)):
        program = launch.program(functools.partial(whole_call, "mosaic_gpu", vocab_size), operands(), H200)
    of_padding = 3 * (vocab_size < V)  # its tile is copied, and contracted
    assert program.num_kernels == 3 + (1 if budget is ONE_LAUNCH else 2) * 3 + of_padding
    found = launch_emulator.run(program, operands(), tmp_path)
    wanted = jax.jit(functools.partial(whole_call, "xla", vocab_size))(*operands())
    names = ("logprobs", "entropy", "lse", "total", "dhidden", "dweight")
    for name, x, y in zip(names, found, wanted, strict=True):
        x, y = np.asarray(x, np.float32), np.asarray(y, np.float32)
        error = np.linalg.norm(x - y) / np.linalg.norm(y)
        assert error < (5e-3 if name in names[-2:] else 1e-5), name  # bf16 rounds by 2⁻⁹


@needs_compiler
@pytest.mark.usefixtures("few_threads")
def test_a_sum_is_updated_where_it_lies(tmp_path: pathlib.Path) -> None:
    """dweight is added to a float32 sum, whose memory is the result's."""
    hidden, weight, labels, _, _, *seeds = operands()

    merged, _ = local.statistics(hidden, weight, labels, implementation="xla")

    def backward(
        implementation: str, hidden: Any, weight: Any, labels: Any, total: Any, merged: Any, *seeds: Any
    ) -> Any:
        seed = LogprobOutput(seeds[0], seeds[1], None)  # type: ignore[arg-type]
        options: Any = {"implementation": implementation, "dweight": total}
        return local.gradients(hidden, weight, labels, merged, seed, **options)[1]

    given = (hidden, weight, labels, normal(V, H, seed=6), merged, *seeds)
    program = launch.program(functools.partial(backward, "mosaic_gpu"), given, H200, donated=(3,))
    copied = launch.program(functools.partial(backward, "mosaic_gpu"), given, H200)
    assert len(program.source) < len(copied.source)  # which copies it first
    wanted = np.asarray(jax.jit(functools.partial(backward, "xla"))(*given))
    (found,) = launch_emulator.run(program, given, tmp_path, updated={0: 3})
    assert np.linalg.norm(found - wanted) < 5e-3 * np.linalg.norm(wanted - np.asarray(given[3]))  # bf16 dlogits


def test_memory_is_shared_over_time() -> None:
    """The workspace holds what lives at the same time: one chunk of dlogits, dhidden's sums, no copy of an operand."""
    shapes = [((4096, 4096), "bfloat16"), ((151936, 4096), "bfloat16"), ((4096,), "int32"), ((4096,), "float32")]
    hidden, weight, labels, number = (jax.ShapeDtypeStruct(*shape) for shape in shapes)

    def backward(hidden: Any, weight: Any, labels: Any, m: Any, s: Any, q: Any, t: Any, g: Any) -> Any:
        merged = local.ShardStatistics(m, s, q, t, None)
        dhidden, dweight = local.gradients(hidden, weight, labels, merged, LogprobOutput(g, g, None))  # type: ignore[arg-type]
        return dhidden.astype(hidden.dtype), dweight

    program = launch.program(backward, (hidden, weight, labels, *(number,) * 5), H200)
    assert program.workspace_bytes < 350 * 10**6
    assert [x.shape for x in program.outputs] == [(4096, 4096), (151936, 4096)]
    assert program.num_stages == 2


def test_a_cache_is_overwritten_where_it_lies() -> None:
    """One launch of each kernel, and no memory of the size of a matrix; a cache that is not donated is copied first."""
    shapes = [((4096, 4096), "bfloat16"), ((151936, 4096), "bfloat16"), ((4096,), "int32"), ((4096,), "float32")]
    hidden, weight, labels, number = (jax.ShapeDtypeStruct(*shape) for shape in shapes)
    options: Any = {"cache_bytes": 2 << 30}
    with launch.for_device(H200):
        kept = functools.partial(local.statistics, keep_cache=True, **options)
        cache = jax.eval_shape(kept, hidden, weight, labels)[1]

    def backward(hidden: Any, weight: Any, labels: Any, m: Any, s: Any, q: Any, t: Any, g: Any, cache: Any) -> Any:
        merged, seed = local.ShardStatistics(m, s, q, t, None), LogprobOutput(g, g, None)  # type: ignore[arg-type]
        allowed = {"overwrite_cache": True, "round_dhidden": True}
        return local.gradients(hidden, weight, labels, merged, seed, cache=cache, **allowed, **options)

    given = hidden, weight, labels, *(number,) * 5, cache
    program = launch.program(backward, given, H200, donated=(8, 9))
    assert program.num_kernels == 3
    assert program.workspace_bytes < 1 << 20
    assert [x.dtype for x in program.outputs] == [jnp.bfloat16] * 2
    assert launch.program(backward, given, H200).workspace_bytes > 4096 * 151936 * 2


def test_a_sum_with_a_kernels_result_takes_its_memory() -> None:
    """dweight, to which the mean logit's part is added, is never there twice; nor is a copy of the weight."""
    shapes = [((4096, 4096), "bfloat16"), ((151936, 4096), "bfloat16"), ((4096,), "int32"), ((4096,), "float32")]
    hidden, weight, labels, number = (jax.ShapeDtypeStruct(*shape) for shape in shapes)

    def backward(hidden: Any, weight: Any, labels: Any, m: Any, s: Any, g: Any) -> Any:
        merged, seed = local.ShardStatistics(m, s, None, m, None), LogprobOutput(g, None, None)  # type: ignore[arg-type]
        return local.gradients(hidden, weight, labels, merged, seed, dtotal=g, entropy=False)

    program = launch.program(backward, (hidden, weight, labels, *(number,) * 3), H200)
    assert program.workspace_bytes < 350 * 10**6


def test_what_is_not_served_is_named() -> None:
    hidden, weight, labels, *_ = operands()
    with pytest.raises(launch.UnservedError, match="a gather with batches"):
        launch.program(lambda *x: local.statistics(*x, implementation="xla")[0].max, (hidden, weight, labels), H200)
    with pytest.raises(launch.UnservedError, match="total order"):
        launch.program(lax.lt_to_p.bind, (normal(3), normal(3)), H200)
    with pytest.raises(launch.UnservedError, match="steps depends on the operands"):
        launch.program(lambda n: lax.while_loop(lambda i: i < n, lambda i: i * 2, jnp.int32(1)), (jnp.int32(9),), H200)
    with pytest.raises(launch.UnservedError, match="a sort that is not by one integer"):
        launch.program(lambda x: jnp.sort(x), (normal(3),), H200)
    with pytest.raises(launch.UnservedError, match="a sort of 513 numbers"):
        launch.program(lambda x: jnp.sort(x), (jnp.arange(513),), H200)
    with pytest.raises(launch.UnservedError, match="a scatter that does more"):
        launch.program(lambda x, i: x.at[i].add(1), (normal(3), jnp.array([0, 0])), H200)
    with pytest.raises(launch.UnservedError, match="products of matrices without a kernel"):
        launch.program(lambda x, i: (x * x[i]).sum(1), (normal(3, 4), jnp.array([0, 2, 0])), H200)


def test_what_a_scatter_writes_over_is_read_by_nobody_else() -> None:
    """Nor before it, but for what it writes."""
    builder, float32, int32 = _graph.Builder(), jnp.dtype(jnp.float32), jnp.dtype(jnp.int32)
    (over,) = builder.kernel(_graph.Kernel(b"", (((4,), float32),), {}), ())
    places = builder.input(0, (2, 1), int32)
    read = builder.node("slice", (over,), (2,), float32, start=(0,), limit=(2,), strides=(1,))
    written = builder.node(_graph.SCATTER, (over, places, read), (4,), float32, combine="set")
    _reads.check_alone(written, [written])
    with pytest.raises(launch.UnservedError, match="an array that is read again"):
        _reads.check_alone(written, [written, builder.node("negate", (over,), (4,), float32)])
