"""Whole compiled programs of an earlier start: found again only where all they are made from is the same, and never in the way of a run."""

from __future__ import annotations

import hashlib
import os
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from ridgeline.configs.diff import flatten
from ridgeline.configs.schema import Config
from ridgeline.observe.compilation import CompilerWatch
from ridgeline.rundir.events import COMPILED, JAX_CACHE, LOADED, EventLog, event_file
from ridgeline.rundir.provenance import code_hash
from ridgeline.sharding.mesh import build_mesh
from ridgeline.trainer import program_cache
from ridgeline.trainer.prepare import prepare
from ridgeline.trainer.program_cache import NOT_IN_PROGRAM, ProgramCache, program_facts
from ridgeline.trainer.step import abstract_batch

TINY = {"vocab_size": 64, "num_layers": 1, "embed_dim": 16, "num_heads": 2, "mlp_dim": 32, "max_seq_len": 16}
CONFIG = Config.model_validate({"model": TINY, "data": {"batch_size": 8, "seq_len": 16}, "mesh": {"data": 8}})


@pytest.fixture(scope="module")
def mesh() -> jax.sharding.Mesh:
    return build_mesh(CONFIG.mesh, jax.devices())


@pytest.fixture(scope="module")
def row(mesh: jax.sharding.Mesh) -> jax.Array:
    return jax.device_put(np.arange(8, dtype=np.float32), NamedSharding(mesh, PartitionSpec("data")))


class Starts:
    """Starts one process after another, as far as compiling goes: each has functions of its own."""

    def __init__(self, mesh: jax.sharding.Mesh, directory: Path) -> None:
        self.mesh, self.directory = mesh, directory
        self.facts = program_facts(CONFIG, mesh)
        self.logged: list[str] = []

    def cache(self) -> ProgramCache:
        return ProgramCache(self.directory, self.facts, list(self.mesh.devices.flat), self.logged.append)

    def start(self, *args: Any, name: str = "scale") -> tuple[str, Any]:
        """Compile; return where the program came from, and it."""
        jax.clear_caches()
        record: dict[str, Any] = {}
        program = self.cache().compile(jax.jit(lambda x: (x * 3, x.sum()), donate_argnums=0), name, args, record)
        return record["source"], program

    @property
    def files(self) -> list[Path]:
        return sorted((self.directory / "programs").iterdir())


@pytest.fixture(autouse=True)
def jax_cache(tmp_path: Path) -> Iterator[Any]:
    """JAX's own cache is off, whatever ran before in this process; call it with a directory to turn it on."""
    from jax.experimental.compilation_cache.compilation_cache import reset_cache

    names = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs", "jax_persistent_cache_min_entry_size_bytes")
    before = {name: getattr(jax.config, name) for name in names}

    def use(directory: Path | None) -> None:
        reset_cache()
        for name, value in zip(names, (None if directory is None else str(directory), 0.0, 0), strict=True):
            jax.config.update(name, value)

    use(None)
    yield use
    reset_cache()
    for name, value in before.items():
        jax.config.update(name, value)


@pytest.fixture
def starts(mesh: jax.sharding.Mesh, tmp_path: Path) -> Starts:
    return Starts(mesh, tmp_path)


def copy(array: jax.Array) -> jax.Array:
    """Return an array that may be donated."""
    return jax.device_put(np.asarray(array), array.sharding)


@pytest.fixture
def traced() -> Iterator[list[str]]:
    """Names of the functions that JAX traces, lowers or compiles."""
    found: list[str] = []

    def heard(event: str, duration_secs: float, **details: Any) -> None:
        if event.startswith("/jax/core/compile/"):
            found.append(str(details.get("fun_name")))

    jax.monitoring.register_event_duration_secs_listener(heard)
    yield found
    jax.monitoring.unregister_event_duration_listener(heard)


def test_a_second_start_traces_and_compiles_nothing_and_computes_the_same(starts: Starts, row: jax.Array, traced: list[str]) -> None:
    came, first = starts.start(row)
    assert came == COMPILED
    assert "<lambda>" in traced
    expected = [np.asarray(x) for x in first(copy(row))]
    traced.clear()
    came, second = starts.start(row)
    assert came == LOADED
    assert traced == []
    given = copy(row)
    for found, wanted in zip(second(given), expected, strict=True):
        np.testing.assert_array_equal(found, wanted)
    assert given.is_deleted(), "donated, as it was compiled"
    assert second.memory_analysis().argument_size_in_bytes == first.memory_analysis().argument_size_in_bytes
    assert starts.logged == []


