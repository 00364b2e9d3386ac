"""What of a large step's communication hides behind compute, compiled for GPUs that are not here with the flags of a run."""

from dataclasses import replace
from functools import cache

import pytest

from ridgeline.configs.cluster import load_cluster
from ridgeline.configs.load import load
from ridgeline.launch.environment import run_flags
from ridgeline.planner.calibration import load_calibration
from ridgeline.planner.search import search_scale
from ridgeline.planner.step_time import step_time
from ridgeline.trainer.aot.compile import Compiled, Request, compile_ahead, compile_many
from ridgeline.trainer.aot.report import Report, build_report, compare_overlap
from ridgeline.trainer.plan_record import overlapped

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("overlap")]  # its steps are compiled once, in one process
PLACE = load_cluster("dgx-h100").config
COMMON = (
    "model.num_layers=16",
    "data.seq_len=8192",
    "data.batch_size=64",
    "data.document_masking=false",
    "precision.compute=bfloat16",
    "compute.remat.policy=full",
)
HALF = ("model.num_heads=32", "model.num_kv_heads=4", "model.head_dim=128", "model.mlp_dim=14336")
"""A layer of half the 70B model's: its gathers are as large as those of the whole one over tensor=2, and so are the flags."""
LAYOUTS = {
    "fsdp": ("mesh.fsdp=64", *HALF),
    "tensor": ("mesh.fsdp=32", "mesh.tensor=2"),
    "ring": ("mesh.fsdp=32", "mesh.tensor=2", "compute.tensor_overlap=ring"),
}


@cache
def reports() -> dict[str, Report]:
    configs = {name: load("models/llama-3.1-70b", (*COMMON, *overrides)).config for name, overrides in LAYOUTS.items()}
    requests = {}
    for name, config in configs.items():
        flags, level = run_flags(configs["tensor" if name == "fsdp" else name], PLACE.device)
        requests[name] = replace(Request.on(config, PLACE, 8), xla_flags=flags, optimization_level=level)
    results = {}
    for flags in {request.xla_flags for request in requests.values()}:
        alike = [name for name, request in requests.items() if request.xla_flags == flags]
        results |= zip(alike, compile_many([requests[name] for name in alike]), strict=True)
    assert all(isinstance(compiled, Compiled) for compiled in results.values()), results
    return {name: build_report(requests[name], PLACE, compiled) for name, compiled in results.items()}


@pytest.mark.parametrize("layout", ["fsdp", "ring"])
def test_nearly_all_collective_bytes_of_a_large_step_have_compute_beside_them(layout: str) -> None:
    assert reports()[layout].overlapped_share >= 0.99


def test_over_tensor_all_bytes_of_fsdp_have_compute_beside_them_and_little_time_is_exposed() -> None:
    """What is recomputed waits for a gradient, and with it the gathers over tensor: attention is not computed twice to hide them."""
    report = reports()["tensor"]
    over_fsdp = [collective for collective in report.collectives if collective.axes == ("fsdp",)]
    assert sum(c.total_bytes for c in over_fsdp if overlapped(c)) >= 0.99 * sum(c.total_bytes for c in over_fsdp)
    assert report.schedule.exposed_s < 0.09 * report.schedule.step_s


def test_a_recomputed_layer_gathers_its_parameters_twice_and_reduces_their_gradients_once() -> None:
    report = reports()["fsdp"]
    in_loops = [c for c in report.collectives if c.count > 1 and c.axes == ("fsdp",) and c.bytes > 1e6]
    layers = sum(c.count for c in in_loops if c.kind == "reduce-scatter")
    assert layers >= 12 and sum(c.count for c in in_loops if c.kind == "all-gather") == 2 * layers
    assert all(row.agrees for row in report.traffic), report.traffic


def test_compute_waits_little_where_parameters_are_cut_over_fsdp_alone() -> None:
    played = reports()["fsdp"].schedule
    assert played.exposed_s < 0.15 * played.step_s
    assert played.communication_s > 2 * played.exposed_s


def test_the_comparison_of_gathers_and_rings_rests_on_what_was_compiled() -> None:
    both = {"gather": reports()["tensor"], "ring": reports()["ring"]}
    found = compare_overlap(both)
    assert found["rows"][1]["overlapped_share"] > found["rows"][0]["overlapped_share"]
    played = {value: report.schedule.step_s for value, report in both.items()}
    assert found["ratio"] == max(played.values()) / min(played.values())
    assert found["faster"] in (None, min(played, key=lambda value: played[value]))


def test_nearly_all_collective_bytes_of_deepseek_v3_on_1024_gpus_have_compute_beside_them() -> None:
    """Over tensor: weights of experts are gathered, and their gradients reduced, while attention runs (models/beside_attention.py)."""
    batch = ["data.seq_len=4096", "data.batch_size=8192", "trainer.accumulation=4"]
    chosen = ["mesh.fsdp=512", "mesh.tensor=2", "compute.remat.policy=offload", "compute.remat.names=[block_input]"]
    config, rates = load("models/deepseek-v3-671b", [*batch, *chosen]).config, load_calibration(None)
    flags, level = run_flags(config, PLACE.device)
    request = replace(Request.on(config, PLACE, 128), xla_flags=flags, optimization_level=level)
    report = build_report(request, PLACE, compile_ahead(request), rates)
    over_fsdp = [collective for collective in report.collectives if collective.axes == ("fsdp",)]
    assert sum(c.total_bytes for c in over_fsdp if overlapped(c)) >= 0.99 * sum(c.total_bytes for c in over_fsdp)
    assert report.fits and report.overlapped_share >= 0.95
    assert all(row.agrees for row in report.traffic if tuple(row.axes) != ("tensor",)), report.traffic
    assert report.estimate.compiled_bytes == pytest.approx(report.compiled.allocated_bytes, rel=0.05)
    planned = step_time(config, report.compiled.mesh, PLACE, rates)
    assert planned.step_s == pytest.approx(report.schedule.step_s, rel=0.1)
    best = search_scale(load("models/deepseek-v3-671b", batch).config, PLACE, rates, 128, 1e12).best
    assert best is not None and planned.step_s <= 1.05 * best.step.step_s
