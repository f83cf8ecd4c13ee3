"""The public functions, one per file.

`_logits` also has `masked_logprobs`; `_sharded` has all functions over a mesh.
"""
