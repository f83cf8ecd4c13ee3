"""Calls that are launched directly, on the CPU: each kernel by Pallas's interpreter."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from lce_jax import UnsupportedError
from lce_torch_bridge import launch_with, linear_logprobs, linear_loss
from lce_torch_bridge._types import Tensors
from lce_torch_bridge.call import _checks
from lce_torch_bridge.launched_directly import _passes
from lce_torch_bridge.launched_directly._launch_with import choose_way
from lce_torch_bridge.operators import _operators
from tests.torch import problem as p
from tests.torch import sanitized
from tests.torch.as_gpu import Program, Ranks, emulated

H = 128


@pytest.fixture
def programs(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Program]]:
    """All programs that were loaded."""
    yield from emulated(monkeypatch)


def tensors(problem: p.Problem, weight: torch.Tensor | None = None, **given: torch.Tensor) -> Tensors:
    weight = problem.weight if weight is None else weight
    return Tensors(problem.hidden, weight, None, problem.labels, None, None)._replace(**given)


def parts_of(problem: p.Problem, size: int = 2, **given: torch.Tensor) -> list[Tensors]:
    """What each rank has of a split vocabulary."""
    return [tensors(problem, part, **given) for part in problem.weight.chunk(size)]


def forward(x: Tensors, call: Any, keep: bool = False) -> list[torch.Tensor]:
    return _operators.run_forward(x, call, keep, choose_way(x.hidden))


def of_results(problem: p.Problem, seeds: list[torch.Tensor], **options: Any) -> tuple[Any, Any]:
    """The results that are there, and the gradients."""
    out, grads = p.gradients(problem, seeds, **options)
    return [x.detach() for x in out if x is not None], grads


def check(programs: list[Any], problem: p.Problem, **options: Any) -> None:
    """Results and gradients are those of XLA's implementation."""
    seeds = p.seeds_like(problem.labels, K=options["candidates"].shape[1] if "candidates" in options else 0)
    found, grads = of_results(problem, seeds, **options)
    names = {kernel.name for program in programs for kernel in program}
    assert names
    assert "cached_dlogits" in names or "cache_bytes" not in options
    launch_with("jax")
    wanted, of_xla = of_results(problem, seeds, **{**options, "cache_bytes": 0}, implementation="xla")
    launch_with("direct")
    assert max(map(p.value_error, found, wanted)) < 2e-5
    assert max(map(p.relative_norm, grads, of_xla)) < 5e-3  # bfloat16 rounds by 2⁻⁹


EVERYTHING: Any = {"stats": True, "temperature": "each", "logit_softcap": 3.0, "logit_scale": 0.5}


def slow(*case: Any) -> Any:
    """What others have together with more."""
    return pytest.param(*case, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("T", "V", "K", "options"),
    [
        (9, 520, 5, EVERYTHING | {"vocab_size": 500, "cache_bytes": 1 << 17}),  # one of two tiles
        slow(5, 1032, 0, {"vocab_size": 700, "cache_bytes": 1 << 18}),
        slow(140, 784, 0, EVERYTHING),
        slow(140, 784, 0, {"vocab_size": 700, "vocab_part_size": 264}),
        slow(128, 1024, 0, {"entropy": False}),
        slow(200, 784, 0, {"cache_bytes": 1 << 40, "out_of_vocab": "megatron"}),
        slow(130, 784, 9, EVERYTHING | {"cache_bytes": 1 << 19}),
        slow(130, 784, 9, EVERYTHING),
        slow(5, 1032, 1, {"vocab_size": 700, "cache_bytes": 1 << 18}),
        slow(12, 784, 64, {"where": "some"}),
        slow(128, 784, 17, {"entropy": False, "cache_bytes": 1 << 40}),
    ],
)
def test_results_and_gradients(programs: list[Any], T: int, V: int, K: int, options: dict[str, Any]) -> None:
    drawn, generator = p.draw(T, H, V, torch.bfloat16), torch.Generator().manual_seed(5)
    labels = drawn.labels % options.get("vocab_size", V)
    drawn.weight[options.get("vocab_size", V) :] = torch.nan  # padding may hold anything
    labels[::7], labels[3], labels[4] = -100, 2**32 + 3, V
    if options.get("temperature") == "each":
        options = {**options, "temperature": torch.rand(T, generator=generator) + 0.5}
    if options.get("where") == "some":
        options = {**options, "where": torch.rand(T, generator=generator) < 0.6}
    if K:
        options = {**options, "candidates": p.candidates_like(labels, K, options.get("vocab_size", V))}
    check(programs, drawn._replace(labels=labels), **options)


