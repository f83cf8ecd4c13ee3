"""The public functions of tensors."""
