"""SkyRL without stored logits, in every process that Ray starts after `install`.

With Megatron, this package's function replaces SkyRL's fused head. With FSDP, the models' logits are deferred. On the
command line, use this module instead of ``python -m skyrl.train.entrypoints.main_base``::

    python -m lce_torch_bridge.skyrl trainer.strategy=megatron trainer.fused_lm_head_logprob=true ...
    python -m lce_torch_bridge.skyrl trainer.strategy=fsdp ...
"""

from __future__ import annotations

import contextlib
import functools
from typing import TYPE_CHECKING, Any

import torch

from lce_torch_bridge import _framework
from lce_torch_bridge.ops._logprobs import linear_logprobs

if TYPE_CHECKING:
    import torch.distributed as dist

__all__ = ["install"]

_installed = _framework.Installed("skyrl", "0.3", "log-probabilities of the head come")


def install() -> _framework.Installed:
    """Puts this package's functions into SkyRL, in this process and each worker process that Ray starts afterwards.

    Call `install` before ``ray.init``. With Megatron, also set SkyRL's switch ``trainer.fused_lm_head_logprob=true``.

    Returns:
        The handle, which counts the calls in this process and has ``undo()``. A second call returns the same handle.

    Raises:
        NotImplementedError: SkyRL's function has another name or other parameters; or, later, a module such as an
            adapter (LoRA) wraps the output layer.
        RuntimeError: Ray is running already.

    Example:
        >>> import lce_torch_bridge.skyrl
        >>> lce_torch_bridge.skyrl.install()  # doctest: +SKIP
    """
    return _framework.install_in_ray_workers(_installed, install_in_worker)


def install_in_worker() -> _framework.Installed:
    """Installs in this process only. Pass it to ``ray.init(runtime_env={"worker_process_setup_hook": ...})``."""
    replacements: list[tuple[Any, str, Any]] = []
    hooks: list[Any] = []
    if _framework.is_importable("megatron.core"):
        model_utils = _installed.import_module("skyrl.backends.skyrl_train.distributed.megatron.model_utils")
        replacements += [
            (model_utils, "_fused_lm_head_logprob_apply", _logprobs),
            (model_utils, "from_parallel_logits_to_logprobs", _refuse_logits),
            (model_utils, "from_parallel_logits_to_logprobs_packed_sequences", _refuse_logits),
        ]
        hooks.append(functools.partial(_framework.refuse_wrapped_head, ("output_layer",)))
    if _framework.is_importable("flash_attn"):  # SkyRL's FSDP model imports flash_attn
        wrapper = _installed.import_module("skyrl.backends.skyrl_train.workers.model_wrapper").HFModelWrapper
        torch_utils = _installed.import_module("skyrl.backends.skyrl_train.utils.torch_utils")
        replacements.append((wrapper, "__init__", _framework.wrap_once(wrapper.__init__, _wrap_init)))
        # With flash_attn's kernel switched off, SkyRL calls torch's cross entropy, which deferred logits support.
        replacements.append((torch_utils, "FLASH_ATTN_CROSS_ENTROPY_LOSS_AVAILABLE", False))
    return _installed.replace_attributes(*replacements, hooks=tuple(hooks))


@functools.cache
def _wrap_init(original: Any) -> Any:
    @functools.wraps(original)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        _installed.defer(self.model)

    return init


def _logprobs(
    backend: str, hidden: torch.Tensor, weight: torch.Tensor, target: torch.Tensor, vocab_start_index: int,
    vocab_end_index: int, chunk_size: int, tp_group: dist.ProcessGroup, inference_only: bool,
) -> torch.Tensor:  # fmt: skip
    """Replaces ``_fused_lm_head_logprob_apply``. Returns [b, s]. SkyRL sums dhidden over the ranks."""
    del backend, chunk_size
    _framework.check_shard(weight, vocab_start_index, vocab_end_index)
    _installed.count_call()
    with torch.no_grad() if inference_only else contextlib.nullcontext():
        return linear_logprobs(hidden, weight, target, tp_group=tp_group, entropy=False).logprobs


def _refuse_logits(*_: Any, **__: Any) -> Any:
    """Raises. It replaces the functions that SkyRL calls if SkyRL's switch is off."""
    raise RuntimeError("SkyRL passes logits: set trainer.fused_lm_head_logprob=true, or undo lce_torch_bridge.skyrl")


def _main() -> None:
    """Runs SkyRL's entry point with its arguments, after `install`."""
    from skyrl.train.entrypoints import main_base

    from lce_torch_bridge import skyrl

    with skyrl.install():
        main_base.main()


if __name__ == "__main__":
    _main()
