"""The programs of JAX against two oracles: NumPy with gradients by hand, and PyTorch's autograd, both in float64.

What does not depend on the programs is judged by `test_every_function` and the others.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import pytest
import torch
from torch.nn import functional

import lce_jax
from lce_torch_bridge import (
    linear_cross_entropy,
    linear_entropy,
    linear_kl,
    linear_logits,
    linear_logprobs,
    linear_topk,
    masked_logprobs,
)
from lce_torch_bridge.call import _checks
from lce_torch_bridge.through_jax._logprobs import pull_back
from lce_torch_bridge.through_jax._programs import ProgramKey, build_program
from tests import cases, oracle
from tests.kl_cases import CALLS, Call, call, draw, expected
from tests.pairs import combined, values_of
from tests.torch import problem as p

NOT_SERVED = {"weight_layout", "precision"}
MATRIX = (*cases.MATRIX, *cases.CANDIDATES, *cases.FLOORS)
SERVED = [x for x in MATRIX if not NOT_SERVED & {name for name, _ in x.options}]
VALUE = 2e-6  # float32 sums of some hundred terms; the logits themselves are rounded to 6e-8 of theirs
GRADIENT = 1e-6
# bfloat16 gradients are rounded once to 2^-9 of each element (uniformly: 1.7e-3 of the norm); float16 to 2^-12.
ROUNDING = {torch.float32: GRADIENT, torch.bfloat16: 2.0e-3, torch.float16: 2.6e-4}


# These differ from others in what JAX computes, not in what the bridge hands on.
SLOW = [*cases.SLOW, *(x for x in SERVED if x.name in ("512 candidates", "candidates, peaked", "padded to one column"))]


@values_of("test", SERVED, slow=SLOW)
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


@pytest.mark.slow
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
        return out.logprobs, out.candidate_logprobs, kept.lse, logits, masked_logprobs(logits, ids, labels).logprobs

    assert all(map(torch.equal, calls(labels.to(dtype), ids.to(dtype)), calls(labels, ids)))


def test_as_megatrons_cross_entropy() -> None:
    """Value and gradient of its labels out of vocabulary, and of its smoothing, which is ours by another number."""
    theirs = pytest.importorskip("megatron.core.tensor_parallel.cross_entropy").vocab_parallel_cross_entropy
    problem = p.draw()
    problem.labels[::3] = -100
    seed = p.seeds_like(problem.labels)[0]
    for smoothing, ours in (
        (0.0, lambda *x: -linear_logprobs(*x, out_of_vocab="megatron").logprobs),
        (0.1, lambda *x: linear_cross_entropy(*x, label_smoothing=0.1 * 104 / 103, reduction="none")),
    ):
        labels = problem.labels if not smoothing else problem.labels.clamp(min=0)
        with single_rank_group() as group:
            leaves = problem.leaves()
            products = leaves.hidden[:, None] @ leaves.weight.T
            want = theirs(products, labels[:, None], smoothing, tp_group=group)[:, 0]
            wanted = torch.autograd.grad((want * seed).sum(), leaves[:2])
        leaves = problem.leaves()
        found = ours(*leaves[:2], labels)
        grads = torch.autograd.grad((found * seed).sum(), leaves[:2])
        assert p.value_error(found, want) < VALUE
        assert max(map(p.relative_norm, grads, wanted)) < GRADIENT


@contextlib.contextmanager
def single_rank_group() -> Iterator[torch.distributed.ProcessGroup]:
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        yield torch.distributed.group.WORLD
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.slow
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


def test_one_label_of_a_row() -> None:
    """torch calls one element contiguous, whatever its stride is."""
    problem = p.draw(T=1)
    strided = problem.labels.repeat(3)[::3]
    assert strided.stride() == (3,)
    found = linear_logprobs(*problem._replace(labels=strided))
    assert torch.equal(found.logprobs, linear_logprobs(*problem).logprobs)


LABELS = torch.where(torch.arange(37) % 5 == 0, -100, p.draw().labels % 90)
IDS = p.candidates_like(p.draw().labels)
BIAS = torch.randn(104, generator=torch.Generator().manual_seed(5))
EACH = torch.linspace(0.5, 2, 37)


def logprobs(hidden: Any, weight: Any, bias: Any, call: Any = linear_logprobs, **options: Any) -> list[torch.Tensor]:
    told = dict(mean_logit=True) if call is linear_logprobs else {}
    out = call(hidden, weight, LABELS, bias=bias, **told, **options)
    return [out.logprobs, out.entropy, out.lse, out.mean_logit]


def stored_logprobs(*operands: Any, **options: Any) -> list[torch.Tensor]:
    return logprobs(*operands, call=p.stored, **options)


def logits(hidden: Any, weight: Any, bias: Any, **options: Any) -> list[torch.Tensor]:
    return [linear_logits(hidden, weight, IDS, bias=bias, **options)]


def stored_logits(hidden: Any, weight: Any, bias: Any, **options: Any) -> list[torch.Tensor]:
    return [p.stored_logits(hidden, weight, IDS, bias=bias, **options)]


def entropy(hidden: Any, weight: Any, bias: Any, **options: Any) -> list[torch.Tensor]:
    return list(linear_entropy(hidden, weight, bias=bias, **options))


def stored_entropy(hidden: Any, weight: Any, bias: Any, **options: Any) -> list[torch.Tensor]:
    return list(p.stored(hidden, weight, LABELS, bias=bias, **options)[1:3])


def cross_entropy(hidden: Any, weight: Any, bias: Any, **options: Any) -> list[torch.Tensor]:
    return [linear_cross_entropy(hidden, weight, LABELS, bias=bias, **options)]


def stored_cross_entropy(
    hidden: Any, weight: Any, bias: Any, *, reduction: str = "mean", label_smoothing: float = 0.0, z_loss: float = 0.0,
    **options: Any,
) -> list[torch.Tensor]:  # fmt: skip
    """torch's own on the logits, and a z-loss."""
    z = p.capped(hidden @ weight.T, bias=bias, **options)
    losses = functional.cross_entropy(z, LABELS, label_smoothing=label_smoothing, reduction="none")
    losses = losses + z_loss * torch.where(LABELS == -100, 0.0, z.logsumexp(-1) ** 2)
    if reduction == "none":
        return [losses]
    if not z_loss:  # torch's own wording
        return [functional.cross_entropy(z, LABELS, label_smoothing=label_smoothing, reduction=reduction)]
    return [losses.sum() if reduction == "sum" else losses.sum() / (LABELS != -100).sum()]


