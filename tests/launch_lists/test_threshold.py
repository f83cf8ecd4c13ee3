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
from lce_jax.launch_lists import _compiler
from lce_jax.mathematics._statistics import Normalizer
from lce_jax.mosaic import _candidates, _generations, _partial_statistics, _threshold_backward
from lce_jax.mosaic._call import KernelCall
from lce_jax.mosaic._candidates import Fields
from lce_jax.mosaic._pallas import interpreting, plgpu
from lce_jax.mosaic.common._candidate_tokens import candidate_terms
from lce_jax.mosaic.common._tokens import coefficients
from tests import emulated_launches
from tests.devices import H200
from tests.mosaic.test_threshold import call as call_of
from tests.mosaic.test_threshold import kernels_of
from tests.mosaic_interpreter import afresh

LISTS = ["live_counts", "live_order", "live_entries", "live_rows", "live_row_lists", "live_ranks"]


def head(**changed: Any) -> launch_lists.CallKind:
    given = {"num_tokens": 8192, "hidden_size": 4096, "num_columns": 151936, "vocab_size": 151936, "start": 0}
    return launch_lists.CallKind(
        **{**given, "dtype": "bfloat16", "device": H200, "gradient_threshold": 2.0**-12, **changed}
    )


def backward(of: launch_lists.CallKind, **how: Any) -> launch_lists.LaunchList:
    told = {"seeds": ("logprobs", "entropy"), "cached": True, "owns_cache": False, "adds": False, **how}
    return launch_lists.backward(of, wanted=(True, True), dhidden_dtype="bfloat16", **told)


