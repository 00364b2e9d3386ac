"""The compiled gradient holds exactly the planned collectives, with the planned bytes, and nothing else."""

import math
import random
from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from ridgeline.configs.model_schema import LatentAttention, ModelConfig, MoEConfig
from ridgeline.configs.schema import (
    AttentionConfig,
    ComputeConfig,
    Config,
    DataConfig,
    ExpertsConfig,
    MeshConfig,
    PrecisionConfig,
    RematConfig,
    TrainerConfig,
)
from ridgeline.configs.tuning_schema import DistillationConfig, LoraConfig, PolicyConfig, PreferenceConfig
from ridgeline.hlo.collectives import Collective, collectives
from ridgeline.hlo.module import is_backward
from ridgeline.hlo.parse import parse
from ridgeline.planner.collectives import as_compiled_for_cpu, compiled_collectives, planned_collectives
from ridgeline.sharding.mesh import build_mesh
from ridgeline.sharding.partition import Partitioner, param_shardings
from ridgeline.trainer.optimizers import build_optimizer
from ridgeline.trainer.state import abstract_state, model_spec
from ridgeline.trainer.step import abstract_batch, loss_sums, make_train_step, policy_sums, preference_sums
from tests.sampling import drawn, seed
from tests.sharding.test_equality import LLAMA4

LAYERS, BATCH, SEQ, VOCAB, D, F = 3, 16, 32, 640, 64, 160
MESHES = [(8, 1, 1), (1, 8, 1), (1, 1, 8), (2, 4, 1), (1, 4, 2), (2, 2, 2)]


OLMO = {"norm_position": "post", "qk_norm": True, "qk_norm_dims": "all_heads"}
GEMMA = {"norm": "rmsnorm_1p", "norm_position": "both", "qk_norm": True, "tie_embeddings": True}


def make_config(
    data: int, fsdp: int, tensor: int, compute: str = "float32", accumulation: int = 1, context: int = 1, method: str = "auto", **model: Any
) -> Config:
    shape = {"vocab_size": VOCAB, "num_layers": LAYERS, "embed_dim": D, "num_heads": 8, "num_kv_heads": 8, "head_dim": 8, "mlp_dim": F}
    return Config(
        model=ModelConfig(**shape | model),
        compute=ComputeConfig(attention=AttentionConfig(backend="chunked", chunk=16, context=method), loss_chunk=BATCH * SEQ),
        precision=PrecisionConfig(compute=compute),
        mesh=MeshConfig(data=data, fsdp=fsdp, tensor=tensor, context=context),
        data=DataConfig(batch_size=BATCH, seq_len=SEQ),
        trainer=TrainerConfig(accumulation=accumulation),
    )


def with_pairs(config: Config) -> Config:
    return config.model_copy(update={"preference": PreferenceConfig(loss="dpo")})


def with_policy(config: Config) -> Config:
    return config.model_copy(update={"policy": PolicyConfig(loss="grpo", kl=0.1)})


def with_teacher(config: Config, **settings: Any) -> Config:
    return config.model_copy(update={"distillation": DistillationConfig(weight=0.5, top_k=12, **settings)})


def partitioned(config: Config) -> Partitioner:
    return Partitioner.of(build_mesh(config.mesh, jax.devices()[: math.prod(config.mesh.sizes.values())]), config)


def compile_step(config: Config) -> tuple[str, dict[str, int]]:
    """The whole optimizer step."""
    partitioner = partitioned(config)
    spec = model_spec(config, partitioner)
    optimizer = build_optimizer(config.optimizer, config.precision, spec.trained_axes)
    state = abstract_state(config, spec, optimizer, partitioner)
    step = make_train_step(spec, config, optimizer, lambda step: jnp.float32(1e-3), partitioner)
    shardings = jax.tree.map(lambda leaf: leaf.sharding, state)
    jitted = jax.jit(step, donate_argnums=0, out_shardings=(shardings, None))
    return jitted.lower(state, abstract_batch(config, partitioner)).compile().as_text(), dict(partitioner.mesh.shape)


def compile_gradient(config: Config) -> tuple[str, dict[str, int]]:
    """Loss and gradient of one batch."""
    partitioner = partitioned(config)
    spec = model_spec(config, partitioner)
    shardings = param_shardings(partitioner, spec.abstract_params, spec.param_axes)
    params = jax.tree.map(lambda leaf, s: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=s), spec.abstract_params, shardings)

    def objective(trained, frozen, batch):
        params = spec.join(trained, frozen)
        if config.preference.loss is not None:
            return preference_sums(spec, config, partitioner, params, batch)[:2]
        if config.policy.loss is not None:
            return policy_sums(spec, config, partitioner, params, batch)[:2]
        sums, _ = loss_sums(spec, config, partitioner, params, batch)
        return sums.objective, ()

    jitted = jax.jit(jax.value_and_grad(objective, has_aux=True), out_shardings=(partitioner.replicated(), spec.split(shardings)[0]))
    return jitted.lower(*spec.split(params), abstract_batch(config, partitioner)).compile().as_text(), dict(partitioner.mesh.shape)


