"""The Partitioner: specs of real trees, refusals, and initialization directly into shards."""

import math
import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from ridgeline.configs.errors import UserError
from ridgeline.configs.model_schema import ModelConfig, MoEConfig
from ridgeline.configs.schema import ComputeConfig, Config, DataConfig, MeshConfig, OptimizerConfig, PrecisionConfig
from ridgeline.sharding.manual import look_up_gradient
from ridgeline.sharding.mesh import abstract_mesh, build_mesh
from ridgeline.sharding.partition import Partitioner, optimizer_state_shardings, param_axes, param_shardings, state_shardings
from ridgeline.trainer.optimizers import build_optimizer
from ridgeline.trainer.state import abstract_state, init_state, initial_state, model_spec


@pytest.fixture(scope="module")
def cube() -> Partitioner:
    return Partitioner(build_mesh(MeshConfig(data=2, fsdp=2, tensor=2)))


class Toy(nnx.Module):
    def __init__(self):
        self.value = nnx.Param(jnp.ones((8, 4)), axes=("embed", "mlp"))
        self.scale = nnx.Param(jnp.ones((8,)), axes=("norm",))


@pytest.mark.parametrize("early", [False, True])
def test_the_zeros_of_the_embeddings_gradient_need_the_gradient_that_comes_in(cube, early):
    """Else XLA may write them before the layers, and keep a table in float32 through the backward pass."""
    ids, dx = jnp.zeros((4, 8), jnp.int32), jnp.ones((4, 8, 16))
    traced = jax.make_jaxpr(lambda dx: look_up_gradient(cube, 64, ids, dx, jnp.dtype("float32"), early=early))(dx)
    (local,) = (eqn.params["jaxpr"] for eqn in traced.eqns if "jaxpr" in eqn.params)
    produced = {id(out): eqn for eqn in local.eqns for out in eqn.outvars}
    (scatter,) = (eqn for eqn in local.eqns if eqn.primitive.name == "scatter-add")
    zeros = produced[id(scatter.invars[0])]
    assert zeros.primitive.name == "broadcast_in_dim"
    of_barrier = id(zeros.invars[0]) in produced and produced[id(zeros.invars[0])].primitive.name == "optimization_barrier"
    assert of_barrier != early


def test_single_device_constrains_nothing():
    single = Partitioner.single()
    x = jnp.ones((3, 5))
    assert single.constrain(x, "batch", "seq") is x
    assert single.gather_param(x, "embed", "mlp") is x


def test_constrain_and_gather_place_as_the_rules_say(cube):
    x, w = jnp.ones((8, 4, 6)), jnp.ones((8, 4))
    placed = jax.jit(lambda x: cube.constrain(x, "batch", "residual_seq", "act_embed"))(x)
    assert placed.sharding.is_equivalent_to(NamedSharding(cube.mesh, P(("data", "fsdp"), "tensor", None)), 3)
    gathered = jax.jit(lambda w: cube.gather_param(w, "embed", "mlp"))(w)
    assert gathered.sharding.is_equivalent_to(NamedSharding(cube.mesh, P(None, "tensor")), 2)


def test_gradient_of_a_gathered_parameter_is_sharded_like_the_parameter(cube):
    w, x = jnp.arange(32.0).reshape(8, 4), jnp.arange(64.0).reshape(8, 8)
    loss = lambda w, x: jnp.sum((cube.constrain(x, "batch", None) @ cube.gather_param(w, "embed", "mlp")) ** 2)  # noqa: E731
    grad = jax.jit(jax.grad(loss))(w, x)
    assert grad.sharding.spec == P("fsdp", "tensor")
    np.testing.assert_allclose(grad, jax.grad(lambda w: jnp.sum((x @ w) ** 2))(w), rtol=1e-5)


def test_an_uneven_parameter_is_refused_naming_it(cube):
    with pytest.raises(
        UserError, match=r"blocks.up of shape \(4, 8, 7\): dim 2 \('mlp', size 7\) does not divide over mesh tensor=2 = 2; .*rules.mlp=\[\]"
    ):
        cube.sharding(("layers", "embed", "mlp"), (4, 8, 7), "blocks.up")


def test_an_uneven_activation_is_refused_instead_of_replicated(cube):
    with pytest.raises(UserError, match=r"dim 0 \('batch', size 6\) does not divide over mesh data=2 x fsdp=2 = 4"):
        jax.jit(lambda x: cube.constrain(x, "batch", None))(jnp.ones((6, 2)))


def test_state_shardings_read_the_axes_of_variables(cube):
    state = nnx.state(nnx.eval_shape(Toy))
    assert param_axes(state) == {"scale": ("norm",), "value": ("embed", "mlp")}
    shardings = state_shardings(cube, state)
    made = jax.jit(lambda: nnx.state(Toy()), out_shardings=shardings)()
    assert made["value"].get_raw_value().sharding.spec == P("fsdp", "tensor")
    assert made["scale"].get_raw_value().sharding.is_fully_replicated


