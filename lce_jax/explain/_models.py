"""The heads of named models, as data. `python -m lce_jax.explain` and the benchmarks use them.

Hidden sizes, vocabularies, softcaps and ``tie_word_embeddings`` are from each model's published ``config.json``
(huggingface.co/<organisation>/<model>). They were compared with the model files of
https://github.com/AI-Hypercomputer/maxtext/tree/main/src/maxtext/configs/models and of
https://github.com/google/tunix/tree/main/tunix/models. MaxText pads Gemma 2's vocabulary from 256000 to 256128, and
leaves out the last 64 of Gemma 3's 262208 entries.
"""

from __future__ import annotations

import dataclasses
import re


@dataclasses.dataclass(frozen=True)
class ModelHead:
    """The head of a language model: everything about its shape except the number of tokens."""

    hidden_size: int
    vocab_size: int
    logit_softcap: float | None = None
    model: str = ""
    tied: bool = False  # whether the weight is that of the embedding

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
    "llama3-8b": ModelHead(4096, 128256),  # 3.1 has the same head
    "llama3-70b": ModelHead(8192, 128256),  # 3.1 and 3.3 have the same head
    "llama3.1-405b": ModelHead(16384, 128256),
    "llama4-scout": ModelHead(5120, 202048),
    "gemma2-2b": ModelHead(2304, 256000, logit_softcap=30.0, tied=True),
    "gemma2-9b": ModelHead(3584, 256000, logit_softcap=30.0, tied=True),
    "gemma2-27b": ModelHead(4608, 256000, logit_softcap=30.0, tied=True),
    "gemma3-1b": ModelHead(1152, 262144, tied=True),
    "gemma3-4b": ModelHead(2560, 262208, tied=True),
    "gemma3-12b": ModelHead(3840, 262208, tied=True),
    "gemma3-27b": ModelHead(5376, 262208, tied=True),
    "gpt-oss": ModelHead(2880, 201088),  # the same head in 20b and 120b
    "deepseek-v3": ModelHead(7168, 129280),  # R1 has the same head
    "kimi-k2": ModelHead(7168, 163840),
    "mixtral-8x7b": ModelHead(4096, 32000),
    "olmo3-7b": ModelHead(4096, 100278),
}


def find_model(name: str) -> str:
    """Returns the key in `MODELS` of a Hugging Face name such as Qwen/Qwen3-8B-Base, or an unknown name unchanged."""
    short = re.sub("-(base|instruct|it|pt)$", "", name.rpartition("/")[2].lower())
    return next((key for key in MODELS if key.replace("-", "") == short.replace("-", "")), name)


def model_head(name: str) -> ModelHead:
    """Returns the head of a model, by its key in `MODELS`."""
    return dataclasses.replace(MODELS[name], model=name)
