"""The Blackwell kernels, traced and lowered for CUDA without a GPU: layouts, alignment, shared and tensor memory."""

from __future__ import annotations

from typing import Any

import pytest
from jax.experimental.mosaic.gpu import utils

from lce_jax.explain._models import MODELS
from tests.mosaic.test_lowering import EVERYTHING, lower

CALLS: list[Any] = [
    ((1003, 2880, 201088), {"cache_bytes": 1 << 30, "vocab_size": 200000, **EVERYTHING}),
    pytest.param((100, 1024, 50257), {"dtype": "float16", "cache_bytes": 1 << 40}, marks=pytest.mark.slow),
    pytest.param((4096, 1024, 32000), {"weight_layout": "hv"}, marks=pytest.mark.slow),
    pytest.param((1003, 4096, 32000), {"K": 64, "entropy": False}, marks=pytest.mark.slow),
    pytest.param((4096, 4096, 32000), {"gradient_threshold": 2.0**-12, "stats": True}, marks=pytest.mark.slow),
]


@pytest.mark.usefixtures("blackwell")
@pytest.mark.parametrize(("shape", "options"), CALLS, ids=str)
def test_options(shape: tuple[int, int, int], options: dict[str, Any]) -> None:
    lower(*shape, **options)


@pytest.mark.slow
@pytest.mark.usefixtures("blackwell")
@pytest.mark.parametrize("model", MODELS)
def test_every_model(model: str) -> None:
    head = MODELS[model]
    lower(4096, head.hidden_size, head.vocab_size, logit_softcap=head.logit_softcap)


@pytest.mark.usefixtures("blackwell")
def test_jax_is_told_which_architecture_it_lowers_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """It asks its default device, which is none of that kind here, and would take Hopper's."""
    asked, before = [], utils._infer_arch
    from jax.experimental.mosaic.gpu import layout_inference

    inferred = layout_inference.infer_layout

    def noted(*args: Any, arch: tuple[int, int], **kwargs: Any) -> Any:
        asked.append(arch)
        return inferred(*args, arch=arch, **kwargs)

    monkeypatch.setattr(layout_inference, "infer_layout", noted)
    lower(128, 64, 256)
    assert set(asked) == {(10, 0)}
    assert utils._infer_arch is before
