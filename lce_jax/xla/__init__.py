"""The implementation for every device, in plain XLA: each function's walk over tiles, and the bytes that it holds."""
