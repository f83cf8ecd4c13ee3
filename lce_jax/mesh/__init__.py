"""Meshes: how a mesh splits operands, collectives over its axes, and rules for XLA's partitioner."""
