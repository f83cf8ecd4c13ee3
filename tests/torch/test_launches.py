"""Direct launches: which calls are served, the kernels they launch, and what the host does around them."""

from __future__ import annotations

import itertools
import logging
import random
import runpy
from collections.abc import Iterator
from typing import Any
from unittest import mock

import jax.numpy as jnp
import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import lce_jax
import lce_torch_bridge
from lce_jax.run import kernels
from lce_jax.run.kernels import Call, Kernel, LaunchedCall
from lce_torch_bridge import explain, launch_with, linear_logprobs
from lce_torch_bridge._types import PER_CANDIDATE
from lce_torch_bridge.launched_directly import _launch_with, _launches, _passes
from lce_torch_bridge.launched_directly._launches import Memory, Tape, find_needed_steps
from lce_torch_bridge.tensors import _device
from tests.devices import A100, B200
from tests.torch import problem as p
from tests.torch.as_gpu import H200, as_gpu


def head(rows: int = 0, start: int = 0, **changed: Any) -> LaunchedCall:
    """4096 tokens of a model's head."""
    given: dict[str, Any] = {"num_tokens": 4096, "hidden_size": 4096, "columns": 151936, "vocab_size": 151936}
    given |= {"dtype": jnp.dtype("bfloat16"), "device": H200, **changed}
    own = {name: given.pop(name) for name in ("has_temperature", "megatron") if name in given}
    return LaunchedCall(call=Call(**given), rows=rows or given["num_tokens"], start=start, **own)


def forward(of: LaunchedCall, keep_cache: bool = False, group: str = "") -> Tape:
    """Its results are log-probability and lse, and those of candidates."""
    names = ("logprobs", "lse", *[PER_CANDIDATE] * (of.call.num_candidates > 0))
    return _passes.forward_tape(of, keep_cache, names, group)


def backward(
    of: LaunchedCall, wanted: tuple[bool, bool] = (True, True), seeds: Any = ("logprobs", "entropy"), **how: Any
) -> Tape:
    """Given what the forward kept, if it keeps anything."""
    kept = forward(of, keep_cache=True).outputs[3 + (of.call.num_candidates > 0) :]
    return _passes.gradients_tape(of, seeds, wanted, torch.bfloat16, kept, **how)


def launched(tape: Tape) -> list[Kernel]:
    """The kernels in order."""
    return [step.run for step in find_needed_steps(tape) if isinstance(step.run, Kernel)]


def names(tape: Tape) -> list[str]:
    return [kernel.name for kernel in launched(tape)]


@pytest.mark.parametrize(("wanted", "left_out"), [((True, False), "write_dweight"), ((False, True), "update_dhidden")])
def test_what_nobody_wants_is_not_launched(wanted: tuple[bool, bool], left_out: str) -> None:
    assert left_out in names(backward(head()))
    assert left_out not in names(backward(head(), wanted))


def test_what_a_full_cache_holds_is_not_computed_again() -> None:
    assert "dlogits" in names(backward(head()))
    assert "dlogits" not in names(backward(head(cache_bytes=1 << 40), owns_cache=True))


def test_other_numbers_of_tokens_have_the_same_kernels() -> None:
    one, other = (forward(head(num_tokens=tokens, rows=512)) for tokens in (300, 301))
    assert launched(one) == launched(other)


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"columns": 50257, "vocab_size": 50257}, "V must be a multiple of 8, got 50257"),
        ({"columns": 50256, "device": A100}, "V must be a multiple of 128, got 50256"),
        ({"hidden_size": 64}, "H must be at least 128, got 64"),
        ({"dtype": jnp.dtype("float32")}, "bfloat16 or float16"),
        ({"device": B200}, "compute capability"),
    ],
)
def test_refusals(changed: dict[str, Any], reason: str) -> None:
    assert reason in str(kernels.refusal(head(**changed)))


CALLS: dict[str, dict[str, Any]] = {
    "plain": {},
    "padding": {"num_tokens": 8192, "vocab_size": 151643},
    "a part of a cache": {"num_tokens": 8192, "cache_bytes": 1 << 30},
    "a full cache": {"cache_bytes": 1 << 40, "has_temperature": True},
    "a threshold": {"num_tokens": 8192, "gradient_threshold": 2.0**-12},
    "candidates": {"num_candidates": 8, "vocab_size": 151643},
}


