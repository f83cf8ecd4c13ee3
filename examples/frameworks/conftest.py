"""The workers and what they import are not collected: their imports belong to processes of their own."""

from __future__ import annotations

collect_ignore_glob = ["*_worker.py", "torchtitan_model.py"]
