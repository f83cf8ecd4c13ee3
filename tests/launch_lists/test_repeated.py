"""A list that is run again over the same memory becomes one launch."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest

from lce_jax import launch_lists
from lce_jax.launch_lists import _launch_list
from tests.launch_lists.test_passes import head

type Log = list[tuple[str, int]]
MEMORY, ELSEWHERE = 1 << 20, 1 << 30


class Graph:
    """As `lce_jax.launch_lists._driver.Graph`, with launches that are written down."""

    def __init__(self, log: Log, bound: Callable[[int], Any], stream: int) -> None:
        before = len(log)
        for launch in bound(99):
            launch()
        self.log, self.stream, self.seen = log, stream, log[before:]
        del log[before:]

    def launch(self) -> None:
        self.log.append(("graph", self.stream))


@pytest.fixture
def log() -> Log:
    return []


@pytest.fixture
def run(log: Log) -> Callable[..., Log]:
    """What a run over memory that begins at an address launches, by names and streams."""
    program = launch_lists.forward(head(), keep_cache=False)

    def step(name: str, stream: int, at: int) -> Callable[[], None]:
        del at
        return functools.partial(log.append, (name, stream))

    steps = {each.kernel: functools.partial(step, each.kernel.name) for each in program.launches}
    launch = _launch_list.run_of(program, steps, functools.partial(Graph, log))
    count = program.num_outputs + len(program.inputs)

    def run(memory: int = MEMORY, stream: int = 7, **more: Any) -> Log:
        log.clear()
        launch(stream, memory, memory + 64, [memory + 4096 * i for i in range(count)], **more)
        return log.copy()

    return run


NAMES = ["prepare", "statistics", "join", "join", "finish"]
LAUNCHES = [(name, 7) for name in NAMES]


def test_it_becomes_one_launch(run: Callable[..., Log]) -> None:
    assert [run() for _ in range(_launch_list.REPEATED)] == [LAUNCHES] * _launch_list.REPEATED
    assert [run() for _ in range(3)] == [[("graph", 7)]] * 3


def test_other_memory_and_another_stream_count_for_themselves(run: Callable[..., Log]) -> None:
    for _ in range(_launch_list.REPEATED + 1):
        run()
    assert run(ELSEWHERE) == LAUNCHES
    assert run(stream=8) == [(name, 8) for name in NAMES]
    assert run() == [("graph", 7)]


def test_a_capture_gets_the_kernels(run: Callable[..., Log]) -> None:
    """A graph of the caller's would otherwise launch one that may be freed before it."""
    for _ in range(2 * _launch_list.REPEATED):
        assert run(is_captured=True) == LAUNCHES
    for _ in range(_launch_list.REPEATED):
        assert run() == LAUNCHES
    assert run(is_captured=True) == LAUNCHES
    assert run() == [("graph", 7)]


def test_memory_that_changes_makes_no_graph(run: Callable[..., Log]) -> None:
    for i in range(3 * _launch_list.KEPT):
        assert run(MEMORY * (1 + i % (_launch_list.KEPT + 1))) == LAUNCHES


def test_it_is_recorded_on_another_stream(log: Log) -> None:
    seen: list[Log] = []
    program = launch_lists.forward(head(), keep_cache=False)

    def step(name: str, stream: int, at: int) -> Callable[[], None]:
        assert at > 0
        return functools.partial(log.append, (name, stream))

    def record(bound: Callable[[int], Any], stream: int) -> Graph:
        graph = Graph(log, bound, stream)
        seen.append(graph.seen)
        return graph

    steps = {each.kernel: functools.partial(step, each.kernel.name) for each in program.launches}
    launch = _launch_list.run_of(program, steps, record)
    addresses = [MEMORY + 4096 * i for i in range(program.num_outputs + len(program.inputs))]
    for _ in range(_launch_list.REPEATED):
        launch(7, MEMORY, MEMORY, addresses)
    assert seen == [[(name, 99) for name in NAMES]]
