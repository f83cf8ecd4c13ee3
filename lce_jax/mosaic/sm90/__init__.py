"""Hopper GPUs (compute capability 9.0): wgmma from tiles that TMA brings into shared memory.

_pipeline.py  tiles of a product: copies, wgmma, the registers of two warpgroups, held tiles of one head
_tuning.py    the tuning parameters of each kernel
"""

from __future__ import annotations

from lce_jax.mosaic._call import Generation, Machine
from lce_jax.mosaic._chunks import Budget
from lce_jax.mosaic.common._tiles import DHIDDEN_WAVES, TILING
from lce_jax.mosaic.sm90 import _pipeline
from lce_jax.mosaic.sm90._tuning import Tunings

HOPPER = Generation(
    compute_capabilities=("9.0",),
    devices=("H100", "H200", "GH200", "H800", "H20"),
    tiling=TILING,
    budget=Budget(dhidden_waves=DHIDDEN_WAVES),
    tunings=Tunings(),
    machine=Machine(
        kernel=_pipeline.kernel,
        walk_tiles=_pipeline.walk_tiles,
        kernel_of_heads=_pipeline.kernel_of_heads,
        walk_heads=_pipeline.walk_products,
        hold=_pipeline.hold,
    ),
    smem_limit=232_448,  # from the CUDA programming guide, which also has the limits of other capabilities
)
