"""Tiny real megatron-core models, on CPU with gloo or on GPUs with NCCL, without Transformer Engine and apex.

This file alone replaces what megatron-core expects of the machine:

* `stand_in_for_cuda` (CPU only): five functions of ``torch.cuda`` that megatron-core calls whatever the device, and its
  causal mask, which it makes on ``cuda``.
* `stand_in_for_apex`: the one apex kernel that ``gradient_accumulation_fusion`` calls, as two lines of PyTorch.
* `norm`: megatron-core's own wrapper of PyTorch's norms refuses sequence parallelism, and HybridModel names
  Transformer Engine's. A norm is per token: all it needs is the mark that its gradient is summed over the ranks.

The rest (embedding, attention, MLP, MTP, output layer, DDP, cross entropy) is megatron-core's code as installed.
"""

from __future__ import annotations

import functools
import types
from typing import Any, NamedTuple

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.fusions import fused_softmax
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec, get_gpt_mtp_block_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.models.hybrid import hybrid_block
from megatron.core.models.hybrid.hybrid_model import HybridModel
from megatron.core.ssm.mlp_layer import MLPLayer
from megatron.core.tensor_parallel import layers as parallel_layers
from megatron.core.tensor_parallel import random as parallel_random
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.multi_token_prediction import (
    MTPLossLoggingHelper,
    MultiTokenPredictionBlock,
    MultiTokenPredictionBlockSubmodules,
    MultiTokenPredictionLayer,
    MultiTokenPredictionLayerSubmodules,
)
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

HIDDEN, HEADS, VOCAB, SEQUENCE, BATCH = 64, 4, 128, 32, 3


def stand_in_for_cuda() -> None:
    """Megatron asks ``torch.cuda`` where to allocate, and keeps dropout's random state there, on every device."""
    torch.cuda.current_device = lambda: torch.device("cpu")
    torch.cuda.current_stream = lambda: None  # DDP reads it, for events that only CUDA graphs record
    torch.cuda.manual_seed = torch.manual_seed
    torch.cuda.get_rng_state = torch.cuda.random.get_rng_state = lambda *_, **__: torch.get_rng_state()
    parallel_random._set_cuda_rng_state = lambda state, *_, **__: torch.set_rng_state(state)
    fused_softmax.get_default_causal_mask = lambda size: torch.ones(size, size, dtype=torch.bool).triu(diagonal=1)


def stand_in_for_apex() -> None:
    """The kernel adds a weight gradient to its float32 ``main_grad``; the contract around it is Megatron's."""

    def add(inputs: torch.Tensor, doutputs: torch.Tensor, main_grad: torch.Tensor) -> None:
        main_grad.add_(doutputs.float().t() @ inputs.float())

    parallel_layers.fused_weight_gradient_mlp_cuda = types.SimpleNamespace(wgrad_gemm_accum_fp32=add)
    parallel_layers._grad_accum_fusion_available = True


