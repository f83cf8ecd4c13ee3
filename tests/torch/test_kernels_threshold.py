"""``gradient_threshold`` by lists of kernels, on the CPU: each kernel by Pallas's interpreter."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from lce_jax import launch_lists
from lce_torch_bridge import launch_with, linear_logprobs, linear_loss
from lce_torch_bridge._types import Operands
from lce_torch_bridge.launched_directly import _backward, _forward
from lce_torch_bridge.launched_directly._way import way_of
from lce_torch_bridge.operators import _execute
from tests.torch import problem as p
from tests.torch.as_gpu import emulated
from tests.torch.ranks import Ranks

H, THRESHOLD = 128, 0.02
ROWS, COLUMNS = 128, 256  # of a tile


@pytest.fixture
def programs(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[launch_lists.LaunchList]]:
    """All programs that were loaded."""
    yield from emulated(monkeypatch)


def peaked(T: int, V: int, true: int) -> p.Problem:
    """Each row block's tokens have their large logits in a few tiles of their own."""
    drawn, t = p.draw(T, H, V, torch.bfloat16), torch.arange(T)
    favourite = (t // ROWS * COLUMNS + t * 7 % COLUMNS) % true
    hidden = 20 * drawn.weight[favourite].float() + 0.1 * drawn.hidden.float()
    weight = drawn.weight.clone()
    weight[true:] = torch.nan  # padding may hold anything
    return p.Problem(hidden.bfloat16(), weight, torch.where(t % 5 > 0, favourite, -100))


class Oracle:
    """Live tiles and gradients in float64."""

    def __init__(self, problem: p.Problem, true: int, temperature: torch.Tensor | None) -> None:
        hidden, weight = (x.detach().double().requires_grad_() for x in (problem.hidden, problem.weight[:true]))
        z = hidden @ weight.T / (1 if temperature is None else temperature[:, None].double())
        owned = problem.labels.clamp(min=0)[:, None]
        logprobs, known = z.log_softmax(1), problem.labels >= 0
        big = logprobs.detach().exp() >= THRESHOLD
        big |= torch.zeros_like(big).scatter_(1, owned, True) & known[:, None]
        tiles = range(0, len(problem.weight), COLUMNS)
        self.live = torch.tensor([[bool(x.any()) for x in big[:, tile : tile + COLUMNS].split(ROWS)] for tile in tiles])
        if true < len(problem.weight):
            self.live[true // COLUMNS] = True
        kept = self.live.T.repeat_interleave(ROWS, 0)[: len(z)].repeat_interleave(COLUMNS, 1)[:, :true]
        entropy = -(logprobs.exp() * logprobs).sum(1)
        lse = z.logsumexp(1)  # out of vocabulary, the gradient is that of -lse
        outputs = [torch.where(known, logprobs.gather(1, owned)[:, 0], lse.detach() - lse), entropy, lse]
        seeds = [x.double() for x in p.seeds_like(problem.labels)]
        dz = torch.autograd.grad(outputs, z, seeds, retain_graph=True)[0]
        self.gradients = torch.autograd.grad(z, (hidden, weight), dz * kept)


def both(problem: p.Problem, **options: Any) -> tuple[Any, Any]:
    """Results and gradients of a call."""
    leaves = problem.leaves()
    out = linear_logprobs(leaves.hidden, leaves.weight, problem.labels, **options)
    grads = torch.autograd.grad(out[:3], leaves[:2], p.seeds_like(problem.labels))
    return out, grads


@pytest.mark.parametrize(
    ("T", "V", "options"),
    [
        (150, 784, {"vocab_size": 700, "temperature": "each", "stats": True}),
        pytest.param(5, 784, {}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_live_tiles_alone(programs: list[Any], T: int, V: int, options: dict[str, Any]) -> None:
    true = options.get("vocab_size", V)
    problem, temperature = peaked(T, V, true), None
    if "temperature" in options:
        temperature = torch.rand(T, generator=torch.Generator().manual_seed(5)) + 0.5
        options = {**options, "temperature": temperature}
    out, grads = both(problem, gradient_threshold=THRESHOLD, **options)
    assert len(programs) == 2
    want = Oracle(problem, true, temperature)
    assert 0 < want.live.double().mean() < 1
    assert p.relative_norm(grads[0], want.gradients[0]) < 5e-3
    assert p.relative_norm(grads[1][:true], want.gradients[1]) < 5e-3
    assert not grads[1][true:].any()
    with torch.no_grad():
        without = linear_logprobs(problem.hidden, problem.weight, problem.labels, **options)
    assert all(torch.equal(x, y) for x, y in zip(out, without, strict=True) if x is not None)


def test_a_split_vocabulary(programs: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """The gradients of a whole one. A part's tiles begin where it does: here these are those of the whole."""
    T, V, true = 140, 1536, 1500
    problem, ranks = peaked(T, V, true), Ranks(monkeypatch)
    call = p.told(true, group="both", reduce_grad_hidden=True, gradient_threshold=THRESHOLD)
    parts = [Operands(problem.hidden, part, None, problem.labels, None, None) for part in problem.weight.chunk(2)]
    saved: dict[int, Any] = {}
    for ranks.rank in (0, 1, 0, 1):  # what the first two send, the last two receive
        *_, kept, live = _execute.forward(parts[ranks.rank], call, True, way_of(parts[ranks.rank].hidden))
        saved[ranks.rank] = kept, live
    assert len(programs) == 4  # a part and a merge on each rank
    seeds = dict(zip(("logprobs", "entropy", "lse"), p.seeds_like(problem.labels), strict=True))
    dweight = []
    for ranks.rank in (0, 1, 0, 1):
        kept, live = saved[ranks.rank]
        x = parts[ranks.rank]
        dhidden, part = _execute.gradients(
            x.hidden, x.weight, None, kept, [live], seeds, (True, True, False), call, way_of(kept)
        )
        dweight.append(part)
    want = Oracle(problem, true, None)
    live = torch.cat([saved[rank][1][:, :2] for rank in range(2)])
    assert torch.equal(live > 0, want.live)
    assert not live.all()
    assert p.relative_norm(dhidden, want.gradients[0]) < 5e-3
    assert p.relative_norm(torch.cat(dweight[2:])[:true], want.gradients[1]) < 5e-3


def test_main_grad(programs: list[Any]) -> None:
    """In two chunks; and one that lies otherwise, to which torch adds."""
    problem = peaked(140, 784, 784)

    def gradients(main_grad: torch.Tensor, **options: Any) -> list[torch.Tensor]:
        leaves: Any = problem.leaves()
        leaves.weight.main_grad = main_grad
        given = leaves.hidden, leaves.weight, problem.labels
        total, _ = linear_loss(
            lambda logprob, entropy, _: -logprob - entropy,
            *given,
            wgrad="main_grad",
            gradient_threshold=1e-6,
            **options,
        )
        total.backward()
        return [leaves.hidden.grad, leaves.weight.main_grad - 1]

    found = gradients(torch.ones(784, H), chunk_bytes=1 << 18)
    otherwise = gradients(torch.ones(H, 784).t())
    assert programs
    launch_with("jax")
    want = gradients(torch.ones(784, H), implementation="xla")
    assert max(map(p.relative_norm, found, want)) < 5e-3
    assert max(map(p.relative_norm, otherwise, want)) < 5e-3


def test_a_backward_goes_the_way_of_its_forward(programs: list[Any]) -> None:
    problem = peaked(5, 784, 784)
    leaves = problem.leaves()
    out = linear_logprobs(*leaves, gradient_threshold=THRESHOLD)
    assert programs
    launch_with("jax")
    with pytest.raises(RuntimeError, match="the forward was launched directly, so its backward must be too"):
        out.logprobs.sum().backward()


def test_a_backward_after_a_forward_of_jax(programs: list[Any]) -> None:
    """JAX runs it, whatever it kept: no kernel takes the tiles' maxima for which of them are live."""
    assert not _backward.are_live_tiles([torch.zeros(7, 1, 128)])
    assert _backward.are_live_tiles([torch.zeros(7, 128, dtype=torch.int32)])
    problem, dweight = peaked(5, 784, 784), []
    for way in ("jax", None):
        leaves = problem.leaves()
        launch_with("jax")
        out = linear_logprobs(*leaves, gradient_threshold=THRESHOLD)
        launch_with(way)
        dweight += torch.autograd.grad(out.logprobs.sum(), leaves.weight)
    assert torch.equal(*dweight)
    assert not programs


def test_what_a_forward_keeps_is_foreseen(programs: list[Any]) -> None:
    """For ``torch.compile``, which asks for the shapes before there is anything."""
    problem, call = peaked(5, 784, 784), p.told(784, gradient_threshold=THRESHOLD)
    x = Operands(problem.hidden, problem.weight, None, problem.labels, None, None)
    found, told = _execute.forward(x, call, True, way_of(x.hidden)), _execute.forward_structs(x, call, True)
    assert programs
    assert [(x.shape, x.dtype) for x in found] == [(x.shape, x.dtype) for x in told]
    assert _forward.live_shape(x, p.told(784), way_of(x.hidden)) is None
