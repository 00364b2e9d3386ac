"""Connect the processes of a run: first the rendezvous, then jax.distributed."""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ridgeline.configs.errors import UserError
from ridgeline.configs.rules import check_devices
from ridgeline.configs.schema import Config, RuntimeConfig
from ridgeline.launch import exit_codes
from ridgeline.launch.cluster import network, rendezvous_client, rendezvous_server
from ridgeline.launch.cluster.detect import PORT_TRIES, Cluster
from ridgeline.launch.cluster.link import Link
from ridgeline.launch.cluster.process_info import ProcessInfo, describe_process
from ridgeline.launch.cluster.rendezvous import SECRET, BackgroundLoop, Doorkeeper, Stopped, Verdict, allow_connections

DOCUMENTATION_ADDRESS = "198.51.100.1"
"""Reserved for documentation, used by no host (RFC 5737): the route to it is the default route."""
HEARTBEAT_S = 100
"""JAX's own detection of a lost process, which ends this one in C++. The link (launch/cluster/link.py) is faster."""
CONNECT_JAX_S = 120
"""Timeout of jax.distributed. Every process has just tested this port, so two minutes cover a slow machine."""


class ClusterError(RuntimeError):
    """The processes cannot form a run; `exit_code` is the exit code of the command."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class Preempted(RuntimeError):
    """This or another process received SIGTERM before training began; there is nothing to save."""


@dataclass(frozen=True)
class Joined:
    """Timing and address of a completed rendezvous."""

    stretches: tuple[tuple[str, float, float], ...] = ()
    """(phase, begin, end) on the monotonic clock, s, in order: `rendezvous`, and `import` while JAX was loaded."""
    roll_call_s: float = 0.0
    """From detection to the verdict, the wait for the slowest process included."""
    connect_s: float = 0.0
    """Loading JAX and connecting jax.distributed."""
    coordinator: str | None = None
    """address:port of jax.distributed; None for a single process."""


def join(
    cluster: Cluster,
    config: Config,
    *,
    stop: Callable[[], bool] = lambda: False,
    log: Callable[[str], None] | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> tuple[Joined, Link]:
    """Connect the processes of a run and load JAX with the settings of `config.runtime`. A single process only loads JAX.

    The link watches the other processes from then on; the caller announces its end on it.

    Args:
      stop: whether this process received SIGTERM; checked ten times a second.
      log: receives progress messages; None: stderr.

    Raises:
      UserError: the processes differ, or their devices do not fit the mesh.
      ClusterError: a missing process, an unreachable port, missing devices.
      Preempted: a process received SIGTERM.
      Every process raises the same error with the same message.
    """
    if cluster.processes == 1:
        if cluster.devices.error is not None:
            raise ClusterError(cluster.devices.error[1], cluster.devices.error[0])
        return Joined((configure_runtime(config.runtime, clock),)), Link()
    begin = clock()
    info = describe_process(cluster, config, os.environ)
    held: list[socket.socket] = []
    link = Link()
    try:
        verdict, link = _rendezvous(cluster, config, info, stop, log or _log, held)
        _raise_refusal(verdict)
        agreed = clock()
        if stop():
            raise Stopped
        loading = configure_runtime(config.runtime, clock)
        _connect(cluster, verdict)
    except Stopped:
        link.leave(exit_codes.PREEMPTED)
        raise Preempted("received SIGTERM") from None
    except BaseException as error:
        link.leave(exit_codes.of(error))
        raise
    finally:
        # Closed only after JAX has its port: until then no other run on this host can take the pair of ports.
        for listener in held:
            listener.close()
    _check_found_devices(info, verdict)
    end = clock()
    stretches = (("rendezvous", begin, loading[1]), loading, ("rendezvous", loading[2], end))
    return Joined(stretches, agreed - begin, end - agreed, network.with_port(verdict.address, verdict.port)), link


def configure_runtime(runtime: RuntimeConfig, clock: Callable[[], float] = time.monotonic) -> tuple[str, float, float]:
    """Apply the runtime section and load JAX; return the time of the import, as one of `Joined.stretches`.

    Must run before the first JAX computation of the process.
    """
    if runtime.platform != "auto":
        os.environ["JAX_PLATFORMS"] = runtime.platform
    begin = clock()
    import jax

    loading = ("import", begin, clock())

    if runtime.platform != "auto":
        jax.config.update("jax_platforms", runtime.platform)
    if runtime.cpu_devices > 1:
        jax.config.update("jax_num_cpu_devices", runtime.cpu_devices)
    if runtime.compilation_cache is not None:
        jax.config.update("jax_compilation_cache_dir", str(runtime.compilation_cache))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)  # a start compiles dozens of small programs
    return loading


def _raise_refusal(verdict: Verdict) -> None:
    if verdict.ok:
        return
    if verdict.exit_code == exit_codes.PREEMPTED:
        raise Preempted(verdict.message)
    if verdict.exit_code == exit_codes.USAGE:
        raise UserError(verdict.message)
    raise ClusterError(verdict.message, verdict.exit_code)


def _rendezvous(
    cluster: Cluster, config: Config, info: ProcessInfo, stop: Callable[[], bool], log: Callable[[str], None], held: list[socket.socket]
) -> tuple[Verdict, Link]:
    """Return the verdict and, if it is good, the connections that stay open."""
    timeout_s = config.runtime.rendezvous_timeout_s
    loop, secret = BackgroundLoop(), os.environ.get(SECRET, "")
    if cluster.process != 0:
        assert cluster.coordinator is not None
        client = rendezvous_client.register(
            info,
            cluster.identity,
            secret,
            coordinator=cluster.coordinator,
            addresses=cluster.addresses,
            ports=cluster.ports,
            timeout_s=timeout_s,
            stop=stop,
            log=log,
        )
        verdict, connection = loop.run(client)
        return verdict, Link() if connection is None else Link(loop, {0: connection}, {0: f"process 0 on {cluster.coordinator}"})
    own = own_addresses(cluster)
    port, listeners = _listen(own, cluster)
    held.extend(listener.dup() for listener in listeners)
    public = [address for address in own if not network.is_private(address)]
    if public:
        log(f"process 0 listens on the public address {public[0]}; to use a private one, pass --coordinator PRIVATE_ADDRESS:PORT")
    if not secret and not all(network.is_loopback(address) for address in own):
        log(f"{SECRET} is not set: any program that reaches process 0 can register; set it to the same random text in all processes")
    allow_connections(cluster.processes)
    server = rendezvous_server.Server(
        own=info,
        doorkeeper=Doorkeeper(cluster.identity, secret, cluster.processes, log),
        name_of=cluster.name_of,
        check_all=lambda infos: _check_devices(config, infos),
        jax_ports=_ports_after(port),
        stop=stop,
        log=log,
        timeout_s=timeout_s,
    )
    verdict = loop.run(server.run(listeners))
    if not verdict.ok:
        return verdict, Link()
    return verdict, Link(loop, server.connections, {process: each.name for process, each in server.infos.items()}, relay=True)


def own_addresses(cluster: Cluster) -> list[str]:
    """Return the addresses on which process 0, on this host, listens; never the unspecified address.

    If the host's name resolves to loopback (127.0.1.1 on Debian) and other hosts take part, the address on the route to them is added.
    Raises ClusterError if this host has none of the coordinator's addresses.
    """
    own = [address for address in cluster.addresses if network.is_own(address)]
    if all(network.is_loopback(address) for address in own):
        for address in _addresses_elsewhere(cluster):
            found = network.address_towards(address)
            if found is not None and found not in own and not network.is_loopback(found):
                own.append(found)
    if any(network.is_private(address) for address in own):
        own = [address for address in own if network.is_private(address)]
    if not own:
        raise ClusterError(
            f"process 0 runs on {socket.gethostname()}, which has none of the addresses of {cluster.coordinator} "
            f"({', '.join(cluster.addresses)}): pass --coordinator with an address of the host of process 0",
            exit_codes.USAGE,
        )
    return own


def _addresses_elsewhere(cluster: Cluster) -> list[str]:
    """Return addresses of another host of the run, or the default route's; none if all processes are on this host."""
    others = sorted({host for host in cluster.hosts if host is not None and host != cluster.coordinator})
    if others:
        return [address for address in network.resolve(others[0]) if not network.is_loopback(address)]
    literal = cluster.coordinator in ("localhost", *cluster.addresses)
    return [] if literal or cluster.local_processes == cluster.processes else [DOCUMENTATION_ADDRESS]


