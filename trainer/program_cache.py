"""A cache of compiled programs: a later start loads them without tracing, lowering or compiling.

The key of JAX's persistent cache is the lowered module, so every start has to trace and lower first. The key here is everything that a
program is made from (`program_facts`). A program that is not found, or cannot be loaded, is compiled. Both caches are in one directory
(runtime.compilation_cache): after an edit of the code that does not change a program, JAX's cache still has it.

A program that came from JAX's cache is not stored here: XLA's CPU runtime loses functions of a program that is loaded and serialized
again (jax 0.10 and 0.12: "Function ... not found" when it runs). An entry is a pickle, as JAX's are, and can execute code: only files
that no other user can write are read.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import pickle
import platform
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax

from ridgeline.configs import plugins
from ridgeline.configs.diff import flatten
from ridgeline.configs.files import open_regular
from ridgeline.configs.schema import Config
from ridgeline.observe.compilation import compile_in_parts, describe
from ridgeline.rundir.events import COMPILED, LOADED
from ridgeline.rundir.provenance import PACKAGES, code_hash, cores, cpu_features, files_hash, makers
from ridgeline.trainer.agreement import Agreement

MAX_BYTES = 4 << 30
"""Size limit of all entries together; the least recently used are deleted first."""
NOT_IN_PROGRAM = (
    *(
        "name",
        "run_dir",
        "init_from",
        "init_optimizer",
        "data.train",
        "data.curriculum",
        "evaluation.",
        "checkpoint.",
        "logging.",
        "profiler.",
    ),
    *("runtime.compilation_cache", "runtime.rendezvous_timeout_s", "runtime.lease_timeout_s"),
    *("trainer.log_every", "trainer.max_bad_steps", "trainer.hang_timeout_s", "trainer.deadlines.", "trainer.stop_after_s"),
)
"""Prefixes of the config keys that do not affect any compiled program. All other keys are part of the cache key."""
NOT_IN_JAX = ("jax_compilation_cache_dir", "jax_explain_cache_misses", "jax_cuda_visible_devices", "jax_rocm_visible_devices")
"""JAX settings that do not affect programs."""
SETTINGS = ("XLA_", "LIBTPU_INIT_ARGS", "TF_XLA_FLAGS", "NVIDIA_TF32_OVERRIDE")
"""Prefixes of environment variables that XLA reads. JAX's own are among its settings."""
NOT_IN_CODE = ("explain", "measure", "launch", "cli")
"""Packages that do not affect the programs of a run."""
_SUFFIX = ".program"
_STORING, _STORING_S = "storing-", 86_400.0
"""Prefix of a file that is being written, and its age in seconds from which on its writer was killed."""
_DIGEST_BYTES = 32


def program_facts(config: Config, mesh: jax.sharding.Mesh) -> dict[str, Any]:
    """Return everything that determines the programs of a run, except their names and arguments. Call it after JAX is configured.

    Not detected: packages edited in place without a new version, and functions replaced while the process runs.
    """
    devices = list(mesh.devices.flat)
    client = devices[0].client
    return {
        "format": 1,
        "config": {key: value for key, value in flatten(config).items() if not key.startswith(NOT_IN_PROGRAM)},
        "code": code_hash(names=[name for name in PACKAGES if name not in NOT_IN_CODE]),
        "plugins": files_hash(plugins.loaded_sources()),
        "versions": {"python": platform.python_version(), **makers(sys.path)},
        "settings": {name: value for name, value in sorted(os.environ.items()) if name.startswith(SETTINGS)},
        "jax": {name: repr(value) for name, value in sorted(jax.config.values.items()) if name not in NOT_IN_JAX},
        "backend": [client.platform, client.platform_version, client.runtime_type],
        "mesh": dict(mesh.shape),
        "devices": [[device.id, device.process_index, device.device_kind] for device in devices],
        "host": [cpu_features(), cores(), os.environ.get("NPROC")] if client.platform == "cpu" else None,
    }


def open_program_cache(config: Config, mesh: jax.sharding.Mesh, log: Callable[[str], None]) -> ProgramCache | None:
    """Open the cache of compiled programs; None for a config without runtime.compilation_cache. `log`: as in ProgramCache."""
    if config.runtime.compilation_cache is None:
        return None
    return ProgramCache(config.runtime.compilation_cache, program_facts(config, mesh), list(mesh.devices.flat), log)


