"""``gradient_threshold`` launched directly, on the CPU: each kernel by Pallas's interpreter."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lce_torch_bridge import launch_with, linear_logprobs
from lce_torch_bridge.launched_directly._launch_with import choose_way
from lce_torch_bridge.operators import _operators
from tests.torch import problem as p
from tests.torch import test_kernels as of_kernels
from tests.torch.as_gpu import Ranks

programs, THRESHOLD = of_kernels.programs, 0.02
ROWS, COLUMNS = 128, 256  # of a tile


def peaked(T: int, V: int, true: int) -> p.Problem:
    """Each row block's tokens have their large logits in a few tiles of their own."""
    drawn, t = p.draw(T, of_kernels.H, V, torch.bfloat16), torch.arange(T)
    favourite = (t // ROWS * COLUMNS + t * 7 % COLUMNS) % true
    hidden = 20 * drawn.weight[favourite].float() + 0.1 * drawn.hidden.float()
    weight = drawn.weight.clone()
    weight[true:] = torch.nan  # padding may hold anything
    return p.Problem(hidden.bfloat16(), weight, torch.where(t % 5 > 0, favourite, -100))


class Oracle:
    """Live tiles and gradients in float64."""

    def __init__(
        self,
        problem: p.Problem,
        true: int,
        temperature: torch.Tensor | None = None,
        candidates: torch.Tensor | None = None,
        logit_floor: torch.Tensor | None = None,
    ) -> None:
        hidden, weight = (x.detach().double().requires_grad_() for x in (problem.hidden, problem.weight[:true]))
        z = hidden @ weight.T / (1 if temperature is None else temperature[:, None].double())
        owned = problem.labels.clamp(min=0)[:, None]
        known, inside = problem.labels >= 0, torch.ones_like(z, dtype=torch.bool)
        label = torch.zeros_like(inside).scatter_(1, owned, True) & known[:, None]
        if logit_floor is not None:
            inside = (z >= logit_floor[:, None]) | label
            z = z.where(inside, -1e30)
        counts = inside.any(1, keepdim=True)  # else the row is 0 in everything
        logprobs = z.log_softmax(1)
        big = (logprobs.detach().exp() >= THRESHOLD) & counts | label
        seeds = [x.double() for x in p.seeds_like(problem.labels, K=0 if candidates is None else candidates.shape[1])]
        of_candidates = []
        if candidates is not None:
            there = (candidates >= 0) & (candidates < true)
            columns = torch.where(there, candidates, 0)
            of_candidates = [logprobs.gather(1, columns).where(there, 0.0)]
            for column, is_there in zip(columns.T, there.T, strict=True):
                big |= torch.zeros_like(big).scatter_(1, column[:, None], True) & is_there[:, None]
        tiles = range(0, len(problem.weight), COLUMNS)
        live = torch.tensor([[bool(x.any()) for x in big[:, tile : tile + COLUMNS].split(ROWS)] for tile in tiles])
        if true < len(problem.weight):
            live[true // COLUMNS] = True
        self.live = live.to(z.device)
        kept = self.live.T.repeat_interleave(ROWS, 0)[: len(z)].repeat_interleave(COLUMNS, 1)[:, :true]
        entropy = -(logprobs.exp() * logprobs).sum(1)
        lse = z.logsumexp(1)  # out of vocabulary, the gradient is that of -lse
        outputs = [torch.where(known, logprobs.gather(1, owned)[:, 0], lse.detach() - lse), entropy, lse]
        outputs += of_candidates
        dz = torch.autograd.grad(outputs, z, seeds, retain_graph=True)[0]
        self.gradients = torch.autograd.grad(z, (hidden, weight), dz * (kept & counts))


def in_few_tiles(problem: p.Problem, true: int, K: int) -> torch.Tensor:
    """Candidates where the labels are, and none, and one in a tile that holds nothing else of its row block."""
    generator = torch.Generator().manual_seed(4)
    drawn = torch.rand((len(problem.labels), K), generator=generator).to(problem.labels.device)
    ids = torch.where(drawn < 0.5, problem.labels[:, None], -1)
    ids[20, 1], ids[21, 0], ids[22, 0], ids[23, 0] = 2 * COLUMNS + 5, true, true - 1, 2**32 + 3
    return ids


def floor_of(problem: p.Problem, true: int, temperature: torch.Tensor | None) -> torch.Tensor:
    """Where two of the largest logits are furthest apart, so that no rounding moves one over it."""
    hidden, weight = problem.hidden.double(), problem.weight[:true].double()
    z = (hidden @ weight.T / (1 if temperature is None else temperature[:, None])).sort(1, descending=True)[0][:, 3:40]
    place = (z[:, :-1] - z[:, 1:]).argmax(1, keepdim=True)
    floor = (z.gather(1, place) + z.gather(1, place + 1))[:, 0] / 2
    floor[[0, 1, 5]] = floor.new_tensor([torch.inf, torch.inf, -torch.inf])  # no token is left of the first, one is
    return floor.float()


def drawn_options(problem: p.Problem, true: int, options: dict[str, Any]) -> dict[str, Any]:
    """``options`` with what they have of each token, by names of its own."""
    temperature, device = None, problem.hidden.device
    if "temperature" in options:
        temperature = torch.rand(len(problem.labels), generator=torch.Generator().manual_seed(5)).to(device) + 0.5
        options = {**options, "temperature": temperature}
    if "candidates" in options:
        options = {**options, "candidates": in_few_tiles(problem, true, options["candidates"])}
    if "logit_floor" in options:
        options = {**options, "logit_floor": floor_of(problem, true, temperature)}
    return options


def oracle(problem: p.Problem, true: int, options: dict[str, Any]) -> Oracle:
    given = {name: options[name] for name in ("temperature", "candidates", "logit_floor") if name in options}
    return Oracle(problem, true, **given)


OPTIONS: list[Any] = [
    pytest.param({"vocab_size": 700, "temperature": "each", "stats": True}, marks=pytest.mark.slow),
    {"vocab_size": 700, "temperature": "each", "logit_floor": "each", "stats": True},
    pytest.param({"vocab_size": 700, "temperature": "each", "candidates": 9}, marks=pytest.mark.slow),
]


def check(problem: p.Problem, **options: Any) -> Any:
    """The gradients of live tiles alone, twice the same; and the results of a call without a threshold."""
    true = options.get("vocab_size", len(problem.weight))
    options = drawn_options(problem, true, options)
    want = oracle(problem, true, options)
    assert 0 < want.live.double().mean() < 1
    seeds = p.seeds_like(problem.labels, K=options["candidates"].shape[1] if "candidates" in options else 0)
    out, grads = p.gradients(problem, seeds, gradient_threshold=THRESHOLD, **options)
    assert p.relative_norm(grads[0], want.gradients[0]) < 5e-3
    assert p.relative_norm(grads[1][:true], want.gradients[1]) < 5e-3
    assert not grads[1][true:].any()
    with torch.no_grad():
        without = linear_logprobs(problem.hidden, problem.weight, problem.labels, **options)
    assert all(torch.equal(x, y) for x, y in zip(out, without, strict=True) if x is not None)
    return grads


@pytest.mark.slow
@pytest.mark.parametrize("options", [*OPTIONS, pytest.param({}, marks=pytest.mark.slow)], ids=str)
def test_live_tiles_alone(programs: list[Any], options: dict[str, Any]) -> None:
    V = 784
    check(peaked(150 if options else 5, V, options.get("vocab_size", V)), **options)
    assert programs


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "options", [{"logit_floor": "each"}, pytest.param({"candidates": 3}, marks=pytest.mark.slow)], ids=str
)
def test_a_split_vocabulary(
    programs: list[Any], options: dict[str, Any], size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The gradients of a whole one. A part's tiles begin where it does: here these are those of the whole."""
    T, V, true = 140, 512 * size, 512 * size - 36
    problem, ranks = peaked(T, V, true), Ranks(monkeypatch, size)
    given = drawn_options(problem, true, options)
    ids, floor = given.get("candidates"), given.get("logit_floor")
    K = 0 if ids is None else ids.shape[1]
    call = p.told(
        true, group="all", reduce_grad_hidden=True, gradient_threshold=THRESHOLD, num_candidates=K,
        has_floor=floor is not None,
    )  # fmt: skip
    parts = of_kernels.parts_of(problem, size, candidates=ids, floor=floor)
    saved: dict[int, Any] = {}
    turns = [*range(size), *range(size)]  # what is sent in the first round is received in the second
    for ranks.rank in turns:
        *_, kept, live = of_kernels.forward(parts[ranks.rank], call, keep=True)
        saved[ranks.rank] = kept, live
    assert programs
    seeds = dict(zip(call.differentiable, p.seeds_like(problem.labels, K=K), strict=True))
    dweight = []
    for ranks.rank in turns:
        kept, live = saved[ranks.rank]
        x = parts[ranks.rank]
        dhidden, part = _operators.run_backward(x, [kept, live], seeds, (True, True, False), call, choose_way(kept))
        dweight.append(part)
    want = oracle(problem, true, given)
    live = torch.cat([saved[rank][1][:, :2] for rank in range(size)])
    assert torch.equal(live > 0, want.live)
    assert not live.all()
    assert p.relative_norm(dhidden, want.gradients[0]) < 5e-3
    assert p.relative_norm(torch.cat(dweight[size:])[:true], want.gradients[1]) < 5e-3


def test_a_backward_goes_the_way_of_its_forward(programs: list[Any]) -> None:
    problem = peaked(5, 784, 784)
    leaves = problem.leaves()
    out = linear_logprobs(*leaves, gradient_threshold=THRESHOLD)
    assert programs
    launch_with("jax")
    with pytest.raises(RuntimeError, match="launched directly"):
        out.logprobs.sum().backward()


def test_a_backward_after_a_forward_of_jax(programs: list[Any]) -> None:
    """JAX runs it, whatever it kept: no kernel takes the tiles' maxima for which of them are live."""
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
    x = of_kernels.tensors(problem)
    found, told = of_kernels.forward(x, call, keep=True), _operators.make_empty_results(x, call, True)
    assert programs
    assert [(x.shape, x.dtype) for x in found] == [(x.shape, x.dtype) for x in told]
