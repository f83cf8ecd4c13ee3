"""What `megatron_worker` and its helpers import belongs to the ranks, not to pytest's process."""

collect_ignore_glob = ["megatron_*.py"]
