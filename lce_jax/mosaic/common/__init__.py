"""The kernels, which all generations share: host code calls them by name.

join             _join.py             the union of the tiles' statistics, in an order that the tiles alone decide
cached dlogits   _cached_dlogits.py   dlogits from what the forward kept, without a product
tokens           _tokens.py           the steps on a few numbers per token, and on rows of H numbers
tokens of two    _kl_tokens.py        the steps of `linear_kl` on a few numbers per token
candidates       _candidates.py       candidates' steps, for a host that launches kernels alone
select           _select.py           with a ``gradient_threshold``: which tiles are live

A kernel with tensor cores is a walk over tiles and an epilogue, which says what becomes of each tile:

statistics       _statistics.py       tiles of logits, for the forward
dlogits          _dlogits.py          the same tiles again, for the backward, all or the live ones
products         _products.py         tiles of dhidden and of dweight, all or along lists of live tiles

What these share: `_logits` (the walk over logits), `_heads` (tiles of two heads), `_epilogue` (how results leave the
registers), `_ring` (the stages of operands in shared memory), `_tiles` (sizes, tunings, the order of tiles). How a tile
is multiplied is a generation's `Machine` (`_call.py`).
"""
