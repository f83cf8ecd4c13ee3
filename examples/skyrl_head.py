"""SkyRL 0.3.0 with Megatron, without logits: its fused head is this package's, in every process that Ray starts.

In place of ``python -m skyrl.train.entrypoints.main_base``, with this file on the path of every node:

    PYTHONPATH=$PWD/examples python -m skyrl_head trainer.strategy=megatron trainer.fused_lm_head_logprob=true ...
"""

from __future__ import annotations

import contextlib
import functools
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from lce_torch_bridge import linear_logprobs

calls = 0  # in this process


def logprobs(
    backend: str, hidden: torch.Tensor, weight: torch.Tensor, target: torch.Tensor, vocab_start_index: int,
    vocab_end_index: int, chunk_size: int, tp_group: dist.ProcessGroup, inference_only: bool,
) -> torch.Tensor:  # fmt: skip
    """In place of ``_fused_lm_head_logprob_apply``. [b, s]; the caller sums dhidden over the ranks."""
    global calls
    del backend, chunk_size
    if vocab_end_index - vocab_start_index != weight.shape[0]:
        raise ValueError(f"{vocab_start_index=} and {vocab_end_index=} are not of weight {tuple(weight.shape)}")
    if calls == 0:
        print("skyrl_head: log-probabilities of the head come from lce_torch_bridge", flush=True)
    calls += 1
    with torch.no_grad() if inference_only else contextlib.nullcontext():
        return linear_logprobs(hidden, weight, target, tp_group=tp_group, entropy=False).logprobs


def refuse_logits(*_: Any, **__: Any) -> Any:
    """In place of the functions that SkyRL calls where its switch is off."""
    raise RuntimeError("SkyRL passes logits: set trainer.fused_lm_head_logprob=true, or leave out skyrl_head")


def refuse_wrapped_head(model: torch.nn.Module, name: str, module: torch.nn.Module | None) -> None:
    """Torch calls it before a module becomes part of another, as when an adapter (LoRA) is put around a layer.

    SkyRL hands over the output layer's weight alone: an adapter around the layer would neither count nor train.
    """
    head = model._modules.get(name) if name == "output_layer" else None
    if module is not None and any(layer is head for layer in module.children()):
        raise NotImplementedError(
            f"{type(module)} around output_layer, whose weight alone is read: leave output_layer out of the "
            "adapter's target_modules"
        )


def install() -> None:
    """Puts `logprobs` into SkyRL. To be called before its workers are imported, as `main` has Ray do."""
    from skyrl.backends.skyrl_train.distributed.megatron import model_utils

    model_utils._fused_lm_head_logprob_apply = logprobs
    model_utils.from_parallel_logits_to_logprobs = refuse_logits
    model_utils.from_parallel_logits_to_logprobs_packed_sequences = refuse_logits
    torch.nn.modules.module.register_module_module_registration_hook(refuse_wrapped_head)


def init_with_install(init: Any, *arguments: Any, runtime_env: Any = None, **named: Any) -> Any:
    """``ray.init``, after which each worker process calls `install` before it does anything else."""
    runtime_env = {**(runtime_env or {}), "worker_process_setup_hook": "skyrl_head.install"}
    return init(*arguments, runtime_env=runtime_env, **named)


def main() -> None:
    """SkyRL's own entry point, with its arguments."""
    import ray
    from skyrl.train.entrypoints import main_base

    with mock.patch.object(ray, "init", functools.partial(init_with_install, ray.init)):
        main_base.main()


if __name__ == "__main__":
    main()
