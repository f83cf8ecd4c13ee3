"""Speed and memory of the language-model head: ``python -m benchmarks`` in a checkout; what it measured, as JSON."""
