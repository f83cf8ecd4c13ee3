"""``python -m examples.demo``."""

from __future__ import annotations

import sys

try:
    from examples.demo.cli import main
except ModuleNotFoundError as error:
    if error.name is None or error.name.startswith(("examples", "lce_jax")):
        raise
    sys.exit(f"the demo needs {error.name}, which is not installed: pip install --editable '.[demo]'")

if __name__ == "__main__":
    sys.exit(main())