def array_bytes(found: Collective) -> int:
    """Bytes without single numbers (loss and token weight), which are not planned but may be combined with arrays."""
    return found.bytes - 4 * sum(dims == () for dims in found.operands)


def where(found: Collective) -> str:
    """Layers run LAYERS times, and a ring in them a multiple of that; everything else runs once."""
    return "layer" if found.count % LAYERS == 0 else "once"


def budget(items) -> dict[tuple, int]:
    """Bytes per (place, phase, kind, axes) and step."""
    total: Counter = Counter()
    for key, size in items:
        total[key] += size
    return dict(total)


LATENT = {"head_dim": None, "latent_attention": LatentAttention(q_rank=24, kv_rank=16, nope_dim=6, rope_dim=4, value_dim=5)}
LITE = LATENT | {"latent_attention": LATENT["latent_attention"].model_copy(update={"q_rank": None})}
BIASES = {"attention_bias": True, "mlp_bias": True, "output_bias": True, "norm": "layernorm", "position": "learned", "max_seq_len": SEQ}


def with_adapters(config: Config, policy: str = "none", **lora: Any) -> Config:
    compute = config.compute.model_copy(update={"remat": RematConfig(policy=policy)})
    return config.model_copy(update={"lora": LoraConfig(rank=4, **lora), "compute": compute})


@pytest.mark.parametrize(
    "config",
    drawn(
        [
            *(make_config(*mesh) for mesh in MESHES),
            make_config(2, 2, 2, **OLMO),
            make_config(2, 2, 2, **GEMMA),
            make_config(2, 1, 4, **LATENT),
            make_config(2, 2, 2, **LITE),
            make_config(1, 1, 1, context=8, method="ring"),
            make_config(2, 2, 1, context=2, method="ring"),
            make_config(1, 2, 2, context=2, method="ring", **BIASES),
            make_config(1, 2, 2, context=2, method="all_to_all"),
            make_config(2, 1, 1, context=4, method="all_to_all"),
            make_config(1, 2, 2, context=2, method="all_to_all", **LATENT),
            make_config(2, 1, 2, context=2, method="ring", **LITE),
            with_adapters(make_config(2, 2, 2), dora=True),
            with_adapters(make_config(2, 2, 2), "full", dora=True),
            with_adapters(make_config(1, 2, 2, context=2, method="ring", **BIASES)),
            with_adapters(make_config(2, 1, 4, **LATENT), dora=True),
            with_adapters(make_config(2, 2, 2), "full", dora=True, base="int8"),
            with_adapters(make_config(1, 4, 2, **LATENT), base="int8"),
            with_pairs(make_config(2, 2, 2)),
            with_pairs(make_config(1, 2, 2, context=2, method="ring")),
            with_policy(make_config(1, 2, 2, context=2, method="ring")),
            with_teacher(make_config(2, 2, 2)),
            with_teacher(make_config(1, 2, 2, context=2, method="ring"), temperature=2.0),
            with_teacher(make_config(2, 1, 4), rest="renormalize"),
        ],
        8,
    ),
    ids=lambda config: (
        "-".join(f"{axis}{n}" for axis, n in config.mesh.sizes.items() if n > 1)
        + config.compute.attention.context
        + (f"-adapters-{config.compute.remat.policy}-{config.lora.base}" if config.lora.rank else "")
        + ("-pairs" if config.preference.loss else "")
        + ("-policy" if config.policy.loss else "")
        + (f"-teacher-{config.distillation.rest}" if config.distillation.weight else "")
    ),
)
def test_gradient_contains_exactly_the_planned_collectives(config):
    text, mesh_shape = compile_gradient(config)
    module = parse(text)
    found = [c for c in collectives(module, mesh_shape) if array_bytes(c)]
    planned = [as_compiled_for_cpu(item) for item in planned_collectives(config, mesh_shape)]
    layer_phase = lambda c: "backward" if is_backward(c.op_name) else "forward"  # noqa: E731
    assert budget((("layer", layer_phase(c), c.kind, c.axes), array_bytes(c) * c.count) for c in found if where(c) == "layer") == budget(
        (("layer", item.phase, item.kind, item.axes), item.bytes * item.count) for item in planned if item.where == "layer"
    )
    assert budget((("once", c.kind, c.axes), array_bytes(c) * c.count) for c in found if where(c) == "once") == budget(
        (("once", item.kind, item.axes), item.bytes * item.count) for item in planned if item.where != "layer"
    )


