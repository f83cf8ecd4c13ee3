"""torchtitan's trainer, from its own entry point, with its loss or ours; prints JSON.

``torchrun -m examples.frameworks.torchtitan_worker FILE [install] [OPTION ...]``, in an environment with torchtitan.
FILE gets this rank's parts of the parameters after the steps. What torchtitan asks of GPUs and of NCCL alone is
replaced: reports of a device's memory, shorter timeouts, and the factor 1 of FSDP2's sums, which gloo takes without.
"""

from __future__ import annotations

import os

os.environ["JAX_PLATFORMS"] = "cpu"

import json
import logging
import sys
import tempfile
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch.distributed.fsdp import FSDPModule

import lce_torch_bridge

set_factor = FSDPModule.set_gradient_divide_factor


def find_a_cpu() -> None:
    """For torchtitan, which asks for its device when it is imported."""
    torch._utils._get_available_device_type = lambda: "cpu"
    torch.cpu.get_device_name = lambda _: "CPU"
    torch.cpu.get_device_properties = lambda _: SimpleNamespace(total_memory=1)
    torch.cpu.memory_stats = lambda _: {}
    torch.cpu.reset_peak_memory_stats = torch.cpu.empty_cache = lambda: None


def summed(module: FSDPModule, factor: float) -> None:
    assert factor == 1.0
    module.set_force_sum_reduction_for_comms(True)
    set_factor(module, factor)


def train(file: str, *options: str) -> list[float]:
    """The losses of torchtitan's logs."""
    import torchtitan.train
    from torchtitan.components.metrics import MetricsProcessor

    def save(trainer: Any) -> None:
        parts = {name: x.to_local().detach().clone() for name, x in trainer.model_parts[0].named_parameters()}
        torch.save(parts, f"{file}.{torch.distributed.get_rank()}")

    told = ["train", "--module", "examples.frameworks.torchtitan_model", "--config", "tiny", *options]
    with (
        tempfile.TemporaryDirectory() as folder,
        mock.patch.object(MetricsProcessor, "log") as logged,
        mock.patch.object(torchtitan.trainer.Trainer, "close", save),
        mock.patch.object(FSDPModule, "set_gradient_divide_factor", summed),
        mock.patch.object(torchtitan.trainer.dist_utils, "set_pg_timeouts"),
        mock.patch.object(sys, "argv", [*told, "--dump-folder", folder]),
    ):
        torchtitan.train.main()
    return [call.args[1] for call in logged.call_args_list]


def refusal_of(override: Any) -> str:
    from torchtitan.components.loss import MSELoss

    try:
        return f"{override(MSELoss.Config())} instead of a refusal"
    except NotImplementedError as refusal:
        return str(refusal)


def main() -> None:
    find_a_cpu()
    logging.getLogger("lce_torch_bridge").addHandler(logging.StreamHandler(sys.stdout))
    file, *options = sys.argv[1:]
    if options[:1] == ["install"]:  # in place of --override.imports
        lce_torch_bridge.torchtitan.install()
        del options[0]
    found: dict[str, Any] = {"losses": train(file, *options), "calls": 0}
    if ours := sys.modules.get("lce_torch_bridge.torchtitan"):
        found |= {"calls": ours._installed.calls, "refused": refusal_of(ours.without_logits)}
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
