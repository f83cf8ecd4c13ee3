"""TRL's own fused head with ours in the place of its function: the same fields, loss and gradients."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch

from examples import rl_frameworks

pytestmark = pytest.mark.skipif(not importlib.util.find_spec("trl"), reason="needs trl, in a venv of its own")
NEAR = 1e-6


@pytest.fixture(scope="module")
def model() -> Any:
    """A small Qwen 3 with TRL's fused head."""
    from transformers import Qwen3Config, Qwen3ForCausalLM
    from trl.trainer.utils import add_fused_lm_head

    torch.manual_seed(0)
    sizes = dict(vocab_size=256, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4)
    model = Qwen3ForCausalLM(Qwen3Config(**sizes, num_key_value_heads=2, head_dim=8, tie_word_embeddings=False))
    add_fused_lm_head(model, temperature=0.8, outputs=("log_probs", "entropy", "mean_logits", "is_top1"))
    return model


def train(model: Any) -> tuple[Any, dict[str, torch.Tensor]]:
    tokens = torch.randint(0, 256, (2, 16), generator=torch.Generator().manual_seed(1))
    labels = tokens.masked_fill(torch.arange(16) < 4, -100)
    model.zero_grad()
    out = model(tokens, labels=labels, fused_lm_head=True)
    (out.loss - 0.1 * out.entropy.sum()).backward()
    return out, {name: x.grad.clone() for name, x in model.named_parameters()}


def test_fused_head(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    want, wanted = train(model)
    monkeypatch.setattr("trl.trainer.utils._ChunkedLogProbFunction", rl_frameworks.TrlLogprobs)
    got, grads = train(model)
    for field in ("loss", "log_probs", "entropy", "mean_logits"):
        torch.testing.assert_close(getattr(got, field), getattr(want, field), rtol=2e-6, atol=2e-6)
    assert torch.equal(got.is_top1, want.is_top1)
    assert not torch.equal(got.log_probs, want.log_probs) or not torch.equal(got.entropy, want.entropy)
    for name, grad in grads.items():
        assert (grad - wanted[name]).norm() <= NEAR * wanted[name].norm(), name
