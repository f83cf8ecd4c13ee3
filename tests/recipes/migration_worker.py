"""``python -m tests.recipes.migration_worker SECTION``: prints both sides of a diff of docs/migration.md as JSON.

The other package is the installed one: Liger in Triton's interpreter, Cut Cross Entropy with its ``torch_compile``.
"""

from __future__ import annotations

import os

os.environ.update(JAX_PLATFORMS="cpu", TRITON_INTERPRET="1")

import functools
import json
import sys

from tests.recipes import migration_diffs

if __name__ == "__main__":
    section = sys.argv[1]
    if "Cut Cross Entropy" in section:
        import cut_cross_entropy

        compiled = functools.partial(cut_cross_entropy.linear_cross_entropy, impl="torch_compile")
        cut_cross_entropy.linear_cross_entropy = compiled
    before, after = (migration_diffs.results(code) for code in migration_diffs.DIFFS[section])
    print(json.dumps([migration_diffs.distance(*pair) for pair in zip(before, after, strict=True)]))
