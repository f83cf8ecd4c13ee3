"""Hopper's `Machine`: wgmma, and epilogues of 64 rows in the registers of a warpgroup."""

from __future__ import annotations

from lce_jax.mosaic.common._machine import Machine
from lce_jax.mosaic.sm90 import _dlogits, _epilogue, _kl, _pipeline, _statistics

MACHINE = Machine(
    kernel=_pipeline.kernel,
    walk_tiles=_pipeline.walk_tiles,
    staging=_epilogue.staging,
    send_product=_epilogue.send_product,
    statistics=_statistics.statistics,
    dlogits=_dlogits.dlogits,
    kl=_kl.MACHINE,
)
