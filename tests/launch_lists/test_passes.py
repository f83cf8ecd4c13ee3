"""Lists of kernels: what they launch, where their memory lies, and that nothing stands between the kernels."""

from __future__ import annotations

import itertools
from typing import Any

import jax.numpy as jnp
import pytest

from lce_jax import launch_lists
from lce_jax.launch_lists import _compiler
from lce_jax.launch_lists._recorder import ROWS, Recorder
from tests.devices import H200


def head(**changed: Any) -> launch_lists.CallKind:
    given = {"num_tokens": 4096, "hidden_size": 4096, "num_columns": 151936, "vocab_size": 151936, "start": 0}
    return launch_lists.CallKind(**{**given, "dtype": "bfloat16", "device": H200, **changed})


def backward(
    of: launch_lists.CallKind, wanted: tuple[bool, bool] = (True, True), **how: Any
) -> launch_lists.LaunchList:
    seeds = how.pop("seeds", ("logprobs", "entropy"))
    plain = {"cached": False, "owns_cache": False, "adds": False}
    return launch_lists.backward(of, seeds, wanted, "bfloat16", **{**plain, **how})


def names(program: launch_lists.LaunchList) -> list[str]:
    return [launch.kernel.name for launch in program.launches]


def test_a_forward_is_five_launches() -> None:
    assert names(launch_lists.forward(head(), keep_cache=False)) == ["prepare", "statistics", "join", "join", "finish"]


def test_a_part_and_its_merge() -> None:
    assert names(launch_lists.part(head(), keep_cache=False)) == ["prepare", "statistics", "join"]
    assert names(launch_lists.merge(head(), ranks=2)) == ["prepare", "join", "finish"]


def test_candidates_have_launches_of_their_own() -> None:
    of = head(num_candidates=8)
    logits, statistics = ["keep_candidates", "prepare", "candidate_logits"], ["statistics", "join", "join"]
    assert sorted(names(launch_lists.forward(of, keep_cache=False))) == sorted(
        [*logits, *statistics, "finish", "candidate_logprobs"]
    )
    assert sorted(names(launch_lists.part(of, keep_cache=False))) == sorted([*logits, "statistics", "join"])
    assert names(launch_lists.merge(of, ranks=2)) == [
        "prepare",
        "join",
        "finish",
        "join_candidates",
        "candidate_logprobs",
    ]
    assert names(backward(of)) == names(backward(head()))  # without their cotangent
    every = names(backward(of, seeds=("lse", "candidate_logprobs")))
    assert every[1:4] == ["candidate_terms", "coefficients", "candidate_values"]
    assert every.count("put_candidates") == every.count("dlogits") == every.count("write_dweight")


def test_a_backward_with_all_of_a_cache_is_five_launches() -> None:
    of = head(cache_bytes=1 << 40)
    found = names(backward(of, cached=True, owns_cache=True))
    assert found == ["prepare", "coefficients", "cached_dlogits", "update_dhidden", "write_dweight"]


@pytest.mark.parametrize(("wanted", "left_out"), [((True, False), "write_dweight"), ((False, True), "update_dhidden")])
def test_what_nobody_wants_is_not_launched(wanted: tuple[bool, bool], left_out: str) -> None:
    every, some = names(backward(head())), names(backward(head(), wanted))
    assert left_out in every
    assert left_out not in some


def test_padding_ends_in_a_tile_that_is_copied() -> None:
    assert "copy" in names(backward(head(vocab_size=151643)))
    assert "copy" not in names(backward(head()))


@pytest.mark.parametrize("of", [head(), head(vocab_size=151643, num_tokens=8192), head(num_tokens=128)], ids=str)
def test_what_lives_at_the_same_time_has_memory_of_its_own(of: launch_lists.CallKind) -> None:
    for program in (launch_lists.forward(of, keep_cache=False), backward(of)):
        life: dict[Any, list[int]] = {}
        for number, launch in enumerate(program.launches):
            for x in (*launch.operands, *launch.results):
                if x.storage.kind == "workspace":
                    life.setdefault(x.storage, []).append(number)
        for one, other in itertools.combinations(life, 2):
            if life[one][0] <= life[other][-1] and life[other][0] <= life[one][-1]:
                apart = one.place + one.num_bytes <= other.place or other.place + other.num_bytes <= one.place
                assert apart, (one, other)
        assert all(x.place % 256 == 0 and x.place + x.num_bytes <= program.workspace_bytes for x in life)
    assert program.workspace_bytes < 0.7 * 2**30  # dhidden's sums and a chunk of dlogits


def test_numbers_say_how_many_tokens_there_are() -> None:
    program = launch_lists.forward(head(num_tokens=512), keep_cache=False)
    one, other = (program.numbers(tokens, stride=512) for tokens in (300, 301))
    assert {300, 301} == {x for pair in zip(one, other, strict=True) if pair[0] != pair[1] for x in pair}


def test_arithmetic_between_kernels_fails() -> None:
    recorder = Recorder()
    x: Any = recorder.input((4,), jnp.float32)
    with pytest.raises(TypeError, match="unsupported operand"):
        x + 1
    with pytest.raises(TypeError, match="not a valid JAX"):
        jnp.exp(x)


def test_what_is_no_kernel_is_refused() -> None:
    def twice(x: Any) -> Any:
        return x * 2

    recorder = Recorder()
    with pytest.raises(launch_lists.UnservedError, match="0 kernels in twice"):
        recorder.launch(twice, recorder.input((4,), jnp.float32))


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"num_columns": 50257, "vocab_size": 50257}, "V must be a multiple of 8, got 50257"),
        ({"hidden_size": 64}, "H must be at least 128, got 64"),
        ({"dtype": "float32"}, "bfloat16 or float16"),
        ({"device": launch_lists.Device("gpu", "NVIDIA B200", "10.0", 148)}, "compute capability"),
        ({"device": launch_lists.Device("gpu", "NVIDIA A100", "8.0", 108)}, "compute capability"),
    ],
)
def test_refusals(changed: dict[str, Any], reason: str) -> None:
    assert reason in str(launch_lists.refusal(head(**changed)))


@pytest.mark.parametrize(
    "of",
    [
        head(num_tokens=128, hidden_size=2880, num_columns=201088, vocab_size=200019, has_temperature=True),
        head(num_candidates=64),
        pytest.param(
            head(stats=True, num_candidates=8, logit_softcap=30.0, entropy=False, dtype="float16"),
            marks=pytest.mark.slow,
        ),
    ],
    ids=str,
)
def test_every_kernel_lowers_for_cuda(of: launch_lists.CallKind) -> None:
    seeds = "logprobs", "entropy", *["candidate_logprobs"] * (of.num_candidates > 0)
    programs = launch_lists.forward(of, keep_cache=False), launch_lists.merge(of, ranks=4), backward(of, seeds=seeds)
    for launch in itertools.chain(*(program.launches for program in programs)):
        assert _compiler.module(launch.kernel, H200)


def test_the_number_of_rows_is_a_symbol() -> None:
    program = launch_lists.forward(head(), keep_cache=False)
    assert sum(ROWS in numbers for numbers in program.given) == 5  # of tokens, of fields, and of three kernels
