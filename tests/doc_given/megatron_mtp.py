"""A GPTModel with two prediction depths, and a batch."""

import torch

from tests.torch import megatron_models

megatron_models.prepare()
if not torch.distributed.is_initialized():
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
model = megatron_models.build(tp=1, mtp=2)
tokens, positions, mask, labels = megatron_models.batch()[:4]
loss_mask = torch.ones(labels.shape)