@pytest.mark.parametrize("name", CALLS)
def test_nothing_is_launched_twice(name: str) -> None:
    """No kernel has the same operands as it had before in the pass."""
    of = head(**CALLS[name])
    seeds = ("logprobs", "entropy", *[PER_CANDIDATE] * (of.call.num_candidates > 0))
    for tape in (forward(of, keep_cache=True), backward(of, seeds=seeds, owns_cache=bool(of.call.cache_bytes))):
        steps = [(step.run, *((x.slot, x.shape) for x in step.operands)) for step in find_needed_steps(tape)]
        assert len(steps) == len(set(steps))


def test_a_sum_of_dweight_begins_with_the_kernels_that_go_on() -> None:
    """So that none is compiled for the first chunk alone."""
    of = head(cache_bytes=1 << 40)
    assert launched(backward(of, adds=True)) == launched(backward(of, adds=False))


def test_memory_is_shared_only_after_its_last_use() -> None:
    """By chunks of the vocabulary, so that a pass takes less than 0.7 GiB."""
    tape = backward(head(num_tokens=8192, vocab_size=151643))
    steps = find_needed_steps(tape)
    memory = Memory(tape, steps)
    life: dict[int, list[int]] = {}
    for i, step in enumerate(steps):
        for slot in step.slots:
            life.setdefault(slot, []).append(i)
    for one, other in itertools.combinations(life, 2):
        if memory.home[one] == memory.home[other]:
            assert life[one][-1] < life[other][0]
    assert memory.num_bytes < 0.7 * 2**30


def held_bytes(tape: Tape) -> int:
    """What a pass holds besides what it is given and returns."""
    return Memory(tape, find_needed_steps(tape)).num_bytes


T, H, V = 300, 128, 1008


def _with(seeds: list[torch.Tensor], problem: p.Problem, **options: Any) -> Any:
    leaves = problem.leaves()
    out = linear_logprobs(leaves.hidden, leaves.weight, problem.labels, **options)
    grads = torch.autograd.grad(out[:3], leaves[:2], seeds)
    return [x.detach() for x in out[:3]], grads


@pytest.mark.slow
@pytest.mark.parametrize("cache_bytes", [pytest.param(0, marks=pytest.mark.slow), 1 << 30])
def test_few_kernels_serve_all_counts_of_tokens(cache_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Up to 16,384 tokens, forward and backward: after a few counts, no other one needs a kernel that is new."""
    programs, kernels_of_few = as_gpu(monkeypatch), set[Kernel]()
    few = [n - i for n in (128, 512, 2048, 4096, 8192, 16384) for i in (0, 1)]  # whole sizes, and those with padding
    for n in (*few, *random.Random(0).sample(range(1, 16384), 200)):
        leaves, seed = p.draw(n, 128, 1024, torch.bfloat16).leaves(), torch.ones(n)
        out = linear_logprobs(*leaves, implementation="mosaic_gpu", cache_bytes=cache_bytes)
        torch.autograd.grad(out[:3], leaves[:2], [seed] * 3)
        found = {kernel for program in programs for kernel in program}
        kernels_of_few = found if n in few else kernels_of_few
        assert found == kernels_of_few


class Names(TorchDispatchMode):
    """Notes the bridge's operators."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        self.seen += [func.name()] * (func.namespace == "lce_torch_bridge")
        return func(*args, **(kwargs or {}))


def test_what_watches_operators_sees_them() -> None:
    """Otherwise there are none, and the results are the same."""
    problem = p.draw()
    seeds = p.seeds_like(problem.labels)
    found, grads = _with(seeds, problem)
    with Names() as watch:
        watched, of_watched = _with(seeds, problem)
    assert watch.seen == ["lce_torch_bridge::forward", "lce_torch_bridge::backward"]
    assert "EagerBackward" in str(linear_logprobs(*problem.leaves()).logprobs.grad_fn)
    assert all(map(torch.equal, [*found, *grads], [*watched, *of_watched]))
    with torch.autograd.profiler.profile() as profile:
        linear_logprobs(*problem)
    assert "lce_torch_bridge::forward" in {event.name for event in profile.function_events}


def test_options_that_were_right_once_are_still_checked() -> None:
    """1 equals True, and is no flag."""
    problem = p.draw()
    linear_logprobs(*problem, stats=True, logit_scale=1)
    with pytest.raises(TypeError, match="stats must be True or False, got 1"):
        linear_logprobs(*problem, stats=1, logit_scale=1)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="logit_scale must be a Python number, got bool True"):
        linear_logprobs(*problem, stats=True, logit_scale=True)
    with pytest.raises(TypeError, match="implementation must be None, a name or a tuple of names"):
        linear_logprobs(*problem, implementation=["xla"])  # type: ignore[arg-type]


