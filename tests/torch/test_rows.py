"""Kept rows, what is kept between forward and backward, and programs shared by many counts of tokens."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import jax
import pytest
import torch

from lce_jax.mosaic._pallas import interpreting, plgpu
from lce_torch_bridge import linear_cross_entropy, linear_logprobs, linear_loss
from lce_torch_bridge.tensors import _padding
from tests.pairs import combined
from tests.torch import problem as p

TRACED = "/jax/core/compile/jaxpr_trace_duration"
COMPILED = "/jax/core/compile/backend_compile_duration"


@pytest.fixture
def compilations() -> Iterator[list[str]]:
    """Grows by one entry for each program that JAX traces or XLA compiles."""
    found: list[str] = []

    def note(event: str, duration: float, **_: object) -> None:
        del duration
        if event in (TRACED, COMPILED):
            found.append(event)

    jax.monitoring.register_event_duration_secs_listener(note)
    yield found
    jax.monitoring.unregister_event_duration_listener(note)


@pytest.mark.fast("2500-torch.bfloat16")
@combined(T=[37, 2500, _padding.FORWARD_ROWS, _padding.FORWARD_ROWS + 700], dtype=[torch.float32, torch.bfloat16])
def test_kept_rows_have_the_bits_of_the_full_call(T: int, dtype: torch.dtype) -> None:
    hidden, weight, labels = p.draw(T=T, H=48, V=3000, dtype=dtype)
    told = dict(stats=True, mean_logit=True, temperature=0.9, candidates=p.candidates_like(labels, K=3, V=3000))
    full = linear_logprobs(hidden, weight, labels, **told)
    generator = torch.Generator().manual_seed(3)
    for count in (0, 1, 5, T // 3, T - 1, T):
        rows = torch.randperm(T, generator=generator)[:count]
        mask = torch.zeros(T, dtype=torch.bool).index_fill(0, rows, True)
        for keep in (rows, rows.int(), mask):
            out = linear_logprobs(hidden, weight, labels, where=keep, **told)
            for got, want in zip(out[:8], full[:8], strict=True):
                assert torch.equal(got[mask], want[mask])
                assert (got[~mask] == 0).all()


@pytest.mark.parametrize("label", [0, -100])
def test_a_mask_that_leaves_nothing_out_copies_no_rows(label: int) -> None:
    """What autograd keeps of hidden is hidden itself."""
    hidden, weight, labels = p.draw()
    labels[0] = label
    kept: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: (kept.append(x.data_ptr()), x)[1], lambda x: x):
        linear_logprobs(hidden.requires_grad_(), weight, labels, ignore_index=-100)
    assert (hidden.data_ptr() in kept) == (label == 0)


@pytest.mark.usefixtures("in_float64")
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8])
@pytest.mark.parametrize("ignored", [-100, 7])
def test_an_ignored_label_leaves_its_token_out(ignored: int, dtype: torch.dtype) -> None:
    """The bits of ``where`` without those tokens, alone and with a ``where`` of either kind."""
    problem = p.draw(T=60)
    problem = problem._replace(hidden=problem.hidden.view(3, 20, -1), labels=problem.labels.view(3, 20).to(dtype))
    some = torch.rand(3, 20, generator=torch.Generator().manual_seed(0)) < 0.4
    if ignored >= 0 or dtype != torch.uint8:  # which does not hold -100: nothing is left out
        problem.labels[some] = ignored
    counts = problem.labels != ignored
    problem.hidden[~counts] = torch.nan  # whatever they hold
    mask = torch.arange(60).view(3, 20) % 2 == 0
    seeds = p.seeds_like(problem.labels)
    for keep, kept in ((None, counts), (mask, mask & counts), (torch.arange(0, 60, 2), mask & counts)):
        out, grads = p.gradients(problem, seeds, ignore_index=ignored, where=keep)
        want, wanted = p.gradients(problem, seeds, where=kept)
        assert all(map(torch.equal, (*out[:3], *grads), (*want[:3], *wanted)))
        assert (out.entropy[~kept] == 0).all()
    turned = linear_logprobs(  # as Megatron's are, [s, b]
        problem.hidden.transpose(0, 1), problem.weight, problem.labels.t(), ignore_index=ignored, where=torch.arange(60)
    )
    assert torch.equal(turned.logprobs.t(), linear_logprobs(*problem, where=counts).logprobs)
    nothing, (dhidden, dweight) = p.gradients(problem, seeds, ignore_index=ignored, where=~counts)
    assert not any(x.any() for x in (*nothing[:3], dhidden, dweight))


@pytest.mark.usefixtures("in_float64")
def test_memory_falls_with_the_kept_share() -> None:
    """Only the kept rows are saved for the backward; nothing else is [T, H]."""
    hidden, weight, labels = p.draw(T=1000, H=64).leaves()
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x.shape) or x, lambda x: x):
        linear_logprobs(hidden, weight, labels, where=torch.arange(0, 1000, 10))
    assert torch.Size([100, 64]) in saved
    assert torch.Size([1000, 64]) not in saved


def test_sizes() -> None:
    """Few programs for all counts; the cost of padding is bounded."""
    counts = range(1, 131_073)
    sizes = [_padding.size(n) for n in counts]
    assert len(set(sizes)) < 12
    assert all(n <= rows for n, rows in zip(counts, sizes, strict=True))
    assert all(_padding.size(rows) == rows for rows in set(sizes))
    assert max(rows / n for n, rows in zip(counts, sizes, strict=True) if n > _padding.SMALLEST) <= 2
    assert max(rows / n for n, rows in zip(counts, sizes, strict=True) if n > _padding.HALFWAY_FROM) <= 1.5


@pytest.mark.fast("4097")
@pytest.mark.parametrize("T", [4095, 4096, 4097])
def test_around_a_whole_size(T: int) -> None:
    problem = p.draw(T=T, H=16, V=64)
    seeds = p.seeds_like(problem.labels)
    out, grads = p.gradients(problem, seeds)
    want, wanted = p.exact(problem, seeds)
    assert p.value_error(out.logprobs, want.logprobs) < 2e-6
    assert max(map(p.relative_norm, grads, wanted)) < 1e-6


def test_a_call_like_an_earlier_one_traces_nothing(compilations: list[str]) -> None:
    problem = p.draw(T=900)
    seeds = p.seeds_like(problem.labels)
    p.gradients(problem, seeds, temperature=0.7, logit_scale=0.9)
    assert set(compilations) == {TRACED, COMPILED}
    compilations.clear()
    shorter = p.draw(T=1000, seed=1)
    p.gradients(shorter, p.seeds_like(shorter.labels), temperature=0.8, logit_scale=0.9)
    assert compilations == []


def test_an_exact_size_is_not_copied() -> None:
    x = torch.randn(1024, 3)
    assert _padding.pad(x, 1024).data_ptr() == x.data_ptr()
    padded = _padding.pad(x, 1030)
    assert padded.shape == (1030, 3)
    assert torch.equal(padded[:1024], x)


def test_padding_may_hold_anything() -> None:
    """The padding of hidden states is uninitialised memory: here NaN."""
    problem = p.draw(T=60)
    options = dict(stats=True, mean_logit=True, temperature=torch.linspace(0.5, 1.5, 60))
    options["candidates"] = p.candidates_like(problem.labels)
    seeds = p.seeds_like(problem.labels, K=5)
    want, wanted = p.gradients(problem, seeds, **options)
    torch.use_deterministic_algorithms(True)  # fills what is not initialised
    try:
        assert _padding.pad(problem.hidden, 61)[60].isnan().all()
        out, grads = p.gradients(problem, seeds, **options)
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(map(torch.equal, (*out[:7], *grads), (*want[:7], *wanted)))


@pytest.mark.slow
def test_gradients_do_not_pile_up() -> None:
    """Memory is flat over 15 steps, torch's and JAX's: what torch has dropped, JAX frees at its next call."""
    problem = p.draw(T=512, H=16, V=64)
    leaves = problem.leaves()
    dropped, live = [], []
    for step in range(15):
        out = linear_logprobs(*leaves)
        grads = torch.autograd.grad(out.logprobs.sum() + out.entropy.sum(), leaves[:2])
        dropped += [weakref.ref(x) for x in (*grads, *out[:3])]
        del out, grads
        if step % 5 == 4:
            gc.collect()
            live.append(sum(x.nbytes for x in jax.live_arrays()))
    assert not any(ref() is not None for ref in dropped)
    assert live[-1] <= live[0]


def test_the_backward_keeps_only_what_it_says() -> None:
    """Hidden and weight, a label and four numbers a token, and nothing of V x T or of the padded size."""
    problem = p.draw(T=100, H=64, V=512)
    sizes = []

    def note(x: torch.Tensor) -> torch.Tensor:
        sizes.append((tuple(x.shape), x.dtype))
        return x

    with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
        linear_logprobs(*problem.leaves())
    want = [((100, 64), torch.float32), ((512, 64), torch.float32), ((5, 100), torch.int32)]
    assert [size for size in sizes if size in want] == want
    assert len(sizes) == len(want)


def test_saved_tensors_may_come_back_in_another_layout() -> None:
    """As from a hook that offloads or compresses tensors."""
    problem = p.draw()
    seeds = p.seeds_like(problem.labels)
    _, want = p.gradients(problem, seeds)
    leaves = problem.leaves()
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x.t().contiguous(), lambda x: x.t()):
        out = linear_logprobs(*leaves)
    assert all(map(torch.equal, torch.autograd.grad(p.objective(out, seeds), leaves[:2]), want))


def test_a_backward_reads_the_cache_in_place_of_the_weight() -> None:
    """So the weight's gradient is right, whatever is in the weight that was saved."""
    hidden, weight, labels = p.draw()
    weight.requires_grad_()

    def dweight(**options: Any) -> torch.Tensor:
        out = linear_logprobs(hidden, weight, labels, **options)
        return torch.autograd.grad(out.logprobs.sum() - 0.1 * out.entropy.sum(), weight)[0]

    def spoil(x: torch.Tensor) -> torch.Tensor:
        return torch.full_like(x, torch.nan) if x.shape == weight.shape else x

    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, spoil):
        cached, computed = (dweight(cache_bytes=size) for size in (1 << 30, 0))
    assert p.relative_norm(cached, dweight()) < 1e-6
    assert computed.isnan().any()


