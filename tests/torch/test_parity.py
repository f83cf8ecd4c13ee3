"""The bridge against two oracles: NumPy with gradients written by hand, and PyTorch's autograd, both in float64."""

from __future__ import annotations

import pytest
import torch

from lce_torch_bridge import linear_logits, linear_logprobs, masked_logprobs
from lce_torch_bridge.verl import linear_cross_entropy
from tests import cases, oracle
from tests.torch import problem as p

NOT_SERVED = {"weight_layout", "precision"}
CALLS = (*cases.MATRIX, *cases.CANDIDATES, *cases.FLOORS)
SERVED = [x for x in CALLS if not NOT_SERVED & {name for name, _ in x.options}]
VALUE = 2e-6  # float32 sums of some hundred terms; the logits themselves are rounded to 6e-8 of theirs
GRADIENT = 1e-6
# bfloat16 gradients are rounded once to 2^-9 of each element (uniformly: 1.7e-3 of the norm); float16 to 2^-12.
ROUNDING = {torch.float32: GRADIENT, torch.bfloat16: 2.0e-3, torch.float16: 2.6e-4}


# What only JAX's side sees, which tests/ops/test_parity.py has as well, is slow; "everything" has it too.
SLOW = {
    "three leading dimensions", "vocabulary of GPT-2's remainder", "foreign labels", "where with everything live",
    "scale", "negative scale", "padded to one column", "peaked", "bfloat16 peaked", "candidates, scale 0",
    "candidates, peaked", "candidates, where with nothing live", "candidates, negative scale, padded",
}  # fmt: skip
PARITY = [pytest.param(test, marks=pytest.mark.slow if test.name in SLOW else ()) for test in SERVED]


@pytest.mark.parametrize("test", PARITY, ids=str)
def test_case(test: cases.TestCase) -> None:
    problem, options, seeds = p.from_case(test)
    out, (dhidden, dweight) = p.gradients(problem, seeds, **options)
    for name, field in out._asdict().items():
        shape = problem.labels.shape + ((test.K,) if name == "candidate_logprobs" else ())
        assert field is None or (field.shape == shape and field.dtype == torch.float32)
    assert (out.support is None) == (test.floor == 0 or not options.get("stats", False))
    assert (out.candidate_logprobs is None) == (test.K == 0)
    assert dhidden.dtype == problem.hidden.dtype
    assert dweight.dtype == problem.weight.dtype

    exact = [x.detach().to(problem.weight.dtype).double().numpy() for x in problem[:2]]
    told = {name: x.numpy() if isinstance(x, torch.Tensor) else x for name, x in options.items()}
    labels = problem.labels.numpy()
    scale = 1 + test.spread**2 / 10  # fp32 logits of a hundred are rounded to 8e-6
    true = oracle.logprobs(*exact, labels, **told)
    for name, got in out._asdict().items():
        assert got is None or oracle.value_error(got.detach().numpy(), getattr(true, name)) < VALUE * scale
    if out.entropy is None:
        seeds[1] = 0 * seeds[1]
    wanted = oracle.gradients(*exact, labels, [seed.numpy() for seed in seeds], **told)
    for got, want in zip((dhidden, dweight), wanted[:2], strict=True):
        assert oracle.relative_norm(got.double().numpy(), want) < ROUNDING[got.dtype] * scale


def test_against_autograd_in_float64() -> None:
    problem = p.draw()
    labels = problem.labels.clone()
    labels[::7] = torch.tensor([-100, 10**6, 2**32 + 3, -(2**40), 104, 2**31])[: len(labels[::7])]
    problem = problem._replace(labels=labels)
    seeds = p.seeds_like(labels, K=5)
    options = dict(temperature=0.7, logit_scale=1.3, logit_softcap=4.0, vocab_size=101)
    options["candidates"] = p.candidates_like(labels)
    out, grads = p.gradients(problem, seeds, stats=True, mean_logit=True, **options)
    want, wanted = p.exact(problem, seeds, **options)
    assert max(map(p.value_error, out, want)) < VALUE
    assert max(map(p.relative_norm, grads, wanted)) < GRADIENT


@pytest.mark.parametrize("label", [2**32 + 3, -(2**32) + 3, 2**31, -100, -1, 10**6, 104])
def test_labels_out_of_vocabulary(label: int) -> None:
    """2³² + 3 is not 3, to which JAX by itself would wrap it."""
    hidden, weight, labels = p.draw()
    labels = labels.clone()
    labels[4] = label
    out = linear_logprobs(hidden, weight, labels)
    assert out.logprobs[4] == 0
    assert (out.logprobs != 0).sum() == len(labels) - 1
    megatron = linear_logprobs(hidden, weight, labels, out_of_vocab="megatron", stats=True)
    assert p.value_error(megatron.logprobs[4], (megatron.max_logit - megatron.lse)[4]) < 1e-6
    assert torch.equal(megatron.logprobs[5:], out.logprobs[5:])


UNSIGNED = [torch.uint8, torch.uint16, torch.uint32, torch.uint64]


