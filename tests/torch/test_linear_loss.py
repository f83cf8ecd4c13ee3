"""A per-token loss with its gradients in the forward, against stored logits in float64 and against two passes."""

from __future__ import annotations

import concurrent.futures
import contextlib
import threading
from collections.abc import Callable
from typing import Any

import jax
import pytest
import torch

from lce_jax.xla import _walk
from lce_torch_bridge import linear_entropy, linear_logprobs, linear_loss
from lce_torch_bridge.ops import _loss
from lce_torch_bridge.tensors import _padding
from lce_torch_bridge.through_jax._logprobs import pull_back
from lce_torch_bridge.through_jax._programs import ProgramKey, build_program
from tests import cases
from tests.pairs import combined
from tests.torch import problem as p
from tests.torch.executor import launched_directly

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


@pytest.mark.fast("vocab_size-8")
@combined(options=OPTIONS, chunk_bytes=[0, p.THREE_CHUNKS, None])
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
    return _loss.choose_chunk_rows(tokens, weight, chunk_bytes, wgrad, p.told(len(weight), **options))


def large(device: str, dtype: torch.dtype = torch.bfloat16, H: int = 4096, V: int = 151936) -> torch.Tensor:
    """A weight without memory; what is no CPU counts as a GPU."""
    return torch.zeros(1, dtype=dtype, device=device).expand(V, H).requires_grad_()


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


@pytest.mark.slow
def test_one_chunk_has_the_bits_of_two_passes() -> None:
    problem = p.draw(T=300)
    total, out, grads = evaluate(problem, factor=1.0)
    again, want, wanted = evaluate(problem, two_passes, factor=1.0, cache_bytes=1 << 40)  # as linear_loss keeps them
    assert all(map(torch.equal, (total, *out[:3], *grads), (again, *want[:3], *wanted)))


@pytest.mark.fast("5000")
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


@pytest.mark.slow  # as bfloat16 above, and a gradient scaler with linear_cross_entropy
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


@pytest.mark.fast("metric")
@pytest.mark.parametrize("entropy", ["metric", False])
def test_entropy_without_a_gradient(entropy: Any) -> None:
    problem = p.draw()
    total, out, grads = evaluate(problem, entropy=entropy)
    again, want, wanted = evaluate(problem, two_passes, entropy=entropy)
    assert torch.equal(total, again)
    assert p.value_error(out.entropy, want.entropy) == 0
    assert max(map(p.relative_norm, grads, wanted)) < GRADIENT


def test_the_sum_of_dweight_is_overwritten() -> None:
    """What XLA compiled: the sum that comes in is the sum that goes out, and no second one is made."""
    struct, (T, H, V) = jax.ShapeDtypeStruct, (2048, 64, 16384)
    key = ProgramKey(p.told(V, requested=("xla",)), 0, 1, precision=None)
    per_token = struct((1 + T * (1 + 4 + 2),), "int32")
    shapes = (struct((T, H), "bfloat16"), struct((V, H), "bfloat16"), None, per_token, struct((V, H), "float32"))
    run = build_program(pull_back, key, ("logprobs", "entropy"), (True, True, False), True, None, donate=(4,))
    memory = run.lower(*shapes).compile().memory_analysis()
    assert memory.alias_size_in_bytes == V * H * 4
    assert memory.temp_size_in_bytes < T * V * 2


OF_FLOAT16 = 2.0**-11  # of float16, relative, at most


@pytest.fixture
def rounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products take dlogits in the weight's dtype, as on a GPU."""
    monkeypatch.setattr(_walk, "gradient_dtype", lambda case: case.dtype)


def scaled_loss(logprobs: Any, entropy: Any, lse: Any, factors: Any) -> Any:
    return factors * (0.01 * lse**2 - logprobs - 0.1 * entropy)


def scaled_gradients(call: Any, problem: p.Problem, loss_scale: float, **options: Any) -> Any:
    leaves = problem.leaves()
    return torch.autograd.grad(loss_scale * call(*leaves, **options), leaves[:2])


