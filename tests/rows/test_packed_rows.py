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
from tests.packed_cases import MISFITS, PACKED, REFUSED, WITHOUT_SEGMENTS, Packed, is_nothing, part_of_rank
from tests.pairs import combined, values_of


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


@pytest.mark.fast("7")
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


@pytest.mark.fast("zigzag-[12]")
@combined(layout=["zigzag", "contiguous"], lengths=[[12], [12, 0, 24]])
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


@pytest.mark.parametrize("name", PACKED)
def test_sums_over_sequences(name: str) -> None:
    """In two rows of a batch; what is not in ``where`` is NaN; all rows of a sequence have the same bits."""
    packed, draw = PACKED[name], np.random.default_rng(0)
    x = draw.normal(size=(2, len(packed.tokens))).astype(np.float32)
    where = draw.random(x.shape) < 0.5
    where[1, :3] = False  # all of a sequence in some of the cases
    everywhere, rounded = np.ones(x.shape, bool), x.astype(jnp.bfloat16)
    for said in ways(name):
        said = {key: np.stack([y, y]) if key == "segment_ids" else y for key, y in said.items()}

        @jax.jit
        def compute(said: Any = said) -> list[jax.Array]:
            some = {"where": where, **said}
            unknown = np.where(where, x, np.nan)
            return [rows.segment_mean(unknown, **some), rows.segment_sum(x, **some), rows.segment_mean(rounded, **said)]

        want = [packed.summed(x, where, mean=mean) for mean in (True, False)]
        for found, true in zip(compute(), [*want, packed.summed(rounded, everywhere, mean=True)], strict=True):
            assert found.dtype == jnp.float32
            np.testing.assert_allclose(found, true, rtol=1e-6, atol=1e-6)
            for begin, length in zip(packed.cu_seqlens_padded, packed.lengths, strict=False):
                assert (found[:, begin : begin + length] == found[:, begin : begin + 1]).all()


