"""One of two processes on CPUs: argv = port, index, kind. Process 0 makes a collective of this kind that process 1 does not come to.

Prints as JSON what the stacks of process 0 tell before it and in it, and the collectives of the program in its order.
"""

from __future__ import annotations

import functools
import json
import os
import sys
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ridgeline.hlo.collectives import collectives
from ridgeline.trainer.native_waits import NativeWaits


def local(kind: str, x: jax.Array) -> jax.Array:
    """Return a result of a collective of the kind and, after it, of others. x: [rows of a device, columns]."""
    axis = "data"
    if kind == "all-gather":
        x = x + jax.lax.all_gather(x, axis).sum(0)
    elif kind == "reduce-scatter":
        x = x + jax.lax.psum_scatter(x, axis, tiled=True).sum()
    elif kind == "all-to-all":
        x = jax.lax.all_to_all(x, axis, 0, 0, tiled=True)
    elif kind == "collective-permute":
        x = jax.lax.ppermute(x, axis, [(0, 1), (1, 0)])
    else:
        x = jax.lax.psum(x, axis)
    x = jnp.sin(x)
    x = x * jax.lax.psum(x.sum(), axis)
    return x + jax.lax.all_gather(x, axis).sum(0)


def main() -> None:
    """Make the collective once with both processes, then with process 0 alone."""
    port, rank, kind = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    jax.distributed.initialize(f"127.0.0.1:{port}", 2, rank)
    mesh = Mesh(np.array(jax.devices()), ("data",))
    sharding = NamedSharding(mesh, PartitionSpec("data"))
    x = jax.make_array_from_callback((8, 8), sharding, lambda at: np.ones((8, 8), np.float32)[at])
    spec = PartitionSpec("data")
    both = jax.shard_map(functools.partial(local, kind), mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    step = jax.jit(both).lower(x).compile()
    found = [f"{one.kind} {one.name}" for one in collectives(step.as_text() or "", {"data": 2})]
    jax.block_until_ready(step(x))
    waits = NativeWaits()
    waits.prepare()
    idle = waits.collective()
    if rank:
        time.sleep(120)
        return

    def look() -> None:
        until_s = time.monotonic() + 60
        while time.monotonic() < until_s and (told := waits.collective()) is None:
            time.sleep(0.2)
        time.sleep(1.0)
        told = waits.collective()
        print(json.dumps({"idle": idle, "told": told, "program": found}), flush=True)
        os._exit(0)

    threading.Thread(target=look).start()
    jax.block_until_ready(step(x))


if __name__ == "__main__":
    main()
