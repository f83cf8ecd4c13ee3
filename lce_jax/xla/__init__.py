"""The implementation for every device, in plain XLA: each function's loop over tiles, and the memory that it takes."""
