"""Each file has one public function.

But `_logits` also has `masked_logprobs`, and `_sharded` has the functions over a mesh.
"""
