"""``explain(..., compile=True)`` and ``lce-jax explain --compile``: what XLA holds of a call's programs."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import lce_jax
from lce_jax import explain, sharded_linear_logprobs
from lce_jax.explain import __main__ as command
from lce_jax.run import kernels

struct = jax.ShapeDtypeStruct
T, H, V = 512, 64, 16384
CALL = struct((T, H), "float32"), struct((V, H), "float32"), struct((T,), "int32")


def held(function: Any, *operands: Any) -> int:
    return jax.jit(function).lower(*operands).compile().memory_analysis().temp_size_in_bytes


@pytest.mark.slow
def test_it_is_what_xla_holds() -> None:
    where = struct((T,), "bool")

    def total(hidden: Any, weight: Any, labels: Any, where: Any) -> Any:
        return sum(map(jnp.sum, lce_jax.linear_logprobs(hidden, weight, labels, where=where)[:3]))

    plan = explain(*CALL, where=where, compile=True)
    assert plan.compiled is not None
    assert explain(*CALL, where=where).compiled is None
    program = lambda *x: lce_jax.linear_logprobs(*x[:3], where=x[3])  # noqa: E731
    assert plan.compiled.forward == held(program, *CALL, where)
    assert plan.compiled.backward == held(jax.value_and_grad(total, (0, 1)), *CALL, where)
    forward, both = map(lce_jax.types.scalars.format_bytes, plan.compiled)
    assert f"compiled   {forward} temporary in a forward's program, {both} in that of both passes" in str(plan)


@pytest.mark.fast("gradients_in_forward", "label_smoothing")
@pytest.mark.parametrize("options", [
    # `test_the_command` has these as well.
    *(pytest.param(x, marks=pytest.mark.slow) for x in ({"k": 4}, {"ids": struct((T, 3), "int32")})),
    {"teacher": CALL[:2], "direction": "reverse"},
    {"gradients_in_forward": True, "chunk_bytes": 128 * V * 4},
    {"label_smoothing": 0.1, "z_loss": struct((), "float32")},
    {"temperature": struct((T,), "float32"), "bias": struct((V,), "float32")},
], ids=lambda options: next(iter(options)))  # fmt: skip
def test_every_function(options: dict[str, Any]) -> None:
    """Its program holds less than three times what it asks for, and never the logits."""
    plan = explain(*CALL, **options, compile=True)
    assert plan.compiled is not None
    forward, both = plan.compiled
    assert 0 < forward < T * V * 4 or "k" in options
    assert (forward == both) == ("k" in options)
    assert both < 3 * plan.most_bytes + 64 * T or "ids" in options
    assert plan == plan.__class__(**{**vars(explain(*CALL, **options)), "compiled": plan.compiled})


def test_one_device_of_a_mesh() -> None:
    mesh = jax.make_mesh((2, 4), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)
    specs = P("data"), P("tensor"), P("data")
    lie = [struct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec)) for x, spec in zip(CALL, specs, strict=True)]
    axes: Any = {"mesh": mesh, "vocab_axis": "tensor", "batch_axes": "data"}
    found = explain(*lie, **axes, compile=True).compiled
    assert found is not None
    assert found.forward == held(lambda *x: sharded_linear_logprobs(*x, **axes), *lie)
    assert found == explain(*CALL, **axes, compile=True).compiled  # the axes say where the operands lie
    assert found.forward < T * V * 4 // 8


def test_devices_that_nothing_names() -> None:
    abstract = jax.sharding.AbstractMesh((2,), ("tensor",))
    for options in ({"mesh": abstract, "vocab_axis": "tensor"}, {}):
        with (
            kernels.trace_for_device(kernels.Device("gpu", "NVIDIA A100", "8.0", 108)),
            pytest.raises(ValueError, match="neither operands nor mesh name devices of NVIDIA A100"),
        ):
            explain(*CALL, **options, compile=True)
    with pytest.raises(ValueError, match="Give the global arrays, mesh= and vocab_axis='tensor' in place of axis_name"):
        explain(*CALL, axis_name="tensor", compile=True)
    with pytest.raises(TypeError, match="compile"):
        explain(*CALL, compile="no")


@pytest.mark.slow
def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    head = ["--hidden", "64", "--vocab", "16384", "--tokens", "512", "--device", "cpu", "--compile"]
    assert command.main(head) == 0
    lines = capsys.readouterr().out.splitlines()
    sizes = explain(*(struct(x.shape, "bfloat16") for x in CALL[:2]), CALL[2], compile=True).compiled
    assert sizes is not None
    (line,) = [line for line in lines if line.startswith("linear_logprobs  ")]
    assert " ".join(map(lce_jax.types.scalars.format_bytes, sizes)) in " ".join(line.split())
    with pytest.raises(SystemExit):
        command.main([*head, "--tensor-parallel", "16"])
    assert "--compile: 16 devices of cpu are asked for, but this machine has 8" in capsys.readouterr().err
