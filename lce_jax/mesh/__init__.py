"""Meshes: how operands lie on them, collectives over them, and rules for XLA's partitioner."""
