"""Hopper GPUs (compute capability 9.0): wgmma from tiles that TMA brings into shared memory.

pipeline    _pipeline.py             tiles of a product: copies, wgmma, the registers of two warpgroups
statistics  _statistics_epilogue.py  the forward's epilogue: eq. 1 of a tile of logits; the exponentials for a cache
dlogits     _dlogits_epilogue.py     the backward's: the same tile again, turned into the gradient in the raw products
two heads   _kl.py, _kl_tile.py      both epilogues of `lce_jax.linear_kl`; the tile that waits for the other head's
"""

from __future__ import annotations

from lce_jax.mosaic._call import Generation
from lce_jax.mosaic._chunks import Budget
from lce_jax.mosaic.common._tiles import TILING
from lce_jax.mosaic.sm90._machine import MACHINE
from lce_jax.mosaic.sm90._tuning import DHIDDEN_WAVES, Tunings

HOPPER = Generation(
    compute_capabilities=("9.0",),
    devices=("H100", "H200", "GH200", "H800", "H20"),
    tiling=TILING,
    budget=Budget(dhidden_waves=DHIDDEN_WAVES),
    tunings=Tunings(),
    machine=MACHINE,
)
