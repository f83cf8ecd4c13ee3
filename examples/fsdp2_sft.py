"""Fine-tuning of a PyTorch model under FSDP2, without its logits.

torchrun --nproc-per-node=2 examples/fsdp2_sft.py
"""

from __future__ import annotations

import os

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from lce_torch_bridge import linear_cross_entropy


class Model(nn.Module):
    def __init__(self, vocab: int, size: int) -> None:
        super().__init__()
        self.embed, self.trunk = nn.Embedding(vocab, size), nn.GRU(size, size, batch_first=True)
        self.head = nn.Linear(size, vocab, bias=False)

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        hidden, _ = self.trunk(self.embed(tokens))
        return linear_cross_entropy(hidden, self.head.weight, labels, ignore_index=-100)


def shard(model: Model) -> Model:
    """Makes each module a unit. In the forward the head's weight is then a DTensor, which the call gathers."""
    for unit in (model.embed, model.trunk, model.head, model):
        fully_shard(unit)
    return model


def main(steps: int = 3) -> tuple[list[float], Model]:
    """Trains; returns the losses of this rank's tokens, and the model."""
    torch.manual_seed(0)
    rank, device = torch.distributed.get_rank(), "cuda" if torch.cuda.is_available() else "cpu"
    model = shard(Model(512, 64).to(device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    tokens = torch.randint(0, 512, (4, 33), generator=torch.Generator().manual_seed(rank)).to(device)
    labels = tokens[:, 1:].where(torch.arange(32, device=device) >= 8, -100)  # the prompt's tokens do not count
    losses = []
    for _ in range(steps):
        loss = model(tokens[:, :-1], labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, model


if __name__ == "__main__":
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    torch.distributed.init_process_group()
    losses, _ = main()
    print("loss", *(f"{x:.4f}" for x in losses))
    torch.distributed.destroy_process_group()
