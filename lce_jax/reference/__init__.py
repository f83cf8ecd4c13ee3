"""The oracle: stores the logits. For tests, debugging and small problems."""
