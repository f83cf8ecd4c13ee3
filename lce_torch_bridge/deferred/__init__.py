"""Deferred logits: tensors whose values are computed only when something needs them."""
