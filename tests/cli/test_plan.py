"""`ridge plan`: the JSON contract, the page for people, --write, bad input, and that no JAX is needed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from ridgeline.cli import main as cli
from ridgeline.configs.load import load

COMMAND = ["plan", "models/llama-3.2-1b", "--cluster", "dgx-h100", "--nodes", "1,2", "data.batch_size=64", "data.seq_len=2048"]
CANDIDATE_KEYS = {
    *("mesh", "microbatch", "accumulation", "remat", "memory_bytes", "step_s", "breakdown_s", "mfu"),
    *("tokens_per_s_per_device", "days", "device_hours", "cost_usd", "binds"),
}


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert cli.run([*COMMAND, *arguments]) == 0
    return capsys.readouterr().out


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert cli.run(list(arguments)) == 2
    return capsys.readouterr().err


def test_json_keeps_its_contract(capsys: pytest.CaptureFixture[str]) -> None:
    made = json.loads(run(capsys, "--json", "--tokens", "1e10", "--top", "4"))
    assert {"candidates", "rejected", "scaling"} <= made.keys()
    assert len(made["candidates"]) == 4
    for candidate in made["candidates"]:
        assert candidate.keys() >= CANDIDATE_KEYS
        devices = candidate["devices"]
        assert sum(candidate["breakdown_s"].values()) == pytest.approx(candidate["step_s"])
        assert candidate["device_hours"] == pytest.approx(candidate["days"] * 24 * devices)
        assert candidate["tokens_per_s_per_device"] * devices * candidate["step_s"] == pytest.approx(64 * 2048)
        assert candidate["memory_bytes"] == sum(candidate["memory_components"].values()) <= made["capacity_bytes"]
        moved = candidate["communication"]
        assert moved and all(item["bytes"] > 0 and item["seconds"] > 0 and item["link"] and item["hides_under"] for item in moved)
        assert sum(item["seconds"] * item["count"] for item in moved) == pytest.approx(candidate["communication_s"])
        rows = candidate["microbatch"] * candidate["accumulation"] * candidate["mesh"]["data"] * candidate["mesh"]["fsdp"]
        assert rows == 64
    assert [row["nodes"] for row in made["scaling"]] == [1, 2] and made["scaling"][0]["efficiency"] == 1
    assert all(rejection["reason"] for rejection in made["rejected"])
    assert made["worth"]
    for key in ("step_s", "tokens_per_s", "tokens_per_s_per_device", "wall_days", "wall_device_hours", "wall_cost_usd"):
        low, high = made["candidates"][0][f"{key}_range"]
        value = made["candidates"][0].get(key, low)
        assert low <= value <= high and high / low == pytest.approx((1 + made["range"]) / (1 - made["range"])) and made["range_from"]


def test_the_step_of_other_software_has_its_own_time_and_range(capsys: pytest.CaptureFixture[str]) -> None:
    own, other = (json.loads(run(capsys, "--json", "--software", name)) for name in ("ridgeline", "composer"))
    assert (own["software"], other["software"]) == ("ridgeline", "composer")
    assert other["candidates"][0]["step_s"] > own["candidates"][0]["step_s"] and other["range"] > own["range"]
    assert "software: composer" in run(capsys, "--software", "composer") and "range of the best layout" in run(capsys)
    assert "did you mean 'megatron'" in refused(capsys, *COMMAND, "--software", "megatorn")


def test_the_page_has_the_bottleneck_the_cost_and_the_reasons_against_other_layouts(capsys: pytest.CaptureFixture[str]) -> None:
    page = run(capsys, "--tokens", "1e10")
    for words in (
        "tokens/s/device",
        "USD",
        "bottleneck",
        "share of the step time",
        "assumption",
        "alternative",
        "scaling at this batch",
        "expect",
        "goodput",
    ):
        assert words in page


def test_the_written_layout_loads_and_keeps_config_and_overrides(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    target = tmp_path / "made" / "planned.yaml"
    page = run(capsys, "--write", str(target))
    assert str(target) in page
    config = load(target).config
    assert config.data.batch_size == 64 and config.data.seq_len == 2048 and config.model.num_layers == 16
    made = json.loads(run(capsys, "--json"))["candidates"][0]
    assert config.mesh.sizes == made["mesh"]
    assert config.trainer.accumulation == made["accumulation"] and config.compute.remat.policy == made["remat"]
    assert "planned with" in target.read_text()
    assert "exists already" in refused(capsys, *COMMAND, "--write", str(target))


def test_a_layout_can_be_written_on_top_of_the_users_own_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    own = tmp_path / "configs" / "mine.yaml"
    own.parent.mkdir()
    settings = "name: mine\ndata: {batch_size: 32, seq_len: 1024}\ncompute: {remat: {policy: names, names: [query]}}\n"
    own.write_text(f"base: [models/llama-3.2-1b]\n{settings}")
    target = tmp_path / "plans" / "planned.yaml"
    assert cli.run(["plan", str(own), "-c", "dgx-h100", "--write", str(target)]) == 0
    config = load(target).config
    assert config.name == "mine" and config.data.batch_size == 32 and 'base: ["../configs/mine.yaml"]' in target.read_text()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--nodes", "0"], "--nodes "),
        (["--nodes", "two"], "--nodes "),
        (["--cluster", "dgx-h10"], "did you mean 'dgx-h100'"),
        (["--budget-usd", "1", "--tokens", "1e12"], "times the budget of $1"),
        (["--deadline-days", "0.01", "--tokens", "1e12"], "times the deadline of 0.01"),
        (["--budget-usd", "-3"], "budget-usd"),
        (["--objective", "speed"], "objective"),
        (["--calibration", "missing.yaml"], "missing.yaml"),
    ],
)
def test_bad_input_is_one_line_that_names_the_constraint(capsys: pytest.CaptureFixture[str], arguments: list[str], words: str) -> None:
    message = refused(capsys, *COMMAND, *arguments)
    assert words in message and message.startswith("ridge: error:")


def test_planning_needs_no_jax() -> None:
    code = f"import sys; from ridgeline.cli import main; main.run({COMMAND!r}); sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 0
