"""The tunings of the Hopper kernels (compute capability 9.0), and the choice of a call's tuning."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from lce_jax.mosaic._operands import make_geometry
from lce_jax.mosaic.common._tiles import COMPUTE_WARPGROUPS, KL_HELD_BYTES, TILE_N, TILING, Tuning, stages_output
from lce_jax.types._types import Call

NARROW_TILE_N = 192  # for products whose H it divides and TILE_N does not, so that all tiles are full
MEMORY_REGISTERS = 40  # registers per thread of the memory warpgroup; the compute warpgroups share the others
COMPUTE_REGISTERS = (512 - MEMORY_REGISTERS) // COMPUTE_WARPGROUPS // 8 * 8

# "forward" and "dlogits" contract H, "dhidden" the vocabulary, and "dweight" the tokens. Each tuning is the best of
# about six for hidden sizes from 1024 to 4096 and 512 to 32768 tokens on an H200. They were timed alternately with a
# bare product.
BY_KERNEL: Mapping[str, Tuning] = {
    "forward": Tuning(tile_k=128, stages=2, cluster=2),
    "dlogits": Tuning(tile_k=64, stages=4, cluster=2),
    "dhidden": Tuning(tile_k=64, stages=4, cluster=2, in_flight=1),
    "dweight": Tuning(tile_k=64, stages=4, cluster=2, in_flight=1),
    # The tiles of a cluster lie side by side, because row blocks have different lists. The clusters of a wave read the
    # weight at the same pace.
    "active_dhidden": Tuning(tile_k=64, stages=4, cluster=2, snake=128),
    "active_dweight": Tuning(tile_k=64, stages=4, cluster=2, in_flight=1),  # a cluster computes one vocabulary tile
    # A held tile takes 128 KiB, which leaves 96 KiB for the stages. Four stages of 32 columns are faster than two of 64
    # (16.1 ms instead of 17.2). They are also faster than three stages and a slot for dlogits (47.4 ms instead of 48.7
    # for both passes). Two turns, with both heads' products, would hide the epilogue, but four such steps are too short
    # for the latency of memory: a forward would take 23.7 ms instead of 15.5, and a JSD's 48.1 instead of 38.3.
    "kl_statistics": Tuning(tile_k=32, stages=4, cluster=2),
    "kl_mixture_sums": Tuning(tile_k=32, stages=4, cluster=2),
    "kl_dlogits": Tuning(tile_k=32, stages=4, cluster=2),
}

# This is for a short contraction, where the epilogue takes a large part of the time. With two turns (`_pipeline`), one
# warpgroup multiplies during the other's epilogue, which is thus hidden. But each tile of rhs is read twice, and a step
# takes half the time. If few row blocks share a tile of the weight, a step is too short for HBM's latency.
SHORT = Tuning(tile_k=64, stages=5, cluster=2, in_flight=1, turns=2, slots=1)

# This is for products if H is a multiple of NARROW_TILE_N and not of TILE_N. At H 2880, 6.7 % of the work of tiles with
# 256 columns is padding. With 8192 tokens and 201088 columns on an H200, narrow tiles take dweight from 14.11 to 13.06
# ms in one launch, and from 15.28 to 13.54 ms in 14 launches.
NARROW = Tuning(tile_k=64, stages=5, cluster=2, in_flight=1, slots=1, tile_n=NARROW_TILE_N)

# An H100's memory is slower than an H200's, so two turns are slower than one at H 640 and above. With 8,192 tokens and
# 151,936 columns, a forward with one turn (two turns) takes, in ms: at H 512 2.28 (2.25), at 768 3.12 (3.37), at 1024
# 4.00 (4.46), at 1536 5.75 (7.01), at 2048 8.07 (8.80). Both passes at 1024 take 16.1 (16.3).
H100 = "NVIDIA H100 80GB HBM3"
TUNED = {(H100, kernel): ((640, BY_KERNEL[kernel]),) for kernel in ("forward", "dlogits")}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tunings:
    """Chooses the tuning of a kernel by the shapes of its call and by device."""

    short_hidden: int = 3072  # below this hidden size, the contraction over H is short
    short_tokens: int = 1024  # below this number of tokens, the contraction over them is short
    many_row_blocks: int = 16  # from this number on, one more costs little, and each tile of the weight is used often
    # Better tunings by (kind of device, kernel), each with the smallest hidden size for which it is used.
    # `python -m benchmarks sweep` finds them.
    tuned: Mapping[tuple[str, str], tuple[tuple[int, Tuning], ...]] = dataclasses.field(default_factory=lambda: TUNED)

    def of(self, call: Call, kernel: str) -> Tuning:
        """Returns a kernel's tuning for the device and hidden size if there is one, else that for any Hopper GPU."""
        row_blocks = make_geometry(call, TILING).row_blocks
        many = row_blocks >= self.many_row_blocks
        choice = BY_KERNEL[kernel]
        if self._is_short(call, kernel, many):
            choice = SHORT
        elif _fills_narrow_tiles(call, kernel):
            choice = NARROW
        for least, tuned in self.tuned.get((call.device.kind, kernel), ()):
            if call.hidden_size >= least:
                choice = tuned
        if call.hidden_size % choice.tile_k and kernel in ("forward", "dlogits"):
            # With full steps, half of the last step would be empty.
            choice = dataclasses.replace(choice, tile_k=choice.tile_k // 2, stages=choice.stages * 2)
        if kernel == "active_dhidden" and -(-call.hidden_size // TILE_N) % choice.cluster:
            choice = dataclasses.replace(choice, cluster=1)
        by_row_block = kernel in ("forward", "dlogits", "dhidden", "kl_statistics", "kl_mixture_sums", "kl_dlogits")
        if by_row_block and choice.cluster > 1 and row_blocks % choice.cluster and not many:
            choice = dataclasses.replace(choice, cluster=1)  # a cluster's missing row block would cost too much
        return choice

    def smem_bytes(self, call: Call) -> dict[str, int]:
        """Returns the bytes of shared memory that a block of each kernel needs."""
        itemsize = call.dtype.itemsize

        def needed(kernel: str) -> int:
            held = KL_HELD_BYTES if kernel.startswith("kl") else 0
            return self.of(call, kernel).smem_bytes(itemsize, stages_output(call, kernel), held)

        return {kernel: needed(kernel) for kernel in BY_KERNEL}

    def _is_short(self, call: Call, kernel: str, many: bool) -> bool:
        if kernel == "dweight":
            return call.num_tokens < self.short_tokens
        return kernel in ("forward", "dlogits") and call.hidden_size < self.short_hidden and many


def _fills_narrow_tiles(call: Call, kernel: str) -> bool:
    """Whether the columns of the kernel's result are H, and narrow tiles fill them exactly."""
    along_hidden = kernel == "dhidden" or (kernel == "dweight" and call.vocab_dim == 0)
    return along_hidden and call.hidden_size % TILE_N != 0 and call.hidden_size % NARROW_TILE_N == 0