def _listen(own: Sequence[str], cluster: Cluster) -> tuple[int, list[socket.socket]]:
    """Listen on the first port of the sequence that is free together with its successor, on all addresses."""
    for port in cluster.ports:
        listeners = network.listen(own, port)
        if listeners is None:
            continue
        if len(cluster.ports) > 1:
            pair = network.listen(own, port + 1)
            if pair is None:
                for listener in listeners:
                    listener.close()
                continue
            for listener in pair:
                listener.close()
        return port, listeners
    tried = ", ".join(map(str, cluster.ports[:3])) + (", ..." if len(cluster.ports) > 3 else "")
    raise ClusterError(f"process 0 cannot listen on {', '.join(own)}: port {tried} in use", exit_codes.BAD_NODE)


def _ports_after(port: int) -> list[int]:
    after = [number for number in range(port + 1, port + 1 + PORT_TRIES) if number <= network.LAST_PORT]
    return after + [number for number in range(port - 1, port - 1 - PORT_TRIES, -1) if number > 1024]


def _check_devices(config: Config, infos: Sequence[ProcessInfo]) -> tuple[int, str] | None:
    """Return an error if the devices of all processes do not fit mesh, model or batch."""
    counts = [info.devices for info in infos]
    if any(count is None for count in counts):
        return None
    total = sum(count for count in counts if count is not None)
    try:
        check_devices(config, total)
    except UserError as error:
        each = f"{counts[0]} each" if len(set(counts)) == 1 else "+".join(map(str, counts))
        return exit_codes.USAGE, f"{error}; {len(infos)} processes have {total} devices ({each})"
    return None


