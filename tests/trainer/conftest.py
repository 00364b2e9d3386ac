"""States, meshes and checkpointers that the checkpoint tests share."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from ridgeline.configs.schema import CheckpointConfig
from ridgeline.trainer.checkpoint.checkpointer import Checkpointer


@pytest.fixture
def fsdp_mesh() -> Mesh:
    return jax.make_mesh((8,), ("fsdp",), axis_types=(AxisType.Auto,))


@pytest.fixture
def cube_mesh() -> Mesh:
    return jax.make_mesh((2, 2, 2), ("data", "fsdp", "tensor"), axis_types=(AxisType.Auto,) * 3)


@pytest.fixture
def make_state(fsdp_mesh: Mesh) -> Callable[..., dict[str, Any]]:
    """A state of every dtype a run has, sharded 8 ways; another seed gives other values."""

    def make(seed: int = 0, width: int = 16) -> dict[str, Any]:
        rng = np.random.default_rng(seed)
        sharded, replicated = NamedSharding(fsdp_mesh, PartitionSpec("fsdp")), NamedSharding(fsdp_mesh, PartitionSpec())
        return {
            "params": {
                "matrix": jax.device_put(rng.standard_normal((64, width), np.float32), sharded),
                "half": jax.device_put(rng.standard_normal((16, 4), np.float32).astype(jnp.bfloat16), sharded),
            },
            "opt_state": ({"mu": jax.device_put(rng.standard_normal((64, width), np.float32), sharded)}, None),
            "step": jax.device_put(np.int32(rng.integers(1 << 30)), replicated),
            "rng": jax.device_put(rng.integers(1 << 32, size=2, dtype=np.uint32), replicated),
            "key": jax.device_put(jax.random.key(seed), replicated),
        }

    return make


@pytest.fixture
def abstract() -> Callable[..., Any]:
    """What a state restores into: as it is, or with all arrays on another mesh (first dim over all its axes where it divides)."""

    def describe(state: Any, mesh: Mesh | None = None) -> Any:
        def leaf(x: jax.Array) -> jax.ShapeDtypeStruct:
            sharding = x.sharding
            if mesh is not None:
                split = x.ndim > 0 and x.shape[0] % mesh.size == 0
                sharding = NamedSharding(mesh, PartitionSpec(mesh.axis_names) if split else PartitionSpec())
            return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

        return jax.tree.map(leaf, state)

    return describe


@pytest.fixture
def assert_bitwise_equal() -> Callable[[Any, Any], None]:
    def bits(x: jax.Array) -> bytes:
        return np.asarray(jax.random.key_data(x) if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key) else x).tobytes()

    def check(a: Any, b: Any) -> None:
        assert jax.tree.structure(a) == jax.tree.structure(b)
        for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
            assert x.dtype == y.dtype
            assert x.shape == y.shape
            assert bits(x) == bits(y)

    return check


@pytest.fixture
def checkpointer(tmp_path: Path) -> Callable[..., Checkpointer]:
    """A checkpointer on tmp_path/checkpoints; keyword arguments in the config's names set the config, `said` collects the log."""

    def make(directory: Path | None = None, *, said: list[str] | None = None, **settings: Any) -> Checkpointer:
        arguments = {name: settings.pop(name) for name in ("clock", "events") if name in settings}
        log = said.append if said is not None else None
        return Checkpointer(directory or tmp_path / "checkpoints", CheckpointConfig(**settings), log=log, **arguments)

    return make


@pytest.fixture
def as_nobody() -> Callable[[], contextlib.AbstractContextManager[None]]:
    """A context in which file permissions bind even when the tests run as root."""

    @contextlib.contextmanager
    def switch() -> Iterator[None]:
        if os.geteuid() != 0:
            yield
            return
        os.seteuid(65534)
        try:
            yield
        finally:
            os.seteuid(0)

    return switch
