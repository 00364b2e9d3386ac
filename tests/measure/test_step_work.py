"""What a step consists of: the products add up to the model's FLOPs, whatever the mesh, the batch and the rematerialization."""

from __future__ import annotations

from typing import Any

import pytest

from ridgeline.configs.schema import MESH_AXES, Config
from ridgeline.measure.step_work import MAX_RESULT_ELEMENTS, step_matmuls, step_memory_traffic
from ridgeline.planner.flops import train_flops_per_token
from ridgeline.planner.parameters import count_parameters


def config(**sections: Any) -> Config:
    base: dict[str, Any] = {
        "model": {"vocab_size": 4096, "num_layers": 3, "embed_dim": 256, "num_heads": 8, "num_kv_heads": 4, "mlp_dim": 512},
        "compute": {"loss_chunk": 512},
        "precision": {"compute": "bfloat16"},
        "data": {"seq_len": 256, "batch_size": 16},
    }
    return Config.model_validate({**base, **{k: {**base.get(k, {}), **v} for k, v in sections.items()}})


def sizes(**axes: int) -> dict[str, int]:
    return {axis: axes.get(axis, 1) for axis in MESH_AXES}


CASES: list[tuple[dict[str, Any], dict[str, int]]] = [
    ({}, {}),
    ({}, {"data": 2, "fsdp": 2, "tensor": 4}),
    ({"model": {"gated_mlp": False, "sliding_window": 64}}, {"fsdp": 4}),
    ({"trainer": {"accumulation": 4}}, {"data": 2, "tensor": 2}),
    ({"compute": {"remat": {"policy": "full"}}}, {"fsdp": 8}),
    ({"compute": {"remat": {"policy": "dots"}}, "optimizer": {"kind": "muon"}}, {"fsdp": 2}),
]


@pytest.mark.parametrize(("sections", "axes"), CASES)
def test_the_products_of_all_devices_are_the_models_flops(sections: dict[str, Any], axes: dict[str, int]) -> None:
    made, mesh = config(**sections), sizes(**axes)
    devices = 1
    for size in mesh.values():
        devices *= size
    found = sum(p.flops * p.count for p in step_matmuls(made, mesh, gpu=True) if p.model) * devices
    wanted = train_flops_per_token(made.model, made.data.seq_len).total * made.data.batch_size * made.data.seq_len
    assert found == pytest.approx(wanted, rel=1e-9)


def test_what_is_computed_again_and_by_the_optimiser_is_listed_but_not_counted_in_the_model() -> None:
    def names(**sections: Any) -> set[str]:
        return {p.name for p in step_matmuls(config(**sections), sizes(), gpu=True) if not p.model}

    assert names() == {"scores recomputed"}  # the backward pass of fused attention
    assert names(compute={"attention": {"backend": "reference"}}) == set()
    full = names(compute={"remat": {"policy": "full"}})
    assert {"gate recomputed", "query recomputed", "values recomputed"} <= full
    assert "down recomputed" not in full  # nobody needs its result again
    assert "query orthogonalized" in names(optimizer={"kind": "muon"})


def test_attention_that_keeps_all_scores_does_twice_the_causal_work() -> None:
    def flops(backend: str) -> float:
        made = config(compute={"attention": {"backend": backend}})
        return sum(p.flops * p.count for p in step_matmuls(made, sizes(), gpu=True) if p.part == "attention" and p.model)

    assert flops("reference") == pytest.approx(2 * flops("chunked"))


def test_a_product_that_would_not_fit_is_measured_in_parts_that_count_as_the_whole() -> None:
    made = config(data={"seq_len": 4096, "batch_size": 64}, model={"max_seq_len": 4096})
    attention = [p for p in step_matmuls(made, sizes(), gpu=True) if p.part == "attention" and p.model]
    assert all(p.batch * p.shape[0] * p.shape[1] <= MAX_RESULT_ELEMENTS for p in attention)
    per_token = train_flops_per_token(made.model, 4096).attention_scores
    assert sum(p.flops * p.count for p in attention) == pytest.approx(per_token * 64 * 4096)


def test_the_arithmetic_is_that_of_the_devices() -> None:
    made = config(precision={"compute": "float32"})
    assert {p.dtype for p in step_matmuls(made, sizes(), gpu=True)} == {"tfloat32"}
    assert {p.dtype for p in step_matmuls(made, sizes(), gpu=False)} == {"float32"}
    highest = config(precision={"compute": "float32"}, compute={"matmul_precision": "highest"})
    assert {p.dtype for p in step_matmuls(highest, sizes(), gpu=True)} == {"float32"}


@pytest.mark.parametrize(
    ("matmul", "forward", "backward"), [("fp8", "float8", "float8"), ("fp8_delayed", "float8", "float8"), ("nvfp4", "nvfp4", "mxfp8")]
)
def test_narrow_products_are_those_of_the_layers_with_their_parameters(matmul: str, forward: str, backward: str) -> None:
    made = config(precision={"matmul": matmul}, compute={"remat": {"policy": "full"}})
    found = step_matmuls(made, sizes(), gpu=True)
    layers = [p for p in found if p.part in ("mlp", "attention projections")]
    assert {p.dtype for p in layers if "gradient" in p.name} == {backward}
    assert {p.dtype for p in layers if "gradient" not in p.name} == {forward}
    assert {p.dtype for p in found if p not in layers} == {"bfloat16"}


def test_passes_count_the_optimisers_bytes_and_shrink_with_the_shards() -> None:
    made = config()
    whole, cut = step_memory_traffic(made, sizes()), step_memory_traffic(made, sizes(fsdp=4))
    assert whole.update_bytes == pytest.approx(32 * count_parameters(made.model).total)
    assert whole.update_bytes / 4 < cut.update_bytes < 1.25 * whole.update_bytes / 4  # vectors stay whole, some gradients are transposed
    assert cut.layers_bytes < whole.layers_bytes / 3
    assert whole.total_bytes == whole.layers_bytes + whole.ends_bytes + whole.update_bytes
    full = step_memory_traffic(config(compute={"remat": {"policy": "full"}}), sizes())
    assert full.layers_bytes > whole.layers_bytes  # norms and activations are computed again
    again = step_memory_traffic(config(compute={"attention": {"backend": "reference"}}), sizes())
    assert again.layers_bytes == pytest.approx(whole.layers_bytes)  # scores are attention's own matter
