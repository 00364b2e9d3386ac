"""One of four processes of test_checkpoint_processes.py: argv = process, count, port, directory. Prints one JSON object of findings."""

import json
import os
import resource
import sys

os.environ["JAX_PLATFORMS"] = "cpu"
process, count, port, root = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]

import jax  # noqa: E402
import numpy as np  # noqa: E402
from jax.sharding import AxisType, NamedSharding, PartitionSpec  # noqa: E402

jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.config.update("jax_num_cpu_devices", 2)
jax.distributed.initialize(f"127.0.0.1:{port}", count, process)

from ridgeline.configs.errors import UserError  # noqa: E402
from ridgeline.configs.schema import CheckpointConfig  # noqa: E402
from ridgeline.trainer.checkpoint.checkpointer import Checkpointer  # noqa: E402
from ridgeline.trainer.failures import NumericalFailure  # noqa: E402

mesh = jax.make_mesh((2 * count,), ("fsdp",), axis_types=(AxisType.Auto,))
sharded, replicated = NamedSharding(mesh, PartitionSpec("fsdp")), NamedSharding(mesh, PartitionSpec())
findings: dict = {"process": process}
said: list[str] = []


def values(seed: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {"w": rng.standard_normal((16, 1000), np.float32), "step": np.int32(seed)}


def state(seed: int) -> dict[str, jax.Array]:
    def put(x: np.ndarray) -> jax.Array:
        return jax.make_array_from_callback(x.shape, sharded if x.ndim else replicated, lambda index: x[index])

    return {name: put(np.asarray(x)) for name, x in values(seed).items()}


def equal(found: dict[str, jax.Array], seed: int) -> bool:
    return all(np.array_equal(np.asarray(s.data), values(seed)[name][s.index]) for name in found for s in found[name].addressable_shards)


abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state(0))


def checkpointer(name: str, **settings) -> Checkpointer:
    return Checkpointer(os.path.join(root, name), CheckpointConfig(**settings), log=said.append)


# From one process: restored here onto four.
restored, metadata = checkpointer("from_one").restore(abstract)
findings["from_one"] = [metadata["step"], metadata["process_count"], equal(restored, 5)]

# Damage in the newest step: the same verdict everywhere, and only process 0 renames.
restored, metadata = checkpointer("damaged").restore(abstract)
findings["damaged"] = [metadata["step"], equal(restored, 5)]

# All bad: the same refusal everywhere.
try:
    checkpointer("all_bad").restore(abstract)
except UserError as error:
    findings["all_bad"] = str(error)

# To one process, with retention; training (a collective) goes on meanwhile.
saver = checkpointer("from_four", keep_last=1)
for step in (20, 21):
    saved = state(step)
    findings["report"] = saver.save(step, saved, {"data_position": step}).saved
    total = jax.jit(lambda x: x.sum(), out_shardings=replicated)(saved["w"])
    findings["trained"] = bool(np.isfinite(np.asarray(total.addressable_data(0))))
saver.close()
findings["latest"] = saver.latest_step()

# One process cannot write: the save fails in all of them, soon, and the next one works.
saver = checkpointer("one_fails")
saver.save(1, state(1), {}, block=True)
if process == 2:
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, resource.RLIM_INFINITY))
saver.save(2, state(2), {})
saver.wait()
findings["failures"] = saver.failures
if process == 2:
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
saver.save(2, state(2), {})  # the very step that failed
saver.wait()
findings["again"] = saver.failures
saver.save(3, state(3), {})
saver.close()
findings["after_failure"] = [saver.failures, saver.latest_step()]

# A NaN in the last shard alone: no process saves it, and the next save works.
saver = checkpointer("not_finite")
saver.save(30, state(30), {}, block=True)
broken = values(31)
broken["w"][-1, -1] = np.nan
put = {
    name: jax.make_array_from_callback(x.shape, sharded if x.ndim else replicated, lambda index, x=x: x[index])
    for name, x in broken.items()
}
try:
    saver.save(31, put, {})
except NumericalFailure as failure:
    findings["not_finite"] = str(failure)
saver.save(32, state(32), {}, block=True)
findings["after_refusal"] = saver.steps()

# Back to an earlier step.
saver = checkpointer("restart")
saver.restore(abstract, 5)
saver.set_later_aside(5)
findings["restarted"] = saver.steps()

# Minutes: every process has its own clock, running at its own speed; process 0's counts.
now_s = [0.0]
saver = Checkpointer(os.path.join(root, "cadence"), CheckpointConfig(every=0, every_minutes=10, final=False), clock=lambda: now_s[0])
due = []
for step in range(1, 1001):
    now_s[0] = step * 3.0 * (1 + process)
    if saver.should_save(step):
        saver._cadence.saved()
        due.append(step)
findings["due"] = due

findings["said"] = said
print("FINDINGS " + json.dumps(findings), flush=True)
jax.distributed.shutdown()
