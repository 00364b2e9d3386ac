"""Any config, drawn over models, clusters, mesh axes and the settings that change a plan, has a plan or one line that says why not."""

from __future__ import annotations

import math
import random
from pathlib import Path

import pytest

from ridgeline.configs.cluster import load_cluster
from ridgeline.configs.errors import UserError
from ridgeline.configs.load import load
from ridgeline.configs.rules import check_devices
from ridgeline.planner.calibration import load_calibration
from ridgeline.planner.layouts import Layout
from ridgeline.planner.memory import memory_per_device
from ridgeline.planner.search import evaluate
from ridgeline.planner.step_time import Machine
from tests import sampling

MODELS = sorted(path.stem for path in (Path(__file__).parents[2] / "configs" / "models").glob("*.yaml"))
CLUSTERS = ("dgx-h100", "dgx-a100", "dgx-b200", "mn5-acc", "gb200-nvl72", "dgx-h200")
SETTINGS = {
    "compute.remat.policy": ("none", "attention-only", "dots", "full", "offload"),
    "compute.attention.backend": ("pallas", "chunked"),
    "compute.attention.context": ("ring", "all_to_all"),
    "compute.loss_chunk": ("4096",),
    "compute.tensor_overlap": ("ring",),
    "compute.experts.capacity_factor": ("1.25",),
    "compute.experts.exchange": ("gather", "all_to_all"),
    "data.document_masking": ("false",),
    "precision.matmul": ("fp8", "fp8_delayed", "mxfp8", "nvfp4"),
    "precision.gradients": ("bfloat16",),
    "precision.moments": ("bfloat16", "int8"),
    "optimizer.kind": ("muon", "lion", "sgd", "adafactor"),
    "optimizer.offload": ("true",),
    "mesh.zero_stage": ("2",),
    "model.mtp_layers": ("1", "2"),
    "lora.rank": ("8",),
    "lora.dora": ("true",),
    "lora.base": ("int8",),
}
DRAWN = 400


@pytest.mark.parametrize("seed", range(3))
def test_a_drawn_config_has_a_plan_or_is_refused(seed: int) -> None:
    rng, planned = random.Random(f"{sampling.seed()} {seed}"), 0
    refused: list[str] = []
    clusters = {name: load_cluster(name).config for name in CLUSTERS}
    calibration = load_calibration(None)
    for _ in range(DRAWN):
        model, cluster = rng.choice(MODELS), clusters[rng.choice(CLUSTERS)]
        nodes = 2 ** rng.randrange(8)
        left = devices = nodes * cluster.devices_per_node
        sizes = dict.fromkeys(("pipeline", "data", "fsdp", "context", "tensor", "expert"), 1)
        for axis in rng.sample(["pipeline", "data", "context", "tensor", "expert"], 5):
            sizes[axis] = size if left % (size := rng.choice((1, 1, 1, 1, 2, 4, 8))) == 0 else 1
            left //= sizes[axis]
        sizes["fsdp"] = left
        seq_len, microbatches = 2 ** rng.randrange(9, 18), 2 ** rng.randrange(3)
        rows = sizes["data"] * left * sizes["expert"] * microbatches * rng.choice((1, 2, sizes["pipeline"]))
        overrides = [f"data.seq_len={seq_len}", f"model.max_seq_len={max(seq_len, 4096)}", f"data.batch_size={rows}"]
        overrides += [f"trainer.accumulation={microbatches}", *(f"mesh.{axis}={size}" for axis, size in sizes.items())]
        overrides += [f"{key}={rng.choice(SETTINGS[key])}" for key in rng.sample(sorted(SETTINGS), rng.choice((0, 0, 1, 1, 2, 3)))]
        try:
            config = load(f"models/{model}", overrides).config
            check_devices(config, devices)
            memory = memory_per_device(config, sizes, gpu=True)
            layout = Layout(
                *(sizes["data"], sizes["fsdp"], sizes["tensor"], microbatches, config.compute.remat),
                context=sizes["context"],
                zero_stage=config.mesh.zero_stage,
                expert=sizes["expert"],
                pipeline=sizes["pipeline"],
            )
            found = evaluate(config, layout, memory, Machine(cluster, calibration, devices), 1e12, nodes)
        except UserError as error:
            refused.append(str(error))
            continue
        except Exception as error:
            raise AssertionError(f"{model} on {devices} devices: {' '.join(overrides)}") from error
        planned += 1
        assert all(size >= 0 for size in memory.bytes_by_component().values()), overrides
        assert memory.total_bytes > 0, overrides
        assert math.isfinite(found.step.step_s) and found.step.step_s > 0, overrides
    assert planned > DRAWN / 10
    assert not any("\n" in line for line in refused)
