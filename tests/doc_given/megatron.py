"""A GPTModel, and a batch of an RL loop."""

import torch

from tests.torch import megatron_models

megatron_models.prepare()
if not torch.distributed.is_initialized():
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
model = megatron_models.build(tp=1)
batch = megatron_models.batch()
tokens, positions, mask, labels = batch[:4]
response_mask = torch.arange(labels.shape[1]).expand(labels.shape) >= 16
old_logprobs, advantages = torch.full(labels.shape, -5.0), torch.ones(labels.shape)
