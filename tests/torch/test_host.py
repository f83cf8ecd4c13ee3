"""Direct launches: which calls are served, the kernels they launch, and what the host does around them."""

from __future__ import annotations

import itertools
import logging
import random
import runpy
from collections import Counter
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
from lce_jax import kernels
from lce_jax.kernels import CallKind, Kernel
from lce_jax.mosaic import _chunks
from lce_jax.mosaic._operands import Span
from lce_torch_bridge import explain, launch_with, linear_logprobs
from lce_torch_bridge._types import PER_CANDIDATE
from lce_torch_bridge.launched_directly import _host, _passes, _way
from lce_torch_bridge.launched_directly._host import Buffer, Launches, Memory, Tape, needed
from lce_torch_bridge.tensors import _device
from tests.devices import A100, B200
from tests.torch import problem as p
from tests.torch.as_gpu import H200, as_gpu


def head(**changed: Any) -> CallKind:
    """4096 tokens of a model's head."""
    given: dict[str, Any] = {"num_tokens": 4096, "hidden_size": 4096, "columns": 151936, "vocab_size": 151936}
    given |= {"start": 0, "dtype": jnp.dtype("bfloat16"), "device": H200, **changed}
    return CallKind(**{"rows": given["num_tokens"], **given})


def forward(of: CallKind, keep_cache: bool = False, group: str = "") -> Tape:
    """Its results are log-probability and lse, and those of candidates."""
    names = ("logprobs", "lse", *[PER_CANDIDATE] * (of.num_candidates > 0))
    return _passes.forward_tape(of, keep_cache, names, group)


def backward(
    of: CallKind, wanted: tuple[bool, bool] = (True, True), seeds: Any = ("logprobs", "entropy"), **how: Any
) -> Tape:
    """Given what the forward kept, if it keeps anything."""
    kept = forward(of, keep_cache=True).outputs[3 + (of.num_candidates > 0) :]
    return _passes.gradients_tape(of, seeds, wanted, torch.bfloat16, kept, **how)


def test_the_first_part_of_a_sum_of_dweight_is_written_by_the_kernel_that_adds() -> None:
    of, at = head(cache_bytes=1 << 40), Span._fields.index("adds_dweight")
    kernels, added = {}, {}
    for adds in (True, False):
        tape = backward(of, adds=adds)
        kernels[adds] = launched(tape)[-1]
        added[adds] = {span[at] for span in tape.numbers_given if len(span) == len(Span._fields)}
    assert kernels[True] is kernels[False]
    assert added == {True: {1}, False: {0}}


def launched(tape: Tape) -> list[Kernel]:
    """The kernels in order."""
    return [step.run for step in needed(tape) if isinstance(step.run, Kernel)]


def names(tape: Tape) -> list[str]:
    return [kernel.name for kernel in launched(tape)]


def test_a_forward_is_five_launches() -> None:
    every = ["prepare", "statistics", "join", "join", "finish"]
    assert names(forward(head())) == every
    assert set(names(forward(head(num_tokens=4000, rows=4096)))) == {*every, "copy_rows"}  # hidden is copied


def test_a_backward_with_all_of_a_cache_is_five_launches() -> None:
    found = names(backward(head(cache_bytes=1 << 40), owns_cache=True))
    assert found == ["prepare", "coefficients", "cached_dlogits", "update_dhidden", "write_dweight"]


def test_candidates_are_beside_the_launches() -> None:
    of = head(num_candidates=8)
    assert Counter(names(forward(of))) - Counter(names(forward(head()))) == {"products": 1, "keep": 1}
    assert names(backward(of)) == names(backward(head()))
    every = names(backward(of, seeds=("logprobs", "entropy", PER_CANDIDATE)))
    assert every.count("put") == every.count("dlogits")
    beside = Counter(every) - Counter(names(backward(head())))
    assert beside == {"cotangents": 1, "place_values": 1, "put": every.count("put")}


