"""Whether XLA copies the stack of block inputs, where its scheduler counts kernels with constants."""

import pytest

from ridgeline.configs.load import load
from ridgeline.configs.schema import MESH_AXES
from ridgeline.planner import constant_costs
from ridgeline.planner.activations import relaid_bytes
from ridgeline.planner.hardware import hardware
from ridgeline.planner.local import LocalSizes

ATTENTION = "[query,key,value,attention_out]"

COMPILED = [
    # model, device, rows per device, tokens of a row, fsdp, tensor, further overrides, copied
    ("llama-3.1-8b", "gb200", 2, 32768, 2, 2, [], False),
    ("llama-3.1-8b", "a100-80gb", 2, 32768, 2, 2, [], False),
    ("llama-3.1-8b", "b200", 2, 32768, 2, 2, [], True),
    ("llama-3.1-8b", "h100-sxm", 2, 32768, 2, 2, [], True),
    ("phi4-14b", "gb200", 16, 16384, 8, 2, [], False),
    ("phi4-14b", "b200", 16, 16384, 8, 2, [], True),
    ("mistral-nemo-12b", "gb200", 2, 32768, 32, 4, [], False),
    ("qwen3-8b", "a100-80gb", 4, 16384, 64, 2, [], False),
    ("olmo2-7b", "a100-80gb", 8, 8192, 4, 2, [], False),
    # matmuls of queries are split too on the GPU with more cores
    ("llama-3.2-1b", "gb200", 8, 8192, 8, 2, [], True),
    ("llama-3.2-1b", "a100-80gb", 8, 8192, 8, 2, [], False),
    # biases, with and without split matmuls of keys
    ("qwen2.5-32b", "gb200", 16, 4096, 8, 4, [], True),
    ("qwen2.5-32b", "a100-80gb", 16, 4096, 8, 4, [], True),
    ("qwen2.5-1.5b", "a100-80gb", 16, 16384, 32, 2, [], True),
    ("qwen2.5-14b", "gb200", 4, 8192, 8, 2, [], False),
    ("qwen2.5-14b", "a100-80gb", 4, 8192, 8, 2, [], False),
    # biases, and the input of MLP down is not computed again for the weight gradients
    ("glm4-9b", "a100-80gb", 4, 8192, 8, 2, [], False),
    # one kernel for the gradient of a norm's weight
    ("llama-3.1-70b", "gb200", 4, 4096, 4, 8, [], False),
    ("llama-3.1-70b", "a100-80gb", 4, 4096, 4, 8, [], True),
    # matmuls are library calls
    ("qwen3-8b", "gb200", 8, 32768, 4, 4, ["precision.matmul=fp8"], True),
    # a ring transposes the stack
    ("llama-3.1-8b", "gb200", 16, 2048, 2, 2, ["compute.tensor_overlap=ring"], True),
    # attention's update is kept, or the values of attention alone
    ("llama-3.1-8b", "gb200", 8, 8192, 8, 2, ["compute.remat.policy=names", f"compute.remat.names={ATTENTION}"], False),
    ("llama-3.1-8b", "a100-80gb", 8, 8192, 8, 2, ["compute.remat.policy=names", f"compute.remat.names={ATTENTION}"], False),
    ("llama-3.1-8b", "gb200", 8, 8192, 8, 2, ["compute.remat.policy=names", "compute.remat.names=[query,key,value]"], False),
    ("llama-3.1-70b", "a100-80gb", 16, 2048, 4, 8, ["compute.remat.policy=names", f"compute.remat.names={ATTENTION}"], True),
    ("llama-3.1-70b", "gb200", 16, 2048, 4, 8, ["compute.remat.policy=names", f"compute.remat.names={ATTENTION}"], False),
    ("llama-2-7b", "a100-80gb", 4, 4096, 32, 2, ["compute.remat.policy=dots"], False),
    ("qwen2.5-7b", "a100-80gb", 16, 1024, 64, 2, ["compute.remat.policy=dots"], False),
    ("qwen2.5-7b", "a100-80gb", 8, 8192, 8, 2, ["compute.remat.policy=names", f"compute.remat.names={ATTENTION}"], False),
    ("llama-3.2-3b", "gb200", 16, 4096, 2, 2, ["compute.remat.policy=offload", "compute.remat.names=[query,mlp_up]"], True),
]
"""Compiled with jax 0.10.2 and all flags of a run, most with 16 layers."""


@pytest.mark.parametrize(("model", "device", "rows", "length", "fsdp", "tensor", "more", "copied"), COMPILED)
def test_the_stack_is_copied_as_in_compiled_steps(model, device, rows, length, fsdp, tensor, more, copied):
    overrides = [
        f"data.seq_len={length}",
        f"model.max_seq_len={length}",
        f"data.batch_size={rows * fsdp}",
        "compute.remat.policy=full",
        *more,
    ]
    config = load(f"models/{model}", overrides).config
    local = LocalSizes.of(config, dict.fromkeys(MESH_AXES, 1) | {"fsdp": fsdp, "tensor": tensor})
    relaid = relaid_bytes(local, "cudnn", True, True, hardware(device).program)
    assert relaid == copied * config.model.num_layers * local.cut_stream_bytes


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
