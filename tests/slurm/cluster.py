"""A real Slurm on this machine: one controller and four node daemons of a private configuration, with its own munge.

Debian's Slurm is built with multiple-slurmd support, so several daemons on one host are several nodes to Slurm. Every node has a
loopback address of its own. Nothing of the machine's own configuration is read or changed, and several such clusters may run at once:
each has a name of its own, from which runs derive their ports, and those of one session have other addresses.
"""

from __future__ import annotations

import contextlib
import getpass
import os
import pwd
import random
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

PROGRAMS = ("setpriv", "munged", "slurmctld", "slurmd", "srun", "sbatch", "scontrol")
NODES = ("node01", "node02", "node03", "node04")
CPUS_PER_NODE = 2
GRACE_S = 60
"""Seconds between SIGTERM and SIGKILL: preemption grace of the partition, and KillWait."""

PATIENT_S = {"TCPTimeout": 20, "MessageTimeout": 60, "BatchStartTimeout": 60}
"""Limits that are long enough for an overloaded machine. A lost node is given up after one or two of these."""
USUAL_S = {"TCPTimeout": 2, "MessageTimeout": 10, "BatchStartTimeout": 10}
"""Slurm's defaults."""

# A requeued job starts only after its old credentials expire: cred_expire makes that five seconds instead of two minutes.
CONF = """\
ClusterName=ridgetest{pid}
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={munge},cred_expire=5
CredType=cred/munge
StateSaveLocation={directory}/state
SlurmdSpoolDir={directory}/spool-%n
SlurmctldPidFile={directory}/slurmctld.pid
SlurmdPidFile={directory}/slurmd-%n.pid
SlurmctldLogFile={directory}/slurmctld.log
SlurmdLogFile={directory}/slurmd-%n.log
ProctrackType=proctrack/pgid
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
JobRequeue=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
KillWait={grace}
SlurmdTimeout=15
SlurmctldTimeout=30
{limits}
InactiveLimit=0
MinJobAge=3600
ReturnToService=2
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=1,sched_interval=1,batch_sched_delay=0
JobCompType=jobcomp/none
AccountingStorageType=accounting_storage/none
{nodes}
PartitionName=low Nodes=ALL Default=YES MaxTime=7-00:00:00 PriorityTier=1 GraceTime={grace} State=UP
PartitionName=high Nodes=ALL MaxTime=01:00:00 PriorityTier=10 PreemptMode=OFF State=UP
"""


