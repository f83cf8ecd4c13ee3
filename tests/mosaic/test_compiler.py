"""What kernels need of JAX to be compiled for another host: the private names, and no client on the GPU."""

from __future__ import annotations

import functools
import importlib
import threading
from typing import Any

import jax
import pytest
import torch

from lce_jax.mosaic import _compiler, _equal_variables, _pallas
from lce_jax.run.kl_kernels import LaunchedKL, Pair
from lce_torch_bridge.launched_directly import _kl
from tests.devices import H200
from tests.torch.processes import succeed
from tests.torch.test_launches import backward, forward, head, launched

SMALL: Any = dict(num_tokens=128, hidden_size=128, columns=512, vocab_size=512)


def test_the_launch_convention_is_that_of_this_jax() -> None:
    """From 0.12 on a kernel is launched with itself first and the device last."""
    assert _compiler._takes_device() == (jax.__version_info__ >= (0, 12))


def test_a_private_name_that_is_gone_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """`why_not` names it, and nothing raises: the bridge lets JAX run the calls."""
    from jax.experimental.mosaic.gpu import core

    monkeypatch.setattr(_compiler, "_compiler", object)
    assert _compiler.why_not.__wrapped__() is None
    monkeypatch.delattr(core, "_compile_as_torch_gpu_kernel")
    told = "AttributeError: this version of JAX launches Mosaic kernels differently"
    assert _compiler.why_not.__wrapped__() in (None, told)  # found before it was gone
    _compiler._takes_device.cache_clear()
    assert _compiler.why_not.__wrapped__() == told
    _compiler._takes_device.cache_clear()


def test_a_plugin_that_is_not_installed_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_compiler, "PLUGINS", ("jax_plugins.none",))
    monkeypatch.setattr(_compiler, "_compiler", _compiler._compiler.__wrapped__)
    told = "ImportError: none of jax_plugins.none is installed, but they have the compiler of the kernels"
    assert _compiler.why_not.__wrapped__() == told


def test_no_client_of_jax_is_made() -> None:
    found = succeed(f"""
        from jax._src import xla_bridge
        from lce_jax.mosaic import _compiler
        from tests.devices import H200
        from tests.torch.test_launches import backward, forward, head, launched
        small = head(**{SMALL}, cache_bytes=1 << 40)
        kernels = [*launched(forward(small, keep_cache=True)), *launched(backward(small, owns_cache=True))]
        print(len(_compiler.module(kernels[0], H200)) > 0, xla_bridge.backends_are_initialized())
        """)
    assert found.split() == ["True", "False"]


def test_kernels_are_lowered_whatever_the_caller_has_set() -> None:
    found, lower = launched(forward(head(**SMALL)))[:1], _compiler.module.__wrapped__
    want = [len(lower(kernel, H200)) for kernel in found]  # JAX 0.11.2 names things anew each time
    with jax.disable_jit(), jax.set_mesh(jax.make_mesh((2,), ("x",))):
        assert [len(lower(kernel, H200)) for kernel in found] == want


def test_other_threads_see_what_they_saw() -> None:
    """Where a kernel is lowered for a device that need not be there."""
    from jax.experimental.mosaic.gpu import core, utils

    seen: list[Any] = []

    def look() -> None:
        seen.append((utils._infer_arch(), core.jax.local_devices()))

    look()
    with _pallas.lowering_for("12.0"):
        thread = threading.Thread(target=look)
        thread.start()
        thread.join()
        look()
    assert seen == [((9, 0), jax.local_devices())] * 2 + [((12, 0), [None])]
    assert core.jax.Array is jax.Array


@pytest.mark.slow  # .ci/run runs this test and the next
@pytest.mark.parametrize(
    "changed",
    [
        dict(num_tokens=128, hidden_size=2880, columns=201088, vocab_size=200019, has_temperature=True),
        dict(num_tokens=8192, gradient_threshold=2.0**-12, vocab_size=151643, num_candidates=64),
        dict(stats=True, num_candidates=8, logit_softcap=30.0, entropy=False, dtype=jax.numpy.dtype("float16")),
    ],
    ids=str,
)
def test_every_kernel_lowers_for_cuda(changed: dict[str, Any]) -> None:
    of = head(**changed)
    seeds = ("logprobs", "entropy", *["candidate_logprobs"] * (of.call.num_candidates > 0))
    for kernel in dict.fromkeys([*launched(forward(of, keep_cache=True)), *launched(backward(of, seeds=seeds))]):
        assert _compiler.module(kernel, H200)


@pytest.mark.slow
@pytest.mark.parametrize("direction", ["forward", "reverse", "jsd", "tv"])
def test_every_kernel_of_two_heads_lowers_for_cuda(direction: str) -> None:
    teacher = head(**SMALL | {"hidden_size": 256}, direction=direction, has_temperature=True)
    student = head(**SMALL, direction=direction, has_temperature=True, cache_bytes=1 << 19)
    of = LaunchedKL(heads=Pair(student, teacher), beta={"jsd": 0.3, "tv": 0.5}.get(direction))
    forward = _kl.forward_tape(of, True)
    backward = _kl.gradients_tape(of, forward.outputs[2:], (True, True), torch.bfloat16)
    for kernel in dict.fromkeys([*launched(forward), *launched(backward)]):
        if not kernel.name.startswith(("kl_", "cached_kl_")):  # `test_kl` lowers these, which takes long
            assert _compiler.module(kernel, H200)


def test_equal_variables_are_those_that_equations_connect() -> None:
    constraints = importlib.import_module("jax.experimental.mosaic.gpu.constraints")
    a, b, c, d, e, f = (constraints.Variable(name) for name in "abcdef")
    pairs = (a, b), (c, d), (b, a), (d, a), (e, e)
    equations = [constraints.Equals(*pair) for pair in pairs]
    system = constraints.ConstraintSystem(
        constraints=[*equations, constraints.Equals(f, constraints.RegisterLayout(0))]
    )
    expected = {x: {a, b, c, d} - {x} for x in (a, b, c, d)} | {e: set()}
    for find in (
        constraints.compute_transitively_equal_vars,
        functools.partial(_equal_variables.find_equal_variables, constraints),
    ):
        assert {x: set(others) for x, others in find(system).items()} == expected
