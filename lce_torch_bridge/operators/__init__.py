"""Operators of torch and their derivatives, which run kernels or programs of JAX."""
