"""Defaults of options that `lce_jax` and `lce_torch_bridge` share."""

__all__ = ["CACHE_BYTES", "IGNORED"]

CACHE_BYTES = 1 << 30  # ``cache_bytes=None`` caches up to this many bytes, where it caches at all
IGNORED = -100  # the label that losses ignore by default
