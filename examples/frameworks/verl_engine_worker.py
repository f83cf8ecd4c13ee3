"""Three steps of verl's FSDP2 engine, as its actor's update calls it, with our head or with logits; prints JSON.

``python -m examples.frameworks.verl_engine_worker WAY``, "ours", "logits" or "deferred". The engine asks a platform for
its device. verl has no platform for CPUs, so this file has one.
"""

from __future__ import annotations

import os
import socket

with socket.socket() as free:
    free.bind(("localhost", 0))
    port = str(free.getsockname()[1])
os.environ.update(JAX_PLATFORMS="cpu", VERL_PLATFORM="cpu", RANK="0", WORLD_SIZE="1", LOCAL_RANK="0",
                  MASTER_ADDR="localhost", MASTER_PORT=port)  # fmt: skip

import json
import sys
import tempfile
from typing import Any

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM
from verl.plugin.platform.platform_cuda import PlatformCUDA
from verl.plugin.platform.platform_manager import PlatformRegistry

from lce_torch_bridge import defer_logits, verl

LENGTHS, PROMPT = (10, 14), 4


@PlatformRegistry.register(platform="cpu")
class CPU(PlatformCUDA):
    device_name = vendor_name = "cpu"
    device_module = torch.cpu

    def is_available(self) -> bool:
        return True

    def current_device(self) -> Any:
        return torch.device("cpu")

    def empty_cache(self) -> None:
        pass


def engine(way: str) -> Any:
    from verl.models.transformers import monkey_patch
    from verl.trainer.config import CheckpointConfig
    from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig
    from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead

    monkey_patch.is_trl_available = lambda: False  # verl 0.9.1 imports a class that TRL 1.16 does not have
    torch.manual_seed(0)
    folder = tempfile.mkdtemp()
    sizes = dict(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=1, head_dim=8)
    Qwen3ForCausalLM(Qwen3Config(**sizes, num_attention_heads=4, num_key_value_heads=2)).save_pretrained(folder)
    model = HFModelConfig(
        path=folder, load_tokenizer=False, enable_gradient_checkpointing=False,
        override_config={"attn_implementation": "eager"},
        use_fused_kernels=way == "ours", fused_kernel_options={"impl_backend": "triton"},
    )  # fmt: skip
    config = FSDPEngineConfig(
        strategy="fsdp2", use_torch_compile=way == "deferred",
        mixed_precision={"param_dtype": "fp32", "reduce_dtype": "fp32"},
    )  # fmt: skip

    class Deferring(FSDPEngineWithLMHead):
        """An engine that defers the model's logits before FSDP2 wraps the model."""

        def _build_module(self) -> Any:
            module = super()._build_module()
            self.deferral = defer_logits(module, strict=True, always=True)
            return module

    made = (Deferring if way == "deferred" else FSDPEngineWithLMHead)(
        model, config, FSDPOptimizerConfig(lr=1e-2, total_training_steps=3), CheckpointConfig()
    )
    made.initialize()
    return made


def loss_of(model_output: Any, data: Any, dp_group: Any = None) -> tuple[torch.Tensor, dict[str, Any]]:
    """Returns the mean over the responses, with an entropy bonus."""
    del data, dp_group
    keep = torch.cat([(torch.arange(n) >= PROMPT) & (torch.arange(n) < n - 1) for n in LENGTHS])
    gain = model_output["log_probs"].values() + 0.01 * model_output["entropy"].values()
    return -gain[keep].mean(), {}


def main(way: str) -> None:
    from verl.utils import tensordict_utils

    torch.distributed.init_process_group("gloo")
    installed = verl.install_in_worker() if way == "ours" else None
    made, generator = engine(way), torch.Generator().manual_seed(1)
    tokens = [torch.randint(0, 64, (n,), generator=generator) for n in LENGTHS]
    rows = {
        "input_ids": tokens,
        "position_ids": [torch.arange(n) for n in LENGTHS],
        "loss_mask": [(torch.arange(n) >= PROMPT).float() for n in LENGTHS],
    }
    options = dict(
        use_remove_padding=True, use_fused_kernels=way == "ours", temperature=0.7, calculate_entropy=True,
        use_dynamic_bsz=False, micro_batch_size_per_gpu=2, max_response_length=10,
    )  # fmt: skip
    losses = []
    for _ in range(3):
        nested = {name: torch.nested.as_nested_tensor(x, layout=torch.jagged) for name, x in rows.items()}
        data = tensordict_utils.get_tensordict(nested, non_tensor_dict=options)
        with made.train_mode():
            losses += made.train_batch(data, loss_of)["loss"]
    served = made.deferral.served if way == "deferred" else 0
    print(json.dumps({"losses": losses, "calls": installed.calls if installed else 0, "served": served}))


if __name__ == "__main__":
    main(sys.argv[1])
