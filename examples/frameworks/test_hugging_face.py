"""The Trainer of Hugging Face without logits: its own losses, on one process and under DDP; PEFT's adapters, FSDP2."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from tests.torch.processes import ranks

pytestmark = pytest.mark.skipif(
    not all(map(importlib.util.find_spec, ("transformers", "accelerate", "peft"))),
    reason="needs transformers, accelerate and peft: make test-frameworks",
)


@pytest.mark.parametrize("size", [1, 2])
def test_the_losses_are_those_of_logits(size: int, tmp_path: Path) -> None:
    for said in ranks(size, ["-m", "examples.frameworks.hugging_face_worker"], tmp_path / "logs", JAX_PLATFORMS="cpu"):
        found = json.loads(next(line for line in said.splitlines() if line.startswith('{"got"')))
        assert found["ranks"] == size
        assert found["got"] == pytest.approx(found["want"], rel=1e-6)
        assert found["got"][-1] < found["got"][0]
        for name in ("Llama", "Gemma2", "GPTNeoX", "Mixtral"):
            want, *losses = found["models"][name]
            assert losses == pytest.approx([want] * 2, rel=1e-5)  # a softcap of their float32 logits
        assert found["models"]["Cohere"] == "logit_scale=0.0625: this loss leaves it out"
        assert found["models"]["Granite"] == "logits_scaling=8.0: this loss leaves it out"
        assert "RecurrentGemmaForCausalLM are not those of its head" in found["models"]["RecurrentGemma"]
        for name, dweight, bound in (("attention", [], 1e-6), ("whole head", ["dweight"], 1e-6), ("head", [], 1e-5)):
            for patched, copied, products in found["adapters"][name]:
                assert max(patched, copied) < bound
                assert products == ["kept", "dhidden", *dweight]
        for name in ("head's weight", "tokens of a tied head"):
            assert all("is more than its weight and bias: leave it" in refusal for refusal in found["adapters"][name])
        assert size == 1 or max(found["sharded"]) < 1e-6
