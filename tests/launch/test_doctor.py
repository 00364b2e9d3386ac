"""`ridge doctor` end to end on CPUs: real processes, real measurements, faults planted as real conditions."""

from __future__ import annotations

import json
import os
import resource
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from ridgeline.cli.main import run
from ridgeline.launch.exit_codes import BAD_NODE, DONE, LOST_PEER, PREEMPTED, USAGE
from ridgeline.rundir.bad_nodes import read_bad_nodes
from tests.xla_flags import QUICK_XLA

RIDGE = Path(sys.executable).with_name("ridge")
CPUS = """\
name: cpus
device: cpu
devices_per_node: 1
cores_per_node: 1
memory_per_node_gib: 1
links: [{name: loopback, kind: network, bandwidth_gb_per_s: 0.01, latency_us: 50}]
slurm: {gpu_request: none}
"""
"""What any machine reaches, however busy: these tests plant their own faults."""


@pytest.fixture
def cpus(tmp_path: Path) -> Path:
    path = tmp_path / "cpus.yaml"
    path.write_text(CPUS)
    return path


def start(*arguments: object, env: Mapping[str, str] | None = None, before: Callable[[], None] | None = None) -> subprocess.Popen[str]:
    """Start a doctor on one CPU device, unless `env` says otherwise."""
    return subprocess.Popen(
        [str(RIDGE), "doctor", "--quick", *map(str, arguments)],
        env={**os.environ, "XLA_FLAGS": QUICK_XLA, **(env or {})},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        preexec_fn=before,
    )


def alone(*arguments: object, **kwargs: Any) -> tuple[int, dict[str, Any], str]:
    """Run one doctor with --json; return exit code, report, stderr."""
    process = start("--json", *arguments, **kwargs)
    out, err = process.communicate(timeout=300)
    return process.returncode, json.loads(out) if out else {}, err


