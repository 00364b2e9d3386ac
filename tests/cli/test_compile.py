"""`ridge compile`: the JSON contract, what does not fit with a change that does, the exit code, the page for people, bad input."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ridgeline.cli import main as cli
from ridgeline.launch.environment import run_flags
from tests.trainer.gpu_models import QUICK, SHAPES, small

CONTRACT = {
    *("argument_bytes", "output_bytes", "alias_bytes", "temp_bytes", "peak_bytes", "gap_bytes"),
    *("reserve_bytes", "needed_bytes", "capacity_bytes", "fits", "compile_s"),
    *("collectives", "unplanned", "largest_buffers"),
}
OF_COLLECTIVES = {"kind", "axes", "dtype", "bytes", "count", "overlapped"}
BASE, *SHAPE = SHAPES["llama"]
COMMAND = [
    *("compile", BASE, *(f"model.{setting}" for setting in SHAPE), "model.vocab_size=8192", "data.seq_len=1024", "data.batch_size=64"),
    *("precision.compute=bfloat16", "compute.remat.policy=none", "mesh.fsdp=8"),
    *(f"--xla-flag={flag}" for flag in QUICK),
]


@pytest.fixture
def small_cluster(tmp_path: Path) -> str:
    """One node of H100s of whose memory almost nothing may be used."""
    file = tmp_path / "tiny.yaml"
    file.write_text("base: [clusters/dgx-h100]\nname: tiny\nutilisation_cap: 0.0148\n")
    return str(file)


def compiled(capsys: pytest.CaptureFixture[str], cluster: str, *arguments: str, code: int = 0) -> dict:
    assert cli.run([*COMMAND, "--cluster", cluster, "--json", *arguments]) == code
    return json.loads(capsys.readouterr().out)


@pytest.mark.slow
def test_json_keeps_its_contract_and_memory_above_the_limit_fails(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    hlo = tmp_path / "step.txt"
    made = compiled(capsys, "dgx-h100", "--fail-if-memory-above", "0.5", "--hlo", str(hlo), "--heap", code=1)
    assert made.keys() >= CONTRACT
    assert made["fits"] and made["smallest_change"] is None and made["unplanned"] == []
    allocated = made["argument_bytes"] + made["output_bytes"] - made["alias_bytes"] + made["temp_bytes"]
    assert made["peak_bytes"] + made["gap_bytes"] == allocated == made["needed_bytes"] - made["reserve_bytes"]
    assert made["collectives"] and all(c.keys() >= OF_COLLECTIVES for c in made["collectives"])
    assert {tuple(c["axes"]) for c in made["collectives"]} == {("fsdp",)}
    assert made["uncounted_loops"] == [], "every figure is of a whole step"
    assert made["largest_buffers"] and all(b["bytes"] > 0 and b["what"] for b in made["largest_buffers"])
    assert all(row["explanation"] for row in made["memory"] + made["traffic"])
    assert made["optimization_level"] == "O1" and any("combine_threshold" in flag for flag in made["xla_flags"])
    assert set(QUICK) <= set(made["xla_flags"]), "flags of the command line are added"
    assert hlo.read_text().startswith("HloModule")
    points = {at["point"]: at for at in made["points"]}
    needed, planned = made["argument_bytes"] + made["temp_bytes"], made["planned_memory"]["compiled_bytes"]
    assert 0.9 * needed < points["peak"]["compiled_bytes"] <= needed and points["peak"]["planned_bytes"] == planned
    assert max(at["planned_bytes"] or 0 for at in made["points"]) == pytest.approx(planned, rel=1e-3)


@pytest.mark.slow
def test_what_does_not_fit_comes_with_a_change_that_does_when_compiled(capsys: pytest.CaptureFixture[str], small_cluster: str) -> None:
    made = compiled(capsys, small_cluster)
    assert not made["fits"] and made["needed_bytes"] > made["capacity_bytes"]
    assert made["smallest_change"]
    changed = compiled(capsys, small_cluster, *made["smallest_change"])
    assert changed["fits"] and changed["needed_bytes"] < made["needed_bytes"]


@pytest.mark.slow
def test_the_page_shows_memory_buffers_collectives_and_time_and_both_ways_around_products(capsys: pytest.CaptureFixture[str]) -> None:
    cut = ("mesh.fsdp=4", "mesh.tensor=2", "--compare", "tensor_overlap", "--heap")
    assert cli.run([*COMMAND, *cut, "--cluster", "dgx-h100", "--optimization-level", "O0"]) == 0
    page = capsys.readouterr().out
    for words in (
        "memory per device, GB",
        "planned",
        "compiled",
        "as planned",
        "fits",
        "in use at the peak",
        "gaps in XLA's heap",
        "peak memory",
        "memory per device at each point",
        "collectives per step",
        "roofline",
    ):
        assert words in page
    ways = [line.split() for line in page.splitlines() if line.startswith(("gather ", "ring "))]
    assert [way[0] for way in ways] == ["gather", "ring"] and float(ways[0][1]) != float(ways[1][1])
    assert page.splitlines()[-1].startswith(("keep gather", "compute.tensor_overlap=ring is faster", "within 2%"))


@pytest.mark.slow
def test_an_axis_for_which_no_devices_are_left_brings_no_flags(capsys: pytest.CaptureFixture[str]) -> None:
    made = compiled(capsys, "dgx-h100", "mesh.data=8", "mesh.fsdp=-1")
    assert made["xla_flags"] and not any("combine_threshold" in flag for flag in made["xla_flags"])


def test_the_flags_are_those_a_run_on_that_gpu_starts_with() -> None:
    flags, level = run_flags(small("llama", "mesh.fsdp=8"), "h100-sxm")
    assert level == "O1" and any(flag.startswith("--xla_gpu_all_gather_combine_threshold_bytes=") for flag in flags)
    plain, _ = run_flags(small("llama", "mesh.data=8"), "b200")
    assert not any("combine_threshold" in flag for flag in plain)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--cluster", "local"), "'cpu' cannot be compiled for"),
        (("--cluster", "dgx-h101"), "dgx-h100"),
        (("--cluster", "dgx-h100", "--nodes", "0"), "0"),
        (("--cluster", "dgx-h100", "--fail-if-memory-above", "-1"), "-1"),
        (("--cluster", "dgx-h100", "--compare", "tensor_overlap"), "mesh.tensor is 1"),
        (
            ("--cluster", "dgx-h100", "--compare", "tensor_overlap", "mesh.fsdp=4", "mesh.tensor=2", "precision.matmul=fp8"),
            "compute.tensor_overlap: ring needs precision.matmul=compute",
        ),
    ],
)
def test_bad_input_is_one_line(capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], message: str) -> None:
    assert cli.run([*COMMAND, *arguments]) == 2
    assert message in capsys.readouterr().err
