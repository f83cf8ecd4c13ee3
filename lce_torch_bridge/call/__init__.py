"""A call: its arguments checked once, as plain tensors of this rank."""
