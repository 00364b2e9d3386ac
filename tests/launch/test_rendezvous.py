"""The rendezvous over real sockets of this machine: every process receives the same verdict, in bounded time, with the cause."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import json
import os
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from ridgeline.launch import exit_codes
from ridgeline.launch.cluster import network, rendezvous_client
from ridgeline.launch.cluster.detect import Cluster, derive_ports
from ridgeline.launch.cluster.join import ClusterError, own_addresses
from ridgeline.launch.cluster.network import listen
from ridgeline.launch.cluster.process_info import ProcessInfo
from ridgeline.launch.cluster.rendezvous import HELLO_BYTES, Connection, Doorkeeper, Stopped, Verdict, connect, offer
from ridgeline.launch.cluster.rendezvous_server import Server

LOOPBACK = "127.0.0.1"
INFO = ProcessInfo(
    process=0,
    processes=3,
    host="node0",
    pid=100,
    versions={"python": "3.11.7", "jaxlib": "0.10.2"},
    settings={},
    config={"trainer.steps": "5", "seed": "0"},
    code="aaaa1111bbbb",
    source="/project",
    devices=2,
)
KEY = "the secret of the job"
RUNS = (f"test run {os.getpid()} {number}" for number in itertools.count())  # each xdist worker has ports of its own


def info(process: int, **changes: Any) -> ProcessInfo:
    return dataclasses.replace(INFO, process=process, host=f"node{process}", pid=100 + process, **changes)


def server(listeners: Sequence[socket.socket], identity: str, timeout_s: float, stop: Callable[[], bool], **options: Any) -> Any:
    rendezvous = Server(
        own=options.get("own", INFO),
        doorkeeper=Doorkeeper(identity, KEY, 3, options.get("log", lambda message: None)),
        name_of=lambda process: f"process {process} on node{process}",
        check_all=options.get("check_all", lambda infos: None),
        jax_ports=[listeners[0].getsockname()[1] + 1 + step for step in range(8)],
        stop=stop,
        log=options.get("log", lambda message: None),
        timeout_s=timeout_s,
    )
    return rendezvous.run(listeners)


async def client(
    each: ProcessInfo, ports: Sequence[int], identity: str, timeout_s: float, stop: Callable[[], bool], logged: list[str], key: str = KEY
) -> Verdict:
    verdict, connection = await rendezvous_client.register(
        each, identity, key, coordinator="node0", addresses=[LOOPBACK], ports=ports, timeout_s=timeout_s, stop=stop, log=logged.append
    )
    assert (connection is not None) == verdict.ok
    if connection is not None:
        connection.close()
    return verdict


def hold(
    infos: Sequence[ProcessInfo],
    *,
    timeout_s: float = 20.0,
    stops: dict[int, Callable[[], bool]] | None = None,
    beside: Callable[[int, str], Any] | None = None,
    **options: Any,
) -> list[Verdict | BaseException]:
    """Hold a rendezvous of process 0 and the infos, all in one thread; return what each of them got."""
    identity = next(RUNS)
    ports = derive_ports(identity)
    port = next(port for port in ports if (listeners := listen([LOOPBACK], port)) is not None)
    stop = stops or {}

    async def all_of_them() -> list[Verdict | BaseException]:
        clients = [client(each, ports, identity, timeout_s, stop.get(each.process, lambda: False), []) for each in infos]
        extra = [beside(port, identity)] if beside is not None else []
        return await asyncio.gather(
            server(listeners, identity, timeout_s, stop.get(0, lambda: False), **options), *clients, *extra, return_exceptions=True
        )

    return asyncio.run(all_of_them())


async def introduced(port: int, identity: str, message: Any, key: str = KEY) -> Connection:
    """Return a connection that has passed the handshake and sent one message."""
    connection = await connect(LOOPBACK, port, 5)
    assert await offer(connection, identity, key) is None
    await connection.send(message)
    return connection


def refusal(results: Sequence[Verdict | BaseException]) -> Verdict:
    """Return the verdict that all of them received: a refusal in one line."""
    first = results[0]
    assert isinstance(first, Verdict)
    assert all(result == first for result in results), results
    assert not first.ok
    assert "\n" not in first.message
    return first


def test_all_processes_receive_the_address_of_jax() -> None:
    results = hold([info(1), info(2)])
    assert isinstance(results[0], Verdict)
    assert all(result == results[0] for result in results)
    assert (results[0].ok, results[0].address, results[0].devices) == (True, LOOPBACK, 6)
    with socket.socket() as probe:  # the probe left nothing behind that would keep JAX from it
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind((LOOPBACK, results[0].port))


def test_a_missing_process_is_named_by_its_host() -> None:
    logged: list[str] = []
    verdict = refusal(hold([info(2)], timeout_s=1.5, log=logged.append))
    assert verdict.exit_code == exit_codes.LOST_PEER
    assert "process 1 on node1" in verdict.message
    assert "within 2 s; 2 of 3" in verdict.message


@pytest.mark.parametrize(
    ("changes", "code", "message"),
    [
        (
            {"versions": {**INFO.versions, "jaxlib": "0.9"}},
            exit_codes.USAGE,
            "package jaxlib is 0.10.2 on process 0 on node0 and 0.9 on process 2",
        ),
        ({"versions": {"python": "3.11.7"}}, exit_codes.USAGE, "jaxlib is 0.10.2 on process 0 on node0 and missing on process 2"),
        ({"config": {**INFO.config, "trainer.steps": "6"}}, exit_codes.USAGE, "config trainer.steps is 5 on process 0 on node0 and 6 on"),
        ({"settings": {"XLA_FLAGS": "--a"}}, exit_codes.USAGE, "environment XLA_FLAGS is missing on process 0"),
        ({"code": "cccc2222"}, exit_codes.USAGE, "code differs: /project on process 0 on node0 (hash aaaa1111)"),
        ({"processes": 4}, exit_codes.USAGE, "process 2 on node2 counts 4 processes, process 0 on node0 counts 3"),
        ({"error": (exit_codes.BAD_NODE, "shows 3 GPUs")}, exit_codes.BAD_NODE, "process 2 on node2: shows 3 GPUs"),
    ],
)
def test_processes_that_differ_are_refused_everywhere(changes: dict[str, Any], code: int, message: str) -> None:
    verdict = refusal(hold([info(1), info(2, **changes)], timeout_s=6))
    assert verdict.exit_code == code
    assert message in verdict.message


def test_two_processes_with_one_index_are_refused() -> None:
    twin = dataclasses.replace(info(1), pid=999, host="node7")
    verdict = refusal(hold([info(1), twin], timeout_s=6))
    assert verdict.exit_code == exit_codes.USAGE
    assert "two processes claim index 1" in verdict.message
    assert "node7" in verdict.message


def test_an_error_of_the_joint_check_is_sent_to_all() -> None:
    seen: list[int] = []

    def check_all(infos: Sequence[ProcessInfo]) -> tuple[int, str]:
        seen.extend(each.process for each in infos)
        return exit_codes.USAGE, "6 devices do not fit"

    assert refusal(hold([info(2), info(1)], check_all=check_all)).message == "6 devices do not fit"
    assert seen == [0, 1, 2]


def test_a_process_that_dies_is_named() -> None:
    async def dies(port: int, identity: str) -> None:
        connection = await introduced(port, identity, {"card": info(2).to_json()})
        await asyncio.sleep(0.2)
        connection.close()

    results = hold([info(1)], beside=dies)[:2]
    verdict = refusal(results)
    assert verdict.exit_code == exit_codes.LOST_PEER
    assert "process 2 on node2 ended during the rendezvous" in verdict.message


def test_the_end_of_process_0_is_reported() -> None:
    identity = next(RUNS)
    ports = derive_ports(identity)
    listeners = listen([LOOPBACK], ports[0])
    assert listeners is not None

    async def both() -> Verdict:
        task = asyncio.ensure_future(server(listeners, identity, 30, lambda: False))
        waiting = asyncio.ensure_future(client(info(1), ports, identity, 30, lambda: False, []))
        await asyncio.sleep(0.5)
        task.cancel()
        return await waiting

    verdict = asyncio.run(both())
    assert (verdict.ok, verdict.exit_code) == (False, exit_codes.LOST_PEER)
    assert "process 0 on node0 ended during the rendezvous" in verdict.message


def test_an_unreachable_process_0_is_reported_with_the_attempts() -> None:
    identity = next(RUNS)
    verdict = asyncio.run(client(info(1), derive_ports(identity), identity, 0.5, lambda: False, []))
    assert verdict.exit_code == exit_codes.LOST_PEER
    assert "process 1 on node1 could not reach process 0 at node0 (127.0.0.1; ports" in verdict.message
    assert "attempts, last: 127.0.0.1:" in verdict.message
    assert "Connect call failed" in verdict.message or "refused" in verdict.message


def test_a_port_of_jax_that_cannot_be_reached_is_refused() -> None:
    async def walled_off(port: int, identity: str) -> Verdict:
        connection = await introduced(port, identity, {"card": info(2).to_json()})
        while (message := await connection.receive()) is not None:
            if "probe" in message:
                await connection.send({"probed": "no route to host"})
            if "verdict" in message:
                connection.close()
                return Verdict(**message["verdict"])
        raise AssertionError

    verdict = refusal(hold([info(1)], beside=walled_off))
    assert verdict.exit_code == exit_codes.LOST_PEER
    assert "cannot be reached from process 2 on node2: no route to host" in verdict.message


@pytest.mark.parametrize("at_check", [0, 2])
def test_a_request_to_stop_ends_the_rendezvous_of_all(at_check: int) -> None:
    # process 1 does not start: only the request can end this before the timeout
    begin = time.monotonic()
    results = hold([info(2)], timeout_s=600, stops={at_check: lambda: time.monotonic() > begin + 0.5})
    assert isinstance(results[0], Stopped)
    assert isinstance(results[1], Stopped) or results[1].exit_code == exit_codes.PREEMPTED


@pytest.fixture
def other_programs() -> Iterator[Callable[[int], None]]:
    """Occupy a port with a server of another protocol."""
    sockets: list[socket.socket] = []

    def talk(listener: socket.socket) -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            with connection:
                connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

    def occupy(port: int) -> None:
        listener = socket.create_server((LOOPBACK, port))
        sockets.append(listener)
        threading.Thread(target=talk, args=(listener,), daemon=True).start()

    yield occupy
    for listener in sockets:
        listener.close()


def test_runs_with_the_same_ports_and_other_programs_on_them_do_not_mix(other_programs: Callable[[int], None]) -> None:
    ports = derive_ports(next(RUNS))
    other_programs(ports[0])
    names = [next(RUNS), next(RUNS)]

    async def both() -> list[Verdict]:
        calls = []
        for number, name in enumerate(names):
            port = next(port for port in ports if (listeners := listen([LOOPBACK], port)) is not None)
            assert port == ports[1 + number]
            own = {"processes": 2, "config": {"run": name}}
            calls.append(server(listeners, name, 30, lambda: False, own=info(0, **own)))
            calls.append(client(info(1, **own), ports, name, 30, lambda: False, []))
        return list(await asyncio.gather(*calls))

    first, first_too, second, second_too = asyncio.run(both())
    assert first.ok
    assert second.ok
    assert first == first_too
    assert second == second_too
    assert first.port != second.port


def test_a_taken_port_is_not_listened_on_twice() -> None:
    port = derive_ports(next(RUNS))[0]
    listeners = listen([LOOPBACK], port)
    assert listeners is not None
    assert listen([LOOPBACK], port) is None
    assert listen(["127.0.0.2", LOOPBACK], port) is None, "all addresses or none"
    others = listen(["127.0.0.2"], port)
    assert others is not None, "and what was taken on the way is given back"
    for listener in listeners + others:
        assert listener.getsockname()[0] not in ("0.0.0.0", "::")
        listener.close()


def of(*addresses: str, hosts: tuple[str, ...] = ()) -> Cluster:
    return Cluster("test", 2, 0, "test", coordinator="head", addresses=addresses, hosts=hosts)


def test_process_0_listens_on_its_own_addresses_of_the_coordinator_only() -> None:
    # 203.0.113.0/24 is for documentation: no host has it
    assert own_addresses(of("203.0.113.7", "127.0.0.1", hosts=("head", "localhost"))) == ["127.0.0.1"]
    # other hosts could not reach loopback, but here they all resolve to it: the hosts are one machine
    assert own_addresses(of("127.0.0.1", hosts=("head", "localhost"))) == ["127.0.0.1"]
    # other hosts are unknown: a name that resolves to loopback here may resolve differently elsewhere
    assert set(own_addresses(of("127.0.0.1"))) == {"127.0.0.1"} | ({route} if (route := network.address_towards("198.51.100.1")) else set())
    with pytest.raises(ClusterError, match=r"has none of the addresses of head \(203\.0\.113\.7\).*--coordinator") as refused:
        own_addresses(of("203.0.113.7", hosts=("head", "localhost")))
    assert refused.value.exit_code == exit_codes.USAGE


@pytest.mark.parametrize(
    ("address", "private"),
    [
        ("10.1.2.3", True),
        ("172.16.0.1", True),
        ("192.168.7.7", True),
        ("100.64.3.2", True),
        ("127.0.1.1", True),
        ("fd00::1", True),
        ("8.8.8.8", False),
        ("2600::1", False),
        ("0.0.0.0", False),
        ("::", False),
    ],
)
def test_private_addresses_are_known(address: str, private: bool) -> None:
    assert network.is_private(address) is private


CARD = info(1).to_json()
RNG = random.Random(32)
JUNK: list[Any] = [None, True, 7, -1.5, "x" * 300, [], [[1]], {}, {"a": {"b": None}}, 10**30]


def damaged(rng: random.Random) -> Any:
    """Return a process description with one or more values of another type, or without a field, or something else altogether."""
    card: dict[str, Any] = json.loads(json.dumps(CARD))
    for key in rng.sample(sorted(card), rng.randrange(1, 4)):
        if rng.random() < 0.2:
            del card[key]
        else:
            card[key] = rng.choice([junk for junk in JUNK if type(junk) is not type(card[key]) and (key, junk) != ("devices", None)])
    return rng.choice([card, card, card, rng.choice(JUNK)])


def test_strangers_claim_no_index_stop_nothing_and_crash_nothing() -> None:
    """Before, between and after the processes of the run come others without its secret, of every kind."""
    logged: list[str] = []
    raw = [b"", b"GET / HTTP/1.1\r\n\r\n", b"\xff\xfe\n", b"[" * 5000 + b"\n", b"{" * 100, b"1" * 5000 + b"\n", b"x" * (4 * HELLO_BYTES)]

    async def visits(port: int, identity: str) -> list[str | None]:
        hello = {"ridge": 2, "identity": identity, "nonce": "a"}
        for text in raw + [json.dumps({**hello, key: junk}).encode() + b"\n" for key in hello for junk in JUNK]:
            _, writer = await asyncio.open_connection(LOOPBACK, port)
            writer.write(text + (json.dumps({"card": CARD}).encode() + b'\n{"stopping": true}\n' if RNG.random() < 0.5 else b""))
            if RNG.random() < 0.5:
                writer.write_eof()
            writer.close()
        refused = []
        for key in ("", "another secret", KEY + " "):
            connection = await connect(LOOPBACK, port, 5)
            refused.append(await offer(connection, identity, key))
            await connection.send({"card": CARD})
            await connection.send({"stopping": True})
            connection.close()
        for _ in range(40):  # with the secret, and other types than this version sends
            (await introduced(port, identity, {"card": damaged(RNG)})).close()
        return refused

    async def meet(port: int, identity: str) -> list[Any]:
        refused = await visits(port, identity)
        ports = derive_ports(identity)
        return [refused, await asyncio.gather(*(client(info(each), ports, identity, 20, lambda: False, []) for each in (1, 2)))]

    results: list[Any] = hold([], beside=meet, log=logged.append)
    verdict, (refused, others) = results
    assert verdict.ok, verdict
    assert list(others) == [verdict, verdict]
    assert refused == ["process 0 there has another RIDGE_SECRET, or one of the two has none"] * 3
    assert any("ignored a connection from 127.0.0.1" in line for line in logged)
    assert not any(KEY in line for line in logged)


def test_a_process_without_the_secret_is_named_with_the_cause() -> None:
    logged: list[str] = []

    async def other(port: int, identity: str) -> Verdict:
        return await client(info(1), derive_ports(identity), identity, 1.0, lambda: False, logged, "another secret")

    results: list[Any] = hold([info(2)], timeout_s=1.5, beside=other)
    first, second, verdict = results
    assert first == second
    assert "process 1 on node1 has not started" in first.message
    assert "did not prove RIDGE_SECRET" in first.message
    assert "another RIDGE_SECRET" in verdict.message
