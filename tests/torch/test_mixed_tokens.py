"""A loss_fn that mixes tokens is refused, and the message says how to compute it; other functions are served."""

from __future__ import annotations

import functools
import re
from typing import Any

import pytest
import torch

from lce_torch_bridge import linear_logprobs, linear_loss, losses, rows
from tests.torch import problem as p


def drawn_with_policy(T: int = 37) -> tuple[p.Problem, torch.Tensor, torch.Tensor]:
    """A policy that has not moved, so that all ratios are 1, and advantages of sequences."""
    problem = p.draw(T=T)
    old = linear_logprobs(*problem).logprobs
    return problem, old, torch.tensor([1.0, -0.5, 2.0]).repeat_interleave(-(-T // 3))[:T]


def clipped(ratio: torch.Tensor, advantage: torch.Tensor) -> torch.Tensor:
    return -torch.minimum(ratio * advantage, ratio.clamp(1 - 3e-4, 1 + 4e-4) * advantage)


SEQUENCES = torch.arange(37) // 13  # of each token
MIXING: dict[str, Any] = {  # of the ratio's logarithm and of the advantage
    "sequence mean": lambda x, a: clipped(x.mean().exp(), a).expand(len(x)),
    "geometric mean": lambda x, a: x.clamp(-0.4, 0.4).mean().exp() * -a,
    "mean without a gradient": lambda x, a: -a * x.mean().detach().exp() * (x + 1),
    "by sequences": lambda x, a: -a * torch.zeros(3).index_add(0, SEQUENCES[: len(x)], x)[SEQUENCES[: len(x)]].exp(),
    "closed over sequences": lambda x, a: -a * torch.zeros(3).index_add(0, SEQUENCES, x)[SEQUENCES],
    "number of tokens": lambda x, a: -a * x / len(x),
    "sum of weights": lambda x, a: -a * x / (a > 0).sum(),
    "normalised advantages": lambda x, a: -(a - a.mean()) / (a.std() + 1e-6) * x,
    "running sum": lambda x, a: -a * x.cumsum(0),
    "running sum backwards": lambda x, a: -a * x.flip(0).cumsum(0).flip(0),
    "softmax": lambda x, a: x.softmax(0) * a,
    "largest": lambda x, a: a * (x - x.amax()),
    "smallest": lambda x, a: a * (x - x.amin()),
    "median": lambda x, a: -a * (x - x.median()),
    "neighbour": lambda x, a: -a * (x - x.roll(1)),
    "sorted": lambda x, a: x.sort().values * a,
    "overwritten": lambda x, a: a.sub_(a.mean()) * x,
}


def of_ratio(loss_fn: Any, logprobs: Any, _: Any, __: Any, old: Any, advantage: Any) -> Any:
    return loss_fn(logprobs - old, advantage)


def of_entropies(logprobs: Any, entropy: Any, *_: Any) -> Any:
    return 0.1 * (entropy.mean() - entropy) ** 2 - logprobs


def of_lse(logprobs: Any, _: Any, lse: Any, *__: Any) -> Any:
    return lse.mean() ** 2 - logprobs


@pytest.mark.parametrize("recorded", [True, False])
def test_a_loss_that_mixes_tokens_is_refused(recorded: bool) -> None:
    """Chunks end anywhere. Also where ratios are all 1, so that their mean is what they are."""
    problem, old, advantage = drawn_with_policy()
    mixing = {name: functools.partial(of_ratio, loss_fn) for name, loss_fn in MIXING.items()}
    for name, loss_fn in (mixing | {"mean entropy": of_entropies, "mean lse": of_lse}).items():
        leaves = problem.leaves() if recorded else problem
        with pytest.raises(ValueError, match=r"loss_fn mixes tokens: the loss of one token is .*linear_logprobs\("):
            pytest.fail(f"{name}: {linear_loss(loss_fn, *leaves, old, advantage.clone())}")
        with pytest.raises(ValueError, match="loss_fn mixes tokens"):  # as often as it is given
            linear_loss(loss_fn, *leaves, old, advantage.clone())


@pytest.mark.parametrize("T", [2, 3, 4, 5, 6, 7, 16, 17, 18, 300])
def test_pairs_of_tokens_and_any_number_of_them(T: int) -> None:
    problem = p.draw(T=T)
    with pytest.raises(ValueError, match="loss_fn mixes tokens"):
        linear_loss(lambda logprob, *_: logprob - logprob.mean(), *problem)
    if T % 2 == 0:

        def preferences(logprob: torch.Tensor, *_: Any) -> torch.Tensor:
            chosen, rejected = logprob.view(-1, 2).unbind(-1)
            return -torch.nn.functional.logsigmoid(chosen - rejected).repeat_interleave(2)

        with pytest.raises(ValueError, match="loss_fn mixes tokens"):
            linear_loss(preferences, *problem)


@pytest.mark.parametrize("selects", ["all", "mask", "index", "ignored", "both"])
def test_a_sequence_mean_as_the_message_says(selects: str) -> None:
    """GSPO's ratio of sequences, by the lines of the message, against stored logits in float64."""
    problem = p.draw(T=21)
    hidden, weight, labels = problem.hidden.view(3, 7, -1), problem.weight, problem.labels.view(3, 7)
    old = p.stored(hidden, weight, labels).logprobs.float() + 0.05 * torch.randn(3, 7, generator=torch.manual_seed(1))
    advantage, mask = torch.tensor([1.0, -0.5, 2.0]), torch.ones(3, 7, dtype=torch.bool)
    options: dict[str, Any] = {}
    if selects in ("ignored", "both"):
        labels[0, 4:], options["ignore_index"] = -100, -100
        mask &= labels != -100
    if selects in ("mask", "both"):
        options["where"] = torch.arange(7) < torch.tensor([[7], [5], [6]])
        mask &= options["where"]
    if selects == "index":
        options["where"] = torch.tensor([0, 1, 2, 8, 9, 14, 20], dtype=torch.int32)
        mask = torch.zeros(21, dtype=torch.bool).index_fill(0, options["where"].long(), True).view(3, 7)

    def sequences(logprob: Any, _: Any, __: Any, old: Any) -> Any:
        return torch.exp(logprob - old).mean().expand(len(logprob))

    given = {"temperature": 0.7, **options}
    with pytest.raises(ValueError, match="mixes tokens") as error:
        linear_loss(sequences, hidden, weight, labels, old=old, **given)
    lines, mean = re.findall("`(.*?)`", str(error.value))
    leaves = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    names = {"torch": torch, "rows": rows, "linear_logprobs": linear_logprobs, "labels": labels, **given}
    names |= {"hidden": leaves[0], "weight": leaves[1]}
    exec(lines, names)
    x = names["out"].logprobs - old
    total = clipped(eval(mean, names | {"x": x}).exp()[:, -1], advantage).sum()

    double = hidden.double().requires_grad_(), weight.double().requires_grad_()
    exact = p.stored(*double, labels, temperature=0.7).logprobs - old
    wanted = clipped((torch.where(mask, exact, 0).sum(-1) / mask.sum(-1)).exp(), advantage.double()).sum()
    assert abs((total / wanted).item() - 1) < 1e-6
    for got, want in zip(torch.autograd.grad(total, leaves), torch.autograd.grad(wanted, double), strict=True):
        assert p.relative_norm(got, want) < 1e-5


def test_honest_losses_are_served_and_compared_once() -> None:
    """A lambda of each step is one function; flags and functions that it closes over make others."""
    problem, _, advantage = drawn_with_policy()
    seen: list[int] = []

    def step(scale: float, level: str = "token", inner: Any = torch.neg) -> None:
        def loss_fn(logprob: Any, _: Any, __: Any, a: Any) -> Any:
            seen.append(len(logprob))
            reduced = logprob.mean() if level == "sequence" else logprob
            return a * scale * inner(reduced)

        linear_loss(loss_fn, *problem.leaves(), a=advantage)

    step(1.0)
    assert seen.pop(0) == 37
    assert 0 < sum(seen) <= 2 * 16
    seen.clear()
    for n in range(3):
        step(1.0 + n)
    assert seen == [37] * 3
    with pytest.raises(ValueError, match="mixes tokens"):
        step(1.0, "sequence")
    with pytest.raises(ValueError, match="mixes tokens"):
        step(1.0, inner=lambda x: x - x.mean())
    linear_loss(losses.with_entropy_bonus(losses.cross_entropy, 0.1), *problem)
    with pytest.raises(ValueError, match="mixes tokens"):
        linear_loss(losses.with_entropy_bonus(from_mean, 0.1), *problem)


def from_mean(logprob: Any, *_: Any) -> Any:
    return logprob.mean() - logprob


def test_random_numbers_and_functions_that_do_not_repeat_themselves() -> None:
    """They are not compared, and draw what they would have drawn."""
    problem, calls, own = p.draw(T=300), [0], torch.Generator().manual_seed(3)

    def dropout(logprob: Any, *_: Any) -> Any:
        return torch.nn.functional.dropout(-logprob, 0.02)

    def by_a_generator(logprob: Any, *_: Any) -> Any:
        return -logprob * torch.rand(len(logprob), generator=own)

    def counting(logprob: Any, *_: Any) -> Any:
        calls[0] += 1
        return -logprob / calls[0]

    after = []
    for _ in range(2):  # the second time dropout is known
        torch.manual_seed(0)
        total, _out = linear_loss(dropout, *problem.leaves(), chunk_bytes=0)
        after.append((total, torch.rand(4)))
    assert torch.equal(after[0][0], after[1][0])
    assert torch.equal(after[0][1], after[1][1])
    for loss_fn in (by_a_generator, counting):
        linear_loss(loss_fn, *problem.leaves())


def test_losses_of_zero_say_nothing() -> None:
    problem, _, advantage = drawn_with_policy()

    def loss_fn(logprob: Any, _: Any, __: Any, a: Any) -> Any:
        return -a * logprob.mean()

    linear_loss(loss_fn, *problem, a=torch.zeros(37))
    with pytest.raises(ValueError, match="mixes tokens"):
        linear_loss(loss_fn, *problem, a=advantage)


def test_what_main_grad_holds_when_a_loss_is_refused() -> None:
    problem = p.draw(T=300)
    hidden, weight, labels = problem.leaves()
    weight.main_grad = torch.zeros_like(weight)  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="mixes tokens") as error:
        linear_loss(lambda lp, *_: lp * lp.mean(), hidden, weight, labels, wgrad="main_grad", cotangent=1.0)
    assert "main_grad" in error.value.__notes__[0]
