"""JAX beside torch: when it starts, with which memory, on which devices, in which contexts, and how it ends."""

from __future__ import annotations

import contextlib
import os
import pkgutil
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import pytest
import torch
from jax.sharding import AbstractMesh, AxisType

import lce_jax
import lce_torch_bridge
from lce_torch_bridge import linear_kl, linear_logits, linear_logprobs, linear_loss, linear_topk
from lce_torch_bridge.through_jax import _runtime as runtime
from tests.pairs import combined
from tests.torch import problem as p
from tests.torch.processes import run, succeed

CALL = """
import torch, lce_torch_bridge
hidden, weight = torch.randn(5, 8, requires_grad=True), torch.randn(16, 8, requires_grad=True)
out = lce_torch_bridge.linear_logprobs(hidden, weight, torch.arange(5))
out.logprobs.sum().backward()
"""


def test_init_chooses_and_is_too_late_once_jax_has_started() -> None:
    said = succeed("""
        import os, jax, lce_torch_bridge
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", 3)
        lce_torch_bridge.init(allocator="platform", mem_fraction=0.25)
        print(jax.device_count())
        print(*(os.environ[f"XLA_PYTHON_CLIENT_{name}"] for name in ("PREALLOCATE", "ALLOCATOR", "MEM_FRACTION")))
        lce_torch_bridge.init()
        try:
            lce_torch_bridge.init(mem_fraction=0.5)
        except RuntimeError as error:
            print(error)
    """)
    assert said.splitlines()[:2] == ["3", "false platform 0.25"]
    assert "JAX has already started, with its allocator chosen" in said


