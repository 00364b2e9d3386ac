"""`bad_nodes` of a run directory: a line per bad node: name, time, reason. The job script requeues without these nodes."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path

from ridgeline.configs.files import read_limited
from ridgeline.rundir.jsonl import LineFile

BAD_NODES = "bad_nodes"


def node_name(env: Mapping[str, str] = os.environ) -> str:
    """Return the name of this machine as bad_nodes has it: Slurm's name of the node, else the host's."""
    return env.get("SLURMD_NODENAME") or socket.gethostname()


def restarts_without_them(env: Mapping[str, str] = os.environ) -> bool:
    """Return whether this process is part of a Slurm job, whose script starts the run again without bad nodes."""
    return "SLURM_JOB_ID" in env


def add_bad_nodes(run_dir: Path, reasons: Mapping[str, str], now: datetime) -> None:
    """Append nodes, name -> reason. Raises UserError if the run directory is not writable."""
    if not reasons:
        return
    file = LineFile(run_dir / BAD_NODES)
    try:
        for node, why in reasons.items():
            file.append(f"{node} {now.isoformat(timespec='seconds')} {' '.join(why.split())}\n".encode())
    finally:
        file.close()


def read_bad_nodes(run_dir: Path) -> dict[str, str]:
    """Return node -> reason (the newest) of a run directory's bad_nodes; empty without one."""
    path = run_dir / BAD_NODES
    lines = read_limited(path).decode(errors="replace").splitlines() if path.exists() else []
    return {parts[0]: parts[2] for line in lines if len(parts := line.split(" ", 2)) == 3}
