"""Programs of JAX that run on torch's tensors, which DLPack lends to JAX."""
