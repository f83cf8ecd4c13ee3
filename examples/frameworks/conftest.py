"""Workers and their modules are not collected, because they must be imported in their own processes."""

from __future__ import annotations

collect_ignore_glob = ["*_worker.py", "torchtitan_model.py"]
