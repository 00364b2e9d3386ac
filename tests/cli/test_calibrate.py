"""`ridge calibrate` on the CPU: what it measures is what the planner then uses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ridgeline.cli import main as cli
from ridgeline.configs.cluster import load_cluster
from ridgeline.configs.errors import UserError
from ridgeline.measure import calibration
from ridgeline.measure.calibration import device_entry
from ridgeline.planner.calibration import load_calibration
from ridgeline.planner.communication import time_s
from ridgeline.planner.hardware import hardware
from ridgeline.planner.links import Fabric
from tests.loaders.token_corpora import random_docs, write_corpus

QUICK = calibration.Sizes(((128, 128, 128), (64, 256, 64)), ("float32", "bfloat16"), 2**20, (2**12, 2**16), ())


@pytest.fixture(autouse=True)
def _quick(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(calibration, "CPU", QUICK)


def test_what_is_measured_is_what_the_planner_uses(capsys):
    write_corpus(Path("corpus"), [random_docs(0, 400)])
    assert cli.run(["calibrate", "-o", "own.yaml", "--data", "corpus", "--json"]) == 0
    captured = capsys.readouterr()
    measured = json.loads(captured.out)
    assert "measuring matmuls: 2 shapes, float32, bfloat16" in captured.err
    own = load_calibration("own.yaml")
    assert own.file.model_dump(mode="json")["matmul"][-4:] == measured["matmul"]
    cpu = hardware("cpu")
    for point in measured["matmul"]:
        assert point["tflop_per_s"] > 0
        rate = own.matmul_flops_per_s(cpu, point["dtype"], point["m"], point["n"], point["k"])
        assert rate == pytest.approx(point["tflop_per_s"] * 1e12)
    assert own.memory_bytes_per_s(cpu) == pytest.approx(measured["memory"][0]["gb_per_s"] * 1e9)
    assert [size for size, _ in measured["links"][0]["measured"]] == [2**12 * 7 / 8, 2**16 * 7 / 8]
    assert own.link_curve("memory", "cpu", 1e15) is not None
    assert own.file.host.dispatch_us > 0
    assert own.file.host.input_tokens_per_s > 0
    assert own.file.host.copy_gb_per_s is None  # there is no copy to a CPU device

    model = ["model.num_layers=2", "model.embed_dim=64", "model.mlp_dim=128", "data.seq_len=64", "mesh.fsdp=1", "precision.compute=float32"]
    Path("x.yaml").write_text("{}\n")
    steps = []
    for more in ([], ["--calibration", "own.yaml"]):
        assert cli.run(["estimate", "step", "x.yaml", *model, "--cluster", "local", "--nodes", "1", "--json", *more]) == 0
        steps.append(json.loads(capsys.readouterr().out))
    assert steps[0]["calibration"] == "published measurements"
    assert steps[1]["calibration"] == measured["name"]
    assert steps[0]["step_s"] != steps[1]["step_s"]


SWITCHED = """
name: switched
device: cpu
devices_per_node: 8
cores_per_node: 2
memory_per_node_gib: 8
links: [{name: switch, kind: nvlink, bandwidth_gb_per_s: 1000, latency_us: 0, in_switch_reduction: true}]
"""


def test_a_cluster_file_defines_the_links(capsys):
    Path("site.yaml").write_text(SWITCHED)
    assert cli.run(["calibrate", "-o", "own.yaml", "--cluster", "site.yaml"]) == 0
    shown = capsys.readouterr().out
    assert "nvlink, 0.06 MB sent" in shown
    assert "nvlink, 0.07 MB reduced in the switch" in shown
    assert "--calibration own.yaml" in shown
    fabric = Fabric.from_cluster(load_cluster("site.yaml").config, load_calibration("own.yaml"))
    rates = {
        curve.in_switch: dict(curve.measured)[2**16 * (1 if curve.in_switch else 7 / 8)]
        for curve in load_calibration("own.yaml").file.links[-2:]
    }
    predicted = time_s("all-reduce", 2**16, fabric.group(1, 8), "in-switch")
    assert predicted.algorithm_bandwidth == pytest.approx(rates[True] * 1e9)
    gather = time_s("all-gather", 2**16, fabric.group(1, 8))
    assert gather.bus_bandwidth == pytest.approx(rates[False] * 1e9)


def test_figures_are_shown_without_shares_of_nominal_peaks(capsys):
    assert cli.run(["calibrate"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("Measured on cpu with jax ")
    assert next(line for line in lines if line.startswith("matmul float32 128 x 128 x 128")).endswith("n/a")
    assert not any("written to" in line for line in lines)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--cluster", "dgx-h100"], "cluster dgx-h100 has h100-sxm devices, but this machine's are cpu"),
        (["--cluster", "dgx-h10"], "did you mean 'dgx-h100'"),
        (["-o", "no/such/file.yaml"], "no/such/file.yaml: cannot be written: "),
    ],
)
def test_mistakes_are_refused_before_anything_is_measured(arguments, message, capsys):
    assert cli.run(["calibrate", *arguments]) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert "measuring" not in captured.err


def test_a_gpu_that_is_not_in_the_catalog_is_named_and_not_guessed():
    assert device_entry("gpu", "NVIDIA H200").name == "h200-sxm"
    with pytest.raises(UserError, match=r"'NVIDIA H800' .*hardware\.yaml"):
        device_entry("gpu", "NVIDIA H800")