def test_what_the_user_has_set_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "_started_in", None)
    monkeypatch.setenv(runtime.PREALLOCATE, "true")
    runtime.start()
    assert os.environ[runtime.PREALLOCATE] == "true"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (dict(allocator="fast"), 'allocator must be "bfc", "platform", "cuda_async" or None, got \'fast\''),
        (dict(mem_fraction=0), r"mem_fraction must lie in \(0, 1\], got 0"),
        (dict(mem_fraction=1.5), r"mem_fraction must lie in \(0, 1\], got 1.5"),
    ],
)
def test_init_refuses(given: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        lce_torch_bridge.init(**given)


def test_a_forked_child_is_told_and_the_process_ends_with_its_own_code() -> None:
    """The child would deadlock in JAX's threads. Buffers that torch has dropped at the end must not abort."""
    done = run(
        CALL
        + """
import os, warnings
warnings.simplefilter("ignore")  # JAX warns of fork by itself
pid = os.fork()
if pid == 0:
    try:
        lce_torch_bridge.linear_logprobs(hidden, weight, torch.arange(5))
    except RuntimeError as error:
        print(error, flush=True)
        os._exit(7)
    os._exit(0)
print("code", os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
del out, hidden.grad, weight.grad
raise SystemExit(3)
"""
    )
    assert done.returncode == 3, done.stderr
    assert "terminate" not in done.stderr
    assert "after JAX had started there" in done.stdout
    assert '"spawn"' in done.stdout
    assert done.stdout.strip().endswith("code 7")


@pytest.fixture
def platforms() -> Iterator[Callable[[str | None], None]]:
    """Sets what ``JAX_PLATFORMS`` says; a JAX that has started keeps its platforms."""
    before = jax.config.jax_platforms
    yield lambda value: jax.config.update("jax_platforms", value)
    jax.config.update("jax_platforms", before)


@pytest.mark.parametrize(
    ("device", "message"),
    [
        ("cpu", r"cpu backend.*JAX_PLATFORMS is 'tpu': leave it unset or write \"cuda,cpu\"$"),
        (
            "cuda:1",
            r"cuda:1 tensors .*pip install \"\.\[cuda13\]\"",
        ),
    ],
)
def test_a_backend_that_is_not_there(
    platforms: Callable[[str | None], None], monkeypatch: pytest.MonkeyPatch, device: str, message: str
) -> None:
    def refuse(backend: str) -> None:
        raise RuntimeError(f"Unknown backend {backend}")

    platforms("tpu")
    monkeypatch.setattr(runtime.jax, "local_devices", refuse)
    with pytest.raises(RuntimeError, match=message):
        runtime.find_jax_device.__wrapped__(torch.device(device))


@pytest.mark.skipif(torch.cuda.is_available(), reason="JAX starts with cuda where there is a GPU")
def test_platforms_that_jax_does_not_start_with() -> None:
    """Each case finds JAX as in a new process; what the message says to write then works in it."""
    said = succeed("""
        import jax, os, torch, lce_torch_bridge
        from lce_torch_bridge.through_jax import _runtime as runtime
        def call():
            return lce_torch_bridge.linear_logprobs(torch.ones(2, 3), torch.ones(4, 3), torch.zeros(2, dtype=int))
        for value in ("cuda", "tpu", "gpu", "CPU", "rocm,cpu"):
            jax.config.update("jax_platforms", value)
            for start in (lce_torch_bridge.init, call):
                try:
                    start()
                except RuntimeError as error:
                    print(value, start.__name__, error, type(error.__cause__).__name__, sep=" | ")
        jax.config.update("jax_platforms", "cuda,cpu")
        print(len(call().lse))
    """)
    *lines, last = said.splitlines()
    values = ("cuda", "tpu", "gpu", "CPU", "rocm,cpu")
    assert last == "2"
    assert len(lines) == 2 * len(values)
    for line, value in zip(lines[::2], values, strict=True):
        assert f'JAX does not start; JAX_PLATFORMS is {value!r}: leave it unset or write "cuda,cpu"' in line
    assert {line.split(" | ")[3] for line in lines} == {"AssertionError", "RuntimeError"}


def test_without_a_choice_of_platforms_jax_speaks_for_itself(
    platforms: Callable[[str | None], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse() -> None:
        raise RuntimeError("uninstall the failing plugin")

    monkeypatch.setattr(runtime, "_started_in", None)
    monkeypatch.setattr(runtime.jax, "devices", refuse)
    platforms(None)
    with pytest.raises(RuntimeError, match=r"^uninstall the failing plugin$"):
        runtime.start()


def test_the_current_device_of_torch_is_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    """JAX's start would leave the last GPU current."""
    current = [1]
    monkeypatch.setattr(runtime, "_started_in", None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current[0])
    monkeypatch.setattr(torch.cuda, "set_device", lambda index: current.__setitem__(0, index))
    monkeypatch.setattr(runtime.jax, "devices", lambda: current.__setitem__(0, 7) or [])
    runtime.start()
    assert current == [1]


class FakeGPU:
    platform = "gpu"

    def __init__(self, index: int, pool: int = 0) -> None:
        self.local_hardware_id, self.pool = index, pool

    def memory_stats(self) -> dict[str, int]:
        return {"pool_bytes": self.pool, "bytes_limit": 100 << 30}


def test_a_preallocated_gpu_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(runtime.PREALLOCATE, "false")
    runtime.warn_of_preallocation([FakeGPU(0, pool=1 << 30)])
    with pytest.warns(UserWarning, match='JAX holds 75 GiB of .*XLA_PYTHON_CLIENT_PREALLOCATE="false"'):
        runtime.warn_of_preallocation([FakeGPU(0, pool=75 << 30)])
    monkeypatch.setenv(runtime.PREALLOCATE, "true")
    runtime.warn_of_preallocation([FakeGPU(0, pool=75 << 30)])


def test_gpus_are_matched_by_their_index(monkeypatch: pytest.MonkeyPatch) -> None:
    devices = [FakeGPU(1), FakeGPU(0)]
    monkeypatch.setattr(runtime.jax, "local_devices", lambda backend: devices if backend == "cuda" else [])
    find = runtime.find_jax_device.__wrapped__
    assert find(torch.device("cuda:0")) is devices[1]
    assert find(torch.device("cuda:1")) is devices[0]
    with pytest.raises(RuntimeError, match=r"JAX sees GPUs \[1, 0\], not cuda:2"):
        find(torch.device("cuda:2"))


def test_cuda_graph_capture_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class OnGPU:
        is_cuda = True

    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(RuntimeError, match="cannot run under CUDA graph capture"), runtime.enter_device(OnGPU()):
        pass
    lce_torch_bridge.linear_logprobs(*p.draw())  # CPU tensors are never captured


@pytest.mark.slow
def test_to_import_the_package_costs_little_beside_torch() -> None:
    """JAX, torch's compiler and DTensor come with the first name that is used, and Megatron and Flax never."""
    said = succeed(
        """
        import time
        begin = time.process_time()
        import torch
        alone = time.process_time()
        import lce_torch_bridge
        both = time.process_time()
        import sys
        late = ("jax", "lce_jax", "torch._dynamo", "torch.distributed.tensor")
        print([x for x in late if x in sys.modules])
        print((both - begin) / (alone - begin))
        assert set(lce_torch_bridge.__all__) <= set(dir(lce_torch_bridge))
        lce_torch_bridge.linear_logprobs
        assert "linear_logprobs" in vars(lce_torch_bridge)
        print([x for x in ("megatron", "flax") if x in sys.modules])
        """,
        fresh=True,
    )
    early, ratio, never = said.splitlines()
    assert early == never == "[]"
    assert float(ratio) <= 1.3


RELEASE = """
    import os, threading, warnings, weakref
    import jax, lce_torch_bridge, torch
    from lce_torch_bridge.through_jax import _runtime as runtime
    from tests.torch import problem as p

    def attempt():
        try:
            lce_torch_bridge.release()
        except RuntimeError as error:
            return str(error)
        return "released"

    leaves = p.draw().leaves()
    optimizer = torch.optim.SGD(leaves[:2], lr=0.0)

    def step():
        out = lce_torch_bridge.linear_logprobs(*leaves, cache_bytes=1 << 20)
        p.objective(out, p.seeds_like(leaves.labels)).backward()
        return [x.detach().clone() for x in (*out[:3], leaves.hidden.grad, leaves.weight.grad)]

    print(attempt(), runtime._has_jax_started())
    first = step()
    print(attempt())
    kept = leaves.weight.grad
    assert torch.equal(kept, first[-1])
    lce_torch_bridge.linear_logprobs(*leaves)
    del kept
    optimizer.zero_grad(set_to_none=True)
    client = weakref.ref(jax.devices()[0].client)
    print(attempt(), runtime._has_jax_started(), client())
    lce_torch_bridge.init(allocator="platform")
    assert all(map(torch.equal, step(), first))
    optimizer.zero_grad(set_to_none=True)
    print(attempt())
    ours = jax.numpy.ones(3)
    print(attempt())
    del ours
    device = jax.devices()[0]
    print(attempt())
    del device
    assert all(map(torch.equal, step(), first))
    optimizer.zero_grad(set_to_none=True)
    held_by_a_thread = [jax.numpy.ones(3)]
    threading.Timer(0.2, held_by_a_thread.clear).start()
    print(attempt())
    assert all(map(torch.equal, step(), first))
    warnings.simplefilter("ignore")  # JAX warns of fork by itself
    if os.fork() == 0:
        print(attempt(), flush=True)
        os._exit(0)
    os.wait()
"""


def test_release_and_the_next_call() -> None:
    said = succeed(RELEASE).splitlines()
    assert said[0] == "released False"
    assert re.match(r"JAX's memory still holds arrays, float32\[.* \(2 in all\): .* optimizer.zero_grad", said[1])
    assert said[2] == "released False None"
    assert said[3] == "released"
    assert said[4].startswith("JAX's memory still holds arrays, float32[3] (1 in all): drop them first")
    assert said[5].startswith("JAX's memory is not given back, because something holds its cpu client: drop devices")
    assert said[6] == "released"
    assert "after JAX had started there" in said[7]


T = 37
TEMPERATURE = torch.linspace(0.5, 2, T)
H200 = jax.sharding.AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="gpu")


def over(count: int, kind: AxisType) -> Any:
    """`jax.set_mesh` of devices that hold no tensor: these are on the first."""
    return jax.set_mesh(jax.make_mesh((count,), ("x",), (kind,), devices=jax.devices()[1 : 1 + count]))


CONTEXTS: dict[str, Callable[[], Any]] = {
    "Auto": lambda: over(2, AxisType.Auto),
    "Explicit": lambda: over(2, AxisType.Explicit),
    "another device": lambda: over(1, AxisType.Auto),
    "GPUs": lambda: jax.sharding.use_abstract_mesh(AbstractMesh((2,), ("x",), abstract_device=H200)),
    "disable_jit": jax.disable_jit,
    "debug_nans": lambda: jax.debug_nans(True),
}


def logprobs(hidden: Any, weight: Any, labels: Any) -> list[torch.Tensor]:
    return list(linear_logprobs(hidden, weight, labels, temperature=TEMPERATURE, cache_bytes=1 << 30)[:3])


def loss(hidden: Any, weight: Any, labels: Any) -> list[torch.Tensor]:
    return [linear_loss(lambda logprobs, *_: -logprobs, hidden, weight, labels)[0]]


def kl(hidden: Any, weight: Any, _labels: Any) -> list[torch.Tensor]:
    return [linear_kl(hidden, weight, hidden.detach() / 2, weight.detach(), cache_bytes=1 << 30)]


def logits(hidden: Any, weight: Any, labels: Any) -> list[torch.Tensor]:
    return [linear_logits(hidden, weight, labels[:, None], temperature=TEMPERATURE)]


def topk(hidden: Any, weight: Any, _labels: Any) -> list[torch.Tensor]:
    return list(linear_topk(hidden, weight, 4, temperature=TEMPERATURE))


def in_context(
    call: Any, forward: Any = contextlib.nullcontext, backward: Any = contextlib.nullcontext
) -> list[torch.Tensor]:
    """The results and the gradients of their sum, each pass inside of a context."""
    leaves = p.draw(T).leaves()
    with forward():
        found = call(*leaves)
    total = sum(x.sum() for x in found if x.requires_grad)
    with backward():
        return [*found, *(torch.autograd.grad(total, leaves[:2]) if isinstance(total, torch.Tensor) else [])]


@combined(call=[logprobs, loss, kl, logits, topk], context=list(CONTEXTS))
def test_the_bits_of_a_call_outside(call: Any, context: str) -> None:
    want, inside = in_context(call), CONTEXTS[context]
    for passes in ({"forward": inside}, {"backward": inside}, {"forward": inside, "backward": inside}):
        runtime.infer_shapes.cache_clear()
        found = in_context(call, **passes)
        assert all(map(torch.equal, found, want)), passes


FOLDER = Path(lce_torch_bridge.__file__).parent


NAME = re.compile(r"(?<![\w.])(?:jax|torch)[\w.]*\._[a-zA-Z][\w.]*\w")
IMPORTED = re.compile(r"from ((?:jax|torch)\S*\._\S+) import (\w+)")


def test_private_names_of_jax_and_torch_are_there() -> None:
    """Torch documents its dispatch modes."""
    found = {}
    for path in (*FOLDER.rglob("*.py"), *Path(lce_jax.__file__).parent.rglob("*.py")):
        text = path.read_text().replace("from torch.utils._python_dispatch import TorchDispatchMode", "")
        found |= dict.fromkeys((*NAME.findall(text), *map(".".join, IMPORTED.findall(text))), path.name)
    assert found
    for name, reader in found.items():
        assert pkgutil.resolve_name(name) is not None, reader


def test_a_name_that_is_not_there() -> None:
    with pytest.raises(AttributeError, match="'lce_torch_bridge' has no attribute 'linear_logprob'"):
        _ = lce_torch_bridge.linear_logprob
