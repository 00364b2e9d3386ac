"""`ridge plan`: the JSON contract, the page for people, --write, bad input, and that no JAX is needed."""

from __future__ import annotations

import json
import random
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from ridgeline.cli import main as cli
from ridgeline.cli.commands.init import add_layout
from ridgeline.cli.commands.plan import write_layout
from ridgeline.configs.cluster import load_cluster
from ridgeline.configs.load import load
from ridgeline.planner.calibration import load_calibration
from ridgeline.planner.plan import make_plan

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


def test_explain_adds_the_formulas(capsys: pytest.CaptureFixture[str]) -> None:
    made = json.loads(run(capsys, "--explain", "--json"))
    best, symbols = made["candidates"][0], {symbol["name"]: symbol["value"] for symbol in made["formulas"]["symbols"]}
    for formula in made["formulas"]["memory"]:
        assert formula["value"] == best["memory_components"][formula["name"]]
    assert symbols["step_s"] == best["step_s"] and symbols["devices"] == best["devices"]
    page = run(capsys, "--explain")
    assert run(capsys) == page.split("\n\nformulas of the best layout")[0] + "\n"
    assert "    = parameters * parameter_itemsize\n" in page and "\nsymbol " in page


def test_the_first_three_sentences_are_those_of_the_tables(capsys: pytest.CaptureFixture[str]) -> None:
    made = json.loads(run(capsys, "--json", "--objective", "cost", "--tokens", "1e12"))
    page = run(capsys, "--objective", "cost", "--tokens", "1e12").splitlines()
    best, capacity = made["candidates"][0], made["capacity_bytes"]
    fits, costs, change = page[2:5]
    assert (
        fits.startswith(f"Fits on {best['nodes']} node")
        and f"{best['memory_bytes'] / 1e9:.1f} GB planned of {capacity / 1e9:.1f} GB" in fits
    )
    low, high = best["wall_cost_usd_range"]
    assert costs.startswith(f"Costs ${best['wall_cost_usd']:,.0f} ({low:,.0f} to {high:,.0f}) at $") and "per device-hour" in costs
    others = [row["cost_usd"] for row in made["scaling"] if row["nodes"] != best["nodes"]]
    assert change.startswith("No larger loss chunk") or "saves $" in change
    assert not others or min(others) > 0.99 * best["cost_usd"] or "saves $" in change
    few = re.search(r"Costs \$([0-9.]+) .* ([0-9.]+) device-hours", run(capsys, "--tokens", "1e8"))
    assert few is not None and float(few[2]) * 2.95 == pytest.approx(float(few[1]), rel=0.01)  # three figures, however small


def test_the_change_with_the_largest_saving_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("--nodes", "1,2,4,8", "--tokens", "1e12", "--objective", "time")
    made = json.loads(run(capsys, *arguments, "--json"))
    best = made["candidates"][0]
    savings = [1 - row["cost_usd"] / best["cost_usd"] for row in made["scaling"] if row["nodes"] != best["nodes"]]
    assert len(savings) == 3 and min(savings) < max(savings) - 0.01
    assert f"({max(savings):.1%})" in run(capsys, *arguments).splitlines()[4]


def test_clusters_are_compared_and_one_that_cannot_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [*COMMAND, "-c", "dgx-a100", "-c", "mn5-acc", "--nodes", "1,2", "--objective", "time"]
    assert cli.run([*arguments, "--json"]) == 0
    made = json.loads(capsys.readouterr().out)
    assert {plan["cluster"] for plan in made["plans"]} == {"dgx-h100", "dgx-a100", "mn5-acc"} and not made["refused"]
    days = [plan["candidates"][0]["wall_days"] for plan in made["plans"]]
    assert days == sorted(days)
    alone = json.loads(run(capsys, "--json"))
    assert next(plan for plan in made["plans"] if plan["cluster"] == "dgx-h100") == alone
    limit = days[0] * 1.001
    assert cli.run([*arguments, "--deadline-days", str(limit)]) == 0
    page = capsys.readouterr().out
    assert page.splitlines()[1].split() == ["cluster", "nodes", "layout", "step", "s", "+-", "days", "device-hours", "USD"]
    assert "dgx-a100: nothing meets the limits" in page and page.index("best layout of each cluster") < page.index("Fits on")
    assert "no cluster can run this: " in refused(capsys, *arguments, "--deadline-days", str(limit / 100))
    for wrong in (["--spot", "x"], ["--nodes", "1-x"]):
        assert refused(capsys, *arguments, *wrong) == refused(capsys, *COMMAND, *wrong)  # not once per cluster


