"""The link between real processes of a run: which ends of one of them end the others, how fast, and what they print."""

from __future__ import annotations

import asyncio
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from ridgeline.launch import exit_codes
from ridgeline.launch.cluster import link, rendezvous
from ridgeline.launch.cluster.join import HEARTBEAT_S
from ridgeline.launch.cluster.network import free_port
from ridgeline.trainer.checkpoint.checkpointer import ABANDON_S
from ridgeline.trainer.hang_report import Position, read_position, suspects

ROOT = Path(__file__).parents[2]
PROCESS = """
    import asyncio, os, signal, socket, sys, time
    from ridgeline.launch.cluster import link as links, rendezvous
    links.GRACE_S, links.LINGER_S, links.ERROR_GRACE_S = 0.4, 0.2, 1.0
    port, index, processes, act = int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    loop, connections = rendezvous.BackgroundLoop(), {}
    async def accept():
        arrived = asyncio.Event()
        async def take(reader, writer):
            connection = rendezvous.Connection(reader, writer)
            connections[(await connection.receive())["process"]] = connection
            if len(connections) == processes - 1:
                arrived.set()
        await asyncio.start_server(take, "127.0.0.1", port)
        await arrived.wait()
    async def connect():
        while True:
            try:
                connections[0] = await rendezvous.connect("127.0.0.1", port, 5)
                return await connections[0].send({"process": index})
            except OSError:
                await asyncio.sleep(0.05)
    loop.run(accept() if index == 0 else connect())
    link = links.Link(loop, connections, {p: f"process {p} on node{p}" for p in range(processes)}, relay=index == 0)
    link.record = lambda end: print("recorded", end.lost, flush=True)
    print("linked", flush=True)
    sys.stdin.readline()
    with link:
        exec(act)
"""
WAIT = "time.sleep(60)"


def run(
    actions: Sequence[str], strike: signal.Signals | None = None, victim: int = 0, limit_s: float | None = None
) -> list[tuple[int, str]]:
    """Run one process per action, all linked; return the exit code and output of each.

    strike: sent to one of them once all act; limit_s: then those that are left are killed.
    """
    port = free_port()
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(PROCESS), str(port), str(index), str(len(actions)), act],
            cwd=ROOT, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )
        for index, act in enumerate(actions)
    ]  # fmt: skip
    try:
        for rank in ranks:
            assert rank.stdout is not None
            assert rank.stdout.readline() == "linked\n"
        for rank in ranks:
            assert rank.stdin is not None
            rank.stdin.write("\n")
            rank.stdin.flush()
        if strike is not None:
            ranks[victim].send_signal(strike)
        if limit_s is not None:
            time.sleep(limit_s)
            for rank in ranks:
                rank.kill()
        outputs = [rank.communicate(timeout=30)[0] for rank in ranks]
    finally:
        for rank in ranks:
            if rank.poll() is None:
                rank.kill()
    return [(rank.returncode, output) for rank, output in zip(ranks, outputs, strict=True)]


@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_process_ends_the_others_with_its_name_within_seconds(victim: int) -> None:
    begin = time.monotonic()
    ends = run([WAIT] * 3, signal.SIGKILL, victim)
    assert time.monotonic() - begin < 20
    for index, (code, output) in enumerate(ends):
        if index == victim:
            assert code == -signal.SIGKILL
            continue
        assert code == exit_codes.LOST_PEER
        assert output.splitlines()[-1].startswith(f"ridge: stopped: another process of the run is gone: process {victim} on node{victim} (")
        assert output.count("recorded True") == output.count("ridge: ") == 1


def test_ends_that_all_processes_share_are_no_loss() -> None:
    """Each code by itself: process 0 works on for longer than a lost process, or one with another error, would let it."""
    codes = [0, 70, 74, 75, 130]
    acts = ["time.sleep(1.5)"] + [f"raise SystemExit({code})" for code in codes[1:-1]] + ["time.sleep(0.1); link.exit(130)"]
    assert run(acts) == [(code, "") for code in codes]


def test_an_error_of_one_process_leaves_the_others_time_for_their_own() -> None:
    """Process 2 fails by itself in time, the others wait for the one that has failed."""
    first, second, third = run([WAIT, "raise SystemExit(71)", "time.sleep(0.6); raise SystemExit(71)"])
    assert (second, third) == ((71, ""), (71, "recorded False\n"))
    assert first[0] == exit_codes.LOST_PEER
    assert first[1].splitlines()[-1] == (
        "ridge: stopped: another process of the run ended with exit code 71: process 1 on node1; the last good checkpoint is intact"
    )


def test_an_error_is_reported_before_its_process_has_ended() -> None:
    """JAX's shutdown waits for the other processes: the one that failed does not end before they do."""
    begin = time.monotonic()
    first, second = run([WAIT, "link.leave(1); time.sleep(60)"])
    assert (first[0], second[0]) == (exit_codes.LOST_PEER, 1)
    assert "ended with exit code 1: process 1 on node1" in first[1]
    assert time.monotonic() - begin < 20


