"""What the modules for frameworks share: checks, and `Installed`, which replaces a framework's attributes.

Neither this module nor a framework's module imports the framework before ``install`` or ``patch`` is called.
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

from lce_torch_bridge.deferred._heads import defer_logits

if TYPE_CHECKING:
    from lce_torch_bridge.deferred._deferral import Deferral

_logger = logging.getLogger("lce_torch_bridge")
_INHERITED = ...  # marks an attribute that the owner inherited from its class; a copy of a model keeps this marker


class Installed:
    """A handle: the framework uses this package's functions until `undo` or the end of a ``with`` block.

    Attributes:
        calls: how often this package's functions were called in this process.
        deferrals: the handles of `defer_logits` for the framework's models. Each handle counts results and logits.
    """

    def __init__(self, framework: str, tested: str, what: str) -> None:
        self.calls = 0
        self.deferrals: weakref.WeakSet[Deferral] = weakref.WeakSet()
        self._framework, self._tested, self._what = framework, tested, what
        self._replaced: list[tuple[Any, str, Any, Any]] = []  # owner, name, original, replacement
        self._hooks: list[Any] = []

    def count_call(self) -> None:
        """Counts a call. The first call is logged as a warning, because warnings are shown without configuration."""
        self._log_first()
        self.calls += 1

    def defer(self, model: torch.nn.Module) -> None:
        """Applies `defer_logits` to a model of the framework, with ``always=True``."""
        self._log_first()
        self.deferrals.add(defer_logits(model, always=True))

    def _log_first(self) -> None:
        if self.calls == 0 and not self.deferrals:
            _logger.warning("%s: %s from lce_torch_bridge", self._framework, self._what)

    def replace_attributes(
        self, *replacements: tuple[Any, str, Any], hooks: tuple[Callable[..., None], ...] = ()
    ) -> Self:
        """Replaces attributes, each ``(owner, name, replacement)``, and adds hooks that torch calls for every module.

        Attributes that already have their replacement are left alone.
        """
        if not self._replaced:
            self.check_version()
        for owner, name, replacement in replacements:
            self._check(owner, name, replacement)
        for owner, name, replacement in replacements:
            if getattr(owner, name) is not replacement:
                self._replaced.append((owner, name, vars(owner).get(name, _INHERITED), replacement))
                setattr(owner, name, replacement)
        if not self._hooks:
            self._hooks = [*map(register_module_module_registration_hook, hooks)]
        return self

    def undo(self) -> None:
        """Restores all replaced attributes. Does nothing if nothing is installed."""
        for owner, name, _, replacement in self._replaced:
            if getattr(owner, name) is not replacement:
                raise RuntimeError(f"{name} of {_name_owner(owner)} has been replaced since: undo that first")
        while self._replaced:
            owner, name, original, _ = self._replaced.pop()
            if original is _INHERITED:
                delattr(owner, name)
            else:
                setattr(owner, name, original)
        while self._hooks:
            self._hooks.pop().remove()
        while self.deferrals:
            self.deferrals.pop().undo()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.undo()

    def import_module(self, name: str) -> Any:
        """Imports a module of the framework or of its dependencies."""
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as missing:
            raise ModuleNotFoundError(
                f"{missing}: this is for {self._framework} {self._tested}, which is not installed here, or only in part"
            ) from missing

    def check_version(self) -> None:
        """Calls `check_version` for this framework."""
        check_version(self._framework, self._tested, stacklevel=5)

    def _check(self, owner: Any, name: str, replacement: Any) -> None:
        """Raises if the framework lacks the name, or if its function's parameters differ from the replacement's."""
        original = getattr(owner, name, None)
        actual, expected = _parameters(original), _parameters(replacement)
        if original is None or (expected and actual and actual != expected):
            why = (
                f"takes {', '.join(actual)}, and not {', '.join(expected)}" if original is not None else "is not there"
            )
            raise NotImplementedError(
                f"{name} of {_name_owner(owner)} {why}: this is {self._framework} {_version(self._framework)}, and "
                f"lce_torch_bridge is for {self._tested}"
            )


def check_version(framework: str, tested: str, stacklevel: int = 3) -> None:
    """Warns if the framework's version is not the one that this package is tested with."""
    version = _version(framework)
    if not f"{version}.".startswith(f"{tested}."):
        warnings.warn(
            f"lce_torch_bridge is tested with {framework} {tested}, and this is {version}: compare a step's loss with "
            f"that of {framework} alone, or install {tested}",
            RuntimeWarning,
            stacklevel=stacklevel,  # the caller of install or patch
        )


