"""A step compiled for an H200 on a machine without a GPU, carried to an H200, loaded, and compared with its own.

    JAX_PLATFORMS=cpu python -m tests.compiled.carried compile step.bin   (in the environment of `make test-compile`)
    python -m tests.compiled.carried run step.bin                         (on the H200, with the same JAX)

The second command prints, for each result and gradient, whether it has the bits of the step that is compiled there, and
exits with 1 if one has not.
"""

from __future__ import annotations

import pickle
import sys
from typing import Any

import jax
import jax.experimental.mosaic.gpu  # a loaded program finds what launches kernels by it
import jax.numpy as jnp
import numpy as np
from jax.experimental import serialize_executable

from lce_jax import linear_logprobs
from lce_jax.explain._compile_targets import TARGETS

T, H, V = 1024, 1024, 32000


def step(hidden: Any, weight: Any, labels: Any) -> Any:
    """A loss with its results and gradients."""

    def loss(hidden: Any, weight: Any) -> Any:
        out = linear_logprobs(hidden, weight, labels)
        return -out.logprobs.mean() - 0.01 * out.entropy.mean(), out

    return jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)(hidden, weight)


def compiled_for(device: Any) -> Any:
    """The step for a device, which need not be there."""
    sharding = jax.sharding.SingleDeviceSharding(device)
    shapes = ((T, H), jnp.bfloat16), ((V, H), jnp.bfloat16), ((T,), jnp.int32)
    return jax.jit(step).lower(*(jax.ShapeDtypeStruct(*x, sharding=sharding) for x in shapes)).compile()


def compile_to(path: str) -> None:
    """Writes the step for an H200."""
    program = compiled_for(TARGETS["h200"].mesh(1, 1).devices.item())
    assert "mosaic_gpu" in program.as_text()
    with open(path, "wb") as file:
        pickle.dump((jax.__version__, *serialize_executable.serialize(program)), file)


def run(path: str) -> int:
    """Compares. Returns how many results differ."""
    with open(path, "rb") as file:
        version, *stored = pickle.load(file)
    device = jax.devices()[0]
    print(f"compiled by JAX {version}, loaded by {jax.__version__} on {device.device_kind}")
    keys = jax.random.split(jax.random.key(0), 3)
    hidden, weight = (
        scale * jax.random.normal(key, (rows, H), jnp.bfloat16)
        for key, rows, scale in zip(keys, (T, V), (1, 0.05), strict=False)
    )
    operands = hidden, weight, jax.random.randint(keys[2], (T,), 0, V)
    loaded = serialize_executable.deserialize_and_load(*stored, execution_devices=[device])
    here, different = jax.tree.leaves(compiled_for(device)(*operands)), 0
    for (path_of, got), want in zip(jax.tree.leaves_with_path(loaded(*operands)), here, strict=True):
        same = np.array_equal(np.asarray(got, np.float32), np.asarray(want, np.float32))
        print(jax.tree_util.keystr(path_of), "same bits" if same else "differs")
        different += not same
    return different


if __name__ == "__main__":
    mode, file = sys.argv[1:]
    sys.exit(compile_to(file) if mode == "compile" else run(file) > 0)