def test_a_reason_is_found_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """JAX runs such calls, and nothing is planned for the second one. Plans of many shapes do not pile up."""
    as_gpu(monkeypatch)
    monkeypatch.setattr(_launches, "MOST_PLANS", 2)
    made = []
    for _ in range(2):
        assert _launches.find_plan("float32", lambda: made.append(1) or "no kernel") == "no kernel"
    assert made == [1]
    assert _launches.find_plan("plain", lambda: (7,)) == (7,)
    assert _launches.find_plan("plain", list) == (7,)
    assert _launches.find_plan("others", lambda: (8,)) == (8,)
    assert list(_launches._plans) == ["others"]


def test_other_options_have_plans_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """A forward's and a backward's, made in the first such call; of tensors that have the same shapes."""
    programs, leaves = as_gpu(monkeypatch), p.draw(9, 128, 1024, torch.bfloat16).leaves()
    each: list[dict[str, Any]] = [
        {}, {"logit_scale": 0.5}, {"logit_softcap": 3.0}, {"vocab_size": 1000}, {"temperature": 0.5}, {"stats": True},
        {"entropy": False}, {"out_of_vocab": "megatron"}, {"cache_bytes": 0}, {"vocab_part_size": 264},
    ]  # fmt: skip
    for made, options in enumerate(each):
        for _ in range(2):
            out = linear_logprobs(*leaves, **options)
            torch.autograd.grad(out.logprobs.sum(), leaves[:2])
            assert len(programs) == 2 * (made + 1), options


