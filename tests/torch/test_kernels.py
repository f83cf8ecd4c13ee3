"""Calls that are launched directly, on the CPU: each kernel by Pallas's interpreter."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from lce_jax import UnsupportedError
from lce_torch_bridge import launch_with, linear_logprobs, linear_loss
from lce_torch_bridge._types import Tensors
from lce_torch_bridge.launched_directly._passes import refusal
from lce_torch_bridge.launched_directly._way import way_of
from lce_torch_bridge.operators import _execute
from lce_torch_bridge.tensors import _device
from tests.torch import problem as p
from tests.torch import sanitized
from tests.torch.as_gpu import SMALL, Program, emulated
from tests.torch.ranks import Ranks

H = 128


@pytest.fixture
def programs(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Program]]:
    """All programs that were loaded."""
    yield from emulated(monkeypatch)


def both(problem: p.Problem, **options: Any) -> tuple[Any, Any]:
    """Results and gradients of a call."""
    leaves = problem.leaves()
    out = linear_logprobs(leaves.hidden, leaves.weight, problem.labels, **options)
    fields = [x for x in out[:3] if x is not None]
    grads = torch.autograd.grad(fields, leaves[:2], p.seeds_like(problem.labels)[: len(fields)])
    return [x.detach() for x in out if x is not None], grads


def check(programs: list[Any], problem: p.Problem, **options: Any) -> None:
    found, grads = both(problem, **options)
    assert len(programs) == 2  # a forward and a backward
    launch_with("jax")
    wanted, of_jax = both(problem, **{**options, "cache_bytes": 0}, implementation="xla")
    assert max(map(p.value_error, found, wanted)) < 2e-5
    assert max(map(p.relative_norm, grads, of_jax)) < 5e-3  # bfloat16 rounds by 2⁻⁹


@pytest.mark.parametrize(
    ("T", "V", "options"),
    [
        (140, 784, {"stats": True, "temperature": "each", "logit_softcap": 3.0, "logit_scale": 0.5}),
        (5, 1032, {"vocab_size": 700, "cache_bytes": 1 << 18}),
        pytest.param(140, 784, {"vocab_size": 700, "vocab_part_size": 264}, marks=pytest.mark.slow),
        pytest.param(128, 1024, {"entropy": False}, marks=pytest.mark.slow),
        pytest.param(200, 784, {"cache_bytes": 1 << 40, "out_of_vocab": "megatron"}, marks=pytest.mark.slow),
    ],
)
def test_results_and_gradients(programs: list[Any], T: int, V: int, options: dict[str, Any]) -> None:
    drawn = p.draw(T, H, V, torch.bfloat16)
    labels = drawn.labels % options.get("vocab_size", V)
    labels[::7], labels[3], labels[4] = -100, 2**32 + 3, V
    if options.get("temperature") == "each":
        options = {**options, "temperature": torch.rand(T, generator=torch.Generator().manual_seed(5)) + 0.5}
    check(programs, drawn._replace(labels=labels), **options)


def test_few_tokens(programs: list[Any]) -> None:
    """Results may be written in place, and what is saved may come back in another layout, beside it NaN."""
    problem = p.draw(5, H, 784, torch.bfloat16)

    def moved(x: torch.Tensor) -> torch.Tensor:
        return x.clone(memory_format=torch.contiguous_format)

    with torch.autograd.graph.saved_tensors_hooks(moved, moved):
        check(programs, problem)
    launch_with("direct")
    with torch.no_grad():
        out = linear_logprobs(problem.hidden, problem.weight, problem.labels)
    assert out.logprobs.mul_(2).is_contiguous()


def test_rows_have_the_same_bits_in_every_call(programs: list[Any]) -> None:
    """However many there are, and in whatever place."""
    problem = p.draw(150, H, 784, torch.bfloat16)
    with torch.no_grad():
        every = linear_logprobs(problem.hidden, problem.weight, problem.labels)[:3]
        rows = torch.randperm(150, generator=torch.Generator().manual_seed(0))[:7]
        some = linear_logprobs(problem.hidden[rows], problem.weight, problem.labels[rows])[:3]
    assert len(programs) == 2
    assert programs[0] != programs[1]  # of 512 and of 128 rows
    assert all(torch.equal(x[rows], y) for x, y in zip(every, some, strict=True) if x is not None)


def test_linear_loss_and_main_grad(programs: list[Any]) -> None:
    """In two chunks, whose dweight is added up in float32."""
    problem = p.draw(140, H, 784, torch.bfloat16)

    def gradients(**options: Any) -> list[torch.Tensor]:
        leaves: Any = problem.leaves()
        leaves.weight.main_grad = torch.ones(leaves.weight.shape)
        given = leaves.hidden, leaves.weight, problem.labels
        total, _ = linear_loss(lambda logprob, entropy, _: -logprob - entropy, *given, wgrad="main_grad", **options)
        total.backward()
        return [leaves.hidden.grad, leaves.weight.main_grad - 1]

    found = gradients(chunk_bytes=1 << 18)
    assert programs
    launch_with("jax")
    assert max(map(p.relative_norm, found, gradients(implementation="xla"))) < 5e-3


def test_a_split_vocabulary(programs: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """The results of a whole one, the same bits on both ranks; NaN where a part has another size."""
    T, V = 140, 1040
    problem, ranks = p.draw(T, H, V, torch.bfloat16), Ranks(monkeypatch)
    call = p.told(V, group="both", reduce_grad_hidden=True, implementation="mosaic_gpu")
    operands = [Tensors(problem.hidden, part, None, problem.labels, None, None) for part in problem.weight.chunk(2)]

    def on_both() -> list[list[torch.Tensor]]:
        found = []
        for ranks.rank in (0, 1, 0, 1):  # what the first two send, the last two receive
            found.append(_execute.forward(operands[ranks.rank], call, False, way_of(operands[ranks.rank].hidden)))
        return found[2:]

    first, second = on_both()
    assert len(programs) == 2  # one on each rank
    assert all(torch.equal(x, y) for x, y in zip(first[:3], second[:3], strict=True))
    launch_with("jax")
    with torch.no_grad():
        wanted = linear_logprobs(problem.hidden, problem.weight, problem.labels, implementation="xla")
    assert max(map(p.value_error, first[:3], wanted[:3])) < 2e-5
    launch_with("direct")
    smaller = Tensors(problem.hidden, problem.weight[:512], None, problem.labels, None, None)
    ranks.rank = 1
    ranks.gathered.clear()
    _execute.forward(smaller, call, False, way_of(problem.hidden))
    ranks.rank = 0
    assert all(x.isnan().all() for x in _execute.forward(operands[0], call, False, way_of(problem.hidden))[:3])


def test_shards_of_whole_groups_of_tiles(programs: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """The same bits as a whole vocabulary, padding included."""
    T, V, vocab_size = 9, 2 * 4096, 2 * 4096 - 300
    problem = p.draw(T, H, V, torch.bfloat16)
    with torch.no_grad():
        whole = linear_logprobs(problem.hidden, problem.weight, problem.labels, vocab_size=vocab_size)[:3]
    ranks = Ranks(monkeypatch)
    call = p.told(V, group="both", implementation="mosaic_gpu")._replace(vocab_size=vocab_size)
    parts = [Tensors(problem.hidden, part, None, problem.labels, None, None) for part in problem.weight.chunk(2)]
    for ranks.rank in (0, 1, 0):  # what the first two send, the last one receives
        found = _execute.forward(parts[ranks.rank], call, False, way_of(parts[ranks.rank].hidden))[:3]
    assert len(programs) == 1 + 2  # the whole, and one on each rank
    assert all(map(torch.equal, found, whole))


def test_shards_of_whole_parts(programs: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """The same bits as a whole vocabulary, which ends inside a part; one rank has padding."""
    T, V, vocab_size, part = 9, 4 * 264, 904, 264
    problem = p.draw(T, H, V, torch.bfloat16)
    labels = torch.tensor([0, part - 1, part, 256, 3 * part - 1, 3 * part, vocab_size - 1, -100, 255])
    ids = torch.randint(0, vocab_size, (T, 3), generator=torch.Generator().manual_seed(0))
    options: Any = {"vocab_part_size": part, "stats": True}
    with torch.no_grad():
        whole = linear_logprobs(problem.hidden, problem.weight[:vocab_size], labels, candidates=ids, **options)
    ranks = Ranks(monkeypatch)
    call = p.told(V, group="both", implementation="mosaic_gpu", num_candidates=3, **options)
    call = call._replace(vocab_size=vocab_size)
    parts = [Tensors(problem.hidden, part, None, labels, None, ids) for part in problem.weight.chunk(2)]
    for ranks.rank in (0, 1, 0):  # what the first two send, the last one receives
        found = _execute.forward(parts[ranks.rank], call, False, way_of(parts[ranks.rank].hidden))
    assert len(programs) == 1 + 2  # the whole, and one on each rank
    assert all(torch.equal(x, getattr(whole, name)) for name, x in zip(call.fields, found, strict=False))


@pytest.mark.parametrize("options", [{"cache_bytes": 1 << 30}, {"gradient_threshold": 1e-6}], ids=str)
def test_a_main_grad_that_lies_otherwise(programs: list[Any], options: dict[str, Any]) -> None:
    """Kernels return what torch adds to it, rounded once. JAX, which may not run, would not know what they kept."""
    problem = p.draw(5, H, 784, torch.bfloat16)
    _, (want, dweight) = both(problem, **options)
    for main_grad in (torch.zeros(H, 784).t(), torch.zeros(784 * H + 1)[1:].view(784, H)):
        hidden, weight = problem.hidden.clone().requires_grad_(), torch.nn.Parameter(problem.weight.clone())
        weight.main_grad = main_grad  # type: ignore[attr-defined]
        out = linear_logprobs(hidden, weight, problem.labels, wgrad="main_grad", **options)
        p.objective(out, p.seeds_like(problem.labels)).backward()
        assert torch.equal(hidden.grad, want)
        assert torch.equal(main_grad, dweight.float())
    assert len(programs) == 2


@pytest.mark.usefixtures("programs")
def test_a_backward_after_a_forward_of_jax_is_refused_if_it_must_be_direct() -> None:
    leaves = p.draw(5, H, 784, torch.bfloat16).leaves()
    launch_with("jax")
    total = linear_logprobs(*leaves, bias=torch.zeros(784)).logprobs.sum()
    launch_with("direct")
    advice = r'launch_with\("direct"\): JAX ran the forward; lce_torch_bridge.launch_with\(None\) lets JAX run'
    with pytest.raises(UnsupportedError, match=advice):
        torch.autograd.grad(total, leaves[:2], retain_graph=True)
    launch_with(None)
    found = torch.autograd.grad(total, leaves[:2])
    wanted = torch.autograd.grad(linear_logprobs(*leaves, bias=torch.zeros(784)).logprobs.sum(), leaves[:2])
    assert all(map(torch.equal, found, wanted))


def test_what_no_list_serves_goes_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_device, "why_not", lambda _: None)
    monkeypatch.setattr(_device, "device_of", lambda _: SMALL)
    problem = p.draw(4, H, 784, torch.bfloat16)
    x = Tensors(problem.hidden, problem.weight, None, problem.labels, None, None)
    assert refusal(x, p.told(784)) is None
    assert "bias" in str(refusal(x._replace(bias=torch.zeros(784)), p.told(784)))
    assert refusal(x, p.told(784, num_candidates=2)) is None  # as a backward asks
    assert "implementation='xla'" in str(refusal(x, p.told(784, implementation="xla")))


@pytest.mark.usefixtures("programs")
@pytest.mark.parametrize(
    "part",
    [pytest.param(part, marks=pytest.mark.slow if part != "forward" else ()) for part in (*sanitized.PARTS, "loss")],
)
def test_memory_may_hold_anything(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What compute-sanitizer watches on a GPU, in the interpreter: the same bits over zeros and over NaN."""
    monkeypatch.setattr(sanitized, "DEVICE", "cpu")
    _, checked = next(sanitized.checks([part]))
    sanitized.filled(checked)
