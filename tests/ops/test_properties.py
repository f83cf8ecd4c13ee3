"""Any shape, any mask, any label: values and gradients against float64."""

from __future__ import annotations

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lce_jax import linear_logprobs
from lce_jax.mathematics import _statistics
from lce_jax.run import _local
from lce_jax.types._types import Call, Primals
from tests import cases, oracle


@st.composite
def calls(draw: st.DrawFn):
    V, padding = draw(st.integers(1, 90)), draw(st.integers(0, 40))
    return cases.case(
        "drawn",
        leading=tuple(draw(st.lists(st.integers(0, 9), max_size=2))),
        H=draw(st.integers(1, 40)),
        V=V + padding,
        vocab_size=V if padding else None,
        spread=draw(st.sampled_from([0.1, 1.0, 10.0])),
        where=draw(st.sampled_from([None, "some", "nan", "none"])),
        labels=draw(st.sampled_from(["valid", "foreign"])),
        temperature=draw(st.sampled_from([1.0, 0.3, "token"])),
        logit_softcap=draw(st.sampled_from([None, 2.0, 30.0])),
        logit_scale=draw(st.sampled_from([1.0, 0.1, -2.0])),
        entropy=draw(st.booleans()),
        stats=draw(st.booleans()),
        weight_layout=draw(st.sampled_from(["vh", "hv"])),
    )


@pytest.mark.parametrize("examples", [4, pytest.param(100, marks=pytest.mark.slow)])
def test_ragged_calls(examples: int) -> None:
    """Each is a program."""
    given(test=calls(), seed=st.integers(0, 2**31))(
        settings(max_examples=examples, deadline=None, derandomize=True)(check)
    )()


def check(test: cases.TestCase, seed: int) -> None:
    hidden, weight, labels, options, seeds = cases.draw(test, seed)

    @jax.jit
    @functools.partial(jax.value_and_grad, argnums=(0, 1), has_aux=True)
    def value_and_grad(hidden, weight):
        out = linear_logprobs(hidden, weight, labels, precision="highest", implementation="xla", **options)
        return cases.objective(out, seeds), out

    (_, out), grads = value_and_grad(hidden, weight)
    want = oracle.logprobs(hidden, weight, labels, **options)
    # Logits of 10 and a temperature of 0.3 lift the products' rounding above the bound at unit scale.
    bound = 2e-6 * max(1.0, float(np.max(np.abs(want.lse), initial=0)))
    decided = oracle.margin(hidden, weight, labels, **options) > bound
    for name, true in want._asdict().items():
        got = getattr(out, name)
        if got is not None:
            rows = decided if name == "correct" else ...
            assert oracle.value_error(np.asarray(got)[rows], true[rows]) <= bound
    seeds = seeds if options["entropy"] else [seeds[0], 0 * seeds[1], seeds[2]]
    for got, true in zip(grads, oracle.gradients(hidden, weight, labels, seeds, **options), strict=True):
        assert np.linalg.norm(np.asarray(got) - true) <= 1e-5 * max(np.linalg.norm(true), 1.0)


@jax.jit  # one program for each width, for every start of the piece
def piece(hidden, weight, labels, vocab_start):
    primals, num_rows = Primals(hidden, weight), jnp.int32(len(labels))
    part = _local.LogprobPart.of(Call(stats=True), primals, labels, None, None, None, vocab_start, num_rows)
    return part.statistics(keep_cache=False)[0]


@jax.jit
def united(parts, labels):
    stacked, known = jax.tree.map(lambda *x: jnp.stack(x), *parts), (labels >= 0) & (labels < 61)
    merged, found = _local.results(stacked, jnp.where(known, labels, -1), labels == labels, None, vocab_size=61)
    return merged, found.outputs


@pytest.mark.slow
@settings(max_examples=3, deadline=None, derandomize=True)
@given(
    cuts=st.lists(st.integers(1, 60), max_size=5, unique=True),
    order=st.randoms(use_true_random=False),
    seed=st.integers(0, 2**31),
)
def test_merging_any_split_in_any_order(cuts: list[int], order, seed: int) -> None:
    """Statistics of a vocabulary's pieces, cut and shuffled in any way, merge to those of the whole (eq. 2)."""
    test = cases.case("split", leading=(7,), H=8, V=61, spread=5.0, labels="foreign")
    hidden, weight, labels, *_ = cases.draw(test, seed)
    edges = [0, *sorted(cuts), 61]
    pieces = list(itertools.pairwise(edges))
    order.shuffle(pieces)
    weight = np.asarray(weight)  # cut on the host: a slice is a program too
    merged, out = united([piece(hidden, weight[a:b], labels, a) for a, b in pieces], labels)
    want = oracle.logprobs(hidden, weight, labels)
    for got, true in zip(jax.tree.leaves(out), jax.tree.leaves(want), strict=True):
        assert oracle.value_error(got, true) < 5e-6
    none = _statistics.empty_statistics(7, merged.max.dtype, Call(stats=True))
    again, _ = united([merged, none], labels)  # a shard of padding alone
    assert all(map(np.array_equal, jax.tree.leaves(again), jax.tree.leaves(merged)))
