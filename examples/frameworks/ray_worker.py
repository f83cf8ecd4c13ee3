"""``python -m examples.frameworks.ray_worker FRAMEWORK``: prints whose head a worker process has that Ray starts."""

from __future__ import annotations

import functools
import importlib
import sys

import ray

from examples import nemo_rl_head, skyrl_head

FUNCTIONS = {
    "verl": ("verl.utils.kernel.linear_cross_entropy", "linear_cross_entropy"),
    "skyrl": ("skyrl.backends.skyrl_train.distributed.megatron.model_utils", "_fused_lm_head_logprob_apply"),
    "nemo_rl": ("nemo_rl.distributed.model_utils", "from_parallel_hidden_states_to_logprobs"),
}
INITS = {  # verl reads VERL_USE_EXTERNAL_MODULES by itself
    "skyrl": functools.partial(skyrl_head.init_with_install, ray.init),
    "nemo_rl": functools.partial(nemo_rl_head.init_with_install, ray.init),
}


@ray.remote
def module_of(module: str, function: str) -> str:
    return getattr(importlib.import_module(module), function).__module__


if __name__ == "__main__":
    INITS.get(sys.argv[1], ray.init)(num_cpus=1, include_dashboard=False)
    print(ray.get(module_of.remote(*FUNCTIONS[sys.argv[1]])))
