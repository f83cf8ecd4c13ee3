"""`linear_kl` over meshes: inside ``shard_map``, from outside it, and under plain ``jit``."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from lce_jax import linear_kl, sharded_linear_kl
from tests import kl_cases, oracle
from tests.kl_cases import call, draw, evaluate, expected
from tests.pairs import combined, values_of

PLAIN = call("plain", leading=(4, 8), H=16, G=24, V=128)
PADDED = call(
    "padded", leading=(4, 8), H=16, G=24, V=128, vocab_size=50, where=True, temperature=True, bias=True,
    teacher_logit_softcap=4.0, weight_layout="hv", teacher_weight_layout="vh", direction="reverse",
)  # fmt: skip
MIXED = PADDED._replace(name="padded, jsd", options=(*PADDED.options[:-1], ("direction", "jsd"), ("beta", 0.3)))
VARIATION = PADDED._replace(name="padded, tv", options=(*PADDED.options[:-1], ("direction", "tv")))


def mesh_of(shape: tuple[int, int], kind: AxisType = AxisType.Auto) -> jax.sharding.Mesh:
    devices = jax.devices("cpu")[: shape[0] * shape[1]]
    return jax.make_mesh(shape, ("data", "tensor"), axis_types=(kind,) * 2, devices=devices)


def keeping(test: kl_cases.Call, cache_bytes: int) -> kl_cases.Call:
    return test._replace(name=f"{test.name}, kept", options=(*test.options, ("cache_bytes", cache_bytes)))


def assert_right(got: Any, want: kl_cases.Expected) -> None:
    assert oracle.value_error(got[0], want.kl) < 4e-6
    assert all(oracle.relative_norm(a, b) < 2e-6 for a, b in zip(got[1], want.gradients, strict=True))


@pytest.mark.fast("padded, jsd", "padded, tv")
@combined(
    layout=[
        (PADDED, (2, 2), {"batch_axes": "data", "sequence_axis": "tensor"}),
        (keeping(PLAIN, 1 << 30), (1, 4), {}),
        (keeping(MIXED, 1 << 30), (2, 4), {"batch_axes": "data", "sequence_axis": "tensor"}),
        (VARIATION, (2, 4), {"batch_axes": "data"}),
    ]
)
@values_of("kind", [AxisType.Auto, AxisType.Explicit], slow=[AxisType.Auto])  # test_every_function has it
def test_from_outside(layout: tuple[kl_cases.Call, tuple[int, int], dict[str, Any]], kind: AxisType) -> None:
    test, shape, axes = layout
    drawn = draw(test)
    with jax.set_mesh(mesh_of(shape, kind)):
        got = evaluate(drawn, sharded_linear_kl, **axes)
    assert_right(got, expected(drawn))


@pytest.mark.fast("forward")
@pytest.mark.parametrize(("shards", "direction"), [(2, "forward"), (4, "jsd"), (2, "tv")])
def test_every_shard_holds_the_same_bits(shards: int, direction: str) -> None:
    """Without ``check_vma``, where the cotangent of each shard's copy is its own."""
    test = PLAIN._replace(leading=(24,), options=(("direction", direction),))
    drawn, mesh = draw(test), mesh_of((1, shards))

    def mapped(*operands: Any, **options: Any) -> Any:
        def body(*operands: Any) -> Any:
            return linear_kl(*operands, axis_name="tensor", **options)[None]

        specs = (P(), P("tensor")) * 2
        run = jax.shard_map(body, mesh=mesh, in_specs=specs, out_specs=P("tensor"), check_vma=False)
        return run(*operands)

    kl = jax.jit(lambda *operands: mapped(*operands, **drawn.options))(*drawn.student, *drawn.teacher)
    assert all(np.array_equal(kl[0], kl[i]) for i in range(shards))
    assert_right(evaluate(drawn, lambda *operands, **options: mapped(*operands, **options)[0]), expected(drawn))


