"""A state that is not finite is never sealed: any leaf, any element, on one device, on eight, and in one copy of eight."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ridgeline.rundir.events import EventLog
from ridgeline.trainer.checkpoint import directories as checkpoint_dirs
from ridgeline.trainer.failures import NumericalFailure

Make = Callable[..., Any]
KINDS = {"NaN": np.nan, "+inf": np.inf, "-inf": -np.inf}


@pytest.fixture(params=["one device", "eight devices"])
def shards(request: pytest.FixtureRequest, fsdp_mesh: Mesh) -> NamedSharding:
    if request.param == "eight devices":
        return NamedSharding(fsdp_mesh, PartitionSpec("fsdp"))
    return NamedSharding(jax.make_mesh((1,), ("fsdp",), devices=jax.devices()[:1]), PartitionSpec())


def host_state(rng: np.random.Generator) -> dict[str, Any]:
    """Every kind of leaf a run may hold: wide, narrow, 8-bit moments with their scales, integers."""
    return {
        "params": {"rows": rng.standard_normal((16, 8), np.float32), "half": rng.standard_normal((8, 4), np.float32).astype(jnp.bfloat16)},
        "opt_state": {
            "mu": rng.standard_normal((16, 8), np.float32),
            "code": rng.integers(-127, 127, (16, 8), np.int8),
            "scale": rng.random((16, 1), np.float32),
            "nu": rng.random((16, 8), np.float32).astype(jnp.float8_e5m2),
            "mask": rng.random((8, 2), np.float32).astype(jnp.float8_e4m3fn),  # has a NaN, but no infinity
        },
        "step": np.int32(3),
    }


def put(state: dict[str, Any], shards: NamedSharding) -> Any:
    replicated = NamedSharding(shards.mesh, PartitionSpec())
    return jax.tree.map(lambda x: jax.device_put(x, shards if np.ndim(x) else replicated), state)


def test_a_number_that_is_not_finite_anywhere_refuses_the_save_and_is_named(
    shards: NamedSharding, checkpointer: Make, tmp_path: Path
) -> None:
    draw, said = random.Random(23), list[str]()
    saver = checkpointer(said=said, keep_last=1, events=EventLog(tmp_path / "events.jsonl"))
    good = host_state(np.random.default_rng(0))
    saver.save(1, put(good, shards), {}, block=True)
    places = [(group, name) for group in ("params", "opt_state") for name in good[group] if name != "code"]
    for step in range(2, 20):
        state = host_state(np.random.default_rng(step))
        group, name = draw.choice(places)
        kind = draw.choice(list(KINDS)) if name != "mask" else "NaN"
        state[group][name][draw.randrange(state[group][name].shape[0]), -1] = KINDS[kind]
        with pytest.raises(NumericalFailure, match=rf"the state of step {step} is not finite \({group}\.{name}\)"):
            saver.save(step, put(state, shards), {}, block=True)
        assert said.pop() == f"WARNING: step {step} is not saved: not finite: {group}.{name}"
        assert checkpoint_dirs.steps(saver.directory) == [1], "nothing written, nothing deleted"
    events = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert {event["kind"] for event in events} >= {"checkpoint_saved", "checkpoint_refused"}
    assert all(event["leaves"] for event in events if event["kind"] == "checkpoint_refused")
    saver.save(20, put(good, shards), {}, block=True)
    assert saver.latest_step() == 20
    assert saver.read_metadata(20)["finite"] is True


def test_one_copy_of_a_replicated_array_that_differs_refuses_the_save(checkpointer: Make, fsdp_mesh: Mesh) -> None:
    copies = [np.ones(4, np.float32) for _ in fsdp_mesh.devices.flat]
    copies[5][2] = np.nan
    arrays = [jax.device_put(copy, device) for copy, device in zip(copies, fsdp_mesh.devices.flat, strict=True)]
    whole = jax.make_array_from_single_device_arrays((4,), NamedSharding(fsdp_mesh, PartitionSpec()), arrays)
    with pytest.raises(NumericalFailure, match=r"params\.w"):
        checkpointer().save(1, {"params": {"w": whole}}, {}, block=True)


def test_many_leaves_are_counted_and_the_first_are_named(checkpointer: Make) -> None:
    said: list[str] = []
    state = {"params": {f"w{index}": jnp.full(2, np.inf) for index in range(5)}}
    with pytest.raises(NumericalFailure):
        checkpointer(said=said).save(7, state, {}, block=True)
    assert said == ["WARNING: step 7 is not saved: not finite: params.w0, params.w1, params.w2 and 2 more"]


def test_the_largest_finite_numbers_are_saved(checkpointer: Make) -> None:
    dtypes = (jnp.float32, jnp.bfloat16, jnp.float16, jnp.float8_e4m3fn, jnp.float8_e5m2)
    state = {jnp.dtype(dtype).name: jnp.full(3, jnp.finfo(dtype).max, dtype) for dtype in dtypes}
    assert checkpointer().save(1, state, {}, block=True).saved
