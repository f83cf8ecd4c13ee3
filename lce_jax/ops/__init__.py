"""The public functions: a caller's arguments in, results out. Each file has one; `_sharded` has forms over a mesh."""
