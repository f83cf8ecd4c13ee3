"""MaxText's trainer with its loss and with ``examples/maxtext_head.py``; prints JSON.

``python -m examples.frameworks.maxtext_worker``, in an environment with maxtext.
"""

from __future__ import annotations

import os

os.environ.update(JAX_PLATFORMS="cpu", XLA_FLAGS="--xla_force_host_platform_device_count=4")

import json
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
from flax import nnx
from maxtext.input_pipeline import synthetic_data_processing
from maxtext.trainers.pre_train import train
from maxtext.utils import max_utils, vocabulary_tiling

from examples import maxtext_head

TINY = {
    "run_name": "tiny", "hardware": "cpu", "dataset_type": "synthetic", "steps": 4, "enable_checkpointing": False,
    "base_emb_dim": 64, "base_num_query_heads": 4, "base_num_kv_heads": 2, "base_mlp_dim": 128, "head_dim": 16,
    "base_num_decoder_layers": 2, "vocab_size": 512, "per_device_batch_size": 2, "max_target_length": 32,
    "dtype": "float32", "attention": "dot_product", "log_config": False, "skip_jax_distributed_system": True,
    "learning_rate": 3e-3, "num_vocab_tiling": 2,
}  # fmt: skip
HEADS = {
    "own": {"z_loss_multiplier": 1e-2},
    "tied": {"logits_via_embedding": True, "final_logits_soft_cap": 5.0},
}
SQUARE = {"ici_fsdp_parallelism": 2, "ici_tensor_parallelism": 2}
MESHES = {"4": {"ici_fsdp_parallelism": 4}, "2 x 2": SQUARE, "explicit 2 x 2": SQUARE | {"shard_mode": "explicit"}}
theirs, their_logits = vocabulary_tiling.vocab_tiling_nnx_loss, max_utils.cross_entropy_with_logits


def packed(batch_size: int, seq_len: int, *_: Any) -> jax.Array:
    """Two sequences in each row, and an end that does not count, longer in each row."""
    places = jnp.arange(seq_len)
    return jnp.where(places < seq_len - 2 * jnp.arange(batch_size)[:, None], 1 + (places >= seq_len // 3), 0)


def trained(**options: Any) -> tuple[list[float], Any]:
    """The losses that MaxText logs, and the parameters after the steps."""
    states, loop = [], train.train_loop
    with (
        tempfile.TemporaryDirectory() as folder,
        mock.patch.object(train, "train_loop", lambda *given: states.append(loop(*given))),
        mock.patch.object(synthetic_data_processing, "_make_packed_segment_ids", packed),
    ):
        told = TINY | options | {"base_output_directory": folder, "metrics_file": f"{folder}/metrics"}
        train.main(["train", *(f"{name}={value}" for name, value in told.items())])
        lines = Path(f"{folder}/metrics").read_text().splitlines()
    return [json.loads(line)["learning/loss"] for line in lines], states[0].model


def with_their_loss(**options: Any) -> tuple[list[float], Any]:
    names = {"vocab_tiling_nnx_loss": theirs}
    with mock.patch.multiple(train, **names), mock.patch.object(max_utils, "cross_entropy_with_logits", their_logits):
        return trained(**options)


def farthest(got: Any, want: Any) -> float:
    """The largest relative error of a parameter, by norm."""
    leaves = [jax.tree.leaves(nnx.to_pure_dict(nnx.filter_state(state, nnx.Param))) for state in (got, want)]
    pairs = [[jnp.asarray(x) for x in pair] for pair in zip(*leaves, strict=True)]
    return max(float(jnp.linalg.norm(x - y) / jnp.linalg.norm(y)) for x, y in pairs)


def compared(**options: Any) -> dict[str, Any]:
    want, wanted = with_their_loss(**options)
    before = maxtext_head.calls
    got, gotten = trained(**options)
    calls = maxtext_head.calls - before
    return {"want": want, "got": got, "parameters": farthest(gotten, wanted), "calls": calls}


def refusal() -> str:
    try:
        return f"{trained(num_vocab_tiling=1)} instead of a refusal"
    except RuntimeError as refused:
        return str(refused)


def main() -> None:
    maxtext_head.install()
    found: dict[str, Any] = {
        f"{head}, {mesh}": compared(**HEADS[head], **MESHES[mesh]) for head in HEADS for mesh in MESHES
    }
    tilings = [with_their_loss(**HEADS["tied"], **MESHES["4"], num_vocab_tiling=tiles)[1] for tiles in (2, 8)]
    print(json.dumps({"runs": found, "their tilings": farthest(*tilings), "refusal": refusal()}))


if __name__ == "__main__":
    main()
