"""Update rules: against a hand-written reference, on a quadratic, per layer, and sharded."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from ridgeline.configs.choices import OPTIMIZERS as NAMES
from ridgeline.configs.errors import UserError
from ridgeline.configs.schema import MeshConfig, OptimizerConfig, PrecisionConfig
from ridgeline.hlo.collectives import collectives
from ridgeline.hlo.parse import parse
from ridgeline.planner.local import muon_layers
from ridgeline.sharding.mesh import build_mesh
from ridgeline.sharding.partition import Partitioner, optimizer_state_shardings, param_shardings
from ridgeline.trainer.muon import scale_by_muon
from ridgeline.trainer.optimizers import OPTIMIZERS, build_optimizer, decays, uses_muon

D, N, H, F, V, L = 128, 8, 16, 256, 160, 2
SHAPES = {
    "embedding": ((V, D), ("vocab", "embed")),
    "layers": {
        "query": ((L, D, N, H), ("layers", "embed", "heads", "head_dim")),
        "query_bias": ((L, N, H), ("layers", "heads", "head_dim")),
        "out": ((L, N, H, D), ("layers", "heads", "head_dim", "embed")),
        "gate": ((L, D, F), ("layers", "embed", "mlp")),
        "norm": ((L, D), ("layers", "norm")),
    },
    "positions": ((64, D), ("positions", "embed")),
    "norm": ((D,), ("norm",)),
}
is_entry = lambda x: isinstance(x, tuple)  # noqa: E731
AXES = jax.tree.map(lambda entry: entry[1], SHAPES, is_leaf=is_entry)
MATRICES = {"embedding", "positions", "layers.query", "layers.out", "layers.gate"}


def random_params(seed: int, dtype=jnp.float32, scale: float = 1.0):
    leaves, treedef = jax.tree.flatten(SHAPES, is_leaf=is_entry)
    keys = jax.random.split(jax.random.key(seed), len(leaves))
    return jax.tree.unflatten(
        treedef, [(scale * jax.random.normal(k, shape)).astype(dtype) for k, (shape, _) in zip(keys, leaves, strict=True)]
    )


def config(kind: str, **kwargs) -> OptimizerConfig:
    return OptimizerConfig(kind=kind, **kwargs)


def flat(tree) -> dict[str, np.ndarray]:
    return {".".join(str(k.key) for k in path): np.asarray(x) for path, x in jax.tree_util.tree_flatten_with_path(tree)[0]}


def test_registry_implements_exactly_the_names_a_config_may_use():
    assert set(OPTIMIZERS) == set(NAMES)


def test_unknown_kind_is_refused_with_the_nearest_name():
    with pytest.raises(UserError, match=r"optimizer.kind 'adam'; did you mean 'adamw'"):
        build_optimizer(config("adam"), PrecisionConfig(), AXES)


@pytest.mark.parametrize("kind", NAMES)
def test_lowers_a_quadratic(kind):
    target = random_params(1)
    rate = {"sgd": 0.1, "adafactor": 0.1}.get(kind, 0.05)
    rule = build_optimizer(config(kind, weight_decay=0.0), PrecisionConfig(), AXES)
    loss = lambda p: sum(jnp.mean((a - b) ** 2) * a.size**0.5 for a, b in zip(jax.tree.leaves(p), jax.tree.leaves(target), strict=True))  # noqa: E731

    @jax.jit
    def step(params, state):
        updates, state = rule.update(jax.grad(loss)(params), state, params, learning_rate=jnp.float32(rate))
        return optax.apply_updates(params, updates), state

    params = random_params(0)
    state = rule.init(params)
    start = float(loss(params))
    for _ in range(40):
        params, state = step(params, state)
    assert float(loss(params)) < 0.5 * start


def test_adamw_equals_a_hand_written_reference_over_ten_steps():
    settings = config("adamw", b1=0.8, b2=0.95, eps=1e-6, weight_decay=0.2)
    rule = build_optimizer(settings, PrecisionConfig(), AXES)
    params = random_params(0)
    state = rule.init(params)
    w = {name: x.astype(np.float64) for name, x in flat(params).items()}
    m = {name: np.zeros_like(x) for name, x in w.items()}
    v = {name: np.zeros_like(x) for name, x in w.items()}
    for t in range(1, 11):
        grads, rate = random_params(100 + t), 0.01 * t
        updates, state = rule.update(grads, state, params, learning_rate=jnp.float32(rate))
        params = optax.apply_updates(params, updates)
        for name, g in flat(grads).items():
            m[name] = 0.8 * m[name] + 0.2 * g
            v[name] = 0.95 * v[name] + 0.05 * g.astype(np.float64) ** 2
            step = (m[name] / (1 - 0.8**t)) / (np.sqrt(v[name] / (1 - 0.95**t)) + 1e-6)
            decay = 0.2 * w[name] if name in MATRICES else 0.0
            w[name] = w[name] - rate * (step + decay)
    for name, found in flat(params).items():
        np.testing.assert_allclose(found, w[name], rtol=2e-5, atol=2e-6, err_msg=name)


@pytest.mark.parametrize(("decay", "expected"), [("matrices", MATRICES), ("all", None), ("none", set())])
@pytest.mark.parametrize("kind", NAMES)
def test_decay_reaches_exactly_the_parameters_it_should(kind, decay, expected):
    params, zeros = random_params(0), jax.tree.map(jnp.zeros_like, random_params(0))
    rule = build_optimizer(config(kind, weight_decay=0.5, decay=decay), PrecisionConfig(), AXES)
    updates, _ = rule.update(zeros, rule.init(params), params, learning_rate=jnp.float32(0.1))
    expected = set(flat(params)) if expected is None else expected
    for name, update in flat(updates).items():
        np.testing.assert_allclose(update, -0.05 * flat(params)[name] if name in expected else 0.0, rtol=1e-6, atol=1e-12, err_msg=name)


def test_a_stacked_bias_is_no_matrix_and_a_projection_is_one():
    assert not decays(config("adamw"), ("layers", "heads", "head_dim"))
    assert not decays(config("adamw"), ("layers", "norm"))
    assert decays(config("adamw"), ("layers", "heads", "head_dim", "embed"))


def test_muon_takes_matrices_but_not_tables_norms_and_biases():
    assert {name for name, axes in flat_axes().items() if uses_muon(axes)} == {"layers.query", "layers.out", "layers.gate"}


def flat_axes() -> dict[str, tuple]:
    return {".".join(str(k.key) for k in path): axes for path, axes in jax.tree_util.tree_flatten_with_path(AXES, is_leaf=is_entry)[0]}


def test_muon_updates_are_orthogonal_per_layer_in_the_matrix_view():
    rule = build_optimizer(config("muon", weight_decay=0.0), PrecisionConfig(), AXES)
    params, grads = random_params(0), random_params(1)
    updates, _ = rule.update(grads, rule.init(params), params, learning_rate=jnp.float32(1.0))
    for name, rows, columns in (("query", D, N * H), ("out", N * H, D), ("gate", D, F)):
        for layer in range(L):
            matrix = np.asarray(updates["layers"][name][layer]).reshape(rows, columns)
            singular = np.linalg.svd(matrix, compute_uv=False) / (0.2 * max(rows, columns) ** 0.5)
            assert 0.4 < np.median(singular) < 1.3, (name, singular)
            assert singular.max() < 1.4


def test_muon_equals_optax():
    """One layer at a time, against optax.contrib.scale_by_muon over all of them, with its state."""
    dims = {"query": ((1,), (2, 3)), "out": ((1, 2), (3,)), "gate": ((1,), (2,))}
    axes = {name: AXES["layers"][name] for name in dims}
    first, second = ({name: random_params(seed)["layers"][name] for name in dims} for seed in (1, 2))
    numbers = {name: optax.contrib.MuonDimensionNumbers(*sides) for name, sides in dims.items()}
    theirs = optax.contrib.scale_by_muon(beta=0.9, weight_dimension_numbers=numbers)
    ours = scale_by_muon(0.9, jnp.dtype("float32"), lambda params: axes, None)
    states = [rule.init(first) for rule in (theirs, ours)]
    for gradients in (first, second, first):
        (expected, states[0]), (found, states[1]) = (rule.update(gradients, s) for rule, s in zip((theirs, ours), states, strict=True))
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), (expected, states[0]), (found, states[1]))


@pytest.mark.parametrize("kind", NAMES)
def test_stacking_layers_does_not_change_the_update(kind):
    """Two stacked layers move as two single ones."""
    entries = SHAPES["layers"]
    single_axes = {f"{name}{layer}": axes[1:] for name, (_, axes) in entries.items() for layer in range(L)}
    unstack = lambda tree: {f"{name}{layer}": tree["layers"][name][layer] for name in entries for layer in range(L)}  # noqa: E731
    stacked_rule = build_optimizer(config(kind), PrecisionConfig(), AXES)
    single_rule = build_optimizer(config(kind), PrecisionConfig(), single_axes)
    params, rate = random_params(0), jnp.float32(0.1)
    state, single_state = stacked_rule.init(params), single_rule.init(unstack(params))
    for seed in (1, 2):
        grads = random_params(seed, scale=0.1 * seed)
        updates, state = stacked_rule.update(grads, state, params, learning_rate=rate)
        single_updates, single_state = single_rule.update(unstack(grads), single_state, unstack(params), learning_rate=rate)
        for name, update in unstack(updates).items():
            np.testing.assert_allclose(update, single_updates[name], rtol=2e-4, atol=2e-6, err_msg=name)


@pytest.mark.parametrize("kind", ["adamw", "lion", "muon", "sgd"])
def test_first_moments_have_the_policy_dtype_and_the_rest_is_float32(kind):
    rule = build_optimizer(config(kind), PrecisionConfig(moments="bfloat16"), AXES)
    params = random_params(0, jnp.bfloat16)
    state = jax.eval_shape(rule.init, params)
    paths = {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_flatten_with_path(state)[0]}
    first = {path for path in paths if ".mu[" in path or ".trace[" in path}
    assert len(first) == len(jax.tree.leaves(params))
    assert all(paths[path].dtype == jnp.bfloat16 for path in first)
    assert all(leaf.dtype in (jnp.float32, jnp.int32) for path, leaf in paths.items() if path not in first)
    updates, new = rule.update(params, rule.init(params), params, learning_rate=jnp.float32(0.1))
    assert jax.tree.map(lambda x: x.dtype, new) == jax.tree.map(lambda x: x.dtype, state)
    assert all(u.dtype == jnp.float32 for u in jax.tree.leaves(updates))


def test_adafactor_state_is_factored_and_float32():
    rule = build_optimizer(config("adafactor"), PrecisionConfig(params="bfloat16"), AXES)
    state = jax.eval_shape(rule.init, random_params(0, jnp.bfloat16))
    assert all(leaf.dtype in (jnp.float32, jnp.int32) for leaf in jax.tree.leaves(state))
    held = sum(leaf.size for leaf in jax.tree.leaves(state))
    total = sum(x.size for x in jax.tree.leaves(random_params(0)))
    assert held < 0.2 * total


def test_update_without_a_learning_rate_is_an_error():
    rule = build_optimizer(config("adamw"), PrecisionConfig(), AXES)
    params = random_params(0)
    with pytest.raises(TypeError, match="learning_rate"):
        rule.update(params, rule.init(params), params)


@pytest.mark.parametrize("kind", NAMES)
def test_sharded_update_equals_the_unsharded_one(kind):
    partitioner = Partitioner(build_mesh(MeshConfig(data=2, fsdp=2, tensor=2)))
    one, rule = (build_optimizer(config(kind), PrecisionConfig(), AXES, given) for given in (None, partitioner))
    params, grads, rate = random_params(0), random_params(1), jnp.float32(0.1)

    def two_steps(rule, params, grads):
        state = rule.init(params)
        for _ in range(2):
            updates, state = rule.update(grads, state, params, learning_rate=rate)
            params = optax.apply_updates(params, updates)
        return params, state

    abstract = jax.eval_shape(lambda: random_params(0))
    shardings = param_shardings(partitioner, abstract, AXES)
    state_shardings = optimizer_state_shardings(partitioner, jax.eval_shape(rule.init, abstract), abstract, AXES)
    expected = jax.jit(partial(two_steps, one))(params, grads)
    sharded = jax.jit(partial(two_steps, rule), in_shardings=(shardings, shardings), out_shardings=(shardings, state_shardings))(
        *jax.device_put((params, grads), (shardings, shardings))
    )
    for (path, a), b in zip(jax.tree_util.tree_flatten_with_path(expected)[0], jax.tree.leaves(sharded), strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=1e-4, atol=1e-5, err_msg=jax.tree_util.keystr(path))


def test_muon_moves_every_stack_over_every_axis_and_back():
    """No matrix is gathered: two all-to-alls per axis move the float32 matrices of a share of the layers (planner/collectives/)."""
    partitioner = Partitioner(build_mesh(MeshConfig(data=2, fsdp=2, tensor=2)))
    rule = build_optimizer(config("muon"), PrecisionConfig(), AXES, partitioner)
    abstract = jax.eval_shape(lambda: random_params(0))
    params = jax.tree.map(
        lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
        abstract,
        param_shardings(partitioner, abstract, AXES),
    )
    update = jax.jit(lambda grads, params: rule.update(grads, rule.init(params), params, learning_rate=jnp.float32(1.0))[0])
    found = collectives(parse(update.lower(params, params).compile().as_text()), dict(partitioner.mesh.shape))
    moved = {axes: sum(c.total_bytes for c in found if c.kind == "all-to-all" and c.axes == (axes,)) for axes in ("fsdp", "tensor")}
    weights = D * N * H * 2 + D * F
    assert moved == dict.fromkeys(("fsdp", "tensor"), 2 * 4 * muon_layers(L, 4) * weights)
    assert sum(c.total_bytes for c in found if c.kind != "all-to-all") < 4 * weights / 10
