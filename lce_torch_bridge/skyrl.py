"""SkyRL without logits, in every process that Ray starts after `install`.

With Megatron, SkyRL's fused head is this package's. With FSDP, its models' logits are deferred. From the command line,
in place of ``python -m skyrl.train.entrypoints.main_base``::

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
    """Puts this package's functions into SkyRL, here and in each worker process that Ray starts from then on.

    To be called before ``ray.init``. Megatron needs SkyRL's switch ``trainer.fused_lm_head_logprob=true`` too.

    Returns:
        What counts the calls in this process, and undoes it; a second call returns the same.

    Raises:
        NotImplementedError: SkyRL's function has another name or other parameters; later, something is put around
            the output layer, as an adapter (LoRA) is.
        RuntimeError: Ray runs already.

    Example:
        >>> import lce_torch_bridge.skyrl
        >>> lce_torch_bridge.skyrl.install()  # doctest: +SKIP
    """
    return _framework.with_workers_of_ray(_installed, install_in_worker)


def install_in_worker() -> _framework.Installed:
    """`install` of this process alone: for ``runtime_env={"worker_process_setup_hook": ...}`` of ``ray.init``."""
    places: list[tuple[Any, str, Any]] = []
    hooks: list[Any] = []
    if _framework.is_there("megatron.core"):
        model_utils = _installed.module("skyrl.backends.skyrl_train.distributed.megatron.model_utils")
        places += [
            (model_utils, "_fused_lm_head_logprob_apply", _logprobs),
            (model_utils, "from_parallel_logits_to_logprobs", _refuse_logits),
            (model_utils, "from_parallel_logits_to_logprobs_packed_sequences", _refuse_logits),
        ]
        hooks.append(functools.partial(_framework.refuse_wrapped_head, ("output_layer",)))
    if _framework.is_there("flash_attn"):  # which SkyRL's model for FSDP imports
        wrapper = _installed.module("skyrl.backends.skyrl_train.workers.model_wrapper").HFModelWrapper
        torch_utils = _installed.module("skyrl.backends.skyrl_train.utils.torch_utils")
        places.append((wrapper, "__init__", _framework.around(wrapper.__init__, _deferring)))
        places.append((torch_utils, "FLASH_ATTN_CROSS_ENTROPY_LOSS_AVAILABLE", False))  # a kernel, not torch's function
    return _installed.put(*places, hooks=tuple(hooks))


@functools.cache
def _deferring(stock: Any) -> Any:
    @functools.wraps(stock)
    def init(self: Any, *arguments: Any, **named: Any) -> None:
        stock(self, *arguments, **named)
        _installed.defer(self.model)

    return init


def _logprobs(
    backend: str, hidden: torch.Tensor, weight: torch.Tensor, target: torch.Tensor, vocab_start_index: int,
    vocab_end_index: int, chunk_size: int, tp_group: dist.ProcessGroup, inference_only: bool,
) -> torch.Tensor:  # fmt: skip
    """In place of ``_fused_lm_head_logprob_apply``. [b, s]; the caller sums dhidden over the ranks."""
    del backend, chunk_size
    _framework.check_shard(weight, vocab_start_index, vocab_end_index)
    _installed.count()
    with torch.no_grad() if inference_only else contextlib.nullcontext():
        return linear_logprobs(hidden, weight, target, tp_group=tp_group, entropy=False).logprobs


def _refuse_logits(*_: Any, **__: Any) -> Any:
    """In place of the functions that SkyRL calls where its switch is off."""
    raise RuntimeError("SkyRL passes logits: set trainer.fused_lm_head_logprob=true, or undo lce_torch_bridge.skyrl")


def _main() -> None:
    """SkyRL's own entry point, with its arguments."""
    from skyrl.train.entrypoints import main_base

    from lce_torch_bridge import skyrl

    with skyrl.install():
        main_base.main()


if __name__ == "__main__":
    _main()