def test_a_threshold_selects_live_tiles_and_walks_batches() -> None:
    of = head(num_tokens=8192, gradient_threshold=2.0**-12)
    assert names(forward(of)) == ["prepare", "statistics", "join", "join", "finish"]
    assert names(forward(of, keep_cache=True)) == ["prepare", "statistics", "join_keeping", "join", "finish", "select"]
    assert forward(of, keep_cache=True).outputs[-1].shape == kernels.live_shape(of)
    found = Counter(names(backward(of)))
    assert [found[name] for name in ("live_dlogits", "update_live_dhidden", "write_live_dweight")] == [13] * 3
    assert "write_live_dweight" not in names(backward(of, (True, False)))


@pytest.mark.parametrize(("wanted", "left_out"), [((True, False), "write_dweight"), ((False, True), "update_dhidden")])
def test_what_nobody_wants_is_not_launched(wanted: tuple[bool, bool], left_out: str) -> None:
    assert left_out in names(backward(head()))
    assert left_out not in names(backward(head(), wanted))


def test_padding_ends_in_a_tile_that_is_copied() -> None:
    assert "copy" in names(backward(head(vocab_size=151643)))
    assert "copy" not in names(backward(head()))


def test_other_numbers_of_tokens_have_the_same_kernels() -> None:
    one, other = (forward(head(num_tokens=tokens, rows=512)) for tokens in (300, 301))
    assert launched(one) == launched(other)
    given = [{x for numbers in tape.numbers_given for x in numbers} for tape in (one, other)]
    assert given[0] ^ given[1] == {300, 301}


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


def test_what_is_no_kernel_is_not_launched() -> None:
    tape = Tape()
    x: Any = tape.input((4,), jnp.float32)
    with pytest.raises(ValueError, match="0 kernels in <lambda>"):
        tape.launch(lambda x: x * 2, x)
    with pytest.raises(TypeError, match="unsupported operand"):
        x + 1


def add(xp: Any, x: Any, y: Any) -> Any:
    return xp.where(x > 0, x + y, xp.arange(4))


def put(xp: Any, x: Any, y: Any) -> Any:
    del xp
    x[:2] = y[:2]
    return x


def test_functions_of_torch_between_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """A result has the shape that the function gives it; one that is an operand is in its place."""
    as_gpu(monkeypatch)
    tape = Tape()
    x, y, unused = (tape.input((4,), jnp.float32) for _ in range(3))
    found = tape.compute(add, x, y)
    assert (found.shape, found.dtype) == ((4,), jnp.float32)
    same = tape.compute(put, found, y)
    assert isinstance(same, Buffer)
    assert same.slot == found.slot
    tape.compute(add, x, unused)  # nothing needs it
    assert len(needed(tape)) == 0
    tape.outputs.append(same)
    assert len(needed(tape)) == 2
    given = [torch.tensor([1.0, -1.0, 2.0, -2.0]), torch.full((4,), 5.0), torch.zeros(4)]
    for _ in range(2):
        assert Launches(tape, H200).run(0, given)[0].tolist() == [5.0, 5.0, 7.0, 3.0]


def test_chunks_have_the_same_place() -> None:
    """Nothing else has: what lives at the same time lies apart."""
    tape = backward(head(num_tokens=8192, vocab_size=151643))
    steps = needed(tape)
    memory = Memory(tape, steps)
    chunks = [step.results[0].slot for step in steps if isinstance(step.run, Kernel) and step.run.name == "dlogits"]
    assert len(chunks) > 3
    assert len({memory.home[slot] for slot in chunks}) == 2  # the other is that of the tile with padding
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
    return Memory(tape, needed(tape)).num_bytes


def test_a_cache_is_what_the_forward_allocates() -> None:
    of = head(cache_bytes=1 << 30)
    kept = forward(of, keep_cache=True).outputs[3:]
    structs = _chunks.empty_cache(Tape(), of.case, of.shape, kernels.cached_tiles(of, True))  # type: ignore[arg-type]
    assert [x.shape for x in kept] == [x.shape for x in structs]


T, H, V = 300, 128, 1008