SINKS_AND_BIASES = {"attention_sinks": True, "attention_bias": True, "output_bias": True, "mlp_bias": True}


EXPERT_ADAPTERS = {"targets": ["expert_gate", "expert_up", "expert_down"]}


@pytest.mark.parametrize(
    ("mesh", "experts", "model", "lora"),
    drawn(
        [
            ({"data": 2, "fsdp": 2, "tensor": 2}, {}, {}, {}),
            ({"fsdp": 2, "tensor": 2, "expert": 2}, {"exchange": "gather"}, {}, {}),
            ({"fsdp": 1, "tensor": 2, "expert": 4}, {"capacity_factor": 1.2}, {}, {}),
            ({"data": 2, "fsdp": 1, "expert": 4}, {}, {}, {}),
            ({"data": 2, "fsdp": 1, "context": 4}, {}, {}, {}),
            ({"fsdp": 2, "tensor": 2, "expert": 2}, {}, SINKS_AND_BIASES, {}),
            ({"fsdp": 2, "tensor": 2, "context": 2}, {}, SINKS_AND_BIASES, {}),
            ({"data": 2, "fsdp": 2, "tensor": 2}, {}, {}, EXPERT_ADAPTERS),
            ({"fsdp": 2, "tensor": 2, "expert": 2}, {}, {}, EXPERT_ADAPTERS),
            ({"fsdp": 2, "tensor": 2, "expert": 2}, {}, {}, EXPERT_ADAPTERS | {"base": "int8"}),
            ({"fsdp": 2, "tensor": 2, "expert": 2}, {}, LLAMA4, {}),
            ({"data": 2, "fsdp": 1, "expert": 4}, {}, LLAMA4, {}),
            ({"data": 2, "fsdp": 1, "context": 2, "expert": 2}, {"capacity_factor": 1.2}, {}, EXPERT_ADAPTERS),
        ],
        3,
    ),
    ids=str,
)
def test_experts_communicate_as_planned(mesh, experts, model, lora):
    found, planned = experts_budgets(mesh, experts, model, lora)
    assert found == planned


@pytest.mark.parametrize("exchange", drawn(["gather", "all_to_all"], 1))
def test_experts_in_float8_communicate_as_planned(exchange):
    """And the largest values of the experts' matrices, from which their scales are computed: a few numbers."""
    found, planned = experts_budgets({"fsdp": 2, "tensor": 2, "expert": 2}, {"exchange": exchange}, {}, {}, "fp8")
    assert found == pytest.approx(dict.fromkeys(found, 0) | planned, rel=0, abs=512)


def experts_budgets(mesh, experts, model, lora, matmul="compute"):
    """Bytes per kind and axes of a compiled gradient, and of the plan."""
    config = make_config(2, 2, 2, **model)
    moe = model.get("moe", MoEConfig(experts=8, experts_per_token=2, expert_dim=32, logit_bias=bool(model)))
    compute = config.compute.model_copy(update={"experts": ExpertsConfig(**experts)})
    model = config.model.model_copy(update={"moe": moe})
    config = config.model_copy(update={"mesh": MeshConfig(**mesh), "model": model, "compute": compute})
    if matmul != "compute":
        config = config.model_copy(update={"precision": PrecisionConfig(compute="bfloat16", matmul=matmul)})
    config = with_adapters(config, **lora) if lora else config
    text, mesh_shape = compile_gradient(config)
    found = [c for c in collectives(parse(text), mesh_shape) if array_bytes(c)]
    planned = compiled_collectives(config, mesh_shape, gpu=False)
    return (
        budget(((c.kind, c.axes), array_bytes(c) * c.count) for c in found),
        budget(((item.kind, item.axes), item.bytes * item.count) for item in planned),
    )


