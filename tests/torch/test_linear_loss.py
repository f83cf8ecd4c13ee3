"""A per-token loss with its gradients in the forward, against stored logits in float64 and against two passes."""

from __future__ import annotations

from typing import Any

import jax
import pytest
import torch
from torch.utils.checkpoint import checkpoint

from lce_torch_bridge import linear_logprobs, linear_loss
from lce_torch_bridge.ops import _loss
from lce_torch_bridge.tensors import _padding
from lce_torch_bridge.through_jax._logprobs import pull_back
from lce_torch_bridge.through_jax._programs import ProgramKey, program
from tests.pairs import pairs_of
from tests.torch import problem as p

VALUE, GRADIENT = 2e-6, 1e-6  # as in test_parity
ROUNDING = 1.7e-3  # of one rounding to bfloat16: 2⁻⁹ of each element, uniformly
MANY = 5000  # tokens of three chunks


def ppo(logprobs: Any, entropy: Any, lse: Any, old: Any, advantages: Any) -> Any:
    """A clipped ratio, an entropy bonus, a z-loss. ``advantages`` are [t, 2], of which one counts."""
    advantage, ratio = advantages[:, 0], torch.exp(logprobs - old)
    clipped = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
    return -clipped - (0.0 if entropy is None else 0.05 * entropy) + 1e-3 * lse**2


def arguments(problem: p.Problem) -> list[torch.Tensor]:
    """Old log-probabilities near the new ones, and advantages."""
    generator, shape = torch.Generator().manual_seed(4), problem.labels.shape
    old = p.stored(problem.hidden, problem.weight, problem.labels).logprobs.float()
    return [old + 0.2 * torch.randn(shape, generator=generator), torch.randn(*shape, 2, generator=generator)]


def two_passes(
    loss_fn: Any, hidden: Any, weight: Any, labels: Any, *own: Any, call: Any = linear_logprobs, **options: Any
) -> Any:
    out = call(hidden, weight, labels, **options)
    return loss_fn(*out[:3], *own).sum(), out


def evaluate(problem: p.Problem, function: Any = linear_loss, factor: float = 1 / 37, **options: Any) -> Any:
    """The sum, the results, and the gradients in hidden, weight, the per-token arguments and the bias."""
    leaves, own = problem.leaves(), [x.to(torch.float32).requires_grad_() for x in arguments(problem)]
    if "bias" in options:
        options["bias"] = options["bias"].clone().requires_grad_()
    total, out = function(ppo, *leaves, *own, **options)
    inputs = [*leaves[:2], *own, *([options["bias"]] if "bias" in options else [])]
    return total, out, torch.autograd.grad(factor * total, inputs)


def exact(problem: p.Problem, **options: Any) -> Any:
    hidden = problem.hidden.to(problem.weight.dtype).double()
    options = {name: x.double() if isinstance(x, torch.Tensor) else x for name, x in options.items()}
    leaves = p.Problem(hidden, problem.weight.double(), problem.labels).leaves()
    own = [x.double().requires_grad_() for x in arguments(problem)]
    if "bias" in options:
        options["bias"].requires_grad_()
    total, out = two_passes(ppo, *leaves, *own, call=p.stored, **options)
    inputs = [*leaves[:2], *own, *([options["bias"]] if "bias" in options else [])]
    return total, out, torch.autograd.grad(total / 37, inputs)


BIAS = torch.randn(104, generator=torch.Generator().manual_seed(5))
OPTIONS: list[dict[str, Any]] = [
    {},
    dict(logit_scale=1.3, logit_softcap=3.0, bias=BIAS, vocab_size=97),
    dict(temperature=torch.linspace(0.5, 2, MANY)),
]


@pairs_of(1, options=OPTIONS, chunk_bytes=[0, p.THREE_CHUNKS, None])
def test_values_and_all_gradients(options: dict[str, Any], chunk_bytes: int | None) -> None:
    problem = p.draw(T=MANY)
    problem.labels[:3] = torch.tensor([-100, 2**32 + 3, 104])
    total, out, grads = evaluate(problem, stats=True, chunk_bytes=chunk_bytes, **options)
    true, want, wanted = exact(problem, **options)
    assert abs((total / true).item() - 1) < 1e-5
    assert max(map(p.value_error, out[:5], want[:5])) < VALUE
    assert not any(field.requires_grad for field in out[:5])
    assert max(map(p.relative_norm, grads, wanted)) < GRADIENT


def chunk_rows(tokens: int, weight: torch.Tensor, chunk_bytes: int | None, **options: Any) -> int:
    wgrad = options.pop("wgrad", "return")
    return _loss._chunk_rows(tokens, weight, chunk_bytes, wgrad, p.told(len(weight), **options))


