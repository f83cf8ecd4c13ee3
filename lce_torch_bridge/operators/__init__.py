"""The bridge's torch operators and their derivatives, which run kernels or programs of JAX."""
