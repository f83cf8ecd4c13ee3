"""``python benchmarks/tpu.py``: memory of a head on one TPU, with stored logits and without, into ``tpu.json``.

Forward and backward are compiled and not run, in the environment of `make test-tpu`. The compiler reports the memory.
"""

from __future__ import annotations

import datetime
import json
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import SingleDeviceSharding

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.candidates import materialised  # noqa: E402
from lce_jax import linear_logprobs, linear_loss, linear_topk  # noqa: E402
from lce_jax.explain._compile_targets import TPUS  # noqa: E402
from lce_jax.explain._models import model_head  # noqa: E402
from lce_jax.types.scalars import format_bytes  # noqa: E402

TOKENS, HEAD, ENTROPY_BONUS = 8192, model_head("qwen3-8b"), 0.01
NUM_LARGEST = 64  # the k of linear_topk


def sum_tokens(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a loss: the sum over tokens of a function that returns log-probabilities and entropies."""

    def loss(*operands: Any) -> Any:
        logprobs, entropy = function(*operands)
        return jnp.sum(-logprobs - ENTROPY_BONUS * entropy)

    return loss


def ours(*operands: Any) -> tuple[Any, Any]:
    """Calls `linear_logprobs`."""
    out = linear_logprobs(*operands)
    return out.logprobs, out.entropy


def sum_linear_loss(*operands: Any) -> Any:
    """Calls `linear_loss`."""
    return linear_loss(lambda logprob, entropy, _: -logprob - ENTROPY_BONUS * entropy, *operands)[0]


def add_gradients(loss: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function of the loss and its gradients in hidden states and weight."""
    return jax.value_and_grad(loss, argnums=(0, 1))


def find_largest(hidden: Any, weight: Any, labels: Any) -> Any:
    """Calls `linear_topk`, which has no gradient."""
    del labels
    return linear_topk(hidden, weight, NUM_LARGEST)


WAYS = {
    "logits stored, autodiff": add_gradients(sum_tokens(materialised)),
    "`linear_logprobs`": add_gradients(sum_tokens(ours)),
    "`linear_loss`": add_gradients(sum_linear_loss),
    "`linear_topk`, forward": find_largest,
}


def measure_memory(way: Callable[..., Any], device: jax.Device) -> str:
    """Returns the memory of the program without operands and gradients."""

    def struct(shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=SingleDeviceSharding(device))

    hidden = struct((TOKENS, HEAD.hidden_size), jnp.bfloat16)
    weight = struct((HEAD.vocab_size, HEAD.hidden_size), jnp.bfloat16)
    try:
        compiled = jax.jit(way).lower(hidden, weight, struct((TOKENS,), jnp.int32)).compile()
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return "out of memory"
    memory: Any = compiled.memory_analysis()
    return format_bytes(memory.temp_size_in_bytes)


def main() -> None:
    """Compiles all programs and writes the file."""
    jax.config.update("jax_enable_compilation_cache", False)
    rows = []
    for name, target in TPUS.items():
        device = target.mesh(1, 1).devices.item()
        rows.append([f"{name} ({target.kind})", *(measure_memory(way, device) for way in WAYS.values())])
        print(*rows[-1], sep="  ", flush=True)
    run = {
        "about": "Temporaries of forward and backward on one device, bfloat16. Compiled; nothing has run on a TPU.",
        "command": "python benchmarks/tpu.py",
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "device": {
            "device_kind": "TPUs, only described",
            "jax": jax.__version__,
            "libtpu": metadata.version("libtpu"),
        },
        "shape": {"tokens": TOKENS, "hidden_size": HEAD.hidden_size, "vocab_size": HEAD.vocab_size},
        "columns": ["", *WAYS],
        "left": 1,
        "rows": rows,
    }
    (ROOT / "benchmarks" / "tpu.json").write_text(json.dumps(run, indent=1) + "\n")


if __name__ == "__main__":
    main()