STORED = {
    logprobs: stored_logprobs, logits: stored_logits, entropy: stored_entropy, cross_entropy: stored_cross_entropy,
}  # fmt: skip
WITH_BIAS: list[tuple[Any, dict[str, Any]]] = [
    (logprobs, {}),
    (logprobs, dict(temperature=EACH, logit_scale=-0.8, logit_softcap=2.0, vocab_size=97)),
    (logits, {}),
    (logits, dict(temperature=EACH, logit_scale=-1.3, logit_softcap=3.0, vocab_size=97)),
    (logits, dict(temperature=0.7, logit_scale=0.0)),
    (entropy, dict(temperature=EACH, logit_softcap=3.0, vocab_size=97)),
    (cross_entropy, dict(reduction="sum")),
    (cross_entropy, dict(label_smoothing=0.1, z_loss=1e-2, temperature=0.7, logit_scale=1.3, logit_softcap=3.0)),
    (cross_entropy, dict(label_smoothing=0.25, vocab_size=97, temperature=EACH, reduction="none")),
    (cross_entropy, dict(label_smoothing=0.1)),
]


def measured(call: Any, operands: tuple[torch.Tensor, ...], **options: Any) -> Any:
    """The results, and the gradients in hidden, weight and bias."""
    leaves = [x.clone().requires_grad_() for x in operands]
    found = call(*leaves, **options)
    terms = [(torch.linspace(-1, 2, x.numel()).view(x.shape).to(x.dtype) * x).sum() for x in found]
    return found, torch.autograd.grad(torch.stack(terms).sum(), leaves)


