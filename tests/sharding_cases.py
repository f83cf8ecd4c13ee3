"""Calls and meshes for the tests of `sharded_linear_logprobs` and `sharded_linear_cross_entropy`."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType

from tests import cases

B, S, H, V = 4, 8, 16, 128
CALLS = [
    cases.case("plain", leading=(B, S), H=H, V=V),
    cases.case("padded", leading=(B, S), H=H, V=V, vocab_size=101, labels="foreign", K=1),
    cases.case("two shards of padding", leading=(B, S), H=H, V=V, vocab_size=50, where="nan", stats=True),
    cases.case(
        "everything", leading=(B, S), H=H, V=V, vocab_size=113, labels="foreign", where="nan", temperature="token",
        logit_softcap=4.0, logit_scale=1.3, stats=True, weight_layout="hv", spread=3.0, bias="float32", K=5,
    ),
    cases.case(
        "floor and everything", leading=(B, S), H=H, V=V, vocab_size=113, labels="foreign", where="nan",
        temperature="token", logit_softcap=4.0, logit_scale=1.3, stats=True, weight_layout="hv", spread=3.0, floor=5,
    ),
    cases.case("bfloat16", leading=(B, S), H=H, V=V, dtype="bfloat16", labels="foreign"),
]  # fmt: skip
LAYOUTS: dict[str, tuple[tuple[int, ...], tuple[str, ...], dict[str, Any]]] = {
    "1": ((1,), ("tensor",), {}),
    "tensor 2": ((2,), ("tensor",), {}),
    "tensor 8": ((8,), ("tensor",), {}),
    "data 2, tensor 2": ((2, 2), ("data", "tensor"), {"batch_axes": "data"}),
    "data 2, tensor 4": ((2, 4), ("data", "tensor"), {"batch_axes": "data"}),
    "data 4, tensor 2, sequence over tensor": (
        (4, 2), ("data", "tensor"), {"batch_axes": "data", "sequence_axis": "tensor"},
    ),
    "tensor 8, sequence over tensor": ((8,), ("tensor",), {"sequence_axis": "tensor"}),
    "data, context, tensor": (
        (2, 2, 2), ("data", "context", "tensor"), {"batch_axes": "data", "sequence_axis": "context"},
    ),
    "data, sequence over context and tensor": (
        (2, 2, 2), ("data", "context", "tensor"), {"batch_axes": "data", "sequence_axis": ("context", "tensor")},
    ),
    "vocabulary over two axes": (
        (2, 2, 2), ("data", "a", "b"), {"batch_axes": "data", "vocab_axis": ("a", "b")},
    ),
    "batch over two axes": (
        (2, 2, 2), ("data", "fsdp", "tensor"), {"batch_axes": ("data", "fsdp")},
    ),
    "data alone": ((4,), ("data",), {"batch_axes": ("data",), "vocab_axis": None, "sequence_axis": None}),
    "an axis nobody uses": ((2, 2, 2), ("pipe", "data", "tensor"), {"batch_axes": "data"}),
}  # fmt: skip


def mesh_of(layout: str, axis_type: AxisType) -> jax.sharding.Mesh:
    shape, names, _ = LAYOUTS[layout]
    devices = jax.devices("cpu")[: int(np.prod(shape))]
    return jax.make_mesh(shape, names, axis_types=(axis_type,) * len(shape), devices=devices)
