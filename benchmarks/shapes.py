"""What is measured, as data: the default shapes, and the bounds that the project promises."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

from lce_jax.explain._models import ModelHead, model_head


@dataclasses.dataclass(frozen=True)
class Shape:
    """One problem to time: a number of tokens through a head."""

    tokens: int
    head: ModelHead

    def __str__(self) -> str:
        return f"T {self.tokens:,}, {self.head}"

    @property
    def product_flops(self) -> int:
        """Floating-point operations of one product hidden · weightᵀ."""
        return 2 * self.tokens * self.head.hidden_size * self.head.vocab_size


GEMM, FORWARD, TOPK, BOTH = "gemm", "forward", "top-k", "forward+backward"  # the directions a row can time
DIRECTIONS = (GEMM, FORWARD, TOPK, BOTH)
# What `--rows` may choose beside "ours" and the bare product: keys of candidates, and the rows of a top k.
ROWS = (
    "ours half cache", "ours full cache", "ours in forward", "ours threshold",
    "chunked", "materialised", "materialised by hand", TOPK,
)  # fmt: skip
PEERS = (
    "torch.compile", "torch F.linear_cross_entropy", "Liger scaled cross entropy", "Liger fused linear CE",
    "Apple CCE", "Apple CCE exact", "QuACK",
)  # fmt: skip
# The Hopper kernels, and the direction whose time decides the tiles of each.
KERNELS = {"forward": FORWARD, "dlogits": BOTH, "dhidden": BOTH, "dweight": BOTH}

CPU_SHAPES = ((2048, 512, 32768),)
GPU_SHAPES = (
    (4096, 4096, 151936),
    (8192, 4096, 131072),
    (8192, 2048, 151936),
    (8192, 1024, 151936),
    (32768, 4096, 151936),
    (512, 4096, 151936),
)
MODEL_TOKENS = {"cpu": 2048, "gpu": 8192}


def select(
    platform: str, models: Iterable[str], shapes: Sequence[tuple[int, int, int]], tokens: Sequence[int]
) -> list[Shape]:
    """The shapes that the command line asks for; with ``tokens``, every head at each of them."""
    chosen = [Shape(MODEL_TOKENS.get(platform, MODEL_TOKENS["gpu"]), model_head(name)) for name in models]
    if not chosen and not shapes:
        shapes = CPU_SHAPES if platform == "cpu" else GPU_SHAPES
    chosen += [Shape(t, ModelHead(h, v)) for t, h, v in shapes]
    if not tokens:
        return chosen
    return [Shape(t, head) for head in dict.fromkeys(shape.head for shape in chosen) for t in tokens]


@dataclasses.dataclass(frozen=True)
class Bound:
    """A promise about one row: its time is at most ``limit`` times that of ``baseline``.

    ``row`` and ``baseline`` are (candidate key, direction), as in `candidates`.
    """

    row: tuple[str, str]
    baseline: tuple[str, str]
    limit: float
    per_skipped: float = 0.0  # less than that by so much, times the share of tiles that the row skips


def bounds(shape: Shape, dtype: str, platform: str, device_kind: str, data: str = "random") -> list[Bound]:
    """The bounds that hold for a shape, by device: one line on CPU, and the H200 at the sizes of `GPU_SHAPES`."""
    size = (shape.tokens, shape.head.hidden_size, shape.head.vocab_size)
    if data == "text":
        held = "H200" in device_kind and size == (8192, 4096, 151936) and dtype == "bfloat16"
        return [Bound(("ours threshold", BOTH), ("gemm", GEMM), 4.25, per_skipped=3.2)] if held else []
    if platform == "cpu" and size in CPU_SHAPES and dtype == "float32":
        return [
            Bound(("ours", FORWARD), ("materialised", FORWARD), 1.15),
            Bound(("ours", BOTH), ("materialised", BOTH), 1.45),
            Bound(("ours", BOTH), ("materialised by hand", BOTH), 1.45),
        ]
    if "H200" in device_kind and size in GPU_SHAPES and dtype == "bfloat16":
        small = shape.head.hidden_size < 2048
        full_cache = {1024: 3.6, 2048: 3.35, 4096: 3.12}[shape.head.hidden_size]
        gemm = ("gemm", GEMM)
        return [
            Bound(("ours", FORWARD), gemm, 1.06 if small else 1.00),
            Bound(("ours", BOTH), gemm, 4.2 if small else 4.00),
            Bound(("ours full cache", BOTH), gemm, full_cache),
            Bound(("ours full cache", BOTH), ("materialised", BOTH), 1.00),
        ]
    return []
