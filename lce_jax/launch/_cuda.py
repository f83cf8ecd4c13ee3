"""NVRTC and the CUDA driver, as far as generated code needs them: compile, load, launch."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import importlib.util
import os
import pathlib
import threading
from collections.abc import Callable
from typing import Any

import jax

from lce_jax.launch import _source
from lce_jax.launch._refusal import UnservedError

DRIVER = "libcuda.so.1"
COMPILER = "libnvrtc.so"
VERSIONS = (13, 12)  # of CUDA
CAPABILITY_MAJOR, CAPABILITY_MINOR = 75, 76  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_*


@functools.cache
def _driver() -> Any:
    return ctypes.CDLL(DRIVER)


@functools.cache
def compiler() -> Any:
    """NVRTC: the one that the process has opened (PyTorch's, for example), or an installed one.

    Raises:
        UnservedError: there is none.
    """
    names = [f"{COMPILER}.{version}" for version in VERSIONS]
    for name in [*names, *_installed()]:
        with contextlib.suppress(OSError):
            # It opens this one by its name alone, which some builds find only if it is open already.
            for builtins in pathlib.Path(name).parent.glob("libnvrtc-builtins.so.*"):
                ctypes.CDLL(str(builtins))
            return ctypes.CDLL(name)
    raise UnservedError(f"none of {', '.join(names)} is found, which compile what lies between the kernels")


def _installed() -> list[str]:
    """NVRTC in NVIDIA's Python packages."""
    spec = importlib.util.find_spec("nvidia")
    folders = list(spec.submodule_search_locations or ()) if spec else []
    return sorted(str(path) for folder in folders for path in pathlib.Path(folder).glob(f"*/lib/{COMPILER}.*"))


def compiled(source: str, architecture: str) -> bytes:
    """The code of ``source`` for a GPU: "sm_90". It is kept in JAX's compilation cache directory, if there is one.

    Raises:
        RuntimeError: it does not compile; the message is the compiler's.
    """
    text = (_source.ON_CUDA + source).encode()
    path = _kept_at(text, architecture)
    if path is not None and path.is_file():
        return path.read_bytes()
    code = _compiled(text, architecture)
    if path is not None:
        with contextlib.suppress(OSError):  # a directory that cannot be written, or is full
            path.parent.mkdir(parents=True, exist_ok=True)
            part = path.with_name(f"{path.name}.{os.getpid()}.{threading.get_ident()}")
            part.write_bytes(code)
            part.replace(path)  # no process reads a part of it
    return code


def _kept_at(text: bytes, architecture: str) -> pathlib.Path | None:
    """Where the code is kept: in a local directory, by all that it depends on; None without one."""
    folder = jax.config.jax_compilation_cache_dir if jax.config.jax_enable_compilation_cache else None
    if not folder or "://" in folder:
        return None
    version = ctypes.c_int(), ctypes.c_int()
    check(compiler().nvrtcVersion(*map(ctypes.byref, version)))
    told = f"{architecture} {version[0].value}.{version[1].value}\n".encode()
    return pathlib.Path(folder) / f"lce_jax_launch-{hashlib.sha256(told + text).hexdigest()}.cubin"


def _compiled(text: bytes, architecture: str) -> bytes:
    nvrtc, handle = compiler(), ctypes.c_void_p()
    check(nvrtc.nvrtcCreateProgram(ctypes.byref(handle), text, b"lce_jax_launch.cu", 0, None, None))
    options = (ctypes.c_char_p * 3)(f"--gpu-architecture={architecture}".encode(), b"--std=c++17", b"-w")
    status, size = nvrtc.nvrtcCompileProgram(handle, len(options), options), ctypes.c_size_t()
    if status:
        check(nvrtc.nvrtcGetProgramLogSize(handle, ctypes.byref(size)))
        log = ctypes.create_string_buffer(size.value)
        check(nvrtc.nvrtcGetProgramLog(handle, log))
        raise RuntimeError(f"NVRTC: {log.value.decode()}")
    check(nvrtc.nvrtcGetCUBINSize(handle, ctypes.byref(size)))
    code = ctypes.create_string_buffer(size.value)
    check(nvrtc.nvrtcGetCUBIN(handle, code))
    check(nvrtc.nvrtcDestroyProgram(ctypes.byref(handle)))
    return code.raw


def check(status: int) -> None:
    """Raises if the driver or NVRTC refuses."""
    if status:
        raise RuntimeError(f"CUDA error {status} in lce_jax.launch")


class Module:
    """Generated code, loaded for a device in its primary context. It is never unloaded."""

    def __init__(self, source: str, device: int) -> None:
        self._code = compiled(source, _architecture(device))
        self._module = ctypes.c_void_p()
        check(_driver().cuModuleLoadData(ctypes.byref(self._module), self._code))

    def launch(self, name: str, blocks: int, threads: int) -> Callable[[int, int], Callable[[], int]]:
        """What makes a launch of a function, given a stream and the address of the address of its one argument.

        All arguments are C's already: it costs the host time to convert them.
        """
        function, unsigned, pointer = ctypes.c_void_p(), ctypes.c_uint, ctypes.c_void_p
        check(_driver().cuModuleGetFunction(ctypes.byref(function), self._module, name.encode()))
        shape = map(unsigned, (blocks, 1, 1, threads, 1, 1, 0))
        call = functools.partial(_driver().cuLaunchKernel, function, *shape)
        return lambda stream, address: functools.partial(call, pointer(stream), pointer(address), pointer(None))


def _architecture(device: int) -> str:
    handle, values = ctypes.c_int(), [ctypes.c_int(), ctypes.c_int()]
    check(_driver().cuDeviceGet(ctypes.byref(handle), device))
    for attribute, value in zip((CAPABILITY_MAJOR, CAPABILITY_MINOR), values, strict=True):
        check(_driver().cuDeviceGetAttribute(ctypes.byref(value), attribute, handle))
    return "sm_" + "".join(str(value.value) for value in values)
