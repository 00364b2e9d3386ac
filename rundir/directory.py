"""The run directory: everything a run leaves behind, each file read in one place with its types checked.

    config.yaml            resolved config of the newest start (config.<n>.yaml: of start n, when a later start changed it)
    run.json               name, id, and one entry per start (rundir/records.py)
    git.diff               uncommitted changes of the source tree at the first start (git.<n>.diff: at start n)
    events.jsonl           event log of process 0 (events.<p>.jsonl: of process p; rundir/events.py)
    ledger.json            seconds by category of the starts before the newest (rundir/earlier_starts.py)
    metrics.jsonl          metrics of process 0 (observe/writers.py)
    train.log              what training printed, over all starts (observe/progress.py)
    plan.json              planned beside compiled memory, communication and time, at the newest start
    compile.json           figures of the compiled step, at the newest start
    reference.npz          with preference.loss: log-probabilities by the model before training (trainer/reference.py)
    checkpoints/           trainer/checkpoint
    tensorboard/           curves, and the captured profiles (rundir/captures.py)
    slurm/                 submissions and jobs (rundir/jobs.py)
    attempts.jsonl         one line per run of the job script (rundir/jobs.py)
    nodes.jsonl            one line per start of an elastic job: its nodes and spares (rundir/allocations.py)
    lease/                 which start may write here (rundir/lease.py)

A `RunDir` reads each file at first use and keeps the result; open the directory again to see newer content. A file that may be absent is
None or empty; a file that is damaged, or needed and absent, raises UserError with one line that names the file and the line or key.
"""

from __future__ import annotations

import io
import os
import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

from ridgeline.configs.cluster import ClusterConfig, load_cluster
from ridgeline.configs.errors import UserError
from ridgeline.configs.load import from_resolved
from ridgeline.configs.schema import Config
from ridgeline.planner.economics import price_usd
from ridgeline.planner.hardware import hardware
from ridgeline.rundir import files
from ridgeline.rundir.analysis import Analysis, read_analysis
from ridgeline.rundir.captures import captures, newest_analysis
from ridgeline.rundir.events import Event, event_file, event_files, read_events
from ridgeline.rundir.files import read_record, temporary, write_record
from ridgeline.rundir.jobs import JOBS_FILE, Attempt, JobRecord, newest_cluster_file, read_attempts, read_jobs, slurm_directory
from ridgeline.rundir.jsonl import read_jsonl
from ridgeline.rundir.lease import LEASE
from ridgeline.rundir.records import COMPILE_FILE, PLAN_FILE, RUN_FILE, CompileRecord, PlanRecord, RunRecord, Start

CONFIG_FILE = "config.yaml"
METRICS_FILE = "metrics.jsonl"
LEDGER_FILE = "ledger.json"
TRAIN_LOG = "train.log"
AUTOTUNE = "autotune"
"""Directory of XLA's choices of kernels, with runtime.deterministic."""
REFERENCE_FILE = "reference.npz"
_BEFORE_THE_FIRST_START = ("slurm", "attempts.jsonl", "nodes.jsonl", "doctor.jsonl", "bad_nodes", LEASE, AUTOTUNE)
"""Left in a run directory by `ridge submit`, the preflight of a job, or a start that was killed, before run.json was written."""
_WRITTEN = re.compile(r"(run|plan|compile|ledger|skipped_batches)\.json|reference\.npz|config(\.\d+)?\.yaml|git(\.\d+)?\.diff")
"""Names of the files that are replaced atomically."""


