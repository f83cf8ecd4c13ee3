"""Helpers for tensors, devices and groups of ranks, which direct launches and programs of JAX share."""
