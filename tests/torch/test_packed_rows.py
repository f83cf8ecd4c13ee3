"""`lce_torch_bridge.rows`: the same cases as `lce_jax.rows`, and Megatron's own split."""

from __future__ import annotations

import importlib.util
import inspect
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

import lce_jax.rows
from lce_torch_bridge import linear_cross_entropy, rows
from tests.packed_cases import MISFITS, PACKED, REFUSED, WITHOUT_SEGMENTS, Packed, is_nothing, part_of_rank
from tests.torch.processes import succeed

to = torch.from_numpy


def ways(name: str) -> list[dict[str, Any]]:
    """The arguments that say where the sequences of a case end."""
    packed = PACKED[name]
    offsets: dict[str, Any] = {"cu_seqlens": to(packed.cu_seqlens).int()}
    if name in WITHOUT_SEGMENTS:
        return [offsets | {"cu_seqlens_padded": to(packed.cu_seqlens_padded).int()}]
    return [offsets, {"segment_ids": to(packed.segment_ids), "padding_segment": 0}]


@pytest.mark.parametrize("name", PACKED)
def test_next_tokens(name: str) -> None:
    packed = PACKED[name]
    for said in ways(name):
        assert np.array_equal(rows.next_tokens(to(packed.tokens), **said), packed.labels)
        predicted = rows.at_tokens(to(packed.labels) + 0.5, fill=-1, **said)
        firsts = packed.row([np.append([-1], x[1:] + 0.5)[: len(x)] for x in packed.sequences], -1.0)
        assert np.array_equal(predicted, firsts)


@pytest.mark.parametrize("steps", [2, 3, 7, 99])
def test_tokens_further_ahead(steps: int) -> None:
    """Those of multi-token prediction, masks with them, and results back at the tokens."""
    for name, packed in PACKED.items():
        for said in ways(name):
            ahead = packed.labels_ahead(steps)
            assert np.array_equal(rows.next_tokens(to(packed.tokens), ahead=steps, **said), ahead)
            assert np.array_equal(rows.next_values(to(packed.tokens), fill=-100, ahead=steps, **said), ahead)
            at_tokens = rows.at_tokens(to(ahead) + 0.5, fill=-1, ahead=steps, **said)
            first = [np.append(np.full(steps, -1), x[steps:] + 0.5)[: len(x)] for x in packed.sequences]
            assert np.array_equal(at_tokens, packed.row(first, -1.0))


@pytest.mark.parametrize("layout", ["zigzag", "contiguous"])
@pytest.mark.parametrize("lengths", [[12], [12, 0, 24]])
def test_ranks(lengths: list[int], layout: Any) -> None:
    packed, offsets = Packed(lengths), Packed(lengths).cu_seqlens
    said = {"layout": layout, "cu_seqlens": None if len(lengths) == 1 else torch.from_numpy(offsets)}
    labels = torch.stack([torch.from_numpy(packed.labels), -torch.from_numpy(packed.labels)])
    for cp_size in (1, 3):
        found = [rows.of_rank(labels, rank, cp_size, **said) for rank in range(cp_size)]
        for rank, part in enumerate(found):
            assert np.array_equal(part, part_of_rank(labels.numpy(), offsets, rank, cp_size, layout))
            assert torch.equal(part.t(), rows.of_rank(labels.t(), rank, cp_size, axis=0, **said))
        in_ranks = rows.in_rank_order(labels, cp_size, **said)
        assert torch.equal(in_ranks, torch.cat(found, -1))
        assert torch.equal(rows.in_sequence_order(in_ranks, cp_size, **said), labels)


@pytest.mark.parametrize("name", PACKED)
def test_sums_over_sequences(name: str) -> None:
    """Values and gradients in two rows of a batch; what is not in ``where`` is NaN."""
    packed, draw = PACKED[name], np.random.default_rng(0)
    x, seed = (draw.normal(size=(2, len(packed.tokens))).astype(np.float32) for _ in range(2))
    where, everywhere = draw.random(x.shape) < 0.5, np.ones(x.shape, bool)
    where[1, :3] = False  # all of a sequence in some of the cases
    sums, slopes = packed.summed(x, where, mean=False), where * packed.summed(seed, everywhere, mean=False)
    size = np.maximum(packed.summed(where, where, mean=False), 1)
    for said in ways(name):
        said = {key: torch.stack([y, y]) if key == "segment_ids" else y for key, y in said.items()}
        for function, divisor in ((rows.segment_mean, size), (rows.segment_sum, 1)):
            leaf = to(np.where(where, x, np.nan).astype(np.float32)).requires_grad_()
            found = function(leaf, where=to(where), **said)
            (gradient,) = torch.autograd.grad(found, leaf, to(seed))
            np.testing.assert_allclose(found.detach(), sums / divisor, rtol=1e-6, atol=1e-6)
            np.testing.assert_allclose(gradient, slopes / divisor, rtol=1e-6, atol=1e-6)
        rounded = to(x).bfloat16()
        found = rows.segment_mean(rounded, **said)
        assert found.dtype == torch.float32
        np.testing.assert_allclose(found, packed.summed(rounded.float(), everywhere, mean=True), rtol=1e-6, atol=1e-6)


