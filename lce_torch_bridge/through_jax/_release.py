"""JAX's memory back to the driver between phases: its clients end, and the next call makes new ones."""

from __future__ import annotations

import gc
import time
import weakref
from typing import Any

import jax
import jax.extend

from lce_torch_bridge.through_jax import _dlpack as dlpack
from lce_torch_bridge.through_jax import _programs
from lce_torch_bridge.through_jax import _runtime as runtime

SHOWN = 3  # arrays that a message names
PATIENCE = 1.0  # seconds for JAX's threads: they drop what a finished program read only after its results are ready


def release() -> None:
    """Gives JAX's pool of GPU memory back to others on the same GPU, between training and generation for example.

    JAX's clients end, and with them its pool and its compiled programs. The next call starts JAX again and compiles
    what it runs (``jax.config.update("jax_compilation_cache_dir", ...)`` keeps programs on disk). Before it, `init` may
    choose again. The CUDA driver keeps about 530 MiB for the process. If JAX has not started, nothing happens.

    Nothing may be left in JAX's memory: no gradients, which lie in it until they are summed or copied, and no JAX
    arrays of your own. It waits up to a second for what JAX's own threads still hold. Devices and meshes of JAX
    that you hold cannot be used afterwards.

    Raises:
        RuntimeError: something is left, and nothing is released; something holds a client of JAX, and its pool stays;
            or the process is a child of ``os.fork`` whose parent had started JAX.

    Example:
        >>> import lce_torch_bridge
        >>> optimizer.zero_grad(set_to_none=True)  # doctest: +SKIP
        >>> lce_torch_bridge.release()  # doctest: +SKIP
    """
    if not runtime._jax_has_started():
        return
    runtime.start()  # raises in a fork
    clients = jax.extend.backend.backends()
    left = _what_stays(clients)
    if left:
        some = ", ".join(f"{array.dtype}{list(array.shape)}" for array in left[:SHOWN])
        raise RuntimeError(
            f"JAX's memory still holds arrays, {len(left)} in number, of them {some}: drop them first; gradients of "
            "the model with optimizer.zero_grad(set_to_none=True)"
        )
    dlpack.forget()
    ended = {name: weakref.ref(client) for name, client in clients.items()}
    del clients, left
    _programs.cache_structure.cache_clear()
    runtime.forget()
    jax.extend.backend.clear_backends()
    gc.collect()
    alive = [name for name, client in ended.items() if client() is not None]
    if alive:
        raise RuntimeError(
            f"JAX's memory is not given back, because something holds its {', '.join(alive)} client: drop devices, "
            "meshes, shardings and compiled functions of JAX before release()"
        )


def _what_stays(clients: dict[str, Any]) -> list[jax.Array]:
    """The arrays in JAX's memory after its work is done and its threads have dropped what that work read.

    They leave it to the next collection of garbage.
    """
    deadline = time.monotonic() + PATIENCE
    while True:
        gc.collect()
        left = [array for client in clients.values() for array in client.live_arrays()]
        if not left or time.monotonic() > deadline:
            return left
        jax.block_until_ready(left)
        del left
        time.sleep(0.01)
