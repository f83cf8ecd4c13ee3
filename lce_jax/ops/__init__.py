"""The public functions: a caller's arguments in, results out. Each file has one function and its form over a mesh."""