def small_config(kind: str = "adamw", **mesh) -> Config:
    return Config(
        model=ModelConfig(vocab_size=256, num_layers=2, embed_dim=256, num_heads=8, num_kv_heads=4, head_dim=32, mlp_dim=512),
        compute=ComputeConfig(),
        precision=PrecisionConfig(),
        mesh=MeshConfig(**mesh),
        data=DataConfig(batch_size=8, seq_len=16),
        optimizer=OptimizerConfig(kind=kind),
    )


def prepare(config: Config):
    partitioner = Partitioner(build_mesh(config.mesh))
    spec = model_spec(config, partitioner)
    optimizer = build_optimizer(config.optimizer, config.precision, spec.param_axes)
    return partitioner, spec, optimizer, abstract_state(config, spec, optimizer, partitioner)


def test_moments_lie_as_their_parameters():
    partitioner, spec, _, abstract = prepare(small_config(data=1, fsdp=4, tensor=2))
    params = jax.tree.leaves(param_shardings(partitioner, spec.abstract_params, spec.param_axes))
    adam = abstract.opt_state[0][0]
    assert [leaf.sharding for leaf in jax.tree.leaves(adam.mu)] == params
    assert [leaf.sharding for leaf in jax.tree.leaves(adam.nu)] == params
    assert adam.count.sharding.is_fully_replicated


def test_factored_statistics_keep_the_axes_of_the_dims_they_keep():
    partitioner, spec, optimizer, _ = prepare(small_config("adafactor", data=1, fsdp=4, tensor=2))
    state = jax.eval_shape(optimizer.init, spec.abstract_params)
    shardings = optimizer_state_shardings(partitioner, state, spec.abstract_params, spec.param_axes)
    found = {}
    for (path, leaf), sharding in zip(jax.tree_util.tree_flatten_with_path(state)[0], jax.tree.leaves(shardings), strict=True):
        found[jax.tree_util.keystr(path)] = (leaf.shape, sharding.spec)
    rows = [v for k, v in found.items() if "v_row" in k and "up" in k and len(v[0]) == 2]
    columns = [v for k, v in found.items() if "v_col" in k and "up" in k and len(v[0]) == 2]
    assert ((2, 256), P("pipeline", "fsdp")) in rows  # [L, D]: the sum is over F, the larger side
    assert ((2, 512), P("pipeline", "tensor")) in columns
    attention = [v for k, v in found.items() if "v_col" in k and "['query']" in k]
    assert ((2, 256), P("pipeline", "tensor")) in attention  # [L, N*H]: heads keep the cut


def test_no_parameter_is_replicated_over_expert():
    """Attention, dense layers, shared experts and tables are sharded over expert as over fsdp; experts are divided over it; rows too."""
    rng = random.Random(0)
    for _ in range(8):
        sizes = {
            "data": rng.choice([1, 2]),
            "fsdp": rng.choice([1, 2, 4]),
            "tensor": rng.choice([1, 2, 4]),
            "expert": rng.choice([2, 4, 8]),
        }
        moe = MoEConfig(experts=8, experts_per_token=2, expert_dim=64, dense_layers=rng.choice([0, 1]), shared_experts=rng.choice([0, 1]))
        config = small_config(**sizes)
        config = config.model_copy(update={"model": config.model.model_copy(update={"moe": moe})})
        partitioner = Partitioner.of(abstract_mesh(config.mesh, math.prod(sizes.values())), config)
        spec = model_spec(config, partitioner)
        shardings = param_shardings(partitioner, spec.abstract_params, spec.param_axes)
        for (path, leaf), sharding in zip(
            jax.tree_util.tree_flatten_with_path(spec.abstract_params)[0], jax.tree.leaves(shardings), strict=True
        ):
            if leaf.ndim - ("blocks" in str(path)) < 2:
                continue  # norms
            parts = leaf.size // math.prod(sharding.shard_shape(leaf.shape))
            tensor = 1 if "router" in str(path) else sizes["tensor"]
            assert parts == sizes["fsdp"] * sizes["expert"] * tensor, (path, sizes)
        assert partitioner.axis_size("batch") == sizes["data"] * sizes["fsdp"] * sizes["expert"]


def test_initialization_never_holds_a_full_array():
    config = small_config(data=1, fsdp=8, tensor=1)
    _, spec, optimizer, abstract = prepare(config)
    shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract)
    total = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(abstract))
    compiled = jax.jit(lambda: initial_state(config, spec, optimizer), out_shardings=shardings).lower().compile()
    memory = compiled.memory_analysis()
    assert memory.output_size_in_bytes < 1.02 * total / 8
    assert memory.temp_size_in_bytes < 0.5 * total / 8
    state = init_state(config, spec, optimizer, abstract)
    for leaf in jax.tree.leaves((state.params, state.opt_state)):
        if leaf.ndim >= 2 and leaf.size > 4096:
            assert all(shard.data.size == leaf.size // 8 for shard in leaf.addressable_shards)


def test_initial_values_do_not_depend_on_the_mesh():
    configs = [small_config(data=1, fsdp=8, tensor=1), small_config(data=2, fsdp=1, tensor=4)]
    states = []
    for config in configs:
        _, spec, optimizer, abstract = prepare(config)
        states.append(init_state(config, spec, optimizer, abstract).params)
    for a, b in zip(*map(jax.tree.leaves, states), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
