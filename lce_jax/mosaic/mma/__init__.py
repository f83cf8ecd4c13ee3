"""GPUs with mma.sync alone: Blackwell for desktops (compute capability 12.0)."""

from __future__ import annotations

from lce_jax.mosaic._call import Generation
from lce_jax.mosaic._chunks import Budget
from lce_jax.mosaic.common._tiles import TILING
from lce_jax.mosaic.mma import _pipeline
from lce_jax.mosaic.mma._tuning import Tunings
from lce_jax.mosaic.sm90._machine import MACHINE
from lce_jax.mosaic.sm90._tuning import DHIDDEN_WAVES

BY_TMA = Generation(
    compute_capabilities=("12.0",),
    devices=("RTX 5090", "RTX PRO 6000"),
    tiling=TILING,
    budget=Budget(dhidden_waves=DHIDDEN_WAVES),
    tunings=Tunings(),
    machine=MACHINE._replace(kernel=_pipeline.kernel, walk_tiles=_pipeline.walk_tiles),
)
