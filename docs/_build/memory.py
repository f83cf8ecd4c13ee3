"""``python docs/_build/memory.py``: the numbers behind the calculator of ``docs/memory.md``, from `lce_jax.explain`.

They are in ``docs/assets/memory-numbers.js``, which is not in git. It is a script, because a page that is opened from
a folder may load a script but no data.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import jax.numpy as jnp

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from lce_jax.types.scalars import format_bytes  # noqa: E402
from lce_jax.explain.__main__ import ExplainedCall  # noqa: E402
from lce_jax.explain._models import MODELS  # noqa: E402

NUMBERS = ROOT / "docs" / "assets" / "memory-numbers.js"
TOKENS = tuple(1 << n for n in range(10, 18))
SHARDS = (1, 2, 4, 8)
FIRST = "qwen3-8b", 8192, 1  # as in memory.js
# The rows of the table. Each has two numbers of bytes: of the forward, and of both passes.
WAYS = (
    "logits stored, one copy",
    "linear_logprobs",
    "linear_logprobs, no cache",
    "linear_logprobs, full cache",
    "linear_loss",
)


def compute_bytes(model: str, tokens: int, shards: int) -> list[int]:
    """Returns the bytes of all `WAYS`, of the forward and of both passes in turn."""
    call = ExplainedCall(MODELS[model], tokens, shards, False, jnp.dtype("bfloat16"), "h200")
    plain = call.plan()
    caches = (call.plan(cache_bytes=most) for most in (0, plain.full_cache_bytes))
    plans = (plain, *caches, call.plan(gradients_in_forward=True))
    sizes = (size for plan in plans for size in (plan.forward_bytes, plan.most_bytes))
    return [plain.logits_bytes, plain.logits_bytes, *sizes]


def numbers() -> Iterator[tuple[str, list[int]]]:
    """Yields the name and the bytes of every call."""
    for model in MODELS:
        for tokens in TOKENS:
            for shards in SHARDS:
                yield f"{model}/{tokens}/{shards}", compute_bytes(model, tokens, shards)


def first_choice() -> str:
    """Returns the table's rows for the first choice, which the page shows if no script runs."""
    sizes = [format_bytes(size) for size in compute_bytes(*FIRST)]
    cells = zip(WAYS, sizes[::2], sizes[1::2], strict=True)
    return "\n".join(f"<tr><td>{'</td><td>'.join(row)}</td></tr>" for row in cells)


def main() -> None:
    """Writes the numbers, and the choices of the page."""
    choices = {"model": list(MODELS), "tokens": TOKENS, "shards": SHARDS, "ways": WAYS, "bytes": dict(numbers())}
    NUMBERS.write_text(f"const MEMORY = {json.dumps(choices, separators=(',', ':'))};\n")


if __name__ == "__main__":
    main()
