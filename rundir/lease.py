"""The lease of a run directory: at most one start writes there, also on a file system that several hosts share.

    lease/00000003/holder.json     the process that holds epoch 3
    lease/00000003/beat            a counter that it raises while it lives; RELEASED after its end

A start claims the next epoch by renaming a finished directory to the epoch's name: that is atomic on every POSIX file system, and fails if
another start has claimed it. The highest epoch holds the lease. The holder's process, its job and its counter decide whether it lives; the
counter is compared with itself, so that clocks of different hosts do not matter. A holder that finds a higher epoch, or its own claim
removed, ends its process: it checks periodically, and before each write. No file locks are used: NFS and Lustre may be mounted without.
"""

from __future__ import annotations

import contextlib
import math
import os
import shutil
import socket
import sys
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path

from pydantic import PositiveInt

from ridgeline.configs.environment import read_number
from ridgeline.configs.errors import UserError
from ridgeline.configs.files import read_limited
from ridgeline.rundir.files import Record, read_record, refuse_link, sync_directory, write_record

LEASE = "lease"
RELEASED = "released"
TAKEN_OVER_EXIT_CODE = 76
"""See launch/exit_codes.py."""
_HOLDER, _BEAT = "holder.json", "beat"
_BEAT_BYTES, _MAX_BEAT_BYTES = 20, 4096
_BEATS = 15
"""Beats of a holder per timeout."""
_RELEASE_S = 10.0
_FOLLOWER_PERIODS = 4
"""A process other than 0 checks once in this many beats."""

JobEnded = Callable[[str], bool]


class Holder(Record):
    """The process that claims an epoch: process 0 of a start."""

    token: str
    """Unique to the claim."""
    host: str
    machine: str
    """Boot and PID namespace: a PID means the same process only where this is equal."""
    pid: PositiveInt
    started: str | None = None
    """Start time of the process in clock ticks since boot; None where the system does not give it."""
    job: str | None = None
    """Slurm job, as cluster:id."""
    attempt: int = 0
    """How often Slurm has requeued the job."""
    timeout_s: float = 30.0
    """Without a beat for this long, another start may take over."""

    @property
    def here(self) -> bool:
        """Whether its PID means that process on this machine."""
        return self.machine == _machine()

    def __str__(self) -> str:
        job = f", job {self.job.partition(':')[2]}" if self.job else ""
        return f"process {self.pid} on {self.host}{job}"


def this_process(timeout_s: float, env: Mapping[str, str] = os.environ) -> Holder:
    """Describe this process as a holder."""
    job = env.get("SLURM_JOB_ID")
    return Holder(
        token=uuid.uuid4().hex,
        host=socket.gethostname(),
        machine=_machine(),
        pid=os.getpid(),
        started=_process_started(os.getpid()),
        job=f"{env.get('SLURM_CLUSTER_NAME', '')}:{job}" if job else None,
        attempt=read_number(env, "SLURM_RESTART_COUNT") or 0,
        timeout_s=timeout_s,
    )