def large(device: str, dtype: torch.dtype = torch.bfloat16, H: int = 4096, V: int = 151936) -> torch.Tensor:
    """A weight without memory; what is no CPU counts as a GPU."""
    return torch.zeros(1, dtype=dtype, device=device).expand(V, H).requires_grad_()


@pytest.mark.parametrize(
    ("tokens", "options", "dtype", "rows"),
    [
        (8192, {}, torch.bfloat16, 8192),  # 2.3 GiB: as much as a chunk's 1.2, and a sum's 1.2 beyond dweight's
        (8193, {}, torch.bfloat16, 4096),  # its program would have 16,384 rows
        (8192, {"wgrad": "main_grad"}, torch.bfloat16, 4096),
        (8192, {"gradient_threshold": 2.0**-12}, torch.bfloat16, 4096),
        (8192, {"chunk_bytes": 1400 << 20}, torch.bfloat16, 8192),
        (8192, {"chunk_bytes": 1100 << 20}, torch.bfloat16, 2048),
        (8192, {}, torch.float16, 4096),  # summed in float32 anyway
    ],
)
def test_one_chunk_where_it_takes_no_more(tokens: int, options: dict[str, Any], dtype: torch.dtype, rows: int) -> None:
    told = dict(options)
    assert chunk_rows(tokens, large("meta", dtype), told.pop("chunk_bytes", None), **told) == rows


BUDGETS = [0, *(int(2 ** (n / 3)) for n in range(66, 114)), 1400 << 20]  # 4 MiB to 200 GiB