@pytest.mark.parametrize("seed", range(6))
def test_estimate_step_prints_the_step_time_of_the_plan(seed: int, capsys: pytest.CaptureFixture[str]) -> None:
    """The best five layouts of drawn runs, thirty together."""
    draw = random.Random(seed)
    model, site = draw.choice(["llama-3.2-1b", "llama-3.1-8b", "qwen3-8b"]), draw.choice(["dgx-h100", "mn5-acc", "dgx-a100", "dgx-b200"])
    run_of = [f"models/{model}", f"data.batch_size={draw.choice([128, 512])}", f"data.seq_len={draw.choice([2048, 4096])}"]
    run_of += [f"data.document_masking={draw.choice(['true', 'false'])}", "--cluster", site]
    assert cli.run(["plan", *run_of, "--nodes", str(draw.choice([2, 4, 16])), "--top", "5", "--no-compile", "--json"]) == 0
    candidates = json.loads(capsys.readouterr().out)["candidates"]
    assert len(candidates) == 5
    for candidate in candidates:
        layout = [f"mesh.{axis}={size}" for axis, size in candidate["mesh"].items()]
        layout += [f"mesh.zero_stage={candidate['zero_stage']}", f"trainer.accumulation={candidate['accumulation']}"]
        layout += [f"compute.remat.policy={candidate['remat']}", f"compute.remat.names=[{','.join(candidate['remat_names'])}]"]
        assert cli.run(["estimate", "step", *run_of, "--nodes", str(candidate["nodes"]), *layout, "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["step_s"] == candidate["step_s"]


def test_a_run_has_nodes_of_one_kind(capsys: pytest.CaptureFixture[str]) -> None:
    assert "nodes of one kind; compare clusters with -c dgx-h100 -c dgx-a100" in refused(capsys, *COMMAND[:2], "-c", "dgx-h100,dgx-a100")


def test_a_limit_of_device_hours_holds_and_tells_how_far_it_reaches(capsys: pytest.CaptureFixture[str]) -> None:
    hours = json.loads(run(capsys, "--json", "--objective", "cost"))["candidates"][0]["wall_device_hours"]
    assert json.loads(run(capsys, "--json", "--device-hours", str(hours * 1.01)))["candidates"][0]["wall_device_hours"] <= hours * 1.01
    error = refused(capsys, *COMMAND, "--device-hours", str(hours / 2))
    assert "2 times the limit" in error and "the limit is enough for" in error


def test_a_spot_price_comes_with_its_interruptions(capsys: pytest.CaptureFixture[str]) -> None:
    usual, calm, rough = (json.loads(run(capsys, "--json", *spot)) for spot in ([], ["--spot", "1@0"], ["--spot", "1@2"]))
    best, without, often = (made["candidates"][0] for made in (usual, calm, rough))
    assert without["wall_days"] == best["wall_days"] and without["wall_cost_usd"] == pytest.approx(best["wall_device_hours"])
    assert often["goodput"] < without["goodput"] and often["wall_cost_usd"] > without["wall_cost_usd"]
    added = often["expected_failures"] / often["wall_days"] - without["expected_failures"] / without["wall_days"]
    assert added == pytest.approx(2 * often["nodes"])
    assert "at $1.00 per device-hour (spot, 2 interruptions per node and day)" in run(capsys, "--spot", "1@2")
    for wrong in ("1", "1@2@3", "0@1", "1@-1", "x@1", "nan@1"):
        assert f"--spot {wrong}: must be USD@RATE" in refused(capsys, *COMMAND, "--spot", wrong)


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


def test_a_written_layout_keeps_its_zero_stage(tmp_path: Path) -> None:
    config, target = "models/llama-3.2-1b", tmp_path / "planned.yaml"
    overrides = ("data.batch_size=64", "data.seq_len=2048")
    made = make_plan(load(config, overrides).config, load_cluster("dgx-h100").config, load_calibration(), [1])
    made = replace(made, best=[candidate for candidate in made.best if candidate.layout.zero_stage])
    write_layout(target, config, overrides, made)
    written = load(target).config.mesh
    assert written.zero_stage == 2 and written.sizes == made.best[0].layout.sizes
    assert add_layout({"trainer": {}}, made)["mesh"]["zero_stage"] == 2


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
