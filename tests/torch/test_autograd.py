"""What a drop-in for PyTorch's own layers must keep of autograd's manners."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import jax
import pytest
import torch
from torch.utils.checkpoint import checkpoint

from lce_torch_bridge import _execute, _programs, linear_logprobs
from lce_torch_bridge._programs import Spec
from tests.torch import problem as p
from tests.torch.processes import succeed

GRADIENT = 1e-6  # as in test_parity


@pytest.mark.parametrize("used", ["logprobs", "entropy", "lse"])
def test_only_one_output_used(used: str) -> None:
    problem = p.draw()
    seed = p.seeds_like(problem.labels)[0]
    grads = []
    for call in (linear_logprobs, p.stored):
        leaves = problem.leaves()
        (getattr(call(*leaves), used) * seed).sum().backward()
        grads.append((leaves.hidden.grad, leaves.weight.grad))
    assert max(map(p.relative_norm, *grads)) < GRADIENT


def test_nothing_used_is_no_error() -> None:
    leaves = p.draw().leaves()
    out = linear_logprobs(*leaves, stats=True)
    (leaves.hidden.sum() + 0 * out.max_logit.sum()).backward()
    assert leaves.weight.grad is None


@pytest.mark.parametrize("frozen", ["hidden", "weight"])
def test_frozen(frozen: str) -> None:
    problem = p.draw()
    seeds = p.seeds_like(problem.labels)
    leaves = problem.leaves()
    getattr(leaves, frozen).requires_grad_(False)
    p.objective(linear_logprobs(*leaves), seeds).backward()
    assert getattr(leaves, frozen).grad is None
    other = "weight" if frozen == "hidden" else "hidden"
    _, both = p.gradients(problem, seeds)
    assert torch.equal(getattr(leaves, other).grad, both[("hidden", "weight").index(other)])


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_frozen_weight_costs_no_product_and_no_buffer(dtype: str, padded: bool) -> None:
    """What XLA compiled: one product recomputes the logits and one makes dhidden; nothing else is as large as V x H."""
    struct, (T, H, V) = jax.ShapeDtypeStruct, (1024, 64, 16384)
    spec = Spec(p.told(V, implementation="xla"), 0, padded=False, precision=None, masked=padded)
    shapes = (struct((T, H), dtype), struct((V, H), dtype), None, struct((1 + T * (1 + 4 + 2),), "int32"))

    def compiled(wanted: tuple[bool, bool, bool]) -> jax.stages.Compiled:
        run = _programs.gradients(spec, ("logprobs", "entropy"), wanted, True, None)
        return run.lower(*shapes).compile()

    frozen, both = compiled((True, False, False)), compiled((True, True, False))
    assert frozen.as_text().count(" dot(") == 2
    assert both.as_text().count(" dot(") == 3
    assert frozen.memory_analysis().output_size_in_bytes < V * H
    assert frozen.memory_analysis().temp_size_in_bytes <= both.memory_analysis().temp_size_in_bytes
    assert both.memory_analysis().output_size_in_bytes >= V * H * 2


@pytest.mark.parametrize("shape", [(0,), (2, 0), (0, 3)])
def test_no_tokens(shape: tuple[int, ...]) -> None:
    hidden, weight = torch.zeros(*shape, 8, requires_grad=True), torch.ones(16, 8, requires_grad=True)
    out = linear_logprobs(hidden, weight, torch.zeros(shape, dtype=torch.int64), stats=True, mean_logit=True)
    assert all(field.shape == shape for field in out)
    (out.logprobs.sum() + out.entropy.sum()).backward()
    assert torch.equal(hidden.grad, torch.zeros_like(hidden))
    assert torch.equal(weight.grad, torch.zeros_like(weight))


def test_stride_zero_gradients() -> None:
    """``sum()`` expands one number, and DLPack takes no such tensor."""
    leaves = p.draw().leaves()
    out = linear_logprobs(*leaves)
    out.logprobs.sum().backward()
    want = torch.autograd.grad((linear_logprobs(*leaves).logprobs * torch.ones(37)).sum(), leaves[:2])
    assert torch.equal(leaves.hidden.grad, want[0])
    assert torch.equal(leaves.weight.grad, want[1])


def test_retain_graph() -> None:
    problem = p.draw()
    leaves = problem.leaves()
    objective = p.objective(linear_logprobs(*leaves), p.seeds_like(problem.labels))
    first = torch.autograd.grad(objective, leaves[:2], retain_graph=True)
    second = torch.autograd.grad(objective, leaves[:2])
    assert all(map(torch.equal, first, second))
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        torch.autograd.grad(objective, leaves[:2])


def test_a_second_derivative_raises() -> None:
    leaves = p.draw().leaves()
    (grad,) = torch.autograd.grad(linear_logprobs(*leaves).logprobs.sum(), leaves.hidden, create_graph=True)
    with pytest.raises(NotImplementedError, match="first derivatives only"):
        grad.sum().backward()


@pytest.mark.parametrize(
    "options", [{}, dict(keep=torch.arange(0, 37, 3), temperature=torch.full((37,), 0.7))], ids=str
)
def test_first_derivatives_of_torch_func(options: dict[str, Any]) -> None:
    """`grad` and `vjp` have the bits of ``torch.autograd.grad``."""
    problem = p.draw()
    seeds = p.seeds_like(problem.labels)
    _, want = p.gradients(problem, seeds, **options)

    def call(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return p.objective(linear_logprobs(hidden, weight, problem.labels, **options), seeds)

    assert all(map(torch.equal, torch.func.grad(call, argnums=(0, 1))(*problem[:2]), want))
    _, pull_back = torch.func.vjp(call, *problem[:2])
    assert all(map(torch.equal, pull_back(torch.tensor(1.0)), want))


WHOLE_BATCH = (
    r"under torch\.func\.vmap, .* give it the whole batch, and loop where each part has a weight or a gradient"
)
REVERSE_MODE = r"no forward-mode derivatives .* torch\.func\.vjp or torch\.autograd\.grad"


@pytest.mark.parametrize(
    ("transform", "message"),
    [
        (lambda f, x: torch.func.vmap(f)(x[:, None]), WHOLE_BATCH),
        (lambda f, x: torch.func.vmap(torch.func.grad(lambda y: f(y).sum()))(x[:, None]), WHOLE_BATCH),
        (lambda f, x: torch.func.jacrev(f)(x), WHOLE_BATCH),
        (lambda f, x: torch.autograd.functional.jacobian(f, x, vectorize=True), WHOLE_BATCH),
        (lambda f, x: torch.func.jvp(f, (x,), (x,)), REVERSE_MODE),
        (lambda f, x: torch.func.jacfwd(f)(x), REVERSE_MODE),
        (lambda f, x: torch.func.linearize(f, x), REVERSE_MODE),
        (
            lambda f, x: torch.func.grad(lambda y: torch.func.grad(lambda z: f(z).sum())(y).sum())(x),
            "first derivatives only",
        ),
    ],
)
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:FutureWarning")  # torch's own, of its jvp
def test_other_transforms_are_refused_with_what_to_do(transform: Any, message: str) -> None:
    hidden, weight, labels = p.draw(T=3, H=8, V=10)
    temperature = torch.full((1,), 0.7)  # values that cannot be looked at inside

    def call(x: torch.Tensor) -> torch.Tensor:
        there = labels[: x.numel() // 8].view(x.shape[:-1])
        return linear_logprobs(x, weight, there, temperature=temperature).logprobs

    with pytest.raises(NotImplementedError, match=message):
        transform(call, hidden)


@pytest.mark.parametrize("changed", ["hidden", "weight"])
def test_a_change_in_place_before_the_backward_raises(changed: str) -> None:
    leaves = p.draw().leaves()
    hidden = leaves.hidden * 1
    out = linear_logprobs(hidden, *leaves[1:])
    with torch.no_grad():
        {"hidden": hidden, "weight": leaves.weight}[changed].mul_(1.01)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.logprobs.sum().backward()


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("cache_bytes", [0, 1 << 20])
def test_checkpointing(reentrant: bool, cache_bytes: int) -> None:
    problem = p.draw()
    seeds = p.seeds_like(problem.labels)

    def call(*leaves: torch.Tensor) -> torch.Tensor:
        return p.objective(linear_logprobs(*leaves, cache_bytes=cache_bytes), seeds)

    leaves = problem.leaves()
    checkpoint(call, *leaves, use_reentrant=reentrant).backward()
    _, want = p.gradients(problem, seeds, cache_bytes=cache_bytes)
    assert torch.equal(leaves.hidden.grad, want[0])
    assert torch.equal(leaves.weight.grad, want[1])


@pytest.mark.parametrize("hidden_dtype", [torch.float32, torch.bfloat16])
def test_autocast_casts_the_weight(hidden_dtype: torch.dtype) -> None:
    """As ``torch.nn.functional.linear`` does; gradients come back in each operand's own dtype."""
    problem = p.draw(T=64, H=64, V=256)
    problem = problem._replace(hidden=problem.hidden.to(hidden_dtype))
    seeds = p.seeds_like(problem.labels)
    with torch.autocast("cpu", torch.bfloat16):
        out, grads = p.gradients(problem, seeds)
    low = problem._replace(weight=problem.weight.bfloat16())
    want, wanted = p.gradients(low, seeds)
    assert torch.equal(out.logprobs, want.logprobs)
    assert [grad.dtype for grad in grads] == [hidden_dtype, torch.float32]
    assert torch.equal(grads[0], wanted[0])
    assert torch.equal(grads[1], wanted[1].float())
    with torch.autocast("cpu", enabled=False):
        assert not torch.equal(linear_logprobs(*problem).logprobs, out.logprobs)


