"""The lease of a run directory: one holder at a time, a dead one is replaced, and the one that lost it stops."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ridgeline.configs.errors import UserError
from ridgeline.rundir import lease as leases
from ridgeline.rundir.lease import LEASE, TAKEN_OVER_EXIT_CODE, Holder, Lease, acquire, current_holder, this_process


@pytest.fixture
def take(tmp_path: Path) -> Iterator[Callable[..., Lease]]:
    """Acquires the lease of tmp_path as another process would: keyword arguments change the holder; `ended` collects exit codes."""
    held: list[Lease] = []

    def make(timeout_s: float = 0.3, ended: list[int] | None = None, **changes: Any) -> Lease:
        arguments = {name: changes.pop(name) for name in ("job_ended", "log", "sleep") if name in changes}
        me = this_process(timeout_s, env={}).model_copy(update=changes)
        codes = [] if ended is None else ended
        held.append(acquire(tmp_path, me, **{"log": lambda line: None, **arguments}, end=codes.append))
        return held[-1]

    yield make
    for lease in held:
        lease.release()


def claim(run_dir: Path, epoch: int, **changes: Any) -> None:
    """Leave a claim as a killed process does: no counter moves."""
    place = run_dir / LEASE / f"{epoch:08d}"
    place.mkdir(parents=True)
    leases.write_record(place / "holder.json", this_process(0.2, env={}).model_copy(update=changes))
    (place / "beat").write_text("7".ljust(20))


@pytest.fixture(scope="module")
def ended_pid() -> int:
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    return child.pid


def test_of_many_starts_at_once_one_gets_the_lease(take: Callable[..., Lease], tmp_path: Path) -> None:
    held, refusals, errors = list[Lease](), list[str](), list[BaseException]()
    barrier = threading.Barrier(12)

    def start() -> None:
        barrier.wait()
        try:
            held.append(take())
        except UserError as error:
            refusals.append(str(error))
        except BaseException as error:
            errors.append(error)

    for _ in range(3):  # free, then released twice
        held.clear()
        threads = [threading.Thread(target=start) for _ in range(12)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not errors
        assert len(held) == 1
        assert os.listdir(tmp_path / LEASE) == [f"{held[0].epoch:08d}"], "nothing is left of the others"
        held[0].release()
    assert held[0].epoch == 3, "epochs rise over releases"
    assert len(refusals) == 33
    assert {line.splitlines()[0] for line in refusals} == set(refusals)
    assert f"is in use: process {os.getpid()} on " in refusals[0] and str(tmp_path) in refusals[0]


def test_a_dead_holder_is_taken_over_at_once(take: Callable[..., Lease], tmp_path: Path, ended_pid: int) -> None:
    def never(seconds: float) -> None:
        pytest.fail("nothing to wait for")

    mine = {"job": "c:8", "attempt": 1}
    dead: dict[str, dict[str, Any]] = {
        "that process is gone": {"pid": ended_pid},
        "is gone": {"started": "1"},  # the PID belongs to another process by now
        "requeued": {"machine": "elsewhere", "job": "c:8", "attempt": 0},
        "that job has ended": {"machine": "elsewhere", "job": "c:7"},
    }
    for epoch, (why, holder) in enumerate(dead.items(), start=1):
        logged: list[str] = []
        claim(tmp_path, 2 * epoch - 1, **holder)
        lease = take(sleep=never, log=logged.append, job_ended=lambda job: job == "7", **mine)
        assert lease.epoch == 2 * epoch
        assert len(logged) == 1 and why in logged[0]
        lease.release()


def test_a_holder_of_another_host_is_judged_by_its_counter(take: Callable[..., Lease], tmp_path: Path) -> None:
    claim(tmp_path, 1, machine="elsewhere", host="node7", pid=12, job="other:7")
    beat, looks = tmp_path / LEASE / "00000001" / "beat", list[float]()

    def alive(seconds: float) -> None:
        looks.append(seconds)
        if len(looks) == 3:
            beat.write_text("8".ljust(20))

    queried: list[str] = []
    with pytest.raises(UserError, match=r"is in use: process 12 on node7, job 7 is writing it"):
        take(sleep=alive, job="c:8", job_ended=lambda job: queried.append(job) or True)
    assert not queried, "a job of another Slurm cluster may have the same number"
    looks.clear()
    logged: list[str] = []
    assert take(sleep=looks.append, log=logged.append).epoch == 2
    assert sum(looks) == pytest.approx(0.3) and len(logged) == 2 and "no sign of life for 0.3 s" in logged[-1]


def test_a_claim_that_cannot_be_read_is_waited_for_and_taken_over(take: Callable[..., Lease], tmp_path: Path) -> None:
    (tmp_path / LEASE / "00000004").mkdir(parents=True)
    (tmp_path / LEASE / "00000004" / "holder.json").write_text('{"pid": ')
    (tmp_path / LEASE / ".killed-before-its-claim").mkdir()
    assert current_holder(tmp_path) is None
    assert take().epoch == 5
    assert os.listdir(tmp_path / LEASE) == ["00000005"]


def test_the_one_that_lost_it_stops_before_its_next_write(take: Callable[..., Lease], tmp_path: Path) -> None:
    for lose in (lambda: claim(tmp_path, 9), lambda: shutil.rmtree(tmp_path / LEASE)):
        ended: list[int] = []
        lease = take(ended=ended, timeout_s=600)  # its thread does not look in the time of this test
        lease.check()
        lease.check_log()
        lose()
        with pytest.raises(RuntimeError):
            lease.check()
        assert ended == [TAKEN_OVER_EXIT_CODE]
        lease.release()
        shutil.rmtree(tmp_path / LEASE, ignore_errors=True)


def test_its_thread_notices_too_and_a_follower_does_as_well(take: Callable[..., Lease], tmp_path: Path) -> None:
    ended, codes, stopped = list[int](), list[int](), threading.Event()
    lease = take(ended=ended)

    def end(code: int) -> None:
        codes.append(code)
        stopped.set()

    follower = Lease(tmp_path, lease.epoch, 0.3, end=end)
    follower.check()
    claim(tmp_path, 2)
    assert stopped.wait(10)
    assert codes == ended == [TAKEN_OVER_EXIT_CODE]
    follower.release()
    assert current_holder(tmp_path) is not None, "a follower releases nothing"


def test_an_error_of_the_file_system_ends_no_run(take: Callable[..., Lease], monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[int] = []
    lease = take(ended=ended)

    def fails(*_: Any) -> Any:
        raise OSError(116, "Stale file handle")

    with monkeypatch.context() as patch:
        patch.setattr(leases, "_epochs", fails)
        patch.setattr(leases, "_write_beat", fails)
        lease.check()
    lease.check()
    assert not ended


def test_after_the_release_nothing_may_be_written(take: Callable[..., Lease], tmp_path: Path) -> None:
    lease = take()
    holder = current_holder(tmp_path)
    assert isinstance(holder, Holder) and holder.pid == os.getpid()
    lease.release()
    assert current_holder(tmp_path) is None
    with pytest.raises(RuntimeError):
        lease.check()


def test_a_suspended_process_is_alive_and_a_zombie_is_not(take: Callable[..., Lease], tmp_path: Path) -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        child.send_signal(signal.SIGSTOP)
        holder = this_process(1.0).model_copy(update={"pid": child.pid, "started": leases._process_started(child.pid)})
        assert not leases._process_gone(holder)
        child.kill()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert leases._process_gone(holder)
    finally:
        child.kill()
        child.communicate()
