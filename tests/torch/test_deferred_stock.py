"""Deferred logits against the same code with stored ones: what shares memory, grad mode, hooks, or changes between."""

from __future__ import annotations

import copy
import functools
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from lce_torch_bridge import defer_logits

F = torch.nn.functional

B, S, H, V = 2, 4, 8, 11
IDS = torch.tensor([[1, 2, 3, 4], [5, 6, 7, 10]])
OTHER = torch.linspace(-1, 1, B * S * V).view(B, S, V)
Head = torch.nn.Linear
type Case = Callable[[Head, torch.Tensor, torch.Tensor], tuple[torch.Tensor, ...]]


def loss(logits: torch.Tensor, ids: torch.Tensor = IDS) -> torch.Tensor:
    return F.cross_entropy(logits.reshape(-1, V), ids.reshape(-1))


def pick(x: torch.Tensor, ids: torch.Tensor = IDS) -> torch.Tensor:
    return x.gather(-1, ids[..., None])


def add_with_alpha(head: Head, x: torch.Tensor, t: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return (torch.add(OTHER * t, head(x), alpha=2.0),)


def lse_without_gradient(head: Head, x: torch.Tensor, _: torch.Tensor) -> tuple[torch.Tensor, ...]:
    z = head(x)
    with torch.no_grad():
        lse = z.logsumexp(-1, keepdim=True)
    return (pick(z - lse),)


def stored_minus_lse(head: Head, x: torch.Tensor, _: torch.Tensor) -> tuple[torch.Tensor, ...]:
    z = head(x)
    return ((z - z.logsumexp(-1, keepdim=True)).sin(),)


def detached_probabilities(head: Head, x: torch.Tensor, _: torch.Tensor) -> tuple[torch.Tensor, ...]:
    lp = head(x).log_softmax(-1)
    return (-(lp.exp().detach() * lp).sum(-1),)


def detached_entropy(head: Head, x: torch.Tensor, _: torch.Tensor) -> tuple[torch.Tensor, ...]:
    z = head(x)
    lp = z.log_softmax(-1).detach()
    return loss(z), z.logsumexp(-1), -(lp.exp() * lp).sum(-1), z[:, 1:].detach().logsumexp(-1)


def detached_temperature(head: Head, x: torch.Tensor, t: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return loss(head(x).detach() / t), loss(head(x).detach() + OTHER[0, 0] * t)


def written_unseen(head: Head, x: torch.Tensor, _: torch.Tensor) -> tuple[torch.Tensor, ...]:
    z, y = head(x), head(x)
    rows, copied, others = z[:, 1:], z.double(), y[:, 1:]
    z.data[..., 0] = -5.0
    y.view_as(OTHER)[..., 0] = -5.0
    return loss(rows, IDS[:, 1:]), copied.sin(), loss(others, IDS[:, 1:])


def written_row(head: Head, x: torch.Tensor, _: torch.Tensor) -> tuple[torch.Tensor, ...]:
    z = head(x)
    row, copied = z[torch.tensor(1)], z.double()
    row[..., 0] = -5.0
    return copied.sin(), loss(z)


def written_lse(head: Head, x: torch.Tensor, _: torch.Tensor) -> tuple[torch.Tensor, ...]:
    with torch.no_grad():
        z = head(x).detach()
        lse = z.logsumexp(-1, keepdim=True)
        lse.add_(1)
        return pick(z - lse), z.logsumexp(-1)


def checkpointed(head: Head, x: torch.Tensor, _: torch.Tensor) -> tuple[torch.Tensor, ...]:
    steps = (loss, lambda z: z.logsumexp(-1), lambda z: pick(z.log_softmax(-1)), torch.sin)
    return tuple(checkpoint(step, head(x), use_reentrant=False) for step in steps)


def entropy(log_p: torch.Tensor) -> torch.Tensor:
    return -(log_p.exp() * log_p).sum(-1)


def parts(head: Head, x: torch.Tensor, _: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Each part's entropy, two parts' lse, and one part's values: gradients of all come together."""
    assert head(x)[:0].unbind() == tuple(head(x)[:0]) == ()
    rows = head(x).view(-1, V).split(3)
    log_p = [part.log_softmax(-1) for part in rows]
    entropies = torch.cat([entropy(each) for each in log_p])
    lse = [part.logsumexp(-1) for part in rows[1:]]
    return entropies, *lse, pick(log_p[2], IDS.view(-1)[6:]), rows[0].sin()


def first_part(head: Head, x: torch.Tensor, _: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return entropy(head(x).chunk(2)[0].log_softmax(-1)), head(x).unbind(1)[2].logsumexp(-1)


def parts_of_parts(head: Head, x: torch.Tensor, _: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return tuple(part.logsumexp(-1) + entropy(part.log_softmax(-1)) for row in head(x) / 0.7 for part in row.split(3))


def parts_of_softmax(head: Head, x: torch.Tensor, _: torch.Tensor) -> tuple[torch.Tensor, ...]:
    z = head(x)
    pairs = zip(z.softmax(-1).split(1), z.log_softmax(-1).split(1), strict=True)
    return tuple((p * log_p).sum(-1) for p, log_p in pairs)


def parts_without_gradient(head: Head, x: torch.Tensor, _: torch.Tensor) -> tuple[torch.Tensor, ...]:
    rows = head(x).unbind(1)
    with torch.no_grad():
        entropies = [entropy(row.log_softmax(-1)) for row in rows]
    return *entropies, *[row.logsumexp(-1) for row in rows], *[row.detach().logsumexp(-1) for row in rows]


def parts_in_checkpoints(head: Head, x: torch.Tensor, _: torch.Tensor) -> tuple[torch.Tensor, ...]:
    z = head(x)
    inside = checkpoint(lambda z: torch.cat([row.logsumexp(-1) for row in z]), z, use_reentrant=False)
    lse = functools.partial(checkpoint, lambda row: entropy(row.log_softmax(-1)), use_reentrant=False)
    return inside, *[lse(row) for row in z], z.logsumexp(-1)


def written_parts(head: Head, x: torch.Tensor, _: torch.Tensor) -> tuple[torch.Tensor, ...]:
    rows = [part.clone() for part in head(x).split(1)]
    log_p = rows[0].log_softmax(-1)
    negative = (log_p.exp() * log_p).sum(-1).add_(1)
    rows[1][..., 0] = -5.0
    return negative, *[entropy(row.log_softmax(-1)) for row in rows]


def other_sizes(head: Head, x: torch.Tensor, _: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The same calls with other numbers of rows and columns: a tensor of one number is a size, and changes."""
    n, found = torch.tensor(7), []
    for rows in (2, 4, 3):
        z = head(x[:, :rows])
        found += [z[..., :n].logsumexp(-1), z[:, : n - 6].logsumexp(-1), z.view(-1, V).logsumexp(-1)]
        n += 1
    return tuple(found)


def pickled(head: Head, x: torch.Tensor, _: torch.Tensor) -> tuple[torch.Tensor, ...]:
    same = pickle.loads(pickle.dumps(head))
    with defer_logits(same):
        return (loss(same(x)),)


CASES: list[Case] = [
    add_with_alpha, lse_without_gradient, stored_minus_lse, detached_probabilities, detached_entropy,
    detached_temperature, written_unseen, written_row, written_lse, checkpointed, parts, first_part,
    parts_of_parts, parts_of_softmax, parts_without_gradient, parts_in_checkpoints, written_parts, other_sizes, pickled,
]  # fmt: skip


def run(case: Case, head: Head) -> tuple[list[Any], list[Any]]:
    """Results, and the gradients of their sum."""
    x = torch.linspace(-2, 2, B * S * H).view(B, S, H).requires_grad_()
    t = torch.tensor(1.7, requires_grad=True)
    found = case(head, x * 1, t)
    recorded = [each.sum() * (i + 1) for i, each in enumerate(found) if each.requires_grad]
    if recorded:
        torch.stack([each.float() for each in recorded]).sum().backward()
    return list(found), [x.grad, t.grad, head.weight.grad]


def make_head() -> Head:
    torch.manual_seed(0)
    return torch.nn.Linear(H, V, bias=False)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_everything_is_as_with_stored_logits(case: Case) -> None:
    head = make_head()
    expected, gradients = run(case, copy.deepcopy(head))
    defer_logits(head)
    found, own = run(case, head)
    assert [each.requires_grad for each in found] == [each.requires_grad for each in expected]
    torch.testing.assert_close([x.detach() for x in found], [x.detach() for x in expected], rtol=3e-5, atol=3e-5)
    for ours, stock in zip(own, gradients, strict=True):
        assert (ours is None) == (stock is None)
        if ours is not None:
            torch.testing.assert_close(ours, stock, rtol=3e-5, atol=3e-5)


def step_fused(head: Head, _: torch.Tensor) -> None:
    head.weight.grad = torch.ones_like(head.weight)
    torch.optim.AdamW(head.parameters(), fused=True).step()


@torch.no_grad()
def write(which: str, head: Head, x: torch.Tensor) -> None:
    (head.weight if which == "weight" else x).mul_(2)


CHANGES = {
    "weight": (functools.partial(write, "weight"), r"weight \(11, 8\) was written into in place"),
    "hidden": (functools.partial(write, "hidden"), r"hidden \(2, 4, 8\) was written into in place"),
    "frozen": (lambda head, _: head.weight.requires_grad_(False), "was given requires_grad=False"),
    "stepped": (step_fused, "an optimizer has made a step"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_changed_since_the_head_is_refused(name: str) -> None:
    change, words = CHANGES[name]
    head, x = make_head(), torch.ones(B, S, H).requires_grad_()
    defer_logits(head)
    hidden = x * 1
    logits, kept = head(hidden), head(hidden)
    values = kept.compute()
    expected = values.detach().clone()
    change(head, hidden)
    for use in (loss, torch.sin, lambda z: z.argmax(-1)):
        with pytest.raises(RuntimeError, match=words):
            use(logits)
    torch.testing.assert_close(kept.sin(), expected.sin())  # as the message says


def multiply_then_write(logits: torch.Tensor, keep: bool) -> torch.Tensor:
    p, log_p = logits.softmax(-1), logits.log_softmax(-1)
    product: Any = p * log_p
    product = product.compute() if keep else product
    log_p.mul_(2)
    return product.sin()


def test_a_factor_that_is_written_after_its_product_is_refused() -> None:
    head, x = make_head(), torch.ones(B, S, H)
    logits = head(x)
    expected = (logits.softmax(-1) * logits.log_softmax(-1)).sin()
    defer_logits(head)
    with pytest.raises(RuntimeError, match=r"was written into in place .* write logits = logits.compute\(\)"):
        multiply_then_write(head(x), keep=False)
    torch.testing.assert_close(multiply_then_write(head(x), keep=True), expected)  # as the message says


def test_a_gradient_of_logits_that_a_loss_does_not_have_is_refused() -> None:
    head = make_head()
    defer_logits(head)
    logits = head(torch.ones(B, S, H))
    logits.retain_grad()
    loss(logits).backward()
    assert logits.grad is not None
    logits = head(torch.ones(B, S, H))
    rows = logits[:, 1:]
    for ask in (
        logits.retain_grad,
        lambda: logits.register_hook(print),
        lambda: torch.autograd.grad(loss(rows, IDS[:, 1:]), rows),
    ):
        with pytest.raises(RuntimeError, match=r"logits\.compute\(\)"):
            ask()
