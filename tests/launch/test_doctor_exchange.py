"""How the doctor's processes talk: over real sockets, with strangers, clocks that are off, processes that leave or fall silent."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ridgeline.launch.preflight.exchange import Centre, LostCentre, Member, free_port
from ridgeline.launch.preflight.host import control_group, measure_disk

HERE = "127.0.0.1"


class Star:
    """A process 0 and the means to make others."""

    def __init__(self, processes: int, clock: Callable[[], float] = time.time) -> None:
        listener = socket.create_server((HERE, 0))
        listener.setblocking(False)
        self.port = listener.getsockname()[1]
        self.centre = Centre([listener], "this run", processes, "n0", clock=clock)
        self.members: list[Member] = []

    def join(self, process: int, identity: str = "this run", timeout_s: float = 30) -> Member:
        member = Member([HERE], [self.port], identity, process, f"n{process}", timeout_s=timeout_s)
        self.members.append(member)
        return member

    def close(self) -> None:
        for member in self.members:
            member.close()
        self.centre.close()


@pytest.fixture
def star() -> Iterator[Callable[..., Star]]:
    made: list[Star] = []

    def make(*args: object, **kwargs: object) -> Star:
        made.append(Star(*args, **kwargs))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for item in made:
        item.close()


def test_words_reach_process_0_and_its_announcements_reach_all(star: Callable[..., Star]) -> None:
    three = star(3)
    one, two = three.join(1), three.join(2)
    assert three.centre.wait_for_all(30) == {0: "n0", 1: "n1", 2: "n2"}
    three.centre.put("host", "a")
    one.put("host", ["b"])
    two.put("host", {"c": 1})
    assert three.centre.gather("host", 30) == {0: "a", 1: ["b"], 2: {"c": 1}}
    three.centre.announce("go", {"x": 1})
    three.centre.announce("verdict", 73)
    assert (one.hear("verdict", 30), two.hear("go", 30), one.hear("go", 30)) == (73, {"x": 1}, {"x": 1})


def test_a_clock_that_is_off_is_measured_within_its_error(star: Callable[..., Star]) -> None:
    two = star(2, clock=lambda: time.time() + 30.0)
    offset_s, error_s = two.join(1).clock_offset()
    assert abs(offset_s + 30.0) <= error_s + 0.01
    assert 0 < error_s < 5


def test_clocks_are_compared_while_announcements_arrive(star: Callable[..., Star]) -> None:
    two = star(2)
    member = two.join(1)
    two.centre.announce("begin", 1)
    member.clock_offset()
    assert member.hear("begin", 30) == 1


def test_strangers_and_other_runs_are_sent_away(star: Callable[..., Star]) -> None:
    two = star(2)
    with socket.create_connection((HERE, two.port)) as stranger:
        stranger.sendall(b"GET / HTTP/1.0\r\n\r\n")
        assert stranger.recv(100) == b""
    with pytest.raises(LostCentre, match="did not reach process 0"):
        two.join(1, identity="another run", timeout_s=0.5)
    two.join(1)
    assert two.centre.wait_for_all(30) == {0: "n0", 1: "n1"}


def test_a_process_that_leaves_ends_the_wait_for_it(star: Callable[..., Star]) -> None:
    three = star(3)
    one, two = three.join(1), three.join(2)
    three.centre.wait_for_all(30)
    three.centre.put("own", 0)
    one.put("own", 1)
    threading.Timer(0.2, two.close).start()
    assert three.centre.gather("own", 60) == {0: 0, 1: 1}
    assert three.centre.lost == {2}


def test_a_silent_process_is_waited_for_no_longer_than_said(star: Callable[..., Star]) -> None:
    two = star(2)
    two.join(1)
    two.centre.wait_for_all(30)
    two.centre.put("own", 0)
    assert two.centre.gather("own", 0.3) == {0: 0}
    assert two.centre.lost == set()


def test_nobody_there_is_one_line_with_the_place() -> None:
    with pytest.raises(
        LostCentre, match=r"process 3 on n3 did not reach process 0 at 127\.0\.0\.1, ports \d+\.\.\. within 0 s: Connection refused"
    ):
        Member([HERE], [free_port(HERE)], "this run", 3, "n3", timeout_s=0.3)


def test_a_leaving_process_0_is_said() -> None:
    two = Star(2)
    member = two.join(1)
    two.centre.close(timeout_s=0)
    with pytest.raises(LostCentre, match="has gone"):
        member.hear("verdict", 30)
    member.close()


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
