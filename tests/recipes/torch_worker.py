"""One of two ranks on a CPU with gloo: runs examples for PyTorch and Megatron, with our head and with stored logits.

``torchrun --nproc-per-node 2 -m tests.recipes.torch_worker``; each rank prints JSON.
"""

from __future__ import annotations

import json
from typing import Any
from unittest import mock

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region

from examples import fsdp2_sft, megatron_grpo
from lce_torch_bridge import nemo_rl as ours_of_nemo_rl
from lce_torch_bridge import rows
from lce_torch_bridge import skyrl as ours_of_skyrl
from tests.torch import framework_doubles as doubles
from tests.torch import megatron_models

type Trained = tuple[list[float], torch.nn.Module]


def stored_score(model: torch.nn.Module, rollout: megatron_grpo.Rollout, temperature: float) -> tuple[Any, Any]:
    logits = gather_from_tensor_model_parallel_region(model(*rollout[:3])).float() / temperature
    logp = logits.log_softmax(-1)
    logprobs = logp.gather(-1, rollout.tokens.roll(-1, dims=1)[..., None])[..., 0]
    return logprobs * rollout.response, -(logp.exp() * logp).sum(-1) * rollout.response


def stored_forward(self: fsdp2_sft.Model, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    hidden, _ = self.trunk(self.embed(tokens))
    return torch.nn.functional.cross_entropy(self.head(hidden).flatten(0, 1), labels.flatten(), ignore_index=-100)


def difference(got: Trained, want: Trained) -> dict[str, float]:
    """Returns the difference of losses, relative to max(1, |loss|), and of this rank's parameters, by norm."""

    def norm(x: Any) -> float:
        local = x.to_local() if hasattr(x, "to_local") else x
        return local.detach().double().norm().item()

    pairs = list(zip(got[1].parameters(), want[1].parameters(), strict=True))
    return {
        "losses": max(abs(a - b) / max(abs(b), 1.0) for a, b in zip(got[0], want[0], strict=True)),
        "parameters": max(norm(a - b) / max(norm(b), 1e-3) for a, b in pairs),
        "fell": want[0][0] - want[0][-1],
    }


def sgd(parameters: Any, lr: float) -> torch.optim.Optimizer:
    """Replaces AdamW, whose step has the usual length even if a gradient is rounding alone (of a key's bias)."""
    return torch.optim.SGD(parameters, lr=30 * lr)


def skyrl(rank: int) -> dict[str, float]:
    """Compares SkyRL's function on half of the vocabulary. The ranks' parts of dhidden are summed, as SkyRL does."""
    hidden, weight, tokens, seeds = head(b=2, s=8)
    group, part = parallel_state.get_tensor_model_parallel_group(), weight.shape[0] // 2
    full = [x.double().requires_grad_() for x in (hidden, weight)]
    want = doubles.SkyRL.whole(*full, tokens)
    local = [x.requires_grad_() for x in (hidden.clone(), weight[rank * part :][:part].clone())]
    got = ours_of_skyrl._logprobs("torch", *local, tokens, rank * part, (rank + 1) * part, 4, group, False)
    dhidden, dweight = torch.autograd.grad(got, local, seeds)
    torch.distributed.all_reduce(dhidden)
    want_grads = torch.autograd.grad(want, full, seeds.double())
    return errors((got, dhidden, dweight), (want, want_grads[0], want_grads[1][rank * part :][:part]))


def nemo_rl(rank: int) -> dict[str, float]:
    """Compares NeMo RL's function on half of the vocabulary and half of the sequence."""
    hidden, weight, tokens, seeds = head(b=2, s=8)
    group, part = parallel_state.get_tensor_model_parallel_group(), weight.shape[0] // 2
    hidden = hidden.transpose(0, 1).contiguous()
    full = [x.double().requires_grad_() for x in (hidden, weight)]
    want = doubles.NeMoRL.whole(*full, tokens)
    local = [x.requires_grad_() for x in (hidden[rank * 4 :][:4].clone(), weight[rank * part :][:part].clone())]
    got = ours_of_nemo_rl._logprobs(*local, False, tokens, rank * part, (rank + 1) * part, group, chunk_size=4)
    dhidden, dweight = torch.autograd.grad(got, local, seeds[:, :-1])
    want_grads = torch.autograd.grad(want, full, seeds[:, :-1].double())
    return errors((got, dhidden, dweight), (want, want_grads[0][rank * 4 :][:4], want_grads[1][rank * part :][:part]))


def nemo_rl_context_parallel(rank: int) -> dict[str, float]:
    """Compares NeMo RL's function on two context-parallel ranks. Each rank has half of the cotangents."""
    hidden, weight, tokens, seeds = head(b=2, s=8)
    hidden = hidden.transpose(0, 1).contiguous()
    full = [x.double().requires_grad_() for x in (hidden, weight)]
    want = doubles.NeMoRL.whole(*full, tokens)
    local = [x.requires_grad_() for x in (rows.of_rank(hidden, rank, 2, axis=0), weight.clone())]
    got = ours_of_nemo_rl._logprobs(*local, False, tokens, 0, len(weight), alone(rank), False, cp_group())
    return errors_of_ranks(rank, got, local, want, full, seeds[:, :-1], None)


def nemo_rl_packed(rank: int) -> dict[str, float]:
    """Compares two sequences packed in one row. Each is split over two context-parallel ranks."""
    hidden, weight, tokens, seeds = head(b=1, s=12)
    hidden, offsets = hidden.transpose(0, 1).contiguous(), torch.tensor([0, 4, 12])
    full = [x.double().requires_grad_() for x in (hidden, weight)]
    want = doubles.NeMoRL.whole_packed(*full, tokens, offsets.tolist(), 9)
    local = [x.requires_grad_() for x in (rows.of_rank(hidden, rank, 2, axis=0, cu_seqlens=offsets), weight.clone())]
    vocabulary = 0, len(weight)
    got = ours_of_nemo_rl.packed_logprobs(*local, tokens, offsets, 9, *vocabulary, alone(rank), False, cp_group())
    return errors_of_ranks(rank, got, local, want, full, seeds[0, :8].expand(2, 8), offsets)


def cp_group() -> torch.distributed.ProcessGroup:
    """Returns the group of both ranks."""
    return torch.distributed.group.WORLD


def alone(rank: int) -> torch.distributed.ProcessGroup:
    """Returns a tensor-parallel group of this rank alone."""
    return [torch.distributed.new_group([each]) for each in (0, 1)][rank]


def errors_of_ranks(
    rank: int, got: Any, local: Any, want: Any, full: Any, seeds: torch.Tensor, offsets: torch.Tensor | None
) -> dict[str, float]:
    """Returns `errors` of gradients to which each of the two ranks adds half."""
    dhidden, dweight = torch.autograd.grad(got, local, seeds / 2)
    torch.distributed.all_reduce(dweight)
    want_grads = torch.autograd.grad(want, full, seeds.double())
    part = rows.of_rank(want_grads[0], rank, 2, axis=0, cu_seqlens=offsets)
    return errors((got, dhidden, dweight), (want, part, want_grads[1]))


def head(b: int, s: int) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(b, s, 32, generator=generator), torch.randn(128, 32, generator=generator) / 4
    return hidden, weight, torch.randint(0, 128, (b, s), generator=generator), torch.randn(b, s, generator=generator)


def errors(got: Any, want: Any) -> dict[str, float]:
    """Returns the error of the values and the largest error of the gradients, by norm."""
    norms = [((x - y).norm() / y.norm()).item() for x, y in zip(got, want, strict=True)]
    return {"values": norms[0], "gradients": max(norms[1:])}


FUNCTIONS = (skyrl, nemo_rl, nemo_rl_context_parallel, nemo_rl_packed)


def main() -> None:
    torch.distributed.init_process_group("gloo")
    mock.patch.object(torch.optim, "AdamW", sgd).start()
    results = {}
    fused = fsdp2_sft.main()
    with mock.patch.object(fsdp2_sft.Model, "forward", stored_forward):
        results["FSDP2"] = difference(fused, fsdp2_sft.main())
    megatron_models.prepare()
    fused = megatron_grpo.main()
    parallel_state.destroy_model_parallel()
    with mock.patch.object(megatron_grpo, "score", stored_score):
        results["Megatron"] = difference(fused, megatron_grpo.main())
    results |= {function.__name__: function(torch.distributed.get_rank()) for function in FUNCTIONS}
    print(json.dumps(results), flush=True)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