@pytest.mark.fast("(1e-12")
@pytest.mark.usefixtures("rounded")
@combined(
    magnitudes=[(1e-6, 1e-6, 1e-6), (1e-12, 1e-6, 1e-9), (0.0, 1e-9, 1e3)],
    chunk_bytes=[p.THREE_CHUNKS, None],
    way=[contextlib.nullcontext, launched_directly],
)
def test_losses_of_any_magnitude(magnitudes: tuple[float, ...], chunk_bytes: int | None, way: Any) -> None:
    """Each chunk's scaled_gradients are as exact as float16's rounding of the largest ones lets them be."""
    drawn = p.draw(T=MANY)
    problem = drawn._replace(weight=drawn.weight.half(), labels=drawn.labels % 50)  # half of the columns have none
    factors = torch.tensor(magnitudes).repeat_interleave(2048)[:MANY]
    options: Any = dict(
        loss_scale=0.1 / max(magnitudes), logit_scale=1.0625, temperature=torch.linspace(0.05, 2, MANY)
    )  # no other test's programs
    with way():
        found = scaled_gradients(
            lambda *x, **told: linear_loss(scaled_loss, *x, factors, chunk_bytes=chunk_bytes, **told)[0],
            problem,
            **options,
        )
    double = p.Problem(problem.hidden.half().double(), problem.weight.double(), problem.labels)
    want = scaled_gradients(lambda *x, **told: scaled_loss(*p.stored(*x, **told)[:3], factors).sum(), double, **options)
    for columns in (slice(50), slice(50, None)):
        assert p.relative_norm(found[1][columns], want[1][columns]) < OF_FLOAT16
    for first, magnitude in zip(range(0, MANY, 2048), magnitudes, strict=True):
        rows = slice(first, first + 2048)
        if magnitude > 1e-6 * max(magnitudes) or chunk_bytes is not None:
            assert p.relative_norm(found[0][rows], want[0][rows]) < OF_FLOAT16


@pytest.mark.usefixtures("rounded")
def test_the_largest_dlogits_stay_within_float16() -> None:
    """Those of labels that are all but impossible, which are as large as they may be."""
    drawn = p.draw(T=300)
    weight = (8 * drawn.weight).half()
    labels = (drawn.hidden @ weight.float().T).argmin(-1)
    problem = p.Problem(drawn.hidden.half(), weight, labels)
    found = scaled_gradients(lambda *x: linear_loss(lambda logprobs, *_: -logprobs, *x)[0], problem, 1.0)
    double = p.Problem(problem.hidden.double(), weight.double(), labels)
    want = scaled_gradients(lambda *x: -p.stored(*x).logprobs.sum(), double, 1.0)
    assert max(map(p.relative_norm, found, want)) < OF_FLOAT16


FLOOR = cases.case("floor", leading=(4, 6), floor=5, stats=True, labels="foreign", temperature="token")


def floored_loss(logprobs: torch.Tensor, entropy: torch.Tensor, lse: torch.Tensor) -> torch.Tensor:
    return -torch.exp(logprobs / 10) - 0.1 * entropy + 0.01 * lse**2


def test_a_loss_in_the_forward_is_that_of_the_results() -> None:
    problem, options, _ = p.from_case(FLOOR)
    options["where"] = torch.arange(24).view(4, 6) % 3 > 0
    leaves, others = problem.leaves(), problem.leaves()
    total, out = linear_loss(floored_loss, *leaves, chunk_bytes=0, **options)
    by_results = linear_logprobs(*others, **options)
    of_kept = floored_loss(*by_results[:3])[options["where"]].sum()
    assert torch.allclose(total, of_kept, rtol=1e-6)
    assert out.support is not None
    assert torch.equal(out.support, by_results.support)
    assert set(out.support.flatten().tolist()) == {0, 5, 6}
    for got, want in zip(
        *(torch.autograd.grad(x, y[:2]) for x, y in ((total, leaves), (of_kept, others))), strict=True
    ):
        assert p.relative_norm(got, want) < 1e-6


def test_a_number_and_all_tokens() -> None:
    problem = p.draw()
    want = linear_logprobs(*problem, stats=True)
    got = linear_logprobs(*problem, stats=True, logit_floor=-float("inf"))
    assert all(torch.equal(a, b) for a, b in zip(got[:5], want[:5], strict=True))
    assert got.support is not None
    assert torch.all(got.support == 104)
    entropy, _ = linear_entropy(*problem[:2], logit_floor=1e30)  # without labels, no token is left
    assert torch.all(entropy == 0)
    foreign = problem._replace(labels=torch.full_like(problem.labels, -100))
    assert torch.all(linear_logprobs(*foreign, logit_floor=1e30, out_of_vocab="megatron").logprobs == 0)