class Weights:
    """Where the copies of the weight lie that autograd keeps."""

    def __init__(self, weight: torch.Tensor) -> None:
        self.shapes, self.places = (weight.shape, weight.shape[::-1]), list[int]()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape in self.shapes:
            self.places.append(x.untyped_storage().data_ptr())
        return x

    def noted(self) -> Any:
        return torch.autograd.graph.saved_tensors_hooks(self, lambda x: x)


@pytest.mark.parametrize("wgrad", ["return", "main_grad"])
def test_calls_of_an_autocast_context_share_one_copy_of_the_weight(wgrad: str) -> None:
    """That of torch's own products in it; the gradients of calls sum in float32."""
    problem = p.draw()
    hidden, weight, labels = problem.leaves()
    weight.main_grad = torch.zeros_like(weight)
    weights, alone = Weights(weight), torch.zeros_like(weight)
    with torch.autocast("cpu", torch.bfloat16), weights.noted():
        logits = torch.nn.functional.linear(hidden, weight)
        calls = [linear_logprobs(hidden, weight, labels, temperature=t, wgrad=wgrad) for t in (0.7, 0.8, 0.9, 1.0)]
    assert len(weights.places) == 5
    assert len(set(weights.places)) == 1
    torch.stack([out.lse.sum() for out in calls]).sum().backward()
    for t in (0.7, 0.8, 0.9, 1.0):
        with torch.autocast("cpu", torch.bfloat16):
            leaf = problem.weight.clone().requires_grad_()
            linear_logprobs(hidden, leaf, labels, temperature=t).lse.sum().backward()
        assert leaf.grad.bfloat16().float().equal(leaf.grad)
        alone += leaf.grad
    summed = weight.grad if wgrad == "return" else weight.main_grad
    assert p.relative_norm(summed, alone) < 1e-6
    logits.sum().backward()
    assert weight.grad is not None  # torch's product, which shares the copy, has its gradient