def names(program: launch_lists.LaunchList) -> list[str]:
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
def test_a_backward_walks_batches(of: launch_lists.CallKind, batches: int) -> None:
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
        head(vocab_size=151643, stats=True, dropped_mass=True, has_temperature=True, num_candidates=64),
        head(vocab_size=151643, stats=True, has_floor=True),
        pytest.param(head(num_tokens=32768), marks=pytest.mark.slow),
        pytest.param(head(num_tokens=512, num_columns=201088, vocab_size=201088), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_every_kernel_lowers_for_cuda(of: launch_lists.CallKind) -> None:
    seeds = ("logprobs", "entropy", *(["candidate_logprobs"] if of.num_candidates else []))
    forwards = launch_lists.forward(of, keep_cache=True), launch_lists.merge(of, ranks=4, keep_cache=True)
    programs = *forwards, backward(of, seeds=seeds)
    for launch in itertools.chain(*(program.launches for program in programs)):
        assert _compiler.module(launch.kernel, H200)


def run(program: launch_lists.LaunchList, rows: int, given: list[Any]) -> list[np.ndarray]:
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


class Problem:
    """A call whose rows concentrate on few tiles, for JAX and for lists."""

    def __init__(self, K: int, has_floor: bool) -> None:
        T, H, V, true = self.sizes = 200, 128, 1032, 1000
        self.kind = head(
            num_tokens=256, hidden_size=H, num_columns=V, vocab_size=true, device=H200._replace(core_count=2),
            gradient_threshold=0.02, stats=True, dropped_mass=True, num_candidates=K, has_floor=has_floor,
        )  # fmt: skip
        rng = np.random.default_rng(0)
        weight = jnp.asarray(rng.standard_normal((V, H)) / np.sqrt(H), jnp.bfloat16)
        labels = np.where(np.arange(T) % 5, np.arange(T) // 128 * 256 + rng.integers(0, 256, T), true + 5)
        hidden = 20 * np.asarray(weight, np.float32)[labels % true] + rng.standard_normal((T, H))
        hidden = jnp.asarray(hidden, jnp.bfloat16)
        self.seeds = {name: rng.standard_normal(T).astype(np.float32) for name in ("logprobs", "entropy")}
        targets = jnp.asarray(np.where(labels < true, labels, -1), jnp.int32)
        self.operands = Operands(hidden, weight, targets, None, None, true)
        padded = np.asarray(jnp.pad(hidden, ((0, 56), (0, 0))))
        self.given = [padded, np.asarray(weight), self.in_rows(np.stack([labels, 0 * labels], 1).astype(np.int32))]
        if has_floor:
            floor = np.where(np.arange(T) % 7, 0.5, np.inf).astype(np.float32)  # no token is left of some rows
            self.operands = self.operands._replace(floor=jnp.asarray(floor))
            self.given.append(self.in_rows(floor))
        if K:
            ids = np.where(rng.random((T, K)) < 0.3, labels[:, None], -1)
            ids[20, 1], ids[151, 0] = 2 * 256 + 5, true - 1  # a tile of its own, and where padding begins
            ids = np.where(ids < true, ids, -1).astype(np.int32)
            self.operands = self.operands._replace(candidates=jnp.asarray(ids))
            self.given.append(self.in_rows(ids))
            self.seeds["candidate_logprobs"] = rng.standard_normal((T, K)).astype(np.float32)
        self.case = dataclasses.replace(self.kind.case, num_tokens=T)

    def in_rows(self, x: np.ndarray) -> np.ndarray:
        """With as many rows as the lists have."""
        return np.pad(x, ((0, 56), *(((0, 0),) * (x.ndim - 1))))

    def gradients(self, operands: Operands, live: Any, kept: Any) -> Any:
        """JAX's, from the coefficients of the kernels for lists."""
        (T, _, _, true), K = self.sizes, self.kind.num_candidates
        call = KernelCall.prepare(operands, self.case, self.kind.generation)
        seeds, numbers = {name: self.in_rows(x) for name, x in self.seeds.items()}, jnp.asarray([T, T], jnp.int32)
        seed = seeds.pop("candidate_logprobs", None)
        given = self.kind.case, kept, False
        terms = None if seed is None else candidate_terms(*given, seed, numbers)
        factors = coefficients(*given, seeds, numbers, true, terms)[:, : call.shape.padded_tokens]
        candidates = None
        if terms is not None:
            first = self.kind.first_statistic
            fields = Fields(first - K, first + len(_partial_statistics.kept(self.kind.case.options)), T, T, 0)
            ids = jax.lax.bitcast_convert_type(kept, jnp.int32)
            candidates = _candidates.placed(call, factors, ids, kept, terms, fields)
        return _threshold_backward.walk(call, factors, candidates, live, None)


# "plain" alone is slow: "candidates" has no floor, "floor" has no candidates.
@pytest.mark.parametrize(
    ("K", "has_floor"),
    [
        pytest.param(0, False, id="plain", marks=pytest.mark.slow),
        pytest.param(3, False, id="candidates"),
        pytest.param(0, True, id="floor"),
    ],
)
def test_the_bits_of_jax(K: int, has_floor: bool) -> None:
    """The live tiles, the dropped mass, and from the same coefficients the gradients; in several batches."""
    afresh()
    test = Problem(K, has_floor)
    T, H = test.sizes[:2]

    @jax.jit
    def forward(operands: Operands) -> Any:
        stats, tiles = mosaic.statistics(operands, test.case, True)
        return mosaic.selected(test.case, tiles, Normalizer(stats.max, stats.sumexp), None)

    with _generations.using(kernels_of(call_of("batches", chunk=1))):
        *_, dropped, kept, live = run(launch_lists.forward(test.kind, keep_cache=True), T, test.given)
        found = backward(dataclasses.replace(test.kind, copied_from="bfloat16"), seeds=tuple(test.seeds))
        seeds = map(test.in_rows, test.seeds.values())
        dhidden, dweight = run(found, T, [*test.given[:2], kept, *seeds, live])
        launches = Counter(names(found))
        assert launches["live_dlogits"] > 1
        assert launches["put_live_candidates"] == (launches["live_dlogits"] if K else 0)
        with interpreting(plgpu.InterpretGPUParams()):
            of_jax, mass = forward(test.operands)
            sums, of_weight = jax.jit(test.gradients)(test.operands, of_jax, jnp.asarray(kept))
    assert 0 < live[:, :2].mean() < 1
    assert live[2, 0] == (K > 0)
    np.testing.assert_array_equal(live[:, :2], of_jax[:, :2])
    np.testing.assert_array_equal(dropped[:T], mass)
    assert mass.max() > 0
    want = jnp.sum(sums, axis=0)[:T, :H].astype(jnp.bfloat16)
    np.testing.assert_array_equal(dhidden[:T].astype(np.float32), want.astype(np.float32))
    np.testing.assert_array_equal(dweight.astype(np.float32), of_weight.astype(np.float32))
