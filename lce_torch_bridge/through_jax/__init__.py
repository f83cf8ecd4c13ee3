"""Programs of JAX on torch's tensors, lent through DLPack."""
