"""The environment of torchrun with one rank, and on a CPU what stands in for CUDA."""

import os
import socket

from tests.torch.megatron_models import prepare

prepare()
with socket.socket() as free:
    free.bind(("localhost", 0))
    port = free.getsockname()[1]
os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
