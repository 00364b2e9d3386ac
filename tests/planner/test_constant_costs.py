"""For which layers the plan counts kernels with constants, as XLA's scheduler does."""

from ridgeline.configs.load import load
from ridgeline.configs.schema import MESH_AXES
from ridgeline.planner import constant_costs
from ridgeline.planner.hardware import hardware
from ridgeline.planner.local import LocalSizes


def test_no_rule_for_other_kinds_of_layers():
    """They are planned as for other GPUs: nothing of them was compiled."""
    program = hardware("gb200").program
    for model, more, axes in (
        ("gemma3-12b", [], {}),
        ("mixtral-8x7b", [], {}),
        ("llama-3.1-8b", ["lora.rank=8"], {}),
        ("llama-3.1-8b", ["compute.scan_layers=false"], {}),
        ("llama-3.1-8b", [], {"context": 2}),
        ("llama-3.1-8b", [], {"tensor": 1}),
    ):
        config = load(f"models/{model}", ["data.seq_len=4096", "data.batch_size=16", "compute.remat.policy=full", *more]).config
        local = LocalSizes.of(config, dict.fromkeys(MESH_AXES, 1) | {"fsdp": 2, "tensor": 2} | axes)
        assert not constant_costs.applies(local, program), (model, more, axes)
