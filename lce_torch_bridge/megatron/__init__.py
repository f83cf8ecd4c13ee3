"""Log-probabilities and losses of Megatron-core models, without stored logits and without editing Megatron.

- `fused_output_layer`, a context manager: log-probabilities of every model (HybridModel, MambaModel and GPTModel), with
  megatron-core 0.13 and newer.
- `output_processor`: the same for GPTModel, with megatron-core 0.18 and newer; several threads may use it at once.
- `fused_losses`, a context manager: the losses that a model computes itself, from ``labels=`` and in multi-token
  prediction.

Each replaces ``output_layer.forward`` by `lce_torch_bridge.linear_logprobs` during a call. Megatron still calls the
layer, so the layer's hooks run, including those in which DistributedDataParallel gathers parameters. These options come
from the layer and the model: the tensor-parallel group, sequence parallelism, the tied weight, the multiplier of
logits, where dhidden (the gradient of the hidden states) is summed, and whether the weight gradient goes into
``main_grad``.

Shapes are Megatron's: s sequence, b batch, h hidden size; hidden states ``[s, b, h]``, labels and results ``[b, s]``.
Hidden states are neither transposed nor copied. Labels and options are transposed to ``[s, b]`` instead, and results
back to ``[b, s]``.
"""

from lce_torch_bridge.megatron._api import fused_losses, fused_output_layer, output_processor

__all__ = ["fused_losses", "fused_output_layer", "output_processor"]


def __dir__() -> list[str]:
    return [*__all__, "__doc__"]
