"""Benchmarks of the language-model head, ``python -m benchmarks`` in a checkout, and their results as JSON."""
