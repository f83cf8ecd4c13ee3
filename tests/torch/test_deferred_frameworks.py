"""What frameworks compute of logits by torch's functions, of deferred ones: equal, and without logits.

The functions are written anew after verl 0.9.1, SkyRL 0.3.0, AReaL 1.0.4, torchtitan 0.3.0 and NeMo RL at 7ea279a.
``examples/frameworks`` runs AReaL's and torchtitan's own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from lce_torch_bridge import defer_logits

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # torch.compile's
F = torch.nn.functional
TEMPERATURE = 0.7
type Results = tuple[torch.Tensor, ...]


def scored_by_rows(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """verl's and SkyRL's ``logprobs_from_logits_v2``."""
    if logits.dtype is torch.float32:
        chosen = torch.gather(logits, dim=-1, index=labels.unsqueeze(-1)).squeeze(-1)
        return chosen - torch.stack([torch.logsumexp(logit, dim=-1) for logit in logits])
    each = [
        F.log_softmax(row, dim=-1).gather(dim=-1, index=ids.unsqueeze(-1)).squeeze(-1)
        for row, ids in zip(logits, labels, strict=True)
    ]
    return torch.stack(each)


def verl(logits: torch.Tensor, labels: torch.Tensor) -> Results:
    """``prepare_model_outputs`` without padding: a temperature for each token, both entropies, and Σ p²."""
    tokens = logits.flatten(0, 1)
    temperature = torch.linspace(0.5, 1.5, tokens.shape[0])[:, None]
    tokens = tokens / temperature.clamp(min=1e-8).to(tokens.dtype)
    p = F.softmax(tokens, dim=-1)
    entropy = torch.logsumexp(tokens, dim=-1) - torch.sum(p * tokens, dim=-1)
    in_chunks = torch.zeros(tokens.shape[0])
    for i in range(0, tokens.shape[0], 4):
        chunk = tokens[i : i + 4].float()
        p = F.softmax(chunk, dim=-1)
        in_chunks[i : i + 4] = torch.logsumexp(chunk, dim=-1) - torch.sum(p * chunk, dim=-1)
    squares = torch.exp(torch.logsumexp(2.0 * tokens, dim=-1) - 2.0 * torch.logsumexp(tokens, dim=-1))
    return scored_by_rows(tokens, labels.flatten()), entropy, in_chunks, squares


def skyrl(logits: torch.Tensor, labels: torch.Tensor) -> Results:
    """``HFModelWrapper.forward``: the temperature in place, and the entropy in chunks, with a mask."""
    logits.div_(TEMPERATURE)
    logprobs = scored_by_rows(logits, labels)
    entropy = torch.zeros(logits.shape[:2], dtype=logits.dtype, device=logits.device)
    for i in range(0, logits.size(1), 4):
        chunk = F.log_softmax(logits[:, i : i + 4], dim=-1)
        entropy[:, i : i + 4] = -(chunk.exp() * chunk).sum(-1) * (labels[:, i : i + 4] % 5 > 0)
    return logprobs, entropy


def nemo_rl(logits: torch.Tensor, labels: torch.Tensor) -> Results:
    """``apply_temperature_scaling`` and ``get_next_token_logprobs_from_logits`` without tensor parallelism."""
    logits.div_(TEMPERATURE)
    logits = logits.to(torch.float32)[:, :-1]
    logprobs = F.log_softmax(logits, dim=-1)
    return (logprobs.gather(dim=-1, index=labels[:, 1:].unsqueeze(-1)).squeeze(-1),)


def gather_logprobs_entropy(logits: torch.Tensor, labels: torch.Tensor, temperature: float = 1.0) -> Any:
    logprobs = F.log_softmax(logits.float() / temperature, dim=-1)
    entropy = -torch.sum(logprobs.exp() * logprobs, dim=-1)
    return logprobs.gather(dim=-1, index=labels.unsqueeze(-1)).squeeze(-1), entropy


def areal(logits: torch.Tensor, labels: torch.Tensor) -> Results:
    """``_compute_logprobs_and_loss``: a compiled function in chunks, and the extremes of the logits."""
    torch._dynamo.reset()
    compiled = torch.compile(gather_logprobs_entropy, backend="eager")
    logits, labels = logits.flatten(0, 1), labels.flatten()
    parts = [compiled(logits[i : i + 4], labels[i : i + 4], temperature=TEMPERATURE) for i in range(0, len(logits), 4)]
    logprobs, entropy = (torch.cat(each) for each in zip(*parts, strict=True))
    extremes = logits.detach().min(-1).values.float(), logits.detach().max(-1).values.float()
    return logprobs, entropy, *extremes, logits.mean() * 0.0


def torchtitan(logits: torch.Tensor, labels: torch.Tensor) -> Results:
    """``cross_entropy_loss``, and ``compute_logprobs`` with its entropy."""
    labels = labels.where(labels % 7 > 0, -100)
    loss = F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(0, 1), reduction="sum", ignore_index=-100)
    logits = logits.float()
    b, s, v = logits.shape
    logprobs = -F.cross_entropy(
        logits.reshape(b * s, v), labels.reshape(b * s), reduction="none", ignore_index=-100
    ).reshape(b, s)
    with torch.no_grad():
        entropy = torch.logsumexp(logits, dim=-1) - (torch.softmax(logits, dim=-1) * logits).sum(dim=-1)
    return loss, logprobs, entropy


def near(got: list[torch.Tensor], want: list[torch.Tensor]) -> None:
    """As float32 sums in another order are, by norm."""
    for x, y in zip(got, want, strict=True):
        assert (x.shape, x.dtype) == (y.shape, y.dtype)
        assert (x - y).double().norm() <= 2e-6 * y.double().norm()


FRAMEWORKS = [verl, skyrl, nemo_rl, areal, torchtitan]


class Problem:
    """A head with hidden states and labels, and what a framework makes of its logits."""

    def __init__(self, dtype: torch.dtype = torch.float32, bias: bool = False) -> None:
        generator = torch.Generator().manual_seed(0)
        self.head = torch.nn.Linear(16, 64, bias=bias)
        for x in self.head.parameters():
            x.data = torch.randn(x.shape, generator=generator) / 2
        self.head.to(dtype)
        self.hidden = torch.randn(2, 7, 16, generator=generator).to(dtype).requires_grad_()
        self.labels = torch.randint(0, 64, (2, 7), generator=generator)

    def run(self, function: Callable[..., Results]) -> list[torch.Tensor]:
        """Results, and gradients of a sum of them with a weight for each number."""
        found = function(self.head(self.hidden), self.labels)
        if not torch.is_grad_enabled():
            return [*found]
        loss = sum((x * torch.linspace(-1, 1, x.numel()).reshape(x.shape)).sum() for x in found if x.requires_grad)
        return [*found, *torch.autograd.grad(loss, (self.hidden, *self.head.parameters()))]  # type: ignore[list-item]


@pytest.mark.parametrize("function", FRAMEWORKS)
def test_functions_of_frameworks_store_no_logits(function: Any) -> None:
    problem = Problem()
    want = problem.run(function)
    with defer_logits(problem.head, strict=True) as handle:
        got = problem.run(function)
    assert handle.served > 0
    near(got, want)


@pytest.mark.parametrize("function", [skyrl, nemo_rl])
def test_in_bfloat16(function: Any) -> None:
    """Not farther from float32 than stored logits are."""
    exact, problem = Problem(), Problem(torch.bfloat16)
    exact.head.weight.data, exact.hidden.data = problem.head.weight.data.float(), problem.hidden.data.float()
    wanted, stored = exact.run(function), problem.run(function)
    with defer_logits(problem.head, strict=True):
        got = problem.run(function)
    for x, y, want in zip(got, stored, wanted, strict=True):
        assert x.dtype == y.dtype
        assert (x.float() - want).norm() <= 1.1 * (y.float() - want).norm() + 1e-3 * want.norm()


@pytest.mark.parametrize("function", FRAMEWORKS)
def test_an_old_policy(function: Any) -> None:
    """Its log-probabilities want no gradient, and store no logits where all calls are deferred."""
    problem = Problem()
    with torch.no_grad():
        want = problem.run(function)
        with defer_logits(problem.head, strict=True, always=True) as handle:
            got = problem.run(function)
        assert handle.served > 0
        near(got, want)
        with defer_logits(problem.head, strict=True) as handle:
            assert type(problem.head(problem.hidden)) is torch.Tensor
        assert handle.served == 0


def test_a_compiled_function_of_deferred_logits() -> None:
    """It is called again with other logits: nothing of the first call is in its graph."""
    torch._dynamo.reset()
    compiled = torch.compile(gather_logprobs_entropy, backend="eager")
    for _ in range(3):
        problem = Problem()
        problem.head.weight.data *= 1 + torch.rand(())
        want = problem.run(gather_logprobs_entropy)
        with defer_logits(problem.head, strict=True):
            got = problem.run(compiled)
        near(got, want)


def test_extremes() -> None:
    """The largest with its gradient, the smallest, and both in one pass; of capped and scaled logits too."""
    problem = Problem(bias=True)

    def extremes(logits: torch.Tensor, _: Any) -> Results:
        capped = 5 * torch.tanh(logits / 5) / TEMPERATURE
        high, where_high = torch.max(capped, -1)
        low = logits.log_softmax(-1).min(dim=-1, keepdim=True)
        return high, low.values, where_high, low.indices, *capped.detach().aminmax(dim=-1)

    want = problem.run(extremes)
    with defer_logits(problem.head, strict=True):
        got = problem.run(extremes)
    near(got, want)


def halved(logits: torch.Tensor) -> Results:
    logits.mul_(0.5)
    logits /= 2
    return (logits,)


def halved_before_a_view(logits: torch.Tensor) -> Results:
    before = logits[:1]
    logits.mul_(0.5)
    return before, logits


def halved_after_a_copy(logits: torch.Tensor) -> Results:
    before = logits * 2
    logits.mul_(0.5)
    return before, logits


def halved_view(logits: torch.Tensor) -> Results:
    logits.squeeze(0).mul_(0.5)
    return (logits,)


def halved_cast(logits: torch.Tensor) -> Results:
    cast = logits.double()
    cast.mul_(0.5)
    return cast, logits


@pytest.mark.parametrize("write", [halved, halved_before_a_view, halved_after_a_copy, halved_view, halved_cast])
def test_factors_in_place(write: Any) -> None:
    """They are written down where no other tensor reads the memory; elsewhere each tensor has what stock's has."""
    problem = Problem()

    def results(logits: torch.Tensor, labels: torch.Tensor) -> Results:
        return tuple(
            x.log_softmax(-1).gather(-1, labels[: len(x), :, None]) + x.exp().sum(-1, keepdim=True)
            for x in write(logits)
        )

    def losses(logits: torch.Tensor, labels: torch.Tensor) -> Results:
        return tuple(F.cross_entropy(x.flatten(0, 1), labels[: len(x)].flatten()) for x in write(logits))

    for function in (results, losses):
        want = problem.run(function)
        with defer_logits(problem.head) as handle:
            got = problem.run(function)
        near(got, want)
    assert bool(handle.stored) == (write in (halved_before_a_view, halved_after_a_copy, halved_view))
    with torch.no_grad():
        want = problem.run(losses)
        with defer_logits(problem.head, always=True):
            got = problem.run(losses)
    near(got, want)


def test_a_factor_in_place_without_a_gradient() -> None:
    """Stock's gradient then misses the factor, and so does ours."""
    problem = Problem()

    def loss(logits: torch.Tensor, labels: torch.Tensor) -> Results:
        with torch.no_grad():
            logits.mul_(0.5)
        return (F.cross_entropy(logits.flatten(0, 1), labels.flatten()),)

    want = problem.run(loss)
    with defer_logits(problem.head):
        got = problem.run(loss)
    near(got, want)


class Exponential(torch.autograd.Function):
    """Someone's own."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        out = x.exp()
        ctx.save_for_backward(out)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return gradient * ctx.saved_tensors[0]


def test_a_gradient_from_elsewhere_has_the_factor_in_place() -> None:
    problem = Problem()

    def own(logits: torch.Tensor, _: Any) -> Results:
        logits.div_(2.0)
        return (Exponential.apply(logits),)  # type: ignore[no-untyped-call]

    want = problem.run(own)
    with defer_logits(problem.head):
        got = problem.run(own)
    near(got, want)
