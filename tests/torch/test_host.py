"""torch as the host of a pass: which kernels it launches, and what its functions and its memory do between them."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

import jax.numpy as jnp
import pytest
import torch

from lce_jax import kernels
from lce_jax.kernels import CallKind, Device, Kernel
from lce_jax.mosaic import _chunks
from lce_torch_bridge._types import PER_CANDIDATE
from lce_torch_bridge.launched_directly import _passes
from lce_torch_bridge.launched_directly._host import Buffer, Launches, Memory, Tape, needed
from tests.devices import H200
from tests.torch.as_gpu import as_gpu


def head(**changed: Any) -> CallKind:
    """4096 tokens of a model's head."""
    given: dict[str, Any] = {"num_tokens": 4096, "hidden_size": 4096, "num_columns": 151936, "vocab_size": 151936}
    given |= {"start": 0, "dtype": "bfloat16", "device": H200, **changed}
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


def launched(tape: Tape) -> list[Kernel]:
    """The kernels in order."""
    return [step.run for step in needed(tape) if isinstance(step.run, Kernel)]


def names(tape: Tape) -> list[str]:
    return [kernel.name for kernel in launched(tape)]


def test_a_forward_is_five_launches() -> None:
    every = ["prepare", "statistics", "join", "join", "finish"]
    assert names(forward(head())) == every
    assert set(names(forward(head(num_tokens=4000, rows=4096)))) == {*every, "rows"}  # hidden is copied


def test_a_backward_with_all_of_a_cache_is_five_launches() -> None:
    found = names(backward(head(cache_bytes=1 << 40), owns_cache=True))
    assert found == ["prepare", "coefficients", "cached_dlogits", "update_dhidden", "write_dweight"]


def test_candidates_are_beside_the_launches() -> None:
    of = head(num_candidates=8)
    assert Counter(names(forward(of))) - Counter(names(forward(head()))) == {"products": 1}
    assert names(backward(of)) == names(backward(head()))
    every = names(backward(of, seeds=("logprobs", "entropy", PER_CANDIDATE)))
    assert every.count("put") == every.count("dlogits")
    assert [name for name in every if name != "put"] == names(backward(head()))


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
        ({"num_columns": 50257, "vocab_size": 50257}, "V must be a multiple of 8, got 50257"),
        ({"hidden_size": 64}, "H must be at least 128, got 64"),
        ({"dtype": "float32"}, "bfloat16 or float16"),
        ({"device": Device("gpu", "NVIDIA B200", "10.0", 148)}, "compute capability"),
        ({"device": Device("gpu", "NVIDIA A100", "8.0", 108)}, "compute capability"),
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
