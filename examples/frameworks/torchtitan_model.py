"""A configuration of torchtitan's trainer for CPUs: ``--module examples.frameworks.torchtitan_model --config tiny``."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.models.llama3.config_registry import llama3_debugmodel
from torchtitan.trainer import Trainer

SEQUENCE = 32


class NoTokenizer(BaseTokenizer):
    """Stands for a tokenizer, because the rows are tokens."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        pass

    def __init__(self, *_: Any, **__: Any) -> None:
        super().__init__()

    def encode(self, *_: Any, **__: Any) -> list[int]:
        raise AssertionError

    def decode(self, *_: Any, **__: Any) -> str:
        raise AssertionError

    def get_vocab_size(self) -> int:
        raise AssertionError


class Counting(BaseDataLoader):
    """Yields rows of ascending tokens, other rows on each rank. The first labels of each row do not count."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        pass

    def __init__(self, *_: Any, dp_rank: int, local_batch_size: int, **__: Any) -> None:
        self.seed, self.rows = dp_rank, local_batch_size

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        generator, places = torch.Generator().manual_seed(self.seed), torch.arange(SEQUENCE)
        while True:
            tokens = torch.randint(0, 1900, (self.rows, 1), generator=generator) + torch.arange(SEQUENCE + 1)
            labels = tokens[:, 1:].where(places >= 4 + 3 * torch.arange(self.rows)[:, None] + self.seed, -100)
            yield {"input": tokens[:, :-1], "positions": places.expand(self.rows, -1).contiguous()}, labels

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        pass


def tiny() -> Trainer.Config:
    """Returns two layers of torchtitan's debug model, with attention that runs on a CPU."""
    config = llama3_debugmodel()
    del config.model_spec.model.layers[2:]
    for layer in config.model_spec.model.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    config.tokenizer, config.dataloader = NoTokenizer.Config(), Counting.Config()
    config.training.seq_len, config.training.local_batch_size, config.training.steps = SEQUENCE, 4, 4
    config.training.mixed_precision_param, config.validator.enable = "float32", False
    config.checkpoint.enable, config.debug.seed = False, 0
    return config
