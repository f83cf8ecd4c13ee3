"""The traps of sharing memory, one by one, and of whom JAX's programs wait for."""

from __future__ import annotations

import gc
import threading
import weakref
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from lce_torch_bridge import linear_entropy, linear_kl, linear_logits, linear_logprobs, linear_loss, linear_topk
from lce_torch_bridge.through_jax import _dlpack as dlpack
from lce_torch_bridge.through_jax import _programs
from lce_torch_bridge.through_jax._dlpack import CPU_ALIGNMENT, to_jax, to_torch
from tests.pairs import combined
from tests.torch import problem as p


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int32, torch.bool])
def test_both_ways_without_a_copy(dtype: torch.dtype) -> None:
    x = torch.ones(64, 64).to(dtype)
    array = to_jax(x)
    assert array.unsafe_buffer_pointer() == x.data_ptr()
    back = to_torch(array)
    assert back.data_ptr() == x.data_ptr()
    assert torch.equal(back, x)


@pytest.mark.parametrize("dtype", [torch.int64, torch.float64])
def test_what_jax_would_convert_is_refused(dtype: torch.dtype) -> None:
    with pytest.raises(TypeError, match=f"{dtype} does not pass to JAX unchanged"):
        to_jax(torch.ones(4, dtype=dtype))


def test_a_tensor_that_requires_a_gradient() -> None:
    x = torch.ones(64, requires_grad=True)
    with pytest.raises(Exception, match="require"):  # the trap
        jax.dlpack.from_dlpack(x)
    assert to_jax(x).unsafe_buffer_pointer() == x.data_ptr()


def test_a_misaligned_tensor_is_copied() -> None:
    x = torch.arange(65.0)[1:]
    assert x.data_ptr() % CPU_ALIGNMENT
    array = to_jax(x)
    assert array.unsafe_buffer_pointer() % CPU_ALIGNMENT == 0
    assert jnp.array_equal(array, jnp.arange(1.0, 65.0))


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x[:, 3:],  # sliced columns
        lambda x: x[1:],  # sliced rows, still contiguous, perhaps misaligned
        lambda x: x.T,
        lambda x: x[:1].expand(5, -1),  # stride 0
        lambda x: x[::2],
        lambda x: x.flip(0)[:, ::3],
    ],
)
def test_views(view) -> None:
    x = torch.randn(7, 9)
    assert torch.equal(to_torch(to_jax(view(x))), view(x))


def test_sliced_and_misaligned_operands_give_the_same_bits() -> None:
    problem = p.draw(T=37, H=31, V=103)
    want = linear_logprobs(*problem)

    def shifted(x: torch.Tensor) -> torch.Tensor:
        storage = x.new_zeros(x.numel() + 1)
        storage[1:] = x.reshape(-1)
        return storage[1:].view(x.shape)

    wide = torch.zeros(103, 40)
    wide[:, 5:36] = problem.weight
    strided = torch.zeros(37, 62)
    strided[:, ::2] = problem.hidden
    for hidden, weight in (
        (shifted(problem.hidden), shifted(problem.weight)),
        (strided[:, ::2], wide[:, 5:36]),
        (problem.hidden.T.contiguous().T, problem.weight.T.contiguous().T),
    ):
        out = linear_logprobs(hidden, weight, problem.labels)
        assert all(map(torch.equal, out[:3], want[:3]))


def test_the_quick_import_and_the_public_one_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = p.draw()
    seeds = p.seeds_like(problem.labels)
    assert dlpack._quick_import(problem.hidden.device) is not None  # with the version of JAX at hand
    x = torch.arange(12, dtype=torch.int32).view(3, 4)
    direct, public = to_jax(x), jax.dlpack.from_dlpack(x)
    assert (direct.aval, direct.sharding, direct.committed) == (public.aval, public.sharding, public.committed)
    out, grads = p.gradients(problem, seeds)
    monkeypatch.setattr(dlpack, "_quick_import", lambda _: None)
    want, wanted = p.gradients(problem, seeds)
    assert all(map(torch.equal, (*out[:3], *grads), (*want[:3], *wanted)))


