"""One process of `tests.mesh.test_processes`. It calls over a mesh of all processes' devices, and writes the results.

``python -m tests.process_worker FILE PROCESS PROCESSES PORT``; on GPUs, each process has its own card.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from lce_jax import linear_loss, sharded_linear_logprobs


def calls(mesh: jax.sharding.Mesh, **options: Any) -> dict[str, tuple[Callable[..., Any], P, P]]:
    """Returns by name: a function of hidden, weight and labels, and how hidden and weight are split."""

    def sharded(axes: dict[str, Any]) -> Callable[..., Any]:
        def total(hidden: jax.Array, weight: jax.Array, labels: jax.Array) -> Any:
            out = sharded_linear_logprobs(hidden, weight, labels, mesh=mesh, **axes, **options)
            return jnp.sum(0.3 * out.logprobs + 0.1 * out.entropy - 0.2 * out.lse), out[:3]

        return total

    def gradients_in_forward(hidden: jax.Array, weight: jax.Array, labels: jax.Array) -> Any:
        total, out = linear_loss(lambda logp, entropy, _: -logp - 0.1 * entropy, hidden, weight, labels, **options)
        return total, out[:3]

    axis = mesh.axis_names[0]
    return {
        "vocabulary": (sharded({"vocab_axis": axis}), P(), P(axis)),
        "sequence": (sharded({"vocab_axis": axis, "sequence_axis": axis}), P(axis), P(axis)),
        "data": (sharded({"vocab_axis": None, "batch_axes": axis}), P(axis), P()),
        "linear_loss by XLA": (gradients_in_forward, P(), P(axis)),
    }


def run(mesh: jax.sharding.Mesh, T: int, H: int, V: int, dtype: str, **options: Any) -> dict[str, np.ndarray]:
    """Returns the results of every call, gathered from all processes."""
    rng, results_by_name = np.random.default_rng(0), {}
    operands = (
        rng.standard_normal((T, H), np.float32).astype(dtype),
        (rng.standard_normal((V, H), np.float32) * H**-0.5).astype(dtype),
        rng.integers(-1, V, T, np.int32),
    )
    for name, (total, hidden_spec, weight_spec) in calls(mesh, **options).items():
        placed = [
            jax.make_array_from_callback(x.shape, NamedSharding(mesh, spec), lambda part, x=x: x[part])
            for x, spec in zip(operands, (hidden_spec, weight_spec, P()), strict=True)
        ]
        with jax.set_mesh(mesh):
            results = jax.jit(jax.value_and_grad(total, argnums=(0, 1), has_aux=True))(*placed)
        for i, x in enumerate(jax.tree.leaves(results)):
            gathered = multihost_utils.process_allgather(x, tiled=True)
            results_by_name[f"{name} {i}"] = np.asarray(gathered).astype(np.float32)  # NumPy cannot store bfloat16
    return results_by_name


def main(path: str, process: int, processes: int, port: int) -> None:
    if processes > 1:
        jax.distributed.initialize(f"localhost:{port}", processes, process)
    assert jax.process_count() == processes
    mesh = jax.make_mesh((jax.device_count(),), ("all",), axis_types=(AxisType.Auto,))
    if jax.default_backend() == "gpu":
        results = run(mesh, 1024, 512, 8192, "bfloat16", implementation="mosaic_gpu")
    else:
        results = run(mesh, 64, 32, 512, "float32")
    if process == 0:
        np.savez(path, **results)


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
