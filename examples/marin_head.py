"""Marin's Levanter without logits: this package computes the next-token loss of every model of `levanter.models`.

    import marin_head
    marin_head.install()  # before the trainer is built

python examples/marin_head.py trains a small Llama of Levanter's, on any device.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import optax
from levanter.layers.attention import AttentionMask
from levanter.models import lm_model
from levanter.models.llama import LlamaConfig
from levanter.models.lm_model import LmExample
from levanter.models.loss import next_token_loss_weight

from lce_jax import linear_cross_entropy

calls = 0  # traced in this process


def next_token_loss(
    Pos: Any, Embed: Any, Vocab: Any, pred_embeddings: hax.NamedArray, pred_lm_head: hax.NamedArray,
    true_ids: hax.NamedArray, loss_weight: hax.NamedArray | None = None, reduction: Callable | None = hax.mean,
    reduction_axis: Any = None, logsumexp_weight: float | None = None, block_size: int | None = None,
    dtype: Any = jnp.float32, logit_soft_cap: float | None = None, precision: Any = None,
) -> hax.NamedArray:  # fmt: skip
    """Replaces ``maybe_fused_next_token_loss``, and takes its arguments."""
    global calls
    calls += 1
    del block_size, dtype  # the tiles are ours, and every sum is float32
    Pos, Embed = (pred_embeddings.resolve_axis(hax.axis_name(axis)) for axis in (Pos, Embed))
    Vocab = pred_lm_head.resolve_axis(hax.axis_name(Vocab))
    rows = tuple(axis for axis in pred_embeddings.axes if axis.name != Embed.name)
    weight = next_token_loss_weight(Pos, loss_weight).broadcast_axis(rows).rearrange(rows)
    losses = linear_cross_entropy(
        pred_embeddings.rearrange((*rows, Embed)).array,
        pred_lm_head.rearrange((Vocab, Embed)).array,
        hax.roll(true_ids, -1, Pos).rearrange(rows).array,
        where=weight.array != 0,
        ignore_index=None,
        reduction="none",
        z_loss=logsumexp_weight or 0.0,
        logit_softcap=logit_soft_cap,
        precision=precision,
    )
    return hax.nn.loss.reduce_loss(hax.named(losses, rows), reduction, reduction_axis, weight=weight)


def check_head(model: Any) -> None:
    """Refuses a head that is more than a weight, because `next_token_loss` gets only the weight."""
    head = getattr(model, "lm_head", None)  # None: tied
    if head is not None and not (type(head) is hax.nn.Linear and head.bias is None and head.reparam.active_scale == 1):
        raise NotImplementedError(
            f"lm_head, {type(head)}, is more than a weight, which is all that this loss reads: no LoRA, bias or scale. "
            "Keep lm_head in LoraConfig's exclude_modules"
        )


def install() -> None:
    """Makes Levanter's models compute their loss without logits."""
    stock = lm_model.LmHeadModel.compute_next_token_loss

    @functools.wraps(stock)
    def compute_next_token_loss(model: Any, *arguments: Any, **named: Any) -> Any:
        check_head(model)
        return stock(model, *arguments, **named)

    lm_model.maybe_fused_next_token_loss = next_token_loss
    lm_model.LmHeadModel.compute_next_token_loss = compute_next_token_loss


def main(steps: int = 5, **options: Any) -> list[float]:
    """Trains a small Llama on ascending tokens; returns the losses."""
    Batch, Vocab = hax.Axis("batch", 4), hax.Axis("vocab", 512)
    config = LlamaConfig(max_seq_len=32, hidden_dim=64, intermediate_dim=128, num_layers=2, num_heads=4, num_kv_heads=4)
    model = config.build(Vocab, key=jax.random.key(0))
    starts = jax.random.randint(jax.random.key(1), (4, 1), 0, 480)
    tokens = hax.named(starts + jnp.arange(32), (Batch, model.Pos))
    example = LmExample(tokens=tokens, loss_weight=hax.ones(tokens.axes), attn_mask=AttentionMask.causal())
    optimizer = optax.adam(3e-3)

    @eqx.filter_jit
    def step(model: Any, state: Any) -> tuple[Any, Any, jax.Array]:
        def loss_of(model: Any) -> jax.Array:
            return model.compute_next_token_loss(example, **options).array

        loss, gradients = eqx.filter_value_and_grad(loss_of)(model)
        updates, state = optimizer.update(gradients, state, eqx.filter(model, eqx.is_inexact_array))
        return eqx.apply_updates(model, updates), state, loss

    state, losses = optimizer.init(eqx.filter(model, eqx.is_inexact_array)), []
    for _ in range(steps):
        model, state, loss = step(model, state)
        losses.append(float(loss))
    return losses


if __name__ == "__main__":
    install()
    print("loss", *(f"{loss:.3f}" for loss in main()), "nats per token")
    assert calls > 0
