"""Operators of torch, and their derivatives. Both run kernels or programs of JAX."""