@pytest.mark.fast("logprobs-temperature", "label_smoothing, z_loss")
@pytest.mark.parametrize(("call", "options"), WITH_BIAS, ids=lambda x: x.__name__ if callable(x) else ", ".join(x))
def test_heads_with_a_bias(call: Any, options: dict[str, Any]) -> None:
    operands = (*p.draw()[:2], BIAS)
    found, grads = measured(call, operands, **options)
    true = {name: x.double() if isinstance(x, torch.Tensor) else x for name, x in options.items()}
    want, wanted = measured(STORED[call], tuple(x.double() for x in operands), **true)
    assert max(map(p.value_error, found, want)) < VALUE
    assert max(map(p.relative_norm, grads, wanted)) < GRADIENT
    assert "vocab_size" not in options or not grads[2][97:].any()


@pytest.mark.parametrize("call", [logprobs, logits])
@pytest.mark.parametrize(
    ("of_hidden", "of_weight", "of_bias"),
    [("bfloat16", "bfloat16", "float32"), ("float32", "bfloat16", "bfloat16"), ("float32", "float32", "float16")],
)
def test_each_gradient_is_rounded_once(of_hidden: str, of_weight: str, of_bias: str, call: Any) -> None:
    dtypes = [getattr(torch, name) for name in (of_hidden, of_weight, of_bias)]
    operands = tuple(x.to(dtype) for x, dtype in zip((*p.draw()[:2], BIAS), dtypes, strict=True))
    found, grads = measured(call, operands)
    exact = operands[0].to(operands[1].dtype).double(), operands[1].double(), operands[2].double()
    want, wanted = measured(STORED[call], exact)
    assert max(map(p.value_error, found, want)) < VALUE
    for got, true, dtype in zip(grads, wanted, dtypes, strict=True):
        assert got.dtype == dtype
        assert p.relative_norm(got, true) < ROUNDING[dtype]


def test_more_tokens_than_a_program_takes() -> None:
    """The forward in pieces, the backward padded."""
    problem, bias = p.draw(T=8192 + 50, H=8, V=16), BIAS[:16].clone().requires_grad_()
    seeds, leaves, double = p.seeds_like(problem.labels), problem.leaves(), bias.detach().double().requires_grad_()
    out = linear_logprobs(*leaves, bias=bias, mean_logit=True)
    true = p.Problem(problem.hidden.double(), problem.weight.double(), problem.labels).leaves()
    want = p.stored(*true, bias=double)
    grads = torch.autograd.grad(p.objective(out, seeds), (*leaves[:2], bias))
    wanted = torch.autograd.grad(p.objective(want, seeds), (*true[:2], double))
    assert max(map(p.value_error, (*out[:3], out.mean_logit), (*want[:3], want.mean_logit))) < VALUE
    assert max(map(p.relative_norm, grads, wanted)) < GRADIENT


@combined(k=[1, 3, 97], options=[{}, dict(logit_scale=-0.5, bias=BIAS.round(), vocab_size=97), dict(temperature=EACH)])
def test_the_most_likely_are_those_of_a_sort(options: dict[str, Any], k: int) -> None:
    """Of logits that are exact, and often equal: the smaller id first."""
    problem = p.draw()
    hidden, weight = problem.hidden.round(), (4 * problem.weight).round() / 4
    given = {name: x.double() if isinstance(x, torch.Tensor) else x for name, x in options.items()}
    z = p.capped(hidden.double() @ weight.double().T, **given)
    want, lse = z.sort(dim=-1, descending=True, stable=True), z.logsumexp(-1)
    got = linear_topk(hidden, weight, k, **options)
    assert got.ids.dtype == torch.int64
    assert torch.equal(got.ids, want.indices[:, :k])
    assert p.value_error(got.logprobs, want.values[:, :k] - lse[:, None]) < VALUE
    assert p.value_error(got.lse, lse) < VALUE
    _, counts = want.values[:, :k].unique(return_counts=True)
    assert k == 1 or counts.max() > 1  # there are ties