def _with(seeds: list[torch.Tensor], problem: p.Problem, **options: Any) -> Any:
    leaves = problem.leaves()
    out = linear_logprobs(leaves.hidden, leaves.weight, problem.labels, **options)
    grads = torch.autograd.grad(out[:3], leaves[:2], seeds)
    return [x.detach() for x in out[:3]], grads


@pytest.mark.slow
@pytest.mark.parametrize(("cache_bytes", "most"), [pytest.param(0, 72, marks=pytest.mark.slow), (1 << 30, 72)])
def test_few_kernels_serve_all_counts_of_tokens(cache_bytes: int, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Up to 16,384 tokens, forward and backward, nothing compiled or run. How many rows count is an operand."""
    programs = as_gpu(monkeypatch)
    for n in {1, 128, 512, 2048, 4096, 8192, 16384, *random.Random(0).sample(range(1, 16384), 200)}:
        leaves, seed = p.draw(n, 128, 1024, torch.bfloat16).leaves(), torch.ones(n)
        out = linear_logprobs(*leaves, implementation="mosaic_gpu", cache_bytes=cache_bytes)
        torch.autograd.grad(out[:3], leaves[:2], [seed] * 3)
    assert len({kernel for program in programs for kernel in program}) == most


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
    monkeypatch.setattr(_host, "MOST", 2)
    made = []
    for _ in range(2):
        assert _host.plan_of("float32", lambda: made.append(1) or "no kernel") == "no kernel"
    assert made == [1]
    assert _host.plan_of("plain", lambda: (7,)) == (7,)
    assert _host.plan_of("plain", list) == (7,)
    assert _host.plan_of("others", lambda: (8,)) == (8,)
    assert list(_host._plans) == ["others"]


def test_jax_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also after the same call has been launched directly."""
    launched: list[Any] = []
    as_gpu(monkeypatch, lambda program: [lambda *_: lambda: launched.append(1) for _ in program])
    monkeypatch.setattr("lce_torch_bridge.through_jax._programs.run", lambda *_, **__: pytest.fail("JAX runs it"))
    leaves = p.draw(T, H, V, torch.bfloat16)
    linear_logprobs(*leaves)
    assert len(launched) == 6
    launch_with("jax")
    with pytest.raises(pytest.fail.Exception, match="JAX runs it"):
        linear_logprobs(*leaves)
    launch_with(None)
    linear_logprobs(*leaves)
    assert len(launched) == 12


DRAWN = (300, 128, 1024)


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """CPU tensors are described as those of an H200."""
    monkeypatch.setattr(_device, "device_of", lambda _: H200)
    monkeypatch.setattr(_device, "why_not", lambda _: None)


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
    assert str(how).startswith("launched directly, in torch's stream and memory\nmosaic_gpu: 300 tokens")
    with pytest.MonkeyPatch.context() as patch:
        programs = as_gpu(patch)  # it launches nothing
        leaves = drawn().leaves()
        out = linear_logprobs(*leaves, **SERVED[name])
        torch.autograd.grad(out.logprobs.sum(), leaves[:2])
    assert len(programs) == 2


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
    assert str(how).startswith(f"run by JAX, not launched directly: {how.why_not_direct}")


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


def test_the_reason_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    _way._say.cache_clear()
    with caplog.at_level(logging.INFO, "lce_torch_bridge"):
        _way._say("bias: no kernel adds it")
        _way._say("bias: no kernel adds it")
    assert len(caplog.records) == 1
    assert "not launched directly: bias: no kernel adds it" in caplog.text


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
    assert _device.why_not(torch.device("cpu")) == "cpu is no CUDA device of this machine"


def test_a_capture_compiles_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(RuntimeError, match="make the call once before the capture"):
        _host.plan_of("new", list)


def test_a_refused_name_falls_back_only_where_a_tuple_says_so() -> None:
    problem = p.draw()
    out = linear_logprobs(*problem, implementation=("mosaic_gpu", "xla"))
    assert torch.equal(out.logprobs, linear_logprobs(*problem, implementation="xla").logprobs)
