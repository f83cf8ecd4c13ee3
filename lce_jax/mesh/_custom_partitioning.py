"""A function with its own rule for XLA's partitioner: `custom_partitioning`, and what it lacks.

It cannot be exported, and if no mesh is set where the program is lowered, the shardings that it gives the rule have no
axis names. So a primitive of our own decides at lowering: an exported program gets the plain function, any other the
rule, and `_named` finds the names.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax.experimental.custom_partitioning import custom_partitioning
from jax.extend.core import Primitive, jaxpr_as_fun
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from lce_jax.types import _jax
from lce_jax.types._types import Call, UnsupportedError

_logger = logging.getLogger("lce_jax")


class Partition(NamedTuple):
    """What a rule returns: one device's program, and how its operands and results are split."""

    device: Callable[..., Any]
    operand_specs: Any
    result_specs: Any  # a spec in place of a subtree stands for each of its leaves


@dataclasses.dataclass(frozen=True, eq=False)
class Partitioned:
    """A function and the rule by which XLA partitions it.

    Attributes:
        whole: the function of global arrays.
        rule: ``rule(mesh, shapes, specs)`` of the operands as XLA has split them; returns a `Partition`.
        dimensions: of operands and results, the names of all dimensions in order, ``"b h, v h -> b"``, and of those
            that each device needs whole.
        mesh: the mesh that the operands' types or `jax.set_mesh` name; empty if they name none.
        call: what is static about it.
        unused: what the rule loses of the call, in words.
    """

    whole: Callable[..., Any]
    rule: Callable[[Mesh, Any, Any], Partition]
    dimensions: Callable[[Any, Any], tuple[str, tuple[str, ...]]]
    mesh: AbstractMesh
    call: Call
    unused: tuple[str, ...] = ()

    def __call__(self, *operands: Any) -> Any:
        """The function's results."""
        if self.mesh.size > 1:
            check_rules_are_read(self.call.device.platform, self.mesh, self.call)
            _say_what_xla_loses(self)
        tree: Any = jax.tree.structure(operands)
        flat = jax.tree.leaves(operands)
        closed, shapes = jax.make_jaxpr(lambda *flat: self.whole(*tree.unflatten(flat)), return_shape=True)(*flat)
        results: Any = jax.tree.structure(shapes)
        given = {"function": self, "trees": (tree, results), "names": self.dimensions(operands, shapes)}
        return results.unflatten(_partitioned_p.bind(*flat, whole=closed, **given))


_partitioned_p = Primitive("lce_partitioned")
_partitioned_p.multiple_results = True
_partitioned_p.def_abstract_eval(lambda *_, whole, **__: whole.out_avals)
_partitioned_p.def_impl(lambda *operands, whole, **_: jaxpr_as_fun(whole)(*operands))
_jax.prim_requires_devices_during_lowering.add(_partitioned_p)


def _lower(context: Any, *operands: Any, whole: Any, function: Partitioned, trees: Any, names: Any) -> Any:
    run, call, module = jaxpr_as_fun(whole), function.call, context.module_context
    if module.lowering_parameters.for_export:
        if function.mesh.size > 1:
            warn_once(
                f"jax.export cannot carry the rule by which XLA partitions {call.function}: every device of the "
                f"exported program will compute all of it. Export {call.sharded_function} instead."
            )
    elif getattr(module.axis_context, "num_devices", 1) > 1:
        check_rules_are_read(module.platforms[0], function.mesh, call)
        run = _with_rule(run, function, trees, *names)
    return _jax.mlir.lower_fun(run, multiple_results=True)(context, *operands)


_jax.mlir.register_lowering(_partitioned_p, _lower)


def check_rules_are_read(platform: str | None, mesh: Any, call: Call) -> None:
    """Refuses Auto axes of TPUs, whose compiler reads no partitioning rule; ``mesh`` may be empty.

    libtpu's table of functions has no place to register one, with a TPU as without:
    https://github.com/jax-ml/jax/issues/38196. Without the rule XLA would gather the whole weight on every device.
    """
    if platform == "tpu":
        axes = f"the axes of {dict(mesh.shape)}" if mesh.size > 1 else "the mesh's axes"
        raise UnsupportedError(
            f"{call.function} over Auto axes of several TPUs: XLA reads no partitioning rule there, and would "
            f"gather the whole weight. Give {call.sharded_function} {axes} as vocab_axis= and batch_axes=, or make "
            "them Explicit"
        )


def _say_what_xla_loses(function: Partitioned) -> None:
    call = function.call
    for what in function.unused:
        warn_once(
            f"{what} where XLA partitions {call.function} over Auto axes: call {call.sharded_function}, or make "
            "the mesh's axes Explicit"
        )


def _with_rule(
    run: Callable[..., Any], function: Partitioned, trees: Any, names: str, unsplit: tuple[str, ...]
) -> Callable[..., Any]:
    def partition(mesh: Mesh, operands: Any, results: Any) -> Any:
        mesh, specs = _named(mesh, function, operands)
        operand_tree, result_tree = trees
        answer = function.rule(mesh, operand_tree.unflatten(operands), operand_tree.unflatten(specs))
        result_specs = jax.tree.broadcast(answer.result_specs, result_tree.unflatten(results), is_leaf=_is_spec)

        def device(*flat: Any) -> Any:
            with _jax.check_vma(False):  # no varying types here; JAX 0.11 would give `axis_index` one
                return jax.tree.leaves(answer.device(*operand_tree.unflatten(flat)))

        return mesh, device, _shardings(mesh, result_specs), tuple(_shardings(mesh, answer.operand_specs))

    def flat(*operands: Any) -> Any:  # `custom_partitioning` needs a signature, and `run` shows none
        return run(*operands)

    partitioned = custom_partitioning(flat)
    partitioned.def_partition(partition, sharding_rule=names, need_replication_factors=unsplit)
    return partitioned


def _named(mesh: Mesh, function: Partitioned, operands: Any) -> tuple[Mesh, list[P]]:
    """The mesh and the operands' specs over it, decoded here if JAX has not done it."""
    if not mesh.empty:
        return mesh, [x.sharding.spec for x in operands]
    devices = _jax.devices_of(operands[0].sharding)
    if function.mesh.empty:
        call = function.call
        raise UnsupportedError(
            f"{call.function} is called on several devices, and the mesh is not known where it is partitioned: call "
            f"it under jax.set_mesh(mesh), or call {call.sharded_function}"
        )
    mesh = Mesh(devices.reshape(function.mesh.axis_sizes), function.mesh.axis_names)
    return mesh, [_jax.spec_of(x.sharding, mesh) for x in operands]


def _is_spec(x: Any) -> bool:
    return isinstance(x, P)


def _shardings(mesh: Mesh, specs: Any) -> list[NamedSharding]:
    return [NamedSharding(mesh, spec) for spec in jax.tree.leaves(specs, is_leaf=_is_spec)]


@functools.cache
def warn_once(message: str) -> None:
    """Logs a warning, once per message."""
    _logger.warning(message)
