"""Messages of the preflight over real sockets, with other programs, wrong clocks, and processes that end or stop responding."""

from __future__ import annotations

import json
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ridgeline.launch.cluster.network import free_port
from ridgeline.launch.cluster.rendezvous import BackgroundLoop, connect, offer
from ridgeline.launch.preflight import doctor
from ridgeline.launch.preflight.exchange import ExchangeClient, ExchangeLost, ExchangeServer
from ridgeline.launch.preflight.host import control_group, measure_disk

HERE = "127.0.0.1"


class Star:
    """A process 0 and the means to make others."""

    def __init__(self, processes: int, clock: Callable[[], float] = time.time) -> None:
        listener = socket.create_server((HERE, 0))
        listener.setblocking(False)
        self.port = listener.getsockname()[1]
        self.server = ExchangeServer([listener], "this run", processes, "n0", secret="a secret", clock=clock)
        self.clients: list[ExchangeClient] = []

    def join(self, process: int, identity: str = "this run", timeout_s: float = 30, secret: str = "a secret") -> ExchangeClient:
        client = ExchangeClient([HERE], [self.port], identity, process, f"n{process}", timeout_s=timeout_s, secret=secret)
        self.clients.append(client)
        return client

    def close(self) -> None:
        for client in self.clients:
            client.close()
        self.server.close()


@pytest.fixture
def star() -> Iterator[Callable[..., Star]]:
    made: list[Star] = []

    def make(*args: object, **kwargs: object) -> Star:
        made.append(Star(*args, **kwargs))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for item in made:
        item.close()


def test_values_reach_process_0_and_its_broadcasts_reach_all(star: Callable[..., Star]) -> None:
    three = star(3)
    one, two = three.join(1), three.join(2)
    assert three.server.wait_for_all(30) == {0: "n0", 1: "n1", 2: "n2"}
    three.server.put("host", "a")
    one.put("host", ["b"])
    two.put("host", {"c": 1})
    assert three.server.gather("host", 30) == {0: "a", 1: ["b"], 2: {"c": 1}}
    three.server.broadcast("go", {"x": 1})
    three.server.broadcast("verdict", 73)
    assert (one.receive("verdict", 30), two.receive("go", 30), one.receive("go", 30)) == (73, {"x": 1}, {"x": 1})


def test_a_clock_that_is_off_is_measured_within_its_error(star: Callable[..., Star]) -> None:
    two = star(2, clock=lambda: time.time() + 30.0)
    offset_s, error_s = two.join(1).clock_offset()
    assert abs(offset_s + 30.0) <= error_s + 0.01
    assert 0 < error_s < 5


def test_clocks_are_compared_while_broadcasts_arrive(star: Callable[..., Star]) -> None:
    two = star(2)
    client = two.join(1)
    two.server.broadcast("begin", 1)
    client.clock_offset()
    assert client.receive("begin", 30) == 1


def test_other_programs_and_other_runs_are_rejected(star: Callable[..., Star]) -> None:
    two = star(2)
    with socket.create_connection((HERE, two.port)) as stranger:
        stranger.sendall(b"GET / HTTP/1.0\r\n\r\n")
        assert stranger.recv(100) == b""
    with pytest.raises(ExchangeLost, match="did not reach process 0"):
        two.join(1, identity="another run", timeout_s=0.5)
    with pytest.raises(ExchangeLost, match="another RIDGE_SECRET"):
        two.join(1, secret="a guess", timeout_s=0.5)
    two.join(1)
    with pytest.raises(ExchangeLost, match="did not register"):
        two.join(1, timeout_s=0.5)
    assert two.server.wait_for_all(30) == {0: "n0", 1: "n1"}


JUNK = [None, True, -1, 2.5, "x", [], [1], {}, {"a": 1}, 10**30]


def test_malformed_messages_crash_nothing(star: Callable[..., Star]) -> None:
    """Of a process with the secret: first messages, values, pings and lines of any kind."""
    three = star(3)
    rng = random.Random(32)
    loop = BackgroundLoop()

    async def speak(lines: list[bytes]) -> None:
        connection = await connect(HERE, three.port, 5)
        assert await offer(connection, "this run", "a secret") is None
        connection.writer.write(b"".join(lines))
        await connection.writer.drain()
        connection.close()

    for _ in range(60):
        hello = {"process": rng.choice([*JUNK, 0, 3]), "node": rng.choice(JUNK)}
        bad = [b"\xff\n", b"[" * 3000 + b"\n", b"{}\n", json.dumps({"tag": rng.choice(JUNK), "ping": rng.choice(JUNK)}).encode() + b"\n"]
        loop.run(speak([json.dumps(hello).encode() + b"\n", *rng.sample(bad, 2)]))
    client = three.join(1)
    client.put("host", {"facts": 1})
    three.server.put("host", None)
    assert three.server.gather("host", 30, [0, 1]) == {0: None, 1: {"facts": 1}}


