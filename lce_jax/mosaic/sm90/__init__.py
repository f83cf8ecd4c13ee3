"""Hopper GPUs (compute capability 9.0): wgmma from tiles that TMA brings into shared memory.

_pipeline.py  tiles of a product: copies, wgmma, the registers of two warpgroups
_epilogue.py  eq. 1 of a tile of logits, the exponentials for a cache; in the backward the gradient in the raw products
_kl.py        both epilogues of `lce_jax.linear_kl`; the tile that waits for the other head's
_machine.py   all of these as a `Machine`
_tuning.py    the free choices of each kernel
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
    smem_limit=232_448,  # CUDA programming guide, as those of other capabilities
)