def test_jax_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also after the same call has been launched directly."""
    launched: list[Any] = []
    as_gpu(monkeypatch, lambda program: [lambda *_: lambda: launched.append(1) for _ in program])
    monkeypatch.setattr("lce_torch_bridge.through_jax._programs.run", lambda *_, **__: pytest.fail("JAX runs it"))
    leaves = p.draw(T, H, V, torch.bfloat16)
    linear_logprobs(*leaves)
    before = len(launched)
    assert before
    launch_with("jax")
    with pytest.raises(pytest.fail.Exception, match="JAX runs it"):
        linear_logprobs(*leaves)
    launch_with(None)
    linear_logprobs(*leaves)
    assert len(launched) == 2 * before


def test_why_jax_runs_a_call_is_logged_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    as_gpu(monkeypatch)
    _launch_with._log_reason.cache_clear()
    with caplog.at_level(logging.INFO, "lce_torch_bridge"):
        for _ in range(2):
            linear_logprobs(*p.draw(T, H, V, torch.bfloat16), bias=torch.zeros(V))
    (record,) = caplog.records
    assert "not launched directly: bias" in record.getMessage()


def test_a_capture_compiles_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    programs = as_gpu(monkeypatch)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(RuntimeError, match="once before the capture"):
        linear_logprobs(*p.draw(T, H, V, torch.bfloat16))
    assert not programs


DRAWN = (300, 128, 1024)


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """CPU tensors are described as those of an H200."""
    monkeypatch.setattr(_device, "describe_device", lambda _: H200)
    monkeypatch.setattr(_device, "launch_refusal", lambda _: None)


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    yield
    launch_with(None)


def drawn(dtype: torch.dtype = torch.bfloat16) -> Any:
    return p.draw(*DRAWN, dtype)


SERVED: dict[str, dict[str, Any]] = {
    "plain": {},
    "all statistics": {"stats": True, "temperature": 0.7, "logit_scale": 0.5, "logit_softcap": 20.0},
    "no entropy": {"entropy": False, "out_of_vocab": "megatron"},
    "a full cache": {"cache_bytes": 1 << 30},
    "part of a cache": {"cache_bytes": 1 << 20},
    "padding": {"vocab_size": 1000},
}


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize(
    "name",
    # What others have together with more is slow.
    [pytest.param(name, marks=pytest.mark.slow if name in ("plain", "a full cache") else ()) for name in SERVED],
)
def test_what_is_launched_directly(name: str) -> None:
    how = explain(*drawn(), **SERVED[name])
    assert (how.way, how.why_not_direct) == ("direct", None)
    assert how.plan.implementation == "mosaic_gpu"
    assert "launched directly" in str(how)
    with pytest.MonkeyPatch.context() as patch:
        programs = as_gpu(patch)  # it launches nothing
        leaves = drawn().leaves()
        out = linear_logprobs(*leaves, **SERVED[name])
        torch.autograd.grad(out.logprobs.sum(), leaves[:2])
    assert programs


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize(
    ("options", "dtype", "reason"),
    [
        ({}, torch.float32, "bfloat16 or float16"),
        ({"implementation": "xla"}, torch.bfloat16, "implementation='xla'"),
        ({"implementation": ("xla", "mosaic_gpu")}, torch.bfloat16, "implementation='xla,mosaic_gpu'"),
        ({"bias": torch.zeros(1024)}, torch.bfloat16, "bias"),
        ({"mean_logit": True}, torch.bfloat16, "mean_logit"),
    ],
    ids=["float32", "xla", "xla first", "a bias", "the mean logit"],
)
def test_what_is_not(options: dict[str, Any], dtype: torch.dtype, reason: str) -> None:
    how = explain(*drawn(dtype), **options)
    assert how.way == "jax"
    assert reason in (how.why_not_direct or "")
    assert f"not launched directly: {how.why_not_direct}" in str(how)


def test_a_call_that_must_be_direct_is_refused() -> None:
    launch_with("direct")
    advice = r"cpu is no CUDA device; lce_torch_bridge.launch_with\(None\) lets JAX run such calls"
    with pytest.raises(lce_jax.UnsupportedError, match=advice):
        linear_logprobs(*drawn(torch.float32))
    lce_torch_bridge.launch_with(None)
    linear_logprobs(*drawn(torch.float32))


def test_asking_for_jax_is_told() -> None:
    launch_with("jax")
    assert explain(*drawn()).why_not_direct == 'launch_with("jax") asks for JAX'
    linear_logprobs(*drawn(torch.float32))


def test_another_way_is_refused() -> None:
    with pytest.raises(ValueError, match=r'way must be "direct" or "jax", got .xla.'):
        launch_with("xla")  # type: ignore[arg-type]


def test_builds_of_torch_without_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wheels for CPUs lack what torch has for GPUs alone. Public functions stand in for it."""
    for name in ("_cuda_getDevice", "_cuda_getCurrentRawStream"):
        monkeypatch.delattr(torch._C, name, raising=False)
    monkeypatch.delattr(torch._C._dynamo.guards, "_empty_strided_cuda", raising=False)
    fresh = runpy.run_path(_device.__file__)
    assert fresh["current_device"] is torch.cuda.current_device
    monkeypatch.setattr(torch.cuda, "current_stream", {3: mock.Mock(cuda_stream=7)}.get)
    assert fresh["current_stream"](3) == 7
    with FakeTensorMode():
        x = fresh["empty"]((2, 3), (3, 1), torch.int32)
    assert (x.shape, x.stride(), x.dtype, x.device.type) == ((2, 3), (3, 1), torch.int32, "cuda")
    assert _device.launch_refusal(torch.device("cpu")) == "cpu is no CUDA device of this machine"


def test_a_refused_name_falls_back_only_where_a_tuple_says_so() -> None:
    problem = p.draw()
    out = linear_logprobs(*problem, implementation=("mosaic_gpu", "xla"))
    assert torch.equal(out.logprobs, linear_logprobs(*problem, implementation="xla").logprobs)
