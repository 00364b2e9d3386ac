"""The plan of a step's collectives, in numbers worked out by hand. (The compiled step is held to it in tests/sharding.)"""

from configs.schema import Config, DataConfig, MeshConfig, ModelConfig, PrecisionConfig, TrainerConfig
from planner.collectives import as_compiled_for_cpu, bytes_per_step, planned_collectives

D, F, N, K, H, V, L = 64, 160, 8, 4, 8, 512, 3
SIZES = {"pipeline": 1, "data": 2, "fsdp": 4, "context": 1, "tensor": 2, "expert": 1}


def config(accumulation: int = 2) -> Config:
    return Config(
        model=ModelConfig(vocab_size=V, num_layers=L, embed_dim=D, num_heads=N, num_kv_heads=K, head_dim=H, mlp_dim=F),
        precision=PrecisionConfig(compute="bfloat16"),
        mesh=MeshConfig(data=2, fsdp=4, tensor=2),
        data=DataConfig(batch_size=32, seq_len=16),
        trainer=TrainerConfig(accumulation=accumulation),
    )


def test_one_device_plans_nothing():
    assert planned_collectives(config(), dict.fromkeys(SIZES, 1)) == []


def test_layers_move_what_the_formulas_say():
    planned = [item for item in planned_collectives(config(), SIZES) if item.where == "layer"]
    weights = 2 * D * (N + K) * H + 3 * D * F
    total = {}
    for item in planned:
        total[item.phase, item.kind, item.axes] = total.get((item.phase, item.kind, item.axes), 0) + item.bytes
    stream = 2 * 16 * D * 2  # 2 rows of a microbatch per device, bfloat16
    assert total["forward", "all-gather", ("fsdp",)] == total["backward", "all-gather", ("fsdp",)] == weights // 2 * 2
    assert total["backward", "reduce-scatter", ("fsdp",)] == weights // 2 * 4
    assert total["backward", "all-reduce", ("data",)] == weights // 2 // 4 * 4
    for phase in ("forward", "backward"):
        assert total[phase, "all-gather", ("tensor",)] == total[phase, "reduce-scatter", ("tensor",)] == 2 * stream
    assert {item.count for item in planned} == {L * 2}


def test_microbatches_repeat_parameter_traffic_but_not_that_of_activations():
    one, four = (bytes_per_step(planned_collectives(config(n), SIZES)) for n in (1, 4))
    assert four["all-gather", ("fsdp",)] == 4 * one["all-gather", ("fsdp",)]
    assert four["all-gather", ("tensor",)] == one["all-gather", ("tensor",)]


def test_the_cpu_form_splits_sums_and_forms_no_reduce_scatter_but_those_by_hand():
    for item in planned_collectives(config(), SIZES):
        compiled = as_compiled_for_cpu(item)
        assert (compiled.kind == "reduce-scatter") == (item.kind == "reduce-scatter" and item.by_hand)
        assert compiled.bytes == item.bytes * item.parts
        assert compiled.count in (item.count, 1)