class Lease:
    """A held lease. Process 0 of a start gets it from `acquire`; the other processes follow it.

    When it is lost, the process ends at once with TAKEN_OVER_EXIT_CODE, whatever its threads do: nothing more is written.

    Args:
      run_dir: the run directory.
      epoch: the claimed one.
      timeout_s: as in Holder.
      beats: raise the counter (process 0).
      end: ends the process.
    """

    def __init__(self, run_dir: Path, epoch: int, timeout_s: float, *, beats: bool = False, end: Callable[[int], None] = os._exit) -> None:
        self.run_dir, self.epoch = run_dir, epoch
        self._root, self._end, self._beats = run_dir / LEASE, end, beats
        self._count = 0
        self._verified_s = -math.inf
        self._released = False
        self._lost = threading.Lock()
        self._closing = threading.Event()
        period_s = timeout_s / _BEATS * (1 if beats else _FOLLOWER_PERIODS)
        self._thread = threading.Thread(target=self._keep, args=(period_s,), name="lease", daemon=True)
        self._thread.start()

    def check(self, max_age_s: float = 0.0) -> None:
        """End the process if the lease is lost. Raises RuntimeError after `release`.

        max_age_s: rely on a check that is at most this old.
        """
        if self._released:
            raise RuntimeError(f"the lease of {self.run_dir} was released")
        now_s = _clock_s()
        if now_s - self._verified_s < max_age_s:
            return
        if self._is_held():
            self._verified_s = now_s
        else:
            self._lose()
            raise RuntimeError(f"the lease of {self.run_dir} is lost")

    def check_log(self) -> None:
        """`check` for frequent small writes: relies on a check in the last second. A process that was suspended checks again."""
        self.check(1.0)

    def release(self) -> None:
        """Give the lease back after the last write. Safe to call twice."""
        if self._released:
            return
        self._closing.set()
        if self._thread is not threading.current_thread():
            self._thread.join(_RELEASE_S)  # it may wait for a file system that does not respond
        self._released = True
        if self._beats:
            with contextlib.suppress(OSError):
                _write_beat(self._root, self.epoch, RELEASED)

    def _keep(self, period_s: float) -> None:
        while not self._closing.wait(period_s):
            if self._beats:
                self._count += 1
                with contextlib.suppress(OSError):  # a full disk; a claim that was removed is found below
                    _write_beat(self._root, self.epoch, str(self._count))
            if not self._is_held():
                self._lose()
                return

    def _is_held(self) -> bool:
        try:
            epochs = _epochs(self._root)
        except FileNotFoundError:
            return False
        except OSError:  # no evidence: a file system that does not respond must not end the run
            return True
        return epochs[-1:] == [self.epoch]

    def _lose(self) -> None:
        if not self._lost.acquire(blocking=False) or self._closing.is_set():
            return
        holder = current_holder(self.run_dir)
        by = "its lease was removed" if holder is None else f"another start took it over: {holder}"
        with contextlib.suppress(OSError, ValueError):  # stderr may be closed
            sys.stderr.write(f"ridge: stopped: {self.run_dir} is no longer this start's ({by}); nothing more is written\n")
        self._end(TAKEN_OVER_EXIT_CODE)


def acquire(
    run_dir: Path,
    me: Holder,
    *,
    log: Callable[[str], None],
    job_ended: JobEnded | None = None,
    sleep: Callable[[float], None] = time.sleep,
    end: Callable[[int], None] = os._exit,
) -> Lease:
    """Claim the lease of an existing directory, if it is free or its holder is dead.

    Args:
      run_dir: the run directory.
      me: `this_process`.
      log: receives one line before a wait, and one when a lease is taken over.
      job_ended: whether a Slurm job of this cluster has ended for certain; it is called with the job's id.
      sleep: in seconds, between two looks at the counter of a holder that may be dead.
      end: ends the process when the lease is lost.

    Raises:
      UserError: another start holds the lease and lives.
      OSError: the directory cannot be written.
    """
    root = run_dir / LEASE
    while True:
        refuse_link(root)
        root.mkdir(exist_ok=True)
        epoch = (_epochs(root) or [0])[-1]
        if epoch and not _is_free(run_dir, epoch, me, job_ended, log, sleep):
            continue
        if _claim(root, epoch + 1, me):
            _remove_others(root, epoch + 1)
            return Lease(run_dir, epoch + 1, me.timeout_s, beats=True, end=end)


def current_holder(run_dir: Path) -> Holder | None:
    """Return the holder of the highest epoch; None without one, when it has released the lease, or when its claim cannot be read."""
    try:
        epoch = (_epochs(run_dir / LEASE) or [0])[-1]
    except OSError:
        return None
    return None if not epoch or _read_beat(run_dir / LEASE, epoch) == RELEASED else _read_holder(run_dir / LEASE, epoch)


def live_holder(run_dir: Path) -> Holder | None:
    """Return the holder of the lease if it lives, for display: nothing is claimed, and nothing waits.

    On this machine its process decides; elsewhere the time of its last beat, which needs clocks that agree within its timeout.
    """
    holder = current_holder(run_dir)
    if holder is None:
        return None
    if holder.here:
        return None if _process_gone(holder) else holder
    try:
        beat = run_dir / LEASE / f"{_epochs(run_dir / LEASE)[-1]:08d}" / _BEAT
        return holder if time.time() - beat.stat().st_mtime < 2 * holder.timeout_s else None
    except (OSError, IndexError):
        return None