def test_a_version_of_jax_that_imports_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise TypeError("incompatible function arguments")

    monkeypatch.setattr("jax._src.lib._jax.dlpack_managed_tensor_to_buffer", refuse)
    monkeypatch.setattr(jax.dlpack, "from_dlpack", lambda x: jnp.asarray(x.numpy()))
    assert dlpack._quick_import.__wrapped__(torch.device("cpu")) is None


class OnGPU:
    """An array that says it lies on GPU 1."""

    def __init__(self, asked: list[int]) -> None:
        self.asked = asked

    def platform(self) -> str:
        return "gpu"

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, 1

    def __dlpack__(self, stream: int) -> object:
        self.asked.append(stream)
        return torch.utils.dlpack.to_dlpack(torch.zeros(3))


@pytest.mark.parametrize(("stream", "called"), [(0, 1), (77, 77)])
def test_results_wait_in_the_stream_of_their_own_gpu(monkeypatch: pytest.MonkeyPatch, stream: int, called: int) -> None:
    """Not in the current device's, which JAX may change in the middle of a call."""
    devices: list[int] = []
    asked: list[int] = []

    def current_stream(device: int) -> SimpleNamespace:
        devices.append(device)
        return SimpleNamespace(cuda_stream=stream, device=torch.device("cuda", device))

    monkeypatch.setattr(torch.cuda, "current_stream", current_stream)
    monkeypatch.setattr(dlpack, "_readers", defaultdict(dict))
    dlpack.to_torch_all([OnGPU(asked), OnGPU(asked)])
    assert devices == [1]
    assert asked == [called, called]
    assert [(str(device), list(streams)) for device, streams in dlpack._readers.items()] == [("cuda:1", [stream])]


def test_torch_exports_from_the_device_of_the_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    """It refuses to export from any but the current one."""
    entered: list[int] = []
    guard = torch.cuda.device

    def device(index: int) -> torch.cuda.device:
        entered.append(index)
        return guard(index)

    monkeypatch.setattr(torch.cuda, "device", device)
    x = torch.zeros(64)
    to_jax(x)
    assert entered == [x.get_device()]


@pytest.mark.slow
def test_a_write_right_after_the_call_changes_nothing() -> None:
    """After an export, torch's stream waits for the program that reads its memory."""
    problem = p.draw(T=8192, H=16, V=512)  # rows that need no padding: the program reads torch's memory
    want = linear_logprobs(*problem)
    for _ in range(20):
        operands = [x.clone() for x in problem]
        out = linear_logprobs(*operands)
        for operand in operands:
            operand.zero_()
        assert torch.equal(out.logprobs, want.logprobs)


def test_nothing_of_jax_holds_torch_memory_after_a_call() -> None:
    """The memory is NumPy's here, which shows when both torch and JAX have released it."""

    def owned_by_numpy(x: torch.Tensor) -> tuple[torch.Tensor, weakref.ref]:
        memory = np.empty(x.numel() + 16, np.float32)
        array = memory[-memory.ctypes.data % CPU_ALIGNMENT // 4 :][: x.numel()].reshape(x.shape)
        array[:] = x.numpy()
        return torch.from_numpy(array).requires_grad_(), weakref.ref(memory)

    drawn = p.draw(T=8192, H=32, V=128)  # rows that need no padding: the programs read torch's memory
    (hidden, of_hidden), (weight, of_weight) = owned_by_numpy(drawn.hidden), owned_by_numpy(drawn.weight)
    held = to_jax(hidden)
    linear_logprobs(hidden, weight, drawn.labels).logprobs.sum().backward()
    del hidden, weight
    gc.collect()
    assert of_hidden() is not None  # what holds an array holds the memory, and this test sees it
    del held
    linear_logprobs(*p.draw())
    gc.collect()
    assert of_hidden() is None
    assert of_weight() is None


class StandIn:
    """Stands in for CUDA's streams and events: a stream waits for the last recording of an event."""

    def __init__(self, name: str = "", between: threading.Barrier | None = None) -> None:
        self.name, self.cuda_stream, self.between = name, name, between
        self.seen, self.waited_for = "", []

    def record(self, stream: StandIn) -> None:
        self.seen = stream.name
        if self.between is not None:
            self.between.wait(timeout=60)

    def wait_event(self, event: StandIn) -> None:
        self.waited_for.append(event.seen)


def test_threads_have_events_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise a thread that records between another's recording and waiting makes it wait for the wrong stream."""
    both, mine = threading.Barrier(2), threading.local()
    monkeypatch.setattr(torch.cuda, "Event", lambda: StandIn(between=both))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: mine.stream)
    monkeypatch.setattr(dlpack, "_external", lambda *_: mine.external)
    monkeypatch.setattr(dlpack, "_readers", defaultdict(dict))

    def waited_for(name: str) -> list[str]:
        mine.stream, mine.external = StandIn(name), StandIn()
        for _ in range(3):
            dlpack._make_wait(77, torch.device("cuda", 0))
        return mine.external.waited_for

    with ThreadPoolExecutor(2) as threads:
        assert list(threads.map(waited_for, "ab")) == [["a"] * 3, ["b"] * 3]