@pytest.mark.slow
def test_few_tokens(programs: list[Any]) -> None:
    """Results may be written in place, and what is saved may come back in another layout, beside it NaN."""
    problem = p.draw(5, H, 784, torch.bfloat16)

    def moved(x: torch.Tensor) -> torch.Tensor:
        return x.clone(memory_format=torch.contiguous_format)

    with torch.autograd.graph.saved_tensors_hooks(moved, moved):
        check(programs, problem)
    with torch.no_grad():
        out = linear_logprobs(*problem)
    assert out.logprobs.mul_(2).is_contiguous()


def test_rows_have_the_same_bits_in_every_call(programs: list[Any]) -> None:
    """However many there are, and in whatever place."""
    problem = p.draw(150, H, 784, torch.bfloat16)
    with torch.no_grad():
        every = linear_logprobs(*problem)[:3]
        rows = torch.randperm(150, generator=torch.Generator().manual_seed(0))[:7]
        some = linear_logprobs(problem.hidden[rows], problem.weight, problem.labels[rows])[:3]
    assert programs[0] != programs[1]  # of 512 and of 128 rows
    assert all(torch.equal(x[rows], y) for x, y in zip(every, some, strict=True) if x is not None)


@pytest.mark.parametrize("options", [slow({}), {"gradient_threshold": 1e-6}], ids=str)
def test_linear_loss_and_main_grad(programs: list[Any], options: dict[str, Any]) -> None:
    """In two chunks, whose dweight is added up in float32."""
    problem = p.draw(140, H, 784, torch.bfloat16)

    def gradients(**told: Any) -> list[torch.Tensor]:
        leaves: Any = problem.leaves()
        leaves.weight.main_grad = torch.ones(leaves.weight.shape)
        total, _ = linear_loss(lambda x, entropy, _: -x - entropy, *leaves, wgrad="main_grad", **options, **told)
        total.backward()
        return [leaves.hidden.grad, leaves.weight.main_grad - 1]

    found = gradients(chunk_bytes=1 << 18)
    assert programs
    launch_with("jax")
    assert max(map(p.relative_norm, found, gradients(implementation="xla"))) < 5e-3