def sets(labels: torch.Tensor) -> torch.Tensor:
    """Sets of different sizes without repeats; the label is in most of them."""
    generator = torch.Generator().manual_seed(3)
    ids = torch.stack([torch.randperm(104, generator=generator)[:7] for _ in range(len(labels))])
    ids[:, 0] = labels.where((ids != labels[:, None]).all(-1), ids[:, 0])
    ids[::5, 0], ids[3::4, 3:] = -1, -1
    ids[11] = -1
    return ids


def test_a_softmax_over_a_set() -> None:
    """By its definition on stored logits: everything outside the set is masked."""
    problem = p.draw()
    ids = sets(problem.labels)
    in_set = torch.zeros(37, 105, dtype=torch.bool).scatter_(1, torch.where(ids < 0, 104, ids), True)[:, :104]
    found = in_set.gather(1, problem.labels[:, None])[:, 0]
    assert 5 < found.sum() < 37
    true = p.Problem(problem.hidden.double(), problem.weight.double(), problem.labels).leaves()
    z = (true.hidden @ true.weight.T / 0.8).masked_fill(~in_set, -torch.inf)[found]
    log_p = z.log_softmax(-1)
    want = log_p.gather(1, problem.labels[found][:, None])[:, 0]
    entropies, lse = -(log_p.exp() * log_p.masked_fill(log_p.isinf(), 0.0)).sum(-1), z.logsumexp(-1)
    wanted = torch.autograd.grad(((want + entropies + lse) * torch.arange(len(want))).sum(), true[:2])
    leaves = problem.leaves()
    chosen = linear_logits(*leaves[:2], ids, temperature=0.8)
    out = masked_logprobs(chosen, ids, problem.labels)
    got = out.logprobs
    assert [x[11] for x in out[:3]] == [0, 0, 0]  # it has no ids
    assert (got[~found].sort().values == torch.tensor([-torch.inf] * (int((~found).sum()) - 1) + [0.0])).all()
    assert max(map(p.value_error, (x[found] for x in out[:3]), (want, entropies, lse))) < VALUE
    weights = torch.zeros(37).masked_scatter(found, torch.arange(len(want)).float())
    grads = torch.autograd.grad(out[:3], leaves[:2], [weights] * 3)  # nothing of a label that is not in its set
    assert max(map(p.relative_norm, grads, wanted)) < GRADIENT
    theirs = lce_jax.masked_logprobs(jnp.asarray(chosen.detach().numpy()), ids.numpy(), problem.labels.numpy())
    assert all(
        torch.allclose(x, torch.tensor(y.tolist()), rtol=0, atol=VALUE)
        for x, y in zip(out[:3], theirs[:3], strict=True)
    )


def test_a_prompt_has_no_softmax_over_a_set() -> None:
    """The 0 of `linear_logprobs` for the same labels, so that a masked sum and its gradient are those of the rest."""
    ids, labels = torch.tensor([[-1, -1], [-1, -1], [3, 5], [3, 5]]), torch.tensor([-100, 3, -100, 5])
    z = torch.tensor([[torch.nan, torch.nan], [1.0, 2.0], [1.0, 2.0], [1.0, 1.0]], requires_grad=True)
    got, entropy, *_ = masked_logprobs(z, ids, labels)
    ((got + entropy) * (labels >= 0)).sum().backward()
    assert entropy[1:].tolist() == pytest.approx([0, 0.5822, math.log(2)], abs=1e-4)
    assert got.tolist() == pytest.approx([0, 0, 0, -math.log(2)])
    assert z.grad is not None
    assert z.grad.tolist() == [[0, 0], [0, 0], [0, 0], [-0.5, 0.5]]
    theirs = lce_jax.masked_logprobs(jnp.asarray(z.detach().numpy()), ids.numpy(), labels.numpy())
    assert theirs.logprobs.tolist() == pytest.approx([0, 0, 0, -math.log(2)])
    assert theirs.entropy.tolist() == pytest.approx(entropy.tolist())


