"""Decisions of real jobs that `ridge simulate` takes too. Each has one implementation: the trainer, the job script, the diagnosis and the
simulation of a campaign use this file.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any

from ridgeline.configs.errors import UserError
from ridgeline.configs.format import plural
from ridgeline.configs.problem import divisors, multiples
from ridgeline.configs.rules import batch_shards, layout_problems
from ridgeline.configs.schema import CheckpointConfig, Config

LEAST_INTERVAL_S = 600.0
"""Shortest save interval: with a failure every few hours, more frequent saves save little and load the file system."""
QUICK_S = 600
"""A start that fails within this time is followed by a pause before the next one."""
PAUSE_S = 10
"""Pause after the first failure, three times as long after each further one in a row. The pending job holds no node."""
MAX_FAILURES = 5
"""Consecutive failed starts without a new checkpoint after which a job is not requeued."""
LEAST_SHARE = 0.5
"""Share of its nodes on which a simulated job goes on where elastic.min_nodes is not set."""
STRAGGLER_SHARE = 0.10
"""Own time of the slowest device beyond the median one, over the step, from which it is reported as a straggler."""


def young_interval_s(save_s: float, mtbf_s: float) -> float:
    """Return the interval between saves that block training for `save_s` (Young, CACM 17(9), 1974); infinite without failures."""
    return math.sqrt(2 * save_s * mtbf_s)


def save_interval_s(save_s: float, mtbf_s: float, write_s: float) -> float:
    """Return the save interval of a plan: Young's, but at least the time of a write and LEAST_INTERVAL_S."""
    return max(young_interval_s(save_s, mtbf_s), write_s, LEAST_INTERVAL_S)


def configured_interval_s(checkpoint: CheckpointConfig, step_s: float) -> float:
    """Return the mean time between the saves of a config whose steps take `step_s`; infinite where it saves only at the end.

    As trainer.checkpoint.retention.Cadence decides: a save by steps restarts the interval in minutes.
    """
    by_steps_s = checkpoint.every * step_s if checkpoint.every else math.inf
    by_time_s = checkpoint.every_minutes * 60 if checkpoint.every_minutes else math.inf
    if math.isinf(by_steps_s):
        return by_time_s
    return by_steps_s / math.ceil(by_steps_s / by_time_s) if by_time_s < by_steps_s else by_steps_s


def requeue_pause_s(failures: Any, ran_s: Any) -> Any:
    """Return the pause before the next start, in seconds, as launch/slurm/supervise.sh computes it. Numbers or arrays.

    Args:
      failures: failed starts in a row without a new checkpoint, this one included; at least 1.
      ran_s: how long this start ran.
    """
    return (ran_s < QUICK_S) * PAUSE_S * 3 ** (failures - 1)


def step_limit_s(least_s: float, usual_s: float | None, factor: float) -> float:
    """Return the time without a finished step after which the watchdog ends a process: `factor` usual steps, at least `least_s`."""
    return max(least_s, factor * (usual_s or 0.0))


def elastic_config(config: Config, nodes: int, devices_per_node: int) -> Config:
    """Return the config for another number of nodes: the same global batch and data order, another mesh and accumulation.

    Only `data` and `fsdp` change. `fsdp` keeps its size if that divides; else the next larger size that the model allows, else the next
    smaller one. Accumulation is the smallest with which no device has more rows at a time than before.

    Args:
      config: with the mesh of the whole job (no -1).
      nodes, devices_per_node: of the new start.

    Raises:
      UserError: the kept axes, the batch or the model do not divide over the devices; the message has the number of nodes.
    """
    sizes, count = config.mesh.sizes, nodes * devices_per_node
    kept = {axis: size for axis, size in sizes.items() if axis not in ("data", "fsdp") and size > 1}
    group = math.prod(kept.values())
    where = f"{plural(nodes, 'node')} ({plural(count, 'device')})"
    if count % group:
        named = " x ".join(f"mesh.{axis}={size}" for axis, size in kept.items())
        works = " or ".join(plural(n, "node") for n in _around(nodes, group // math.gcd(group, devices_per_node)))
        raise UserError(f"{named} does not divide {where}; {works} works")
    if count // group == sizes["data"] * sizes["fsdp"]:
        return config
    problem = ""
    for mesh in _shard_sizes(sizes, count // group):
        for accumulation in _accumulations(config, mesh):
            changed = config.model_copy(
                update={
                    "mesh": config.mesh.model_copy(update=mesh),
                    "trainer": config.trainer.model_copy(update={"accumulation": accumulation}),
                }
            )
            problems = layout_problems(changed, mesh)
            if not problems:
                return changed
            problem = problem or problems[0].message
    shards = batch_shards(config, sizes | {"data": count // group, "fsdp": 1})
    if not problem:
        rows = config.data.batch_size
        problem = f"data.batch_size={rows} does not divide by {shards} (data.batch_size={multiples(rows, shards)} works)"
    raise UserError(f"no layout on {where}: {problem}")


def elastic_sizes(config: Config, nodes: Iterable[int], devices_per_node: int) -> tuple[dict[int, Config], dict[int, str]]:
    """Return number of nodes -> config of those that have a layout, largest first, and number of nodes -> reason of the others."""
    found, without = dict[int, Config](), dict[int, str]()
    for count in sorted(nodes, reverse=True):
        try:
            found[count] = elastic_config(config, count, devices_per_node)
        except UserError as error:
            without[count] = str(error)
    return found, without


def elastic_size(sizes: Iterable[int], nodes: int) -> int:
    """Return on how many of `nodes` good nodes a job goes on, of the sizes that have a layout; 0: it waits for more."""
    return max((size for size in sizes if size <= nodes), default=0)


def _around(value: int, of: int) -> list[int]:
    below = value // of * of
    return [below, below + of] if below else [of]


def _shard_sizes(sizes: dict[str, int], shards: int) -> Iterator[dict[str, int]]:
    """Yield the mesh sizes with `shards` = data x fsdp, the preferred ones first."""
    wanted = sizes["fsdp"]
    for fsdp in sorted(divisors(shards), key=lambda size: (size < wanted, abs(size - wanted))):
        yield sizes | {"data": shards // fsdp, "fsdp": fsdp}


def _accumulations(config: Config, mesh: dict[str, int]) -> Iterator[int]:
    """Yield the numbers of microbatches with at most as many rows per device as the config has, ascending."""
    rows = config.data.batch_size
    most = max(1, rows // (config.trainer.accumulation * batch_shards(config, config.mesh.sizes)))
    shards = batch_shards(config, mesh)
    if rows % shards:
        return
    for accumulation in divisors(rows // shards):
        if rows // shards // accumulation <= most:
            yield accumulation