@pytest.mark.parametrize("dtype", [*UNSIGNED, torch.int8, torch.int16, torch.int32])
def test_every_integer_type_of_labels_and_ids(dtype: torch.dtype) -> None:
    hidden, weight, labels = p.draw(V=600)
    labels = labels % 100
    labels[0] = 156 if dtype in UNSIGNED else -100  # in eight bits they are the same
    ids = torch.stack([labels, labels // 2], 1)

    def calls(labels: torch.Tensor, ids: torch.Tensor) -> tuple[torch.Tensor, ...]:
        out = linear_logprobs(hidden, weight, labels, candidates=ids)
        kept = linear_logprobs(hidden, weight, labels, ignore_index=-100)
        logits = linear_logits(hidden, weight, ids)
        return out.logprobs, out.candidate_logprobs, kept.lse, logits, masked_logprobs(logits, ids, labels)

    assert all(map(torch.equal, calls(labels.to(dtype), ids.to(dtype)), calls(labels, ids)))


def test_megatron_out_of_vocabulary_as_megatron_has_it() -> None:
    """Value and gradient of megatron-core's own vocab-parallel cross entropy."""
    cross_entropy = pytest.importorskip("megatron.core.tensor_parallel.cross_entropy")
    problem = p.draw()
    problem.labels[::3] = -100
    seed = p.seeds_like(problem.labels)[0]
    with single_rank_group() as group:
        leaves = problem.leaves()
        stock = -cross_entropy.vocab_parallel_cross_entropy(
            leaves.hidden[:, None] @ leaves.weight.T, leaves.labels[:, None], tp_group=group
        )[:, 0]
        wanted = torch.autograd.grad((stock * seed).sum(), leaves[:2])
    leaves = problem.leaves()
    out = linear_logprobs(*leaves, out_of_vocab="megatron")
    grads = torch.autograd.grad((out.logprobs * seed).sum(), leaves[:2])
    assert p.value_error(out.logprobs, stock) < VALUE
    assert max(map(p.relative_norm, grads, wanted)) < GRADIENT


def single_rank_group():
    import contextlib

    @contextlib.contextmanager
    def scope():
        torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
        try:
            yield torch.distributed.group.WORLD
        finally:
            torch.distributed.destroy_process_group()

    return scope()


@pytest.mark.parametrize("hidden_dtype", [torch.bfloat16, torch.float32])
def test_bfloat16_is_no_further_off_than_stored_logits(hidden_dtype: torch.dtype) -> None:
    problem = p.draw(T=512, H=128, V=1024, dtype=torch.bfloat16)
    problem = problem._replace(hidden=problem.hidden.to(hidden_dtype))
    seeds = p.seeds_like(problem.labels)
    out, grads = p.gradients(problem, seeds)
    stock, plain = p.gradients(problem, seeds, call=p.stored, dtype=torch.bfloat16)
    want, wanted = p.exact(problem, seeds)
    for got, path, true in zip(out[:3], stock[:3], want[:3], strict=True):
        assert p.value_error(got, true) < p.value_error(path, true)
    for got, path, true in zip(grads, plain, wanted, strict=True):
        assert p.relative_norm(got, true) < p.relative_norm(path, true)


def test_metric_entropy_has_no_gradient() -> None:
    problem = p.draw()
    seeds = p.seeds_like(problem.labels)
    out = linear_logprobs(*problem)
    leaves = problem.leaves()
    metric = linear_logprobs(*leaves, entropy="metric", stats=True, mean_logit=True)
    assert torch.equal(metric.entropy, out.entropy)
    assert [field.requires_grad for field in metric[:6]] == [True, False, True, False, False, True]
    got = torch.autograd.grad(p.objective(metric._replace(entropy=None), seeds), leaves[:2])
    _, want = p.gradients(problem, [seeds[0], 0 * seeds[1], seeds[2]])
    assert max(map(p.relative_norm, got, want)) < GRADIENT


def test_without_entropy() -> None:
    problem = p.draw()
    seeds = p.seeds_like(problem.labels)
    out, grads = p.gradients(problem, seeds, entropy=False)
    assert out.entropy is None
    _, want = p.gradients(problem, [seeds[0], 0 * seeds[1], seeds[2]])
    assert max(map(p.relative_norm, grads, want)) < GRADIENT


@pytest.mark.parametrize("reduction", ["none", "sum", "mean", None])
def test_linear_cross_entropy_has_the_signature_of_verl(reduction: str | None) -> None:
    """Positional, flat, and a log-probability, not its negative."""
    problem = p.draw(T=24)
    problem = problem._replace(hidden=problem.hidden.view(4, 6, -1), labels=problem.labels.view(4, 6))
    leaves = problem.leaves()
    logprobs, entropy = linear_cross_entropy(*leaves, 0.7, reduction, None)
    want = p.stored(*problem, temperature=0.7)
    reduce = {"none": torch.clone, "sum": torch.sum, "mean": torch.mean}[reduction or "none"]
    assert p.value_error(logprobs, reduce(want.logprobs.reshape(-1))) < 10 * VALUE  # a sum of 24
    assert p.value_error(entropy, want.entropy.reshape(-1)) < VALUE
    assert logprobs.max() < 0
    (logprobs.sum() - 0.1 * entropy.sum()).backward()
    stored = problem.leaves()
    true = p.stored(*stored, temperature=0.7)
    (reduce(true.logprobs).sum() - 0.1 * true.entropy.sum()).backward()
    assert p.relative_norm(leaves.weight.grad, stored.weight.grad) < GRADIENT
    with pytest.raises(ValueError, match=r"""reduction must be "none", "sum" or "mean", got 'avg'"""):
        linear_cross_entropy(*problem, 1.0, "avg")


def test_one_label_of_a_row() -> None:
    """torch calls one element contiguous, whatever its stride is."""
    problem = p.draw(T=1)
    strided = problem.labels.repeat(3)[::3]
    assert strided.stride() == (3,)
    found = linear_logprobs(*problem._replace(labels=strided))
    assert torch.equal(found.logprobs, linear_logprobs(*problem).logprobs)
