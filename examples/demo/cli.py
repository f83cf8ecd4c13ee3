"""The command line and the course of a run: data, model, phase 1, phase 2, comparison, report."""

from __future__ import annotations

import argparse
import dataclasses
import pathlib
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from flax import nnx
from rich.console import Console

import examples.demo
from examples.demo import compare, progress, report, rl, sft, stored
from examples.demo.evaluate import Evaluator
from examples.demo.model import Config, Transformer, make_mesh, put_on_mesh
from examples.demo.progress import Progress
from examples.demo.text import VOCAB_SIZE, load_corpus
from lce_jax import Plan, explain
from lce_jax.explain._arguments import not_negative, positive

if TYPE_CHECKING:
    from jax.sharding import Mesh

    from examples.demo.evaluate import Evaluation
    from examples.demo.text import Corpus

_SFT_STEPS, _RL_STEPS = 60, 10  # under two minutes on two cores of a CPU


def main(arguments: list[str] | None = None) -> int:
    """Runs the demo. Exits with a message if an option is invalid."""
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.rl_steps is None:
        options.rl_steps = min(options.steps, _RL_STEPS)
    mesh = make_mesh()
    try:
        options.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(f"argument --out: {error}")
    with jax.set_mesh(mesh):
        _run(options, mesh, _plan_head(mesh), Console())
    return 0


@dataclasses.dataclass(frozen=True)
class _Course:
    """The common settings of all training runs. Each run starts from the same weights and sees the same text."""

    options: argparse.Namespace
    mesh: Mesh
    progress: Progress
    corpus: Corpus

    @property
    def sft_config(self) -> sft.SftConfig:
        return sft.SftConfig(self.options.steps).fit_to_mesh(self.mesh)

    @property
    def rl_config(self) -> rl.RlConfig:
        return rl.RlConfig(self.options.rl_steps).fit_to_mesh(self.mesh)

    def new_model(self) -> Transformer:
        return Transformer(_model_config(self.mesh, self.corpus.vocab_size), rngs=nnx.Rngs(self.options.seed))

    def phase_1(self, name: str, model: Transformer, **head: Any) -> list[float]:
        training = sft.train(model, self.corpus, self.sft_config, self.mesh, self.options.seed, **head)
        work = (progress.FIRST_STEP, 1)
        return self.progress.collect(name, training, self.options.steps, work, lambda loss: f"loss {loss:.2f}")

    def phase_2(self, model: Transformer) -> list[rl.RlMetrics]:
        improving = rl.train(model, self.corpus, self.rl_config, self.mesh, self.options.seed)
        work, total = (progress.FIRST_RL_STEP, progress.RL_STEP), self.options.rl_steps
        return self.progress.collect("phase 2", improving, total, work, lambda step: f"reward {step.reward:.2f}")

    def evaluate(self, evaluator: Evaluator, model: Transformer) -> Evaluation:
        evaluation = evaluator(model)
        self.progress.done += progress.EVALUATION
        return evaluation


def _run(options: argparse.Namespace, mesh: Mesh, plan: Plan, console: Console) -> None:
    timer = Progress(console, _total_work(options, sft.supports_threshold(plan)))
    shape = " × ".join(f"{name} {size}" for name, size in mesh.shape.items())
    console.print(f"Mesh: {shape}, of {mesh.devices.flat[0].device_kind} devices. Seed {options.seed}.")
    with console.status("training a tokenizer on the sources of Python's standard library"):
        corpus = load_corpus()
    timer.done += progress.TEXT
    timer.print(f"Text: {len(corpus.train):,} tokens to train on, {len(corpus.held_out):,} in held-out files")
    course = _Course(options, mesh, timer, corpus)
    model = course.new_model()
    console.print(f"Model: {model.num_parameters():,} parameters. Its head on a training batch, per device:")
    console.print(str(plan), highlight=False, soft_wrap=True)
    evaluator = Evaluator.create(corpus, course.rl_config, mesh, options.seed)

    stages = [course.evaluate(evaluator, model)]
    losses = course.phase_1("phase 1", model)
    stages.append(course.evaluate(evaluator, model))
    repeated = course.phase_1("phase 1, logits stored", course.new_model(), head_loss=stored.loss)
    stored_run = sft.SecondRun(losses, repeated)
    threshold_run = None
    if sft.supports_threshold(plan):
        second_model = course.new_model()
        repeated = course.phase_1("phase 1, gradient_threshold", second_model, head_loss=sft.loss_with_threshold)
        dropped_mass = float(sft.dropped_mass(second_model, put_on_mesh(mesh, evaluator.windows)))
        threshold_run = sft.SecondRun(losses, repeated, dropped_mass)
    metrics = course.phase_2(model)
    stages.append(course.evaluate(evaluator, model))
    comparison = compare.compare(model, evaluator.windows[: 2 * course.sft_config.batch], mesh)
    report.print_examples(console, stages)
    report.print_tables(console, stages, evaluator.real_reward, stored_run, threshold_run, comparison)
    path = options.out / "curves.png"
    report.draw(path, metrics, stages, evaluator.real_reward, stored_run, threshold_run)
    console.print(f"Curves: {path}. {timer.seconds:.0f} s in all.", soft_wrap=True)


def _total_work(options: argparse.Namespace, threshold: bool) -> int:
    """Returns the work of all parts of a run, in steps of phase 1."""
    phase_1 = progress.FIRST_STEP + options.steps - 1
    phase_2 = progress.FIRST_RL_STEP + (options.rl_steps - 1) * progress.RL_STEP
    return progress.TEXT + 3 * progress.EVALUATION + (2 + threshold) * phase_1 + phase_2 + progress.COMPARISON


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m examples.demo", description=examples.demo.__doc__)
    parser.add_argument("--steps", type=positive, default=_SFT_STEPS, help=f"steps of phase 1 (default {_SFT_STEPS})")
    parser.add_argument(
        "--rl-steps", type=positive, help=f"steps of phase 2 (default {_RL_STEPS}, or --steps if fewer)"
    )
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("demo-out"), help="folder of the figure")
    parser.add_argument("--seed", type=not_negative, default=0, help="seed of all random numbers (default 0)")
    return parser


def _model_config(mesh: Mesh, vocab_size: int) -> Config:
    """Returns a configuration with float32 on a CPU; elsewhere products are bfloat16 and parameters float32."""
    dtype = jnp.float32 if mesh.devices.flat[0].platform == "cpu" else jnp.bfloat16
    return Config(vocab_size, vocab_multiple=128 * mesh.shape["tensor"], dtype=dtype)


def _plan_head(mesh: Mesh) -> Plan:
    """Plans how a device will compute its part of the head on a training batch."""
    model, training = _model_config(mesh, VOCAB_SIZE), sft.SftConfig(steps=1).fit_to_mesh(mesh)
    tokens = (training.batch // mesh.shape["data"], training.length)
    return explain(
        jax.ShapeDtypeStruct((*tokens, model.hidden_size), model.dtype),
        jax.ShapeDtypeStruct((model.padded_vocab_size // mesh.shape["tensor"], model.hidden_size), model.dtype),
        jax.ShapeDtypeStruct(tokens, jnp.int32),
    )
