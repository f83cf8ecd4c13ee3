"""Packed rows and context-parallel ranks against the plain computation on each sequence by itself."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from lce_jax import linear_cross_entropy, rows
from tests import oracle
from tests.packed_cases import PACKED, REFUSED, WITHOUT_SEGMENTS, Packed, part_of_rank


def ways(name: str) -> list[dict[str, Any]]:
    """The arguments that say where the sequences of a case end."""
    packed = PACKED[name]
    offsets = {"cu_seqlens": packed.cu_seqlens}
    if name in WITHOUT_SEGMENTS:
        return [offsets | {"cu_seqlens_padded": packed.cu_seqlens_padded}]
    return [offsets, {"segment_ids": packed.segment_ids, "padding_segment": 0}]


@pytest.mark.parametrize("name", PACKED)
def test_next_tokens(name: str) -> None:
    packed = PACKED[name]
    for said in ways(name):
        assert np.array_equal(rows.next_tokens(packed.tokens, **said), packed.labels)
        predicted = rows.at_tokens(packed.labels + 0.5, fill=-1, **said)
        firsts = packed.row([np.append([-1], x[1:] + 0.5)[: len(x)] for x in packed.sequences], -1.0)
        assert np.array_equal(predicted, firsts)


@pytest.mark.parametrize("steps", [2, 7])
def test_tokens_further_ahead(steps: int) -> None:
    """Those of multi-token prediction, masks with them, and results back at the tokens."""
    for name in ("several", "padded, and after"):
        packed = PACKED[name]
        for said in ways(name):
            ahead = packed.labels_ahead(steps)
            assert np.array_equal(rows.next_tokens(packed.tokens, ahead=steps, **said), ahead)
            assert np.array_equal(rows.next_values(packed.tokens, fill=-100, ahead=steps, **said), ahead)
            at_tokens = rows.at_tokens(ahead + 0.5, fill=-1, ahead=steps, **said)
            first = [np.append(np.full(steps, -1), x[steps:] + 0.5)[: len(x)] for x in packed.sequences]
            assert np.array_equal(at_tokens, packed.row(first, -1.0))


def test_offsets_may_be_traced() -> None:
    packed = PACKED["padded, and after"]
    (said,) = ways("padded, and after")
    assert np.array_equal(jax.jit(rows.next_tokens)(packed.tokens, **said), packed.labels)


def test_rows_of_a_batch() -> None:
    tokens = jnp.arange(6).reshape(2, 3)
    assert rows.next_tokens(tokens).tolist() == [[1, 2, -100], [4, 5, -100]]
    ids = jnp.array([[1, 1, 2], [1, 2, 2]])
    assert rows.next_tokens(tokens, segment_ids=ids).tolist() == [[1, -100, -100], [-100, 5, -100]]
    assert rows.next_tokens(tokens, segment_ids=ids, padding_segment=2).tolist() == [[1, -100, -100], [-100] * 3]
    assert rows.next_values(tokens > 1, fill=True, segment_ids=ids).tolist() == [
        [False, True, True],
        [True, True, True],
    ]


@pytest.mark.parametrize("layout", ["zigzag", "contiguous"])
@pytest.mark.parametrize("lengths", [[12], [12, 0, 24]])
def test_ranks(lengths: list[int], layout: Any) -> None:
    packed, offsets = Packed(lengths), Packed(lengths).cu_seqlens
    said = {"layout": layout, "cu_seqlens": None if len(lengths) == 1 else offsets}
    labels = jnp.stack([packed.labels, -packed.labels])
    for cp_size in (1, 3):
        of_rank = jax.jit(lambda x, rank, n=cp_size: rows.of_rank(x, rank, n, **said))
        found = [of_rank(labels, rank) for rank in range(cp_size)]
        for rank, part in enumerate(found):
            assert np.array_equal(part, part_of_rank(np.asarray(labels), offsets, rank, cp_size, layout))
        in_ranks = rows.in_rank_order(labels, cp_size, **said)
        assert np.array_equal(in_ranks, jnp.concatenate(found, axis=-1))
        assert np.array_equal(rows.in_sequence_order(in_ranks, cp_size, **said), labels)


@pytest.mark.parametrize("ahead", [1, 3])
def test_the_loss_of_a_packed_row_over_ranks_is_that_of_its_sequences(ahead: int) -> None:
    """Values and gradients, of two sequences of which one is padded, over two ranks with chunks of each."""
    packed, V, H = Packed([7, 4], multiple=4), 32, 8
    L = len(packed.tokens)
    hidden = jax.random.normal(jax.random.key(0), (L, H))
    weight = jax.random.normal(jax.random.key(1), (V, H))
    tokens = jnp.asarray(packed.tokens % V)

    def by_sequence(hidden: jax.Array, weight: jax.Array) -> jax.Array:
        total = 0.0
        for begin, length in zip(packed.cu_seqlens_padded[:-1], packed.lengths, strict=True):
            logp = jax.nn.log_softmax(hidden[begin:][: length - ahead] @ weight.T)
            total -= jnp.take_along_axis(logp, tokens[begin + ahead :][: length - ahead, None], 1).sum()
        return total

    def over_ranks(hidden: jax.Array, weight: jax.Array) -> jax.Array:
        offsets = {"cu_seqlens": packed.cu_seqlens, "cu_seqlens_padded": packed.cu_seqlens_padded}
        labels = rows.next_tokens(tokens, ahead=ahead, **offsets)

        def of_one(hidden: jax.Array, weight: jax.Array, labels: jax.Array) -> jax.Array:
            rank, mine = lax.axis_index("cp"), {"cu_seqlens": packed.cu_seqlens_padded}
            hidden = rows.of_rank(hidden, rank, 2, axis=0, **mine)
            part = linear_cross_entropy(hidden, weight, rows.of_rank(labels, rank, 2, **mine), reduction="sum")
            return lax.psum(part, "cp")

        return jax.shard_map(of_one, mesh=jax.make_mesh((2,), ("cp",)), in_specs=(P(), P(), P()), out_specs=P())(
            hidden, weight, labels
        )

    want, wanted = jax.value_and_grad(by_sequence, (0, 1))(hidden, weight)
    found, grads = jax.jit(jax.value_and_grad(over_ranks, (0, 1)))(hidden, weight)
    assert abs(found - want) < 1e-5 * want
    for got, true in zip(grads, wanted, strict=True):
        assert oracle.relative_norm(got, true) < 1e-5


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    function, given, message = REFUSED[name]
    arrays = {key: np.asarray(x) if isinstance(x, list) else x for key, x in given.items()}
    with pytest.raises((ValueError, TypeError), match=message):
        getattr(rows, function)(**arrays)


def test_traced_offsets_that_do_not_fit_give_nothing() -> None:
    """Seven tokens of a sequence are no chunks for two ranks."""
    x, offsets = jnp.arange(8.0), jnp.array([0, 7, 8])
    for function in (
        lambda x, o: rows.of_rank(x, 0, 2, cu_seqlens=o),
        lambda x, o: rows.in_sequence_order(x, 2, cu_seqlens=o),
    ):
        assert jnp.isnan(jax.jit(function)(x, offsets)).all()


@pytest.mark.parametrize("function", [rows.next_tokens, lambda x: rows.in_rank_order(x, 2)])
def test_rows_that_are_split_over_an_explicit_axis(function: Any) -> None:
    mesh = jax.make_mesh((2,), ("cp",), axis_types=(AxisType.Explicit,))
    x = jnp.arange(16).reshape(2, 8)
    with jax.set_mesh(mesh):
        split = jax.device_put(x, NamedSharding(mesh, P(None, "cp")))
        with pytest.raises(ValueError, match=r"rows of \(2, 8\), in dimension 1, are split over 'cp', .* jax.reshard"):
            function(split)
        found = function(jax.reshard(split, P()))  # as the message says
    assert np.array_equal(found, function(x))


def test_unsigned_tokens() -> None:
    with pytest.raises(TypeError, match="tokens must be signed, to hold labels of -100, got uint32"):
        rows.next_tokens(np.zeros(3, np.uint32))
