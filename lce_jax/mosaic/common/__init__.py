"""The kernels, which all generations share: host code calls them by name.

join             _join.py             the union of the tiles' statistics, in an order that the tiles alone decide
cached dlogits   _cached_dlogits.py   dlogits from cached exponentials, without a product
tokens           _tokens.py           the steps on a few numbers per token, for PyTorch
per token        _per_token.py        the same for programs that JAX traces: any function of a few numbers per token
hidden rows      _hidden_rows.py      the steps on rows of H numbers
select           _select.py           with a ``gradient_threshold``: which tiles are live

A kernel with tensor cores is a walk over tiles and what becomes of each tile. Which tiles, and where their operands
lie, is the same for all generations:

statistics       _statistics.py       tiles of logits, for the forward
dlogits          _dlogits.py          the same tiles again, for the backward, all or the live ones
products         _products.py         tiles of dhidden and of dweight
live products    _live_products.py    the same along lists of live tiles

How a tile is multiplied, and its epilogue, is a generation's `Machine` (`_machine.py`).
"""
