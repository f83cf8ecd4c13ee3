"""Deferred logits beside stored ones: what is served, what is stored, what is written in place, and what is refused."""

from __future__ import annotations

import copy
import functools
import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributions import Categorical
from torch.utils.checkpoint import checkpoint

from lce_torch_bridge import defer_logits, linear_logprobs
from lce_torch_bridge.deferred import _fused_functions
from lce_torch_bridge.deferred._tensor import DeferredLogits
from tests.torch.deferred_cases import (
    NEAR,
    B,
    H,
    Loss,
    S,
    T,
    V,
    check_near,
    compare,
    make_head,
    make_hidden,
    make_labels,
    run_head,
)  # fmt: skip

pytestmark = pytest.mark.usefixtures("in_float64")

F = torch.nn.functional
COLUMNS = torch.arange(V)
ROWS = torch.linspace(0.5, 2, T).view(B, S, 1)


def flat(z: torch.Tensor) -> torch.Tensor:
    return z.reshape(-1, z.size(-1))


def nll(z: torch.Tensor, labels: torch.Tensor, **options: Any) -> torch.Tensor:
    return F.cross_entropy(flat(z), labels.reshape(-1), **options)


def without_some(labels: torch.Tensor) -> torch.Tensor:
    return labels.masked_fill(labels < V // 3, -100)


def shift(z: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """As a causal language model of Transformers."""
    z = z[..., :-1, :].float().contiguous()
    return F.cross_entropy(z.view(-1, V), without_some(labels)[:, 1:].reshape(-1), reduction="sum") / 7


def select_log_softmax(z: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """TRL's algorithm for float32, and for what is narrower."""
    if z.dtype == torch.float32:
        of_each_row = torch.stack([torch.logsumexp(row, dim=-1) for row in z])
        return torch.gather(z, dim=-1, index=labels.unsqueeze(-1)).squeeze(-1) - of_each_row
    rows = []
    for row, ids in zip(z, labels, strict=True):
        rows.append(F.log_softmax(row, dim=-1).gather(dim=-1, index=ids.unsqueeze(-1)).squeeze(-1))
    return torch.stack(rows)


def entropy_by_chunks(z: torch.Tensor, _: torch.Tensor, chunk: int = 128) -> torch.Tensor:
    """TRL's algorithm."""
    entropies = []
    for rows in z.reshape(-1, z.shape[-1]).split(chunk, dim=0):
        logp = F.log_softmax(rows, dim=-1)
        entropies.append(-(torch.exp(logp) * logp).sum(-1))
    return torch.cat(entropies).reshape(z.shape[:-1])


def both(z: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    logp = F.log_softmax(z, dim=-1)
    return logp.gather(-1, labels[..., None])[..., 0] - 0.1 * (logp.exp() * logp).sum(-1)


SERVED: dict[str, Loss] = {
    "cross entropy": nll,
    "shifted": shift,
    "module": lambda z, y: torch.nn.CrossEntropyLoss(ignore_index=3)(z.flatten(0, 1), y.view(-1)),
    "each token, smoothed": lambda z, y: nll(z / 0.7, without_some(y), reduction="none", label_smoothing=0.1),
    "ignored labels": lambda z, y: nll(z, without_some(y)),
    "all are ignored": lambda z, y: nll(z, torch.full_like(y, -100)),
    "classes second": lambda z, y: F.cross_entropy(z.transpose(1, 2), y),
    "classes second, each token": lambda z, y: F.cross_entropy(z.permute(0, 2, 1), y, reduction="none"),
    "input by name": lambda z, y: F.cross_entropy(input=flat(z), target=y.view(-1)),
    "one row": lambda z, y: F.cross_entropy(z[0, 1], y[0, 1]),
    "no rows": lambda z, y: nll(z[:, :0], y[:, :0], reduction="sum"),
    "mean of no rows": lambda z, y: nll(z[:, :0], y[:, :0]),
    "cap": lambda z, y: nll(5 * torch.tanh(z * 0.3 / 5), y),
    "cap, then temperature": lambda z, y: nll(torch.tanh(z / 5) * 5 / 0.7, y),
    "negated": lambda z, y: nll(-z, y),
    "traced scale": lambda z, y: nll(z * torch.tensor(1.5), y),
    "tensor of one": lambda z, y: nll(z / torch.tensor([1.5]), y),
    "a scale for each row": lambda z, y: nll(z / ROWS, y),
    "bias": lambda z, y: nll(z + torch.linspace(-1, 1, V), y),
    "bias of scaled": lambda z, y: nll(2 * z - torch.linspace(-1, 1, V), y),
    "no columns at the end": lambda z, y: nll(z[..., :40], y.clamp(max=39)),
    "masked by a bias": lambda z, y: nll(z + torch.where(COLUMNS > 39, -torch.inf, 0.0), y.clamp(max=39)),
    "log_softmax, gather": lambda z, y: F.log_softmax(z.float(), -1).gather(-1, y[..., None]).squeeze(-1),
    "take_along_dim": lambda z, y: torch.take_along_dim(z.log_softmax(-1), y[..., None], dim=-1),
    "nll_loss": lambda z, y: F.nll_loss(F.log_softmax(flat(z), dim=1), without_some(y).view(-1)),
    "halved nll_loss": lambda z, y: F.nll_loss(0.5 * flat(z).log_softmax(-1), y.view(-1), reduction="none"),
    "index": lambda z, y: torch.log_softmax(flat(z), -1)[torch.arange(T), y.view(-1)],
    "index from the end": lambda z, y: flat(z)[torch.arange(T), y.view(-1) - V],
    "log_softmax twice": lambda z, y: z.log_softmax(-1).log_softmax(-1).gather(-1, y[..., None]),
    "logsumexp": lambda z, _: torch.logsumexp(z, -1),
    "z loss": lambda z, _: torch.logsumexp(z, -1, keepdim=True).square(),
    "gather": lambda z, y: z.gather(-1, y[..., None]),
    "gather of many": lambda z, _: z.gather(-1, make_labels(B, S, 5)),
    "by hand": lambda z, y: (z - torch.logsumexp(z, -1, keepdim=True)).gather(-1, y[..., None]),
    "select_log_softmax": select_log_softmax,
    "entropy": lambda z, _: -(F.softmax(z, -1) * F.log_softmax(z, -1)).sum(-1),
    "entropy of lse": lambda z, _: torch.logsumexp(z, -1) - torch.sum(F.softmax(z, -1) * z, dim=-1),
    "entropy by chunks": entropy_by_chunks,
    "entropy by small chunks": lambda z, y: entropy_by_chunks(z, y, 5),
    "entropy, warm": lambda z, y: entropy_by_chunks(z / 0.7, y),
    "scaled product": lambda z, _: ((2 * z.softmax(-1)) * (-3 * z.log_softmax(-1))).sum(-1),
    "log-probability and entropy": both,
    "Categorical": lambda z, y: Categorical(logits=z).log_prob(y),
    "Categorical's entropy": lambda z, _: Categorical(logits=z, validate_args=False).entropy(),
    "largest": lambda z, _: z.argmax(-1).float(),
    "five largest": lambda z, _: z.topk(5)[0],
    "which are largest": lambda z, _: z.topk(3, -1).indices.float(),
    "mean of log-probabilities": lambda z, _: F.log_softmax(z, -1).mean(-1, keepdim=True),
    "mean": lambda z, _: z.mean(),
    "mask": lambda z, y: nll(z[y > 9], y[y > 9]),
    "chosen rows": lambda z, y: nll(z[:, [0, 3]], y[:, [0, 3]]),
    "rows by number": lambda z, y: nll(flat(z).index_select(0, torch.tensor([3, 1])), y.view(-1)[[3, 1]]),
    "new dimension": lambda z, _: z[None, :, -1].logsumexp(-1),
    "expanded": lambda z, _: z.unsqueeze(0).expand(3, -1, -1, -1).logsumexp(-1),
    "rows": lambda z, y: torch.stack([nll(row, ids) for row, ids in zip(z, y, strict=True)]),
    "parts": lambda z, _: torch.cat([part.logsumexp(-1) for part in z.chunk(3, dim=1)], 1),
    "detached": lambda z, y: z.detach().logsumexp(-1) + nll(z, y),
    "checkpoint": lambda z, y: checkpoint(lambda x: nll(x * 2.0, y), z, use_reentrant=False),
}  # fmt: skip


class Foreign(torch.autograd.Function):
    """Of somebody else: Σ exp z."""

    @staticmethod
    def forward(ctx: Any, z: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(z)
        return z.exp().sum(-1)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        (z,) = ctx.saved_tensors
        return gradient[..., None] * z.exp()


class Triple(torch.autograd.Function):
    """Changes the gradient alone, and returns what it takes."""

    @staticmethod
    def forward(_: Any, z: torch.Tensor) -> torch.Tensor:
        return z

    @staticmethod
    def backward(_: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return 3 * gradient


def then(change: Callable[[torch.Tensor], Any], loss: Loss = nll) -> Loss:
    """Something is done to the logits, and the loss is of what they are then."""

    def changed(z: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        change(z)
        return loss(z, labels.clamp(max=39))

    return changed


def write_beside(change: Callable[[torch.Tensor], Any]) -> Loss:
    """Something is done to the logits after other tensors were made of them."""

    def changed(z: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        view, part, product = z.view(-1, V), z[:, :3], z * 2
        change(z)
        return nll(view, labels) + part.logsumexp(-1).mean() + product.logsumexp(-1).mean()

    return changed


def multiply(z: torch.Tensor) -> None:
    view = z.view(-1, V)
    z *= 0.5
    z /= 2.0
    assert view.shape[-1] == V


def backward_by_parts(z: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    leaf = z.detach().requires_grad_()
    nll(leaf, labels).backward()
    z.backward(leaf.grad)
    return z.sum().detach()


def under_no_grad(function: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
    return torch.no_grad()(function)


def write_elsewhere(function: Any, dtype: torch.dtype) -> Loss:
    def written(z: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        out = torch.zeros(B, S, dtype=dtype)
        with torch.no_grad():
            function(z, -1, out=out)
        return out.float()

    return written


STORED: dict[str, Loss] = {
    "softmax": lambda z, _: torch.softmax(z, -1).pow(2).sum(-1),
    "class weights": lambda z, y: nll(z, y, weight=torch.linspace(0.5, 1, V)),
    "probabilities as target": lambda z, y: F.cross_entropy(flat(z), F.one_hot(y.view(-1), V).float()),
    "KL": lambda z, _: F.kl_div(z.log_softmax(-1), (0.5 * z.detach()).softmax(-1), reduction="none").sum(-1),
    "a product": lambda z, _: z @ torch.ones(V, 3),
    "a product of two": lambda z, _: (z * z).sum(-1),
    "where": lambda z, _: torch.where(COLUMNS < 40, z, -1e9).logsumexp(-1),
    "one column": lambda z, _: z[..., 3],
    "smallest": lambda z, _: z.topk(3, -1, largest=False).values,
    "negative cap": lambda z, y: nll(-5 * torch.tanh(z / 5), y),
    "two caps": lambda z, y: nll(torch.tanh(torch.tanh(z)), y),
    "add, alpha": lambda z, _: torch.add(torch.linspace(-1, 1, V), z, alpha=2.0).logsumexp(-1),
    "sub, alpha": lambda z, _: torch.sub(z, torch.linspace(-1, 1, V), alpha=2.0).logsumexp(-1),
    "rounded quotient": lambda z, _: torch.div(z, 2.0, rounding_mode="floor").logsumexp(-1),
    "NumPy's names": lambda z, _: z.logsumexp(-1, keepdims=True) + z.log_softmax(-1).sum(-1, keepdims=True),
    "NumPy's axis": lambda z, _: z.logsumexp(axis=-1),
    "NumPy's index": lambda z, _: z[np.array([[True] * S, [False] * S])].logsumexp(-1),
    "other columns": lambda z, y: z.flip(-1).gather(-1, y[..., None]) + z.roll(1, -1).gather(-1, y[..., None]),
    "as_strided": lambda z, _: torch.as_strided(z, (T, V), (V, 1)).logsumexp(-1),
    "lse of other logits": lambda z, y: (2 * z - torch.logsumexp(z, -1, keepdim=True)).gather(-1, y[..., None]),
    "entropy of other logits": lambda z, _: (F.softmax(z / 0.7, -1) * z).sum(-1),
    "minus lse, squared": lambda z, _: (z - torch.logsumexp(z, -1, keepdim=True)).square().sum(-1),
    "minus lse without gradient": lambda z, y: (z - under_no_grad(lambda x: x.logsumexp(-1, keepdim=True))(z)).gather(
        -1, y[..., None]
    ),
    "detached probabilities": lambda z, _: (F.softmax(z, -1).detach() * F.log_softmax(z, -1)).sum(-1),
    "probabilities of detached": lambda z, _: (F.softmax(z.detach(), -1) * F.log_softmax(z, -1)).sum(-1),
    "probabilities without gradient": lambda z, _: (under_no_grad(lambda x: x.softmax(-1))(z) * z.log_softmax(-1)).sum(
        -1
    ),
    "out": lambda z, y: under_no_grad(lambda x: torch.gather(x, -1, y[..., None], out=torch.zeros(B, S, 1)))(z),
    "written elsewhere": write_elsewhere(torch.logsumexp, torch.float32),
    "argmax written elsewhere": write_elsewhere(torch.argmax, torch.int64),
    "somebody's function": lambda z, _: Foreign.apply(z),
    "somebody's function, and ours": lambda z, y: Foreign.apply(z.float() * 0.5) + nll(z, y),
    "somebody's gradient": lambda z, y: nll(Triple.apply(z), y),
    "checkpoint of the scale": lambda z, y: nll(checkpoint(lambda x: x * 2.0, z, use_reentrant=True), y),
    "checkpoint with its own backward": lambda z, y: checkpoint(lambda x: nll(x * 2.0, y), z, use_reentrant=True),
    "vmap": lambda z, _: torch.vmap(lambda x: x.square().sum())(z),
    "list": lambda z, _: torch.tensor(z.tolist()).sum(-1),
    "NumPy": lambda z, _: torch.from_numpy(np.asarray(z.detach())).sum(-1),
    "DLPack": lambda z, _: torch.from_dlpack(z.detach()).sum(-1),
    "operator": lambda z, _: torch.ops.aten.add.Tensor(z, 1).sum(-1),
    "hook": lambda z, y: (z.register_hook(lambda gradient: 2 * gradient), nll(z, y))[1],
    "backward by parts": backward_by_parts,
    "mask in place": then(lambda z: z.masked_fill_(COLUMNS > 39, -9.0)),
    "columns in place": then(lambda z: z.__setitem__((..., slice(40, None)), -9.0)),
    "rows in place": then(lambda z: z[:, :3].mul_(0.5)),
    "row by a tensor in place": then(lambda z: z[torch.tensor(0)].mul_(2.0)),
    "operators in place, beside a view": then(multiply),
    "inplace=True": then(lambda z: F.relu(z, inplace=True)),
    "beside views, written": write_beside(lambda z: z.mul_(0.5)),
    "beside views, a view is written": write_beside(lambda z: z.view(-1, V).mul_(0.5)),
    "beside views, part is written": write_beside(lambda z: z[:, 1:].mul_(0.5)),
    "beside views, by data": write_beside(lambda z: z.data.mul_(0.5)),
    "beside views, detached": write_beside(lambda z: z.detach().mul_(0.5)),
    "beside views, by place": write_beside(lambda z: F.relu(z.view(-1, V), True)),
    "beside views, by an operator": write_beside(lambda z: torch.ops.aten.mul_.Tensor(z.detach(), 0.5)),
    "beside views, each": write_beside(lambda z: torch._foreach_mul_([z.detach()], 2.0)),
}  # fmt: skip


@pytest.mark.parametrize("name", SERVED)
def test_served(name: str) -> None:
    handle = compare(SERVED[name], strict=True)
    assert handle.served > 0
    assert (handle.stored, handle.places) == (0, [])


ALSO = "cross entropy", "cap", "traced scale", "bias", "no columns at the end", "log-probability and entropy", "mean"


@pytest.mark.parametrize("name", [*ALSO, "select_log_softmax", "entropy of lse", "five largest", "by hand"])
def test_served_with_a_bias_and_in_16_bits(name: str) -> None:
    assert compare(SERVED[name], bias=True, strict=True).served
    for dtype in (torch.bfloat16, torch.float16):
        assert compare(SERVED[name], dtype=dtype, strict=True).served


@pytest.mark.parametrize("name", STORED)
def test_stored(name: str) -> None:
    """Computed once, but where a checkpoint or two parts need them again."""
    handle = compare(STORED[name])
    assert handle.stored > 0
    assert __file__ in handle.places[0] or "checkpoint" in name


def test_each_function_of_rows_leaves_square_logits_alone() -> None:
    """With as many columns as rows and as hidden has, columns are not taken for rows."""
    back = torch.arange(H).flip(0)
    changes: list[Callable[[torch.Tensor], torch.Tensor]] = [
        lambda z: z.transpose(0, 1), lambda z: z.t(), lambda z: z.mT, lambda z: z.index_select(-1, back),
        lambda z: z.movedim(0, -1), lambda z: torch.stack(z.unbind(-1)), lambda z: z[:, back],
        lambda z: z.permute(1, 0), lambda z: z.split(H, -1)[0], lambda z: z.unflatten(-1, (1, H)),
        lambda z: z.swapaxes(0, 1),
    ]  # fmt: skip
    for change in changes:
        compare(lambda z, _, change=change: change(z).logsumexp(-1), shape=(H,), columns=H)
        compare(lambda z, _, change=change: change(z).contiguous().view(H, H).logsumexp(-1), shape=(H,), columns=H)
    compare(lambda z, y: F.cross_entropy(z.transpose(1, 2), y), shape=(3, H), columns=H)
    compare(lambda z, y: F.cross_entropy(z, y), shape=(3, H), columns=H)


def test_labels_out_of_range_raise_as_torch_does() -> None:
    head = make_head()
    handle = defer_logits(head)
    labels = make_labels(T).index_fill(0, torch.tensor([4]), V)
    with pytest.raises(IndexError, match=f"Target {V} is out of bounds"):
        nll(head(make_hidden(T)), labels)
    with pytest.raises(RuntimeError, match=f"index {V} is out of bounds for dimension 1 with size {V}"):
        head(make_hidden(T)).gather(-1, labels[:, None])
    assert handle.served == 0


@pytest.mark.parametrize("ignored", [-100, 0, 3, V - 1, V + 7])
def test_any_label_may_be_the_ignored_one(ignored: int) -> None:
    """Less or more than all others, among them, all, none, and beside one that is out of range."""
    head, labels = make_head(), make_labels(T)
    deferred = copy.deepcopy(head)
    handle = defer_logits(deferred, strict=True)
    some = labels.index_fill(0, torch.tensor([0, 5]), ignored)
    for given in (labels, some, torch.full_like(labels, ignored)):
        for reduction in ("mean", "sum", "none"):
            loss = functools.partial(F.cross_entropy, target=given, ignore_index=ignored, reduction=reduction)
            check_near(
                *[run_head(each, lambda z, _, loss=loss: loss(z), (T,)) for each in (deferred, head)], bound=NEAR
            )
    assert handle.served == 9
    handle.undo()
    defer_logits(deferred)
    for wrong in (-1, V):
        given = some.index_fill(0, torch.tensor([3]), wrong)
        with pytest.raises(IndexError, match=f"Target {wrong} is out of bounds"):
            F.cross_entropy(deferred(make_hidden(T)), given, ignore_index=ignored)


def test_scales_that_train() -> None:
    """A tensor of one number, of one for each row, and a bias of one for each column have gradients."""
    for shape, change in (
        ((), torch.mul), ((1,), torch.div), ((B, S, 1), torch.div), ((1, S, 1), torch.mul), ((V,), torch.add)
    ):  # fmt: skip
        grads = []
        for strict in (False, True):
            head, by = (
                make_head(),
                torch.linspace(0.5, 2, max(1, torch.Size(shape).numel())).view(shape).requires_grad_(),
            )
            handle = defer_logits(head, strict=True) if strict else None
            nll(change(head(make_hidden(B, S)), by), make_labels(B, S)).backward()
            grads.append([by.grad, head.weight.grad])
        assert handle is not None
        assert handle.served == 1
        for x, y in zip(*grads, strict=True):
            torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-6)


def test_autocast_has_the_dtypes_of_stock() -> None:
    """Of each function, inside the context and after it."""
    functions = (
        "cross entropy", "logsumexp", "log_softmax, gather", "entropy", "mean", "gather", "five largest", "z loss"
    )  # fmt: skip

    def run(loss: Loss, is_inside: bool) -> Loss:
        def with_autocast(z: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cpu", torch.bfloat16, enabled=is_inside):
                return loss(z, labels)

        return with_autocast

    def of_head(head: torch.nn.Linear, loss: Loss) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            z = head(make_hidden(B, S))
        assert z.dtype == torch.bfloat16
        return loss(z, make_labels(B, S))

    head, deferred = make_head(), make_head()
    handle = defer_logits(deferred)
    for name in functions:
        for is_inside in (True, False):
            loss = run(SERVED[name], is_inside)
            want, got = of_head(head, loss), of_head(deferred, loss)
            assert got.dtype == want.dtype, name
            torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-2)
    assert handle.stored == 0
    values = []
    for each in (head, deferred):  # a step in autocast whose values are needed outside of it
        with torch.autocast("cpu", torch.bfloat16):
            logp = F.log_softmax(each(make_hidden(B, S)), -1)
        values.append(logp.square())
    assert values[0].dtype == values[1].dtype
    torch.testing.assert_close(*values)


def test_log_probability_and_entropy_share_a_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []

    def counted(*args: Any, **options: Any) -> Any:
        calls.append(args)
        return linear_logprobs(*args, **options)

    monkeypatch.setattr(_fused_functions, "linear_logprobs", counted)

    def entropy_of_no_gradient(z: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        logprobs = z.log_softmax(-1).gather(-1, labels[..., None])[..., 0]
        entropy = under_no_grad(lambda z: entropy_by_chunks(z, labels, 5))(z)
        assert not entropy.requires_grad
        return logprobs * entropy + z.detach().logsumexp(-1)

    shared = both, SERVED["entropy of lse"], SERVED["Categorical's entropy"], entropy_by_chunks, entropy_of_no_gradient
    for loss in shared:
        calls.clear()
        compare(loss)
        assert len(calls) == 1, loss


def test_the_log_says_for_what_and_where_once(caplog: pytest.LogCaptureFixture) -> None:
    head = make_head()
    handle = defer_logits(head)
    with caplog.at_level(logging.WARNING, "lce_torch_bridge"):
        for _ in range(2):
            torch.softmax(head(make_hidden(B, S)), -1).square()
    (said,) = [record.getMessage() for record in caplog.records]
    text = f"logits of [{B}, {S}, {V}] ({B * S * V * 4 / 1024:.1f} KiB)"
    assert said.startswith(f"{text} are computed for torch.Tensor.square at {__file__}:")
    assert handle.stored == 2
    assert len(handle.places) == 1
    assert repr(handle).startswith("Deferral(served=0, stored=2, places=['torch.Tensor.square at ")


def test_strict_raises_where_logits_would_be_computed() -> None:
    head = make_head()
    defer_logits(head, strict=True)
    with pytest.raises(RuntimeError, match=rf"logits of \[{B}, {S}, {V}\] .* for torch.Tensor.exp at .*strict=True"):
        head(make_hidden(B, S)).exp()


def test_undone_and_given_again() -> None:
    head = make_head()
    before, hidden = dict(vars(head)), make_hidden(B, S)
    with defer_logits(head) as handle:
        assert defer_logits(head) is handle
        assert isinstance(head(hidden), DeferredLogits)
        ours = head.forward
        head.forward = print  # type: ignore[method-assign]
        with pytest.raises(RuntimeError, match="forward of Linear has been replaced since: undo that first"):
            handle.undo()
        head.forward = ours  # type: ignore[method-assign]
        other = copy.deepcopy(head)
        other.weight.data *= 2
        torch.testing.assert_close(other(hidden).logsumexp(-1), F.linear(hidden, other.weight).logsumexp(-1))
        assert defer_logits(other) is handle
    handle.undo()  # nothing is left to undo
    assert vars(head) == before
    assert type(head(hidden)) is torch.Tensor


def test_only_with_gradients() -> None:
    """A head computes its logits where no gradient is wanted."""
    head, hidden = make_head(), make_hidden(B, S)
    handle = defer_logits(head)
    with torch.no_grad():
        assert type(head(hidden)) is torch.Tensor
    with torch.inference_mode():
        assert type(head(hidden)) is torch.Tensor
    head.requires_grad_(False)
    assert type(head(hidden.detach())) is torch.Tensor
    z = head(hidden)  # of a frozen head
    nll(z, make_labels(B, S)).backward()
    assert hidden.grad is not None
    assert head.weight.grad is None
    head.requires_grad_()
    nll(head(hidden.detach()), make_labels(B, S)).backward()  # of frozen hidden states
    assert head.weight.grad is not None
    assert handle.stored == 0


@pytest.mark.parametrize(("name", "change"), [("weight", lambda _, head: head.weight), ("hidden", lambda h, _: h)])
def test_what_has_changed_since_the_heads_call_is_refused(name: str, change: Any) -> None:
    """As an optimizer's step changes the weight: logits of the new one are not those that the head was asked for."""
    for use in (lambda z: z.square(), lambda z: z.logsumexp(-1)):
        head, hidden = make_head(), make_hidden(B, S) * 1
        defer_logits(head)
        z, stored = head(hidden), head(hidden).compute()
        want = stored.detach().clone()
        with torch.no_grad():
            change(hidden, head).mul_(2)
        with pytest.raises(RuntimeError, match=rf"{name} \(.*\) was written into .* write logits = logits.compute\(\)"):
            use(z)
        assert torch.equal(stored, want)  # as the message says
    head, scale = make_head(), torch.tensor(2.0)
    defer_logits(head)
    product = head(make_hidden(B, S)) * scale
    scale.fill_(3.0)
    with pytest.raises(RuntimeError, match=r"used on its logits .* was written into"):
        product.square()


@pytest.mark.parametrize("ask", [
    lambda z, _: z.register_hook(lambda gradient: 2 * gradient), lambda z, _: z.retain_grad(),
    lambda z, loss: torch.autograd.grad(loss, z), lambda z, loss: torch.autograd.backward(loss, inputs=[z]),
])  # fmt: skip
def test_the_gradient_of_logits_is_refused_after_a_loss(ask: Any) -> None:
    head, labels = make_head(), make_labels(B, S)
    defer_logits(head)
    z = head(make_hidden(B, S))
    loss = nll(z, labels)
    with pytest.raises(RuntimeError, match=r"asks for the gradient of deferred logits .* logits = logits.compute\(\)"):
        ask(z, loss)
    z = head(make_hidden(B, S))
    with pytest.raises(RuntimeError, match="asks for the gradient of deferred logits"):
        ask(z, (z * 1.5).square().sum())
    z = head(make_hidden(B, S)).compute()
    assert ask(z, nll(z, labels)) is not NotImplemented  # as the message says


def test_second_derivatives_are_refused() -> None:
    head, hidden = make_head(), make_hidden(B, S)
    defer_logits(head)
    with pytest.raises(NotImplementedError, match="first derivatives only"):
        torch.autograd.grad(nll(head(hidden), make_labels(B, S)), hidden, create_graph=True)[0].sum().backward()


def test_what_goes_around_torchs_functions_raises() -> None:
    head = make_head()
    defer_logits(head)
    z = head(make_hidden(B, S))
    with pytest.raises(RuntimeError, match="Cannot access data pointer"):
        torch.utils.dlpack.to_dlpack(z.detach())
    with pytest.raises(NotImplementedError, match=r"where no torch function sees it: pass logits.compute\(\)"):
        torch.func.grad(lambda x: nll(x, make_labels(B, S)))(z)
    want = torch.func.grad(lambda x: nll(x, make_labels(B, S)))(z.compute())  # as the message says
    stock = F.linear(make_hidden(B, S), head.weight)
    torch.testing.assert_close(want, torch.func.grad(lambda x: nll(x, make_labels(B, S)))(stock))


def test_a_foreign_function_of_what_was_written_is_refused() -> None:
    head = make_head()
    defer_logits(head)
    z = head(make_hidden(B, S))
    view = z.view(-1, V)
    found = Foreign.apply(view)
    z.mul_(2)
    with pytest.raises(RuntimeError, match=r"written into in place, .* Give it logits.compute\(\)"):
        found.sum().backward()


def test_run_through_a_reused_graph() -> None:
    """Two losses of the same logits, one after the other, and both at once with a gradient of the logits."""
    head, hidden, labels = make_head(), make_hidden(B, S), make_labels(B, S)
    want = run_head(make_head(), lambda z, y: nll(z, y) + z.logsumexp(-1).mean())
    defer_logits(head)
    z = head(hidden)
    (seed,) = torch.randn((1,), generator=torch.Generator().manual_seed(4))
    for loss in (nll(z, labels), z.logsumexp(-1).mean()):
        (seed * loss).backward(retain_graph=True)
    torch.testing.assert_close(hidden.grad, want.gradients[0])
    hidden.grad = None
    ones = torch.ones(B, S, V)
    stock = F.linear(hidden, head.weight)
    (want_both,) = torch.autograd.grad([nll(stock, labels), stock], hidden, [torch.tensor(1.0), ones])
    torch.autograd.backward([nll(z, labels), z], [None, ones])
    torch.testing.assert_close(hidden.grad, want_both)
