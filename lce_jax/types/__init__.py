"""What a call is made of: its types, numbers, shapes, sequences of packed rows, and names of JAX that may move."""
