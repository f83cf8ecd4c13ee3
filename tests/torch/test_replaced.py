"""Methods that are replaced for a while, in one thread and in several."""

from __future__ import annotations

import concurrent.futures
import contextlib
import copy
import io
import itertools
import pickle
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from lce_torch_bridge.megatron._patching import replace_forward_in_thread, replace_methods

ALREADY = r"Identity.forward .* let threads take turns"


def test_each_thread_has_its_own() -> None:
    module, threads = torch.nn.Identity(), 4
    inside = threading.Barrier(threads)

    def call(number: int) -> list[int]:
        with replace_forward_in_thread(module, lambda x: x + number) if number else contextlib.nullcontext():
            inside.wait(20)
            found = [module(10)]
            inside.wait(20)
        return [*found, module(10)]

    with concurrent.futures.ThreadPoolExecutor(threads) as pool:
        assert list(pool.map(call, range(threads))) == [[10 + number, 10] for number in range(threads)]
    assert "forward" not in vars(module)


@pytest.mark.parametrize("inner", [replace_methods, replace_forward_in_thread])
@pytest.mark.parametrize("outer", [replace_methods, replace_forward_in_thread])
def test_once_only(outer: Callable[..., Any], inner: Callable[..., Any]) -> None:
    module = torch.nn.Identity()
    with outer(module, forward=lambda x: x + 1):
        with pytest.raises(RuntimeError, match=ALREADY), inner(module, forward=lambda x: x + 2):
            pass
        assert module(10) == 11
    assert "forward" not in vars(module)


def test_threads_take_turns() -> None:
    """As the message says: while one is inside, the other is refused, and after that it is not."""
    module = torch.nn.Identity()

    def call() -> int:
        with replace_methods(module, forward=lambda x: x + 2):
            return module(10)

    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        with replace_methods(module, forward=lambda x: x + 1):
            assert pool.submit(module, 10).result(20) == 11  # in all threads
            with pytest.raises(RuntimeError, match=ALREADY):
                pool.submit(call).result(20)
        assert pool.submit(call).result(20) == 12


class Double(torch.nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(x)


@pytest.mark.parametrize("replace", [replace_methods, replace_forward_in_thread])
def test_a_copy_would_call_the_original(replace: Callable[..., Any]) -> None:
    """So there is none, of the module, of a model that holds it, or of the method. Each way of the message works."""
    module, x = Double(3, 2), torch.ones(1, 3)
    model = torch.nn.Sequential(module)
    ways: list[Callable[[Any], Any]] = [copy.deepcopy, pickle.dumps, lambda x: torch.save(x, io.BytesIO())]
    with replace(module, forward=lambda x: x + 1):
        for way, whole in itertools.product(ways, (module, model, module.forward)):
            with pytest.raises(
                TypeError, match=r"copy or pickle it outside of the block, or pass on its state_dict\(\)"
            ):
                way(whole)
        inside = Double(3, 2)
        inside.load_state_dict(pickle.loads(pickle.dumps(module.state_dict())))
    outside = copy.deepcopy(model), pickle.loads(pickle.dumps(module)), inside
    assert all(torch.equal(other(x), module(x)) for other in outside)
