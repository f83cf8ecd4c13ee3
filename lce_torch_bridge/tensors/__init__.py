"""Tensors, devices and groups of ranks as both ways of a pass see them."""
