"""The losses of docs/grpo.md that look at whole sequences: values and gradients against stored logits in float64."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import pytest
import torch

import lce_jax
from lce_torch_bridge import linear_logprobs
from tests.doc_blocks import ROOT, parts
from tests.torch import problem as p

LENGTHS = [7, 1, 5, 4]  # of sequences in one row; one row of padding follows
NEAR = 1e-5  # relative, of float32


class Batch(NamedTuple):
    hidden: torch.Tensor
    weight: torch.Tensor
    labels: torch.Tensor
    old: torch.Tensor
    sampled: torch.Tensor
    advantage: torch.Tensor  # of each sequence
    where: torch.Tensor

    @property
    def segment_ids(self) -> torch.Tensor:
        return torch.tensor([i + 1 for i, length in enumerate(LENGTHS) for _ in range(length)] + [0])

    def slices(self) -> list[tuple[slice, torch.Tensor]]:
        """The rows of each sequence that has tokens which count, and its advantage."""
        ends = torch.tensor(LENGTHS).cumsum(0).tolist()
        rows = [slice(end - length, end) for length, end in zip(LENGTHS, ends, strict=True)]
        return [(row, a) for row, a in zip(rows, self.advantage, strict=True) if self.where[row].any()]


@pytest.fixture(scope="module")
def batch() -> Batch:
    problem, generator = p.draw(T=sum(LENGTHS) + 1, seed=3), torch.Generator().manual_seed(4)
    where = torch.ones(sum(LENGTHS) + 1, dtype=torch.bool)
    where[[0, 3, 7, 17]] = False  # all of the second sequence
    batch = Batch(*problem, *[torch.empty(0)] * 2, torch.tensor([1.0, 2.0, -0.5, 0.7]), where)
    ratios, gaps = (0.3 * torch.randn(len(where), generator=generator) for _ in range(2))
    means, sums = (0.2, -0.01, -0.1), (0.2, -0.5, 1.0)  # so that some sequences are clipped, and others are not
    for (row, _), mean, total in zip(batch.slices(), means, sums, strict=True):
        counts = where[row]
        ratios[row] += mean - ratios[row][counts].mean()
        gaps[row] += (total - gaps[row][counts].sum()) / counts.sum()
    old = p.stored(*problem).logprobs.float() - ratios
    return batch._replace(old=old, sampled=old - gaps)


@pytest.fixture(scope="module")
def pages() -> list[dict[str, Any]]:
    """What the blocks of the page define, in JAX and in PyTorch."""
    blocks = [block for block in parts(ROOT / "docs" / "grpo.md") if "def gspo" in block.code]
    names: list[dict[str, Any]] = [{}, {}]
    for block, defined in zip(blocks, names, strict=True):
        with contextlib.redirect_stdout(io.StringIO()):
            exec(block.code, defined)
    return names


def gspo(x: torch.Tensor, a: torch.Tensor) -> torch.Tensor:
    ratio = x.mean().exp()
    return -torch.minimum(ratio * a, ratio.clamp(0.97, 1.04) * a)


def gspo_token(x: torch.Tensor, a: torch.Tensor) -> torch.Tensor:
    ratios = x.mean().exp().detach() * x.exp() / x.exp().detach()
    return -torch.minimum(ratios * a, ratios.clamp(0.97, 1.04) * a).mean()


def gmpo(x: torch.Tensor, a: torch.Tensor) -> torch.Tensor:
    """The geometric mean of clipped ratios times |A|, by the product."""
    ratios, bounded = x.exp(), x.exp().clamp(torch.tensor(-0.2).exp(), torch.tensor(0.2).exp())
    terms = torch.minimum(ratios, bounded) if a > 0 else torch.maximum(ratios, bounded)
    return -a * terms.prod() ** (1 / len(x))


CLIPS: dict[Callable[..., torch.Tensor], dict[str, float]] = {
    gspo: {"clip_low": 0.03, "clip_high": 0.04}, gspo_token: {"clip_low": 0.03, "clip_high": 0.04}, gmpo: {"clip": 0.2},
}  # fmt: skip


def by_sequences(batch: Batch, loss: Callable[..., torch.Tensor]) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
    """The sum of the losses of sequences, one after another, and the gradients of hidden and weight, in float64."""
    leaves = batch.hidden.double().requires_grad_(), batch.weight.double().requires_grad_()
    logits = leaves[0] @ leaves[1].T
    log_ratio = logits.log_softmax(-1).gather(1, batch.labels[:, None])[:, 0] - batch.old.double()
    total = torch.stack([loss(log_ratio[row][batch.where[row]], a.double()) for row, a in batch.slices()]).sum()
    return total.detach(), torch.autograd.grad(total, leaves)


def by_page_in_jax(page: dict[str, Any], batch: Batch, name: str, clips: dict[str, float]) -> tuple[Any, Any]:
    hidden, weight, labels, old, _, advantage, where = (jnp.asarray(x.numpy()) for x in batch)
    ids = jnp.asarray(batch.segment_ids.numpy())
    per_token = jnp.where(ids > 0, advantage[ids - 1], jnp.nan)

    def total(hidden: Any, weight: Any) -> Any:
        log_ratio = lce_jax.linear_logprobs(hidden, weight, labels, where=where, entropy=False).logprobs - old
        loss = page[name](log_ratio, per_token, where=where, segment_ids=ids, **clips)
        return page["sum_of_means"](loss, where, segment_ids=ids)

    value, grads = jax.jit(jax.value_and_grad(total, (0, 1)))(hidden, weight)
    return p.to_torch(value), [p.to_torch(x) for x in grads]


def by_page_in_torch(page: dict[str, Any], batch: Batch, name: str, clips: dict[str, float]) -> tuple[Any, Any]:
    leaves, ids = (batch.hidden.clone().requires_grad_(), batch.weight.clone().requires_grad_()), batch.segment_ids
    out = linear_logprobs(*leaves, batch.labels, where=batch.where, entropy=False)
    per_token = batch.advantage[ids - 1].where(ids > 0, 0)
    loss = page[name](out.logprobs - batch.old, per_token, where=batch.where, segment_ids=ids, **clips)
    total = page["sum_of_means"](loss, batch.where, segment_ids=ids)
    return total.detach(), torch.autograd.grad(total, leaves)


@pytest.mark.parametrize("loss", CLIPS, ids=lambda loss: loss.__name__)
def test_losses_of_sequences(loss: Any, batch: Batch, pages: list[dict[str, Any]]) -> None:
    want, wanted = by_sequences(batch, loss)
    unclipped, _ = by_sequences(batch, lambda x, a: -a * x.mean().exp())
    assert abs(want - unclipped) > 0.01
    for compute, page in zip((by_page_in_jax, by_page_in_torch), pages, strict=True):
        value, grads = compute(page, batch, loss.__name__, CLIPS[loss])
        assert abs(value / want - 1) < NEAR
        for got, true in zip(grads, wanted, strict=True):
            assert p.relative_norm(got, true) < NEAR


def test_corrections_of_the_sampler(batch: Batch, pages: list[dict[str, Any]]) -> None:
    """TIS of tokens and of sequences, and IcePop: the weights, and a corrected loss by `linear_loss` of JAX."""
    gap, ids = (batch.old - batch.sampled).double(), batch.segment_ids
    ratio, products = gap.exp(), torch.ones(len(gap), dtype=torch.float64)
    for row, _ in batch.slices():
        products[row] = ratio[row][batch.where[row]].prod()
    want = {
        "tis": ratio.clamp(max=1.5),
        "tis of sequences": products.clamp(max=1.5),
        "icepop": torch.tensor([x if 0.6 <= x <= 1.6 else 0.0 for x in ratio.tolist()]),
    }
    assert all(len(set(x[batch.where].tolist())) > 2 for x in want.values())
    for page, convert in zip(pages, (lambda x: jnp.asarray(x.numpy()), lambda x: x), strict=True):
        single, said = convert(gap.float()), {"where": convert(batch.where), "segment_ids": convert(ids)}
        found = [page["tis"](single, 1.5), page["tis"](page["rows"].segment_sum(single, **said), 1.5)]
        found.append(page["icepop"](single, 0.6, 1.6))
        for got, true in zip(found, want.values(), strict=True):
            got = p.to_torch(got) if isinstance(got, jax.Array) else got
            torch.testing.assert_close(got[batch.where].double(), true.double()[batch.where], rtol=NEAR, atol=0)

    page = pages[0]
    hidden, weight, labels, old, _, advantage, where = (jnp.asarray(x.numpy()) for x in batch)
    own = {"old_logprob": old, "correction": jnp.asarray(want["icepop"].float().numpy())}
    own["advantage"] = jnp.where(jnp.asarray(ids.numpy()) > 0, advantage[jnp.asarray(ids.numpy()) - 1], 0)

    @jax.jit
    @jax.value_and_grad
    def corrected(weight: Any) -> Any:
        return lce_jax.linear_loss(page["corrected"], hidden, weight, labels, where=where, **own)[0]

    value, gradient = corrected(weight)
    leaf = batch.weight.double().requires_grad_()
    logprobs = (batch.hidden.double() @ leaf.T).log_softmax(-1).gather(1, batch.labels[:, None])[:, 0]
    moved, a = (logprobs - batch.old.double()).exp(), batch.advantage.double()[ids - 1]
    total = (-torch.minimum(moved * a, moved.clamp(0.8, 1.28) * a) * want["icepop"])[batch.where].sum()
    assert abs(p.to_torch(value) / total.detach() - 1) < NEAR
    assert p.relative_norm(p.to_torch(gradient), torch.autograd.grad(total, leaf)[0]) < NEAR