@pytest.mark.parametrize("check", [doctor._check_host, doctor._check_own])
def test_values_of_other_types_count_as_no_answer(check: Callable[[object], None], capsys: pytest.CaptureFixture[str]) -> None:
    facts = {"facts": {"node": 1}, "error": None, "gpus": {"missing": None, "gpus": []}, "gpus_on_node": None, "outcome": {"results": 3}}
    values = dict(enumerate([*JUNK, facts, *({**facts, key: junk} for key in facts for junk in JUNK)]))
    assert doctor._valid(values, check) == {}
    assert capsys.readouterr().err.count("ignored a message of process") == len(values)


def test_a_process_that_leaves_ends_the_wait_for_it(star: Callable[..., Star]) -> None:
    three = star(3)
    one, two = three.join(1), three.join(2)
    three.server.wait_for_all(30)
    three.server.put("own", 0)
    one.put("own", 1)
    threading.Timer(0.2, two.close).start()
    assert three.server.gather("own", 60) == {0: 0, 1: 1}
    assert three.server.lost == {2}


def test_an_unresponsive_process_is_waited_for_until_the_timeout(star: Callable[..., Star]) -> None:
    two = star(2)
    two.join(1)
    two.server.wait_for_all(30)
    two.server.put("own", 0)
    assert two.server.gather("own", 0.3) == {0: 0}
    assert two.server.lost == set()


def test_an_unreachable_process_0_is_one_line_with_its_address() -> None:
    with pytest.raises(
        ExchangeLost, match=r"process 3 on n3 did not reach process 0 at 127\.0\.0\.1, ports \d+\.\.\. within 0 s: Connection refused"
    ):
        ExchangeClient([HERE], [free_port(HERE)], "this run", 3, "n3", timeout_s=0.3)


def test_the_end_of_process_0_is_reported() -> None:
    two = Star(2)
    client = two.join(1)
    two.server.close(timeout_s=0)
    with pytest.raises(ExchangeLost, match="process 0 at "):
        client.receive("verdict", 30)
    client.close()


def test_the_disk_is_measured_within_its_bounds_and_left_clean(tmp_path: Path) -> None:
    directory = tmp_path / "run"
    facts = measure_disk(directory, 3 << 20, 60)
    assert (facts.written_bytes, facts.error) == (3 << 20, None)
    assert facts.write_bytes_per_s is not None and facts.write_bytes_per_s > 0
    assert facts.free_bytes > 0
    ticks = iter(range(0, 1000, 2))
    assert measure_disk(directory, 1 << 40, 5, clock=lambda: float(next(ticks))).written_bytes == 2 * (4 << 20)
    assert list(directory.iterdir()) == []


def test_a_directory_that_cannot_be_written_is_an_answer() -> None:
    facts = measure_disk(Path("/proc/doctor"), 1 << 20, 5)
    assert facts.write_bytes_per_s is None
    assert facts.error


@pytest.mark.parametrize(
    ("membership", "files", "limits"),
    [
        ("0::/job/step\n", {"job/step/memory.max": "max", "job/memory.max": "1000", "job/cpu.max": "150000 100000"}, (1000, 1.5)),
        ("0::/job\n", {"job/memory.max": "max", "job/cpu.max": "max 100000"}, (None, None)),
        (
            "4:memory:/j\n3:cpu,cpuacct:/j\n",
            {
                "memory/j/memory.limit_in_bytes": "500",
                "cpu,cpuacct/j/cpu.cfs_quota_us": "50000",
                "cpu,cpuacct/j/cpu.cfs_period_us": "100000",
            },
            (500, 0.5),
        ),
        ("3:cpu:/j\n", {"cpu/j/cpu.cfs_quota_us": "-1", "cpu/j/cpu.cfs_period_us": "100000"}, (None, None)),
    ],
)
def test_limits_of_control_groups_of_both_versions(
    membership: str, files: dict[str, str], limits: tuple[int | None, float | None], tmp_path: Path
) -> None:
    root = tmp_path
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text + "\n")
    (root / "membership").write_text(membership)
    assert control_group(root, root / "membership") == limits