def test_the_copy_of_the_weight_lasts_as_long_as_torch_keeps_it() -> None:
    hidden, weight, labels = p.draw().leaves()

    def places(*calls: Any, **options: Any) -> int:
        weights = Weights(weight)
        with torch.autocast("cpu", torch.bfloat16, **options), weights.noted():
            results = [linear_logprobs(hidden, weight, labels) for call in calls if call is None or call() is None]
        assert len(weights.places) == len(results)
        return len(set(weights.places))

    assert places(None, None) == 1
    assert places(None, torch.clear_autocast_cache) == 2
    assert places(None, None, cache_enabled=False) == 2
    weight.requires_grad_(False)  # torch keeps no copy of a frozen one
    assert places(None, None) == 2


def test_each_autocast_context_sees_the_weight_as_it_is() -> None:
    """Also where a change left no trace (``.data``), and where the first call recorded no gradients."""
    hidden, weight, labels = p.draw().leaves()
    for step in range(3):
        weight.data.mul_(1.0 + step)
        with torch.autocast("cpu", torch.bfloat16):
            with torch.no_grad():
                without = linear_logprobs(hidden, weight, labels)
            out = linear_logprobs(hidden, weight, labels)
        low = weight.detach().bfloat16().requires_grad_()
        want = linear_logprobs(hidden, low, labels)
        assert torch.equal(out.logprobs, want.logprobs)
        assert torch.equal(without.logprobs, want.logprobs)
        dweight = torch.autograd.grad(out.logprobs.sum(), weight)[0]
        assert torch.equal(dweight, torch.autograd.grad(want.logprobs.sum(), low)[0].float())


def test_no_gradient_keeps_nothing() -> None:
    problem = p.draw()
    with torch.no_grad():
        assert not any(field.requires_grad for field in linear_logprobs(*problem.leaves())[:3])
    with torch.inference_mode():
        assert torch.equal(linear_logprobs(*problem).lse, linear_logprobs(*problem.leaves()).lse)