def test_sums_over_sequences_in_one_graph() -> None:
    def call(x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        return rows.segment_mean(x, where=x > 0, segment_ids=ids)

    x, ids = torch.randn(3, 33, generator=torch.Generator().manual_seed(0)), torch.arange(99).view(3, 33) // 7
    assert torch.equal(torch.compile(call, fullgraph=True, backend="aot_eager")(x, ids), call(x, ids))
    with pytest.raises(TypeError, match=r"group must be a torch\.distributed\.ProcessGroup .* got 'cp'"):
        rows.segment_mean(x, group="cp")


@pytest.mark.skipif(not importlib.util.find_spec("megatron.core"), reason="needs megatron-core")
def test_the_zigzag_is_megatrons() -> None:
    from megatron.core.utils import get_batch_on_this_cp_rank

    tokens = torch.arange(48).view(2, 24)
    for rank in range(3):
        with (
            mock.patch("torch.distributed.get_world_size", return_value=3),
            mock.patch("torch.distributed.get_rank", return_value=rank),
        ):
            theirs = get_batch_on_this_cp_rank({"tokens": tokens, "cu_seqlens": None}, False, object())
        assert torch.equal(rows.of_rank(tokens, rank, 3), theirs["tokens"])


@pytest.mark.parametrize("ahead", [1, 3])
def test_the_loss_of_a_packed_row_is_that_of_its_sequences(ahead: int) -> None:
    packed, V = Packed([7, 4], multiple=4), 32
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(n, 8, generator=generator).requires_grad_() for n in (len(packed.tokens), V))
    tokens = torch.from_numpy(packed.tokens % V)
    ends, begins = map(torch.from_numpy, (packed.cu_seqlens, packed.cu_seqlens_padded))
    labels = rows.next_tokens(tokens, ahead=ahead, cu_seqlens=ends, cu_seqlens_padded=begins)
    parts = [
        linear_cross_entropy(
            rows.of_rank(hidden, rank, 2, axis=0, cu_seqlens=begins), weight,
            rows.of_rank(labels, rank, 2, cu_seqlens=begins), reduction="sum",
        )
        for rank in (0, 1)
    ]  # fmt: skip
    want = torch.zeros(())
    for begin, length in zip(begins.tolist(), packed.lengths, strict=False):
        one = slice(begin, begin + length - ahead)
        following = tokens[begin + ahead :][: length - ahead]
        want = want + torch.nn.functional.cross_entropy(hidden[one] @ weight.t(), following, reduction="sum")
    torch.testing.assert_close(sum(parts), want)
    grads = [torch.autograd.grad(x, [hidden, weight]) for x in (sum(parts), want)]
    for got, true in zip(*grads, strict=True):
        torch.testing.assert_close(got, true)


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    function, given, message = REFUSED[name]
    tensors = {key: torch.tensor(x) if isinstance(x, list) else x for key, x in given.items()}
    with pytest.raises((ValueError, TypeError), match=message):
        getattr(rows, function)(**tensors)


KINDS = [torch.arange(12).to(dtype) for dtype in (torch.int64, torch.int8, torch.uint8, torch.float32, torch.bool)]


def shifted_of_every_kind(ends: torch.Tensor, begins: torch.Tensor) -> list[torch.Tensor]:
    said = {"cu_seqlens": ends, "cu_seqlens_padded": begins}
    found = [rows.next_tokens(x, ahead=2, **said) for x in KINDS[:2]]
    found += [rows.segment_mean(KINDS[3], **said), rows.segment_sum(KINDS[0], **said)]
    fills = [1, 1, 1, 1.0, True]
    found += [rows.next_values(x, fill=fill, **said) for x, fill in zip(KINDS, fills, strict=True)]
    found += [rows.at_tokens(x, fill=fill, **said) for x, fill in zip(KINDS, fills, strict=True)]
    alone = {"cu_seqlens": ends}
    return [*found, rows.next_tokens(KINDS[0], **alone), rows.at_tokens(torch.stack([KINDS[3], KINDS[3]]), **alone)]


