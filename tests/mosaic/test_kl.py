"""`linear_kl` with kernels: run on the CPU by the interpreter, lowered for CUDA, planned, refused."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from lce_jax import UnsupportedError, explain, linear_kl
from lce_jax.call import _dispatch
from lce_jax.mathematics._kl import Pair
from lce_jax.mosaic import _generations, mma, sm90
from lce_jax.mosaic._call import Generation
from lce_jax.mosaic._pallas import interpreting, lowering_for, plgpu
from lce_jax.mosaic.common._heads import HeldTile
from lce_jax.run import _kl
from lce_jax.run._kl import KLArguments, bind
from tests import oracle
from tests.devices import B200, H200
from tests.kl_cases import Call, Drawn, call, draw, expected
from tests.mosaic_interpreter import afresh, races_found

BFLOAT16, FLOAT16 = ("bfloat16",) * 4, ("float16",) * 4
# Several launches of the forward, and several chunks of the backward: each has one tile.
SMALL = dataclasses.replace(
    sm90.HOPPER.budget, statistics_bytes=1, temporary_bytes=0, chunk_columns=sm90.HOPPER.tiling.tile
)
HOPPER_IN_PIECES = dataclasses.replace(sm90.HOPPER, budget=SMALL)
PADDED = call(
    "padding, rows left out, a wider teacher", leading=(20,), H=64, G=128, V=264, teachers_columns=272, vocab_size=260,
    where=True, temperature=True, dtypes=BFLOAT16,
)  # fmt: skip
CAPPED = call(
    "reverse, caps, clusters", leading=(136,), H=64, G=64, V=520, logit_softcap=3.0, teacher_logit_softcap=None,
    teacher_temperature=0.7, logit_scale=1.3, teacher_logit_scale="same", dtypes=BFLOAT16, direction="reverse",
)  # fmt: skip
SHARP = call("float16, sharp", leading=(136,), H=192, G=64, V=264, dtypes=FLOAT16, spread=4.0)
COLD = call("cold, a cap", leading=(20,), H=64, G=64, V=264, dtypes=BFLOAT16, spread=3.0, logit_softcap=3.0)
OF_COLD = (("teacher_logit_softcap", "same"), ("temperature", 1e-4), ("teacher_temperature", 1.0))
COLD = COLD._replace(options=(*COLD.options, *OF_COLD))
MIXTURE = call(
    "a mixture, padding, rows left out", leading=(20,), H=64, G=128, V=264, teachers_columns=272, vocab_size=260,
    where=True, temperature=True, dtypes=BFLOAT16, logit_softcap=3.0, teacher_logit_softcap=None, direction="jsd",
    beta=0.3,
)  # fmt: skip
MOSTLY_TEACHER = call(
    "a mixture, mostly the teacher's", leading=(20,), H=64, G=128, V=264, teachers_columns=272, vocab_size=260,
    where=True, temperature=True, dtypes=BFLOAT16, direction="jsd", beta=0.9,
)  # fmt: skip
CAPPED_MIXTURE = call(
    "a mixture, caps, clusters", leading=(136,), H=64, G=64, V=520, logit_softcap=3.0, teacher_logit_softcap=None,
    teacher_temperature=0.7, logit_scale=1.3, teacher_logit_scale="same", dtypes=BFLOAT16, direction="jsd", beta=0.8,
)  # fmt: skip
REVERSE = call(
    "reverse, a cap, padding, rows left out, a wider teacher", leading=(20,), H=64, G=128, V=512, teachers_columns=520,
    vocab_size=500, where=True, temperature=True, dtypes=BFLOAT16, direction="reverse", logit_softcap=3.0,
    teacher_logit_softcap=None,
)  # fmt: skip
VARIATION = PADDED._replace(name="a total variation", options=(*PADDED.options, ("direction", "tv")))
CAPPED_VARIATION = CAPPED_MIXTURE._replace(
    name="a total variation, caps, clusters", options=(*CAPPED_MIXTURE.options[:-2], ("direction", "tv"))
)
TILE_BYTES = 256 * (6 * 256 + 12)  # of a tile of up to 256 tokens that is kept


def keeping(test: Call, tiles: int) -> Call:
    """With a cache of so many tiles."""
    options = (*test.options, ("cache_bytes", tiles * TILE_BYTES))
    return test._replace(name=f"{test.name}, {tiles} tiles kept", options=options)


KEPT = [
    pytest.param(keeping(PADDED, 2), sm90.HOPPER, id="all kept", marks=pytest.mark.slow),
    pytest.param(keeping(MIXTURE, 1), sm90.HOPPER, id="a mixture, some kept"),
    pytest.param(keeping(VARIATION, 1), sm90.HOPPER, id="a total variation, some kept"),
    pytest.param(keeping(CAPPED, 2), HOPPER_IN_PIECES, id="reverse, caps, some kept"),
    pytest.param(keeping(COLD, 2), sm90.HOPPER, id="cold, a cap, all kept", marks=pytest.mark.slow),
    pytest.param(keeping(SHARP, 2), sm90.HOPPER, id="float16, all kept", marks=pytest.mark.slow),
    pytest.param(
        keeping(CAPPED_MIXTURE, 3), HOPPER_IN_PIECES, id="a mixture, caps, all kept",
        marks=pytest.mark.slow,
    ),
]  # fmt: skip
CALLS = [
    *KEPT,
    pytest.param(PADDED, sm90.HOPPER, id=PADDED.name),
    pytest.param(CAPPED, HOPPER_IN_PIECES, id=CAPPED.name, marks=pytest.mark.slow),
    pytest.param(SHARP, sm90.HOPPER, id=SHARP.name, marks=pytest.mark.slow),
    pytest.param(MOSTLY_TEACHER, sm90.HOPPER, id=MOSTLY_TEACHER.name, marks=pytest.mark.slow),
    pytest.param(CAPPED_MIXTURE, HOPPER_IN_PIECES, id=CAPPED_MIXTURE.name, marks=pytest.mark.slow),
    pytest.param(CAPPED_VARIATION, HOPPER_IN_PIECES, id=CAPPED_VARIATION.name, marks=pytest.mark.slow),
]


def by_mma(generation: Generation) -> list[Any]:
    """Each direction, with and without pieces and a cache; V in whole atoms."""
    in_pieces, atom = dataclasses.replace(generation, budget=SMALL), generation.tiling.atom
    of = [
        (keeping(PADDED, 1), generation), (keeping(CAPPED, 2), in_pieces), (MOSTLY_TEACHER, generation),
        (SHARP, generation), (keeping(CAPPED_MIXTURE, 3), in_pieces),
        (keeping(VARIATION, 1), generation), (keeping(REVERSE, 1), generation),
    ]  # fmt: skip
    return [pytest.param(in_atoms(test, atom), own, id=f"{test}-{own.compute_capabilities[0]}") for test, own in of]


def in_atoms(test: Call, atom: int) -> Call:
    columns = -(-test.V // atom) * atom
    return test._replace(V=columns, teachers_columns=test.teachers_columns and columns + atom)


def evaluate(drawn: Drawn) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    """The divergence and the gradients of one device's program. The runner around it cannot be interpreted."""
    options = dict(drawn.options)
    direction, where = options.pop("direction", "forward"), options.pop("where", None)
    bound, primals, rows, _ = bind(KLArguments.of(Pair(drawn.student, drawn.teacher), where, direction, options))
    assert bound.implementation == "mosaic_gpu"
    keeps = bound.cache_budget > 0
    kl, kept = jax.jit(lambda *given: _kl.device_forward(bound, *given, keeps))(primals, rows)
    assert (kept[1] is not None) == keeps
    gradients = jax.jit(lambda *given: _kl.device_backward(bound, *given))(primals, rows, kept, drawn.seed)
    return kl, gradients[:2]


