"""``python -m examples.frameworks.ray_worker FRAMEWORK [HOW]``: prints the module of the head in a worker of Ray."""

from __future__ import annotations

import importlib
import sys

import ray

from lce_torch_bridge import nemo_rl, skyrl, verl

FUNCTIONS = {
    "verl": ("verl.utils.kernel.linear_cross_entropy", "linear_cross_entropy"),
    "skyrl": ("skyrl.backends.skyrl_train.distributed.megatron.model_utils", "_fused_lm_head_logprob_apply"),
    "nemo_rl": ("nemo_rl.distributed.model_utils", "from_parallel_hidden_states_to_logprobs"),
}
INSTALLS = {"verl": verl.install, "skyrl": skyrl.install, "nemo_rl": nemo_rl.install}


@ray.remote
def module_of(module: str, function: str) -> str:
    return getattr(importlib.import_module(module), function).__module__


if __name__ == "__main__":
    if sys.argv[2:] != ["by itself"]:  # verl reads VERL_USE_EXTERNAL_MODULES
        INSTALLS[sys.argv[1]]()
    ray.init(num_cpus=1, include_dashboard=False)
    print(ray.get(module_of.remote(*FUNCTIONS[sys.argv[1]])))
