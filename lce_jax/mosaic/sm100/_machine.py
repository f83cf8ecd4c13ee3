"""Blackwell's `Machine`: tcgen05.mma into tensor memory, and epilogues that read it block by block."""

from __future__ import annotations

from lce_jax.mosaic.common._machine import Machine
from lce_jax.mosaic.sm100 import _dlogits_epilogue, _epilogue, _pipeline, _statistics_epilogue

MACHINE = Machine(
    kernel=_pipeline.kernel,
    walk_tiles=_pipeline.walk_tiles,
    staging=_epilogue.staging,
    send_product=_epilogue.send_product,
    statistics=_statistics_epilogue.statistics,
    dlogits=_dlogits_epilogue.dlogits,
)
