"""The public functions: tensors in, tensors out."""