@pytest.mark.fast("1073741824")
@pytest.mark.parametrize("cache_bytes", [0, 1 << 30])
def test_inside_shard_map_with_types(cache_bytes: int) -> None:
    """Each data shard's result has a weight of its own; the teacher's states are typed as varying over the axis."""
    test = keeping(PADDED._replace(where=False, bias=False, temperature=False), cache_bytes)
    drawn, mesh = draw(test), mesh_of((2, 4))

    def mapped(hidden: Any, weight: Any, teacher_hidden: Any, teacher_weight: Any, **options: Any) -> Any:
        def body(*operands: Any) -> Any:
            hidden, weight, teacher_hidden, teacher_weight = operands
            teacher_hidden = lax.all_gather(teacher_hidden, "tensor", axis=1, tiled=True)
            kl = linear_kl(hidden, weight, teacher_hidden, teacher_weight, axis_name="tensor", **options)
            return kl * (1.0 + lax.axis_index("data"))

        specs = (P("data"), P(None, "tensor"), P("data", "tensor"), P("tensor"))
        run = jax.shard_map(body, mesh=mesh, in_specs=specs, out_specs=P("data"))
        return run(hidden, weight, teacher_hidden, teacher_weight)

    factor = np.repeat([1.0, 2.0], 2)[:, None]
    want = expected(drawn._replace(seed=drawn.seed * factor))
    assert_right(evaluate(drawn, mapped), want._replace(kl=want.kl * factor))


@pytest.mark.fast("place0")
@pytest.mark.parametrize("place", [(P("data"), P("tensor")), (P("data", "tensor"), P("tensor")), (P(), P("data"))])
def test_weights_with_different_padding_over_explicit_axes(place: tuple[P, P]) -> None:
    """They are gathered."""
    drawn = draw(PLAIN._replace(teachers_columns=136, where=True, options=(("vocab_size", 113),)))
    want, mesh = expected(drawn), mesh_of((2, 4), AxisType.Explicit)
    operands = [
        [jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in zip(arrays, place, strict=True)]
        for arrays in (drawn.student, drawn.teacher)
    ]
    with jax.set_mesh(mesh):
        got = evaluate(drawn._replace(student=tuple(operands[0]), teacher=tuple(operands[1])))
    assert_right(got, want)
    for gradient, operand in zip(got[1], operands[0], strict=True):
        assert jax.typeof(gradient).sharding.spec == jax.typeof(operand).sharding.spec


def test_weights_with_different_padding_over_a_split_vocabulary() -> None:
    drawn = draw(PLAIN._replace(teachers_columns=136, options=(("vocab_size", 113),)))
    with pytest.raises(ValueError, match="pad the smaller weight to 136 columns"):
        sharded_linear_kl(*drawn.student, *drawn.teacher, mesh=mesh_of((1, 4)), vocab_size=113)
    hidden, weight = drawn.student
    padded = drawn._replace(student=(hidden, jnp.pad(weight, ((0, 8), (0, 0)))))
    assert_right(evaluate(padded, sharded_linear_kl, mesh=mesh_of((1, 4))), expected(padded))


def test_temperatures_that_differ_between_the_shards_are_nan() -> None:
    drawn = draw(PLAIN._replace(leading=(8,)))

    def body(*operands: Any) -> Any:
        own = jnp.where((jnp.arange(8) == 3) & (lax.axis_index("tensor") == 1), 2.0, 1.0)
        return linear_kl(*operands, axis_name="tensor", teacher_temperature=own)

    run = jax.shard_map(body, mesh=mesh_of((1, 4)), in_specs=(P(), P("tensor")) * 2, out_specs=P())
    kl = jax.jit(run)(*drawn.student, *drawn.teacher)
    assert np.flatnonzero(np.isnan(np.asarray(kl))).tolist() == [3]


def test_a_whole_teacher_inside_shard_map_is_refused() -> None:
    drawn = draw(PLAIN._replace(leading=(8,), teachers_columns=32))
    specs = (P(), P("tensor"), P(), P())
    run = jax.shard_map(
        lambda *x: linear_kl(*x, axis_name="tensor"), mesh=mesh_of((1, 4)), in_specs=specs, out_specs=P()
    )
    with pytest.raises(ValueError, match=r"weight \(32, 24\) .*'tensor'"):
        run(*drawn.student, *drawn.teacher)
