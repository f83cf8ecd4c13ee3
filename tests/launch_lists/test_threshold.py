"""Lists of kernels with a ``gradient_threshold``: what they launch, and that they compute what JAX's program does."""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lce_jax import launch_lists, mosaic
from lce_jax._types import Operands
from lce_jax.launch_lists import _mosaic
from lce_jax.mathematics._statistics import Normalizer
from lce_jax.mosaic import _generations, _threshold_backward
from lce_jax.mosaic._call import Call
from lce_jax.mosaic._pallas import interpreting, plgpu
from tests import emulated_launches
from tests.devices import H200
from tests.mosaic.test_threshold import call as call_of
from tests.mosaic.test_threshold import kernels_of
from tests.mosaic_interpreter import afresh

LISTS = ["live_counts", "live_order", "live_entries", "live_rows", "live_row_lists", "live_ranks"]


def head(**changed: Any) -> launch_lists.Head:
    given = {"num_tokens": 8192, "hidden_size": 4096, "num_columns": 151936, "vocab_size": 151936, "start": 0}
    return launch_lists.Head(
        **{**given, "dtype": "bfloat16", "device": H200, "gradient_threshold": 2.0**-12, **changed}
    )


def backward(of: launch_lists.Head, **how: Any) -> launch_lists.Program:
    told = {"cached": True, "owns_cache": False, "adds": False, **how}
    return launch_lists.backward(of, ("logprobs", "entropy"), (True, True), "bfloat16", **told)


def names(program: launch_lists.Program) -> list[str]:
    return [launch.kernel.name for launch in program.launches]


def test_a_forward_selects_the_live_tiles() -> None:
    first = ["prepare", "statistics"]
    assert names(launch_lists.forward(head(), keep_cache=False)) == [*first, "join", "join", "finish"]
    kept = launch_lists.forward(head(), keep_cache=True)
    assert names(kept) == [*first, "join_keeping", "join", "finish", "select"]
    assert kept.outputs[-1] == jax.ShapeDtypeStruct(launch_lists.live_shape(head()), jnp.int32)
    told = launch_lists.forward(head(stats=True, dropped_mass=True), keep_cache=True)
    assert names(told) == [*names(kept), "dropped_mass"]


def test_a_part_and_its_merge() -> None:
    part, merge = launch_lists.part(head(), keep_cache=True), launch_lists.merge(head(), ranks=2, keep_cache=True)
    assert names(part) == ["prepare", "statistics", "join_keeping"]
    assert names(merge) == ["prepare", "join", "finish", "select"]
    assert part.outputs[-1] == merge.inputs[-1]


@pytest.mark.parametrize(("of", "batches"), [(head(), 13), (head(num_tokens=512), 1), (head(num_tokens=32768), 20)])
def test_a_backward_walks_batches(of: launch_lists.Head, batches: int) -> None:
    found = Counter(names(backward(of)))
    of_batch = ("live_dlogits", "update_live_dhidden", "write_live_dweight")
    once = ["prepare", "coefficients", *LISTS, "zeros", "total"]
    assert found == Counter(dict.fromkeys(once, 1) | dict.fromkeys(of_batch, batches))
    without_dweight = launch_lists.backward(
        of, ("logprobs",), (True, False), "bfloat16", cached=True, owns_cache=False, adds=False
    )
    assert not {"write_live_dweight", "live_ranks"} & set(names(without_dweight))


