"""What the modules of frameworks share: names of a framework that are ours until `Installed.undo`, and their checks.

Nothing here, and no module of a framework, imports the framework before its ``install`` or ``patch`` is called.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import importlib.util
import inspect
import logging
import sys
import warnings
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Self

import torch
from torch.nn.modules.module import register_module_module_registration_hook

from lce_torch_bridge.deferred._defer import defer_logits

if TYPE_CHECKING:
    from lce_torch_bridge.deferred._deferral import Deferral

_logger = logging.getLogger("lce_torch_bridge")
_NONE = ...  # an attribute that an owner's class has, and not the owner; a copy of a model keeps it


class Installed:
    """This package in the place of a framework's functions, or of a model's, until `undo` or the end of a ``with``.

    Attributes:
        calls: of this package's functions, in this process.
        deferrals: of models that the framework has made: each counts what was served, and stored.
    """

    def __init__(self, framework: str, tested: str, what: str) -> None:
        self.calls = 0
        self.deferrals: weakref.WeakSet[Deferral] = weakref.WeakSet()
        self._framework, self._tested, self._what = framework, tested, what
        self._replaced: list[tuple[Any, str, Any, Any]] = []  # owner, name, what it had, ours
        self._hooks: list[Any] = []

    def count(self) -> None:
        """One call more. The first is logged, as a warning: those are shown where no logging is configured."""
        self._log_first()
        self.calls += 1

    def defer(self, model: torch.nn.Module) -> None:
        """`defer_logits` of a model that the framework has made, without gradients too."""
        self._log_first()
        self.deferrals.add(defer_logits(model, always=True))

    def _log_first(self) -> None:
        if self.calls == 0 and not self.deferrals:
            _logger.warning("%s: %s from lce_torch_bridge", self._framework, self._what)

    def put(self, *places: tuple[Any, str, Any], hooks: tuple[Callable[..., None], ...] = ()) -> Self:
        """Replaces attributes, each ``(owner, name, ours)``, and adds hooks that torch calls for every module.

        What is ours already stays.
        """
        if not self._replaced:
            self.check_version()
        for owner, name, ours in places:
            self._check(owner, name, ours)
        for owner, name, ours in places:
            if getattr(owner, name) is not ours:
                self._replaced.append((owner, name, vars(owner).get(name, _NONE), ours))
                setattr(owner, name, ours)
        if not self._hooks:
            self._hooks = [*map(register_module_module_registration_hook, hooks)]
        return self

    def undo(self) -> None:
        """Every attribute is again what it was. Nothing where nothing is installed."""
        for owner, name, _, ours in self._replaced:
            if getattr(owner, name) is not ours:
                raise RuntimeError(f"{name} of {_shown(owner)} has been replaced since: undo that first")
        while self._replaced:
            owner, name, before, _ = self._replaced.pop()
            if before is _NONE:
                delattr(owner, name)
            else:
                setattr(owner, name, before)
        while self._hooks:
            self._hooks.pop().remove()
        while self.deferrals:
            self.deferrals.pop().undo()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.undo()

    def module(self, name: str) -> Any:
        """One of the framework, or of what it needs."""
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as missing:
            raise ModuleNotFoundError(
                f"{missing}: this is for {self._framework} {self._tested}, which is not installed here, or not whole"
            ) from missing

    def check_version(self) -> None:
        """`check_version` of this framework."""
        check_version(self._framework, self._tested, stacklevel=5)

    def _check(self, owner: Any, name: str, ours: Any) -> None:
        """The framework has the name, and its function the parameters that ours has."""
        theirs = getattr(owner, name, None)
        passed, taken = _parameters(theirs), _parameters(ours)
        if theirs is None or (taken and passed and passed != taken):
            why = f"takes {', '.join(passed)}, and not {', '.join(taken)}" if theirs is not None else "is not there"
            raise NotImplementedError(
                f"{name} of {_shown(owner)} {why}: this is {self._framework} {_version(self._framework)}, and "
                f"lce_torch_bridge is for {self._tested}"
            )


def check_version(framework: str, tested: str, stacklevel: int = 3) -> None:
    """Warns where the framework is not the one that this package is tested with."""
    found = _version(framework)
    if not f"{found}.".startswith(f"{tested}."):
        warnings.warn(
            f"lce_torch_bridge is tested with {framework} {tested}, and this is {found}: compare a step's loss with "
            f"that of {framework} alone, or install {tested}",
            RuntimeWarning,
            stacklevel=stacklevel,  # of who calls install or patch
        )


def is_there(name: str) -> bool:
    """Whether a module is installed, without importing it; of its parent, if it has one, the code runs."""
    parent, _, _ = name.rpartition(".")
    return bool((not parent or importlib.util.find_spec(parent)) and importlib.util.find_spec(name))


def _version(framework: str) -> str:
    try:
        return importlib.metadata.version(framework)
    except importlib.metadata.PackageNotFoundError:  # a checkout on the path
        return getattr(sys.modules.get(framework.replace("-", "_")), "__version__", "a copy without a version")


def _shown(owner: Any) -> str:
    return getattr(owner, "__name__", type(owner).__name__)


def _parameters(function: Any) -> list[str]:
    """The names of a function's parameters, also of autograd's; none where they are not known."""
    if isinstance(function, type):
        function = getattr(function, "forward", None) or getattr(function, "apply", None)
    if not inspect.isfunction(function):
        return []
    given = inspect.signature(function).parameters.values()
    return [] if any(x.kind is x.VAR_POSITIONAL for x in given) else [x.name for x in given if x.name != "ctx"]


def refuse_wrapped_head(
    heads: tuple[str, ...], model: torch.nn.Module, name: str, module: torch.nn.Module | None
) -> None:
    """A hook that torch calls before a module becomes part of another, as when an adapter (LoRA) is put around a layer.

    The frameworks hand over the head's weight alone: an adapter around it would neither count nor train. A head has
    one of the names ``heads``, or is what Transformers calls the model's.
    """
    head = model._modules.get(name)
    if module is None or head is None or not any(layer is head for layer in module.children()):
        return
    if hasattr(module, "modules_to_save") or type(module).__module__.startswith("torch."):
        return  # PEFT's copy in modules_to_save gives its own weight, and FSDP what it wraps
    if name in heads or getattr(model, "get_output_embeddings", lambda: None)() is head:
        raise NotImplementedError(
            f"{type(module)} around {name}, whose weight alone is read: leave {name} out of target_modules"
        )


def check_shard(weight: torch.Tensor, vocab_start_index: int, vocab_end_index: int) -> None:
    """The weight holds the rows that the framework names."""
    if vocab_end_index - vocab_start_index != weight.shape[0]:
        raise ValueError(f"{vocab_start_index=} and {vocab_end_index=} are not of weight {tuple(weight.shape)}")


def with_workers_of_ray(installed: Installed, install_in_worker: Callable[[], Installed]) -> Installed:
    """Installed in this process, and by a ``ray.init`` in each worker process, before anything else runs there."""
    ray = installed.module("ray")
    hook = f"{install_in_worker.__module__}.{install_in_worker.__name__}"
    if ray.is_initialized():
        raise RuntimeError(
            "Ray runs already, and its workers would not have this package's head: call install() before ray.init(), "
            f"or give ray.init(runtime_env={{'worker_process_setup_hook': {hook!r}}})"
        )
    init = around(ray.init, _init_with, hook)
    return install_in_worker().put((ray, "init", init))


def around(present: Callable[..., Any], wrap: Callable[..., Any], *given: Any) -> Any:
    """``wrap(present, *given)``, or ``present`` if it is one already; ``wrap`` is cached and uses `functools.wraps`."""
    wrapped = getattr(present, "__wrapped__", None)
    is_ours = wrapped is not None and wrap(wrapped, *given) is present
    return present if is_ours else wrap(present, *given)


@functools.cache
def _init_with(stock: Callable[..., Any], hook: str) -> Callable[..., Any]:
    @functools.wraps(stock)
    def init(*arguments: Any, runtime_env: Any = None, **named: Any) -> Any:
        runtime_env = dict(runtime_env or {})
        if (other := runtime_env.setdefault("worker_process_setup_hook", hook)) != hook:
            raise ValueError(f"worker_process_setup_hook={other!r} in runtime_env: call {hook} in it, not install()")
        return stock(*arguments, runtime_env=runtime_env, **named)

    return init