def test_a_process_whose_output_nobody_reads_ends_with_its_code() -> None:
    lose = "os.dup2(os.open('/dev/full', os.O_WRONLY), 1); os.dup2(1, 2); "
    (code, _), (killed, _) = run([lose + WAIT, "time.sleep(0.2); os.kill(os.getpid(), 9)"])
    assert (code, killed) == (exit_codes.LOST_PEER, -9)


def test_a_process_that_waits_for_a_lost_one_at_its_end_keeps_its_exit_code() -> None:
    first, second = run(["link.leave(75); time.sleep(60)", "time.sleep(0.2); os.kill(os.getpid(), 9)"])
    assert (first[0], second[0]) == (75, -9)
    assert "stopped" not in first[1]


def test_a_loss_that_a_process_finds_first_is_passed_on() -> None:
    """A failed collective can come before the end of the connection to a host that has vanished."""
    ends = run([WAIT, "links.END_REPORT_S = 0; link.end_process('another process of the run is gone (at 10.0.0.3)')", WAIT])
    for code, output in ends:
        assert code == exit_codes.LOST_PEER
        assert "ridge: stopped: another process of the run is gone (at 10.0.0.3); the last" in output


SURVEY = """
links.SURVEY_S, links.SURVEYED_S = 1.0, 2.5
link.position = lambda: {"at": index}
link.report = lambda positions: os.write(1, f"report {sorted(positions.items())}\\n".encode())
link.stacks = lambda: os.write(1, b"stacks\\n")
time.sleep(0.3)
"""


@pytest.mark.parametrize("stopped", [0, 1, 2])
def test_any_process_has_it_reported_who_does_not_answer(stopped: int) -> None:
    """Process 0 reports once, whoever asks and however many; where it is the one that is stopped, each other process reports that."""
    end = "time.sleep(1.0); link.survey(index); time.sleep(0.3 if index else 1.0); os._exit(71)"  # the other one has stopped by then
    ends = run([SURVEY + ("os.kill(os.getpid(), signal.SIGSTOP)" if process == stopped else end) for process in range(3)], limit_s=10)
    reports = {index: [line for line in output.splitlines() if line.startswith("report")] for index, (_, output) in enumerate(ends)}
    if stopped == 0:
        assert reports == {0: [], **{index: [f"report [(0, None), ({index}, {{'at': {index}}})]"] for index in (1, 2)}}
        return
    answers = [(index, None if index == stopped else {"at": index}) for index in range(3)]
    assert reports[0] == [f"report {answers}"]
    assert reports[1] == reports[2] == []
    assert [output.count("stacks") for _, output in ends] == [int(index != stopped) for index in range(3)]


def test_process_0_says_what_it_does_before_the_one_that_asked_may_end() -> None:
    """An end breaks the connections of a collective: process 0 would not wait in it any more."""
    slow = "link.position = lambda: (time.sleep(0.8), {'at': 0, 's': round(time.time(), 3)})[1]\n"
    asking = SURVEY + "link.survey(index); os.write(1, f'told {time.time():.3f}\\n'.encode()); time.sleep(0.3); os._exit(71)"
    (_, first), (_, second) = run([SURVEY + slow + "time.sleep(3); os._exit(71)", asking], limit_s=10)
    at_s = float(first.split("'s': ")[1].split("}")[0])
    assert "report [(0, {'at': 0" in first and at_s <= float(second.split("told ")[1].split()[0])


def test_a_report_that_takes_long_is_left_to_process_0() -> None:
    slow = SURVEY + "report = link.report\nlink.report = lambda positions: (time.sleep(4), report(positions))\n"
    ends = run([slow + "time.sleep(6); os._exit(71)", slow + "link.survey(index); time.sleep(5); os._exit(71)"], limit_s=12)
    reports = [[line for line in output.splitlines() if line.startswith("report")] for _, output in ends]
    assert reports == [["report [(0, {'at': 0}), (1, {'at': 1})]"], []]


def test_a_process_that_has_not_begun_to_train_is_the_one_that_the_others_wait_for() -> None:
    begun = Position(step=7, phase="start-up", silent_s=9.0, threads={"MainThread": ["ridgeline/trainer/agreement.py:90 each"]})
    not_begun = read_position(link.Link().position())
    assert not_begun is not None
    assert suspects({0: begun, 1: not_begun, 2: begun}) == ([1], "does not wait for the others")


def test_the_kernel_notices_a_vanished_host_before_jax_does() -> None:
    assert rendezvous.KEEPALIVE_IDLE_S + rendezvous.KEEPALIVE_INTERVAL_S * rendezvous.KEEPALIVE_PROBES < HEARTBEAT_S
    assert link.GRACE_S > ABANDON_S

    async def options() -> tuple[int, int]:
        served: asyncio.Future[rendezvous.Connection] = asyncio.get_running_loop().create_future()
        server = await asyncio.start_server(lambda *streams: served.set_result(rendezvous.Connection(*streams)), "127.0.0.1", 0)
        ends = [await rendezvous.connect(*server.sockets[0].getsockname(), 5), await served]
        found = [end.writer.get_extra_info("socket").getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) for end in ends]
        for end in ends:
            end.close()
        server.close()
        return found[0], found[1]

    assert asyncio.run(options()) == (1, 1)
