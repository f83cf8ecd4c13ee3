"""Hopper's `Machine`: wgmma, and epilogues of 64 rows in the registers of a warpgroup."""

from __future__ import annotations

from lce_jax.mosaic._call import KLMachine, Machine
from lce_jax.mosaic.sm90 import _epilogue, _kl, _pipeline

MACHINE = Machine(
    kernel=_pipeline.kernel,
    walk_tiles=_pipeline.walk_tiles,
    staging=_epilogue.staging,
    send_product=_epilogue.send_product,
    statistics=_epilogue.statistics,
    dlogits=_epilogue.dlogits,
    kl=KLMachine(
        walk_products=_pipeline.walk_products,
        kernel=_kl.kernel,
        hold=_kl.hold,
        statistics=_kl.statistics,
        mixture_sums=_kl.mixture_sums,
        dlogits=_kl.dlogits,
    ),
)
