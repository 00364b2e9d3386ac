"""Which processes make up this run (`detect`), and joining them through jax.distributed (`join`)."""

from __future__ import annotations

import os

from configs.schema import RuntimeConfig
from launch.cluster.detect import Cluster, Flags, describe, explain
from launch.cluster.join import ClusterError, Preempted, join

__all__ = ["Cluster", "ClusterError", "Flags", "Preempted", "configure_runtime", "describe", "explain", "join"]


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
