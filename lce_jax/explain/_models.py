"""The heads of named models, as data: for `python -m lce_jax.explain` and for the benchmarks.

Hidden sizes, vocabularies, softcaps and ``tie_word_embeddings`` are those of each model's published ``config.json``
(huggingface.co/<organisation>/<model>), checked against the model files of
https://github.com/AI-Hypercomputer/maxtext/tree/main/src/maxtext/configs/models, which pad Gemma 2's 256000 to 256128
and leave out the last 64 of Gemma 3's 262208, and of https://github.com/google/tunix/tree/main/tunix/models.
"""

from __future__ import annotations

import dataclasses
import re


@dataclasses.dataclass(frozen=True)
class ModelHead:
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
    "qwen2.5-0.5b": ModelHead(896, 151936, tied=True),
    "qwen2.5-1.5b": ModelHead(1536, 151936, tied=True),
    "qwen2.5-7b": ModelHead(3584, 152064),
    "qwen3-0.6b": ModelHead(1024, 151936, tied=True),
    "qwen3-1.7b": ModelHead(2048, 151936, tied=True),
    "qwen3-4b": ModelHead(2560, 151936, tied=True),
    "qwen3-8b": ModelHead(4096, 151936),
    "qwen3-14b": ModelHead(5120, 151936),
    "qwen3-32b": ModelHead(5120, 151936),
    "qwen3-30b-a3b": ModelHead(2048, 151936),
    "qwen3-235b-a22b": ModelHead(4096, 151936),
    "llama3.2-1b": ModelHead(2048, 128256, tied=True),
    "llama3.2-3b": ModelHead(3072, 128256, tied=True),
    "llama3-8b": ModelHead(4096, 128256),  # 3.1 alike
    "llama3-70b": ModelHead(8192, 128256),  # 3.1 and 3.3 alike
    "llama3.1-405b": ModelHead(16384, 128256),
    "llama4-scout": ModelHead(5120, 202048),
    "gemma2-2b": ModelHead(2304, 256000, logit_softcap=30.0, tied=True),
    "gemma2-9b": ModelHead(3584, 256000, logit_softcap=30.0, tied=True),
    "gemma2-27b": ModelHead(4608, 256000, logit_softcap=30.0, tied=True),
    "gemma3-1b": ModelHead(1152, 262144, tied=True),
    "gemma3-4b": ModelHead(2560, 262208, tied=True),
    "gemma3-12b": ModelHead(3840, 262208, tied=True),
    "gemma3-27b": ModelHead(5376, 262208, tied=True),
    "gpt-oss": ModelHead(2880, 201088),  # 20b and 120b alike
    "deepseek-v3": ModelHead(7168, 129280),  # R1 alike
    "kimi-k2": ModelHead(7168, 163840),
    "mixtral-8x7b": ModelHead(4096, 32000),
    "olmo3-7b": ModelHead(4096, 100278),
}


def model_named(name: str) -> str:
    """The key in `MODELS` of a name such as Qwen/Qwen3-8B-Base at Hugging Face. Another name stays as it is."""
    short = re.sub("-(base|instruct|it|pt)$", "", name.rpartition("/")[2].lower())
    return next((key for key in MODELS if key.replace("-", "") == short.replace("-", "")), name)


def model_head(name: str) -> ModelHead:
    """The head of a named model."""
    return dataclasses.replace(MODELS[name], model=name)
