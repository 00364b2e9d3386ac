"""`ridge doctor --job` on a real Slurm: every node is examined, and one with another library version is named."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from ridgeline.launch.exit_codes import BAD_NODE
from ridgeline.rundir.bad_nodes import read_bad_nodes
from tests.xla_flags import QUICK_XLA

RIDGE = Path(sys.executable).with_name("ridge")
NODES = ("node01", "node02", "node03", "node04")
ENVIRONMENT = {"XLA_FLAGS": QUICK_XLA, "JAX_PLATFORMS": "cpu"}
CLUSTER = """\
name: four
device: cpu
devices_per_node: 1
cores_per_node: 1
memory_per_node_gib: 1
links: [{name: loopback, kind: network, bandwidth_gb_per_s: 0.001, latency_us: 50}]
"""


def report(output: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(output[output.index("{") :])
    return found


def test_four_nodes_are_examined_by_name(slurm: Any, tmp_path: Path) -> None:
    (tmp_path / "four.yaml").write_text(CLUSTER)
    command = [RIDGE, "doctor", "--job", "--quick", "--json", "--cluster", "four.yaml", "--run-dir", "run"]
    done = slurm.run("srun", "-N4", "--ntasks-per-node=1", *command, cwd=tmp_path, check=False, timeout_s=900, env=ENVIRONMENT)
    assert done.returncode == 0, done.stdout + done.stderr
    found = report(done.stdout)
    assert found["nodes"] == list(NODES)
    names = {check["name"] for check in found["checks"] if check["node"] == "node03"}
    assert {"versions", "clock", "cores", "disk write", "devices", "link to neighbours", "all-reduce data", "all-gather data"} <= names
    assert not (tmp_path / "run" / "bad_nodes").exists()


def test_the_node_with_another_version_is_named_for_exclusion(slurm: Any, tmp_path: Path) -> None:
    (tmp_path / "four.yaml").write_text(CLUSTER)
    shadow = tmp_path / "shadow" / "flax-0.0.1.dist-info"
    shadow.mkdir(parents=True)
    (shadow / "METADATA").write_text("Metadata-Version: 2.1\nName: flax\nVersion: 0.0.1\n")
    (tmp_path / "task.sh").write_text(
        f'[ "$SLURMD_NODENAME" = node03 ] && export PYTHONPATH={shadow.parent}\n'
        f"exec {RIDGE} doctor --job --quick --json --cluster four.yaml --run-dir run\n"
    )
    command = ["srun", "-N4", "--ntasks-per-node=1", "bash", "task.sh"]
    done = slurm.run(*command, cwd=tmp_path, check=False, timeout_s=900, env=ENVIRONMENT)
    assert done.returncode == BAD_NODE, done.stdout + done.stderr
    assert list(report(done.stdout)["unfit"]) == ["node03"]
    bad = read_bad_nodes(tmp_path / "run")
    assert list(bad) == ["node03"]
    assert "flax 0.0.1 here" in bad["node03"]
