"""Joining the processes of a run: the roll call first, jax.distributed after it."""

from __future__ import annotations

import asyncio
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
from ridgeline.launch.cluster import network, rollcall_client, rollcall_server
from ridgeline.launch.cluster.card import Card, make_card
from ridgeline.launch.cluster.detect import LAST_PORT, PORT_TRIES, Cluster
from ridgeline.launch.cluster.rollcall import Stopped, Verdict

DOCUMENTATION = "198.51.100.1"
"""Nobody has this address (RFC 5737): the route to it is the default route."""
HEARTBEAT_S = 100
CONNECT_JAX_S = 120
"""Everybody has just tried this port, so two minutes are for a slow machine, not for hope."""


class ClusterError(RuntimeError):
    """The processes cannot run together; `exit_code` says how the command ends."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class Preempted(RuntimeError):
    """This or another process was asked to stop before training began; nothing needs saving."""


@dataclass(frozen=True)
class Joined:
    """How the processes of a run came together."""

    stretches: tuple[tuple[str, float, float], ...] = ()
    """(phase, begin, end) by the monotonic clock, s, one after another: `rendezvous`, and `import` where JAX was loaded."""
    roll_call_s: float = 0.0
    """From detection to the verdict: waiting for the slowest process is in it."""
    connect_s: float = 0.0
    """Loading JAX and connecting jax.distributed."""
    coordinator: str | None = None
    """address:port of jax.distributed; None for a single process."""


def join(
    cluster: Cluster,
    config: Config,
    *,
    stop: Callable[[], bool] = lambda: False,
    say: Callable[[str], None] | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Joined:
    """Bring the processes of a run together and load JAX with the settings of `config.runtime`; only the latter for a single process.

    stop: whether this process was asked to end (SIGTERM); looked at ten times a second. Raises UserError (what differs between processes,
    tasks that do not fit the mesh), ClusterError (a missing process, an unreachable port, missing devices), each in every process with the
    same words, and Preempted.
    """
    if cluster.processes == 1:
        if cluster.devices.trouble is not None:
            raise ClusterError(cluster.devices.trouble[1], cluster.devices.trouble[0])
        return Joined((configure_runtime(config.runtime, clock),))
    begin = clock()
    card = make_card(cluster, config, os.environ)
    held: list[socket.socket] = []
    try:
        verdict = _roll_call(cluster, config, card, stop, say or _say, held)
        _raise_refusal(verdict)
        called = clock()
        if stop():
            raise Stopped
        loading = configure_runtime(config.runtime, clock)
        _connect(cluster, verdict)
    except Stopped:
        raise Preempted("asked to stop") from None
    finally:
        # Held until JAX has its port: no other run of this host can take the pair of ports meanwhile.
        for listener in held:
            listener.close()
    _check_found_devices(card, verdict)
    end = clock()
    stretches = (("rendezvous", begin, loading[1]), loading, ("rendezvous", loading[2], end))
    return Joined(stretches, called - begin, end - called, network.with_port(verdict.address, verdict.port))


def configure_runtime(runtime: RuntimeConfig, clock: Callable[[], float] = time.monotonic) -> tuple[str, float, float]:
    """Apply the runtime section; return when JAX was loaded, as one of `Joined.stretches`.

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
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)  # a start runs dozens of small programs: together they count
    return loading


def _raise_refusal(verdict: Verdict) -> None:
    if verdict.ok:
        return
    if verdict.exit_code == exit_codes.PREEMPTED:
        raise Preempted(verdict.message)
    if verdict.exit_code == exit_codes.USAGE:
        raise UserError(verdict.message)
    raise ClusterError(verdict.message, verdict.exit_code)