FLOAT32 = call("float32", leading=(37,), V=104, where=True, temperature=True, teacher_temperature=1.7, logit_scale=-1.3,
               teacher_logit_scale="same", bias=True, vocab_size=97)  # fmt: skip
KEPT = [
    test._replace(name=f"{test.name}, kept", options=(*test.options, ("cache_bytes", 1 << 22)))
    for test in (*CALLS[-1:], *(one for one in CALLS if one.name in ("everything, jsd", "bfloat16", "bfloat16 jsd")))
]
# The rest are combinations of what these combine.
FAST = ("ragged jsd", "ragged tv", "one column", "mixed", "everything", FLOAT32.name, KEPT[0].name)
DIVERGENCES = [
    pytest.param(test, id=test.name, marks=() if test.name in FAST else pytest.mark.slow)
    for test in (*CALLS, FLOAT32, *KEPT)
]


@pytest.mark.fast("everything, tv, kept")
@pytest.mark.parametrize("test", DIVERGENCES)
def test_divergences(test: Call) -> None:
    """Weights lie as torch's do."""
    drawn, want = draw(test), expected(draw(test))
    options = {name: p.to_torch(x) if isinstance(x, jax.Array) else x for name, x in drawn.options.items()}
    own = options.pop("weight_layout", "vh")
    layouts, models = (own, options.pop("teacher_weight_layout", own)), []
    for arrays, layout in zip((drawn.student, drawn.teacher), layouts, strict=True):
        hidden, weight, *bias = map(p.to_torch, arrays)
        models.append((hidden, weight if layout == "vh" else weight.T.contiguous(), *bias))
    student, teacher = models
    leaves = [x.requires_grad_() for x in student]
    biases = {"bias": leaves[2], "teacher_bias": teacher[2]} if test.bias else {}
    kl = linear_kl(*leaves[:2], *teacher[:2], **options, **biases)
    grads = torch.autograd.grad((p.to_torch(drawn.seed) * kl).sum(), leaves)
    assert kl.dtype == torch.float32
    assert kl.shape == torch.Size(test.leading)
    assert oracle.value_error(kl.detach().numpy(), want.kl) < 4e-6
    true = [want.gradients[0], want.gradients[1] if own == "vh" else want.gradients[1].T, *want.gradients[2:]]
    bound = {torch.bfloat16: 3e-3, torch.float16: 4e-4, torch.float32: 3e-6}
    for got, wanted, operand in zip(grads, true, leaves, strict=True):
        # dlogits and what is kept are rounded to the weight's dtype.
        coarse = max(bound[operand.dtype], bound[leaves[1].dtype] if "cache_bytes" in options else 0)
        assert got.dtype == operand.dtype
        assert oracle.relative_norm(got.float().numpy(), wanted) < coarse


def test_as_the_loss_of_lce_jax() -> None:
    given, told = (*p.draw()[:2], LABELS), dict(ignore_index=-100, label_smoothing=0.1, z_loss=1e-2)
    want = lce_jax.linear_cross_entropy(*(x.numpy() for x in given), **told)
    assert linear_cross_entropy(*given, **told).item() == pytest.approx(float(want), rel=1e-6)


GRADIENT = 1e-6  # as in test_parity


@pytest.mark.slow
@pytest.mark.parametrize("used", ["logprobs", "entropy", "lse", "candidate_logprobs"])
def test_only_one_output_used(used: str) -> None:
    problem = p.draw()
    seeds = p.seeds_like(problem.labels, K=5)
    seed = seeds[-1] if used == "candidate_logprobs" else seeds[0]
    grads = []
    for function in (linear_logprobs, p.stored):
        leaves = problem.leaves()
        (getattr(function(*leaves, candidates=p.candidates_like(problem.labels)), used) * seed).sum().backward()
        grads.append((leaves.hidden.grad, leaves.weight.grad))
    assert max(map(p.relative_norm, *grads)) < GRADIENT


