"""The lowest floor: types of calls and results, checks of arguments, packed sequences, and JAX names that may move."""