class SlurmCluster:
    """Four nodes `node01`..`node04` of two CPUs, partitions `low` (default, preemptible after GRACE_S) and `high`."""

    def __init__(self, directory: Path, number: int = 0, limits_s: Mapping[str, int] = PATIENT_S) -> None:
        self.directory = directory
        self.number = number
        self.limits_s = limits_s
        self.env = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "SBATCH", "SRUN"))}
        self.env["SLURM_CONF"] = str(directory / "slurm.conf")
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}
        self._munge: Path | None = None

    @staticmethod
    def missing() -> list[str]:
        """Return the programs that are missing on this machine."""
        return [name for name in PROGRAMS if shutil.which(name, path=_PATH) is None]

    def start(self) -> None:
        """Start munge, the controller and the nodes; return when all nodes are idle."""
        self.directory.mkdir(parents=True, exist_ok=True)
        (self.directory / "state").mkdir()
        munge = self._start_munge()
        port, *node_ports = _free_ports(1 + len(NODES))
        nodes = "\n".join(
            f"NodeName={name} NodeHostname={socket.gethostname()} NodeAddr={self.address(name)} Port={number} CPUs={CPUS_PER_NODE}"
            for name, number in zip(NODES, node_ports, strict=True)
        )
        (self.directory / "slurm.conf").write_text(
            CONF.format(
                pid=os.getpid(),
                host=socket.gethostname(),
                port=port,
                user=getpass.getuser(),
                munge=munge,
                directory=self.directory,
                grace=GRACE_S,
                limits="\n".join(f"{name}={seconds}" for name, seconds in self.limits_s.items()),
                nodes=nodes,
            )
        )
        self._daemon("slurmctld", ["slurmctld", "-D"])
        for name in NODES:
            self.start_node(name)
        self.until(lambda: self.node_states() == dict.fromkeys(NODES, "IDLE"), 300, "all nodes idle")

    def stop(self) -> None:
        """End all jobs and daemons."""
        with contextlib.suppress(subprocess.SubprocessError):
            self.run("scancel", "--signal=KILL", "--user", getpass.getuser(), check=False)
            self.run("scancel", "--user", getpass.getuser(), check=False)
        for name in ("slurmctld", *NODES, "munged"):
            self._end(name, signal.SIGTERM)
        if self._munge is not None:
            shutil.rmtree(self._munge, ignore_errors=True)

    def clear(self) -> None:
        """Clean up after a test: cancel jobs, resume nodes that are down."""
        self.run("scancel", "--signal=KILL", "--full", "--user", getpass.getuser(), check=False)
        self.run("scancel", "--user", getpass.getuser(), check=False)
        for name in NODES:
            if name not in self._daemons:
                self.start_node(name)
        self.until(lambda: not self.run("squeue", "-h").stdout.strip(), 300, "no jobs")
        self.until(lambda: self.node_states() == dict.fromkeys(NODES, "IDLE"), 300, "all nodes idle")

    def _start_munge(self) -> Path:
        """Start a munge daemon with its own key and socket; as user munge if this process is root, which munge refuses."""
        home = Path("/tmp") / f"ridge-munge-{os.getpid()}-{abs(hash(self.directory)) % 10**6}"
        shutil.rmtree(home, ignore_errors=True)
        home.mkdir(mode=0o755)
        self._munge = home
        key = home / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o400)
        user = []
        if os.geteuid() == 0:
            munge = pwd.getpwnam("munge")
            for path in (home, key):
                os.chown(path, munge.pw_uid, munge.pw_gid)
            user = [f"--reuid={munge.pw_uid}", f"--regid={munge.pw_gid}", "--clear-groups"]
        files = {name: home / f"munged.{name}" for name in ("pid", "log", "seed")}
        arguments = [f"--{name}-file={path}" for name, path in files.items()]
        self._daemon("munged", ["munged", "-F", f"--key-file={key}", f"--socket={home}/socket", *arguments], user)
        self.until(lambda: (home / "socket").exists(), 120, "munge's socket")
        return home / "socket"

    def _daemon(self, name: str, command: Sequence[str], privileges: Sequence[str] = ()) -> None:
        """Start a daemon that ends with this process, even if the session is killed."""
        log = (self.directory / f"{name}.out").open("ab")
        env = self.env | {"PATH": _PATH}
        with log:
            self._daemons[name] = subprocess.Popen(
                ["setpriv", "--pdeathsig=TERM", *privileges, *command],
                env=env,
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )

    def _end(self, name: str, number: signal.Signals) -> None:
        process = self._daemons.pop(name, None)
        if process is None:
            return
        process.send_signal(number)
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def address(self, name: str) -> str:
        """Return the loopback address of a node: 127.0.1.1 for node01 of the first cluster, 127.0.2.1 of the second, ..."""
        return f"127.0.{1 + self.number}.{int(name.removeprefix('node'))}"

    def start_node(self, name: str) -> None:
        """Start the daemon of one node."""
        self._daemon(name, ["slurmd", "-D", "-N", name])

    def stop_node(self, name: str, *, processes: bool = True) -> None:
        """Simulate a crash of a node: kill its daemon and every process of its steps at once.

        processes: False leaves the steps alive, as when only the daemon dies or the network fails.
        """
        self._end(name, signal.SIGKILL)
        if not processes:
            return
        # step daemons first, so that none reports the end of its tasks
        for pid in self._processes_on(name):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def kill_step_daemon(self, name: str, job: str) -> None:
        """Kill the daemon of a job's first step on one node; its tasks, and the daemon of the node, live on."""
        (daemon,) = [pid for pid in self._processes_on(name) if f"[{job}.0]".encode() in Path(f"/proc/{pid}/cmdline").read_bytes()]
        os.kill(daemon, signal.SIGKILL)

    def kill_batch_shell(self, job: str) -> None:
        """Kill the shell that runs a job's script; the daemon of its step lives on."""
        commands = {pid: Path(f"/proc/{pid}/cmdline").read_bytes() for name in NODES for pid in self._processes_on(name)}
        (daemon,) = [pid for pid, command in commands.items() if f"[{job}.batch]".encode() in command]
        (shell,) = Path(f"/proc/{daemon}/task/{daemon}/children").read_text().split()
        os.kill(int(shell), signal.SIGKILL)

    def _processes_on(self, name: str) -> list[int]:
        """Return the step daemons and tasks of a node, identified by Slurm's variables."""
        daemons, tasks = [], []
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit():
                continue
            with contextlib.suppress(OSError):
                env = (entry / "environ").read_bytes().split(b"\0")
                command = (entry / "cmdline").read_bytes()
                if f"SLURM_CONF={self.directory}/slurm.conf".encode() not in env:
                    continue
                log = self.directory / f"slurmd-{name}.log"
                if b"slurmstepd" in command and any(os.path.realpath(file) == str(log) for file in (entry / "fd").iterdir()):
                    daemons.append(int(entry.name))
                elif f"SLURMD_NODENAME={name}".encode() in env:
                    tasks.append(int(entry.name))
        return daemons + tasks

    def run(
        self,
        *command: str | Path,
        timeout_s: float = 600,
        check: bool = True,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
    ) -> subprocess.CompletedProcess[str]:
        """Run a client command (srun, scontrol, ridge submit, ...) against this cluster."""
        done = subprocess.run(
            [str(part) for part in command],
            env={**self.env, **(env or {})},
            cwd=cwd,
            text=True,
            capture_output=True,
            timeout=timeout_s,
            stdin=subprocess.DEVNULL,
        )
        if check and done.returncode:
            raise AssertionError(f"{command} ended with {done.returncode}\n{done.stdout}\n{done.stderr}")
        return done

    def popen(self, *command: str | Path, **kwargs: object) -> subprocess.Popen[str]:
        """Start a client command without waiting for it; stdout and stderr are one pipe of text."""
        return subprocess.Popen(
            [str(part) for part in command],
            env=self.env,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            **kwargs,  # type: ignore[call-overload]
        )

    def sbatch(self, script: Path, *options: str) -> int:
        """Submit a script; return the job id."""
        return int(self.run("sbatch", "--parsable", *options, script).stdout.split(";")[0])

    def job(self, job: int | str) -> dict[str, str]:
        """Return the fields `scontrol show job` prints for a job (the first, of an array)."""
        shown = self.run("scontrol", "show", "job", "--oneliner", str(job)).stdout.splitlines()[0]
        return dict(field.split("=", 1) for field in shown.split() if "=" in field)

    def job_state(self, job: int | str) -> str:
        """Return PENDING, RUNNING, COMPLETED, FAILED, CANCELLED, TIMEOUT, PREEMPTED, ..."""
        return self.job(job)["JobState"]

    def wait_for_job(self, job: int | str, *states: str, timeout_s: float = 900) -> str:
        """Wait until a job is in one of the states (default: ended); return the state."""
        wanted = states or (
            "COMPLETED",
            "FAILED",
            "CANCELLED",
            "TIMEOUT",
            "NODE_FAIL",
            "PREEMPTED",
            "OUT_OF_MEMORY",
            "BOOT_FAIL",
            "DEADLINE",
        )
        self.until(lambda: self.job_state(job) in wanted, timeout_s, f"job {job} in {wanted}")
        return self.job_state(job)

    def node_states(self) -> dict[str, str]:
        """Return the state of every node, without Slurm's suffixes."""
        shown = self.run("sinfo", "-N", "-h", "-o", "%N %T", check=False).stdout.split("\n")
        return {line.split()[0]: line.split()[1].rstrip("*~#!%$@^-").upper() for line in shown if line}

    def until(self, condition: Callable[[], bool], timeout_s: float, what: str) -> None:
        """Poll until a condition holds; raise with the daemons' last lines otherwise."""
        end = time.monotonic() + timeout_s
        while not condition():
            if time.monotonic() > end:
                raise AssertionError(f"not within {timeout_s} s: {what}\n{self.logs()}")
            time.sleep(0.4)  # each client of Slurm takes 20 ms of CPU time from the runs

    def logs(self, lines: int = 15) -> str:
        """Return the last lines of every daemon's log."""
        texts = []
        for path in sorted(self.directory.glob("*.log")):
            tail = path.read_text(errors="replace").splitlines()[-lines:]
            texts.append(f"== {path.name}\n" + "\n".join(tail))
        return "\n".join(texts)


_PATH = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])


def _free_ports(count: int) -> list[int]:
    """Return distinct free ports outside of the range of outgoing connections.

    A node that starts again finds its own still free.
    """
    found: list[int] = []
    for port in random.SystemRandom().sample(range(20_000, 32_000), 500):
        with socket.socket() as item, contextlib.suppress(OSError):
            item.bind(("", port))
            found.append(port)
        if len(found) == count:
            return found
    raise AssertionError("no free ports")


@contextlib.contextmanager
def running(
    directory: Path, number: int, starting: contextlib.AbstractContextManager[object], limits_s: Mapping[str, int] = PATIENT_S
) -> Iterator[SlurmCluster]:
    """Run a cluster for the length of a with block.

    starting: lock of the start: two clusters must not choose the same ports. limits_s: seconds of Slurm's limits, by name.
    """
    cluster = SlurmCluster(directory, number, limits_s)
    try:
        with starting:
            cluster.start()
        yield cluster
    finally:
        cluster.stop()
