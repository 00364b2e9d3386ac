"""Silent data corruption: bits flipped in the memory and in the gradients of one device of a real run are found at the next check."""

from __future__ import annotations

import socket
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from ridgeline.configs.errors import UserError
from ridgeline.configs.rules import check_config
from ridgeline.configs.schema import Config
from ridgeline.loaders.prepare import PrepareSettings, prepare
from ridgeline.rundir.bad_nodes import read_bad_nodes
from ridgeline.rundir.events import Event, event_file, read_events
from ridgeline.rundir.goodput import run_ledger
from ridgeline.trainer import step as step_module
from ridgeline.trainer.checkpoint import directories as checkpoint_dirs
from ridgeline.trainer.checkpoint.payload import named_leaves
from ridgeline.trainer.corruption import Finding, judge
from ridgeline.trainer.digests import StepDigests, device_digests, digest
from ridgeline.trainer.failures import CorruptionFound
from ridgeline.trainer.prepare import check_repeatable
from ridgeline.trainer.run import train
from ridgeline.trainer.state import abstract_gradient
from tests.sampling import drawn
from tests.trainer.bit_flips import before_step, flip

pytestmark = pytest.mark.usefixtures("quick_compile")
STEPS, EVERY = 13, 4
REPLICATED, SHARDED = {"data": 4, "fsdp": 2}, {"fsdp": 8}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("corpus")
    (directory / "text.txt").write_text("".join(f"def f{n}(x):\n    return x * {n * n}\n" for n in range(300)))
    prepare(PrepareSettings((directory / "text.txt",), directory / "tokens", "bytes"), workers=1)
    return directory / "tokens"


def make_config(corpus: Path, run_dir: Path, mesh: dict[str, int], every: int = EVERY, **sections: Any) -> Config:
    return Config.model_validate(
        {
            "name": "small",
            "run_dir": str(run_dir),
            "model": {"vocab_size": 264, "num_layers": 1, "embed_dim": 16, "num_heads": 2, "mlp_dim": 32, "max_seq_len": 16},
            "precision": {"compute": "float32"},
            "mesh": mesh,
            "data": {"train": [{"path": str(corpus)}], "seq_len": 16, "batch_size": 8},
            "trainer": {"steps": STEPS, "log_every": 4},
            "checkpoint": {"every": EVERY},
            "corruption_check": {"every": every},
            "logging": {"tensorboard": False},
            **sections,
        }
    )


def flip_gradient(monkeypatch: pytest.MonkeyPatch, step: int, leaf: int, device: int, element: int, bit: int) -> None:
    """Have a bit of one device's gradient, after its reduction, flipped the first time that a step is computed."""
    make, armed = step_module._make_gradient, list[bool]()

    def mask(position: np.ndarray) -> np.ndarray:
        return np.uint32(1 << bit if int(position) == device and armed and armed.pop() else 0)

    def change(g: jax.Array, *, axes: tuple[str, ...]) -> jax.Array:
        xor = jax.pure_callback(mask, jax.ShapeDtypeStruct((), jnp.uint32), jax.lax.axis_index(axes))
        chosen = jnp.arange(g.size, dtype=jnp.uint32).reshape(g.shape) == element % g.size
        bits = jax.lax.bitcast_convert_type(g, jnp.uint32)
        return jax.lax.bitcast_convert_type(jnp.where(chosen, bits ^ xor, bits), g.dtype)

    def make_broken(spec: Any, config: Config, partitioner: Any) -> Any:
        gradient, mesh = make(spec, config, partitioner), partitioner.mesh
        shardings = jax.tree.leaves(abstract_gradient(spec, partitioner))

        def broken(params: Any, recent: Any, batch: Any, key: jax.Array) -> Any:
            grads, *rest = gradient(params, recent, batch, key)
            leaves, tree = jax.tree.flatten(grads)
            place, axes = shardings[leaf].sharding.spec, mesh.axis_names
            run = jax.shard_map(partial(change, axes=axes), mesh=mesh, in_specs=place, out_specs=place, check_vma=False)
            leaves[leaf] = run(leaves[leaf])
            return jax.tree.unflatten(tree, leaves), *rest

        return broken

    monkeypatch.setattr(step_module, "_make_gradient", make_broken)
    before_step(step, lambda state: armed.append(True), monkeypatch.setattr)


def events(config: Config, kind: str) -> list[Event]:
    return [event for event in read_events(event_file(config.directory, 0)) if event.kind == kind]


def found(config: Config, step: int, device: int, kind: str) -> dict[str, Any]:
    """Train until corruption is found; assert that it is found at the next check and on that device, and what follows."""
    with pytest.raises(CorruptionFound) as caught:
        train(config, command=["test"])
    [event] = events(config, "corruption")
    checked = (step - 1) // EVERY * EVERY
    assert (event.fields["step"], event.fields["check"], event.fields["good_step"]) == (step, kind, checked)
    assert [int(name.split()[1]) for name in event.fields["devices"]] == [device]
    assert f"device {device} (process 0, node {socket.gethostname()})" in str(caught.value)
    assert list(read_bad_nodes(config.directory)) == event.fields["nodes"] == [socket.gethostname()]
    assert all(one.fields["step"] <= checked + EVERY for one in events(config, "step"))
    assert max(checkpoint_dirs.complete_steps(config.directory / "checkpoints"), default=0) == checked
    return event.fields


