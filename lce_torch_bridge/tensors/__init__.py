"""Tensors, devices and groups of ranks, as used by passes through JAX and by passes that launch kernels directly."""
