"""What is decided before anything is lowered: whether a call fits the kernels, its tiles, its chunks, its bytes."""

from __future__ import annotations

import dataclasses
import math

from lce_jax._types import Case, Plan, Surroundings, format_bytes

WARPGROUP_ROWS = 64  # the M of one wgmma
COMPUTE_WARPGROUPS = 2  # a third leaves 128 registers a thread, fewer than the accumulator and its epilogue need
ROW_BLOCK = COMPUTE_WARPGROUPS * WARPGROUP_ROWS
TILE_N = 256  # the largest N of wgmma: a 64 x 256 accumulator is 128 registers a thread
STAGING_BYTES = 128  # of a row that an epilogue sends out at a time: the widest swizzle
STAGING_COLUMNS = STAGING_BYTES // 2  # that many 16-bit numbers
HOPPER = ("H100", "H200", "GH200", "H800", "H20")
ATOM_ROWS = 8
COLUMN_GRAIN = 16  # the narrowest swizzle, 32 bytes of 16-bit numbers: what a minor dimension must divide by
SMEM_LIMIT = 232_448  # bytes a block may use on compute capability 9.0 (CUDA programming guide, table of capabilities)
SMEM_ALIGNMENT = 1024  # of every allocation in a kernel
BARRIER_BYTES = 8

MANY = 16  # row blocks, from where on one more is little and a tile of the weight is used often

TEMPORARY_BYTES = 345_000_000  # of the backward: dhidden in fp32 and one chunk of dlogits
CHUNK_COLUMNS = 8192  # at least: every chunk reads and writes dhidden in fp32 once
# Waves that reading and writing one token's dhidden takes: 8 H bytes at 4.3 TB/s against 2 · 128 · 256 · H operations
# of one multiprocessor at 5.5 TFLOP/s (H200).
DHIDDEN_WAVES = (8 / 4.3e12) / (2 * ROW_BLOCK * TILE_N / 5.5e12)
STATISTICS_BYTES = 160 << 20  # of the forward's partial statistics, above which it takes several launches


