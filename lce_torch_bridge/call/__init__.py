"""Checks the arguments of a call, and converts them to plain tensors of this rank."""