@pytest.fixture(scope="module")
def traced() -> Any:
    """`shifted_of_every_kind` of offsets that are not looked at, as on a GPU."""
    return make_fx(shifted_of_every_kind)(torch.tensor([0, 5, 9, 9, 9]), torch.tensor([0, 5, 9, 9, 9]))


@pytest.mark.parametrize("name", MISFITS)
def test_offsets_that_are_not_looked_at_and_do_not_fit_give_nothing(name: str, traced: Any) -> None:
    ends, begins = MISFITS[name]
    found = traced(torch.tensor(ends), torch.tensor(begins or ends))
    assert all(map(is_nothing, found if begins is None else found[:-2]))


@pytest.mark.parametrize("begins", [[0, 5, 9], [0, 8, 12]])
def test_offsets_filled_up_with_their_last_one(begins: list[int], traced: Any) -> None:
    """As frameworks fill them up to a static shape."""
    found = traced(*(torch.tensor([*x, x[-1], x[-1]]) for x in ([0, 5, 9], begins)))
    want = shifted_of_every_kind(torch.tensor([0, 5, 9]), torch.tensor(begins))
    assert all(map(torch.equal, found, want))
    assert rows.of_rank(KINDS[0], 1, 2, cu_seqlens=torch.tensor([0, 4, 12, 12])).tolist() == [1, 2, 6, 7, 8, 9]


@pytest.mark.fast("offsets1", "offsets3")
@pytest.mark.parametrize("offsets", [[0, 4, 11, 12], [0, 12, 4, 12], [0, 4, 8, 8], [0, 4, 12, 16], [4, 4, 8, 12]])
def test_rows_of_ranks_by_offsets_that_are_not_looked_at_and_do_not_fit(offsets: list[int]) -> None:
    """Two ranks have chunks of multiples of four tokens. The positions are no index, which a device refuses."""
    given = torch.tensor(offsets)
    places = make_fx(lambda offsets: rows.positions(12, 1, 2, cu_seqlens=offsets))(torch.tensor([0, 4, 8, 12]))
    assert (places(given) == 12).all()
    for x in KINDS:
        for function in (lambda x, o: rows.of_rank(x, 0, 2, cu_seqlens=o),
                         lambda x, o: rows.in_rank_order(x, 2, cu_seqlens=o),
                         lambda x, o: rows.in_sequence_order(x, 2, cu_seqlens=o)):  # fmt: skip
            with pytest.raises(IndexError, match="index out of range"):
                make_fx(function)(x, torch.tensor([0, 4, 8, 12]))(x, given)


@pytest.mark.parametrize("name", rows.__all__)
def test_the_signature_is_that_of_lce_jax(name: str) -> None:
    assert rows.__all__ == lce_jax.rows.__all__
    ours, theirs = (dict(inspect.signature(getattr(module, name)).parameters) for module in (rows, lce_jax.rows))
    ours.pop("device", None)  # arrays have none to choose
    assert [(x.name.replace("group", "axis_name"), x.kind, x.default) for x in ours.values()] == [
        (x.name, x.kind, x.default) for x in theirs.values()
    ]


def test_no_backend_of_jax_is_started() -> None:
    succeed(
        """
        import torch
        from jax._src import xla_bridge
        from lce_torch_bridge import rows
        x, offsets = torch.arange(12), torch.tensor([0, 4, 12])
        moved = rows.next_values(rows.next_tokens(x, cu_seqlens=offsets), fill=1, ahead=2, segment_ids=x // 3)
        mine = rows.of_rank(rows.at_tokens(moved.float()), 1, 2, cu_seqlens=offsets)
        rows.segment_mean(moved, segment_ids=x // 3)
        rows.in_sequence_order(rows.in_rank_order(x, 2), 2)[rows.positions(12, 0, 1)]
        assert mine.shape == (6,)
        assert not xla_bridge.backends_are_initialized()
        """
    )


def test_a_fill_that_the_dtype_does_not_hold() -> None:
    for x, lowest, highest in ((KINDS[1], -128, 127), (KINDS[2], 0, 255)):
        for fill in (lowest - 1, highest + 1):
            with pytest.raises(ValueError, match=rf"fill must lie in \[{lowest}, {highest}\], the integers of u?int8"):
                rows.next_values(x, fill=fill)
        assert rows.next_values(x, fill=lowest)[-1] == lowest