# tests/torch/test_kernels_kl.py has "forward", "tv", and "jsd" with a weight above one half.
@pytest.mark.fast("mixture, some kept", "reverse, a cap, padding, rows left out, a wider teacher, 1 tiles kept-8.9")
@pytest.mark.parametrize(("test", "generation"), [*CALLS, *by_mma(mma.SM120), *by_mma(mma.SM89)])
def test_matches_float64(
    test: Call, generation: Generation, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    with interpreted(generation):
        check(test, monkeypatch)
    assert "RACE DETECTED" not in capfd.readouterr().out


@contextlib.contextmanager
def interpreted(generation: Generation) -> Iterator[None]:
    """Within it, the generation's kernels run in the interpreter, on the device of the tests."""
    own, (capability, *_) = (
        dataclasses.replace(generation, compute_capabilities=("9.0",), ran_on=None),
        generation.compute_capabilities,
    )
    with _generations.using(own), lowering_for(capability), interpreting(plgpu.InterpretGPUParams(detect_races=True)):
        yield


def check(test: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the interpreter makes of a call, against float64, and of the same one without a cache."""
    afresh()
    monkeypatch.setattr(jax.lax, "empty", lambda shape, dtype: jnp.full(shape, jnp.nan, dtype))
    monkeypatch.setattr(_dispatch, "current_device", lambda *_, **__: H200._replace(core_count=2))
    drawn = draw(test)
    kl, gradients = evaluate(drawn)
    found = [gradients]
    if "cache_bytes" in drawn.options:
        plain, recomputed = evaluate(drawn._replace(options=drawn.options | {"cache_bytes": 0}))
        np.testing.assert_array_equal(kl, plain)
        found.append(recomputed)
    assert not races_found()  # in the last kernel
    want = expected(drawn)
    assert oracle.value_error(kl, want.kl) < 4e-6
    # One rounding of dlogits, and one of the result. With a cache one of what is kept.
    bound = {"bfloat16": 4e-3, "float16": 5e-4}[test.dtypes[0]] * (1.25 if "cache_bytes" in drawn.options else 1.0)
    for got, true, operand in itertools.chain(*(zip(x, want.gradients, drawn.student, strict=True) for x in found)):
        assert (got.shape, got.dtype) == (operand.shape, operand.dtype)
        assert oracle.relative_norm(got, true) < bound
    if test.where:
        left_out = ~np.asarray(drawn.options["where"])
        assert (np.asarray(kl)[left_out] == 0).all()
        assert (np.asarray(gradients[0], np.float64)[left_out] == 0).all()


MACHINE = mma.SM120.machine


def hold_in_one_place(held: Any, x: Any) -> Any:
    """Whatever the block."""
    return HeldTile.of(x, held.at[0, lax.axis_index("wg")], MACHINE.hold(held, x).load)


FAULTS = {
    "a tile in another's place": (
        MACHINE._replace(hold=hold_in_one_place), jax.errors.JaxRuntimeError, "RACE DETECTED",
    ),
    "one head twice": (
        MACHINE._replace(walk_heads=lambda products, *rest: MACHINE.walk_heads(products[:1] * 2, *rest)),
        AssertionError, None,
    ),
}  # fmt: skip


@pytest.mark.parametrize(("machine", "error", "found"), FAULTS.values(), ids=FAULTS)
def test_faults_are_found(machine: Any, error: Any, found: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    generation = dataclasses.replace(mma.SM120, machine=machine)
    with interpreted(generation), pytest.raises(error, match=found):
        check(SHARP, monkeypatch)
    afresh()


def structs(T: int, H: int, G: int, V: int, dtype: str = "bfloat16", teachers: str | None = None) -> list[Any]:
    shapes = ((T, H), dtype), ((V, H), dtype), ((T, G), teachers or dtype), ((V, G), teachers or dtype)
    return [jax.ShapeDtypeStruct(*given) for given in shapes]


def lowered(operands: list[Any], **options: Any) -> str:
    def both(hidden: Any, weight: Any, *teacher: Any) -> Any:
        return jnp.sum(linear_kl(hidden, weight, *teacher, **options))

    step = jax.jit(jax.grad(both, argnums=(0, 1)))
    return step.trace(*operands).lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.slow
@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("direction", ["reverse", *(pytest.param(x, marks=pytest.mark.slow) for x in ("jsd", "tv"))])
def test_lowers(direction: str) -> None:
    """Real heads of different hidden sizes: layouts, alignment, shared memory."""
    cap = {"logit_softcap": 30.0, "teacher_logit_softcap": "same"}
    text = lowered(structs(1000, 2880, 4096, 201088), direction=direction, **cap)
    assert "lce_kl_statistics" in text
    assert ("lce_kl_mixture_sums" in text) == (direction in ("jsd", "tv"))
    assert "lce_kl_dlogits" in text


@pytest.mark.usefixtures("hopper")
def test_is_planned() -> None:
    hidden, weight, *teacher = structs(4096, 4096, 2048, 151936)
    labels = jax.ShapeDtypeStruct((4096,), "int32")
    plan = explain(hidden, weight, labels, teacher=tuple(teacher), cache_bytes=0)
    assert plan.implementation == "mosaic_gpu"
    assert plan.kept_bytes == 6 * 4 * 4096
    assert max(plan.forward_bytes, plan.backward_bytes) < 0.4 * 2**30
    assert "teacher (hidden size 2,048, bfloat16)" in str(plan)


@pytest.mark.slow
@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize(
    "direction", ["reverse", *(pytest.param(x, marks=pytest.mark.slow) for x in ("forward", "jsd", "tv"))]
)
def test_kernels_are_the_default(direction: str, caplog: pytest.LogCaptureFixture) -> None:
    operands = structs(64, 64, 64, 512)

    heads, labels = {"teacher": tuple(operands[2:]), "direction": direction}, jax.ShapeDtypeStruct((64,), "int32")
    for name, chosen in ((None, "mosaic_gpu"), ("mosaic_gpu", "mosaic_gpu"), ("xla", "xla")):
        assert explain(*operands[:2], labels, implementation=name, **heads).implementation == chosen
    assert not caplog.text
    assert "lce_kl_statistics" in lowered(operands, direction=direction)
    assert "lce_kl" not in lowered(operands, direction=direction, implementation="xla")


def test_an_implementation_that_cannot_serve() -> None:
    ones = jnp.ones((2, 64), jnp.bfloat16)
    with pytest.raises(UnsupportedError, match="cpu"):
        linear_kl(ones, ones, ones, ones, implementation="mosaic_gpu")
    with pytest.raises(ValueError, match="unknown implementation 'cuda'"):
        linear_kl(ones, ones, ones, ones, implementation="cuda")


REFUSED = {
    "dtypes": (structs(64, 64, 64, 512, "bfloat16", "float16"), H200, "both weights must have one dtype"),
    "columns": (structs(64, 64, 64, 513), H200, "V must be a multiple of 8, got 513"),
    "the teacher's hidden size": (structs(64, 64, 96, 512), H200, "the teacher: H must be a multiple of 64"),
    "float32": (structs(64, 64, 64, 512, "float32"), H200, "needs a bfloat16 or float16 weight"),
    "Blackwell": (structs(64, 64, 64, 512), B200, "needs compute capability 8.0"),
}


@pytest.mark.parametrize(("operands", "device", "reason"), REFUSED.values(), ids=REFUSED)
def test_what_kernels_refuse_runs_xla(
    operands: list[Any], device: Any, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_dispatch, "current_device", lambda *_, **__: device)
    assert all("lce_kl" not in lowered(operands, direction=direction) for direction in ("forward", "jsd"))
    hidden, weight, *teacher = operands
    plan = explain(hidden, weight, jax.ShapeDtypeStruct(hidden.shape[:1], "int32"), teacher=tuple(teacher))
    assert plan.implementation == "xla"
    assert reason in plan.refused["mosaic_gpu"]