def together(
    cpus: Path, *arguments: object, nodes: Sequence[str] = ("n0", "n1", "n2"), planted: Mapping[str, Mapping[str, str]] | None = None
) -> tuple[list[int], dict[str, Any], str]:
    """Run a doctor per node, with the environment of some nodes planted; return exit codes, process 0's report, all of stderr."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    flags = ["--coordinator", f"127.0.0.1:{port}", "--processes", len(nodes), "--cluster", cpus, "--json"]
    started = [
        start(*flags, "--process", number, "--node", node, *arguments, env=(planted or {}).get(node)) for number, node in enumerate(nodes)
    ]
    ended = [process.communicate(timeout=300) for process in started]
    return [process.returncode for process in started], json.loads(ended[0][0]), "".join(err for _, err in ended)


def checks(report: Mapping[str, Any], node: str) -> dict[str, dict[str, Any]]:
    return {check["name"]: check for check in report["checks"] if check["node"] == node}


def hook(directory: Path, body: str) -> dict[str, str]:
    """Return an environment whose Python runs `body` at every audit event: conditions that strike one node at a chosen moment."""
    directory.mkdir()
    (directory / "sitecustomize.py").write_text(f"import os, signal, sys\ndef strike(event, args):\n    {body}\nsys.addaudithook(strike)\n")
    return {"PYTHONPATH": path_with(directory)}


def path_with(directory: Path) -> str:
    """Return PYTHONPATH with a directory in front."""
    return os.pathsep.join(filter(None, (str(directory), os.environ.get("PYTHONPATH"))))


def test_one_machine_with_eight_devices_measures_every_axis_of_the_config(tmp_path: Path, cpus: Path) -> None:
    config = tmp_path / "c.yaml"
    config.write_text("mesh: {data: 2, fsdp: 2, tensor: 2}\nruntime: {platform: cpu, cpu_devices: 8}\n")
    code, report, err = alone(config, "--cluster", cpus, "--run-dir", tmp_path / "run")
    assert code == DONE, err
    (node,) = report["nodes"]
    found = checks(report, node)
    for axis in ("data", "fsdp", "tensor"):
        for op in ("all-reduce", "all-gather"):
            assert found[f"{op} {axis}"]["value"] > 0
            assert found[f"{op} {axis}"]["verdict"] == "ok"
    assert found["arithmetic"]["verdict"] == "ok"
    for name in ("matmul float32", "matmul bfloat16", "memory bandwidth"):
        assert found[name]["value"] > 0
        assert found[name]["verdict"] == "not applicable"  # no figure and no peers: never a pass
    for name in ("device memory", "ecc", "throttle", "gpu links"):
        assert found[name]["verdict"] == "not applicable"
        assert "NVIDIA" in found[name]["reason"]
    logged = [json.loads(line) for line in (tmp_path / "run" / "doctor.jsonl").read_text().splitlines()]
    assert [line["name"] for line in logged[:-1]] == [check["name"] for check in report["checks"]]
    assert (logged[-1]["kind"], logged[-1]["fit"]) == ("verdict", True)
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["doctor.jsonl"]


def test_a_machine_short_of_everything_is_named_with_each_reason(tmp_path: Path, cpus: Path) -> None:
    cpus.write_text(
        CPUS.replace("devices_per_node: 1", "devices_per_node: 4")
        .replace("cores_per_node: 1", "cores_per_node: 4096")
        .replace("memory_per_node_gib: 1", "memory_per_node_gib: 1e6")
        + "nic_gb_per_s: 1\n"
    )
    config = tmp_path / "c.yaml"
    config.write_text("base: [models/llama-3.1-405b]\nmesh: {fsdp: 1}\n")  # a checkpoint of 5 TB

    def lower() -> None:
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (1 << 20, 1 << 20))

    code, report, _ = alone(config, "--cluster", cpus, "--run-dir", tmp_path / "run", "--node", "gpu7", before=lower)
    assert code == BAD_NODE
    found = checks(report, "gpu7")
    failed = {name for name, check in found.items() if check["verdict"] == "fail"}
    assert failed == {"devices", "cores", "memory", "disk space"}
    assert (found["devices"]["measured"], found["devices"]["expected"]) == ("1 cpu", "4")
    assert (found["memlock"]["measured"], found["memlock"]["verdict"]) == ("1.05 MB", "warn")
    assert all(found[name]["fix"] for name in failed)
    bad = read_bad_nodes(tmp_path / "run")
    assert list(bad) == ["gpu7"]
    assert all(f"{name}: " in bad["gpu7"] for name in failed)


def test_a_run_directory_that_takes_no_data_is_unfit(tmp_path: Path, cpus: Path) -> None:
    def lower() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))

    code, report, _ = alone("--cluster", cpus, "--run-dir", tmp_path / "run", "--node", "n0", before=lower)
    assert code == BAD_NODE
    assert report["unfit"]["n0"].startswith("disk write: 1.05 MB written: ")
    assert "File too large" in report["unfit"]["n0"]
    assert not [path for path in (tmp_path / "run").iterdir() if path.name.startswith(".")]


def test_three_good_nodes_are_compared_and_all_exit_well(tmp_path: Path, cpus: Path) -> None:
    codes, report, err = together(cpus, "--run-dir", tmp_path / "run")
    assert codes == [DONE] * 3, err
    assert report["nodes"] == ["n0", "n1", "n2"]
    for node in report["nodes"]:
        found = checks(report, node)
        assert found["versions"]["verdict"] == "ok"
        for name in ("link to neighbours", "all-reduce data", "all-gather data", "disk write"):
            assert found[name]["value"] > 0
            assert "peers" in found[name]["expected"]
        for name in ("matmul float32", "memory bandwidth"):
            assert found[name]["expected"].startswith("peers ")
            assert "peers" in found[name]["reason"] or "median of 3 nodes" in found[name]["reason"]
    assert checks(report, "n2")["clock"]["verdict"] == "ok"
    assert abs(checks(report, "n2")["clock"]["value"]) < 0.5


def test_another_library_version_on_one_node_is_named(tmp_path: Path, cpus: Path) -> None:
    shadow = tmp_path / "shadow" / "optax-0.0.1.dist-info"
    shadow.mkdir(parents=True)
    (shadow / "METADATA").write_text("Metadata-Version: 2.1\nName: optax\nVersion: 0.0.1\n")
    codes, report, _ = together(cpus, "--run-dir", tmp_path / "run", planted={"n1": {"PYTHONPATH": path_with(shadow.parent)}})
    assert codes == [BAD_NODE] * 3
    assert list(report["unfit"]) == ["n1"]
    assert "optax 0.0.1 here" in report["unfit"]["n1"]
    assert list(read_bad_nodes(tmp_path / "run")) == ["n1"]
    assert checks(report, "n0")["collectives"]["reason"] == "not measured: n1 would block the others"


def test_a_process_that_dies_at_its_devices_is_named(tmp_path: Path, cpus: Path) -> None:
    body = "event == 'import' and args[0] == 'ridgeline.measure.device_rates' and os.kill(os.getpid(), signal.SIGKILL)"
    codes, report, _ = together(cpus, planted={"n2": hook(tmp_path / "dies", body)})
    assert codes == [BAD_NODE] * 3
    assert list(report["unfit"]) == ["n2"]
    assert "killed by signal 9" in report["unfit"]["n2"]


@pytest.mark.slow
def test_of_nodes_hanging_in_a_collective_the_one_that_stopped_is_named(tmp_path: Path, cpus: Path) -> None:
    body = "event == 'import' and args[0] == 'ridgeline.measure.collectives' and os.kill(os.getpid(), signal.SIGSTOP)"
    codes, report, err = together(cpus, "--timeout", 45, planted={"n1": hook(tmp_path / "stops", body)})
    assert codes == [BAD_NODE] * 3, err
    assert list(report["unfit"]) == ["n1"]
    assert "within" in report["unfit"]["n1"]
    waiting = [check for check in report["checks"] if check["node"] == "n0" and check["reason"].startswith("waited for n1")]
    assert [check["verdict"] for check in waiting] == ["not applicable"]


@pytest.mark.slow
def test_processes_that_do_not_start_or_stop_responding_are_named(tmp_path: Path, cpus: Path) -> None:
    from ridgeline.launch.cluster.detect import Flags, describe
    from ridgeline.launch.preflight.exchange import ExchangeClient

    with socket.create_server(("127.0.0.1", 0)) as probe:
        where = f"127.0.0.1:{probe.getsockname()[1]}"
    flags = ["--coordinator", where, "--processes", 3, "--process", 0, "--node", "n0", "--cluster", cpus]
    leader = start(*flags, "--join-timeout", 5, "--json")
    here = describe({}, flags=Flags(where, 3, 1))
    silent = ExchangeClient(here.addresses, here.ports, here.identity, 1, "n1", timeout_s=60)  # registers, then sends nothing
    out, _ = leader.communicate(timeout=300)
    silent.close()
    assert leader.returncode == BAD_NODE
    report = json.loads(out)
    assert set(report["unfit"]) == {"n1", "process-2"}
    assert "during the host checks" in report["unfit"]["n1"]
    assert "process 2" in report["unfit"]["process-2"] and "within 5 s" in report["unfit"]["process-2"]
    assert checks(report, "n0")["matmul float32"]["value"] > 0


def test_a_sigterm_is_a_preemption(cpus: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        where = f"127.0.0.1:{probe.getsockname()[1]}"
    process = start("--coordinator", where, "--processes", 2, "--process", 0, "--cluster", cpus, "--join-timeout", 200)
    host, _, port = where.rpartition(":")
    while process.poll() is None:
        try:
            socket.create_connection((host, int(port)), timeout=1).close()
            break
        except OSError:
            continue
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=60)
    assert process.returncode == PREEMPTED
    *warnings, last = err.splitlines()
    assert last.startswith("ridge: stopped: ") and "SIGTERM" in last
    assert all("ignored a connection" in line for line in warnings)  # this test's own, if it was read before the signal


def test_text_has_a_table_per_node_and_a_verdict(tmp_path: Path, cpus: Path) -> None:
    out, _ = start("--cluster", cpus, "--node", "n0").communicate(timeout=300)
    lines = out.splitlines()
    assert lines[0] == "node n0"
    assert lines[1].split() == ["check", "measured", "expected", "verdict", "reason", "fix"]
    assert lines[-1].startswith("doctor: 1 node fit")


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--cluster", "mn5"], "cluster 'mn5' not found; did you mean 'mn5-acc'?"),
        (["nowhere.yaml"], "config 'nowhere.yaml' not found"),
        (["--calibration", "nowhere.yaml"], "calibration 'nowhere.yaml' not found"),
        (["--processes", "2", "--process", "0"], "--coordinator"),
        (["--coordinator", "127.0.0.1:9", "--processes", "2", "--process", "2"], "process 2 is not in 0..1"),
        (["--timeout", "0"], "invalid value for '--timeout'"),
        (["--process", "1"], "--processes"),
    ],
)
def test_a_mistake_is_one_line(
    arguments: list[str], line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(["doctor", *arguments]) == USAGE
    error = capsys.readouterr().err
    assert error.startswith("ridge: error: ")
    assert line in error
    assert error.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_a_process_0_that_is_not_there_is_a_lost_peer(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--coordinator", "127.0.0.1:9", "--processes", "2", "--process", "1", "--node", "n1"]
    assert run(["doctor", *flags, "--join-timeout", "1"]) == LOST_PEER
    assert capsys.readouterr().err.startswith("ridge: stopped: process 1 on n1 did not reach process 0 at 127.0.0.1")


def test_an_address_of_another_host_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["doctor", "--coordinator", "192.0.2.1:9", "--processes", "2", "--process", "0"]) == USAGE
    assert "which has none of the addresses of 192.0.2.1" in capsys.readouterr().err


def test_one_of_several_slurm_tasks_must_say_job(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for name, value in {"JOB_ID": "7", "STEP_ID": "0", "PROCID": "1", "STEP_NUM_TASKS": "4", "STEP_NODELIST": "n[0-3]"}.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    assert run(["doctor"]) == USAGE
    assert "one of 4 tasks of a Slurm step: use --job" in capsys.readouterr().err