def test_other_arguments_and_names_are_other_programs(starts: Starts, row: jax.Array) -> None:
    starts.start(row)
    whole = NamedSharding(starts.mesh, PartitionSpec())
    assert starts.start(jax.device_put(row, whole))[0] == COMPILED
    assert starts.start(row.astype(jnp.int32))[0] == COMPILED
    assert starts.start(row, name="other")[0] == COMPILED
    assert starts.start(row)[0] == LOADED


@pytest.mark.parametrize("change", ["config", "source", "package", "flag", "jax setting", "mesh", "machine"])
def test_whatever_a_program_is_made_from_is_looked_at(
    change: str, mesh: jax.sharding.Mesh, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    before = program_facts(CONFIG, mesh)
    assert program_facts(CONFIG, mesh) == before
    config = CONFIG
    if change == "config":
        config = CONFIG.model_copy(update={"model": CONFIG.model.model_copy(update={"norm_eps": 1e-3})})
    elif change == "source":
        (tmp_path / "models").mkdir()
        (tmp_path / "models" / "mlp.py").write_text("edited")
        monkeypatch.setattr(program_cache, "code_hash", lambda names: code_hash(tmp_path, names))
    elif change == "package":
        monkeypatch.setattr(program_cache, "makers", lambda search: {"jaxlib": "99"})
    elif change == "flag":
        monkeypatch.setenv("XLA_FLAGS", os.environ["XLA_FLAGS"] + " --xla_cpu_enable_fast_math=true")
    elif change == "jax setting":
        was = jax.config.jax_default_matmul_precision
        jax.config.update("jax_default_matmul_precision", "highest")
        try:
            assert program_facts(config, mesh) != before
        finally:
            jax.config.update("jax_default_matmul_precision", was)
        return
    elif change == "mesh":
        mesh = jax.sharding.Mesh(mesh.devices.reshape(-1)[::-1].reshape(mesh.devices.shape), mesh.axis_names)
    else:
        monkeypatch.setattr(program_cache, "cpu_features", lambda: "x86_64 sse2")
    assert program_facts(config, mesh) != before


def test_what_is_left_out_of_the_config_changes_no_program() -> None:
    keys = flatten(Config.model_validate({"data": {"train": [{"path": "c"}]}, "evaluation": {"sets": {"held": "h"}}}))
    for start in NOT_IN_PROGRAM:
        assert any(key.startswith(start) for key in keys), f"no key begins with {start}"
    other = Config.model_validate(
        {
            **CONFIG.model_dump(exclude={"name", "trainer", "checkpoint", "logging", "evaluation", "data"}),
            "name": "other",
            "run_dir": "elsewhere",
            "data": {"batch_size": 8, "seq_len": 16, "train": [{"path": "c"}]},
            "trainer": {"log_every": 3, "max_bad_steps": 7, "hang_timeout_s": 9.0, "deadlines": {"save_s": 8.0}, "stop_after_s": 5.0},
            "checkpoint": {"every": 3, "keep_last": 7},
            "logging": {"tensorboard": False},
            "evaluation": {"every": 5, "max_batches": 3},
        }
    )

    def program(config: Config) -> str:
        parts = prepare(config)
        return str(parts.train_step.lower(parts.abstract, abstract_batch(config, parts.partitioner)).as_text())

    assert program(other) == program(CONFIG)


@pytest.mark.parametrize("how", ["flipped", "cut", "open to others", "no pickle", "of another version"])
def test_a_file_that_cannot_be_trusted_or_read_is_compiled_over_with_a_word(starts: Starts, row: jax.Array, how: str) -> None:
    starts.start(row)
    (file,) = starts.files
    content = bytearray(file.read_bytes())
    if how == "flipped":
        content[len(content) // 2] ^= 1
    elif how == "cut":
        del content[-100:]
    elif how in ("no pickle", "of another version"):
        inner = b"nothing" if how == "no pickle" else pickle.dumps((b"program", None, None))
        content[:] = hashlib.sha256(inner).digest() + inner
    file.write_bytes(content)
    if how == "open to others":
        file.chmod(0o620)
    came, program = starts.start(row)
    assert came == COMPILED
    assert float(program(copy(row))[1]) == 28.0
    (logged,) = starts.logged
    assert logged.startswith(f"{file} cannot be loaded and is compiled: ")
    assert starts.start(row)[0] == LOADED, "written anew"


def test_a_program_partitioned_by_rules_in_python_is_kept(starts: Starts, row: jax.Array) -> None:
    """As attention of cuDNN is."""
    from jax.experimental.custom_partitioning import custom_partitioning

    @custom_partitioning
    def double(x: jax.Array) -> jax.Array:
        return x * 2

    def partition(mesh: Any, arguments: Any, result: Any) -> Any:
        return mesh, lambda x: x * 2, result.sharding, tuple(argument.sharding for argument in arguments)

    double.def_partition(partition=partition, sharding_rule="i -> i")
    found = []
    for _ in range(2):
        record: dict[str, Any] = {}
        program = starts.cache().compile(jax.jit(lambda x: double(x) + 1), "double", [row], record)
        found.append(record["source"])
        np.testing.assert_array_equal(program(row), np.arange(8) * 2 + 1)
    assert found == [COMPILED, LOADED]
    assert starts.logged == []


def test_a_program_that_calls_python_is_not_kept_and_the_reason_is_logged(starts: Starts, row: jax.Array) -> None:
    program = starts.cache().compile(jax.jit(lambda x: jax.pure_callback(np.sin, x, x)), "calls", [row], {})
    np.testing.assert_allclose(program(row), np.sin(np.arange(8)), rtol=1e-6)
    assert starts.logged == ["calls is not cached for the next start: ValueError: it calls Python functions"]


def test_what_jax_had_compiled_is_not_kept(starts: Starts, row: jax.Array, jax_cache: Any, tmp_path: Path) -> None:
    """Serialized again, it would fail when it runs."""
    jax_cache(tmp_path / "jax")
    elsewhere = Starts(starts.mesh, starts.directory / "elsewhere")
    assert elsewhere.start(row)[0] == COMPILED
    came, program = starts.start(row)
    assert came == JAX_CACHE
    assert float(program(copy(row))[1]) == 28.0
    assert not (starts.directory / "programs").exists()


def test_what_jax_has_in_memory_is_not_kept(starts: Starts, row: jax.Array, jax_cache: Any, tmp_path: Path) -> None:
    """A run that goes back begins again in its process: what came from JAX's cache the first time is in memory the second time."""
    jax_cache(tmp_path / "jax")
    assert Starts(starts.mesh, starts.directory / "elsewhere").start(row)[0] == COMPILED
    jax.clear_caches()

    def function(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        return x * 3, x.sum()

    function.__name__ = "<lambda>"
    for _ in range(3):
        record: dict[str, Any] = {}
        program = starts.cache().compile(jax.jit(function, donate_argnums=0), "scale", [row], record)
        assert record["source"] == JAX_CACHE
        assert float(program(copy(row))[1]) == 28.0
    assert not (starts.directory / "programs").exists()


def test_the_entries_used_longest_ago_make_room(starts: Starts, row: jax.Array, monkeypatch: pytest.MonkeyPatch) -> None:
    for number, name in enumerate(("a", "b", "c")):
        starts.start(row, name=name)
        for file in starts.files:
            if file.name.startswith(f"{name}-"):
                os.utime(file, (number, number))
    starts.start(row, name="a")  # used: now the newest
    monkeypatch.setattr(program_cache, "MAX_BYTES", sum(file.stat().st_size for file in starts.files) + 10)
    starts.start(row, name="d")
    assert [file.name[0] for file in starts.files] == ["a", "c", "d"]


def test_a_run_that_cannot_keep_its_programs_continues_with_a_warning(starts: Starts, row: jax.Array) -> None:
    (starts.directory / "programs").write_text("in the way")
    came, program = starts.start(row)
    assert came == COMPILED
    assert float(program(copy(row))[1]) == 28.0
    assert [word in logged for word, logged in zip(("cannot be loaded", "not cached"), starts.logged, strict=True)] == [True] * 2


def test_programs_of_a_start_that_failed_are_forgotten(starts: Starts, row: jax.Array) -> None:
    starts.start(row)
    starts.start(row, name="not loaded")
    cache = starts.cache()
    cache.compile(jax.jit(lambda x: x), "scale", [row], {})
    cache.remove_loaded()
    assert [file.name.partition("-")[0] for file in starts.files] == ["not loaded"]
    assert starts.start(row)[0] == COMPILED


def test_a_loaded_program_follows_drifting_arguments_as_a_compiled_one(starts: Starts, row: jax.Array, tmp_path: Path) -> None:
    starts.start(row)
    logged: list[str] = []
    watch = CompilerWatch(EventLog(event_file(tmp_path, 0), run="r"), logged.append, starts.cache().compile)
    program = watch.program(jax.jit(lambda x: (x * 3, x.sum()), donate_argnums=0), "scale", row)
    assert program.parts["source"] == LOADED
    shorter = jax.device_put(np.arange(4, dtype=np.float32), NamedSharding(starts.mesh, PartitionSpec()))
    assert float(program(shorter)[1]) == 6.0
    assert "x float32[8] ('data',) -> float32[4] ()" in logged[0]
    assert float(program(copy(row))[1]) == 28.0