def _connect(cluster: Cluster, verdict: Verdict) -> None:
    """Start jax.distributed with explicit arguments: its own detection has several errors under Slurm."""
    import jax

    if any(name.lower().endswith("_proxy") for name in os.environ):
        # gRPC would route the coordinator's traffic through the site's web proxy; JAX only warns about it
        exempt = os.environ.get("no_grpc_proxy", os.environ.get("no_proxy", ""))  # noqa: SIM112 - gRPC reads lower case
        os.environ["no_grpc_proxy"] = f"{exempt},{verdict.address}".lstrip(",")  # noqa: SIM112
        jax.config.update("jax_check_proxy_envs", False)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    # its SIGTERM handler would replace trainer.stop's, which works in every phase
    jax.config.update("jax_enable_preemption_service", False)
    where = network.with_port(verdict.address, verdict.port)
    jax.distributed.initialize(
        coordinator_address=where,
        num_processes=cluster.processes,
        process_id=cluster.process,
        local_device_ids=None if cluster.devices.ids is None else list(cluster.devices.ids),
        cluster_detection_method="deactivate",
        initialization_timeout=CONNECT_JAX_S,
        heartbeat_timeout_seconds=HEARTBEAT_S,
        coordinator_bind_address=where,
    )


def _check_found_devices(info: ProcessInfo, verdict: Verdict) -> None:
    """Compare JAX's device count with the expected one. The count is global, so all processes raise together."""
    import jax

    if verdict.devices is None or jax.device_count() == verdict.devices:
        return
    here = jax.local_device_count()
    own = f"; {info.name} has {here} instead of {info.devices}" if here != info.devices else ""
    raise ClusterError(f"JAX found {jax.device_count()} devices, expected {verdict.devices}{own}", exit_codes.BAD_NODE)


def _log(message: str) -> None:
    sys.stderr.write(f"ridge: {message}\n")
