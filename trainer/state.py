"""The training state: input and output of a step, and the contents of a checkpoint.

Parameters live in a plain nested dict of arrays (the pure-dict view of the Flax NNX model), which is what jit, optax and Orbax
handle at the lowest cost; the module structure is the static `graphdef`, and the logical axes of each parameter are a parallel dict.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from ridgeline import models
from ridgeline.configs.schema import Config
from ridgeline.models.lora import ADAPTERS, join_adapters, split_adapters
from ridgeline.models.params import Amax
from ridgeline.sharding.partition import Partitioner, optimizer_state_shardings, state_shardings
from ridgeline.trainer.offload import OffloadedOptimizer, in_host_memory

Tree = Any
INIT_OPTIONS: dict[str, dict[str, Any]] = {"cpu": {"xla_backend_optimization_level": 1}}
"""Platform -> compiler options of the initialization. Higher LLVM levels take 4.1 s instead of 1.4 s, with the same values and speed."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainState:
    """Everything a step changes."""

    step: jax.Array
    """int32 []: steps taken, skipped ones included; also the data position."""
    params: Tree
    """Nested dict of arrays in precision.params. With adapters (`lora`) these are in precision.params, the others in precision.compute."""
    opt_state: Tree
    """The optax state."""
    amax: Tree
    """Amax history of the inputs and gradients of the layers' matmuls, newest first: nested dict of float32
    [layers, 1 + matmuls, precision.amax_history] (models.params.Amax); empty without delayed scaling."""
    skipped: jax.Array
    """int32 []: non-finite steps so far."""
    bad_in_a_row: jax.Array
    """int32 []: non-finite steps since the last finite one."""
    rng: jax.Array
    """uint32 [2]: key data of the run; step s draws from fold_in(rng, s)."""


@dataclass(frozen=True)
class ModelSpec:
    """The static part of a model: structure, shapes and logical axes, without arrays."""

    graphdef: Any
    delayed_graphdef: Any
    """With variables for the amax history of delayed scaling; equal to `graphdef` without delayed scaling."""
    abstract_amax: Tree
    """Nested dict of ShapeDtypeStruct, of TrainState.amax."""
    abstract_params: Tree
    """Nested dict of ShapeDtypeStruct."""
    param_axes: Tree
    """Nested dict of logical-axis tuples, same structure."""
    param_shardings: Tree
    """Nested dict of NamedSharding, same structure."""
    build: Callable[[jax.Array], Tree]
    """Key -> initial parameters (pure, jittable)."""
    adapted: bool = False
    """There are adapters, and only they are trained."""

    def split(self, params: Tree) -> tuple[Tree, Tree]:
        """Return the trained parameters and the frozen ones, of a tree with the structure of the parameters."""
        return split_adapters(params) if self.adapted else (params, {})

    def join(self, trained: Tree, frozen: Tree) -> Tree:
        """Undo `split`."""
        return join_adapters(trained, frozen) if self.adapted else trained

    @property
    def trained_axes(self) -> Tree:
        """Logical axes of the trained parameters."""
        return self.split(self.param_axes)[0]

    def merge(self, params: Tree, recent: Tree | None = None) -> Any:
        """Put parameters into the module (inside jit). `recent`: amax for delayed scaling; None: current scaling."""
        return nnx.merge(self.graphdef, params) if recent is None else nnx.merge(self.delayed_graphdef, params, recent)


