"""Under torch.compile, as operators, and on tensors that hold nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from lce_torch_bridge import LogprobOutput, linear_logprobs
from lce_torch_bridge._types import Tensors
from lce_torch_bridge.operators import _operators
from tests.torch import problem as p

pytestmark = pytest.mark.usefixtures("in_float64")

OPTIONS: list[dict[str, Any]] = [
    dict(temperature=0.7, logit_scale=1.5, logit_softcap=3.0, vocab_size=100, stats=True, out_of_vocab="megatron"),
    dict(ignore_index=7, where=torch.arange(0, 37, 3), entropy=False),
    dict(candidates=p.candidates_like(p.draw().labels), where=torch.arange(37) % 3 == 0, entropy="metric", stats=True),
]


@pytest.fixture(autouse=True)
def fresh() -> None:
    torch._dynamo.reset()


def call(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, **options: Any) -> Any:
    out = linear_logprobs(hidden * 1, weight, labels, **options)
    return LogprobOutput(out.logprobs * 1, *out[1:])  # so that the graph holds more than the operator


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: ", ".join(options))
def test_fullgraph(options: dict[str, Any]) -> None:
    problem = p.draw()
    seeds = p.seeds_like(problem.labels)
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    results = []
    for function in (call, compiled):
        leaves = problem.leaves()
        out = function(*leaves, **options)
        objective = sum((s * x).sum() for s, x in zip(seeds, out, strict=False) if x is not None and x.requires_grad)
        if out.candidate_logprobs is not None:
            objective = objective + (seeds[0][:, None] * out.candidate_logprobs).sum()
        results.append((*(x for x in out if x is not None), *torch.autograd.grad(objective, leaves[:2])))
    assert all(map(torch.equal, *results))


def test_dynamic_counts_of_tokens_compile_one_graph() -> None:
    graphs = []

    def count(graph: torch.fx.GraphModule, _: Any) -> torch.fx.GraphModule:
        graphs.append(graph)
        return graph

    compiled = torch.compile(call, fullgraph=True, dynamic=True, backend=count)
    for T in (11, 20, 37):
        problem = p.draw(T=T)
        assert torch.equal(compiled(*problem).logprobs, linear_logprobs(*problem).logprobs)
    assert len(graphs) == 1


@pytest.mark.parametrize(("differentiated", "dynamic"), [(True, None), (False, True)])
def test_any_number_of_temperatures_compile_two_graphs(differentiated: bool, dynamic: bool | None) -> None:
    """One for the first number that is seen, and one for all others, 1 among them."""
    problem = p.draw()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(call, fullgraph=True, dynamic=dynamic, backend=counter)
    for temperature in (0.7, 1.3, 1.0, 0.1, 1.0, *(0.5 + step / 7 for step in range(8))):
        results = []
        for function in (call, compiled):
            leaves = problem.leaves() if differentiated else problem
            out = function(*leaves, temperature=temperature)
            grads = torch.autograd.grad(out.logprobs.sum(), leaves[:2]) if differentiated else ()
            results.append((out.logprobs, out.entropy, *grads))
        assert all(map(torch.equal, *results))
    assert counter.frame_count <= 2


def test_main_grad_is_refused_clearly() -> None:
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r'wgrad="main_grad" writes to weight\.main_grad'):
        torch.compile(linear_logprobs, fullgraph=True, backend="eager")(*p.draw().leaves(), wgrad="main_grad")


TEMPERATURE, BIAS, IDS = torch.linspace(0.5, 2, 37), torch.linspace(-1, 1, 104), p.candidates_like(p.draw().labels)
TEACHER = dict(teacher_hidden=p.draw(H=16).hidden, teacher_weight=p.draw(H=16).weight, temperature=TEMPERATURE)
OF_KL: Any = dict(function="kl", direction="jsd", beta=0.3, has_temperature=True, vocab_size=97)
OPERATORS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # `TorchCall` and `Tensors`
    "logprobs": (dict(stats=True), {}),
    "all of logprobs": (
        dict(stats=True, entropy="metric", mean_logit=True, num_candidates=5),
        dict(bias=BIAS, temperature=TEMPERATURE, candidates=IDS),
    ),
    "without entropy": (dict(entropy="none"), {}),
    "kl": (OF_KL, TEACHER | dict(bias=BIAS)),
    "a cache of kl": (OF_KL | dict(cache_bytes=1 << 20), TEACHER),
    "logits": (dict(function="logits", logit_softcap=4.0, num_candidates=5), dict(candidates=IDS, bias=BIAS)),
    "topk": (dict(function="topk", num_candidates=4), dict(bias=BIAS, temperature=TEMPERATURE)),
}


@pytest.mark.parametrize("name", OPERATORS)
def test_opcheck(name: str) -> None:
    options, given = OPERATORS[name]
    hidden, weight, labels = p.draw()
    told, x = p.told(**{"V": options.get("vocab_size", 104)} | options), Tensors(hidden, weight, None, labels)
    x, text = x._replace(**given), _operators.recipe_of(told).text
    assert _operators.call_of(text, weight) == told
    torch.library.opcheck(_operators.forward, (list(x), told.function != "topk", text))
    if told.function == "topk":
        return
    found = _operators.forward(list(x), True, text)
    kept = found[len(told.fields) :]
    all_seeds = [torch.randn_like(result) for result in found[: len(told.differentiable)]]
    first = [all_seeds[0], *[None] * (len(all_seeds) - 1)]
    for seeds, wanted in ((first, [True, False, False]), (all_seeds, [True, True, x.bias is not None])):
        torch.library.opcheck(_operators.backward, (list(x), kept, seeds, wanted, text))


HOLDING_NOTHING: list[dict[str, Any]] = [
    dict(cache_bytes=1 << 20),
    dict(where=torch.arange(0, 37, 3)),
    dict(where=torch.arange(37) % 3 == 0, temperature=torch.linspace(0.5, 2, 37)),
]


@pytest.mark.parametrize("options", HOLDING_NOTHING, ids=lambda options: ", ".join(options))
def test_fake_tensors(options: dict[str, Any]) -> None:
    """Shapes and dtypes of the real call, forward and backward, from fake tensors."""
    problem, seeds = p.draw(dtype=torch.bfloat16), p.seeds_like(p.draw().labels, K=5)
    ids = p.candidates_like(problem.labels)

    def described(convert: Any) -> list[Any]:
        all_results = dict(stats=True, mean_logit=True, candidates=convert(ids))
        given = {name: convert(x) if isinstance(x, torch.Tensor) else x for name, x in options.items()}
        out, grads = p.gradients(p.Problem(*map(convert, problem)), list(map(convert, seeds)), **all_results, **given)
        return [(tuple(x.shape), x.dtype) for x in (*out[:7], *grads)]

    real = described(lambda x: x)
    for shape_env in (None, ShapeEnv()):
        with FakeTensorMode(shape_env=shape_env, static_shapes=True) as mode:
            assert described(mode.from_tensor) == real


def test_traces_with_sizes_that_are_no_numbers() -> None:
    """Outside of ``torch.compile`` too."""
    problem = p.draw()
    traced = make_fx(lambda *x: linear_logprobs(*x).logprobs, tracing_mode="symbolic")(*problem)
    other = p.draw(T=5, H=16, V=40)
    assert torch.equal(traced(*other), linear_logprobs(*other).logprobs)


def test_a_mask_that_cannot_be_counted_is_kept_in_the_graph() -> None:
    """What was traced with fake tensors computes all rows, and leaves out those of the mask that it is called with."""
    problem = p.draw()
    mask = torch.arange(37) % 3 == 0
    temperature = torch.linspace(0.5, 2, 37)

    def call(
        hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, keep: torch.Tensor, temperature: torch.Tensor
    ) -> list[torch.Tensor]:
        leaves = p.Problem(hidden, weight, labels)
        out, grads = p.gradients(leaves, [torch.ones_like(temperature)] * 3, where=keep, temperature=temperature)
        return [*out[:3], *grads]

    want = call(*problem, mask, temperature)
    traced = make_fx(call, tracing_mode="fake")(*problem, ~mask, temperature)
    problem.hidden[~mask], temperature[~mask] = torch.nan, 0.0  # with any values
    got = traced(*problem, mask, temperature)
    assert all(map(torch.equal, got[:4], want[:4]))
    assert p.relative_norm(got[4], want[4]) < 1e-6  # the same rows, in another order
