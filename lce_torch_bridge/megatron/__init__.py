"""Megatron-core models through the op, without editing Megatron.

`output_processor` is for GPTModel of megatron-core 0.18 and newer; `fused_output_layer` is a context manager for
HybridModel, MambaModel and older GPTModel, back to megatron-core 0.13; `fused_losses` is one for the losses that a
model computes itself: multi-token prediction's, and that of ``labels=``.

All replace ``output_layer.forward`` by the op during a call, and let Megatron call the layer, so that the hooks on it
run: DistributedDataParallel gathers parameters in them. The layer and the model say what the tensor-parallel group is,
sequence parallelism, the tied weight, the logits' multiplier, where dhidden is summed, and whether dweight goes into
``main_grad``.

Shapes are Megatron's: s sequence, b batch, h hidden size; hidden states ``[s, b, h]``, labels and results ``[b, s]``.
Hidden states are neither transposed nor copied: labels and options are brought to ``[s, b]`` instead, and results back.
"""

from lce_torch_bridge.megatron._fused import fused_losses, fused_output_layer, output_processor

__all__ = ["fused_losses", "fused_output_layer", "output_processor"]
