"""``lce-jax demo``."""

from __future__ import annotations

import sys

try:
    from lce_jax.demo.cli import main
except ModuleNotFoundError as error:
    if error.name is None or error.name.startswith("lce_jax"):
        raise
    sys.exit(f"the demo needs {error.name}, which is not installed: pip install 'lce-jax[demo]'")

if __name__ == "__main__":
    sys.exit(main())
