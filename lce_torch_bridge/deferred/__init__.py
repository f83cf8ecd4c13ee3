"""Logits that are computed only when something needs them."""