def draw(seed: int, arrays: int) -> tuple[int, int, int, int, int]:
    """Return a step, an array, a device, an element and a bit."""
    source = np.random.default_rng(seed)
    return tuple(int(source.integers(*span)) for span in ((EVERY + 1, STEPS + 1), (0, arrays), (0, 8), (0, 1 << 20), (0, 32)))


@pytest.mark.parametrize(("mesh", "kind"), drawn([(REPLICATED, "opt_state"), (SHARDED, "params")], 1), ids=str)
def test_a_bit_flipped_in_memory_is_found_and_the_next_start_trains_as_if_it_had_not_been(
    corpus: Path,
    programs: Path,
    clean: Callable[[dict[str, int]], Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    mesh: dict[str, int],
    kind: str,
) -> None:
    config = make_config(corpus, tmp_path / "run", mesh, runtime={"compilation_cache": str(programs)})
    names = [name for name in named_leaves(clean(mesh)) if name.startswith(kind)]
    step, array, device, element, bit = draw(ord(kind[0]) + len(mesh), len(names))
    with monkeypatch.context() as patch:
        before_step(step, lambda state: flip(named_leaves(state)[names[array]], device, element, bit), patch.setattr)
        assert found(config, step, device, "memory")["arrays"] == [names[array]]
    outcome = train(config, command=["test"])
    assert outcome is not None
    jax.tree.map(np.testing.assert_array_equal, outcome.state, clean(mesh))
    assert events(config, "corruption")[1:] == []
    assert run_ledger(read_events(event_file(config.directory, 0))).seconds["check"] > 0


@pytest.mark.parametrize(("every", "sections"), [(100, {}), (100, {"trainer": {"max_bad_steps": 3}, "checkpoint": {"every": 0}})], ids=str)
def test_a_bit_that_makes_the_state_overflow_is_found_before_a_save_and_before_the_run_ends_as_not_finite(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, every: int, sections: dict[str, Any]
) -> None:
    """The highest bit of the exponent makes a weight about 1e37: the losses after it are not finite, or the state at the next save."""
    merged = {"trainer": {"steps": STEPS, "log_every": 4} | sections.pop("trainer", {}), **sections}
    config = make_config(corpus, tmp_path / "run", SHARDED, every, **merged)
    before_step(6, lambda state: flip(next(iter(named_leaves(state).values())), 3, 5, 30), monkeypatch.setattr)
    with pytest.raises(CorruptionFound, match="changed in memory"):
        train(config, command=["test"])
    [event] = events(config, "corruption")
    assert (event.fields["step"], event.fields["check"], event.fields["good_step"]) == (6, "memory", 4 if config.checkpoint.every else 0)
    assert max(checkpoint_dirs.complete_steps(config.directory / "checkpoints"), default=0) <= 4


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("programs")


@pytest.fixture(scope="module")
def clean(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[dict[str, int]], Any]:
    """Mesh -> the last state of a run without checks."""

    @cache
    def run(mesh: tuple[tuple[str, int], ...]) -> Any:
        outcome = train(make_config(corpus, tmp_path_factory.mktemp("clean") / "run", dict(mesh), every=0), command=["test"])
        assert outcome is not None
        return jax.tree.map(np.array, outcome.state)

    return lambda mesh: run(tuple(mesh.items()))


@pytest.mark.parametrize("mesh", [REPLICATED, SHARDED], ids=str)
def test_a_bit_flipped_in_a_gradient_is_found(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mesh: dict[str, int]) -> None:
    """In one of several copies at any step; in a shard without copies in the step that is replayed."""
    step, array, device, element, bit = draw(len(mesh), 12)
    step = EVERY + 1 if mesh is REPLICATED else 2 * EVERY
    flip_gradient(monkeypatch, step, array, device, element, bit)
    fields = found(make_config(corpus, tmp_path / "run", mesh), step, device, "replicas" if mesh is REPLICATED else "replay")
    assert fields["arrays"][0].startswith("gradient.") and len(fields["arrays"]) == 1


def digests_of(data: int, fsdp: int) -> StepDigests:
    """Digests of a state of one array sharded over fsdp and one replicated, with a gradient of the first."""
    mesh = jax.make_mesh((data, fsdp), ("data", "fsdp"), devices=jax.devices()[: data * fsdp], axis_types=(jax.sharding.AxisType.Auto,) * 2)

    def leaf(*axes: str) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((8, 4), jnp.float32, sharding=jax.sharding.NamedSharding(mesh, PartitionSpec(*axes)))

    return StepDigests.of(mesh, {"w": leaf("fsdp"), "z": leaf()}, {"w": leaf("fsdp")})


def agreeing(digests: StepDigests, steps: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return digests [steps, devices, columns] without a disagreement, and the groups of copies."""
    groups, source = np.stack(list(digests.groups().values())), np.random.default_rng(seed)
    devices = np.arange(groups.shape[1])
    by_group = source.integers(0, 1 << 32, (steps, *groups.shape), dtype=np.uint32)
    history = np.stack([[[one[column, groups[column, d]] for column in range(len(groups))] for d in devices] for one in by_group])
    before, _, after = digests.columns
    history[1:, :, before] = history[:-1, :, after]
    return history, groups


def test_digests_are_those_of_numpy_and_show_every_bit() -> None:
    source = np.random.default_rng(3)
    for dtype in (np.float32, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, np.int8, np.int32, np.bool_):
        x = source.integers(-7, 8, (3, 5)).astype(dtype)
        bits = x.astype(np.int8).view(np.uint8) if dtype is np.bool_ else x.view(f"u{x.dtype.itemsize}")
        expected = sum(
            int(bits[i, j]) * (((i * 0x9E3779B1 + j * 0x85EBCA77) % (1 << 32)) | 1) for i in range(x.shape[0]) for j in range(x.shape[1])
        )
        assert int(digest(jnp.asarray(x))) == expected % (1 << 32), dtype
    one = jax.jit(digest)
    x = source.standard_normal((4, 3)).astype(np.float32)
    values = [
        x.view(np.uint32) ^ np.where(np.arange(12).reshape(4, 3) == at, np.uint32(1 << bit), 0) for at in range(12) for bit in range(32)
    ]
    assert int(one(jnp.asarray(x))) not in [int(d) for d in jax.vmap(one)(jnp.asarray(np.stack(values).view(np.float32)))]


def test_each_device_digests_its_own_copy() -> None:
    digests = digests_of(2, 4)
    x = np.random.default_rng(0).standard_normal((8, 4)).astype(np.float32)
    # copies: the devices of a CPU may share NumPy's memory
    leaves = [jnp.copy(jax.device_put(x, leaf.sharding)) for leaf in digests.state.values()]
    flip(leaves[0], 5, 3, 30)
    rows = np.asarray(jax.jit(partial(device_digests, digests.mesh, specs=[leaf.sharding.spec for leaf in leaves]))(leaves))
    [w, _] = [digests.groups()[name] for name in ("w", "z")]
    assert [device for device in range(8) if rows[device, 0] != rows[np.flatnonzero(w == w[device])[0], 0]] == [5]
    assert len(set(rows[:, 1])) == 1


@pytest.mark.parametrize("seed", range(6))
def test_judging_names_the_first_disagreement(seed: int) -> None:
    digests, source = digests_of(4, 2), np.random.default_rng(seed)
    history, groups = agreeing(digests, 6, seed)
    continues, device = [True] * 6, int(source.integers(8))
    before, gradient, after = digests.columns

    def judged(changed: np.ndarray, replay: np.ndarray | None = None) -> Finding | None:
        return judge(changed, 100, continues, replay, groups, digests)

    assert judged(history, history[-1].copy()) is None
    flipped = history.copy()
    flipped[3, device, before.start] ^= 4  # and nothing after it
    assert judged(flipped) == Finding(103, "memory", ("w",), (device,))
    diverged = history.copy()
    diverged[2, device, gradient] ^= 1  # and all that follows from it
    diverged[2:, device, after] += 7
    diverged[3:, device, before] = diverged[2:-1, device, after]
    assert judged(diverged) == Finding(102, "replicas", ("gradient.w",), (device,))
    replay = history[-1].copy()
    replay[device, after.start] ^= 1
    assert judged(history, replay) == Finding(105, "replay", ("w",), (device,))
    replay = history[-1].copy()
    replay[:, gradient] += 1  # of all copies: the error is older than the reduction
    assert judged(history, replay) == Finding(105, "replay", ("gradient.w",), ())


def test_of_two_copies_both_are_named_unless_the_replay_differs_on_one() -> None:
    digests = digests_of(2, 2)
    history, groups = agreeing(digests, 2, 0)
    history[1, 1, digests.columns[2].start] ^= 1  # of array w, whose other copy is on device 3
    assert judge(history, 1, [True] * 2, None, groups, digests) == Finding(2, "replicas", ("w",), (1, 3))
    replay = history[1].copy()
    replay[3, digests.columns[2].start] ^= 2
    assert judge(history, 1, [True] * 2, replay, groups, digests) == Finding(2, "replicas", ("w",), (3,))


def test_a_state_that_a_hook_has_replaced_is_not_compared_with_the_one_before() -> None:
    digests = digests_of(4, 2)
    history, groups = agreeing(digests, 2, 0)
    history[1] += 1
    assert judge(history, 1, [False, False], None, groups, digests) is None


def test_settings_that_do_not_work_are_refused(tmp_path: Path) -> None:
    config = make_config(tmp_path, tmp_path / "run", {"data": 8}, runtime={"platform": "rocm"})
    assert [problem.keys[0] for problem in check_config(config)] == ["corruption_check.every"]
    with pytest.raises(UserError, match=r"runtime\.deterministic=true"):
        check_repeatable(config, SimpleNamespace(platform="gpu"))
