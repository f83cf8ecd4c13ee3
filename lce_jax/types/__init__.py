"""The lowest floor: types of calls and results, shared checks and messages, packed sequences, unstable names of JAX."""
