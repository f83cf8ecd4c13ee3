"""What is kept between forward and backward, and for how long."""

from __future__ import annotations

import gc
import weakref

import jax
import pytest
import torch

from lce_torch_bridge import linear_logprobs
from lce_torch_bridge.operators import _execute
from lce_torch_bridge.through_jax import _logprobs
from tests.torch import problem as p


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


def test_the_cache_travels_as_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels that keep a cache need a GPU. Here a stand-in cache takes the same way, and comes back unchanged."""
    problem = p.draw()
    seen = []
    real = _logprobs.local.statistics
    real_gradients = _logprobs.local.gradients

    def statistics(hidden, weight, labels, *, keep_cache, **options):
        stats, _ = real(hidden, weight, labels, keep_cache=keep_cache, **options)
        return stats, ({"columns": hidden[:, :3] * 2, "max": stats.max} if keep_cache else None)

    def gradients(hidden, weight, labels, merged, cotangent, *, cache, **options):
        seen.append(jax.tree.map(jax.numpy.shape, cache))
        dhidden, dweight = real_gradients(hidden, weight, labels, merged, cotangent, cache=None, **options)
        live = slice(0, 37)  # padding may hold anything
        return dhidden + cache["columns"][live].sum() - 2 * hidden[live, :3].sum(), dweight

    monkeypatch.setattr(_logprobs.local, "statistics", statistics)
    monkeypatch.setattr(_logprobs.local, "gradients", gradients)
    seeds = p.seeds_like(problem.labels)
    options = dict(cache_bytes=12345, logit_scale=1.125)  # no other test has these: programs are cached by options
    _, grads = p.gradients(problem, seeds, **options)
    assert seen == [{"columns": (128, 3), "max": (128,)}]
    monkeypatch.undo()
    _, want = p.gradients(problem, seeds, logit_scale=1.125)
    assert max(map(p.relative_norm, grads, want)) < 1e-5
    told = p.told(cache_bytes=12345, logit_scale=1.125)
    operands = _execute.Operands(problem.hidden, problem.weight, None, problem.labels, None, None)
    kept = _execute.forward_structs(operands, told, keep=True)
    assert [tuple(x.shape) for x in kept[4:]] == [(128, 3), (128,)]
