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


def packed_segments(batch_size: int, seq_len: int, *_: Any) -> jax.Array:
    """Returns two sequences in each row, and padding at its end, more in each further row."""
    places = jnp.arange(seq_len)
    return jnp.where(places < seq_len - 2 * jnp.arange(batch_size)[:, None], 1 + (places >= seq_len // 3), 0)


def run_training(**options: Any) -> tuple[list[float], Any]:
    """Trains. Returns the losses that MaxText logs, and the parameters after the steps."""
    states, loop = [], train.train_loop
    with (
        tempfile.TemporaryDirectory() as folder,
        mock.patch.object(train, "train_loop", lambda *operands: states.append(loop(*operands))),
        mock.patch.object(synthetic_data_processing, "_make_packed_segment_ids", packed_segments),
    ):
        settings = TINY | options | {"base_output_directory": folder, "metrics_file": f"{folder}/metrics"}
        train.main(["train", *(f"{name}={value}" for name, value in settings.items())])
        lines = Path(f"{folder}/metrics").read_text().splitlines()
    return [json.loads(line)["learning/loss"] for line in lines], states[0].model


def train_with_their_loss(**options: Any) -> tuple[list[float], Any]:
    names = {"vocab_tiling_nnx_loss": theirs}
    with mock.patch.multiple(train, **names), mock.patch.object(max_utils, "cross_entropy_with_logits", their_logits):
        return run_training(**options)


def largest_error(got: Any, want: Any) -> float:
    """Returns the largest relative error of a parameter, by norm."""
    leaves = [jax.tree.leaves(nnx.to_pure_dict(nnx.filter_state(state, nnx.Param))) for state in (got, want)]
    pairs = [[jnp.asarray(x) for x in pair] for pair in zip(*leaves, strict=True)]
    return max(float(jnp.linalg.norm(x - y) / jnp.linalg.norm(y)) for x, y in pairs)


def compare(**options: Any) -> dict[str, Any]:
    want, want_parameters = train_with_their_loss(**options)
    before = maxtext_head.calls
    got, got_parameters = run_training(**options)
    calls = maxtext_head.calls - before
    return {"want": want, "got": got, "parameters": largest_error(got_parameters, want_parameters), "calls": calls}


def refusal() -> str:
    try:
        return f"{run_training(num_vocab_tiling=1)} instead of a refusal"
    except RuntimeError as refused:
        return str(refused)


def main() -> None:
    maxtext_head.install()
    runs: dict[str, Any] = {
        f"{head}, {mesh}": compare(**HEADS[head], **MESHES[mesh]) for head in HEADS for mesh in MESHES
    }
    tilings = [train_with_their_loss(**HEADS["tied"], **MESHES["4"], num_vocab_tiling=tiles)[1] for tiles in (2, 8)]
    print(json.dumps({"runs": runs, "their tilings": largest_error(*tilings), "refusal": refusal()}))


if __name__ == "__main__":
    main()
