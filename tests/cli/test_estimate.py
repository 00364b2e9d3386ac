"""`ridge estimate`: the JSON contract, the worked examples, refusals, no JAX, quick answers."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from ridgeline.cli import main as cli
from ridgeline.cli.options import BYTE, COUNT, FLOP_PER_S, SHARE
from tests.cli.test_cli import HEAVY, imported

SMALL = ["models/llama-3.1-8b", "data.batch_size=8", "data.seq_len=4096", "compute.remat.policy=full"]
COLLECTIVE = ["collective", "--op", "all-reduce", "--bytes", "1e9", "--devices", "32", "--latency-s", "2e-6", "--bandwidth", "450e9"]
NODES = ["--nodes", "4", "--node-latency-s", "5e-6", "--node-bandwidth", "50e9"]
PIPELINE = ["pipeline", "--stages", "8", "--microbatches", "64", "--forward-s", "0.01", "--backward-s", "0.02"]
RUN = ["run", "--params", "70e9", "--tokens", "2e12", "--devices", "1024", "--peak-flops", "990e12"]


@pytest.fixture(autouse=True)
def _in_tmp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RIDGE_DEBUG", raising=False)


@pytest.fixture
def estimate(capsys: pytest.CaptureFixture[str]):
    def run(*arguments: str):
        assert cli.run(["estimate", *arguments, "--json"]) == 0, capsys.readouterr().err
        return json.loads(capsys.readouterr().out)

    return run


CONTRACT = [
    (["model", "models/llama-3.2-1b"], {"params", "active_params", "flops_per_token", "convention", "flops_per_token_6n"}),
    ([*COLLECTIVE], {"seconds", "algorithm_bandwidth", "bus_bandwidth"}),
    ([*COLLECTIVE, *NODES], {"seconds", "algorithm_bandwidth", "bus_bandwidth"}),
    (["memory", *SMALL, "mesh.fsdp=8"], {"per_device_bytes", "components", "assumptions"}),
    (["memory", "--params", "7e9", "--policy", "adamw-mixed", "--zero", "1", "--shards", "8"], {"state_bytes"}),
    ([*RUN, "--mfu", "0.45", "--price-per-hour", "4"], {"seconds", "days", "device_hours", "cost_usd", "tokens_per_s"}),
    ([*RUN, "--tokens-per-s", "1e6"], {"mfu"}),
    (PIPELINE, {"seconds", "bubble_fraction", "efficiency"}),
    (["checkpoint", "--save-s", "60", "--mtbf-s", "43200"], {"mtbf_s", "interval_s", "overhead_fraction"}),
    (["checkpoint", "--save-s", "60", "--fleet", "128:3692,16:20000"], {"mtbf_s", "interval_s", "overhead_fraction"}),
    (["ridge", "--peak-flops", "990e12", "--bandwidth", "450e9"], {"intensity", "threshold"}),
    (["ridge", "--peak-flops", "990e12", "--bandwidth", "450e9", "--axis", "tensor", "--mlp-width", "28672"], {"intensity", "threshold"}),
    (["batch", "--s-min", "1000", "--b-crit", "256", "--batch", "256"], {"steps", "examples"}),
    (["batch", "--fit", "200@100,150@200,125@400"], {"b_crit", "s_min", "residuals", "misfit"}),
    (["step", *SMALL, "--cluster", "dgx-h100", "--nodes", "1"], {"step_s", "breakdown_s", "mfu", "tokens_per_s"}),
]  # fmt: skip


@pytest.mark.parametrize(("arguments", "keys"), CONTRACT, ids=lambda value: " ".join(value) if isinstance(value, list) else "")
def test_the_json_object_has_the_promised_keys(estimate, arguments, keys):
    answer = estimate(*arguments)
    assert keys <= answer.keys()
    assert all(answer[key] is not None for key in keys)


@pytest.mark.parametrize("arguments", [arguments for arguments, _ in CONTRACT], ids=" ".join)
def test_every_figure_is_explained_on_request(estimate, capsys, arguments):
    explained = estimate(*arguments, "--explain")["explain"]
    assert all(figure["formula"] and figure["source"] for figure in explained.values())
    figure = next(iter(explained))
    assert cli.run(["estimate", *arguments, "--explain"]) == 0
    shown = capsys.readouterr().out
    assert f"    = {explained[figure]['formula']}".split("\n")[0][:60] in shown
    assert "    [" in shown


def test_the_worked_examples(estimate):
    run = estimate(*RUN, "--mfu", "0.45", "--price-per-hour", "4")
    assert run["device_hours"] == pytest.approx(525e3, rel=5e-3)
    assert run["cost_usd"] == pytest.approx(2.10e6, rel=5e-3)
    mfu = estimate("run", "--params", "7B", "--devices", "64", "--peak-flops", "989.4T", "--tokens-per-s", "150k")["mfu"]
    assert mfu == pytest.approx(0.0995, abs=1e-4)
    deepseek = ["run", "--params", "37B", "--tokens", "14.8T", "--devices", "2048", "--peak-flops", "1.513P", "--device-hours", "2.79M"]
    assert estimate(*deepseek)["mfu"] == pytest.approx(0.217, abs=1e-3)
    pipeline = estimate(*PIPELINE)
    assert pipeline["seconds"] == pytest.approx(2.130)
    assert pipeline["efficiency"] == pytest.approx(0.901, abs=5e-4)
    assert estimate("ridge", "--peak-flops", "990T", "--bandwidth", "450GB/s", "--axis", "data")["threshold"] == pytest.approx(2200)
    model = estimate("model", "models/llama-3.2-1b", "data.seq_len=1024")
    assert model["flops_per_token_every_pair"] == pytest.approx(7.82e9, rel=1e-3)  # Torres' convention
    assert model["flops_per_token"] == pytest.approx(7.62e9, rel=1e-3)  # ours: the half that the mask leaves
    big = "model.num_layers=80 model.embed_dim=8192 model.mlp_dim=28672 model.num_heads=64 model.num_kv_heads=8 model.head_dim=128"
    Path("big.yaml").write_text("model: {family: llama, vocab_size: 128256}\n")
    assert estimate("model", "big.yaml", *big.split())["params"] == pytest.approx(70.4e9, rel=3e-3)


def test_collectives_follow_the_formulas(estimate):
    flat = estimate(*COLLECTIVE)
    assert flat["seconds"] == pytest.approx(62 * 2e-6 + 62 / 32 * 1e9 / 450e9)
    assert flat["bus_bandwidth"] == pytest.approx(flat["algorithm_bandwidth"] * 62 / 32)
    inside = 7 * 2e-6 + 7 / 8 * 1e9 / 450e9
    assert estimate(*COLLECTIVE, *NODES)["seconds"] == pytest.approx(2 * inside + 6 * 5e-6 + 6 / 4 * 1e9 / 8 / 50e9)
    tree = estimate(*COLLECTIVE, *NODES, "--algorithm", "tree")
    assert tree["seconds"] == pytest.approx(2 * inside + 4 * (5e-6 + 1e9 / 8 / 50e9))
    halving = estimate(*COLLECTIVE, "--algorithm", "recursive-halving")
    assert halving["seconds"] == pytest.approx(10 * 2e-6 + 62 / 32 * 1e9 / 450e9)
    one_per_node = estimate(*COLLECTIVE, "--nodes", "32", "--node-latency-s", "5e-6", "--node-bandwidth", "50e9")
    assert one_per_node["seconds"] == pytest.approx(62 * 5e-6 + 62 / 32 * 1e9 / 50e9)
    assert estimate(*COLLECTIVE, "--nodes", "1", "--node-latency-s", "5e-6", "--node-bandwidth", "50e9") == flat


def test_a_cluster_brings_its_own_links(estimate):
    answer = estimate("collective", "--op", "all-reduce", "--bytes", "1GiB", "--devices", "8", "--cluster", "dgx-h200")
    assert answer["algorithm"] == "in-switch"
    assert answer["bus_bandwidth"] == pytest.approx(463.58e9, rel=0.01)  # measured
    apart = estimate("collective", "--op", "all-reduce", "--bytes", "1GiB", "--devices", "8", "--stride", "8", "--cluster", "dgx-h200")
    assert apart["seconds"] > 5 * answer["seconds"]


def test_memory_falls_with_stages_and_devices(estimate):
    held = [estimate("memory", "--params", "7e9", "--zero", str(zero), "--shards", "8")["state_bytes"] for zero in range(4)]
    assert held == [112_000_000_000, 38_500_000_000, 26_250_000_000, 14_000_000_000]
    eight, sixteen = (estimate("memory", *SMALL, f"mesh.fsdp={n}", f"data.batch_size={n}")["per_device_bytes"] for n in (8, 16))
    assert sixteen < eight
    placed = estimate("memory", *SMALL, "--cluster", "dgx-h100", "--nodes", "1")
    assert placed["fits"] == (placed["per_device_bytes"] <= placed["capacity_bytes"])
    assert placed["per_device_bytes"] == sum(placed["components"].values()) == eight
    assert placed["assumptions"].keys() == placed["components"].keys()


RUN_8 = "run --params 7e9 --devices 8 --peak-flops 989T"
REDUCE = "collective --op all-reduce --bytes 1e9 --devices 32 --latency-s 2e-6 --bandwidth 450e9"
NETWORK = "--node-latency-s 5e-6 --node-bandwidth 50e9"


def test_the_step_time_of_a_layout_that_does_not_fit_has_a_warning() -> None:
    """Its memory is what `estimate memory` refuses."""
    from click.testing import CliRunner

    from ridgeline.cli.commands.estimate_config import step

    for rows, fits in ((8, True), (4096, False)):
        given = ["models/llama-3.1-8b", "data.seq_len=4096", f"data.batch_size={rows}", "mesh.fsdp=8", "--cluster", "dgx-h100"]
        done = CliRunner().invoke(step, [*given, "--json"])
        assert done.exit_code == 0
        assert json.loads(done.stdout)["fits"] is fits
        assert ("does not fit" in done.stderr) is not fits


STEP = " ".join(["step", *SMALL])


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (f"{RUN_8} --mfu 45", "'--mfu': 45: must be at most 1 (45 % is written 45%"),
        ("run --params -7e9 --devices 8 --peak-flops 989T --mfu .4", "'--params': -7e9: must be a finite number greater than 0"),
        ("run --params 7e9 --devices 0 --peak-flops 989T --mfu .4", "'--devices': 0: must be a finite number greater than 0"),
        ("run --params 7e9 --devices 2.5 --peak-flops 989T --mfu .4", "'--devices': 2.5: must be a whole number"),
        ("run --params 7apples --devices 8 --peak-flops 1T --mfu .4", "'7apples' is not a number with one of the units"),
        ("run --params 7e9 --devices 8 --peak-flops 1e400 --mfu .4", "'--peak-flops': 1e400: must be a finite number"),
        ("run --params nan --devices 8 --peak-flops 1T --mfu .4", "'nan' is not a number"),
        (RUN_8, "give exactly one of mfu, tokens-per-s and device-hours; got none"),
        (f"{RUN_8} --mfu .4 --tokens-per-s 1e6", "got mfu and tokens-per-s"),
        (f"{RUN_8} --tokens-per-s 1e9", "is the rate that of all devices, and the peak that of the dtype used?"),
        (REDUCE.replace("all-reduce", "all-redcue"), "unknown collective 'all-redcue'; did you mean 'all-reduce'"),
        (f"{REDUCE} --algorithm star", "unknown algorithm 'star'"),
        (f"{REDUCE.replace('reduce', 'gather')} --algorithm tree", "all-gather has no algorithm 'tree' (it has: ring, recursive-halving)"),
        (f"{REDUCE} --nodes 5 {NETWORK}", "--devices 32 is not a multiple of --nodes 5 (nearest: 30 or 35 devices)"),
        (f"{REDUCE} --nodes 64 {NETWORK}", "--devices 32 is not a multiple of --nodes 64 (nearest: 64 devices)"),
        (f"{REDUCE} --nodes 4", "--nodes needs --node-latency-s and --node-bandwidth"),
        (f"{REDUCE} {NETWORK}", "--node-latency-s and --node-bandwidth need --nodes"),
        (f"{REDUCE} --cluster dgx-h100", "--cluster defines the links"),
        (f"{REDUCE} --stride 8", "--calibration and --stride need --cluster"),
        (REDUCE.replace("32", "1"), "--devices 1: a collective needs at least 2 devices"),
        (REDUCE.replace("1e9", "0"), "'--bytes': 0: must be a finite number greater than 0"),
        (REDUCE.replace("2e-6", "-1"), "'--latency-s': -1: must be a finite number at least 0"),
        ("collective --op all-reduce --bytes 1 --devices 8", "give --latency-s and --bandwidth, or --cluster"),
        ("pipeline --stages 0 --microbatches 4 --forward-s 1 --backward-s 1", "'--stages': 0: must be"),
        ("checkpoint --save-s 60", "give either --mtbf-s or --fleet"),
        ("checkpoint --save-s 60 --mtbf-s 60", "less than half the time between failures (30 s)"),
        ("checkpoint --save-s 60 --fleet 8", "--fleet '8': must be of the form COUNT:MTBF_HOURS"),
        ("checkpoint --save-s 60 --fleet 8:-5", "--fleet '8:-5': needs two finite numbers greater than 0"),
        ("ridge --peak-flops 1T --bandwidth 1GB --axis dta", "unknown axis 'dta'; did you mean 'data'"),
        ("ridge --peak-flops 1T --bandwidth 1GB --axis tensor", "axis tensor: needs mlp-width"),
        ("batch --fit 100@8,90@8", "two or more different batch sizes"),
        ("batch --fit 100@8,90", "--fit '90': must be of the form STEPS@BATCH"),
        ("batch --fit 100@8,120@16", "steps must fall as the batch grows"),
        ("batch --s-min 5", "missing: --b-crit, --batch"),
        ("batch --s-min 5 --fit 1@2,3@4", "--fit excludes --s-min"),
        ("memory", "give a CONFIG, or --params"),
        ("memory --params 7e9 --zero 3", "--params needs --shards"),
        ("memory --params 7e9 --zero 5 --shards 8", "zero=5: must be 0, 1, 2 or 3"),
        ("memory --params 7e9 --zero 1 --shards 8 --policy adam", "unknown policy 'adam'"),
        ("memory models/gpt2 --zero 1", "--zero cannot be used with CONFIG"),
        ("memory --params 7e9 --zero 1 --shards 8 --devices 8", "--devices needs CONFIG"),
        ("memory models/gpt2", "mesh.fsdp is -1"),
        ("memory models/gpt2 --nodes 2", "--nodes needs --cluster"),
        ("step models/gpt2 --cluster dgx-h100", "with --nodes"),
        (f"{STEP} --cluster dgx-h10 --nodes 1", "cluster 'dgx-h10' not found; did you mean 'dgx-h100'"),
        (f"{STEP} --cluster mn5-acc --nodes 5000", "--nodes 5000: mn5-acc has only 1120"),
        (f"{STEP} --cluster dgx-h100 --nodes 1 --calibration no.yaml", "calibration 'no.yaml' not found"),
        ("model models/lama-3.2-1b", "did you mean 'models/llama-3.2-1b'"),
    ],
)
def test_invalid_values_are_one_line_with_what_is_allowed(line, message, capsys):
    assert cli.run(["estimate", *line.split()]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("ridge: error: ")
    assert message in captured.err
    assert captured.err.count("\n") == 1


def test_a_nominal_peak_gives_no_mfu(estimate):
    small = ["model.num_layers=2", "model.embed_dim=64", "model.mlp_dim=128", "data.seq_len=64", "mesh.fsdp=1"]
    Path("x.yaml").write_text("{}\n")
    answer = estimate("step", "x.yaml", *small, "--cluster", "local", "--nodes", "1")
    assert answer["mfu"] is None
    assert answer["tokens_per_s"] > 0


@pytest.mark.parametrize(
    ("kind", "text", "value"),
    [
        (COUNT, "70B", 70e9),
        (COUNT, "1.5T", 1.5e12),
        (COUNT, "1_000", 1000),
        (BYTE, "58MB", 58e6),
        (BYTE, "58 MiB", 58 * 2**20),
        (FLOP_PER_S, "989T", 989e12),
        (FLOP_PER_S, "1.5PFLOP/s", 1.5e15),
        (SHARE, "45%", 0.45),
    ],
)
def test_numbers_may_have_units(kind, text, value):
    assert kind.convert(text, None, None) == pytest.approx(value)


@pytest.mark.parametrize("arguments", [CONTRACT[0][0], CONTRACT[1][0], CONTRACT[3][0], CONTRACT[-1][0]], ids=lambda value: value[0])
def test_no_estimate_imports_jax(arguments):
    assert not imported(["estimate", *arguments]) & HEAVY


def test_an_answer_takes_well_under_half_a_second(estimate):
    """In CPU time of a warm interpreter: the wall clock of a loaded machine proves nothing."""
    for arguments, _ in CONTRACT:
        began = time.process_time()
        estimate(*arguments)
        assert time.process_time() - began < 0.5, arguments
