"""Blackwell's `Machine`: tcgen05.mma into tensor memory, and epilogues that read it block by block."""

from __future__ import annotations

from lce_jax.mosaic.common._machine import Machine
from lce_jax.mosaic.sm100 import _dlogits, _epilogue, _pipeline, _statistics

MACHINE = Machine(
    kernel=_pipeline.kernel,
    walk_tiles=_pipeline.walk_tiles,
    staging=_epilogue.staging,
    send_product=_epilogue.send_product,
    statistics=_statistics.statistics,
    dlogits=_dlogits.dlogits,
)
