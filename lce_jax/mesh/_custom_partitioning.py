"""Attaches a partitioning rule for XLA to a function; the rule itself is `lce_jax.run._partitioning.partition`.

This module works around two limits of JAX's `custom_partitioning`. JAX cannot export such a function. So a primitive
decides at lowering: an exported program gets the plain function, and every other program the function with its rule. If
no mesh is set when the program is lowered, the shardings that the rule receives have no axis names. `_find_names` finds
the names.
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
    """The result of a rule: one device's program, and the partition specs of its operands and results."""

    device: Callable[..., Any]
    operand_specs: Any
    result_specs: Any  # a spec in place of a subtree applies to each leaf


@dataclasses.dataclass(frozen=True, eq=False)
class Partitioned:
    """A function, and the rule with which XLA partitions the function.

    Attributes:
        function: takes and returns global arrays.
        rule: ``rule(mesh, shapes, specs)`` returns a `Partition`. The specs say how XLA has split the operands.
        dimensions: ``dimensions(operands, results)`` returns the names of all dimensions, such as ``"b h, v h -> b"``,
            and the names of the dimensions that must be replicated.
        mesh: the mesh of the operands' types or of `jax.set_mesh`; empty if there is none.
        call: describes the call, for messages.
        unused: a phrase for each option that has no effect under the rule.
    """

    function: Callable[..., Any]
    rule: Callable[[Mesh, Any, Any], Partition]
    dimensions: Callable[[Any, Any], tuple[str, tuple[str, ...]]]
    mesh: AbstractMesh
    call: Call
    unused: tuple[str, ...] = ()

    def __call__(self, *operands: Any) -> Any:
        """Returns the function's results for global operands."""
        if self.mesh.size > 1:
            check_rules_are_read(self.call.device.platform, self.mesh, self.call)
            _warn_of_unused_options(self)
        tree: Any = jax.tree.structure(operands)
        flat = jax.tree.leaves(operands)
        closed, shapes = jax.make_jaxpr(lambda *flat: self.function(*tree.unflatten(flat)), return_shape=True)(*flat)
        results: Any = jax.tree.structure(shapes)
        static = {"partitioned": self, "trees": (tree, results), "names": self.dimensions(operands, shapes)}
        return results.unflatten(_partitioned_p.bind(*flat, jaxpr=closed, **static))


_partitioned_p = Primitive("lce_partitioned")
_partitioned_p.multiple_results = True
_partitioned_p.def_abstract_eval(lambda *_, jaxpr, **__: jaxpr.out_avals)
_partitioned_p.def_impl(lambda *operands, jaxpr, **_: jaxpr_as_fun(jaxpr)(*operands))
_jax.prim_requires_devices_during_lowering.add(_partitioned_p)


def _lower(context: Any, *operands: Any, jaxpr: Any, partitioned: Partitioned, trees: Any, names: Any) -> Any:
    run, call, module = jaxpr_as_fun(jaxpr), partitioned.call, context.module_context
    if module.lowering_parameters.for_export:
        if partitioned.mesh.size > 1:
            warn_once(
                f"jax.export cannot carry the rule by which XLA partitions {call.function}: every device of the "
                f"exported program will compute all of it. Export {call.sharded_function} instead."
            )
    elif getattr(module.axis_context, "num_devices", 1) > 1:
        check_rules_are_read(module.platforms[0], partitioned.mesh, call)
        run = _attach_rule(run, partitioned, trees, *names)
    return _jax.mlir.lower_fun(run, multiple_results=True)(context, *operands)


_jax.mlir.register_lowering(_partitioned_p, _lower)


def check_rules_are_read(platform: str | None, mesh: Any, call: Call) -> None:
    """Refuses Auto axes on TPUs, because the TPU compiler ignores partitioning rules. ``mesh`` may be empty.

    libtpu's table of functions has no entry for registering a rule: https://github.com/jax-ml/jax/issues/38196. Without
    the rule, XLA would gather the full weight on every device.
    """
    if platform == "tpu":
        axes = f"the axes of {dict(mesh.shape)}" if mesh.size > 1 else "the mesh's axes"
        raise UnsupportedError(
            f"{call.function} over Auto axes of several TPUs: XLA reads no partitioning rule there, and would "
            f"gather the whole weight. Give {call.sharded_function} {axes} as vocab_axis= and batch_axes=, or make "
            "them Explicit"
        )


def _warn_of_unused_options(partitioned: Partitioned) -> None:
    call = partitioned.call
    for unused in partitioned.unused:
        warn_once(
            f"{unused} where XLA partitions {call.function} over Auto axes: call {call.sharded_function}, or make "
            "the mesh's axes Explicit"
        )


def _attach_rule(
    run: Callable[..., Any], partitioned: Partitioned, trees: Any, names: str, replicated: tuple[str, ...]
) -> Callable[..., Any]:
    """Returns ``run`` with the rule attached.

    ``names`` names all dimensions, and ``replicated`` those that are not split.
    """

    def partition(mesh: Mesh, operands: Any, results: Any) -> Any:
        mesh, specs = _find_names(mesh, partitioned, operands)
        operand_tree, result_tree = trees
        local = partitioned.rule(mesh, operand_tree.unflatten(operands), operand_tree.unflatten(specs))
        result_specs = jax.tree.broadcast(local.result_specs, result_tree.unflatten(results), is_leaf=_is_spec)

        def device(*flat: Any) -> Any:
            with _jax.check_vma(False):  # no type varies here, but JAX 0.11 would type `axis_index` as varying
                return jax.tree.leaves(local.device(*operand_tree.unflatten(flat)))

        return mesh, device, _shardings(mesh, result_specs), tuple(_shardings(mesh, local.operand_specs))

    def flat(*operands: Any) -> Any:  # `custom_partitioning` needs a signature, and `run` has none
        return run(*operands)

    function = custom_partitioning(flat)
    function.def_partition(partition, sharding_rule=names, need_replication_factors=replicated)
    return function


def _find_names(mesh: Mesh, partitioned: Partitioned, operands: Any) -> tuple[Mesh, list[P]]:
    """Returns the mesh and the operands' specs over it. Decodes both from the shardings if JAX passes an empty mesh."""
    if not mesh.empty:
        return mesh, [x.sharding.spec for x in operands]
    devices = _jax.list_devices(operands[0].sharding)
    if partitioned.mesh.empty:
        call = partitioned.call
        raise UnsupportedError(
            f"{call.function} is called on several devices, but XLA's partitioner does not know the mesh: call it "
            f"under jax.set_mesh(mesh), or call {call.sharded_function}"
        )
    mesh = Mesh(devices.reshape(partitioned.mesh.axis_sizes), partitioned.mesh.axis_names)
    return mesh, [_jax.decode_spec(x.sharding, mesh) for x in operands]


def _is_spec(x: Any) -> bool:
    return isinstance(x, P)


def _shardings(mesh: Mesh, specs: Any) -> list[NamedSharding]:
    return [NamedSharding(mesh, spec) for spec in jax.tree.leaves(specs, is_leaf=_is_spec)]


@functools.cache
def warn_once(message: str) -> None:
    """Logs a warning, each message only once."""
    _logger.warning(message)
