"""The cross entropy's sums and means: gradients in the forward, how many products, what is rounded, what is kept."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode

from lce_torch_bridge import LinearCrossEntropyLoss, explain, linear_cross_entropy, linear_logprobs
from lce_torch_bridge._types import Tensors, TorchCall
from lce_torch_bridge.operators import _operators
from lce_torch_bridge.operators._loss import LossAndGradients
from tests.pairs import combined
from tests.torch import problem as p
from tests.torch.executor import launched_directly
from tests.torch.framework_doubles import LoraLinear
from tests.torch.test_linear_loss import GRADIENT, MANY, ROUNDING
from tests.torch.test_main_grad import WAYS, parameter, ways

IN_BACKWARD: dict[str, Any] = {"cache_bytes": 0}
BIAS = torch.randn(104, generator=torch.Generator().manual_seed(5))


def drawn(T: int = MANY, dtype: torch.dtype = torch.float32) -> p.Problem:
    """Some labels do not count, and one that counts is out of the vocabulary."""
    problem = p.draw(T, dtype=dtype)
    problem.labels[::7], problem.labels[1] = -100, 2**32 + 3
    return problem


def exact(
    problem: p.Problem, reduction: str, factor: float = 1.0, smoothing: float = 0.0, z_loss: float = 0.0, **told: Any
) -> Any:
    """The loss and the gradients of hidden, weight and bias, in float64 with stored logits."""
    leaves = [x.double().requires_grad_() for x in (problem.hidden.to(problem.weight.dtype), problem.weight)]
    if "bias" in told:
        leaves.append(told["bias"].double().requires_grad_())
        told = told | {"bias": leaves[2]}
    out = p.stored(*leaves[:2], problem.labels, **told)
    losses = (smoothing - 1) * out.logprobs + smoothing * (out.lse - out.mean_logit) + z_loss * out.lse**2
    counts = problem.labels != -100
    loss = losses[counts].sum() / (max(int(counts.sum()), 1) if reduction == "mean" else 1)
    return loss, torch.autograd.grad(factor * loss, leaves)


OPTIONS: list[dict[str, Any]] = [
    {},
    dict(bias=BIAS, vocab_size=97, logit_scale=1.3, temperature=0.7),
    dict(logit_softcap=3.0),
]


@pytest.mark.fast("{}-mean-(0.2", "temperature-sum-(0.1, 0.0)-None", "3.0}-mean-(0.0, 0.01)-8")
@combined(
    options=OPTIONS, reduction=["mean", "sum"], terms=[(0.0, 0.0), (0.1, 0.0), (0.0, 1e-2), (0.2, 1e-3)],
    chunk_bytes=[p.THREE_CHUNKS, None],
)  # fmt: skip
def test_values_and_gradients(
    options: dict[str, Any], reduction: Any, terms: tuple[float, float], chunk_bytes: int | None
) -> None:
    problem, (smoothing, z_loss) = drawn(), terms
    leaves = [*problem.leaves()[:2], *([BIAS.clone().requires_grad_()] if "bias" in options else [])]
    told = options | (dict(bias=leaves[2]) if "bias" in options else {})
    in_forward = not (smoothing and "logit_softcap" in options)
    told |= dict(label_smoothing=smoothing, z_loss=z_loss, reduction=reduction)
    told |= dict(chunk_bytes=chunk_bytes) if in_forward else {}
    loss = linear_cross_entropy(*leaves[:2], problem.labels, **told)
    want, wanted = exact(problem, reduction, 0.3, smoothing, z_loss, **options)
    assert isinstance(loss.grad_fn, LossAndGradients._backward_cls) == in_forward
    assert abs((loss / want).item() - 1) < 1e-5
    for got, true in zip(torch.autograd.grad(0.3 * loss, leaves), wanted, strict=True):
        assert p.relative_norm(got, true) < GRADIENT
    without = linear_cross_entropy(*(x.detach() for x in leaves[:2]), problem.labels, **told)
    assert abs((without / want).item() - 1) < 1e-5


@pytest.mark.parametrize("dtypes", [("bfloat16", "bfloat16"), ("float32", "bfloat16"), ("bfloat16", "float32")])
@pytest.mark.parametrize("factor", [1.0, 2.0**-5])
@pytest.mark.parametrize("T", [300, MANY])
def test_each_gradient_is_rounded_once(T: int, factor: float, dtypes: tuple[str, str]) -> None:
    """For a cotangent that is a power of two. Both operands lie otherwise than in rows."""
    of_hidden, of_weight = (getattr(torch, dtype) for dtype in dtypes)
    problem = drawn(T)
    hidden = problem.hidden.to(of_hidden).T.contiguous().requires_grad_()
    weight = problem.weight.to(of_weight).repeat_interleave(2, 1).requires_grad_()
    loss = linear_cross_entropy(hidden.T, weight[:, ::2], problem.labels, chunk_bytes=p.THREE_CHUNKS)
    grads = torch.autograd.grad(factor * loss, (hidden, weight))
    want, wanted = exact(p.Problem(hidden.detach().T, weight.detach()[:, ::2], problem.labels), "mean", factor)
    assert abs((loss / want).item() - 1) < 1e-5
    for got, true in zip((grads[0].T, grads[1][:, ::2]), wanted, strict=True):
        # dlogits take the weight's dtype on a GPU alone
        assert p.relative_norm(got, true) < (GRADIENT if got.dtype == torch.float32 else 1.05 * ROUNDING)


@contextlib.contextmanager
def products() -> Iterator[list[str]]:
    """The matrix products that are computed inside, in order. "kept": logits whose exponentials are."""
    run: list[str] = []
    forward, gradients = _operators.run_forward, _operators.run_backward

    def noted(x: Tensors, call: TorchCall, keep: bool, *more: Any, **told: Any) -> Any:
        run.append("kept" if keep and call.jax.cache_bytes else "logits")
        return forward(x, call, keep, *more, **told)

    def noted_gradients(x: Tensors, kept: Any, seeds: Any, wanted: Any, call: TorchCall, *more: Any) -> Any:
        run.extend([] if call.jax.cache_bytes else ["logits again"])
        run.extend(name for name, want in zip(("dhidden", "dweight"), wanted, strict=False) if want)
        return gradients(x, kept, seeds, wanted, call, *more)

    with (
        mock.patch.object(_operators, "run_forward", noted),
        mock.patch.object(_operators, "run_backward", noted_gradients),
    ):
        yield run


THREE = ["kept", "dhidden", "dweight"]


@pytest.mark.usefixtures("in_float64")
def test_products() -> None:
    problem = drawn(60)
    for wanted in ((True, True), (True, False), (False, True), (False, False)):
        hidden, weight = (x.clone().requires_grad_(want) for x, want in zip(problem[:2], wanted, strict=True))
        with products() as run:
            loss = linear_cross_entropy(hidden, weight, problem.labels)
            if any(wanted):
                assert run == [THREE[0], *(x for x, want in zip(THREE[1:], wanted, strict=True) if want)]
                loss.backward()
        assert len(run) == 1 + sum(wanted)
    leaves = problem.leaves()
    for inside in (torch.no_grad, torch.inference_mode):
        with products() as run, inside():
            linear_cross_entropy(*leaves, label_smoothing=0.1)
        assert run == ["logits"]
    with products() as run:
        torch.autograd.grad(linear_cross_entropy(*leaves, **IN_BACKWARD), leaves[:2])
    assert run == ["logits", "logits again", "dhidden", "dweight"]


@pytest.mark.usefixtures("in_float64")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints(reentrant: bool, depth: int, dtype: torch.dtype) -> None:
    """The first forward computes logits alone, and keeps no memory of its own."""
    problem = drawn(60, dtype)
    leaves, plain = problem.leaves(), problem.leaves()

    def head(hidden: torch.Tensor) -> torch.Tensor:
        return linear_cross_entropy(hidden * 2, leaves.weight, leaves.labels)

    def layer(hidden: torch.Tensor, times: int = depth) -> torch.Tensor:
        return checkpoint(head if times == 1 else lambda x: layer(x, times - 1), hidden, use_reentrant=reentrant)

    with products() as run:
        total = layer(leaves.hidden)
        assert run == ["logits"]
        (4 * total).backward()
    assert run == [*["logits"] * (depth if reentrant else 1), *THREE]
    (4 * linear_cross_entropy(plain.hidden * 2, *plain[1:])).backward()
    assert all(torch.equal(x.grad, y.grad) for x, y in zip(leaves[:2], plain[:2], strict=True))


@pytest.mark.usefixtures("in_float64")
def test_a_selective_checkpoint_sees_one_operator() -> None:
    """Which it may keep. And a mode that counts the first forward alone changes nothing."""
    ops, seen, leaves, plain = torch.ops.lce_torch_bridge.forward.default, [], drawn(60).leaves(), drawn(60).leaves()

    def policy(_context: Any, operator: Any, *_: Any, **__: Any) -> CheckpointPolicy:
        seen.append(operator)
        return CheckpointPolicy.MUST_SAVE if operator is ops else CheckpointPolicy.PREFER_RECOMPUTE

    def head(hidden: torch.Tensor) -> torch.Tensor:
        return linear_cross_entropy(hidden, leaves.weight, leaves.labels)

    told: Any = dict(context_fn=lambda: create_selective_checkpoint_contexts(policy))
    want = torch.autograd.grad(linear_cross_entropy(*plain), plain[:2])
    with products() as run:
        got = torch.autograd.grad(checkpoint(head, leaves.hidden, use_reentrant=False, **told), leaves[:2])
    assert ops in seen
    assert run.count("logits") == 1
    assert max(map(p.relative_norm, got, want)) < GRADIENT
    with FlopCounterMode(display=False):
        counted = checkpoint(head, leaves.hidden, use_reentrant=False)
    assert all(map(torch.equal, torch.autograd.grad(counted, leaves[:2]), want))


@pytest.mark.usefixtures("in_float64")
def test_hooks_inside_a_checkpoint_keep_what_they_are_given() -> None:
    """What they save is not dropped, so gradients are there at once."""
    leaves, plain = drawn(60).leaves(), drawn(60).leaves()

    def head(hidden: torch.Tensor) -> torch.Tensor:
        with torch.autograd.graph.save_on_cpu():
            return linear_cross_entropy(hidden, leaves.weight, leaves.labels)

    checkpoint(head, leaves.hidden, use_reentrant=False).backward()
    linear_cross_entropy(*plain).backward()
    assert all(torch.equal(x.grad, y.grad) for x, y in zip(leaves[:2], plain[:2], strict=True))


@pytest.mark.usefixtures("in_float64")
def test_a_cotangent_costs_no_memory() -> None:
    """The gradient lies where the forward wrote it, but for a graph that is kept."""
    leaves, places = p.draw(60).leaves(), []

    def note(x: torch.Tensor) -> torch.Tensor:
        places.append(x.data_ptr())
        return x

    with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
        loss = linear_cross_entropy(*leaves, ignore_index=None)
    first = torch.autograd.grad(2 * loss, leaves[:2], retain_graph=True)
    assert not {x.data_ptr() for x in first} & {*places}
    again = torch.autograd.grad(4 * loss, leaves[:2])
    assert [x.data_ptr() for x in again] == places
    assert all(torch.equal(2 * x, y) for x, y in zip(first, again, strict=True))
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        loss.backward()


@pytest.mark.usefixtures("in_float64")
def test_losses_that_are_added_and_weights_that_are_tied() -> None:
    """The weight is an embedding too, and the same head serves two batches."""
    first, second = drawn(60), p.draw(60, seed=1)

    def total(weight: torch.Tensor, **told: Any) -> torch.Tensor:
        hidden = torch.nn.functional.embedding(second.labels, weight)
        losses = [
            linear_cross_entropy(x, weight, y.labels, **told) for x, y in ((first.hidden, first), (hidden, second))
        ]
        return losses[0] + 0.3 * losses[1]

    (got,), (want,) = (
        torch.autograd.grad(total(weight, **told), weight)
        for told in ({}, IN_BACKWARD)
        for weight in [first.weight.clone().requires_grad_()]
    )
    assert p.relative_norm(got, want) < GRADIENT


@pytest.mark.parametrize("T", [pytest.param(300, marks=pytest.mark.slow), MANY])
def test_a_gradient_scaler_keeps_float16s_range(T: int) -> None:
    """Gradients of a mean of 1e-5, which float16 does not hold before a loss scale of 2^24 comes."""
    problem = drawn(T, torch.float16)
    leaves = problem.leaves()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**24)
    loss = 1e-5 * linear_cross_entropy(*leaves, chunk_bytes=p.THREE_CHUNKS)
    scaler.scale(loss).backward()
    _, wanted = exact(problem, "mean", 1e-5 * 2.0**24)
    for got, true in zip((leaves.hidden.grad, leaves.weight.grad), wanted, strict=True):
        assert p.relative_norm(got, true) < 2.6e-4  # as in test_parity


@ways
@pytest.mark.parametrize("reentrant", [None, False, True])
@pytest.mark.parametrize("chunk_bytes", [p.THREE_CHUNKS, None], ids=["chunks", "one"])
def test_main_grad_is_added_to_once(chunk_bytes: int | None, reentrant: bool | None, way: str) -> None:
    """In float32, and never rounded where kernels add to it, or where several chunks are summed."""
    problem = drawn(MANY, torch.bfloat16)
    weight, hidden = parameter(problem, grad_added_to_main_grad=False), problem.hidden.clone().requires_grad_()

    def head(hidden: torch.Tensor) -> torch.Tensor:
        return linear_cross_entropy(hidden, weight, problem.labels, wgrad="main_grad", chunk_bytes=chunk_bytes)

    with WAYS[way](), products() as run:
        loss = head(hidden) if reentrant is None else checkpoint(head, hidden, use_reentrant=reentrant)
        if not reentrant:  # which is differentiated in everything
            torch.autograd.grad(loss, hidden, retain_graph=True)
        assert not weight.main_grad.any()
        run.clear()
        (0.37 * loss).backward()
    assert "logits again" not in run
    assert weight.grad_added_to_main_grad
    _, wanted = exact(problem, "mean", 0.37)
    rounded = chunk_bytes is None and way == "jax"
    assert p.relative_norm(weight.main_grad, wanted[1]) < (1.05 * ROUNDING if rounded else 1e-6)
    assert p.relative_norm(hidden.grad, wanted[0]) < 1.5 * ROUNDING


@pytest.mark.usefixtures("in_float64")
def test_in_a_graph_and_under_torch_func() -> None:
    """Gradients are computed in the backward there, as before."""
    problem = drawn(60)

    def loss(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return linear_cross_entropy(hidden, weight, problem.labels, label_smoothing=0.1)

    leaves = problem.leaves()
    want = torch.autograd.grad(loss(*leaves[:2]), leaves[:2])
    torch._dynamo.reset()
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    found = [torch.autograd.grad(compiled(*leaves[:2]), leaves[:2]), torch.func.grad(loss, (0, 1))(*problem[:2])]
    for grads in found:
        assert max(map(p.relative_norm, grads, want)) < GRADIENT
    with products() as run, torch.profiler.profile():
        torch.autograd.grad(loss(*leaves[:2]), leaves[:2])
    assert run == THREE


REFUSED: dict[str, tuple[Callable[..., Any], str]] = {
    "vectorized": (lambda f, x: torch.autograd.functional.jacobian(f, x, vectorize=True), "give it the whole batch"),
    "vmap": (lambda f, x: torch.func.vmap(f)(x[None]), "give it the whole batch"),
    "forward mode": (lambda f, x: dual(f, x), "no forward-mode derivatives"),
    "twice": (lambda f, x: torch.autograd.grad(f(x), x, create_graph=True)[0].sum().backward(), "first derivatives"),
}


def dual(f: Callable[..., Any], x: torch.Tensor) -> None:
    with torch.autograd.forward_ad.dual_level():
        f(torch.autograd.forward_ad.make_dual(x, torch.ones_like(x)))


@pytest.mark.usefixtures("in_float64")
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:FutureWarning")  # torch's own, of forward mode
@pytest.mark.parametrize("name", REFUSED)
def test_what_has_no_gradient_says_so(name: str) -> None:
    problem, (apply, message) = drawn(60), REFUSED[name]
    hidden = problem.hidden.clone().requires_grad_()
    with pytest.raises(NotImplementedError, match=message):
        apply(lambda x: linear_cross_entropy(x, problem.weight, problem.labels), hidden)


def test_chunks_are_of_gradients_in_the_forward() -> None:
    for told in ({"cache_bytes": 0}, {"reduction": "none"}):
        with pytest.raises(ValueError, match=r"chunk_bytes=7 with .*, where the gradients .* in the backward"):
            linear_cross_entropy(*p.draw(), chunk_bytes=7, **told)


GIB = 1 << 30
DEFAULTS: dict[str, tuple[int, str, dict[str, Any]]] = {
    "trained": (GIB, "a gradient is requested, on a GPU", {}),
    "one gradient": (GIB, "a gradient is requested, on a GPU", {"trained": (False, True)}),
    "frozen": (0, "no gradient is requested", {"trained": (False, False)}),
    "a CPU": (0, "hidden is on no GPU", {"gpu": False}),
    "a threshold": (0, "saves little", {"gradient_threshold": 0.1}),
    "parts": (0, "with vocab_part_size no backward", {"vocab_part_size": 8}),
    "asked for": (5, "", {"cache_bytes": 5}),
    "refused": (0, "", {"cache_bytes": 0}),
}


@pytest.mark.usefixtures("in_float64")
@pytest.mark.parametrize("name", DEFAULTS)
def test_the_cache_by_default(name: str) -> None:
    """And `explain` says which, and why."""
    cache_bytes, why, options = DEFAULTS[name]
    told, problem, calls = dict(options), p.draw(), []
    wanted, gpu = told.pop("trained", (True, True)), told.pop("gpu", True)
    operands = [x.clone().requires_grad_(want) for x, want in zip(problem[:2], wanted, strict=True)]
    forward = _operators.run_forward

    def noted(x: Tensors, call: TorchCall, *more: Any, **others: Any) -> Any:
        calls.append(call.jax.cache_bytes)
        return forward(x, call, *more, **others)

    with launched_directly() if gpu else contextlib.nullcontext(), mock.patch.object(_operators, "run_forward", noted):
        linear_logprobs(*operands, problem.labels, **told)
        with torch.no_grad():
            linear_logprobs(*operands, problem.labels, **told)
        said = str(explain(*operands, problem.labels, **told))
    assert [*dict.fromkeys(calls)] == [*dict.fromkeys([cache_bytes, told.get("cache_bytes", 0)])]
    asked = f"cache_bytes=None is {cache_bytes}: "
    assert ("cache_bytes=None" in said) == bool(why)
    assert not why or (asked in said and why in said)


@pytest.mark.usefixtures("in_float64")
def test_a_checkpoint_keeps_no_cache() -> None:
    leaves, kept = p.draw().leaves(), []
    noted = torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x)
    with launched_directly():
        with noted:
            out = checkpoint(lambda x: linear_logprobs(x, *leaves[1:]).logprobs, leaves.hidden, use_reentrant=False)
        assert [x.shape for x in kept] == [leaves.hidden.shape]  # what it recomputes from
        out.sum().backward()
    assert leaves.weight.grad is not None


@pytest.mark.skipif(not hasattr(torch.nn, "LinearCrossEntropyLoss"), reason="needs PyTorch 2.13")
@pytest.mark.parametrize(
    "told",
    [
        {},
        {"weight": None, "out_features": (), "options": None, "label_smoothing": 1.0},
        {"bias": True, "reduction": "sum", "ignore_index": 3, "label_smoothing": 0.1},
    ],
)
def test_the_module_is_that_of_torch(told: dict[str, Any]) -> None:
    torch.manual_seed(0)
    ours, theirs = LinearCrossEntropyLoss(16, 64, **told), torch.nn.LinearCrossEntropyLoss(16, 64, **told)
    ours.load_state_dict(theirs.state_dict())
    hidden, labels = torch.randn(9, 16), torch.tensor([3, 3, 5, 7, 9, 11, 60, 61, 62])
    if "ignore_index" not in told:
        labels[:2] = -100
    losses = [loss_fn(input=hidden, target=labels) for loss_fn in (ours, theirs)]
    torch.testing.assert_close(*losses)
    grads = [torch.autograd.grad(loss, list(of.parameters())) for loss, of in zip(losses, (ours, theirs), strict=True)]
    torch.testing.assert_close(*grads)
    named = inspect.signature(torch.nn.LinearCrossEntropyLoss).parameters
    own = dict(inspect.signature(LinearCrossEntropyLoss).parameters)
    assert own.pop("more").kind is inspect.Parameter.VAR_KEYWORD
    assert {name: x.default for name, x in own.items()} == {name: x.default for name, x in named.items()}


def test_the_module_takes_options_and_refuses_torchs_own() -> None:
    loss_fn = LinearCrossEntropyLoss(16, 64, z_loss=0.1)
    hidden, labels = torch.ones(2, 3, 16), torch.ones(2, 3, dtype=int)
    want = linear_cross_entropy(hidden, loss_fn.linear.weight, labels, z_loss=0.1)
    assert torch.equal(loss_fn(hidden, labels), want)
    assert "reduction='mean', ignore_index=-100, label_smoothing=0.0, z_loss=0.1\n" in repr(loss_fn)
    refused: dict[str, Any] = {"out_features": ((2,), "rows of the weight"), "options": (object(), "chunk_by")}
    for name, (value, instead) in refused.items():
        with pytest.raises(
            TypeError, match=f"LinearCrossEntropyLoss has no {name}, which torch's module has: .*{instead}"
        ):
            LinearCrossEntropyLoss(16, 64, **{name: value})
    with pytest.raises(TypeError, match=r"unknown option label_smooth .did you mean label_smoothing"):
        LinearCrossEntropyLoss(16, 64, label_smooth=0.1)
    loss_fn.linear = LoraLinear(loss_fn.linear)
    with pytest.raises(NotImplementedError, match=r"the head, .*LoraLinear.*, is more than its weight and bias"):
        loss_fn(hidden, labels)


@pytest.mark.parametrize(
    ("told", "message"),
    [
        (dict(reduction="average"), "reduction must be .* got 'average'"),
        (dict(label_smoothing=1.5), "label_smoothing must lie in .* got 1.5"),
        (dict(ignore_index=1.5), "ignore_index must be .* got 1.5"),
        (dict(z_loss=-0.1), "z_loss .*negative, got -0.1"),
        (dict(temperature=0), "temperature must be positive .* got 0"),
        (dict(vocab_size=65), r"vocab_size must lie in \[1, 64\].* got 65"),
        (dict(logit_softcap=-1.0), "logit_softcap must be positive .* got -1"),
        (dict(wgrad="grad"), "wgrad must be .* got 'grad'"),
        (dict(cache_bytes=0, chunk_bytes=3), "chunk_bytes=3 with cache_bytes=0"),
    ],
)
def test_the_module_checks_values_when_it_is_made(told: dict[str, Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        LinearCrossEntropyLoss(16, 64, **told)


@pytest.mark.parametrize("bias", [pytest.param(False, marks=pytest.mark.slow), True])
def test_the_module_is_compiled_in_one_graph(bias: bool) -> None:
    loss_fn = LinearCrossEntropyLoss(16, 64, bias=bias)
    hidden, labels = torch.randn(9, 16), torch.randint(64, (9,))
    compiled = torch.compile(loss_fn, fullgraph=True, backend="aot_eager")
    losses = [call(hidden, labels) for call in (loss_fn, compiled)]
    assert torch.equal(*losses)
    torch.testing.assert_close(*(torch.autograd.grad(loss, list(loss_fn.parameters())) for loss in losses))
    loss_fn.linear.forward = lambda hidden: 2 * hidden
    with pytest.raises(torch._dynamo.exc.Unsupported, match="is more than its weight and bias"):
        compiled(hidden, labels)


PLACES = {"in the forward": {}, "in the backward": {"cache_bytes": 0}, "in chunks": {"chunk_bytes": 2048}}


@pytest.mark.parametrize("way", PLACES)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_class_weights(reduction: str, way: str) -> None:
    """As torch's, which leaves ignored tokens out of the mean too."""
    if (reduction, way) == ("none", "in chunks"):
        return
    hidden, weight, classes = torch.randn(3, 9, 16), torch.randn(64, 16), torch.rand(64)
    labels = torch.randint(0, 64, (3, 9))
    labels[0, 1] = labels[2, 3] = -100
    leaves = hidden.requires_grad_(), weight.requires_grad_()
    ours = linear_cross_entropy(hidden, weight, labels, class_weights=classes, reduction=reduction, **PLACES[way])
    logits = (hidden @ weight.T).view(-1, 64)
    theirs = torch.nn.functional.cross_entropy(logits, labels.view(-1), classes, reduction=reduction).view(ours.shape)
    torch.testing.assert_close(ours, theirs)
    gradients = [
        torch.autograd.grad((x * torch.linspace(0, 1, x.numel()).view(x.shape)).sum(), leaves) for x in (ours, theirs)
    ]
    for gradient, expected in zip(*gradients, strict=True):
        torch.testing.assert_close(gradient, expected, rtol=1e-4, atol=1e-5)


