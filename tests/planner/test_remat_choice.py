"""What is recomputed follows from measured rates: where products are slow they are kept, at the price of a layout that can hold them."""

from __future__ import annotations

from ridgeline.configs.cluster import load_cluster
from ridgeline.configs.load import load
from ridgeline.planner.calibration import load_calibration
from ridgeline.planner.recompute import recomputed
from ridgeline.planner.search import evaluate, search_scale
from ridgeline.planner.step_time import Machine

CLUSTER = load_cluster("dgx-h100").config
CONFIG = load(
    "models/llama-3.1-70b",
    ("data.seq_len=8192", "data.batch_size=256", "data.document_masking=false", "precision.compute=bfloat16"),
).config
NODES, TOKENS = 8, 1e12


def measured(path, tflop_per_s):
    """A file as `ridge calibrate` writes it, of a machine whose products reach this."""
    path.write_text(
        f"name: measured\nmatmul:\n- {{device: {CLUSTER.device}, dtype: bfloat16, m: 8192, n: 8192, k: 8192,"
        f" tflop_per_s: {tflop_per_s}, source: made for a test}}\n"
    )
    return load_calibration(path)


def test_the_policy_follows_the_measured_rates_and_is_the_faster_one_under_each(tmp_path):
    calibrations = {"fast": measured(tmp_path / "fast.yaml", 750), "slow": measured(tmp_path / "slow.yaml", 150)}
    best = {name: search_scale(CONFIG, CLUSTER, calibration, NODES, TOKENS).best for name, calibration in calibrations.items()}
    products = {name: recomputed(CONFIG.model, found.layout.remat).weights for name, found in best.items()}
    assert products["fast"] and not products["slow"]

    def seconds(name, found):
        machine = Machine(CLUSTER, calibrations[name], NODES * CLUSTER.devices_per_node)
        return evaluate(CONFIG, found.layout, found.memory, machine, TOKENS, NODES).step.step_s

    assert seconds("fast", best["fast"]) < seconds("fast", best["slow"])
    assert seconds("slow", best["slow"]) < seconds("slow", best["fast"])
