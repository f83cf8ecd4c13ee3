"""JAX's memory given back between phases, in a process of its own: its clients end with their pools."""

from __future__ import annotations

import re

from tests.torch.processes import succeed

PROGRAM = """
    import os, threading, warnings, weakref
    import jax, lce_torch_bridge, torch
    from lce_torch_bridge.through_jax import _runtime as runtime
    from tests.torch import problem as p

    def attempt():
        try:
            lce_torch_bridge.release()
        except RuntimeError as error:
            return str(error)
        return "released"

    leaves = p.draw().leaves()
    optimizer = torch.optim.SGD(leaves[:2], lr=0.0)

    def step():
        out = lce_torch_bridge.linear_logprobs(*leaves, cache_bytes=1 << 20)
        p.objective(out, p.seeds_like(leaves.labels)).backward()
        return [x.detach().clone() for x in (*out[:3], leaves.hidden.grad, leaves.weight.grad)]

    print(attempt(), runtime._jax_has_started())
    first = step()
    print(attempt())
    kept = leaves.weight.grad
    assert torch.equal(kept, first[-1])
    lce_torch_bridge.linear_logprobs(*leaves)
    del kept
    optimizer.zero_grad(set_to_none=True)
    client = weakref.ref(jax.devices()[0].client)
    print(attempt(), runtime._jax_has_started(), client())
    lce_torch_bridge.init(allocator="platform")
    assert all(map(torch.equal, step(), first))
    optimizer.zero_grad(set_to_none=True)
    print(attempt())
    ours = jax.numpy.ones(3)
    print(attempt())
    del ours
    device = jax.devices()[0]
    print(attempt())
    del device
    assert all(map(torch.equal, step(), first))
    optimizer.zero_grad(set_to_none=True)
    held_by_a_thread = [jax.numpy.ones(3)]
    threading.Timer(0.2, held_by_a_thread.clear).start()
    print(attempt())
    assert all(map(torch.equal, step(), first))
    warnings.simplefilter("ignore")  # JAX warns of fork by itself
    if os.fork() == 0:
        print(attempt(), flush=True)
        os._exit(0)
    os.wait()
"""


def test_release_and_the_next_call() -> None:
    said = succeed(PROGRAM).splitlines()
    assert said[0] == "released False"
    assert re.match(r"JAX's memory still holds arrays, 2 in number, of them float32\[.* optimizer.zero_grad", said[1])
    assert said[2] == "released False None"
    assert said[3] == "released"
    assert said[4].startswith("JAX's memory still holds arrays, 1 in number, of them float32[3]: drop them first")
    assert said[5].startswith("JAX's memory is not given back, because something holds its cpu client: drop devices")
    assert said[6] == "released"
    assert "after JAX had started there" in said[7]