def is_importable(name: str) -> bool:
    """Whether a module is installed. Does not import it, but imports its parent package, if it has one."""
    parent, _, _ = name.rpartition(".")
    return bool((not parent or importlib.util.find_spec(parent)) and importlib.util.find_spec(name))


def _version(framework: str) -> str:
    try:
        return importlib.metadata.version(framework)
    except importlib.metadata.PackageNotFoundError:  # a checkout, not an installation
        return getattr(sys.modules.get(framework.replace("-", "_")), "__version__", "a copy without a version")


def _name_owner(owner: Any) -> str:
    return getattr(owner, "__name__", type(owner).__name__)


def _parameters(function: Any) -> list[str]:
    """Returns the parameter names of a function or autograd function; an empty list if they are unknown."""
    if isinstance(function, type):
        function = getattr(function, "forward", None) or getattr(function, "apply", None)
    if not inspect.isfunction(function):
        return []
    parameters = inspect.signature(function).parameters.values()
    return (
        [] if any(x.kind is x.VAR_POSITIONAL for x in parameters) else [x.name for x in parameters if x.name != "ctx"]
    )


def refuse_wrapped_head(
    heads: tuple[str, ...], model: torch.nn.Module, name: str, module: torch.nn.Module | None
) -> None:
    """Refuses a module that wraps a head, such as an adapter (LoRA).

    torch calls this hook when a module gets a child. The frameworks pass only the head's weight, so an adapter around
    the head would have no effect and would not be trained. A module is a head if its name is in ``heads`` or
    Transformers' ``get_output_embeddings()`` returns it.
    """
    head = model._modules.get(name)
    if module is None or head is None or not any(layer is head for layer in module.children()):
        return
    if hasattr(module, "modules_to_save") or type(module).__module__.startswith("torch."):
        return  # PEFT's modules_to_save and FSDP expose the wrapped module's own weight
    if name in heads or getattr(model, "get_output_embeddings", lambda: None)() is head:
        raise NotImplementedError(
            f"{type(module)} around {name}, of which only the weight is used: leave {name} out of target_modules"
        )


def check_shard(weight: torch.Tensor, vocab_start_index: int, vocab_end_index: int) -> None:
    """Raises if the weight's number of rows differs from the framework's range of the vocabulary."""
    if vocab_end_index - vocab_start_index != weight.shape[0]:
        raise ValueError(f"{vocab_start_index=} and {vocab_end_index=} do not fit weight {tuple(weight.shape)}")


def install_in_ray_workers(installed: Installed, install_in_worker: Callable[[], Installed]) -> Installed:
    """Installs in this process and, by wrapping ``ray.init``, in each worker process when the worker starts."""
    ray = installed.import_module("ray")
    hook = f"{install_in_worker.__module__}.{install_in_worker.__name__}"
    if ray.is_initialized():
        raise RuntimeError(
            "Ray is running, and its workers would not use this package's head: call install() before ray.init(), "
            f"or give ray.init(runtime_env={{'worker_process_setup_hook': {hook!r}}})"
        )
    init = wrap_once(ray.init, _wrap_ray_init, hook)
    return install_in_worker().replace_attributes((ray, "init", init))


def wrap_once(function: Callable[..., Any], wrap: Callable[..., Any], *args: Any) -> Any:
    """Returns ``wrap(function, *args)``, or ``function`` if ``wrap`` has already wrapped it.

    ``wrap`` must be cached and use `functools.wraps`.
    """
    wrapped = getattr(function, "__wrapped__", None)
    is_wrapped = wrapped is not None and wrap(wrapped, *args) is function
    return function if is_wrapped else wrap(function, *args)


@functools.cache
def _wrap_ray_init(original: Callable[..., Any], hook: str) -> Callable[..., Any]:
    @functools.wraps(original)
    def init(*args: Any, runtime_env: Any = None, **kwargs: Any) -> Any:
        runtime_env = dict(runtime_env or {})
        if (other := runtime_env.setdefault("worker_process_setup_hook", hook)) != hook:
            raise ValueError(f"worker_process_setup_hook={other!r} in runtime_env: call {hook} in it, not install()")
        return original(*args, runtime_env=runtime_env, **kwargs)

    return init
