"""Which processes make up this run, and joining them through jax.distributed.

Only explicit flags are understood so far. A Slurm step of several tasks without them is refused: N silent independent copies of
one run are the worst outcome.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from configs.errors import UserError
from configs.schema import RuntimeConfig


@dataclass(frozen=True)
class Cluster:
    """The processes of a run and this one's place among them."""

    processes: int
    process: int
    coordinator: str | None
    """host:port where process 0 listens; None for a single process."""
    derived_from: str
    """How these values were found, in words."""


def detect(env: Mapping[str, str], *, coordinator: str | None = None, processes: int | None = None, process: int | None = None) -> Cluster:
    """Describe the cluster from explicit flags, else a single process; raises UserError when they are incomplete."""
    flags = {"--coordinator": coordinator, "--processes": processes, "--process": process}
    given = [name for name, value in flags.items() if value is not None]
    if given:
        missing = [name for name, value in flags.items() if value is None]
        if missing:
            raise UserError(f"{', '.join(given)} given without {', '.join(missing)}: a launch of several processes needs all three")
        assert coordinator is not None and processes is not None and process is not None
        if processes < 1 or not 0 <= process < processes:
            raise UserError(f"--process {process} is not in 0..{processes - 1} (--processes {processes})")
        host, _, port = coordinator.rpartition(":")
        if not host or not port.isdigit():
            raise UserError(f"--coordinator '{coordinator}' is not HOST:PORT")
        return Cluster(processes, process, coordinator, "command-line flags")
    tasks = env.get("SLURM_STEP_NUM_TASKS", "1")
    if tasks.isdigit() and int(tasks) > 1 and "SLURM_PROCID" in env:
        raise UserError(
            f"this is one of {tasks} Slurm tasks, and each would train its own copy: "
            f"pass --coordinator HOST:PORT --processes {tasks} --process $SLURM_PROCID"
        )
    return Cluster(1, 0, None, "single process")


def configure_runtime(runtime: RuntimeConfig) -> None:
    """Apply the runtime section. Must run before the first JAX computation of the process."""
    if runtime.platform != "auto":
        os.environ["JAX_PLATFORMS"] = runtime.platform
    import jax

    if runtime.platform != "auto":
        jax.config.update("jax_platforms", runtime.platform)
    if runtime.cpu_devices > 1:
        jax.config.update("jax_num_cpu_devices", runtime.cpu_devices)
    if runtime.compilation_cache is not None:
        jax.config.update("jax_compilation_cache_dir", str(runtime.compilation_cache))


def join(cluster: Cluster) -> None:
    """Rendezvous with the other processes (a no-op for one)."""
    if cluster.processes == 1:
        return
    import jax

    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(cluster.coordinator, cluster.processes, cluster.process)
