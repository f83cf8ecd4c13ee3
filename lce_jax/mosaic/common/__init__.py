"""The kernels, which all generations share. The host code of `lce_jax.mosaic` calls them by name.

join             _join.py             the union of the tiles' statistics, in an order that depends only on the tiles
cached dlogits   _cached_dlogits.py   dlogits from the cached exponentials, without a product
tokens           _tokens.py           steps on a few numbers per token, and on rows of H numbers
KL tokens        _kl_tokens.py        the steps of `linear_kl` on a few numbers per token
candidates       _candidates.py       the steps for candidates, for a host without XLA
select           _threshold.py        the active tiles of a ``gradient_threshold``

A kernel with tensor cores consists of a walk, which visits the tiles, and an epilogue, which processes each tile. The
names of functions for two heads begin with ``kl_`` or ``write_kl_``:

statistics       _statistics.py       tiles of logits, for the forward
dlogits          _dlogits.py          the same tiles again, for the backward, all or only the active ones
products         _products.py         tiles of dhidden and of dweight, over all tiles or over lists of active tiles

They share `_logits` (the walk over logits, and the softcap), `_heads` (tiles of two heads), `_epilogue_steps` (loads,
masks and stores), `_ring` (the stages of operands in shared memory) and `_tiles` (sizes, tunings, the order of tiles,
and which row blocks are skipped because their rows are masked). Scale and temperature are one factor per row, the row
scale, which the epilogues apply. A generation's `Machine` (`_call.py`) multiplies the tiles.
"""