def test_nothing_used_is_no_error() -> None:
    leaves = p.draw().leaves()
    out = linear_logprobs(*leaves, stats=True)
    (leaves.hidden.sum() + 0 * out.max_logit.sum()).backward()
    assert leaves.weight.grad is None


@pytest.mark.fast("float32")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_frozen_weight_costs_no_product_and_no_buffer(dtype: str) -> None:
    """What XLA compiled: a product less than for both gradients, and nothing as large as V x H."""
    struct, (T, H, V) = jax.ShapeDtypeStruct, (1024, 64, 16384)
    key = ProgramKey(p.told(V, requested=("xla",)), 0, 1, precision=None)
    shapes = (struct((T, H), dtype), struct((V, H), dtype), None, struct((1 + T * (1 + 4 + 2),), "int32"), None)

    def compiled(wanted: tuple[bool, bool, bool]) -> jax.stages.Compiled:
        run = build_program(pull_back, key, ("logprobs", "entropy"), wanted, True, None)
        return run.lower(*shapes).compile()

    frozen, both = compiled((True, False, False)), compiled((True, True, False))
    assert frozen.as_text().count(" dot(") == both.as_text().count(" dot(") - 1
    assert frozen.memory_analysis().output_size_in_bytes < V * H
    assert frozen.memory_analysis().temp_size_in_bytes <= both.memory_analysis().temp_size_in_bytes
    assert both.memory_analysis().output_size_in_bytes >= V * H * 2


def test_stride_zero_gradients() -> None:
    """``sum()`` expands one number to stride 0, which DLPack does not take."""
    leaves = p.draw().leaves()
    out = linear_logprobs(*leaves)
    out.logprobs.sum().backward()
    want = torch.autograd.grad((linear_logprobs(*leaves).logprobs * torch.ones(37)).sum(), leaves[:2])
    assert torch.equal(leaves.hidden.grad, want[0])
    assert torch.equal(leaves.weight.grad, want[1])


@pytest.mark.parametrize("options", [{}, {"where": torch.tensor([3, 5, 8])}], ids=str)
def test_results_can_be_written_in_place(options: dict[str, Any]) -> None:
    problem = p.draw()
    mask = torch.arange(problem.labels.numel()) % 2 == 0
    inside, outside = problem.leaves(), problem.leaves()
    written = linear_logprobs(*inside, **options).logprobs
    written[~mask] = 0.0
    written.mul_(2.0).sum().backward()
    (linear_logprobs(*outside, **options).logprobs * mask * 2.0).sum().backward()
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(inside[:2], outside[:2], strict=True))


SMALL = p.draw(T=6, H=8, V=10)


@pytest.mark.parametrize("wrong", [0.0, -0.5, float("nan"), float("inf"), 1e-42], ids=str)
def test_a_temperature_that_is_not_looked_at_stays_in_its_token(wrong: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_checks, "can_read_values", lambda _: False)  # as on a GPU
    damaged, rest = torch.tensor([1, 3]), torch.tensor([0, 2, 4, 5])
    temperature = torch.tensor([1.0, 0.7, 1.0, 2.0, 0.5, 1.0])
    seeds = p.seeds_like(SMALL.labels, K=3)
    options = dict(stats=True, mean_logit=True, candidates=p.candidates_like(SMALL.labels, K=3, V=10))
    without = [seed.index_fill(0, damaged, 0.0) for seed in seeds]
    want, wanted = p.gradients(SMALL, without, temperature=temperature, **options)
    out, grads = p.gradients(SMALL, seeds, temperature=temperature.index_fill(0, damaged, wrong), **options)
    for got, true in zip(out[:7], want[:7], strict=True):
        assert got[damaged].isnan().all()
        assert torch.equal(got[rest], true[rest])
    assert all(p.relative_norm(got, true) < 1e-6 for got, true in zip(grads, wanted, strict=True))