def test_gradients_do_not_pile_up() -> None:
    """Flat over 50 steps, in torch's eyes and in JAX's: what torch has dropped, JAX frees at its next call."""
    problem = p.draw(T=1024, H=64, V=512)
    leaves = problem.leaves()
    dropped, live = [], []
    for step in range(50):
        out = linear_logprobs(*leaves)
        grads = torch.autograd.grad(out.logprobs.sum() + out.entropy.sum(), leaves[:2])
        dropped += [weakref.ref(x) for x in (*grads, *out[:3])]
        del out, grads
        if step % 10 == 9:
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
    """As from a hook that offloads or compresses them."""
    problem = p.draw()
    seeds = p.seeds_like(problem.labels)
    _, want = p.gradients(problem, seeds)
    leaves = problem.leaves()
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x.t().contiguous(), lambda x: x.t()):
        out = linear_logprobs(*leaves)
    assert all(map(torch.equal, torch.autograd.grad(p.objective(out, seeds), leaves[:2]), want))


def test_the_cache_travels_as_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels that keep a cache need a GPU: here a stand-in cache goes the same way, and comes back as it was."""
    problem = p.draw()
    seen = []
    real = _programs.local.statistics
    real_gradients = _programs.local.gradients

    def statistics(hidden, weight, labels, *, keep_cache, **options):
        stats, _ = real(hidden, weight, labels, keep_cache=keep_cache, **options)
        return stats, ({"columns": hidden[:, :3] * 2, "max": stats.max} if keep_cache else None)

    def gradients(hidden, weight, labels, merged, cotangent, *, cache, **options):
        seen.append(jax.tree.map(jax.numpy.shape, cache))
        dhidden, dweight = real_gradients(hidden, weight, labels, merged, cotangent, cache=None, **options)
        live = slice(0, 37)  # padding may hold anything
        return dhidden + cache["columns"][live].sum() - 2 * hidden[live, :3].sum(), dweight

    monkeypatch.setattr(_programs.local, "statistics", statistics)
    monkeypatch.setattr(_programs.local, "gradients", gradients)
    seeds = p.seeds_like(problem.labels)
    options = dict(cache_bytes=12345, logit_scale=1.125)  # options of its own: programs are kept by them
    _, grads = p.gradients(problem, seeds, **options)
    assert seen == [{"columns": (2048, 3), "max": (2048,)}]
    monkeypatch.undo()
    _, want = p.gradients(problem, seeds, logit_scale=1.125)
    assert max(map(p.relative_norm, grads, want)) < 1e-5
    told = p.told(cache_bytes=12345, logit_scale=1.125)
    operands = _execute.Operands(problem.hidden, problem.weight, None, problem.labels, None)
    kept = _execute.forward_structs(operands, told, keep_cache=True)
    assert [tuple(x.shape) for x in kept[4:]] == [(2048, 3), (2048,)]


@pytest.mark.parametrize("options", [{}, {"keep": torch.tensor([3, 5, 8])}], ids=str)
def test_results_can_be_written_in_place(options: dict[str, Any]) -> None:
    problem = p.draw()
    mask = torch.arange(problem.labels.numel()) % 2 == 0
    inside, outside = problem.leaves(), problem.leaves()
    written = linear_logprobs(*inside, **options).logprobs
    written[~mask] = 0.0
    written.mul_(2.0).sum().backward()
    (linear_logprobs(*outside, **options).logprobs * mask * 2.0).sum().backward()
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(inside[:2], outside[:2], strict=True))


@pytest.mark.parametrize("where", ["torch.backends", "torch.backends.mkldnn.matmul"])
def test_float32_products_are_as_exact_as_torch_is_set(where: str) -> None:
    """Also in the newer way, after which the older one's question raises."""
    settings = [f"{where}.fp32_precision = {name!r}" for name in ("ieee", "tf32", "ieee")]
    assert asked_precision(settings) == "highest None highest"


def test_float32_products_are_as_exact_as_torch_was_once_set() -> None:
    names = ("highest", "high", "medium")
    settings = [f"torch.set_float32_matmul_precision({name!r})" for name in names]
    assert asked_precision(["pass", *settings]) == "highest highest None None"


def asked_precision(settings: list[str]) -> str:
    """What the programs are asked for after each of ``settings``, in a process of its own: torch does not forget."""
    lines = "".join(f"{setting}; asked.append(_execute._spec(weight, call, True).precision)\n" for setting in settings)
    code = "import torch; from lce_torch_bridge import _execute; from tests.torch import problem as p\n"
    code += "weight, asked, call = torch.zeros(3, 2), [], p.told(3)\n"
    return succeed(code + lines + "print(*asked)").strip()