def _is_free(
    run_dir: Path, epoch: int, me: Holder, job_ended: JobEnded | None, log: Callable[[str], None], sleep: Callable[[float], None]
) -> bool:
    """Return whether `epoch` is released or its holder dead; False if there is a higher one by now. Raises UserError if it lives."""
    root = run_dir / LEASE
    beat, holder = _read_beat(root, epoch), _read_holder(root, epoch)
    if beat == RELEASED:
        return True
    name = str(holder) if holder is not None else f"the holder of epoch {epoch}"
    if holder is not None and (why := _why_dead(holder, me, job_ended)):
        log(f"taking over {run_dir} from {name}: {why}")
        return True
    timeout_s = max(me.timeout_s, holder.timeout_s if holder is not None else 0.0)
    looks = 2 * _BEATS  # counted, not timed: this process may be suspended too
    for look in range(looks):
        if look == _BEATS // 3:
            log(f"{run_dir}: waiting up to {timeout_s:g} s for a sign of life of {name}")
        sleep(timeout_s / looks)
        if _epochs(root)[-1:] != [epoch]:
            return False
        now = _read_beat(root, epoch)
        if now == RELEASED:
            return True
        if now != beat:
            raise UserError(f"{run_dir} is in use: {name} is writing it; stop that start first, or choose another run_dir")
        if holder is not None and _process_gone(holder):
            break
    log(f"taking over {run_dir} from {name}: no sign of life for {timeout_s:g} s")
    return True


def _why_dead(holder: Holder, me: Holder, job_ended: JobEnded | None) -> str | None:
    """Return why the holder is dead without waiting for its counter; None: not known."""
    if _process_gone(holder):
        return "that process is gone"
    if holder.job is None or me.job is None:
        return None
    if holder.job == me.job:
        return "Slurm has requeued the job since" if me.attempt > holder.attempt else None
    cluster, _, job = holder.job.partition(":")
    if job_ended is not None and cluster == me.job.partition(":")[0] and job_ended(job):
        return "that job has ended"
    return None


def _claim(root: Path, epoch: int, me: Holder) -> bool:
    """Claim an epoch; return whether it is this process's, and the highest."""
    scratch, target = root / f".{me.token}", root / f"{epoch:08d}"
    failure: OSError | None = None
    try:
        scratch.mkdir()
        write_record(scratch / _HOLDER, me)
        (scratch / _BEAT).write_text("0".ljust(_BEAT_BYTES))
        os.rename(scratch, target)
        sync_directory(root)
    except OSError as error:  # claimed by another start; over NFS also when the reply of a successful rename was lost
        failure = error
    shutil.rmtree(scratch, ignore_errors=True)
    claimed = _read_holder(root, epoch)
    if claimed is None or claimed.token != me.token:
        if failure is not None and not target.exists() and not isinstance(failure, FileNotFoundError):
            raise failure
        return False
    if _epochs(root)[-1:] == [epoch]:
        return True
    shutil.rmtree(target, ignore_errors=True)  # higher ones came and removed this epoch while this process was slow
    return False


def _remove_others(root: Path, epoch: int) -> None:
    """Remove earlier epochs, and what starts killed during their claim left."""
    for name in os.listdir(root):
        if name.startswith(".") or (name.isdecimal() and int(name) < epoch):
            shutil.rmtree(root / name, ignore_errors=True)


def _epochs(root: Path) -> list[int]:
    return sorted(int(name) for name in os.listdir(root) if name.isdecimal())


def _read_holder(root: Path, epoch: int) -> Holder | None:
    try:
        return read_record(root / f"{epoch:08d}" / _HOLDER, Holder)
    except UserError:
        return None


def _read_beat(root: Path, epoch: int) -> str:
    try:
        return read_limited(root / f"{epoch:08d}" / _BEAT, _MAX_BEAT_BYTES).decode(errors="replace").strip()
    except UserError:
        return ""


def _write_beat(root: Path, epoch: int, text: str) -> None:
    """Overwrite the counter in place: never creates it, since the claim may have been removed. Closing sends it to the server of NFS."""
    number = os.open(root / f"{epoch:08d}" / _BEAT, os.O_WRONLY | os.O_NONBLOCK)  # a FIFO in its place would block
    try:
        os.pwrite(number, text.ljust(_BEAT_BYTES).encode(), 0)
    finally:
        os.close(number)


def _machine() -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return socket.gethostname()


def _process_started(pid: int) -> str | None:
    """Return the start time of a process, "ended" for a zombie; None where the system does not give it."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return None
    return "ended" if fields[0] in "ZX" else fields[19]


def _process_gone(holder: Holder) -> bool:
    """Return whether the holder's process was on this machine and has ended."""
    if not holder.here:
        return False
    try:
        os.kill(holder.pid, 0)
    except ProcessLookupError:
        return True
    except OSError:  # of another user
        return False
    return holder.started is not None and _process_started(holder.pid) not in (None, holder.started)


def _clock_s() -> float:
    """Return seconds that also pass while the machine is suspended."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))