@pytest.mark.parametrize("to", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("factor", [1.0, 0.3])
def test_a_gradient_is_scaled_where_it_lies(programs: list[Any], factor: float, to: torch.dtype) -> None:
    """Once, from float32 too; and a gradient of a loss takes that kernel."""
    x, by = torch.randn(96, 128, generator=torch.Generator().manual_seed(0)), torch.tensor([factor])
    want = (x.to(to).float() * by).to(to)
    for given, in_place, wanted in (
        (x.to(to, copy=True), True, want),
        (x.to(to), False, want),
        (x, False, (x * by).to(to)),
    ):
        memory = given.data_ptr()
        found = _passes.scale(given, by, to, in_place)
        assert found is not None
        assert torch.equal(found, wanted)
        assert (found.data_ptr() == memory) == in_place
    assert programs


@pytest.mark.slow
@pytest.mark.parametrize("options", [slow({"cache_bytes": 1 << 30}), {"gradient_threshold": 1e-6}], ids=str)
def test_a_main_grad_that_lies_otherwise(programs: list[Any], options: dict[str, Any]) -> None:
    """Kernels return what torch adds to it, rounded once. JAX, which may not run, would not know what they kept."""
    problem = p.draw(5, H, 784, torch.bfloat16)
    _, (want, dweight) = p.gradients(problem, p.seeds_like(problem.labels), **options)
    for main_grad in (torch.zeros(H, 784).t(), torch.zeros(784 * H + 1)[1:].view(784, H)):
        hidden, weight = problem.hidden.clone().requires_grad_(), torch.nn.Parameter(problem.weight.clone())
        weight.main_grad = main_grad  # type: ignore[attr-defined]
        out = linear_logprobs(hidden, weight, problem.labels, wgrad="main_grad", **options)
        p.objective(out, p.seeds_like(problem.labels)).backward()
        assert torch.equal(hidden.grad, want)
        assert torch.equal(main_grad, dweight.float())
    assert programs


def test_a_split_vocabulary(programs: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """The results and gradients of a whole one, the same bits on both ranks; NaN in the rows that differ.

    All is NaN where a part has another size.
    """
    T, V, K = 20, 528, 5
    problem, ranks = p.draw(T, H, V, torch.bfloat16), Ranks(monkeypatch)
    ids, seeds = p.candidates_like(problem.labels, K, V - 8), p.seeds_like(problem.labels, K=K)
    call = p.told(V - 8, group="both", num_candidates=K, reduce_grad_hidden=True, requested=("mosaic_gpu",))
    named, operands = dict(zip(call.differentiable, seeds, strict=True)), parts_of(problem, candidates=ids)

    def on_both() -> list[list[torch.Tensor]]:
        found = []
        for step, ranks.rank in enumerate((0, 1, 0)):  # each receives what was sent before: the first has no part
            x = operands[ranks.rank]
            *out, saved = forward(x, call)
            if step:
                found.append(
                    [*out, *_operators.run_backward(x, [saved], named, (True, True, False), call, choose_way(saved))]
                )
        return found

    second, first = on_both()
    assert programs
    assert all(map(torch.equal, first[:4], second[:4]))
    launch_with("jax")
    options = {"vocab_size": V - 8, "candidates": ids, "implementation": "xla"}
    wanted, of_xla = p.gradients(problem, seeds, **options)
    assert max(map(p.value_error, first[:4], (*wanted[:3], wanted.candidate_logprobs))) < 2e-5
    dweight = torch.cat([first[5], second[5]])
    assert max(map(p.relative_norm, (first[4], dweight), of_xla)) < 5e-3
    launch_with("direct")
    labels, other = problem.labels.clone(), ids.clone()
    labels[2], other[4, 1] = -100, (other[4, 1] + 1).clamp(min=0)
    operands[1] = operands[1]._replace(labels=labels, candidates=other)
    ranks.gathered.clear()
    for ranks.rank in (0, 1, 0):
        *by_row, _ = forward(operands[ranks.rank], call)
    assert all(set(x.isnan().reshape(T, -1).any(1).nonzero()[:, 0].tolist()) == {2, 4} for x in by_row)
    ranks.gathered.clear()
    for ranks.rank, x in ((1, tensors(problem, problem.weight[:256], candidates=ids)), (0, operands[0])):
        found = forward(x, call)
    assert all(x.isnan().all() for x in found[:3])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("V", "vocab_size", "options"),
    [(2 * 4096, 2 * 4096 - 300, {}), (4 * 264, 904, {"vocab_part_size": 264, "stats": True, "num_candidates": 3})],
    ids=["groups of tiles", "parts"],
)
def test_shards_of_whole(
    V: int, vocab_size: int, options: dict[str, Any], programs: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same bits as a whole vocabulary, padding included; the last part may be cut."""
    labels = torch.tensor([0, 263, 264, 256, 3 * 264 - 1, 3 * 264, vocab_size - 1, -100, 255])
    problem, told = p.draw(9, H, V, torch.bfloat16)._replace(labels=labels), dict(options)
    given: Any = {}
    if told.pop("num_candidates", 0):
        given = {"candidates": torch.randint(0, vocab_size, (9, 3), generator=torch.Generator().manual_seed(0))}
    with torch.no_grad():
        weight = problem.weight[: vocab_size if "vocab_part_size" in options else V]
        whole = linear_logprobs(problem.hidden, weight, labels, vocab_size=vocab_size, **told, **given)
    ranks = Ranks(monkeypatch)
    call = p.told(vocab_size, group="both", requested=("mosaic_gpu",), **options)
    parts = parts_of(problem, **given)
    for ranks.rank in (0, 1, 0):  # what the first two send, the last one receives
        found = forward(parts[ranks.rank], call)
    assert programs
    assert all(torch.equal(x, getattr(whole, name)) for name, x in zip(call.fields, found, strict=False))


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


@pytest.mark.slow
@pytest.mark.usefixtures("programs")
@pytest.mark.parametrize(
    "part", [slow(part) if part != "forward" else part for part in (*sanitized.PARTS, "loss", *sanitized.DIVERGENCES)]
)
def test_memory_may_hold_anything(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What compute-sanitizer watches on a GPU, in the interpreter: the same bits over zeros and over NaN."""
    monkeypatch.setattr(sanitized, "DEVICE", "cpu")
    _, checked = next(sanitized.checks([part]))
    sanitized.filled(checked)


@pytest.mark.slow
def test_a_wrong_temperature(programs: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """NaN in its row, and no gradient from it. On a GPU nobody looks at the values."""
    monkeypatch.setattr(_checks, "can_read_values", lambda _: False)
    problem = p.draw(6, H, 784, torch.bfloat16)
    ids, seeds = p.candidates_like(problem.labels, 3, 784), p.seeds_like(problem.labels, K=3)
    options: Any = {"temperature": torch.tensor([1.0, 0.5, -1.0, 2.0, 1.0, 1.0]), "candidates": ids}
    out, grads = p.gradients(problem, seeds, **options)
    assert programs
    launch_with("jax")
    wanted, of_xla = p.gradients(problem, seeds, **options, implementation="xla")
    assert out.candidate_logprobs[2].isnan().all()
    assert torch.equal(out.candidate_logprobs.isnan(), wanted.candidate_logprobs.isnan())
    assert not grads[0][2].any()
    assert max(map(p.relative_norm, grads, of_xla)) < 5e-3


def sorted_logits(problem: p.Problem) -> torch.Tensor:
    return (problem.hidden.double() @ problem.weight.double().T).sort(-1)[0]


@pytest.mark.slow
def test_a_floor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens with a NaN, without a token in the set, with all and with one, beside others."""
    problem, generator = p.draw(40, H, 520, torch.bfloat16), torch.Generator().manual_seed(5)
    problem.labels[:8], problem.labels[0], problem.labels[9] = torch.arange(8) - 4, 7, 520
    temperature, z = torch.rand(40, generator=generator) + 0.5, sorted_logits(problem)
    floor = ((z[:, -30] + z[:, -31]) / 2 / temperature).float()
    floor[:4] = torch.tensor([float("nan"), float("inf"), -float("inf"), 0.0])
    floor[5] = float("inf")
    monkeypatch.setattr(_checks, "can_read_values", lambda _: False)
    options: Any = dict(logit_floor=floor, temperature=temperature, stats=True, vocab_size=510)
    seeds = p.seeds_like(problem.labels)
    want, of_jax = of_results(problem, seeds, implementation="xla", **options)
    loaded = emulated(monkeypatch)
    programs = next(loaded)
    found, grads = of_results(problem, seeds, **options)
    assert programs
    next(loaded, None)
    assert found[-1][[1, 2, 5]].tolist() == [0, 510, 1]
    for got, true in zip(found, want, strict=True):
        assert got[0].isnan()
        assert true[0].isnan()
        assert p.value_error(got[1:], true[1:]) < 2e-5
    assert max(map(p.relative_norm, grads, of_jax)) < 5e-3  # bfloat16 rounds by 2⁻⁹


@pytest.mark.slow
def test_a_floor_of_a_split_vocabulary(programs: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """The results of a whole one, the same bits on both ranks. Some rows have no token of their set on a rank."""
    problem = p.draw(40, H, 1040, torch.bfloat16)
    z = sorted_logits(problem)
    floor = ((z[:, -2] + z[:, -3]) / 2).float()
    launch_with("jax")
    with torch.no_grad():
        want = linear_logprobs(*problem, logit_floor=floor, stats=True, implementation="xla")
    launch_with("direct")
    ranks = Ranks(monkeypatch)
    call = p.told(1040, group="both", requested=("mosaic_gpu",), has_floor=True, stats=True)
    parts, found = parts_of(problem, floor=floor), []
    for ranks.rank in (0, 1, 0, 1):  # what the first two send, the last two receive
        found.append(forward(parts[ranks.rank], call)[: len(call.fields)])
    assert programs
    other = floor.clone()
    other[6] += 1
    parts[1] = parts[1]._replace(floor=other)
    ranks.gathered.clear()
    for ranks.rank in (0, 1, 0):
        differ = forward(parts[ranks.rank], call)[: len(call.fields)]
    assert all(x.isnan().nonzero().tolist() == [[6]] for x in differ)
    assert all(map(torch.equal, found[2], found[3]))
    fields = dict(zip(call.fields, found[3], strict=True))
    assert max(p.value_error(x, getattr(want, name)) for name, x in fields.items()) < 2e-5
