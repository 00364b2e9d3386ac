"""One catalog entry is all that a new GPU needs: it is recognized, planned, compiled for, and its links are assumed."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ridgeline.configs.cluster import load_cluster
from ridgeline.configs.load import load
from ridgeline.launch.environment import Host, choose
from ridgeline.planner import hardware
from ridgeline.planner.calibration import load_calibration
from ridgeline.planner.links import assumed_cluster
from ridgeline.planner.plan import make_plan
from ridgeline.trainer.aot.compile import Request
from ridgeline.trainer.aot.target import compute_capability, target_config

ENTRY = """
x100:
  kinds: ["NVIDIA X100"]
  generation: xenon
  target: {compute_capability: [12, 0], fpus_per_core: 128, shared_memory_per_core: 262144}
  assumed_cluster: dgx-b200
  peak_flops: {float32: 150e12, tfloat32: 2.25e15, bfloat16: 4.5e15, float16: 4.5e15, float8: 9e15, float4: 18e15}
  source: made up
  memory_bytes: 300e9
  memory_gb_per_s: 16000
  l2_bytes: 200e6
  cores: 200
  clock_ghz: 2.2
  nvlink_gb_per_s: 1800
  host_gb_per_s: 128
  tdp_w: 1500
  price_usd: 10
"""


@pytest.fixture(autouse=True)
def catalog_with_the_gpu(tmp_path, monkeypatch) -> Iterator[None]:
    path = tmp_path / "hardware.yaml"
    path.write_text(hardware.CATALOG.read_text() + ENTRY)
    monkeypatch.setattr(hardware, "CATALOG", path)
    caches = (hardware._read, hardware.catalog)
    for cache in caches:
        cache.cache_clear()
    yield
    for cache in caches:
        cache.cache_clear()


def test_it_is_recognized_with_its_peak_and_generation() -> None:
    found = hardware.find_hardware("NVIDIA X100")
    assert found is not None and found.name == "x100"
    assert hardware.peak_flops("NVIDIA X100", "bfloat16") == 4.5e15
    assert hardware.generation_of("NVIDIA X100") == "xenon"
    settings = choose(Host("xenon", "9.9", None), load("quickstart").config, {}, lambda flags: [])
    assert {"JAX_OPTIMIZATION_LEVEL", "XLA_PYTHON_CLIENT_MEM_FRACTION"} <= {setting.name for setting in settings}


def test_it_is_planned_faster_than_the_fastest_of_today() -> None:
    config = load("models/llama-3.1-8b", ("data.seq_len=4096", "data.batch_size=32")).config
    times = {}
    for device in ("x100", "b200"):
        cluster = load_cluster("dgx-b200", [f"device={device}"]).config
        best = make_plan(config, cluster, load_calibration(), [1], tokens=1e9).best[0]
        times[device] = best.step.step_s
        assert best.memory.total_bytes <= hardware.hardware(device).memory_bytes
    assert times["x100"] < times["b200"]


def test_it_is_compiled_for() -> None:
    device = hardware.hardware("x100")
    text = target_config(device)
    assert compute_capability(device) == (12, 0)
    for field in ("core_count: 200", "shared_memory_per_core: 262144", "shared_memory_per_block_optin: 261120", "major: 12 minor: 0"):
        assert field in text
    request = Request.on(load("quickstart").config, load_cluster("generic", ["device=x100"]).config, 1)
    assert request.device is device


def test_its_links_are_assumed_for_a_run_without_a_cluster_file() -> None:
    cluster = assumed_cluster(hardware.hardware("x100"))
    assert cluster is not None and cluster.device == "x100"
    assert cluster.links == load_cluster("dgx-b200").config.links
    assert assumed_cluster(hardware.hardware("cpu")) is None
