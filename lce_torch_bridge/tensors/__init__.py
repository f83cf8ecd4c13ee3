"""Tensors and devices as kernels see them."""