def norm(config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> torch.nn.Module:
    kind = torch.nn.RMSNorm if config.normalization == "RMSNorm" else torch.nn.LayerNorm
    module = kind(hidden_size, eps=eps, device=torch.cuda.current_device(), dtype=config.params_dtype)
    for parameter in module.parameters():
        parameter.sequence_parallel = config.sequence_parallel
    return module


def configuration(
    *, tp: int, sp: bool = False, dtype: str = "float32", modern: bool = False, mup: bool = False, mtp: int = 0,
    recompute: str | None = None, fusion: bool = False, layers: int = 2, cp: int = 1,
) -> TransformerConfig:  # fmt: skip
    """``modern``: RMSNorm, SwiGLU and no biases. ``mup``: twice its base width, so that logits are halved."""
    options: dict[str, Any] = {}
    if modern:
        options |= dict(normalization="RMSNorm", gated_linear_unit=True, add_bias_linear=False)
        options |= dict(activation_func=torch.nn.functional.silu)
    if mup:
        options |= dict(use_mup=True, mup_base_hidden_size=HIDDEN // 2)
    if mtp:
        options |= dict(mtp_num_layers=mtp, mtp_loss_scaling_factor=0.1)
    if recompute == "full":
        options |= dict(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)
    if recompute == "selective":
        options |= dict(recompute_granularity="selective", recompute_modules=["core_attn"])
    torch_dtype = getattr(torch, dtype)
    config = TransformerConfig(
        num_layers=layers, hidden_size=HIDDEN, num_attention_heads=HEADS, hidden_dropout=0.0, attention_dropout=0.0,
        init_method_std=0.1, embedding_init_method_std=0.2,  # logits of standard deviation 0.8 and more
        tensor_model_parallel_size=tp, context_parallel_size=cp, sequence_parallel=sp,
        params_dtype=torch_dtype, pipeline_dtype=torch_dtype,
        bf16=torch_dtype == torch.bfloat16, fp16=torch_dtype == torch.float16,
        use_cpu_initialization=not torch.cuda.is_available(),
        bias_activation_fusion=False, bias_dropout_fusion=False, masked_softmax_fusion=False,
        gradient_accumulation_fusion=fusion, **options,
    )  # fmt: skip
    assert not mup or config.mup_output_mult == 0.5, "the multiplier must not be 1, or it is not tested"
    return config


def layer_spec(config: TransformerConfig) -> ModuleSpec:
    spec = get_gpt_layer_local_spec(normalization=config.normalization)
    spec.submodules.input_layernorm = spec.submodules.pre_mlp_layernorm = norm
    return spec


def gpt(config: TransformerConfig, **options: Any) -> GPTModel:
    spec = layer_spec(config)
    if config.mtp_num_layers:
        options["mtp_block_spec"] = get_gpt_mtp_block_spec(config, spec, use_transformer_engine=False)
        for mtp_spec in options["mtp_block_spec"].layer_specs:
            names = mtp_spec.submodules
            names.enorm = names.hnorm = names.layer_norm = norm
    block = TransformerBlockSubmodules(layer_specs=[spec] * config.num_layers, layer_norm=norm)
    return GPTModel(
        config, block, vocab_size=VOCAB, max_sequence_length=SEQUENCE, position_embedding_type="rope", **options
    )


def hybrid(config: TransformerConfig, **options: Any) -> HybridModel:
    """Attention and MLP layers: Mamba's need CUDA kernels, and the head does not depend on the layers below it.

    With context parallelism MLP layers alone: attention then needs Transformer Engine.
    """
    parts = layer_spec(config).submodules
    attention = TransformerLayerSubmodules(
        input_layernorm=norm, self_attention=parts.self_attention, self_attn_bda=get_bias_dropout_add
    )
    mlp = TransformerLayerSubmodules(pre_mlp_layernorm=norm, mlp=parts.mlp, mlp_bda=get_bias_dropout_add)
    hybrid_block.TENorm = norm
    prediction = MultiTokenPredictionLayerSubmodules(
        enorm=norm, hnorm=norm, layer_norm=norm, eh_proj=parallel_layers.ColumnParallelLinear, mtp_model_layer=None
    )
    predictions = MultiTokenPredictionBlockSubmodules([ModuleSpec(MultiTokenPredictionLayer, submodules=prediction)])
    stack = hybrid_block.HybridStackSubmodules(
        attention_layer=ModuleSpec(TransformerLayer, submodules=attention),
        mlp_layer=ModuleSpec(MLPLayer, submodules=mlp),
        mtp_block_spec=ModuleSpec(MultiTokenPredictionBlock, submodules=predictions),
    )
    whole = config.context_parallel_size == 1
    layers = "*-" if whole else "--"
    pattern = "/".join([layers] * (1 + (config.mtp_num_layers or 0)))  # the model's layers, and each prediction's
    return HybridModel(
        config, ModuleSpec(hybrid_block.HybridStack, submodules=stack), vocab_size=VOCAB, max_sequence_length=SEQUENCE,
        hybrid_layer_pattern=pattern, position_embedding_type="rope" if whole else "none", **options,
    )  # fmt: skip


def build(
    *, tp: int, cp: int = 1, kind: str = "gpt", tied: bool = False, bias: bool | str = False, stage: str | None = None,
    **options: Any,
) -> torch.nn.Module:  # fmt: skip
    """A model with the same weights each time, on this rank's device. Remakes the process groups for ``tp`` and ``cp``.

    On a GPU the random states are those that a CUDA graph can capture.

    ``stage``: "first" has no output layer, "last" no embedding, as with pipeline parallelism; None has both.
    ``bias``: True gives the output layer one, "skipped" one that the layer does not add.
    """
    if not parallel_state.is_initialized() or sizes() != (tp, cp):
        parallel_state.destroy_model_parallel()
        parallel_state.initialize_model_parallel(tensor_model_parallel_size=tp, context_parallel_size=cp)
    MTPLossLoggingHelper.tracker.clear()  # of the whole process, with as many places as its first model had
    torch.manual_seed(2)
    graphable = torch.cuda.is_available()
    parallel_random.model_parallel_cuda_manual_seed(2, use_cudagraphable_rng=graphable, force_reset_rng=True)
    make = {"gpt": gpt, "hybrid": hybrid}[kind]
    model = make(
        configuration(tp=tp, cp=cp, **options), share_embeddings_and_output_weights=tied,
        pre_process=stage != "last", post_process=stage != "first",
    )  # fmt: skip
    if bias:
        add_bias(model.output_layer, skipped=bias == "skipped")
    return model.to(torch.cuda.current_device())


def sizes() -> tuple[int, int]:
    """Of tensor and context parallelism."""
    return parallel_state.get_tensor_model_parallel_world_size(), parallel_state.get_context_parallel_world_size()


def add_bias(layer: Any, skipped: bool) -> None:
    """What ``ColumnParallelLinear(bias=True, skip_bias_add=skipped)`` has; no model builds its output layer so."""
    whole = torch.randn(VOCAB, generator=torch.Generator().manual_seed(4)).to(layer.config.params_dtype)
    rank = parallel_state.get_tensor_model_parallel_rank()
    part = whole.chunk(parallel_state.get_tensor_model_parallel_world_size())[rank].clone()
    layer.bias, layer.skip_bias_add = torch.nn.Parameter(part, requires_grad=not skipped), skipped


def data_parallel(model: torch.nn.Module, **options: Any) -> DistributedDataParallel:
    """As in training: 16-bit weights in Float16Module, gradients of all micro-batches summed in float32."""
    config = model.config
    module = Float16Module(config, model) if config.bf16 or config.fp16 else model
    return DistributedDataParallel(config, DistributedDataParallelConfig(grad_reduce_in_fp32=True, **options), module)


class Batch(NamedTuple):
    """What a model is called with, and the cotangents of the two outputs."""

    tokens: torch.Tensor  # [b, s]
    positions: torch.Tensor  # [b, s]
    mask: torch.Tensor  # [1, 1, s, s], True: not attended to
    labels: torch.Tensor  # [b, s]
    seeds: tuple[torch.Tensor, torch.Tensor]  # [b, s] each

    @property
    def inputs(self) -> tuple[torch.Tensor, ...]:
        return self[:3]


def batch(seed: int = 0, *, foreign: bool = False, vocab_size: int = VOCAB) -> Batch:
    device = torch.cuda.current_device()
    generator = torch.Generator().manual_seed(seed)
    shape = (BATCH, SEQUENCE)
    tokens = torch.randint(0, vocab_size, shape, generator=generator)
    labels = tokens.roll(-1, dims=1)
    if foreign:  # 2**32 + 3 narrowed to 32 bits would be 3
        labels[0, 3:7] = torch.tensor([2**32 + 3, -100, 10**6, -1])
        labels[1, 5] = VOCAB
    seeds = tuple(scale * torch.randn(shape, generator=generator) for scale in (1.0, 0.3))
    positions = torch.arange(SEQUENCE).expand(shape)
    mask = torch.triu(torch.ones(SEQUENCE, SEQUENCE, dtype=torch.bool), diagonal=1)[None, None]
    moved = [tensor.contiguous().to(device) for tensor in (tokens, positions, mask, labels, *seeds)]
    return Batch(*moved[:4], seeds=(moved[4], moved[5]))


@functools.cache
def prepare() -> None:
    """Once per process, before the first model."""
    if not torch.cuda.is_available():
        stand_in_for_cuda()
    stand_in_for_apex()
