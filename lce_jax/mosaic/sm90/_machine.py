"""Hopper's `Machine`: wgmma, and epilogues of 64 rows in the registers of a warpgroup."""

from __future__ import annotations

from lce_jax.mosaic._generation import Machine
from lce_jax.mosaic.sm90 import _dlogits_epilogue, _epilogue, _kl, _kl_tile, _pipeline, _statistics_epilogue

MACHINE = Machine(
    kernel=_pipeline.kernel,
    walk_tiles=_pipeline.walk_tiles,
    staging=_epilogue.staging,
    send_product=_epilogue.send_product,
    statistics=_statistics_epilogue.statistics,
    dlogits=_dlogits_epilogue.dlogits,
    walk_products=_pipeline.walk_products,
    held=_kl_tile.held,
    kl_statistics=_kl.statistics,
    kl_mixture_sums=_kl.mixture_sums,
    kl_dlogits=_kl.dlogits,
)