def test_class_weights_of_the_module_and_compiled() -> None:
    classes, hidden, labels = torch.rand(64), torch.randn(9, 16), torch.tensor([3, -100, 5, 7, -100, 11, 60, 61, 63])
    ours, theirs = (
        LinearCrossEntropyLoss(16, 64, weight=classes),
        torch.nn.LinearCrossEntropyLoss(16, 64, weight=classes),
    )
    theirs.load_state_dict(ours.state_dict())
    torch.testing.assert_close(ours(hidden, labels), theirs(hidden, labels))

    @functools.partial(torch.compile, fullgraph=True, backend="aot_eager")  # Inductor would start a C++ compiler
    def run() -> torch.Tensor:
        return linear_cross_entropy(hidden, ours.linear.weight, labels, class_weights=classes)

    torch.testing.assert_close(run(), theirs(hidden, labels))


@pytest.mark.parametrize(
    ("classes", "options", "message"),
    [
        (torch.rand(63), {}, r"class_weights \(63,\) must have one number per vocabulary entry of weight \(64, 16\)"),
        ([1.0] * 64, {}, "class_weights must be a torch.Tensor, got list"),
        (torch.ones(64).int(), {}, "class_weights must be bfloat16, float16 or float32, got torch.int32"),
        (torch.ones(64, requires_grad=True), {}, r"pass class_weights.detach\(\)"),
        (torch.ones(64, device="meta"), {}, "class_weights is on meta"),
        (torch.ones(64), {"label_smoothing": 0.1}, "class_weights with label_smoothing=0.1"),
    ],
)  # fmt: skip
def test_class_weights_that_do_not_fit(classes: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        linear_cross_entropy(torch.randn(9, 16), torch.randn(64, 16), torch.arange(9), class_weights=classes, **options)
