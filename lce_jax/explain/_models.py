"""The heads of named models, as data: for `python -m lce_jax.explain` and for the benchmarks.

Hidden sizes, vocabularies, softcaps and ``tie_word_embeddings`` are those of each model's published ``config.json``
(huggingface.co/<organisation>/<model>), checked against the model files of
https://github.com/AI-Hypercomputer/maxtext/tree/main/src/maxtext/configs/models, which pad Gemma 2's 256000 to 256128
and leave out the last 64 of Gemma 3's 262208, and of https://github.com/google/tunix/tree/main/tunix/models.
"""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Head:
    """The head of a language model: a shape without its number of tokens."""

    hidden_size: int
    vocab_size: int
    logit_softcap: float | None = None
    model: str = ""
    tied: bool = False  # to the embedding

    def __str__(self) -> str:
        cap = "" if self.logit_softcap is None else f", softcap {self.logit_softcap:g}"
        name = f"{self.model}, " if self.model else ""
        return f"{name}H {self.hidden_size:,}, V {self.vocab_size:,}{cap}"


MODELS = {
    "qwen2.5-0.5b": Head(896, 151936, tied=True),
    "qwen2.5-1.5b": Head(1536, 151936, tied=True),
    "qwen2.5-7b": Head(3584, 152064),
    "qwen3-0.6b": Head(1024, 151936, tied=True),
    "qwen3-1.7b": Head(2048, 151936, tied=True),
    "qwen3-4b": Head(2560, 151936, tied=True),
    "qwen3-8b": Head(4096, 151936),
    "qwen3-14b": Head(5120, 151936),
    "qwen3-32b": Head(5120, 151936),
    "qwen3-30b-a3b": Head(2048, 151936),
    "qwen3-235b-a22b": Head(4096, 151936),
    "llama3.2-1b": Head(2048, 128256, tied=True),
    "llama3.2-3b": Head(3072, 128256, tied=True),
    "llama3-8b": Head(4096, 128256),  # 3.1 alike
    "llama3-70b": Head(8192, 128256),  # 3.1 and 3.3 alike
    "llama3.1-405b": Head(16384, 128256),
    "llama4-scout": Head(5120, 202048),
    "gemma2-2b": Head(2304, 256000, logit_softcap=30.0, tied=True),
    "gemma2-9b": Head(3584, 256000, logit_softcap=30.0, tied=True),
    "gemma2-27b": Head(4608, 256000, logit_softcap=30.0, tied=True),
    "gemma3-1b": Head(1152, 262144, tied=True),
    "gemma3-4b": Head(2560, 262208, tied=True),
    "gemma3-12b": Head(3840, 262208, tied=True),
    "gemma3-27b": Head(5376, 262208, tied=True),
    "gpt-oss": Head(2880, 201088),  # 20b and 120b alike
    "deepseek-v3": Head(7168, 129280),  # R1 alike
    "kimi-k2": Head(7168, 163840),
    "mixtral-8x7b": Head(4096, 32000),
    "olmo3-7b": Head(4096, 100278),
}


def model_head(name: str) -> Head:
    """The head of a named model."""
    return dataclasses.replace(MODELS[name], model=name)
