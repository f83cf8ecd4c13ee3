"""``python benchmarks/accuracy.py``: errors against float64 by dtype and implementation, as ``accuracy.json``.

Logits have a standard deviation of 3, so that the softmax carries a third of the gradients. The operands are rounded to
their dtype first; the oracle takes the rounded ones.
"""

from __future__ import annotations

import datetime
import json
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.candidates import materialised, materialised_by_hand  # noqa: E402
from lce_jax import linear_logprobs  # noqa: E402
from tests import oracle  # noqa: E402

T, H, V = 256, 256, 32768
DTYPES = ("float32", "bfloat16", "float16")


def ours(hidden: jax.Array, weight: jax.Array, labels: jax.Array) -> tuple[Any, Any]:
    """This package's implementation for every device."""
    out = linear_logprobs(hidden, weight, labels, implementation="xla")
    return out.logprobs, out.entropy


WAYS = {
    "lce_jax (xla)": ours,
    "logits stored, autodiff": materialised,
    "logits stored, gradient by hand": materialised_by_hand,
}


def errors(way: Any, dtype: str) -> list[float]:
    """Largest absolute error of the results in nats, and the gradients' as a fraction of their norm."""
    keys = jax.random.split(jax.random.key(0), 5)
    hidden = jax.random.normal(keys[0], (T, H)).astype(dtype)
    weight = (3 / H**0.5 * jax.random.normal(keys[1], (V, H))).astype(dtype)
    labels = jax.random.randint(keys[2], (T,), 0, V)
    seeds = [jax.random.normal(key, (T,)) for key in keys[3:]]

    def objective(hidden: jax.Array, weight: jax.Array) -> tuple[Any, Any]:
        out = way(hidden, weight, labels)
        return sum(jnp.sum(seed * x) for seed, x in zip(seeds, out, strict=True)), out

    (_, out), gradients = jax.jit(jax.value_and_grad(objective, (0, 1), has_aux=True))(hidden, weight)
    exact = oracle.logprobs(hidden, weight, labels)
    exact_gradients = oracle.gradients(hidden, weight, labels, (*seeds, jnp.zeros(T)))
    largest = [np.max(np.abs(np.asarray(x, np.float64) - y)) for x, y in zip(out, exact[:2], strict=True)]
    relative = [
        np.linalg.norm(np.asarray(x, np.float64) - y) / np.linalg.norm(y)
        for x, y in zip(gradients, exact_gradients[:2], strict=True)
    ]
    return [float(f"{error:.1e}") for error in (*largest, *relative)]


def main() -> None:
    """Measures and writes."""
    rows = [[f"{dtype}, {name}", *errors(way, dtype)] for dtype in DTYPES for name, way in WAYS.items()]
    run = {
        "command": "python benchmarks/accuracy.py",
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "device": {"device_kind": jax.devices()[0].device_kind, "jax": jax.__version__},
        "shape": {"tokens": T, "hidden_size": H, "vocab_size": V},
        "columns": ["operands", "logprob, nats", "entropy, nats", "dhidden, relative", "dweight, relative"],
        "rows": rows,
    }
    text = ",\n ".join(f"{json.dumps(key)}: {json.dumps(value)}" for key, value in run.items())
    (ROOT / "benchmarks" / "accuracy.json").write_text(f"{{{text.replace('], [', '],\n  [')}}}\n")


if __name__ == "__main__":
    main()