@pytest.mark.parametrize(
    ("mesh", "model", "policy"),
    drawn(
        [
            ({"data": 2, "fsdp": 2, "tensor": 2}, {"mtp_layers": 2}, "none"),
            ({"data": 2, "fsdp": 2, "tensor": 2, "zero_stage": 2}, {"mtp_layers": 2}, "none"),
            ({"data": 2, "fsdp": 2, "tensor": 2}, {"mtp_layers": 1, **LATENT}, "full"),
            ({"data": 2, "fsdp": 2, "tensor": 2}, {"mtp_layers": 1}, "names"),
            ({"fsdp": 1, "tensor": 2, "context": 4}, {"mtp_layers": 1}, "none"),
            (
                {"fsdp": 2, "tensor": 2, "expert": 2},
                {"mtp_layers": 1, "moe": MoEConfig(experts=8, experts_per_token=2, expert_dim=32)},
                "none",
            ),
        ],
        2,
    ),
    ids=str,
)
def test_modules_of_multi_token_prediction_communicate_as_planned(mesh, model, policy):
    config = make_config(2, 2, 2, **model)
    remat = RematConfig(policy=policy, names=["mlp_gate"] if policy == "names" else [])
    compute = config.compute.model_copy(update={"remat": remat})
    config = config.model_copy(update={"mesh": MeshConfig(**mesh), "compute": compute})
    if config.mesh.zero_stage:  # the update gathers the parameters
        module, mesh_shape = compile_step(config)
    else:
        text, mesh_shape = compile_gradient(config)
        module = parse(text)
    found = [c for c in collectives(module, mesh_shape) if array_bytes(c)]
    assert budget(((c.kind, c.axes), array_bytes(c) * c.count) for c in found) == budget(
        ((item.kind, item.axes), item.bytes * item.count) for item in compiled_collectives(config, mesh_shape, gpu=False)
    )


def test_stages_communicate_as_planned():
    """With fsdp and tensor: tests/planner/test_collectives_gpu.py."""
    mesh = {"pipeline": 4, "data": 2}
    config = make_config(1, 1, 1, accumulation=4)
    model = config.model.model_copy(update={"num_layers": 4})
    config = config.model_copy(update={"mesh": config.mesh.model_copy(update=mesh), "model": model})
    text, mesh_shape = compile_step(config)
    moved = budget(((c.kind, c.axes), array_bytes(c) * c.count) for c in collectives(text, mesh_shape) if array_bytes(c))
    planned = budget(((item.kind, item.axes), item.bytes * item.count) for item in compiled_collectives(config, mesh_shape, gpu=False))
    assert moved == pytest.approx(planned, rel=0, abs=512)


def test_half_precision_compute_gathers_in_half_precision():
    """A gather before the cast would move twice the bytes. float16, because the CPU backend moves bfloat16 as float32."""
    config = make_config(2, 2, 2, compute="float16")
    text, mesh_shape = compile_gradient(config)
    found = [c for c in collectives(text, mesh_shape) if c.kind == "all-gather"]
    assert {c.dtype for c in found} == {"f16"}
    planned = [item for item in planned_collectives(config, mesh_shape) if item.kind == "all-gather"]
    assert budget((c.axes, c.total_bytes) for c in found) == budget((item.axes, item.bytes * item.count) for item in planned)


@pytest.mark.parametrize(
    ("mesh", "precision", "zero"),
    [
        ((1, 8, 1), {"compute": "bfloat16", "gradients": "bfloat16"}, 0),
        ((2, 2, 2), {"compute": "bfloat16", "matmul": "fp8"}, 0),
        ((2, 2, 2), {}, 2),
    ],
)
def test_a_whole_accumulated_step_communicates_nothing_but_its_microbatches_gradients(mesh, precision, zero):
    """Clipping, AdamW, the skip of bad steps and the split into microbatches add single numbers only, and fp8 its few scales. With ZeRO
    stage 2 the updated parameters are gathered. Modules of multi-token prediction, drawn with the policy of their blocks, have parameters
    that no loop over layers cuts out of a stack: the CPU backend gathers them once for all microbatches.

    In every dtype the plan has the bytes that the CPU backend moves, which has no bfloat16 or float8 collectives.
    """
    rng = random.Random(f"{seed()} {mesh} {precision} {zero}")
    config = make_config(*mesh, accumulation=2, mtp_layers=0 if "matmul" in precision else rng.choice([0, 1, 2]))
    policy = rng.choice(["none", "attention-only", "dots", "full"])
    sharding, compute = (
        config.mesh.model_copy(update={"zero_stage": zero}),
        config.compute.model_copy(update={"remat": RematConfig(policy=policy)}),
    )
    config = config.model_copy(update={"precision": PrecisionConfig(**precision), "mesh": sharding, "compute": compute})
    text, mesh_shape = compile_step(config)
    moved = budget(((c.kind, c.axes), array_bytes(c) * c.count) for c in collectives(text, mesh_shape) if array_bytes(c))
    planned = budget(((item.kind, item.axes), item.bytes * item.count) for item in compiled_collectives(config, mesh_shape, gpu=False))
    scales = 512 if config.precision.matmul == "fp8" else 0
    assert moved == pytest.approx(planned, rel=0, abs=scales)
