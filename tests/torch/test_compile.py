"""What torch puts around a call: torch.compile, autocast, pipelining."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from lce_torch_bridge import LogprobOutput, linear_logprobs
from lce_torch_bridge._types import Tensors, make_call
from lce_torch_bridge.operators import _operators
from tests.torch import problem as p
from tests.torch.processes import succeed

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


@pytest.mark.fast("candidates")
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


def test_dynamic_sizes_compile_one_graph() -> None:
    graphs = []

    def count(graph: torch.fx.GraphModule, _: Any) -> torch.fx.GraphModule:
        graphs.append(graph)
        return graph

    compiled = torch.compile(call, fullgraph=True, dynamic=True, backend=count)
    for T, V in ((11, 104), (20, 96), (37, 88)):
        problem = p.draw(T=T, V=V)
        assert torch.equal(compiled(*problem).logprobs, linear_logprobs(*problem).logprobs)
    assert len(graphs) == 1


def test_a_saved_graph_runs_in_another_process(tmp_path: Path) -> None:
    """Which has traced no call."""
    options = dict(temperature=0.7, logit_softcap=3.0, vocab_size=100, entropy="metric", implementation="xla")
    problem = p.draw()
    exported = torch.export.export(Calls(options), (*problem,))
    torch.export.save(exported, tmp_path / "graph.pt2")
    code = """
        import torch, lce_torch_bridge
        from tests.torch import problem as p
        graph = torch.export.load(FOLDER + "/graph.pt2").module()
        torch.save(graph(*p.draw()), FOLDER + "/out.pt")
    """
    succeed(code.replace("FOLDER", repr(str(tmp_path))))
    want = linear_logprobs(*problem, **options)
    for got, true in zip(torch.load(tmp_path / "out.pt"), want[:3], strict=True):
        assert p.value_error(got, true) < 2e-6  # JAX runs it there, in float32


class Calls(torch.nn.Module):
    def __init__(self, options: dict[str, Any]) -> None:
        super().__init__()
        self.options = options

    def forward(self, *problem: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return linear_logprobs(*problem, **self.options)[:3]


def test_equal_calls_are_one_object() -> None:
    """However they are made: what is kept for one is found by the other."""
    made = make_call(vocab_size=97, stats=True, requested=("xla", "mosaic_gpu"), entropy=True)
    assert make_call(made.text) is made
    assert make_call(make_call(stats=True, vocab_size=5).text, vocab_size=97, requested=("xla", "mosaic_gpu")) is made
    assert make_call(made.text, cache_bytes=1) is not made


@pytest.mark.fast("True-None")
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
OF_KL: Any = dict(function="linear_kl", direction="jsd", beta=0.3, has_temperature=True, vocab_size=97)
OPERATORS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # `TorchCall` and `Tensors`
    "logprobs": (dict(stats=True), {}),
    "all of logprobs": (
        dict(stats=True, metric_entropy=True, mean_logit=True, num_candidates=5),
        dict(bias=BIAS, temperature=TEMPERATURE, candidates=IDS),
    ),
    "without entropy": (dict(entropy=False), {}),
    "kl": (OF_KL, TEACHER | dict(bias=BIAS)),
    "a cache of kl": (OF_KL | dict(cache_bytes=1 << 20), TEACHER),
    "logits": (dict(function="linear_logits", logit_softcap=4.0, num_candidates=5), dict(candidates=IDS, bias=BIAS)),
    "topk": (dict(function="linear_topk", top_k=4), dict(bias=BIAS, temperature=TEMPERATURE)),
}


@pytest.mark.parametrize("name", OPERATORS)
def test_opcheck(name: str) -> None:
    options, given = OPERATORS[name]
    hidden, weight, labels = p.draw()
    told, x = p.told(**{"V": options.get("vocab_size", 104)} | options), Tensors(hidden, weight, None, labels)
    x, text = x._replace(**given), told.text
    assert _operators.read_call(text, weight) is told
    torch.library.opcheck(_operators.forward, (list(x), bool(told.differentiable), text))
    if not told.differentiable:
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


class Weights:
    """The addresses of the copies of the weight that autograd keeps."""

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
    """It is the copy of torch's own products; the calls' gradients are summed in float32."""
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
    """Also if a change left no trace (``.data``), and if the first call recorded no gradients."""
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


def test_float32_products_are_as_exact_as_torch_is_set() -> None:
    """Also by the newer settings, after which the older one's getter raises."""
    names = ("ieee", "tf32", "ieee")
    newer = [
        [f"{where}.fp32_precision = {name!r}" for name in names]
        for where in ("torch.backends", "torch.backends.mkldnn.matmul")
    ]
    older = [f"torch.set_float32_matmul_precision({name!r})" for name in ("highest", "high", "medium")]
    exact = "highest None highest"
    assert asked_precision(*newer, ["pass", *older]) == [exact, exact, "highest highest None None"]


def asked_precision(*ways: list[str]) -> list[str]:
    """The precision of the programs after each setting of a way. A process for each way: torch keeps its settings."""
    code = """
        import os, torch
        from lce_torch_bridge.through_jax._programs import make_key
        from tests.torch import problem as p
        weight, call = torch.zeros(3, 2), p.told(3)
        for way in WAYS:
            if os.fork():
                assert os.wait()[1] == 0
                continue
            asked = []
            for setting in way:
                exec(setting)
                asked.append(make_key(call, weight).precision)
            print(*asked, flush=True)
            break
    """
    return succeed(code.replace("WAYS", repr(list(ways)))).splitlines()


PROBLEM = p.draw(T=24, H=8, V=50)


@pytest.fixture
def group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Head(torch.nn.Module):
    def __init__(self, select: Callable[[LogprobOutput], Any], **options: Any) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(PROBLEM.weight.clone())
        self.select, self.options = select, options

    def forward(self, hidden: torch.Tensor, labels: torch.Tensor) -> Any:
        return self.select(linear_logprobs(hidden, self.weight, labels, where=labels % 2 == 0, **self.options))


def loss(out: tuple[torch.Tensor, ...], _target: torch.Tensor) -> torch.Tensor:
    return -(out[0] + 0.1 * out[1]).sum()


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize(
    ("select", "options"),
    [
        (lambda out: out[:3], {}),
        (lambda out: (out.logprobs, out.lse), dict(entropy=False)),
        (lambda out: out[:6], dict(stats=True, mean_logit=True)),
    ],
)
def test_a_last_stage(select: Callable[[LogprobOutput], Any], options: dict[str, Any]) -> None:
    """A tuple without None fields goes through, with the gradient that one batch has."""
    stage = PipelineStage(Head(select, **options), 0, 1, torch.device("cpu"))
    hidden, labels = PROBLEM.hidden.view(4, 6, -1), PROBLEM.labels.view(4, 6)
    schedule = ScheduleGPipe(stage, 2, loss_fn=loss, scale_grads=False)
    schedule.step(hidden, labels, target=torch.zeros(4))
    whole = Head(select, **options)
    loss(whole(hidden, labels), hidden).backward()
    assert p.relative_norm(stage.submod.weight.grad, whole.weight.grad) < 1e-6


@pytest.mark.usefixtures("group")
def test_what_pipelining_says_of_none() -> None:
    """The control: if this passes one day, `LogprobOutput` need not say what to return."""
    stage = PipelineStage(Head(lambda out: out), 0, 1, torch.device("cpu"))
    with pytest.raises(Exception, match="is None"):
        ScheduleGPipe(stage, 2, loss_fn=loss).step(PROBLEM.hidden, PROBLEM.labels, target=torch.zeros(24))