@pytest.mark.fast("zigzag-4", "contiguous-2")
@combined(layout=["zigzag", "contiguous"], cp_size=[2, 4])
def test_sums_over_sequences_over_the_ranks_that_split_them(cp_size: int, layout: Any) -> None:
    """By ids and by a rank's offsets: values and gradients, of a sequence without tokens that count too."""
    packed = Packed([13, 3, 16], multiple=8)
    draw, count = np.random.default_rng(1), len(packed.tokens)
    x, seed, where = draw.normal(size=count), draw.normal(size=count), packed.segment_ids * (draw.random(count) < 0.6)
    where[packed.cu_seqlens_padded[1] : packed.cu_seqlens_padded[2]] = 0
    order = {"layout": layout, "cu_seqlens": packed.cu_seqlens_padded}
    mine = [
        rows.in_rank_order(jnp.asarray(y), cp_size, **order)
        for y in (x.astype(np.float32), where > 0, packed.segment_ids, seed.astype(np.float32))
    ]

    def rank_results(x: jax.Array, where: jax.Array, ids: jax.Array) -> tuple[jax.Array, ...]:
        said = {"where": where, "axis_name": "cp"}
        by_ids = rows.segment_mean(x, segment_ids=ids, padding_segment=0, **said)
        by_offsets = rows.segment_sum(x, cu_seqlens=packed.cu_seqlens_padded // cp_size, **said)
        return by_ids, by_offsets, rows.segment_sum(jnp.ones(ids.shape), segment_ids=ids, axis_name="cp")

    split, mesh = P("cp"), jax.make_mesh((cp_size,), ("cp",), axis_types=(AxisType.Auto,))
    results = jax.shard_map(rank_results, mesh=mesh, in_specs=(split,) * 3, out_specs=(split,) * 3)

    def objective(x: jax.Array) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        means, sums, sizes = results(x, *mine[1:3])
        return jnp.sum((means + jnp.sin(sums)) * mine[3]), (means, sums, sizes)

    (_, found), gradient = jax.jit(jax.value_and_grad(objective, has_aux=True))(mine[0])
    means, sums, sizes, gradient = (rows.in_sequence_order(y, cp_size, **order) for y in (*found, gradient))
    inside, ones = packed.segment_ids > 0, packed._replace(lengths=[16, 8, 16])  # offsets have no padding
    np.testing.assert_allclose(means, packed.summed(x, where > 0, mean=True), rtol=2e-6, atol=1e-6)
    want = ones.summed(x, where > 0, mean=False)
    np.testing.assert_allclose(sums, want, rtol=2e-6, atol=1e-6)
    assert np.array_equal(sizes, np.bincount(packed.segment_ids)[packed.segment_ids])
    size = np.maximum(packed.summed(where > 0, where > 0, mean=False), 1)
    slopes = packed.summed(seed, inside, mean=False) / size + ones.summed(
        np.cos(want) * seed, np.ones(count, bool), mean=False
    )
    np.testing.assert_allclose(gradient, np.where(where > 0, slopes, 0), rtol=1e-5, atol=1e-5)


def test_an_axis_that_no_shard_map_binds() -> None:
    with pytest.raises(ValueError, match=r"axis_name 'cp' is not bound here .* outside it leave axis_name out"):
        rows.segment_mean(jnp.ones(4), axis_name="cp")
    with pytest.raises(TypeError, match=r"axis_name must be None, a mesh axis's name .* got 2"):
        rows.segment_mean(jnp.ones(4), axis_name=2)


@values_of("ahead", [1, 3], slow=[1])
def test_the_loss_of_a_packed_row_over_ranks_is_that_of_its_sequences(ahead: int) -> None:
    """Values and gradients, of two sequences of which one is padded, over two ranks with chunks of each."""
    packed, V, H = Packed([7, 4], multiple=4), 32, 8
    L = len(packed.tokens)
    hidden = jax.random.normal(jax.random.key(0), (L, H))
    weight = jax.random.normal(jax.random.key(1), (V, H))
    tokens = jnp.asarray(packed.tokens % V)

    def loss_by_sequence(hidden: jax.Array, weight: jax.Array) -> jax.Array:
        total = 0.0
        for begin, length in zip(packed.cu_seqlens_padded[:-1], packed.lengths, strict=True):
            logp = jax.nn.log_softmax(hidden[begin:][: length - ahead] @ weight.T)
            total -= jnp.take_along_axis(logp, tokens[begin + ahead :][: length - ahead, None], 1).sum()
        return total

    def loss_over_ranks(hidden: jax.Array, weight: jax.Array) -> jax.Array:
        offsets = {"cu_seqlens": packed.cu_seqlens, "cu_seqlens_padded": packed.cu_seqlens_padded}
        labels = rows.next_tokens(tokens, ahead=ahead, **offsets)

        def rank_loss(hidden: jax.Array, weight: jax.Array, labels: jax.Array) -> jax.Array:
            rank, mine = lax.axis_index("cp"), {"cu_seqlens": packed.cu_seqlens_padded}
            hidden = rows.of_rank(hidden, rank, 2, axis=0, **mine)
            part = linear_cross_entropy(hidden, weight, rows.of_rank(labels, rank, 2, **mine), reduction="sum")
            return lax.psum(part, "cp")

        return jax.shard_map(rank_loss, mesh=jax.make_mesh((2,), ("cp",)), in_specs=(P(), P(), P()), out_specs=P())(
            hidden, weight, labels
        )

    want, wanted = jax.jit(jax.value_and_grad(loss_by_sequence, (0, 1)))(hidden, weight)
    found, grads = jax.jit(jax.value_and_grad(loss_over_ranks, (0, 1)))(hidden, weight)
    assert abs(found - want) < 1e-5 * want
    for got, true in zip(grads, wanted, strict=True):
        assert oracle.relative_norm(got, true) < 1e-5


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    function, given, message = REFUSED[name]
    arrays = {key: np.asarray(x) if isinstance(x, list) else x for key, x in given.items()}
    with pytest.raises((ValueError, TypeError), match=message):
        getattr(rows, function)(**arrays)


KINDS = [jnp.arange(12).astype(dtype) for dtype in (jnp.int32, jnp.int8, jnp.uint8, jnp.float32, jnp.bool_)]


@jax.jit
def shifted_of_every_kind(ends: jax.Array, begins: jax.Array) -> list[jax.Array]:
    said = {"cu_seqlens": ends, "cu_seqlens_padded": begins}
    found = [rows.next_tokens(x, ahead=2, **said) for x in KINDS[:2]]
    found += [rows.segment_mean(KINDS[3], **said), rows.segment_sum(KINDS[0], **said)]
    fills = [1, 1, 1, 1.0, True]
    found += [rows.next_values(x, fill=fill, **said) for x, fill in zip(KINDS, fills, strict=True)]
    found += [rows.at_tokens(x, fill=fill, **said) for x, fill in zip(KINDS, fills, strict=True)]
    alone = {"cu_seqlens": ends}
    return [*found, rows.next_tokens(KINDS[0], **alone), rows.at_tokens(jnp.stack([KINDS[3], KINDS[3]]), **alone)]


@jax.jit
def ranks_of_every_kind(offsets: jax.Array, rank: jax.Array) -> list[jax.Array]:
    return [
        function(x, *arguments, 2, cu_seqlens=offsets)
        for x in KINDS
        for function, arguments in ((rows.of_rank, [rank]), (rows.in_rank_order, []), (rows.in_sequence_order, []))
    ]


@pytest.mark.parametrize("name", MISFITS)
def test_traced_offsets_that_do_not_fit_give_nothing(name: str) -> None:
    ends, begins = MISFITS[name]
    found = shifted_of_every_kind(jnp.array(ends), jnp.array(begins or ends))
    for x in found if begins is None else found[:-2]:
        assert is_nothing(x)


@pytest.mark.parametrize("begins", [[0, 5, 9], [0, 8, 12]])
def test_traced_offsets_filled_up_with_their_last_one(begins: list[int]) -> None:
    """As frameworks fill them up to a static shape."""
    ends = [0, 5, 9]
    found = shifted_of_every_kind(*(jnp.array([*x, x[-1], x[-1]]) for x in (ends, begins)))
    said = {"cu_seqlens": np.array(ends), "cu_seqlens_padded": np.array(begins)}
    assert np.array_equal(found[0], rows.next_tokens(KINDS[0], ahead=2, **said))
    assert np.array_equal(found[-3], rows.at_tokens(KINDS[4], fill=True, **said))
    ranks = ranks_of_every_kind(jnp.array([0, 4, 12, 12]), 1)
    assert np.array_equal(ranks[0], [1, 2, 6, 7, 8, 9])


@pytest.mark.parametrize("offsets", [[0, 4, 11, 12], [0, 12, 4, 12], [0, 4, 8, 8], [0, 4, 12, 16], [4, 4, 8, 12]])
def test_rows_of_ranks_by_traced_offsets_that_do_not_fit(offsets: list[int]) -> None:
    """Two ranks have chunks of multiples of four tokens."""
    for x in ranks_of_every_kind(jnp.array(offsets), 0):
        assert is_nothing(x)


@pytest.mark.parametrize("rank", [-1, 2, 3])
def test_a_traced_rank_out_of_range_has_nothing(rank: int) -> None:
    """All of its rows, and no other rank's."""
    found = ranks_of_every_kind(jnp.array([0, 4, 8, 12]), rank)
    for x in found[::3]:
        assert is_nothing(x)
    assert np.array_equal(found[1], rows.in_rank_order(KINDS[0], 2, cu_seqlens=np.array([0, 4, 8, 12])))
    with pytest.raises(ValueError, match=rf"cp_rank must lie in \[0, 2\), got {rank}"):
        rows.of_rank(KINDS[0], jnp.array(rank), 2)


@pytest.mark.parametrize("rank", [0.5, True, jnp.array(0.5), jnp.array([0, 1])])
def test_a_rank_that_is_no_integer(rank: Any) -> None:
    with pytest.raises(TypeError, match=r"cp_rank must be (an|one) integer, got (float|bool|float32|int32)"):
        rows.of_rank(KINDS[0], rank, 2)


def test_a_fill_of_bfloat16() -> None:
    fill = np.asarray(0.5, jnp.bfloat16)[()]  # NumPy's scalars of ml_dtypes are no real numbers of Python
    assert rows.next_values(jnp.ones(2), fill=fill).tolist() == [1.0, 0.5]


@pytest.mark.slow
def test_no_implicit_transfers() -> None:
    """Eagerly, with numbers of Python and offsets of NumPy too."""
    x, ids, ends, begins = KINDS[0], KINDS[1] // 5, jnp.array([0, 5, 9]), np.array([0, 8, 12])
    jax.clear_caches()
    with jax.transfer_guard("disallow"):
        for said in ({}, {"segment_ids": ids, "padding_segment": 0}, {"cu_seqlens": ends, "cu_seqlens_padded": begins}):
            labels = rows.next_tokens(x, **said)
            values = rows.at_tokens(rows.next_values(x, fill=3, **said), fill=3, **said)
        for said in ({}, {"cu_seqlens": begins}):
            places = rows.positions(12, 1, 2, **said)
            parts = [rows.of_rank(x, rank, 2, **said) for rank in (0, np.int64(1))]
            whole = rows.in_sequence_order(rows.in_rank_order(x, 2, **said), 2, **said)
    assert labels.tolist() == [1, 2, 3, 4, *[-100] * 4, 9, 10, 11, -100]
    assert values.tolist() == [3, 1, 2, 3, 4, 3, 3, 3, 3, 9, 10, 11]
    assert np.array_equal(whole, x)
    assert np.array_equal(parts[1], places)


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
    with pytest.raises(TypeError, match=r"tokens .*signed, .* -100, got uint32"):
        rows.next_tokens(np.zeros(3, np.uint32))


def test_a_fill_that_the_dtype_does_not_hold() -> None:
    for x, lowest, highest in ((KINDS[1], -128, 127), (KINDS[2], 0, 255)):
        for fill in (lowest - 1, highest + 1):
            with pytest.raises(ValueError, match=rf"fill must lie in \[{lowest}, {highest}\], the integers of u?int8"):
                rows.next_values(x, fill=fill)
        assert rows.next_values(x, fill=lowest)[-1] == lowest
