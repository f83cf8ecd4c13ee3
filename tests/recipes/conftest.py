"""The workers are not collected: their imports belong to processes of their own."""

from __future__ import annotations

collect_ignore_glob = ["*_worker.py"]
