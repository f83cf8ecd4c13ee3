"""Lists of kernels, launched on torch's current stream."""