ROWS, WIDTH, COLUMNS = 130, 128, 768


def thresholded(**options: Any) -> tuple[Any, tuple[torch.Tensor, ...], list[tuple[int, ...]]]:
    """The outputs, dhidden and dweight, and the shapes of what autograd keeps."""
    torch.manual_seed(0)
    hidden = torch.randn(ROWS, WIDTH, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(COLUMNS, WIDTH, dtype=torch.bfloat16, requires_grad=True)
    kept: list[tuple[int, ...]] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: (kept.append(tuple(x.shape)), x)[1], lambda x: x):
        out = linear_logprobs(hidden, weight, torch.arange(ROWS), **options)
    loss = out.logprobs.sum() - 0.1 * out.entropy.sum()
    return out, torch.autograd.grad(loss, (hidden, weight)), kept


def assert_same(got: Any, want: Any) -> None:
    for a, b in zip((*got[0], *got[1]), (*want[0], *want[1]), strict=True):
        assert (a is None) == (b is None)
        assert a is None or torch.equal(a, b)


@pytest.mark.slow
@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("stats", [pytest.param(False, id="", marks=pytest.mark.slow), pytest.param(True, id="stats")])
def test_what_the_kernels_would_need_is_kept(stats: bool) -> None:
    """Through JAX as on an H200, each kernel by Pallas's interpreter."""
    with interpreting(plgpu.InterpretGPUParams()):
        exact = thresholded(stats=stats, cache_bytes=0)
        got = thresholded(stats=stats, gradient_threshold=2.0**-11)
        with torch.no_grad():
            few = (
                torch.randn(3, WIDTH, dtype=torch.bfloat16),
                torch.randn(COLUMNS, WIDTH, dtype=torch.bfloat16),
                torch.arange(3),
            )
            assert linear_logprobs(*few, stats=stats, gradient_threshold=2.0**-10).logprobs.shape == (3,)
    torch.testing.assert_close([x for x in got[0] if x is not None], [x for x in exact[0] if x is not None])
    for dense, sparse in zip(exact[1], got[1], strict=True):
        torch.testing.assert_close(sparse, dense, rtol=0.01, atol=2.0**-10 * float(dense.abs().max()))


def test_losses_take_it_and_a_wrong_one_is_refused() -> None:
    operands = torch.randn(8, WIDTH), torch.randn(COLUMNS, WIDTH), torch.arange(8)
    exact = linear_cross_entropy(*operands)
    assert torch.equal(linear_cross_entropy(*operands, gradient_threshold=0.01), exact)

    def loss_of_token(logprob: torch.Tensor, *_: Any) -> torch.Tensor:
        return -logprob

    operands[1].requires_grad_()
    total, _ = linear_loss(loss_of_token, *operands, gradient_threshold=0.01)
    torch.testing.assert_close(total / 8, exact)
    with pytest.raises(ValueError, match=r"gradient_threshold must lie in \[0, 1\), got 1"):
        linear_logprobs(*operands, gradient_threshold=1.0)
