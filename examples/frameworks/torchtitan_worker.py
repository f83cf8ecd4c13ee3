"""torchtitan's trainer, from its own entry point, with its loss or ours; prints JSON.

``torchrun -m examples.frameworks.torchtitan_worker FILE [install] [OPTION ...]``, in an environment with torchtitan.
FILE gets this rank's parts of the parameters after the steps. Functions of torchtitan that need a GPU or NCCL are
replaced: reports of a device's memory, shorter timeouts, and FSDP2's sums with a factor of 1, which gloo does not have.
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


def pretend_device() -> None:
    """Makes torch report a CPU, because torchtitan asks for its device at its import."""
    torch._utils._get_available_device_type = lambda: "cpu"
    torch.cpu.get_device_name = lambda _: "CPU"
    torch.cpu.get_device_properties = lambda _: SimpleNamespace(total_memory=1)
    torch.cpu.memory_stats = lambda _: {}
    torch.cpu.reset_peak_memory_stats = torch.cpu.empty_cache = lambda: None


def sum_gradients(module: FSDPModule, factor: float) -> None:
    assert factor == 1.0
    module.set_force_sum_reduction_for_comms(True)
    set_factor(module, factor)


def train(file: str, *options: str) -> list[float]:
    """Trains. Returns the losses that torchtitan logs."""
    import torchtitan.train
    from torchtitan.components.metrics import MetricsProcessor

    def save(trainer: Any) -> None:
        parts = {name: x.to_local().detach().clone() for name, x in trainer.model_parts[0].named_parameters()}
        torch.save(parts, f"{file}.{torch.distributed.get_rank()}")

    command = ["train", "--module", "examples.frameworks.torchtitan_model", "--config", "tiny", *options]
    with (
        tempfile.TemporaryDirectory() as folder,
        mock.patch.object(MetricsProcessor, "log") as logged,
        mock.patch.object(torchtitan.trainer.Trainer, "close", save),
        mock.patch.object(FSDPModule, "set_gradient_divide_factor", sum_gradients),
        mock.patch.object(torchtitan.trainer.dist_utils, "set_pg_timeouts"),
        mock.patch.object(sys, "argv", [*command, "--dump-folder", folder]),
    ):
        torchtitan.train.main()
    return [call.args[1] for call in logged.call_args_list]


def find_refusal(override: Any) -> str:
    from torchtitan.components.loss import MSELoss

    try:
        return f"{override(MSELoss.Config())} instead of a refusal"
    except NotImplementedError as refusal:
        return str(refusal)


def main() -> None:
    pretend_device()
    logging.getLogger("lce_torch_bridge").addHandler(logging.StreamHandler(sys.stdout))
    file, *options = sys.argv[1:]
    if options[:1] == ["install"]:  # in place of --override.imports
        lce_torch_bridge.torchtitan.install()
        del options[0]
    results: dict[str, Any] = {"losses": train(file, *options), "calls": 0}
    if ours := sys.modules.get("lce_torch_bridge.torchtitan"):
        results |= {"calls": ours._installed.calls, "refused": find_refusal(ours.without_logits)}
    print(json.dumps(results), flush=True)


if __name__ == "__main__":
    main()