@pytest.mark.parametrize(
    "of",
    [
        head(vocab_size=151643, stats=True, dropped_mass=True, has_temperature=True),
        pytest.param(head(num_tokens=32768), marks=pytest.mark.slow),
        pytest.param(head(num_tokens=512, num_columns=201088, vocab_size=201088), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_every_kernel_lowers_for_cuda(of: launch_lists.Head) -> None:
    programs = launch_lists.forward(of, keep_cache=True), launch_lists.merge(of, ranks=4, keep_cache=True), backward(of)
    for launch in itertools.chain(*(program.launches for program in programs)):
        assert _mosaic.module(launch.kernel, H200)


def run(program: launch_lists.Program, rows: int, given: list[Any]) -> list[np.ndarray]:
    """The results of a program that have memory, as long as the program may need."""
    structs = [x for x in program.outputs if x is not None]
    sizes = [2 * int(np.prod(x.shape)) * x.dtype.itemsize for x in structs]
    outputs = [np.full(size, emulated_launches.FILL, np.uint8) for size in sizes]
    workspace = np.full(program.workspace_bytes, emulated_launches.FILL, np.uint8)
    numbers = np.array(program.numbers(rows, max(rows, launch_lists.THREADS)), np.int32)
    addresses = [x.ctypes.data for x in (*outputs, *given)]
    emulated_launches.loaded(program)(0, workspace.ctypes.data, numbers.ctypes.data, addresses)
    found = zip(outputs, structs, strict=True)
    return [emulated_launches.memory(x.ctypes.data, struct).copy() for x, struct in found]


def test_the_bits_of_jax() -> None:
    """The live tiles, the dropped mass, and from the same coefficients the gradients; in several batches."""
    afresh()
    T, H, V, true = 200, 128, 1032, 1000
    of = head(
        num_tokens=256, hidden_size=H, num_columns=V, vocab_size=true, device=H200._replace(core_count=2),
        gradient_threshold=0.02, stats=True, dropped_mass=True,
    )  # fmt: skip
    rng = np.random.default_rng(0)
    weight = jnp.asarray(rng.standard_normal((V, H)) / np.sqrt(H), jnp.bfloat16)
    labels = np.where(np.arange(T) % 5, np.arange(T) // 128 * 256 + rng.integers(0, 256, T), true + 5)
    hidden = jnp.asarray(20 * np.asarray(weight, np.float32)[labels % true] + rng.standard_normal((T, H)), jnp.bfloat16)
    seeds = [np.pad(rng.standard_normal(T).astype(np.float32), (0, 56)) for _ in range(2)]
    case = dataclasses.replace(of.case, num_tokens=T)
    targets = jnp.asarray(np.where(labels < true, labels, -1), jnp.int32)
    operands = Operands(hidden, weight, targets, None, None, true)

    @jax.jit
    def forward(operands: Operands) -> Any:
        stats, tiles = mosaic.statistics(operands, case, True)
        return mosaic.selected(case, tiles, Normalizer(stats.max, stats.sumexp), None)

    @jax.jit
    def gradients(operands: Operands, live: Any, kept: Any) -> Any:
        call = Call.prepare(operands, case, _generations.serving(case.device))
        of_seeds = dict(zip(("logprobs", "entropy"), map(jnp.asarray, seeds), strict=True))
        factors = call.kernels.coefficients(of.case, kept, False, of_seeds, jnp.asarray([T, T], jnp.int32), true)
        return _threshold_backward.walk(call, factors[:, : call.shape.padded_tokens], live, None)

    with _generations.using(kernels_of(call_of("batches", chunk=1))):
        ids = np.pad(np.stack([labels, 0 * labels], 1).astype(np.int32), ((0, 56), (0, 0)))
        padded = [np.asarray(jnp.pad(hidden, ((0, 56), (0, 0)))), np.asarray(weight)]
        *_, dropped, kept, live = run(launch_lists.forward(of, keep_cache=True), T, [*padded, ids])
        found = backward(dataclasses.replace(of, copied_from="bfloat16"))
        dhidden, dweight = run(found, T, [*padded, kept, *seeds, live])
        assert Counter(names(found))["live_dlogits"] > 1
        with interpreting(plgpu.InterpretGPUParams()):
            of_jax, mass = forward(operands)
            sums, of_weight = gradients(operands, of_jax, jnp.asarray(kept))
    assert 0 < live[:, :2].mean() < 1
    np.testing.assert_array_equal(live[:, :2], of_jax[:, :2])
    np.testing.assert_array_equal(dropped[:T], mass)
    assert mass.max() > 0
    want = jnp.sum(sums, axis=0)[:T, :H].astype(jnp.bfloat16)
    np.testing.assert_array_equal(dhidden[:T].astype(np.float32), want.astype(np.float32))
    np.testing.assert_array_equal(dweight.astype(np.float32), of_weight.astype(np.float32))