class ProgramCache:
    """The compiled programs of one run. All processes construct and call it in the same order; a program is loaded in all or in none.

    Args:
      directory: runtime.compilation_cache, shared by all processes; process 0 writes.
      facts: `program_facts`.
      devices: of the programs, in mesh order.
      log: receives one line when a program cannot be loaded or stored.
    """

    def __init__(self, directory: Path, facts: dict[str, Any], devices: Sequence[jax.Device], log: Callable[[str], None]) -> None:
        self._directory = directory / "programs"
        self._facts = json.dumps(facts, sort_keys=True)
        self._devices, self._log = devices, log
        self._agreement = Agreement("programs")
        self._loaded: list[Path] = []

    def compile(self, function: Any, name: str, args: Sequence[Any], record: dict[str, Any]) -> Any:
        """Load the program, or compile and store it (observe.recompile.Compile)."""
        path = self._path(name, describe(function, args))
        began_s = time.perf_counter()
        compiled = self._load_everywhere(path)
        if compiled is not None:
            record.update(source=LOADED, load_s=time.perf_counter() - began_s)
            return compiled
        compiled = compile_in_parts(function, name, args, record)
        if self._agreement.process == 0 and record["source"] == COMPILED:
            self._store(path, compiled)
        return compiled

    def remove_loaded(self) -> None:
        """Delete the programs that this start loaded, after XLA failed in the first step: the next start compiles them."""
        for path in self._loaded:
            with contextlib.suppress(OSError):
                path.unlink()
                self._log(f"removed {path}: the run failed before the first step of this program")

    def _path(self, name: str, described: Sequence[tuple[str, str]]) -> Path:
        digest = hashlib.sha256(f"{self._facts}\0{name}\0{json.dumps(described)}".encode())
        return self._directory / f"{name}-{digest.hexdigest()}{_SUFFIX}"

    def _load_everywhere(self, path: Path) -> Any:
        """Return the program if every process can load it, else None: compilation may synchronize the processes."""
        found: list[Any] = []

        def work() -> bool:
            found.append(self._load(path))
            return found[0] is not None

        each = self._agreement.each(work)
        if not self._agreement.first(lambda: all(each)):
            return None
        self._loaded.append(path)
        return found[0]

    def _load(self, path: Path) -> Any:
        from jax.experimental.serialize_executable import deserialize_and_load

        try:
            path.stat()
            with open_regular(path) as file:
                status = os.fstat(file.fileno())
                if status.st_uid not in (os.geteuid(), 0) or status.st_mode & 0o022:
                    raise PermissionError("other users can write it")
                digest, content = file.read(_DIGEST_BYTES), file.read()
            if hashlib.sha256(content).digest() != digest:
                raise ValueError("it is damaged")
            program, in_tree, out_tree = pickle.loads(content)
            compiled = deserialize_and_load(program, in_tree, out_tree, execution_devices=self._devices)
        except FileNotFoundError:
            return None
        except Exception as error:  # any error: the program can be compiled instead
            self._log(f"{path} cannot be loaded and is compiled: {_text(error)}")
            return None
        with contextlib.suppress(OSError):
            os.utime(path)
        return compiled

    def _store(self, path: Path, compiled: Any) -> None:
        try:
            content = serialize_program(compiled)
            self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            # mode 600; two runs may store the same program at once
            number, temporary = tempfile.mkstemp(prefix=_STORING, dir=self._directory)
            try:
                with os.fdopen(number, "wb") as file:
                    file.write(hashlib.sha256(content).digest() + content)
                os.replace(temporary, path)
            finally:
                Path(temporary).unlink(missing_ok=True)
            self._make_room(path)
        except Exception as error:  # a full disk, or a program that cannot be serialized: the run continues
            self._log(f"{path.name.partition('-')[0]} is not cached for the next start: {_text(error)}")

    def _make_room(self, newest: Path) -> None:
        """Delete the least recently used entries until the total size is within the limit."""
        entries = []
        for path in self._directory.iterdir():
            with contextlib.suppress(FileNotFoundError):  # deleted by another run
                found = path.stat()
                if path.name.startswith(_STORING) and time.time() - found.st_mtime > _STORING_S:
                    path.unlink()
                else:
                    entries.append((found.st_mtime, found.st_size, path))
        total = sum(size for _, size, _ in entries)
        for _, size, path in sorted(entries):
            if total <= MAX_BYTES:
                break
            if path != newest:
                path.unlink(missing_ok=True)
                total -= size


def serialize_program(compiled: Any) -> bytes:
    """Return a program as bytes. Raises an exception of any type for one that cannot be serialized.

    Partitioning rules in Python (of cuDNN attention) attach objects that cannot be pickled and are needed only during compilation: they
    are left out. A program that calls Python functions at run time needs such objects, and raises ValueError.
    """
    from jax.experimental.serialize_executable import serialize

    unloaded = compiled._executable._unloaded_executable  # no public API in jax 0.10 to 0.12
    if unloaded.host_callbacks:
        raise ValueError("it calls Python functions")
    beside, unloaded.keepalive = unloaded.keepalive, []
    try:
        return pickle.dumps(serialize(compiled))
    finally:
        unloaded.keepalive = beside


def _text(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
