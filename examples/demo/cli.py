"""The command line, and the story it tells: data, model, phase 1, phase 2, comparison, report."""

from __future__ import annotations

import argparse
import dataclasses
import pathlib
import time
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from flax import nnx
from rich.console import Console

import examples.demo
from examples.demo import compare, report, rl, sft, stored
from examples.demo.evaluate import Evaluator
from examples.demo.model import Config, Transformer, make_mesh, put_on_mesh
from examples.demo.text import VOCAB_SIZE, load_corpus
from lce_jax import Plan, explain
from lce_jax.explain._arguments import not_negative, positive

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from jax.sharding import Mesh

    from examples.demo.text import Corpus

_SFT_STEPS, _RL_STEPS = 400, 30


def main(arguments: list[str] | None = None) -> int:
    """Runs the demo; exits with a message if an option makes no sense."""
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
    """What all runs have in common. Each starts from the same weights, and sees the same text."""

    options: argparse.Namespace
    mesh: Mesh
    console: Console
    corpus: Corpus

    @property
    def sft_config(self) -> sft.SftConfig:
        return sft.SftConfig(self.options.steps).on(self.mesh)

    @property
    def rl_config(self) -> rl.RlConfig:
        return rl.RlConfig(self.options.rl_steps).on(self.mesh)

    def new_model(self) -> Transformer:
        return Transformer(_model_config(self.mesh, self.corpus.vocab_size), rngs=nnx.Rngs(self.options.seed))

    def phase_1(self, name: str, model: Transformer, **head: Any) -> list[float]:
        training = sft.train(model, self.corpus, self.sft_config, self.mesh, self.options.seed, **head)
        return _tracked(self.console, name, training, self.options.steps, lambda loss: f"loss {loss:.2f}")

    def phase_2(self, name: str, model: Transformer, **head: Any) -> list[rl.RlMetrics]:
        improving = rl.train(model, self.corpus, self.rl_config, self.mesh, self.options.seed, **head)
        return _tracked(self.console, name, improving, self.options.rl_steps, lambda step: f"reward {step.reward:.2f}")

    def with_stored_logits(self) -> report.Curves:
        model = self.new_model()
        losses = self.phase_1("phase 1, logits stored", model, loss_of_head=stored.loss)
        return report.Curves(losses, self.phase_2("phase 2, logits stored", model, logprobs_of_head=stored.logprobs))


def _run(options: argparse.Namespace, mesh: Mesh, plan: Plan, console: Console) -> None:
    start = time.perf_counter()
    shape = " × ".join(f"{name} {size}" for name, size in mesh.shape.items())
    console.print(f"Mesh: {shape}, of {mesh.devices.flat[0].device_kind} devices. Seed {options.seed}.")
    with console.status("training a tokenizer on the sources of Python's standard library"):
        corpus = load_corpus()
    console.print(f"Text: {len(corpus.train):,} tokens to train on, {len(corpus.held_out):,} in files held out.")
    course = _Course(options, mesh, console, corpus)
    model = course.new_model()
    console.print(f"Model: {model.num_parameters():,} parameters. Its head on a training batch, per device:")
    console.print(str(plan), highlight=False, soft_wrap=True)
    evaluate = Evaluator.create(corpus, course.rl_config, mesh, options.seed)

    stages = [evaluate(model)]
    losses = course.phase_1("phase 1", model)
    stages.append(evaluate(model))
    again = None
    if sft.leaves_out(plan):
        other = course.new_model()
        repeated = course.phase_1("phase 1 again", other, loss_of_head=sft.loss_with_threshold)
        again = sft.SecondRun(losses, repeated, float(sft.dropped_mass(other, put_on_mesh(mesh, evaluate.windows))))
    curves = report.Curves(losses, course.phase_2("phase 2", model))
    stages.append(evaluate(model))
    with_stored = course.with_stored_logits()
    comparison = compare.compare(model, evaluate.windows[: 2 * course.sft_config.batch], mesh)
    report.print_examples(console, stages)
    report.print_tables(console, stages, evaluate.real_reward, again, comparison)
    console.print(report.distance(curves, with_stored), highlight=False, soft_wrap=True)
    path = options.out / "curves.png"
    report.draw(path, curves, with_stored, stages, evaluate.real_reward, again)
    console.print(f"Curves: {path}. {time.perf_counter() - start:.0f} s in all.", soft_wrap=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m examples.demo", description=examples.demo.__doc__)
    parser.add_argument("--steps", type=positive, default=_SFT_STEPS, help=f"of phase 1 (default {_SFT_STEPS})")
    parser.add_argument("--rl-steps", type=positive, help=f"of phase 2 (default {_RL_STEPS}, or --steps if fewer)")
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("demo-out"), help="folder of the figure")
    parser.add_argument("--seed", type=not_negative, default=0, help="of everything random (default 0)")
    return parser


def _model_config(mesh: Mesh, vocab_size: int) -> Config:
    """float32 where that is fast; elsewhere matrix products in bfloat16 over float32 parameters."""
    dtype = jnp.float32 if mesh.devices.flat[0].platform == "cpu" else jnp.bfloat16
    return Config(vocab_size, vocab_multiple=128 * mesh.shape["tensor"], dtype=dtype)


def _plan_head(mesh: Mesh) -> Plan:
    """How a device will compute its share of the head on a training batch."""
    model, training = _model_config(mesh, VOCAB_SIZE), sft.SftConfig(steps=1).on(mesh)
    tokens = (training.batch // mesh.shape["data"], training.length)
    return explain(
        jax.ShapeDtypeStruct((*tokens, model.hidden_size), model.dtype),
        jax.ShapeDtypeStruct((model.padded_vocab_size // mesh.shape["tensor"], model.hidden_size), model.dtype),
        jax.ShapeDtypeStruct(tokens, jnp.int32),
    )


def _tracked[T](console: Console, name: str, items: Iterable[T], total: int, describe: Callable[[T], str]) -> list[T]:
    """The items as a list; a line after each tenth of them."""
    done = []
    for item in items:
        done.append(item)
        if 10 * len(done) // total > 10 * (len(done) - 1) // total:
            console.print(f"{name}: {len(done)} of {total}, {describe(item)}", highlight=False)
    return done
