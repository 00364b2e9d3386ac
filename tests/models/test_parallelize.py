"""Which techniques a config uses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from ridgeline.configs.errors import UserError
from ridgeline.configs.model_schema import ModelConfig
from ridgeline.configs.schema import AttentionConfig, ComputeConfig, MeshConfig, PrecisionConfig, RematConfig
from ridgeline.configs.tuning_schema import LoraConfig
from ridgeline.models import families as family_modules
from ridgeline.models.family import families
from ridgeline.models.matmul import CollectiveMatmul
from ridgeline.models.parallelize import Execution, parallelize
from ridgeline.planner.recompute import saves_first, waits_for_gradient
from ridgeline.sharding.mesh import build_mesh
from ridgeline.sharding.partition import Partitioner
from ridgeline.sharding.rules import Rules
from tests.models.tiny import BASE


def execution(mesh: dict[str, int] | None = None, matmul: str = "compute", model: dict[str, Any] | None = None, **compute) -> Execution:
    config = MeshConfig(**{"fsdp": 1, **(mesh or {})})
    partitioner = Partitioner(build_mesh(config, jax.devices()[: int(np.prod(list(config.sizes.values())))]), Rules.from_config(config))
    return parallelize(ModelConfig(**BASE | (model or {})), ComputeConfig(**compute), PrecisionConfig(matmul=matmul), partitioner)


@pytest.mark.parametrize(
    ("mesh", "overlap", "expected"), [({"tensor": 2}, "ring", True), ({"tensor": 2}, "gather", False), ({}, "ring", False)]
)
def test_collective_matmuls_need_the_setting_and_a_tensor_axis(mesh, overlap, expected) -> None:
    matmul = execution(mesh, tensor_overlap=overlap).matmul
    assert isinstance(matmul, CollectiveMatmul) == expected
    assert matmul.gathers_input == (mesh == {"tensor": 2} and not expected)


@pytest.mark.parametrize(
    ("setting", "fp8", "block_scaled"),
    [("compute", False, None), ("fp8", True, None), ("fp8_delayed", True, None), ("mxfp8", False, "mxfp8"), ("nvfp4", False, "nvfp4")],
)
def test_the_matmul_format_follows_the_precision(setting, fp8, block_scaled) -> None:
    matmul = execution(matmul=setting).matmul
    assert (matmul.float8, matmul.block_format) == (fp8, block_scaled)


@pytest.mark.parametrize(("policy", "expected"), [("none", False), ("attention-only", False), ("dots", True), ("full", True)])
def test_gathered_parameters_are_saved_only_for_blocks_that_are_rematerialized(policy, expected) -> None:
    assert execution(remat=RematConfig(policy=policy)).matmul.save_gathered == expected


MLP_KEPT = {"policy": "names", "names": ["mlp_gate", "mlp_up"]}
EXPERTS = {"moe": {"experts": 8, "experts_per_token": 2, "expert_dim": 24}}


@pytest.mark.parametrize(
    ("mesh", "remat", "model", "compute", "expected"),
    [
        ({"tensor": 2}, {"policy": "full"}, {}, {}, "mlp"),
        ({"tensor": 2}, {"policy": "names", "names": ["query", "attention_context"]}, {}, {}, "mlp"),
        ({"tensor": 2}, MLP_KEPT, {}, {}, "block"),
        ({"expert": 2}, {"policy": "full"}, EXPERTS, {"experts": {"exchange": "gather"}}, "block"),
        ({"expert": 2}, {"policy": "full"}, EXPERTS, {"experts": {"exchange": "all_to_all"}}, "block"),
        ({"fsdp": 2}, {"policy": "names", "names": ["attention_out"]}, EXPERTS, {}, "block"),
        ({"expert": 2, "tensor": 2}, {"policy": "full"}, EXPERTS, {"experts": {"exchange": "gather"}}, "mlp"),
        ({"expert": 2, "tensor": 2}, MLP_KEPT, EXPERTS, {}, "block"),
        ({"tensor": 2}, {"policy": "names", "names": ["attention_out"]}, EXPERTS, {}, "nothing"),
        ({"fsdp": 2}, {"policy": "dots"}, EXPERTS, {}, "nothing"),
        ({"fsdp": 2}, {"policy": "full"}, EXPERTS, {"scan_layers": False}, "nothing"),
        ({"fsdp": 2}, {"policy": "full"}, {}, {}, "nothing"),
        ({"context": 2}, {"policy": "full"}, {}, {}, "nothing"),
        ({"tensor": 2}, {"policy": "dots"}, {}, {}, "nothing"),
        ({"tensor": 2}, {"policy": "none"}, {}, {}, "nothing"),
        ({"tensor": 2}, {"policy": "names", "names": ["attention_out", "mlp_up"]}, {}, {}, "nothing"),
        ({"tensor": 2}, {"policy": "full"}, {}, {"tensor_overlap": "ring"}, "nothing"),
        ({"tensor": 2}, {"policy": "full"}, {}, {"scan_layers": False}, "nothing"),
    ],
)
def test_recomputation_waits_for_gradients_where_attention_s_update_is_recomputed_and_gathered(mesh, remat, model, compute, expected):
    assert execution(mesh, model=model, remat=RematConfig(**remat), **compute).remat.waits == expected


@pytest.mark.parametrize(
    ("remat", "lora", "waits"),
    [
        ({"policy": "full"}, None, "block"),
        ({"policy": "full"}, 2, "nothing"),
        ({"policy": "offload", "names": ["block_input"]}, None, "nothing"),
        ({"policy": "offload", "names": ["query", "mlp_up"]}, None, "nothing"),
    ],
)
def test_blocks_with_frozen_experts_or_values_in_host_memory_do_not_wait(remat, lora, waits) -> None:
    """Copies from host memory begin before the gradient is there, and nothing of frozen experts waits for a reduction."""
    compute = ComputeConfig(remat=RematConfig(**remat))
    model = ModelConfig(**BASE | EXPERTS)
    assert waits_for_gradient(model, compute, LoraConfig(rank=lora), tensor=1, gathered=False) == waits


WINDOWED = {"sliding_window": 5, "full_attention_every": 2}


@pytest.mark.parametrize(
    ("remat", "model", "mesh", "expected"),
    [
        ({"policy": "none"}, {}, {}, True),
        ({"policy": "names", "names": ["query", "mlp_gate"]}, {}, {}, True),
        ({"policy": "names", "names": ["query", "attention_out"]}, {}, {}, False),
        ({"policy": "offload", "names": ["query", "mlp_up"]}, {}, {}, False),
        ({"policy": "full"}, {}, {}, False),
        ({"policy": "none"}, {}, {"pipeline": 2}, False),
        ({"policy": "names", "names": ["query", "attention_out"]}, {}, {"tensor": 2}, True),
        ({"policy": "offload", "names": ["query", "mlp_up"]}, {}, {"tensor": 2}, True),
        ({"policy": "full"}, {}, {"tensor": 2}, True),
        ({"policy": "full"}, {}, {"tensor": 2, "pipeline": 2}, False),
        ({"policy": "none"}, WINDOWED, {}, True),
        ({"policy": "dots"}, WINDOWED, {}, True),
        ({"policy": "names", "names": ["query", "mlp_gate"]}, WINDOWED, {}, False),
        ({"policy": "names", "names": ["query", "mlp_gate"]}, WINDOWED, {"tensor": 2}, False),
        ({"policy": "full"}, WINDOWED, {"tensor": 2}, False),
        ({"policy": "none"}, WINDOWED, {"pipeline": 2}, False),
    ],
)
def test_the_backward_pass_waits_for_kept_gates_of_experts_and_over_tensor_for_all_that_was_saved(remat, model, mesh, expected) -> None:
    compute, sizes = ComputeConfig(remat=RematConfig(**remat)), {"tensor": 1, "pipeline": 1} | mesh
    assert saves_first(ModelConfig(**BASE | EXPERTS | model), compute, **sizes) is expected


@pytest.mark.parametrize(
    ("compute", "expected"), [({}, True), ({"scan_unroll": BASE["num_layers"]}, False), ({"scan_layers": False}, False)]
)
def test_rematerialization_depends_on_whether_the_blocks_run_in_a_compiled_loop(compute, expected) -> None:
    assert execution(**compute).remat.in_scan == expected


def test_an_unsupported_attention_backend_is_refused_before_anything_is_compiled() -> None:
    with pytest.raises(UserError, match=r"compute\.attention\.backend: cudnn .* cpu"):
        execution(attention=AttentionConfig(backend="cudnn"))


@pytest.mark.parametrize("platform", ["rocm", "tpu"])
def test_8_bit_experts_without_a_kernel_are_refused(monkeypatch, platform: str) -> None:
    """On other platforms than NVIDIA GPUs; 16-bit experts are computed anywhere."""
    monkeypatch.setitem(parallelize.__globals__, "platform_of", lambda _: platform)
    model = {"embed_dim": 64, "moe": {"experts": 4, "experts_per_token": 2, "expert_dim": 96}}
    with pytest.raises(UserError, match=r"precision\.matmul=fp8: 8-bit experts need NVIDIA GPUs and precision\.compute=bfloat16;"):
        execution(matmul="fp8", model=model, attention=AttentionConfig(backend="reference"))
    assert execution(model=model, attention=AttentionConfig(backend="reference")).experts is not None


def test_equal_configs_have_equal_executions() -> None:
    assert execution() == execution() and hash(execution()) == hash(execution())


def test_every_family_is_found_by_its_module_name() -> None:
    modules = {path.stem for path in Path(family_modules.__file__).parent.glob("*.py")} - {"__init__"}
    assert {name: family.name for name, family in families().items()} == {name: name for name in modules}
    assert modules >= {"gpt2", "llama", "qwen2", "qwen3", "mixtral"}
