"""MaxText (0.2.5) without logits: this package computes the loss that ``num_vocab_tiling`` selects.

Run this in place of ``python -m maxtext.trainers.pre_train.train``, with its arguments:

    PYTHONPATH=$PWD/examples python -m maxtext_head base.yml run_name=... num_vocab_tiling=2
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from absl import app
from flax import nnx
from maxtext.trainers.pre_train import train
from maxtext.utils import max_utils

from lce_jax import linear_logprobs

calls = 0  # traced in this process


def head(model: Any, config: Any, dtype: Any) -> dict[str, Any]:
    """Returns the weight in the dtype of its products, and the options of MaxText's head."""
    if config.parameter_memory_host_offload:
        raise NotImplementedError("parameter_memory_host_offload=true: this recipe takes the head from the device")
    layer = model.token_embedder if config.logits_via_embedding else model.decoder.logits_dense
    fields = [name for name, x in vars(layer).items() if isinstance(x, nnx.Variable | nnx.Module)]
    if more := [name for name in fields if name not in ("embedding", "kernel")]:
        raise NotImplementedError(
            f"the head holds {' and '.join(more)}, which this loss does not read: leave it out of LoRA "
            "(lora.lora_module_path) and of quantization (quantize_logits_proj=false)"
        )
    if config.logits_via_embedding:
        return {
            "weight": jnp.asarray(model.token_embedder.embedding[...], jnp.bfloat16).astype(dtype),  # as MaxText does
            "logit_scale": config.emb_dim**-0.5 if config.normalize_embedding_logits else 1.0,
            "logit_softcap": config.final_logits_soft_cap or None,
        }
    dense = model.decoder.logits_dense
    if dense.kernel.dtype not in (jnp.float32, jnp.bfloat16):
        raise NotImplementedError(f"the head's kernel is {dense.kernel.dtype}: this recipe takes float32 or bfloat16")
    weight = dense.kernel[...].astype(dense.dtype)
    return {"weight": weight, "weight_layout": "hv", "precision": str(config.matmul_precision.value)}


def loss(model: Any, hidden_states: jax.Array, data: Any, config: Any, is_train: bool) -> tuple[jax.Array, jax.Array]:
    """Replaces ``vocab_tiling_nnx_loss``: returns the sums of the cross entropy with z-loss, and of the z-loss."""
    global calls
    if calls == 0:
        print("maxtext_head: the loss comes from lce_jax", flush=True)
    calls += 1
    decoder = model.decoder
    hidden = decoder.dropout(
        decoder.decoder_norm(hidden_states), deterministic=not (is_train and config.enable_dropout)
    )
    counts = data["targets_segmentation"] != 0
    options = head(model, config, hidden.dtype)
    out = linear_logprobs(hidden, labels=data["targets"], where=counts, entropy=False, **options)
    z_loss = config.z_loss_multiplier * jnp.sum(out.lse**2)  # both are 0 where a token does not count
    return z_loss - jnp.sum(out.logprobs), z_loss


def refuse_logits(*_: Any, **__: Any) -> Any:
    """Replaces the function that MaxText's trainer calls without ``num_vocab_tiling``."""
    raise RuntimeError("MaxText computes logits: set num_vocab_tiling=2")


def install() -> None:
    train.vocab_tiling_nnx_loss = loss
    max_utils.cross_entropy_with_logits = refuse_logits


if __name__ == "__main__":
    install()
    app.run(train.main)
