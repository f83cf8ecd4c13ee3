"""What `explain` says of `linear_kl` and `linear_logits`: an upper bound of the bytes of what is compiled."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from benchmarks.programs import stored_kl as stored
from lce_jax import explain, linear_kl, linear_logits

struct = jax.ShapeDtypeStruct

KL = [
    ((512, 256, 512, 32000), "bfloat16", "bfloat16", {"where": True}),
    ((512, 256, 512, 32000), "bfloat16", "float32", {"logit_softcap": 30.0, "teacher_logit_softcap": "same"}),
    ((8192, 256, 256, 8192), "bfloat16", "bfloat16", {"direction": "reverse"}),
    ((64, 512, 1024, 32000), "float16", "bfloat16", {"vocab_size": 31000}),
    ((4096, 256, 256, 8192), "float32", "float32", {}),  # a tile of logits is as large as dweight
    ((512, 1024, 512, 50257), "float32", "float32", {"where": True, "direction": "jsd"}),
    ((4096, 256, 256, 8192), "float32", "float32", {"direction": "reverse", "cache_bytes": 100 << 20}),
]
LOGITS = [
    ((4096, 512, 32000, 64), "bfloat16", {"vocab_size": 31000}),
    ((1024, 256, 8192, 512), "float16", {}),
    ((64, 1024, 32000, 3), "float32", {"weight_layout": "hv"}),
]


def held(function: Any, *operands: Any) -> int:
    return jax.jit(function).lower(*operands).compile().memory_analysis().temp_size_in_bytes


@pytest.mark.usefixtures("optimized")
@pytest.mark.parametrize(("shape", "dtype", "teachers_dtype", "given"), KL, ids=str)
def test_linear_kl(shape: tuple[int, ...], dtype: str, teachers_dtype: str, given: dict[str, Any]) -> None:
    (T, H, G, V), options = shape, dict(given)
    student, teacher = ((struct((T, n), own), struct((V, n), own)) for n, own in ((H, dtype), (G, teachers_dtype)))
    rows = {"where": struct((T,), bool)} if options.pop("where", False) else {}
    plan = explain(*student, struct((T,), "int32"), teacher=teacher, **rows, **options)

    def both(student: Any, teacher: Any, rows: Any, cotangent: Any) -> Any:
        return jax.vjp(lambda *x: linear_kl(*x, *teacher, **rows, **options), *student)[1](cotangent)

    def kl(student: Any, teacher: Any, rows: Any) -> Any:
        return linear_kl(*student, *teacher, **rows, **options)

    with jax.set_mesh(jax.sharding.Mesh(jax.devices()[:1], ("device",))):
        forward = held(kl, student, teacher, rows)
        backward = held(both, student, teacher, rows, struct((T,), "float32"))
    kept = plan.kept_bytes - (8 if options.get("direction") == "jsd" else 6) * 4 * T
    assert kept == 0 if "cache_bytes" not in options else 0.9 < kept / min(options["cache_bytes"], 8 * T * V) < 1.01
    assert forward <= plan.forward_bytes <= 1.25 * forward, (plan.forward_bytes, forward)
    assert backward - kept <= plan.backward_bytes <= 1.25 * (backward - kept), (plan.backward_bytes, backward - kept)
    assert f"for the teacher (hidden size {G:,}, {teachers_dtype})" in str(plan)


@pytest.mark.usefixtures("optimized")
@pytest.mark.parametrize(("shape", "dtype", "given"), LOGITS, ids=str)
def test_linear_logits(shape: tuple[int, ...], dtype: str, given: dict[str, Any]) -> None:
    T, H, V, K = shape
    weight = struct((H, V) if given.get("weight_layout") == "hv" else (V, H), dtype)
    operands, ids = (struct((T, H), dtype), weight), struct((T, K), "int32")
    plan = explain(*operands, struct((T,), "int32"), ids=ids, **given)

    def both(operands: Any, ids: Any, cotangent: Any) -> Any:
        return jax.vjp(lambda *x: linear_logits(*x, ids, **given), *operands)[1](cotangent)

    forward = held(lambda operands, ids: linear_logits(*operands, ids, **given), operands, ids)
    backward = held(both, operands, ids, struct((T, K), "float32"))
    assert forward <= plan.forward_bytes <= 1.25 * forward, (plan.forward_bytes, forward)
    assert backward <= plan.backward_bytes <= 1.25 * backward, (plan.backward_bytes, backward)
    assert f"{K} ids per token, {T * K:,} products" in str(plan)


@pytest.mark.usefixtures("hopper")
def test_linear_logits_on_an_h200() -> None:
    """Compiled there by JAX 0.11.2, the forward holds 2 MiB, and with the backward 130 MiB."""
    call = struct((4096, 4096), "bfloat16"), struct((151936, 4096), "bfloat16"), struct((4096,), "int32")
    plan = explain(*call, ids=struct((4096, 64), "int32"))
    assert plan.forward_bytes <= 3 << 20
    assert 0.9 * 130 <= plan.backward_bytes / 2**20 <= 1.25 * 130


def student_gradients(hidden: Any, weight: Any, teacher: Any, teachers_weight: Any, cotangent: Any) -> Any:
    """Of a divergence of stored logits."""
    return jax.vjp(lambda *x: stored(*x, teacher, teachers_weight, "forward"), hidden, weight)[1](cotangent)


@pytest.mark.usefixtures("optimized")
def test_stored_logits_of_two_heads() -> None:
    T, H, V = 512, 256, 16384
    operands = [struct((T, H), "float32"), struct((V, H), "float32")] * 2
    said = explain(*operands[:2], struct((T,), "int32"), teacher=tuple(operands[2:])).memory
    logits = 4 * T * V
    assert abs(said.stored.forward - held(lambda *x: stored(*x, "forward"), *operands)) <= 0.1 * logits
    assert abs(said.stored.backward - held(student_gradients, *operands, struct((T,), "float32"))) <= 0.1 * logits
    assert said.fused.backward < said.stored.backward / 3


def test_one_device_of_a_mesh() -> None:
    mesh = jax.sharding.AbstractMesh((4, 2), ("data", "tensor"))
    call = struct((4096, 512), "float32"), struct((65536, 512), "float32"), struct((4096,), "int32")
    axes: Any = dict(mesh=mesh, vocab_axis="tensor", batch_axes="data")
    alone = struct((1024, 512), "float32"), struct((32768, 512), "float32"), struct((1024,), "int32")
    for more, own in (
        ({"teacher": call[:2]}, {"teacher": alone[:2]}),
        ({"ids": struct((4096, 8), "int32")}, {"ids": struct((1024, 8), "int32")}),
    ):
        plan, want = explain(*call, **axes, **more), explain(*alone, **own)
        assert (plan.case.num_tokens, plan.case.vocab_size) == (1024, 32768)
        assert plan.forward_bytes == want.forward_bytes
        assert explain(*alone, axis_name="tensor", **own).forward_bytes == want.forward_bytes


CALL = jnp.ones((4, 8)), jnp.ones((32, 8)), jnp.zeros(4, int)


@pytest.mark.parametrize(("given", "error", "message"), [
    (dict(teacher=CALL[0]), TypeError, "teacher must be the pair of its hidden states and its weight, got ArrayImpl"),
    (dict(teacher=(CALL[0], jnp.ones((32, 9)))), ValueError, "the teacher's .* ends in H = 8"),
    (dict(teacher=CALL[:2], ids=CALL[2][:, None]), ValueError, "ids and teacher belong to different functions"),
    (dict(teacher=CALL[:2], gradient_threshold=0.1), TypeError, "linear_kl has no option gradient_threshold"),
    (dict(teacher=CALL[:2], z_loss=1e-4), ValueError, "teacher is that of linear_kl, which is no loss"),
    (dict(teacher=CALL[:2], logit_softcap=30.0), ValueError, "logit_softcap=30.0 is the student's alone: write teach"),
    (dict(teacher=CALL[:2], logit_scale=jnp.float32(1)), ValueError, "logit_scale=1.0 is the student's alone: write"),
    (dict(teacher=CALL[:2], teacher_bias=jnp.ones(31)), ValueError, r"the teacher's bias \(31,\) must have"),
    (dict(ids=CALL[2][:, None], beta=0.3), TypeError, "beta is that of linear_kl: give teacher too"),
    (dict(teacher_logit_scale=1.0), TypeError, "teacher_logit_scale is that of linear_kl: give teacher too"),
    (dict(ids=CALL[2][:, None], stats=True), TypeError, "linear_logits has no option stats"),
    (dict(ids=CALL[2]), ValueError, r"ids \(4,\) must"),
])  # fmt: skip
def test_mistakes(given: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        explain(*CALL, **given)
