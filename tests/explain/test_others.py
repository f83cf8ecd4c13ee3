"""What `explain` says of `linear_kl` and `linear_logits`."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from lce_jax import explain

struct = jax.ShapeDtypeStruct


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
        assert (plan.call.num_tokens, plan.call.columns) == (1024, 32768)
        assert plan.forward_bytes == want.forward_bytes
        assert explain(*alone, axis_name="tensor", **own).forward_bytes == want.forward_bytes


CALL = jnp.ones((4, 8)), jnp.ones((32, 8)), jnp.zeros(4, int)


@pytest.mark.parametrize(("given", "error", "message"), [
    (dict(teacher=CALL[0]), TypeError, "teacher .* got ArrayImpl"),
    (dict(teacher=(CALL[0], jnp.ones((32, 9)))), ValueError, "the teacher's .* ends in H = 8"),
    (dict(teacher=CALL[:2], ids=CALL[2][:, None]), ValueError, "ids and teacher belong to different functions"),
    (dict(teacher=CALL[:2], gradient_threshold=0.1), TypeError, "linear_kl has no option gradient_threshold"),
    (dict(teacher=CALL[:2], z_loss=1e-4), ValueError, "teacher is an argument of linear_kl, which is not a loss"),
    (dict(teacher=CALL[:2], teacher_bias=jnp.ones(31)), ValueError, r"the teacher's bias \(31,\) must have"),
    (dict(ids=CALL[2][:, None], beta=0.3), TypeError, "beta .*give teacher"),
    (dict(teacher_logit_scale=1.0), TypeError, "teacher_logit_scale .*give teacher"),
    (dict(ids=CALL[2][:, None], stats=True), TypeError, "linear_logits has no option stats"),
    (dict(ids=CALL[2]), ValueError, r"ids \(4,\) must"),
])  # fmt: skip
def test_mistakes(given: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        explain(*CALL, **given)