def test_jax_waits_for_all_streams_that_may_read_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch may drop JAX's memory before another stream, which was given it, has read it."""
    external, here, there = StandIn(), StandIn("here"), StandIn("there")
    device, other = torch.device("cuda", 0), torch.device("cuda", 1)
    monkeypatch.setattr(dlpack, "_events", SimpleNamespace(by_device=defaultdict(StandIn)))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: here)
    monkeypatch.setattr(dlpack, "_external", lambda *_: external)
    readers = {device: {"here": here, "there": there}, other: {"elsewhere": StandIn("elsewhere")}}
    monkeypatch.setattr(dlpack, "_readers", defaultdict(dict, readers))
    dlpack._make_wait(77, device)
    assert external.waited_for == ["here", "there"]


def test_outputs_may_be_changed_and_outlive_the_call() -> None:
    problem = p.draw()
    out, again = linear_logprobs(*problem), linear_logprobs(*problem)
    out.logprobs.add_(1)
    gc.collect()
    assert torch.equal(out.logprobs, again.logprobs + 1)
    assert torch.equal(linear_logprobs(*problem).logprobs, again.logprobs)


T, H, V = 300, 16, 96
TEMPERATURE, SEED = torch.linspace(0.5, 2.0, T), torch.linspace(-1.0, 1.0, T)
PROBLEM = p.draw(T, H, V)
IDS = torch.randint(-1, V, (T, 3), generator=torch.Generator().manual_seed(0))


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Of each program that has run: whether it reads what it waits by."""
    found: list[bool] = []

    def checked(function: Any, place: int) -> Callable[..., Any]:
        def run(*arrays: Any) -> Any:
            # The places of leaves: an input that is None has none.
            before = len(jax.tree.leaves(arrays[:place]))
            found.append(before in function.lower(*arrays)._lowering.compile_args["kept_var_idx"])
            return function(*arrays)

        return run

    run, after, zeros = _programs.run, _programs.DweightSum.add_in_jax, _programs._make_zeros

    def run_checked(function: Any, *calls: Any, waits: int = _programs.WAITS, lend: bool = True) -> Any:
        return run(checked(function, waits), *calls, waits=waits, lend=lend)

    def after_checked(self: Any, function: Any, inputs: Any, operand: int, place: int) -> Any:
        assert operand > _programs.WAITS  # the sum stands after it
        return after(self, checked(function, _programs.WAITS), inputs, operand, place)

    def zeros_checked(shape: tuple[int, ...], array: Any) -> Any:
        found.append(zeros.lower(shape, array)._lowering.compile_args["kept_var_idx"] == {0})
        return zeros(shape, array)

    monkeypatch.setattr(_programs, "run", run_checked)
    monkeypatch.setattr(_programs.DweightSum, "add_in_jax", after_checked)
    monkeypatch.setattr(_programs, "_make_zeros", zeros_checked)
    return found


def differentiated(of: Callable[..., Any], wanted: Sequence[int]) -> None:
    """``of`` and the gradients in some of hidden, weight and a bias."""
    operands = [PROBLEM.hidden.clone(), PROBLEM.weight.clone(), torch.zeros(V)]
    for i in wanted:
        operands[i].requires_grad_()
    torch.autograd.grad(of(*operands), [operands[i] for i in wanted])


def logprobs(read: Callable[[Any], torch.Tensor], **options: Any) -> Callable[..., Any]:
    def of(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return (SEED * read(linear_logprobs(hidden, weight, PROBLEM.labels, bias=bias, **options))).sum()

    return of


def divergence(**options: Any) -> Callable[..., Any]:
    def of(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return (SEED * linear_kl(hidden, weight, PROBLEM.hidden, PROBLEM.weight, bias=bias, **options)).sum()

    return of


def entropy(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return linear_entropy(hidden, weight, bias=bias)[0].sum()


def logits(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return linear_logits(hidden, weight, IDS, bias=bias).sum()


def chunks(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    problem = [torch.cat([x] * 15) for x in (hidden, PROBLEM.labels)]  # of 4,500 tokens, in three chunks
    chunk_bytes = p.bytes_of(2048, weight)
    total, _ = linear_loss(
        lambda logprobs, *_: logprobs, problem[0], weight, problem[1], bias=bias, chunk_bytes=chunk_bytes
    )
    return total


CALLS: dict[str, Callable[..., Any]] = {
    "logprobs": logprobs(lambda out: out.logprobs),
    "lse": logprobs(lambda out: out.lse, entropy=False),
    "entropy, a cache": logprobs(lambda out: out.entropy, cache_bytes=1 << 30),
    "candidates": logprobs(lambda out: out.candidate_logprobs.sum(-1), candidates=IDS, temperature=TEMPERATURE),
    "linear_entropy": entropy,
    "linear_kl": divergence(),
    "linear_kl, jsd, a cache": divergence(direction="jsd", temperature=TEMPERATURE, cache_bytes=1 << 30),
    "linear_logits": logits,
    "linear_loss": chunks,
}


@pytest.mark.fast("candidates", "linear_kl-", "linear_loss")
@combined(wanted=[(0, 1, 2), (0,), (1,)], name=list(CALLS))
def test_the_input_that_waits_is_read(name: str, wanted: tuple[int, ...], reads: list[bool]) -> None:
    differentiated(CALLS[name], wanted)
    assert reads
    assert all(reads)


@pytest.mark.slow
def test_of_the_most_likely_tokens(reads: list[bool]) -> None:
    linear_topk(PROBLEM.hidden, PROBLEM.weight, 3)
    linear_topk(PROBLEM.hidden, PROBLEM.weight, 3, temperature=TEMPERATURE)
    assert reads == [True, True]


@pytest.mark.parametrize("dtype", [pytest.param(torch.float32, marks=pytest.mark.slow), torch.float16], ids=str)
def test_no_program_runs_by_itself(dtype: torch.dtype) -> None:
    """One without an input of torch, such as ``jnp.zeros``, would write at once to what torch has yet to read."""
    names: set[str] = set()

    def listen(event: str, _: float, **about: Any) -> None:
        if event.endswith("backend_compile_duration"):
            names.add(about["fun_name"])

    problem = p.draw(4500, H, V, dtype).leaves()
    jax.clear_caches()
    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        chunk_bytes = p.bytes_of(2048, problem.weight)
        total, _ = linear_loss(lambda logprobs, *_: logprobs * 1e-6, *problem, chunk_bytes=chunk_bytes)
        torch.autograd.grad(total, problem[:2])
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    assert names == {"jit(single_shard)", "jit(pull_back)", "jit(_make_zeros)"} | (
        {"jit(_multiply)"} if dtype == torch.float16 else set()
    )
