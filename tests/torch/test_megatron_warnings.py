"""The warnings of a Megatron program are Megatron's own: this package adds none, at import and in a call."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import collections, logging, warnings

said = collections.Counter()


class Said(logging.Handler):
    def emit(self, record):
        said[record.getMessage()] += 1


warnings.simplefilter("always")
warnings.showwarning = lambda message, category, *_: said.update([f"{category.__name__}: {message}"])
logging.getLogger().addHandler(Said(logging.WARNING))

import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.models.gpt import GPTModel, gpt_layer_specs
from megatron.core.transformer import TransformerConfig

by_megatron = said.total()
from lce_torch_bridge import linear_cross_entropy, rows
from lce_torch_bridge.megatron import fused_losses, fused_output_layer
from examples.megatron_grpo import stand_in_for_cuda

assert by_megatron and said.total() == by_megatron, said
stand_in_for_cuda()
torch.distributed.init_process_group(store=torch.distributed.HashStore(), rank=0, world_size=1)
parallel_state.initialize_model_parallel()
tensor_parallel.model_parallel_cuda_manual_seed(0)
config = TransformerConfig(num_layers=2, hidden_size=64, num_attention_heads=4, hidden_dropout=0, attention_dropout=0)
model = GPTModel(config, gpt_layer_specs.get_gpt_layer_local_spec(), 512, 32, position_embedding_type="rope")
tokens = torch.randint(512, (2, 32))
batch = tokens, torch.arange(32).expand(2, 32), None
labels = rows.next_tokens(tokens)


def in_a_step(run):
    before = said.copy()
    run().sum().backward()
    return said - before


stock = in_a_step(lambda: model(*batch))
with fused_output_layer(model, labels, ignore_index=-100):
    fused = in_a_step(lambda: model(*batch).logprobs)
with fused_losses(model):
    losses = in_a_step(lambda: model(*batch, labels=labels.clamp(min=0)))
assert stock and fused <= stock and losses <= stock, (fused - stock, losses - stock)
print("no more than Megatron:", stock.total(), fused.total(), losses.total())
"""


@pytest.mark.slow  # a process of its own
def test_this_package_adds_no_warning() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        capture_output=True, text=True, timeout=240, check=False, cwd=Path(__file__).parents[2],
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.startswith("no more than Megatron: ")