@pytest.mark.fast("linear_loss-0.001")
@pytest.mark.parametrize("temperature", [1e-2, 1e-3, 1e-4])
@pytest.mark.parametrize("loss", [False, True], ids=["linear_logprobs", "linear_loss"])
def test_greedy_labels(loss: bool, temperature: float) -> None:
    """Their gradient is what float32 leaves of 1 - p, not the noise of large numbers."""
    generator = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(64, 64, generator=generator), torch.randn(1000, 64, generator=generator) / 4
    problem = p.Problem(hidden, weight, (hidden @ weight.T).argmax(-1))

    def error(call: object) -> float:
        leaves = problem.leaves()
        (dweight,) = torch.autograd.grad(call(*leaves), leaves.weight)  # type: ignore[operator]
        leaves = p.Problem(*(x.double() for x in problem[:2]), problem.labels).leaves()
        (true,) = torch.autograd.grad(stored(*leaves), leaves.weight)
        return p.relative_norm(dweight, true)

    def stored(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return (hidden @ weight.T / temperature).log_softmax(-1).gather(-1, labels[:, None]).sum()

    def ours(*operands: torch.Tensor) -> torch.Tensor:
        if loss:
            return linear_loss(lambda logprob, *_: logprob, *operands, temperature=temperature)[0]
        return linear_logprobs(*operands, temperature=temperature).logprobs.sum()

    assert error(ours) <= 2 * error(stored)


def test_a_name_that_an_option_takes_from_the_loss_is_refused() -> None:
    def loss(
        logprobs: Any, _: Any, __: Any, where: Any = 1.0, ignore_index: Any = 0, wgrad: Any = 0, cotangent: Any = 0,
        chunk_bytes: Any = 0,
    ) -> Any:  # fmt: skip
        del ignore_index, wgrad, cotangent, chunk_bytes
        return where * logprobs

    problem = p.draw()
    given = {"where": problem.labels > 3, "ignore_index": 3, "wgrad": "main_grad", "cotangent": 0.5, "chunk_bytes": 1}
    for name, x in given.items():
        with pytest.raises(
            TypeError, match=f"{name} is an option, .* has an argument of that name: rename the argument"
        ):
            linear_loss(loss, *problem, **{name: x})


def saving(logprobs: Any, entropy: Any, lse: Any) -> Any:
    return logprobs.exp() * entropy + 1e-3 * lse**2


@pytest.mark.usefixtures("in_float64")
def test_a_checkpoint_runs_each_chunk_once() -> None:
    """And before, without gradients, all tokens. A chunk's derivatives are computed at once: nothing is recomputed."""
    problem, chunks = p.draw(T=MANY), []
    leaves, plain = problem.leaves(), problem.leaves()

    def counted(logprobs: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
        chunks.append(len(logprobs))
        return saving(logprobs, *others)

    def call() -> torch.Tensor:
        return linear_loss(counted, *leaves, chunk_bytes=p.THREE_CHUNKS)[0]

    with torch.no_grad():
        call()  # the first one of a function compares tokens
    chunks.clear()
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x):  # goes on after the call
        torch.utils.checkpoint.checkpoint(call, use_reentrant=False).backward()
        assert torch._C._autograd._top_saved_tensors_default_hooks(False) is not None
    assert sum(chunks) == 2 * MANY
    linear_loss(saving, *plain, chunk_bytes=p.THREE_CHUNKS)[0].backward()
    assert all(torch.equal(x.grad, y.grad) for x, y in zip(leaves[:2], plain[:2], strict=True))


def differentiated_twice(call: Callable[..., torch.Tensor], problem: p.Problem, keep: bool) -> list[Any]:
    """What a thread that keeps the graph gets of 3 times a sum, and one that may not.

    The first holds all that autograd has saved, and goes on after the second has ended.
    """
    leaves, saved, held, ended = problem.leaves(), list[torch.Tensor](), threading.Event(), threading.Event()
    keeper: list[int] = []  # its number, once for each tensor that it has been given

    def unpack(x: torch.Tensor) -> torch.Tensor:
        if threading.get_ident() in keeper:
            keeper.append(keeper[0])
            if len(keeper) > len(saved):
                held.set()
                assert ended.wait(60)
        return x

    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, unpack):  # type: ignore[func-returns-value]
        total = 3 * call(*leaves)

    def differentiate(first: bool) -> Any:
        if first:
            keeper.append(threading.get_ident())
        else:
            assert held.wait(60)
        try:
            return torch.autograd.grad(total, leaves[:2], retain_graph=first or keep)
        except RuntimeError as error:
            return str(error)
        finally:
            (held if first else ended).set()

    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        return list(pool.map(differentiate, (True, False)))


@pytest.mark.parametrize("function", ["linear_loss", "a cache of linear_logprobs"])
def test_what_one_thread_has_overwritten_no_other_reads(function: str) -> None:
    def call(*operands: torch.Tensor) -> torch.Tensor:
        if function == "linear_loss":
            return linear_loss(lambda logprob, *_: -logprob, *operands)[0]
        return -linear_logprobs(*operands, cache_bytes=1 << 20).logprobs.sum()

    problem = p.draw()
    leaves = problem.leaves()
    wanted = torch.autograd.grad(3 * -linear_logprobs(*leaves).logprobs.sum(), leaves[:2])
    with launched_directly() if "cache" in function else contextlib.nullcontext():
        refused, grads = differentiated_twice(call, problem, keep=False)
        both = differentiated_twice(call, problem, keep=True)
    assert "another thread has differentiated this graph" in refused
    assert "retain_graph=True in every thread" in refused
    for found in (grads, *both):
        assert all(p.relative_norm(*each) < 1e-6 for each in zip(found, wanted, strict=True))
