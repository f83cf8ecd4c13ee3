"""Operators of torch and their derivatives, over kernels or programs of JAX."""