def _roll_call(
    cluster: Cluster, config: Config, card: Card, stop: Callable[[], bool], say: Callable[[str], None], held: list[socket.socket]
) -> Verdict:
    timeout_s = config.runtime.rendezvous_timeout_s
    if cluster.process != 0:
        assert cluster.coordinator is not None
        return asyncio.run(
            rollcall_client.report(
                card,
                cluster.identity,
                coordinator=cluster.coordinator,
                addresses=cluster.addresses,
                ports=cluster.ports,
                timeout_s=timeout_s,
                stop=stop,
                say=say,
            )
        )
    own = own_addresses(cluster)
    port, listeners = _listen(own, cluster)
    held.extend(listener.dup() for listener in listeners)
    public = [address for address in own if not network.is_private(address)]
    if public:
        say(f"process 0 listens on the public address {public[0]}: pass --coordinator PRIVATE_ADDRESS:PORT to keep this inside the cluster")
    server = rollcall_server.Server(
        card=card,
        identity=cluster.identity,
        name_of=cluster.name_of,
        judge=lambda cards: _judge(config, cards),
        jax_ports=_ports_after(port),
        stop=stop,
        say=say,
        timeout_s=timeout_s,
    )
    return asyncio.run(server.call(listeners))


def own_addresses(cluster: Cluster) -> list[str]:
    """Return the addresses of this host, process 0's, on which the others look for it; never the unspecified one.

    Where the host's own name means loopback (Debian's 127.0.1.1) and other hosts take part, the address on the route to them is added.
    Raises ClusterError when this host has none of the coordinator's addresses.
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
    """Return an address outside of this host towards which the other processes are; none when all are here."""
    others = sorted({host for host in cluster.hosts if host is not None and host != cluster.coordinator})
    if others:
        return [address for address in network.resolve(others[0]) if not network.is_loopback(address)]
    literal = cluster.coordinator in ("localhost", *cluster.addresses)
    return [] if literal or cluster.local_processes == cluster.processes else [DOCUMENTATION]


def _listen(own: Sequence[str], cluster: Cluster) -> tuple[int, list[socket.socket]]:
    """Listen on the first port of the sequence that is free, with its successor, on all our addresses."""
    for port in cluster.ports:
        listeners = rollcall_server.listen(own, port)
        if listeners is None:
            continue
        if len(cluster.ports) > 1:
            pair = rollcall_server.listen(own, port + 1)
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
    after = [number for number in range(port + 1, port + 1 + PORT_TRIES) if number <= LAST_PORT]
    return after + [number for number in range(port - 1, port - 1 - PORT_TRIES, -1) if number > 1024]


def _judge(config: Config, cards: Sequence[Card]) -> tuple[int, str] | None:
    """Refuse processes whose devices together do not fit mesh, model or batch."""
    counts = [card.devices for card in cards]
    if any(count is None for count in counts):
        return None
    total = sum(count for count in counts if count is not None)
    try:
        check_devices(config, total)
    except UserError as error:
        each = f"{counts[0]} each" if len(set(counts)) == 1 else "+".join(map(str, counts))
        return exit_codes.USAGE, f"{str(error).splitlines()[0]}; {len(cards)} processes bring {total} devices ({each})"
    return None


def _connect(cluster: Cluster, verdict: Verdict) -> None:
    """Start jax.distributed with everything spelled out: its own detection is wrong in several ways under Slurm."""
    import jax

    if any(name.lower().endswith("_proxy") for name in os.environ):
        # gRPC would send the coordinator's traffic through a site's web proxy; JAX only warns of that
        exempt = os.environ.get("no_grpc_proxy", os.environ.get("no_proxy", ""))  # noqa: SIM112 - gRPC reads lower case
        os.environ["no_grpc_proxy"] = f"{exempt},{verdict.address}".lstrip(",")  # noqa: SIM112
        jax.config.update("jax_check_proxy_envs", False)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    # its handler would take SIGTERM away from trainer.stop, which does the same in every phase
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


def _check_found_devices(card: Card, verdict: Verdict) -> None:
    """Hold what JAX found against what was promised; all processes see the same sum, so all refuse."""
    import jax

    if verdict.devices is None or jax.device_count() == verdict.devices:
        return
    here = jax.local_device_count()
    own = f"; {card.name} brings {here} instead of {card.devices}" if here != card.devices else ""
    raise ClusterError(f"JAX finds {jax.device_count()} devices, {verdict.devices} were expected{own}", exit_codes.BAD_NODE)


def _say(message: str) -> None:
    print(f"ridge: {message}", file=sys.stderr, flush=True)
