"""Find the processes of a run (`describe`) and connect them (`join`)."""

from ridgeline.launch.cluster.detect import Cluster, Flags, describe, summary
from ridgeline.launch.cluster.join import ClusterError, Joined, Preempted, configure_runtime, join
from ridgeline.launch.cluster.link import Link

__all__ = ["Cluster", "ClusterError", "Flags", "Joined", "Link", "Preempted", "configure_runtime", "describe", "join", "summary"]