@dataclass(frozen=True)
class RunDir:
    """A run directory. `RunDir.open` requires a run; `RunDir(path)` also fits a directory that may not be one yet."""

    path: Path

    @classmethod
    def open(cls, path: Path) -> RunDir:
        """Return the run directory at `path`. Raises UserError when run.json is absent or damaged."""
        run = cls(path)
        _ = run.record
        return run

    @staticmethod
    def find_above(path: Path) -> RunDir | None:
        """Return the run directory that contains `path`; None when no parent has a run.json."""
        parents = path.resolve().parents
        return next((RunDir(parent) for parent in parents if (parent / RUN_FILE).is_file()), None)

    @property
    def exists(self) -> bool:
        """Whether there is a run.json."""
        return self.record_file.is_file()

    @property
    def record_file(self) -> Path:
        """run.json."""
        return self.path / RUN_FILE

    @cached_property
    def record(self) -> RunRecord:
        """run.json. Raises UserError when absent or damaged."""
        found = read_record(self.record_file, RunRecord)
        if found is None:
            raise UserError(f"{self.path} is not a run directory: it has no {RUN_FILE}")
        return found

    def require_start(self) -> Start:
        """Return the newest start of run.json. Raises UserError when there is none."""
        if self.record.last_start is None:
            raise UserError(f"{self.record_file}: starts is empty: the run never started")
        return self.record.last_start

    @property
    def name(self) -> str:
        """Name of the run; that of the directory when not recorded."""
        return (self.record.name if self.exists else "") or self.path.name

    @property
    def config_file(self) -> Path:
        """The resolved config of the newest start."""
        return self.path / CONFIG_FILE

    @cached_property
    def config(self) -> Config | None:
        """The resolved config of the newest start; None when a killed start left none. Raises UserError when damaged."""
        return from_resolved(self.config_file) if self.config_file.is_file() else None

    def require_config(self) -> Config:
        """Return `config`. Raises UserError when absent or damaged."""
        if self.config is None:
            raise UserError(f"{self.path} has no {CONFIG_FILE}")
        return self.config

    @cached_property
    def events(self) -> list[Event]:
        """Events of all processes and starts in order of time; [] when the run never started. Raises UserError when damaged."""
        return read_events(event_files(self.path))

    def require_events(self) -> list[Event]:
        """Return `events`. Raises UserError when there is no event log or it is damaged."""
        if not event_files(self.path):
            raise UserError(f"{self.path} has no events.jsonl: the run never started")
        return self.events

    def events_of(self, process: int) -> list[Event]:
        """Return the events of one process; [] without a log. Raises UserError when damaged."""
        file = event_file(self.path, process)
        return read_events(file) if file.exists() else []

    @cached_property
    def plan(self) -> PlanRecord | None:
        """plan.json; None when absent. Raises UserError when damaged."""
        return read_record(self.path / PLAN_FILE, PlanRecord)

    @cached_property
    def compiled(self) -> CompileRecord | None:
        """compile.json; None when absent. Raises UserError when damaged."""
        return read_record(self.path / COMPILE_FILE, CompileRecord)

    @cached_property
    def metrics(self) -> list[dict[str, Any]]:
        """Lines of metrics.jsonl (`read_metrics`); [] when absent. Raises UserError when damaged."""
        file = self.path / METRICS_FILE
        return read_metrics(file) if file.exists() else []

    @property
    def step_bytes(self) -> int | None:
        """Arguments and temporaries of the compiled step per device, from compile.json or plan.json; None when neither has them."""
        sizes = self.compiled or (None if self.plan is None else self.plan.compiled)
        return None if sizes is None else sizes.step_bytes

    @cached_property
    def analysis(self) -> Analysis | None:
        """The newest analysis.json of the captures; None when no capture was analyzed. Raises UserError when damaged."""
        file = newest_analysis(self.path)
        return None if file is None else read_analysis(file)

    @property
    def captures(self) -> list[Path]:
        """Directories of the captured profiles, oldest first."""
        return captures(self.path)

    @cached_property
    def jobs(self) -> list[JobRecord]:
        """Submitted jobs, oldest first; [] when none was submitted. Raises UserError when damaged."""
        file = slurm_directory(self.path) / JOBS_FILE
        return read_jobs(self.path) if file.exists() and file.stat().st_size else []

    @cached_property
    def attempts(self) -> list[Attempt]:
        """Runs of the job script, oldest first; [] when there was none. Raises UserError when damaged."""
        return read_attempts(self.path)

    @cached_property
    def cluster_file(self) -> Path | None:
        """Cluster file of the newest submission; None when the run was never submitted."""
        return newest_cluster_file(self.path)

    @cached_property
    def cluster(self) -> ClusterConfig | None:
        """Cluster of the newest submission; None when the run was never submitted. Raises UserError when the file is damaged."""
        return None if self.cluster_file is None else load_cluster(str(self.cluster_file)).config

    @property
    def price(self) -> float | None:
        """Price of one device for an hour on `cluster`, USD; None without a cluster or a price."""
        return None if self.cluster is None else cluster_price(self.cluster)

    def price_on(self, cluster: str | None) -> float | None:
        """Return the price of one device for an hour, USD, on a cluster (file or name); None: on the one the run was submitted to.

        Raises UserError when there is no such cluster.
        """
        return self.price if cluster is None else cluster_price(load_cluster(cluster).config)

    def foreign_entries(self) -> list[str]:
        """Return the names of entries that are left before the first start neither by `ridge submit`, the preflight of a job, nor a start
        that was killed while it wrote run.json."""
        ours = {*_BEFORE_THE_FIRST_START, temporary(self.record_file).name}
        return sorted(entry for entry in os.listdir(self.path) if not entry.startswith(".") and entry not in ours)

    def remove_temporaries(self) -> None:
        """Remove what a killed start left while it wrote a file. Only for the holder of the lease. Raises OSError."""
        for path in self.path.glob("*.tmp"):
            if _WRITTEN.fullmatch(path.name.removesuffix(".tmp")):
                path.unlink()

    def write_record(self, record: RunRecord) -> None:
        """Replace run.json. Raises OSError."""
        write_record(self.record_file, record)

    def write_config(self, config: Config, keep_as: int | None = None) -> None:
        """Replace config.yaml. Raises OSError.

        Args:
          config: the new one.
          keep_as: number of the start whose config is replaced: it is kept as config.<n>.yaml; None: it is not kept.
        """
        if keep_as is not None:
            files.write_atomically(self.path / f"config.{keep_as}.yaml", self.config_file.read_bytes())
        text = io.StringIO()
        YAML(typ="safe", pure=True).dump(config.model_dump(mode="json"), text)
        files.write_atomically(self.config_file, text.getvalue().encode())

    def write_diff(self, diff: str, start: int) -> str:
        """Write the uncommitted changes of the source tree at a start; return the file's name. Raises OSError."""
        name = "git.diff" if start == 0 else f"git.{start}.diff"
        files.write_atomically(self.path / name, diff.encode(errors="surrogateescape"))
        return name

    @property
    def checkpoints(self) -> Path:
        """Directory of the checkpoints."""
        return self.path / "checkpoints"

    @property
    def tokenizer(self) -> Path:
        """Directory of the run's copy of the tokenizer."""
        return self.path / "tokenizer"


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Return the lines of metrics.jsonl in their order, without those that a later resume replaced. Non-finite values are floats.

    Raises:
      UserError: the file cannot be read or is damaged before its last line.
    """
    records: list[dict[str, Any]] = []
    special = {"NaN", "Infinity", "-Infinity"}
    for _, line in read_jsonl(path):
        if "resume" in line:
            records = [r for r in records if r["step"] <= line["resume"]]
        else:
            records.append({k: float(v) if isinstance(v, str) and v in special else v for k, v in line.items()})
    return records


def known_cluster(run: RunDir | None, name: str | None = None) -> ClusterConfig | None:
    """Return the cluster of this name or file; without a name the one a run was submitted to, else the one that its plan.json was made for.

    None without a run, or where the run does not record a cluster that is known on this machine. Raises UserError when there is no
    cluster of the given name, or a file is damaged.
    """
    if name is not None:
        return load_cluster(name).config
    if run is None or run.cluster is not None:
        return None if run is None else run.cluster
    planned = None if run.plan is None else run.plan.cluster
    try:
        return None if planned is None else load_cluster(planned).config
    except UserError:  # a cluster of another machine
        return None


def cluster_price(cluster: ClusterConfig) -> float | None:
    """Return the price of one device for an hour, USD: that of the cluster file, else the typical one of the device."""
    return price_usd(cluster, hardware(cluster.device))