@dataclasses.dataclass(frozen=True)
class Tiles:
    """The free choices of one kernel. Everything else follows from the shapes."""

    tile_k: int
    stages: int  # buffers of one [ROW_BLOCK / turns, tile_k] and one [TILE_N, tile_k] operand tile each
    cluster: int = 1  # 1 or 2: kernel blocks, one below the other, that load each tile of rhs once between them
    snake: int = 16  # row blocks (``minor`` 0) or tiles of columns (1) at a time, for L2 to reuse: 16 x 8 is square
    minor: int = 0  # 0: row blocks, 1: vocabulary tiles
    in_flight: int = 0  # steps, 0 or 1, whose products run on while a warpgroup waits for the next operands
    turns: int = 1  # 2: the warpgroups multiply one after the other, each during the other's epilogue
    slots: int = 2  # staging slots of each warpgroup, where tiles are stored
    columns: int = STAGING_COLUMNS  # columns of the epilogue's inner step, where nothing is stored

    def __post_init__(self) -> None:
        """Refuses what the kernels are not written for."""
        if self.cluster not in (1, 2) or self.in_flight not in (0, 1) or self.turns not in (1, 2):
            raise ValueError(f"cluster and turns must be 1 or 2, in_flight 0 or 1, got {self}")
        if self.stages <= self.in_flight:
            raise ValueError(f"more stages are needed than steps in flight, got {self}")
        if self.slots < 1 or TILE_N // STAGING_COLUMNS % self.slots or self.snake % self.cluster:
            raise ValueError(f"slots must divide a tile's blocks of columns, and snake by cluster, got {self}")

    def smem_bytes(self, itemsize: int, staged: bool) -> int:
        """Shared memory of a block: operand stages, their barriers and, where tiles are stored, the staging slots."""
        sizes = [
            self.stages * ROW_BLOCK // self.turns * self.tile_k * itemsize,
            self.stages * TILE_N * self.tile_k * itemsize,
        ]
        if staged:
            sizes.append(COMPUTE_WARPGROUPS * self.slots * WARPGROUP_ROWS * STAGING_BYTES)
        barriers = (1 + self.turns) * self.stages * BARRIER_BYTES  # consumed and produced
        return sum(-(-size // SMEM_ALIGNMENT) * SMEM_ALIGNMENT for size in sizes) + barriers


# By kernel: "forward" and "dlogits" contract H, "dhidden" the vocabulary, "dweight" the tokens. The best of half a
# dozen at hidden sizes from 1024 to 4096 and 512 to 32768 tokens on an H200, each timed in turn with the bare product.
TILES = {
    "forward": Tiles(tile_k=128, stages=2, cluster=2),
    "dlogits": Tiles(tile_k=64, stages=4, cluster=2),
    "dhidden": Tiles(tile_k=64, stages=4, cluster=2, in_flight=1),
    "dweight": Tiles(tile_k=64, stages=4, cluster=2, in_flight=1),
}
# Where the contraction is short and the epilogue counts. Turns hide it and read each tile of rhs twice, in steps of
# half the time: too little to cover the latency of HBM, where few row blocks share a tile of the weight.
TURNS = Tiles(tile_k=64, stages=5, cluster=2, in_flight=1, turns=2, slots=1)
SHORT_HIDDEN = 3072
SHORT_TOKENS = 1024
# What does better on a device (by kind and kernel), from a hidden size on: `python -m lce_jax.bench --sweep` finds it.
TUNED: dict[tuple[str, str], tuple[tuple[int, Tiles], ...]] = {}
MAX_SPLITS = 4  # of dhidden's contraction over the vocabulary


def tiles(case: Case, kernel: str) -> Tiles:
    """The tiles of a kernel: tuned for the device and hidden size, else those that serve every Hopper GPU."""
    blocks = geometry(case).row_blocks
    choice = TURNS if _is_short(case, kernel) else TILES[kernel]
    for least, tuned in TUNED.get((case.device.kind, kernel), ()):
        if case.hidden_size >= least:
            choice = tuned
    if case.hidden_size % choice.tile_k and kernel in ("forward", "dlogits"):  # half a step would be multiplied in vain
        choice = dataclasses.replace(choice, tile_k=choice.tile_k // 2, stages=choice.stages * 2)
    if kernel != "dweight" and choice.cluster > 1 and blocks % choice.cluster and blocks < MANY:
        choice = dataclasses.replace(choice, cluster=1)  # a cluster's missing row block would cost too much
    return choice


def stages_output(case: Case, kernel: str) -> bool:
    """Whether a kernel stores tiles of its result: the forward does so for a cache only."""
    return kernel != "forward" or case.options.cache_bytes > 0


def _is_short(case: Case, kernel: str) -> bool:
    if kernel == "dweight":
        return case.num_tokens < SHORT_TOKENS
    many = geometry(case).row_blocks >= MANY
    return kernel in ("forward", "dlogits") and case.hidden_size < SHORT_HIDDEN and many


@dataclasses.dataclass(frozen=True)
class Geometry:
    """The shapes of a call as the kernels see them."""

    tokens: int  # T, padded to whole swizzle atoms and to one row block
    row_blocks: int
    columns: int  # of the vocabulary that the kernels cover, a multiple of COLUMN_GRAIN
    tail: int  # columns behind them
    tiles: int  # of TILE_N columns, the last one perhaps ragged

    @property
    def padded_tokens(self) -> int:
        """The rows of whole pairs of row blocks: the length of per-token vectors in the kernels."""
        return -(-self.row_blocks // 2) * 2 * ROW_BLOCK


def geometry(case: Case) -> Geometry:
    """The shapes of ``case``."""
    tokens = max(-(-case.num_tokens // ATOM_ROWS) * ATOM_ROWS, ROW_BLOCK)
    tail = case.vocab_size % COLUMN_GRAIN
    columns = case.vocab_size - tail
    return Geometry(tokens, -(-tokens // ROW_BLOCK), columns, tail, -(-columns // TILE_N))


def sums_shape(case: Case) -> tuple[int, int, int]:
    """What dhidden is summed in: whole tiles, and several arrays where one has fewer tiles than there are cores."""
    rows, columns = geometry(case).padded_tokens, -(-case.hidden_size // TILE_N) * TILE_N
    num_tiles = rows // ROW_BLOCK * (columns // TILE_N)
    most = MAX_SPLITS if num_tiles < case.device.core_count else 1  # each array is read and written once a chunk

    def waves(splits: int) -> float:
        return -(-num_tiles * splits // case.device.core_count) / splits

    return min(range(1, most + 1), key=waves), rows, columns


def statistics_shape(case: Case, num_tiles: int) -> tuple[int, int, int]:
    """Of the forward's partial statistics, fp32: tiles, fields, tokens."""
    return num_tiles, 3 + case.options.entropy + case.options.stats, geometry(case).padded_tokens


def launch_tiles(case: Case, num_tiles: int) -> int:
    """Vocabulary tiles per launch of the forward: partial statistics within STATISTICS_BYTES, even launches."""
    launches = -(-num_tiles // max(1, STATISTICS_BYTES // (4 * math.prod(statistics_shape(case, 1)))))
    return -(-num_tiles // launches)


def cached_tiles(case: Case) -> int:
    """The vocabulary tiles whose exponentials fit ``cache_bytes``."""
    return min(geometry(case).tiles, case.options.cache_bytes // cached_tile_bytes(case))


def cached_tile_bytes(case: Case) -> int:
    """One tile's exponentials and its maximum per token."""
    shape = geometry(case)
    return shape.tokens * TILE_N * case.dtype.itemsize + shape.padded_tokens * 4


def can_overwrite_cache(case: Case) -> bool:
    """Whether dlogits can take the place of the cached exponentials, with all cached tiles one chunk."""
    return case.vocab_size % ATOM_ROWS == 0  # else a chunk's weight is copied: no large one


def chunk_tiles(case: Case, num_tiles: int) -> int:
    """Vocabulary tiles per chunk of the backward: within the memory, the size that wastes the least time.

    The cost is counted in waves of tiles over the multiprocessors; each chunk also reads and writes dhidden.
    """
    shape = geometry(case)
    tile_bytes = shape.tokens * TILE_N * case.dtype.itemsize
    budget = max(TEMPORARY_BYTES - math.prod(sums_shape(case)) * 4, CHUNK_COLUMNS // TILE_N * tile_bytes)
    most = min(num_tiles, budget // tile_bytes)

    def cost(chunk: int) -> float:
        whole, rest = divmod(num_tiles, chunk)
        waves = [-(-shape.row_blocks * size // case.device.core_count) for size in (chunk, rest)]
        return whole * waves[0] + waves[1] + -(-num_tiles // chunk) * (1 + shape.tokens * DHIDDEN_WAVES)

    return min(range(most, most // 2, -1), key=cost)


def refusal(case: Case) -> str | None:
    """Why the kernels cannot serve ``case``; None where they can."""
    reason = _device_refusal(case) or _shape_refusal(case)
    if reason is None and case.options.logit_scale <= 0:
        reason = f"logit_scale must be positive for its running maximum, got {case.options.logit_scale}"
    if reason is None and case.options.has_bias:
        reason = "bias: the kernels' epilogues add none to the products"
    if reason is None and case.options.traced_scale and case.options.logit_softcap is not None:
        reason = "logit_softcap beside an array for it or logit_scale: the kernels hold the cap's numbers as constants"
    if reason is None and case.options.mean_logit and case.options.logit_softcap is not None:
        reason = "label smoothing together with a softcap: the mean logit is no product of hidden then"
    return reason


def _device_refusal(case: Case) -> str | None:
    if case.device.platform not in ("gpu", "cuda"):
        return f"needs an NVIDIA GPU of compute capability 9.0 (H100, H200, GH200), this is {case.device.platform}"
    described = not case.device.compute_capability and any(name in case.device.kind for name in HOPPER)  # ahead of time
    if case.device.compute_capability != "9.0" and not described:
        return (
            "needs compute capability 9.0 (H100, H200, GH200), "
            f"{case.device.kind} has {case.device.compute_capability or 'none'}"
        )
    if case.device.core_count < 2:
        return f"needs to know the number of multiprocessors of {case.device.kind}"
    return None


def _shape_refusal(case: Case) -> str | None:
    if case.dtype.name not in ("bfloat16", "float16"):
        return f"needs a bfloat16 or float16 weight (fp32 products would run in TF32), got {case.dtype.name}"
    if case.hidden_size % 64:
        return f"H must be a multiple of 64 (one swizzle atom), got {case.hidden_size}"
    if case.vocab_size < TILE_N:
        return f"V must be at least {TILE_N}, one tile, got {case.vocab_size}"
    if case.options.weight_layout == "hv" and case.vocab_size % COLUMN_GRAIN:
        return f'weight_layout="hv" needs V to be a multiple of {COLUMN_GRAIN}, got {case.vocab_size}'
    for kernel in TILES:
        needed = tiles(case, kernel).smem_bytes(case.dtype.itemsize, stages_output(case, kernel))
        if needed > SMEM_LIMIT:
            return (
                f"the {kernel} kernel needs {format_bytes(needed)} of shared memory, {format_bytes(SMEM_LIMIT)} exist"
            )
    return None


def minor_tile(extent: int, itemsize: int) -> tuple[int, int]:
    """The widest swizzle, in bytes, and its elements that divide ``extent`` columns."""
    swizzle = next(s for s in (128, 64, 32) if extent * itemsize % s == 0)
    return swizzle, swizzle // itemsize


def plan(case: Case, name: str, around: Surroundings) -> Plan:
    """Tiles and bytes of ``case``."""
    shape, options, itemsize = geometry(case), case.options, case.dtype.itemsize
    forward, backward = tiles(case, "forward"), tiles(case, "dlogits")
    cached = cached_tiles(case)
    compacted = case.num_tokens * case.hidden_size * itemsize if case.partial_rows else 0
    padded = shape.tokens * case.hidden_size * itemsize if shape.tokens != case.num_tokens else 0
    overwritten = cached if can_overwrite_cache(case) else 0
    parts = [part for part in (cached - overwritten, shape.tiles - cached) if part]
    chunk = max((chunk_tiles(case, part) for part in parts), default=0) * TILE_N
    copies = 2 * chunk * case.hidden_size * itemsize if case.vocab_size % ATOM_ROWS else 0
    gathered = case.num_tokens * case.hidden_size * itemsize if around.gathers_hidden else 0
    in_float32 = case.num_tokens * case.hidden_size * 4 if options.mean_logit else 0  # hidden, for its mean logit
    summed = case.vocab_size * case.hidden_size * itemsize if around.sums_dweight else 0
    notes = []
    if options.cache_bytes:
        notes.append(
            f"the forward keeps {cached} of {shape.tiles} vocabulary tiles, "
            f"{format_bytes(cached_tile_bytes(case))} each"
        )
        if overwritten:
            notes.append("the backward overwrites what was kept; outside jax.jit, a copy of it")
    if shape.tail:
        notes.append(f"the last {shape.tail} columns of the vocabulary go through plain XLA")
    if case.vocab_size % ATOM_ROWS:
        notes.append("V is no multiple of 8: the backward copies the weight and its gradient, one chunk at a time")
    return Plan(
        implementation=name,
        refused={},
        case=case,
        tiles={
            "tokens": ROW_BLOCK,
            "vocabulary": TILE_N,
            "hidden forward": forward.tile_k,
            "stages forward": forward.stages,
            "hidden backward": backward.tile_k,
            "stages backward": backward.stages,
            "backward chunk": max(chunk, overwritten * TILE_N),
        },
        forward_bytes=4 * math.prod(statistics_shape(case, launch_tiles(case, shape.tiles)))
        + compacted
        + padded
        + gathered
        + in_float32,
        backward_bytes=shape.tokens * chunk * itemsize
        + math.prod(sums_shape(case)) * 4
        + 2 * compacted
        + padded
        + copies
        + gathered
        + in_float32
        + summed,
        kept_bytes=case.statistics_bytes + cached * cached_tile_bytes(case),
        logits_bytes=case.num_tokens * case.vocab_size * 4,
        notes=tuple(notes),
    )
