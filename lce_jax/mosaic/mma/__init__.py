"""GPUs that have mma.sync and no wgmma: Ampere, Ada, desktop Blackwell (compute capabilities 8.0, 8.6, 8.9, 12.0).

_pipeline.py  tiles of a product by two warpgroups, and the exchange of their halves
_copies.py    copies of operands into shared memory: by TMA, or by cp.async
_tuning.py    the tuning parameters of each kernel

The accumulators have wgmma's layout, so the epilogues are the same as on Hopper (`common`). Hopper GPUs have these
instructions, too. They have run the kernels with TMA and, if forced, with cp.async (`benchmarks.programs.KERNELS`).
"""

from __future__ import annotations

import functools

from lce_jax.mosaic._call import Generation, Machine
from lce_jax.mosaic._chunks import Budget
from lce_jax.mosaic.common._tiles import DHIDDEN_WAVES, KL_HELD_BYTES, ROW_BLOCK, TILING, Tuning
from lce_jax.mosaic.mma import _pipeline
from lce_jax.mosaic.mma._copies import BY_CP_ASYNC, BY_TMA, Copies
from lce_jax.mosaic.mma._tuning import OneTuning


def _machine(copies: Copies, has_tma: bool) -> Machine:
    return Machine(
        kernel=_pipeline.kernel,
        walk_tiles=functools.partial(_pipeline.walk_tiles, copies),
        kernel_of_heads=_pipeline.kernel_of_heads,
        walk_heads=functools.partial(_pipeline.walk_heads, copies),
        hold=functools.partial(_pipeline.hold, copies),
        held_bytes=KL_HELD_BYTES,
        has_tma=has_tma,
    )


RAN_ON = "an H100 and an H200 with JAX 0.11.2 and 0.12.0.1"
BUDGET = Budget(dhidden_waves=DHIDDEN_WAVES)

SM120 = Generation(
    compute_capabilities=("12.0",),
    devices=("RTX 5090", r"RTX 50[5-9]0", r"RTX PRO \d000"),
    tiling=TILING,
    budget=BUDGET,
    tunings=OneTuning(tuning=Tuning(tile_k=32, stages=3, slots=1)),
    machine=_machine(BY_TMA, has_tma=True),
    smem_limit=101_376,
    ran_on=RAN_ON,
)
SM80 = Generation(
    compute_capabilities=("8.0",),
    devices=("A100", "A100X", "A800", "A30"),
    tiling=TILING._replace(atom=ROW_BLOCK),
    budget=BUDGET,
    tunings=OneTuning(tuning=Tuning(tile_k=64, stages=3), has_tma=False),
    machine=_machine(BY_CP_ASYNC, has_tma=False),
    smem_limit=166_912,
    ran_on=RAN_ON,
)
SM89 = Generation(
    compute_capabilities=("8.9", "8.6"),
    devices=("L40S", "L[24]0?", r"RTX [34]0[5-9]0", r"RTX \d000 (SFF )?Ada", "A10G?|A16|A2|A40", r"RTX A\d[05]00"),
    tiling=SM80.tiling,
    budget=BUDGET,
    tunings=OneTuning(tuning=Tuning(tile_k=32, stages=3), has_tma=False),
    machine=SM80.machine,
    smem_limit=101_376,
    ran_on=RAN_ON,
)
