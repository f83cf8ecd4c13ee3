"""The bridge's public functions on tensors."""
