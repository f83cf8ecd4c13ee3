"""Rows of packed sequences and of context-parallel ranks: labels, masks and results that belong to them.

Every function of `lce_torch_bridge` works row by row: a hidden state and its label. So packing and context parallelism
ask one thing alone, that each row has the label of its own sequence's next token:

    labels = rows.next_tokens(tokens, cu_seqlens=cu_seqlens)             # -100 at the last token of each sequence
    labels = rows.of_rank(labels, cp_rank, cp_size)                      # after the shift, never before it
    loss = linear_cross_entropy(hidden, weight, labels)             # hidden: the rank's own

Plain PyTorch, which waits for no GPU. `lce_jax.rows` has the same functions for arrays. L is the length of a row of
tokens, which may hold several sequences one after another.
"""

from lce_torch_bridge.rows._packed import at_tokens, next_tokens, next_values
from lce_torch_bridge.rows._ranks import in_rank_order, in_sequence_order, of_rank, positions

__all__ = ["at_tokens", "in_rank_order", "in_sequence_order", "next_tokens", "next_values", "of_rank", "positions"]
