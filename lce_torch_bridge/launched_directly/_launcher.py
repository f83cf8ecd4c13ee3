"""A list of kernels on a device, for so many tokens: its numbers, its workspace, and its launch."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch

from lce_jax import launch_lists
from lce_torch_bridge.tensors import _device

_captured: dict[int, torch.Tensor] = {}  # numbers that a CUDA graph reads, which outlive their launcher


class Launcher:
    """Launches a list on a device, for so many tokens."""

    def __init__(self, launches: launch_lists.LaunchList, tokens: int) -> None:
        self.launches, self.tokens = launches, tokens
        self._run = _compiled(launches, torch.cuda.current_device())
        self._numbers: dict[int, torch.Tensor] = {}

    def launch(self, device: int, tensors: Sequence[torch.Tensor]) -> None:
        """Launches them all; ``tensors`` are the results that have memory, and the operands."""
        stream = _device.current_stream(device)
        is_captured = torch.cuda.is_current_stream_capturing()
        numbers = self._of_a_graph() if is_captured else self._numbers.get(stream)
        if numbers is None:
            numbers = self._numbers[stream] = self._written(tensors[0])
        workspace = _device.empty((self.launches.workspace_bytes,), (1,), torch.uint8)  # reused in the stream's order
        addresses = [x.data_ptr() for x in tensors]
        self._run(stream, workspace.data_ptr(), numbers.data_ptr(), addresses, is_captured)

    def outputs(self, first: int) -> list[_device.Allocated]:
        """The memory of the results that have any, from that one on."""
        own = [x for x in self.launches.outputs if x is not None]
        return [_device.allocated(x.shape, getattr(torch, x.dtype.name)) for x in own[first:]]

    def _of_a_graph(self) -> torch.Tensor:
        """The numbers, written by an earlier call on any stream: a capture begins when all of it is done."""
        if not self._numbers:
            _refuse_capture("has not run over so many tokens")
        numbers = next(iter(self._numbers.values()))
        _captured[numbers.data_ptr()] = numbers
        return numbers

    def _written(self, like: torch.Tensor) -> torch.Tensor:
        """The numbers of this many tokens beside ``like``, written on the stream that reads them: nothing waits."""
        numbers = self.launches.numbers(self.tokens, stride(self.tokens))
        given = torch.tensor(numbers, dtype=torch.int32, pin_memory=like.is_cuda)
        return given.to(like.device, non_blocking=True)


@functools.cache
def _compiled(launches: launch_lists.LaunchList, device: int) -> Callable[..., None]:
    _refuse_capture("compiles kernels for this call")
    return launches.load(device)


def _refuse_capture(why: str) -> None:
    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            f"lce_torch_bridge {why}, which a CUDA graph cannot capture: make the call once before the capture, with "
            "tensors of the same shapes, and its backward"
        )


def stride(tokens: int) -> int:
    """The rows that arrays of so many tokens have."""
    return max(tokens, launch_lists.THREADS)


def of_stride(saved: torch.Tensor) -> torch.Tensor:
    """What a forward saved, as it wrote it."""
    fields, tokens = saved.shape
    if saved.stride() == (stride(tokens), 1):
        return saved
    whole = saved.new_empty((fields, stride(tokens)))
    whole[:, :tokens] = saved
    return whole


def in_rows(x: torch.Tensor) -> torch.Tensor:
    """What is per token, contiguous, in as many rows as kernels read."""
    if x.shape[0] >= launch_lists.THREADS:
        return _device.usable(x)
    padded = x.new_zeros((launch_lists.THREADS, *x.shape[1:]))
    padded[: x.shape[0]] = x
    return padded