def model_spec(config: Config, partitioner: Partitioner) -> ModelSpec:
    """Describe the model of a config without allocating it. Raises UserError for a parameter dim that does not divide over the mesh."""

    def create(key: jax.Array, delayed: bool = False) -> Any:
        in_stage = partitioner.in_stage  # what a module computes is inside of one stage
        rngs = nnx.Rngs(params=key, **{ADAPTERS: jax.random.fold_in(key, 1)})
        return models.build(config.model, config.compute, config.precision, in_stage, rngs, delayed=delayed, lora=config.lora)

    def initial_params(key: jax.Array) -> Tree:
        return nnx.to_pure_dict(nnx.split(create(key), nnx.Param)[1])

    graphdef, variables = nnx.split(nnx.eval_shape(lambda: create(jax.random.key(0))), nnx.Param)
    delayed_graphdef, recent, steps = graphdef, {}, config.precision.amax_history
    if config.precision.delayed:
        delayed_graphdef, *states = nnx.split(nnx.eval_shape(lambda: create(jax.random.key(0), delayed=True)), nnx.Param, Amax)
        recent = nnx.to_pure_dict(states[1])
    axes = jax.tree.map(lambda v: v.get_metadata()["axes"], variables, is_leaf=lambda v: isinstance(v, nnx.Variable))
    return ModelSpec(
        graphdef=graphdef,
        delayed_graphdef=delayed_graphdef,
        abstract_amax=jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((*leaf.shape[:-2], steps), leaf.dtype), recent),
        abstract_params=nnx.to_pure_dict(variables),
        param_axes=nnx.to_pure_dict(axes),
        param_shardings=nnx.to_pure_dict(state_shardings(partitioner, variables)),
        build=initial_params,
        adapted=config.lora.rank is not None,
    )


def abstract_state(config: Config, spec: ModelSpec, optimizer: optax.GradientTransformation, partitioner: Partitioner) -> TrainState:
    """Return the state as ShapeDtypeStructs with shardings, for initialization and restore."""
    shapes = jax.eval_shape(lambda: initial_state(config, spec, optimizer))
    replicated: Any = partitioner.replicated()
    shardings = TrainState(
        step=replicated,
        params=spec.param_shardings,
        opt_state=optimizer_state_shardings(partitioner.of_state, shapes.opt_state, spec.split(spec.abstract_params)[0], spec.trained_axes),
        amax=jax.tree.map(lambda _: replicated, shapes.amax),
        skipped=replicated,
        bad_in_a_row=replicated,
        rng=replicated,
    )
    state: TrainState = jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), shapes, shardings
    )
    return replace(state, opt_state=in_host_memory(state.opt_state)) if config.optimizer.offload else state


def abstract_gradient(spec: ModelSpec, partitioner: Partitioner) -> Tree:
    """Return shapes and shardings of the gradient of the trained parameters, as the step reduces it."""
    params, of_state = spec.split(spec.abstract_params)[0], partitioner.of_state

    def leaf(param: Any, axes: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(param.shape, param.dtype, sharding=of_state.sharding(axes, param.shape, "gradient"))

    return jax.tree.map(leaf, params, spec.trained_axes)


def init_program(config: Config, spec: ModelSpec, optimizer: optax.GradientTransformation, abstract: TrainState) -> Any:
    """Return the jitted () -> state of step 0. The arrays are created sharded: no host or device ever holds the whole model."""
    shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract)
    platform = next(iter(shardings.step.device_set)).platform
    offloaded = OffloadedOptimizer.of(config, spec.trained_axes, None) if config.optimizer.offload else None
    return jax.jit(
        lambda: initial_state(config, spec, optimizer, offloaded), out_shardings=shardings, compiler_options=INIT_OPTIONS.get(platform)
    )


def init_state(config: Config, spec: ModelSpec, optimizer: optax.GradientTransformation, abstract: TrainState) -> TrainState:
    """Create the state of step 0."""
    state: TrainState = init_program(config, spec, optimizer, abstract)()
    return state


def initial_state(
    config: Config, spec: ModelSpec, optimizer: optax.GradientTransformation, offloaded: OffloadedOptimizer | None = None
) -> TrainState:
    """Return the state of step 0 (pure, jittable; `init_program` shards it). offloaded: puts the optimizer state into host memory."""
    key = jax.random.key(config.seed)
    init_key, run_key = jax.random.split(key)
    params = spec.build(init_key)
    trained = spec.split(params)[0]
    zero = jnp.zeros((), jnp.int32)
    return TrainState(
        step=zero,
        params=params,
        opt_state=optimizer.init(trained) if offloaded is None else offloaded.init(optimizer.init, trained),
        amax=jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), spec.abstract_amax),
        skipped=zero,
        bad_in_a_row=zero,
        rng=jax.random.key_data(run_key),
    )
