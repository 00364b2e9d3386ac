"""Optimizer state in host memory, and the update that copies it to the device and back (optimizer.offload).

The update takes one parameter after the other (a stack of layers is one): its state is copied to the device, updated, and copied back.
The copy of a state begins when the state of the parameter before the previous one is back in host memory. The device therefore holds the
states of at most two parameters, and the copies in both directions and the update overlap.

Each parameter has an optimizer of its own, whose state has the paths and values that it has in the optimizer of all parameters. So the
state, and a checkpoint of it, is the same with and without offloading.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax

from ridgeline.configs.schema import Config
from ridgeline.sharding.host import host_sharding
from ridgeline.sharding.partition import Partitioner
from ridgeline.trainer.low_precision import apply_updates
from ridgeline.trainer.optimizers import build_optimizer, in_eight_bits

Tree = Any
Path = tuple[Any, ...]
"""JAX key path of an array."""
ON_DEVICE = 2
"""Parameters whose state is on the device at a time."""


def in_host_memory(abstract_opt_state: Tree) -> Tree:
    """Return an abstract optimizer state with shardings in host memory. Counters stay on the device."""

    def one(leaf: Any) -> Any:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=host_sharding(leaf.sharding)) if leaf.ndim else leaf

    return jax.tree.map(one, abstract_opt_state)


@dataclass(frozen=True)
class _Parameter:
    """One of the trained parameters."""

    path: Path
    optimizer: optax.GradientTransformationExtraArgs
    """Of this parameter alone."""
    first_key: int
    """Its position among the parameters that are rounded stochastically when they are stored."""
    first_code: int
    """Its position among the parameters that may have moments in 8 bits."""

    def tree(self, leaf: Any) -> Tree:
        """Return `leaf` in the structure of the parameters, with this parameter alone."""
        return _alone(self.path, leaf)


@dataclass(frozen=True)
class OffloadedOptimizer:
    """The optimizer of a config, as one per parameter."""

    parameters: tuple[_Parameter, ...]
    stochastic: bool
    """As precision.stochastic_rounding."""

    @classmethod
    def of(cls, config: Config, param_axes: Tree, partitioner: Partitioner | None) -> OffloadedOptimizer:
        """Return the optimizer of parameters with these logical axes, sharded by `partitioner` (None: only `init` is used)."""
        found: list[_Parameter] = []
        codes = 0
        for path, axes in jax.tree_util.tree_leaves_with_path(param_axes, is_leaf=lambda node: type(node) is tuple):
            rule = build_optimizer(config.optimizer, config.precision, _alone(path, axes), partitioner, config.model.width_ratio)
            found.append(_Parameter(path, rule, len(found), codes))
            codes += in_eight_bits(axes)
        return cls(tuple(found), config.precision.stochastic_rounding)

    def init(self, whole: Callable[[Tree], Tree], params: Tree) -> Tree:
        """Return the initial state of `params`, in host memory. whole: the initialization of the optimizer of all parameters."""
        of, queue, states = _by_path(params), _Queue(), dict[Path, jax.Array]()
        for parameter in self.parameters:
            state = _by_path(parameter.optimizer.init(parameter.tree(of[parameter.path])))
            states |= state | queue.to_host(dict(zip(state, queue.after_earlier(list(state.values())), strict=True)))
        return _filled(jax.eval_shape(whole, params), states)

    def update(
        self, grads: Tree, opt_state: Tree, params: Tree, good: jax.Array, learning_rate: jax.Array, key: jax.Array, rounding: jax.Array
    ) -> tuple[Tree, Tree]:
        """Return the new parameters and the new state, in host memory; both are the old ones where `good` is false.

        key, rounding: for moments in 8 bits, and for parameters that are rounded stochastically.
        """
        grads_of, params_of, states = _by_path(grads), _by_path(params), _by_path(opt_state)
        queue, new_params, new_states = _Queue(good), dict[Path, jax.Array](), dict(states)
        for each in self.parameters:
            param = each.tree(params_of[each.path])
            shapes = jax.eval_shape(each.optimizer.init, param)
            paths = list(_by_path(shapes))
            old = dict(zip(paths, queue.to_device([states[path] for path in paths]), strict=True))
            updates, state = each.optimizer.update(
                each.tree(grads_of[each.path]),
                _filled(shapes, old),
                param,
                learning_rate=learning_rate,
                key=key,
                first=each.first_code,
            )
            new = apply_updates(param, updates, rounding, each.first_key) if self.stochastic else optax.apply_updates(param, updates)
            new, state = jax.tree.map(lambda new, old: jnp.where(good, new, old), (new, state), (param, _filled(shapes, old)))
            new_params |= _by_path(new)
            new_states |= queue.to_host(_by_path(state))
        return _filled(params, new_params), _filled(opt_state, new_states)


class _Queue:
    """The order of the copies: those of a parameter begin when those of ON_DEVICE parameters before have ended (traced)."""

    def __init__(self, start: jax.Array | None = None) -> None:
        self._ends: list[Any] = [] if start is None else [start]

    def after_earlier(self, arrays: Sequence[jax.Array]) -> list[jax.Array]:
        """Return arrays that are there only when earlier copies have ended."""
        if not self._ends:
            return list(arrays)
        waited: list[jax.Array] = jax.lax.optimization_barrier((list(arrays), self._ends[max(0, len(self._ends) - ON_DEVICE)]))[0]
        return waited

    def to_device(self, arrays: Sequence[jax.Array]) -> list[jax.Array]:
        """Return the state of the next parameter on the device."""
        return [jax.device_put(array, jax.memory.Space.Device) if array.ndim else array for array in self.after_earlier(arrays)]

    def to_host(self, arrays: dict[Path, jax.Array]) -> dict[Path, jax.Array]:
        """Return its new state in host memory."""
        moved = {path: jax.device_put(array, jax.memory.Space.Host) if array.ndim else array for path, array in arrays.items()}
        self._ends.append(list(moved.values()))
        return moved


def _alone(path: Path, leaf: Any) -> Tree:
    """Return the nested dict with `leaf` at this path."""
    for key in reversed(path):
        leaf = {key.key: leaf}
    return leaf


def _by_path(tree: Tree) -> dict[Path, jax.Array]:
    return {tuple(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def _filled(structure: Tree, leaves: dict[Path, jax.Array]) -> Tree:
    """Return a tree of this structure with the leaves at its paths."""
    return jax.tree.unflatten(jax.tree.structure(structure), [leaves[path] for path in _by_path(structure)])
