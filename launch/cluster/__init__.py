"""Which processes make up this run (`describe`), and bringing them together (`join`)."""

from ridgeline.launch.cluster.detect import Cluster, Flags, describe, explain
from ridgeline.launch.cluster.join import ClusterError, Joined, Preempted, configure_runtime, join

__all__ = ["Cluster", "ClusterError", "Flags", "Joined", "Preempted", "configure_runtime", "describe", "explain", "join"]
