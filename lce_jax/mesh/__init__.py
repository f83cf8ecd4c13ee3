"""Meshes: how a mesh splits operands, collectives over mesh axes, and functions with a rule for XLA's partitioner."""