@pytest.mark.parametrize("device", ["meta", "cpu"])
@pytest.mark.parametrize("wgrad", ["return", "main_grad"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_more_bytes_never_cost_more(dtype: torch.dtype, wgrad: str, device: str) -> None:
    """Nor do chunks hold more than the bytes say beside a sum of dweight, of which dweight itself is a part."""
    for T, H, V in ((4096, 4096, 151936), (65536, 4096, 151936), (9000, 1024, 50257), (100, 64, 1000)):
        weight, counts = large(device, dtype, H, V), []
        for chunk_bytes in sorted(BUDGETS):
            rows = chunk_rows(T, weight, chunk_bytes, wgrad=wgrad)
            counts.append(-(-T // rows))
            summed = counts[-1] > 1 or wgrad == "main_grad" or dtype == torch.float16
            held = p.bytes_of(_padding.size(min(rows, T)), weight) + V * H * (4 if summed else weight.element_size())
            assert held <= max(chunk_bytes, p.bytes_of(128, weight)) + V * H * 4
        assert counts == sorted(counts, reverse=True)
        assert counts[-1] == 1


def test_one_chunk_has_the_bits_of_two_passes() -> None:
    problem = p.draw(T=300)
    total, out, grads = evaluate(problem, factor=1.0)
    again, want, wanted = evaluate(problem, two_passes, factor=1.0, cache_bytes=1 << 40)  # as linear_loss keeps them
    assert all(map(torch.equal, (total, *out[:3], *grads), (again, *want[:3], *wanted)))


@pytest.mark.parametrize("T", [300, MANY])
def test_bfloat16_is_scaled_without_rounding_the_factor(T: int) -> None:
    """1/37 in bfloat16 is off by 1.6e-3, which would shrink each gradient by that."""
    problem = p.draw(T=T, dtype=torch.bfloat16)
    _, _, grads = evaluate(problem, chunk_bytes=p.THREE_CHUNKS)
    _, _, wanted = exact(problem)
    for got, want, roundings in zip(grads[:2], wanted[:2], (2, 1 if T == MANY else 2), strict=True):
        assert p.relative_norm(got, want) < 1.2 * roundings**0.5 * ROUNDING
        assert abs(float((got.double() * want).sum() / (want * want).sum()) - 1) < 3e-4


def test_losses_that_are_scaled_inside_are_rounded_once() -> None:
    problem = p.draw(T=300, dtype=torch.bfloat16)
    leaves, own = problem.leaves(), arguments(problem)
    inside, _ = linear_loss(lambda *given: ppo(*given) / 37, *leaves, *own)
    outside, _ = linear_loss(ppo, *leaves, *own)
    _, _, wanted = exact(problem)
    once, twice = (torch.autograd.grad(total, leaves[:2]) for total in (inside, outside / 37))
    for got, worse, want in zip(once, twice, wanted, strict=False):
        assert p.relative_norm(got, want) < 1.05 * ROUNDING < p.relative_norm(worse, want)


def test_float16_is_rounded_after_the_loss_scale() -> None:
    """Losses of 1e-7 have gradients that float16 does not hold; a loss scale of 2^20 comes with the cotangent."""
    problem = p.draw(T=300, dtype=torch.float16)

    def tiny(*given: Any) -> Any:
        return 1e-7 * ppo(*given)

    own = arguments(problem)
    leaves = problem.leaves()
    got = torch.autograd.grad(2.0**20 * linear_loss(tiny, *leaves, *own)[0], leaves[:2])
    double = p.Problem(problem.hidden.double(), problem.weight.double(), problem.labels).leaves()
    true, _ = two_passes(tiny, *double, *own, call=p.stored)
    want = torch.autograd.grad(2.0**20 * true, double[:2])
    assert max(map(p.relative_norm, got, want)) < 2.6e-4  # as in test_parity
    unscaled = torch.autograd.grad(linear_loss(tiny, *leaves, *own)[0], leaves[:2])
    assert p.relative_norm(2.0**20 * unscaled[0].double(), want[0]) > 1e-2


@pytest.mark.parametrize("kind", ["mask", "index", "ignored"])
def test_tokens_that_are_left_out(kind: str) -> None:
    """They count nowhere, whatever they hold, and cost nothing; results of the others keep their bits."""
    problem = p.draw(T=60)
    problem = problem._replace(hidden=problem.hidden.view(3, 20, -1), labels=problem.labels.view(3, 20))
    own = arguments(problem)
    mask = torch.rand(3, 20, generator=torch.Generator().manual_seed(0)) < 0.4
    part = p.Problem(problem.hidden[mask], problem.weight, problem.labels[mask]).leaves()
    wanted_own = [x[mask].requires_grad_() for x in own]
    want, _ = linear_loss(ppo, *part, *wanted_own)
    wanted = torch.autograd.grad(want, (*part[:2], *wanted_own))
    full = linear_logprobs(*problem)
    problem.hidden[~mask], own[0][~mask] = torch.nan, torch.nan
    if kind == "ignored":
        problem.labels[~mask] = -100
    keep = {"mask": mask, "index": mask.flatten().nonzero()[:, 0].int(), "ignored": None}[kind]
    leaves, own = problem.leaves(), [x.requires_grad_() for x in own]
    total, out = linear_loss(ppo, *leaves, *own, where=keep, ignore_index=-100 if kind == "ignored" else None)
    grads = torch.autograd.grad(total, (*leaves[:2], *own))
    assert torch.equal(total, want)
    assert torch.equal(out.logprobs, full.logprobs.where(mask, 0.0))
    assert torch.equal(grads[1], wanted[1])
    for got, true in zip((grads[0], *grads[2:]), (wanted[0], *wanted[2:]), strict=True):
        assert torch.equal(got[mask], true)
        assert not got[~mask].any()


@pytest.mark.parametrize("entropy", ["metric", False])
def test_entropy_without_a_gradient(entropy: Any) -> None:
    problem = p.draw()
    total, out, grads = evaluate(problem, entropy=entropy)
    again, want, wanted = evaluate(problem, two_passes, entropy=entropy)
    assert torch.equal(total, again)
    assert p.value_error(out.entropy, want.entropy) == 0
    assert max(map(p.relative_norm, grads, wanted)) < GRADIENT


def test_no_tokens_and_a_loss_without_a_gradient() -> None:
    weight = torch.ones(16, 8, requires_grad=True)
    for T, loss_fn in ((0, ppo), (3, lambda logprobs, *_: torch.ones_like(logprobs))):
        hidden, own = torch.zeros(T, 8, requires_grad=True), [torch.zeros(T), torch.zeros(T, 2)]
        total, out = linear_loss(loss_fn, hidden, weight, torch.zeros(T, dtype=torch.int64), *own)
        assert out.entropy.shape == (T,)
        assert total.item() == T
        assert not any(grad.any() for grad in torch.autograd.grad(total, (hidden, weight)))


@pytest.mark.parametrize("frozen", ["hidden", "weight"])
def test_frozen(frozen: str) -> None:
    problem, own = p.draw(T=MANY), arguments(p.draw(T=MANY))
    grads = []
    for names in (("hidden", "weight"), (("weight", "hidden")[("hidden", "weight").index(frozen)],)):
        leaves = problem.leaves()
        for name in {"hidden", "weight"} - set(names):
            getattr(leaves, name).requires_grad_(False)
        total, _ = linear_loss(ppo, *leaves, *own, bias=BIAS.clone().requires_grad_(), chunk_bytes=p.THREE_CHUNKS)
        grads.append(torch.autograd.grad(total, getattr(leaves, names[-1] if len(names) == 1 else "hidden")))
    other = "weight" if frozen == "hidden" else "hidden"
    _, _, want = evaluate(problem, factor=1.0, bias=BIAS, chunk_bytes=p.THREE_CHUNKS)
    assert torch.equal(grads[1][0], want[("hidden", "weight").index(other)])


def test_without_a_gradient_it_is_a_plain_forward() -> None:
    """In the per-token arguments, and in whatever loss_fn closes over, autograd differentiates as usual."""
    problem, own = p.draw(T=60), [x.requires_grad_() for x in arguments(p.draw(T=60))]
    scale = torch.tensor(2.0, requires_grad=True)
    total, out = linear_loss(lambda *given: scale * ppo(*given), *problem, *own)
    again, want = two_passes(lambda *given: scale * ppo(*given), *problem, *own)
    inputs = (*own, scale)
    grads, wanted = (torch.autograd.grad(x, inputs) for x in (total, again))
    assert all(map(torch.equal, (total, *out[:3], *grads), (again, *want[:3], *wanted)))
    with torch.no_grad():
        assert torch.equal(linear_loss(lambda *given: scale * ppo(*given), *problem.leaves(), *own)[0], total)


@pytest.mark.parametrize("T", [300, MANY])
@pytest.mark.parametrize("cast", [False, True], ids=["", "autocast"])
def test_main_grad(cast: bool, T: int) -> None:
    """Two micro-batches, forwards before backwards, add up in float32."""
    dtype = torch.float32 if cast else torch.bfloat16
    problem = p.draw(T=T, dtype=dtype)
    weight = torch.nn.Parameter(problem.weight.clone())
    weight.main_grad, weight.grad_added_to_main_grad, weight.zero_out_wgrad = torch.zeros(weight.shape), False, True
    want = torch.zeros_like(weight.main_grad, dtype=torch.float64)
    totals = []
    for seed in (0, 1):
        batch = p.draw(T=T, dtype=dtype, seed=seed)._replace(weight=weight)
        with torch.autocast("cpu", torch.bfloat16, enabled=cast):
            total, _ = linear_loss(ppo, *batch, *arguments(problem), wgrad="main_grad", chunk_bytes=p.THREE_CHUNKS)
        totals.append(total)
        seen = p.Problem(batch.hidden.bfloat16().double(), problem.weight.bfloat16().double(), batch.labels).leaves()
        true, _ = two_passes(ppo, *seen, *arguments(problem), call=p.stored)
        want += torch.autograd.grad(true / 37, seen.weight)[0]
    (sum(totals) / 37).backward()
    assert weight.grad_added_to_main_grad
    assert not weight.grad.to_dense().any()  # the placeholder of zero_out_wgrad
    assert p.relative_norm(weight.main_grad, want) < (GRADIENT if T == MANY else 1.2 * ROUNDING)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing(reentrant: bool) -> None:
    problem, own = p.draw(T=60), arguments(p.draw(T=60))
    _, _, want = evaluate(problem, factor=1.0)
    leaves = problem.leaves()

    def call(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return linear_loss(ppo, hidden, weight, problem.labels, *own)[0]

    checkpoint(call, *leaves[:2], use_reentrant=reentrant).backward()
    assert all(torch.equal(leaf.grad, grad) for leaf, grad in zip(leaves[:2], want, strict=False))


def test_the_graph_can_be_retained() -> None:
    leaves = p.draw().leaves()
    total, _ = linear_loss(ppo, *leaves, *arguments(p.draw()))
    first = torch.autograd.grad(total, leaves[:2], retain_graph=True)
    assert all(map(torch.equal, torch.autograd.grad(total, leaves[:2]), first))


def test_only_gradients_are_kept() -> None:
    leaves, saved = p.draw(T=MANY).leaves(), []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x.shape) or x, lambda x: x):
        linear_loss(lambda logprobs, *_: logprobs, *leaves, chunk_bytes=p.THREE_CHUNKS)
    assert sorted(saved) == sorted([leaves.hidden.shape, leaves.weight.shape])


def test_the_sum_of_dweight_is_overwritten() -> None:
    """What XLA compiled: the sum that comes in is the sum that goes out, and no second one is made."""
    struct, (T, H, V) = jax.ShapeDtypeStruct, (2048, 64, 16384)
    key = ProgramKey(p.told(V, implementation="xla"), 0, 1, precision=None)
    per_token = struct((1 + T * (1 + 4 + 2),), "int32")
    shapes = (struct((T, H), "bfloat16"), struct((V, H), "bfloat16"), None, per_token, struct((V, H), "float32"))
    run = program(pull_back, key, ("logprobs", "entropy"), (True, True, False), True, None, donate=(4,))
    memory = run.lower(*shapes).compile().memory_analysis()
    assert memory.alias_size_in_bytes == V * H * 4
    assert memory.temp_size_in_bytes < T * V * 2
