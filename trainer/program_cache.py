"""Whole compiled programs, kept from one start for the next, which then neither traces, lowers nor compiles them.

JAX's persistent cache looks a program up by its lowered module, so every start traces and lowers first. Here it is looked up by all that it
is made from (`program_facts`); whatever differs, or cannot be loaded, is compiled as if there were no cache. Both lie in one directory
(runtime.compilation_cache): after an edit that changes no program XLA's work is still found in JAX's.

What JAX's cache had is not kept here: XLA's CPU runtime loses functions of a program that is loaded and serialised again (jax 0.10 and
0.12: "Function ... not found", when it runs). An entry is a pickle, hence code, as JAX's are: only files that nobody else can write are
read.
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

from ridgeline.configs.diff import flatten
from ridgeline.configs.schema import Config
from ridgeline.observe.compilation import compile_in_parts
from ridgeline.observe.recompile import describe
from ridgeline.rundir.events import COMPILED, LOADED
from ridgeline.rundir.provenance import PACKAGES, code_hash, cores, cpu_features, makers
from ridgeline.trainer.agreement import Agreement

MAX_BYTES = 4 << 30
"""Of all entries together: those that were not used for longest go first."""
NOT_IN_PROGRAM = (
    *("name", "run_dir", "init_from", "data.train", "evaluation.", "checkpoint.", "logging.", "profiler."),
    *("runtime.compilation_cache", "runtime.rendezvous_timeout_s"),
    *("trainer.log_every", "trainer.max_bad_steps", "trainer.hang_timeout_s", "trainer.stop_after_s"),
)
"""Beginnings of the config keys that no compiled program depends on: everything else does, keys to come included."""
NOT_IN_JAX = ("jax_compilation_cache_dir", "jax_explain_cache_misses", "jax_cuda_visible_devices", "jax_rocm_visible_devices")
"""JAX's settings that change no program."""
SETTINGS = ("XLA_", "LIBTPU_INIT_ARGS", "TF_XLA_FLAGS", "NVIDIA_TF32_OVERRIDE")
"""Prefixes of variables that XLA reads. Those of JAX are among its settings."""
NOT_IN_CODE = ("explain", "measure", "launch", "cli")
"""Packages that no program of a run is made from."""
_SUFFIX = ".program"
_DIGEST_BYTES = 32


def program_facts(config: Config, mesh: jax.sharding.Mesh) -> dict[str, Any]:
    """Return everything the programs of a run are made from, their names and arguments apart. Call it when JAX has all its settings.

    What it cannot see: packages edited in place without a new version, and functions replaced while the process runs.
    """
    devices = list(mesh.devices.flat)
    client = devices[0].client
    return {
        "format": 1,
        "config": {key: value for key, value in flatten(config).items() if not key.startswith(NOT_IN_PROGRAM)},
        "code": code_hash(names=[name for name in PACKAGES if name not in NOT_IN_CODE]),
        "versions": {"python": platform.python_version(), **makers(sys.path)},
        "settings": {name: value for name, value in sorted(os.environ.items()) if name.startswith(SETTINGS)},
        "jax": {name: repr(value) for name, value in sorted(jax.config.values.items()) if name not in NOT_IN_JAX},
        "backend": [client.platform, client.platform_version, client.runtime_type],
        "mesh": dict(mesh.shape),
        "devices": [[device.id, device.process_index, device.device_kind] for device in devices],
        "host": [cpu_features(), cores(), os.environ.get("NPROC")] if client.platform == "cpu" else None,
    }


class ProgramCache:
    """The programs of one run. All processes construct it, and compile, in the same order: they load a program together or not at all.

    Args:
      directory: runtime.compilation_cache, which all processes share; process 0 writes.
      facts: `program_facts`.
      devices: those the programs run on, in the order of the mesh.
      say: told in one line why a program is not loaded or not kept.
    """

    def __init__(self, directory: Path, facts: dict[str, Any], devices: Sequence[jax.Device], say: Callable[[str], None]) -> None:
        self._directory = directory / "programs"
        self._facts = json.dumps(facts, sort_keys=True)
        self._devices, self._say = devices, say
        self._agreement = Agreement("programs")
        self._loaded: list[Path] = []

    def compile(self, function: Any, name: str, args: Sequence[Any], record: dict[str, Any]) -> Any:
        """Load the program, or compile and keep it (observe.recompile.Compile)."""
        path = self._path(name, describe(function, args))
        began_s = time.perf_counter()
        compiled = self._load_everywhere(path)
        if compiled is not None:
            record.update(source=LOADED, load_s=time.perf_counter() - began_s)
            return compiled
        compiled = compile_in_parts(function, name, args, record)
        if self._agreement.process == 0 and record["source"] == COMPILED:
            self._keep(path, compiled)
        return compiled

    def forget(self) -> None:
        """Remove what this start loaded, after XLA failed before the first step was done: the next start compiles anew."""
        for path in self._loaded:
            with contextlib.suppress(OSError):
                path.unlink()
                self._say(f"removed {path}: the run failed before the first step of this program")

    def _path(self, name: str, described: Sequence[tuple[str, str]]) -> Path:
        digest = hashlib.sha256(f"{self._facts}\0{name}\0{json.dumps(described)}".encode())
        return self._directory / f"{name}-{digest.hexdigest()}{_SUFFIX}"

    def _load_everywhere(self, path: Path) -> Any:
        """Return the program when every process can load it, else None: one that compiled might wait for others that do not."""
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
            with open(path, "rb") as file:
                status = os.fstat(file.fileno())
                if status.st_uid not in (os.geteuid(), 0) or status.st_mode & 0o022:
                    raise PermissionError("others can write it")
                digest, content = file.read(_DIGEST_BYTES), file.read()
            if hashlib.sha256(content).digest() != digest:
                raise ValueError("it is damaged")
            program, in_tree, out_tree = pickle.loads(content)
            compiled = deserialize_and_load(program, in_tree, out_tree, execution_devices=self._devices)
        except FileNotFoundError:
            return None
        except Exception as error:  # whatever it is, the program can be compiled
            self._say(f"{path} cannot be loaded, compiling: {_text(error)}")
            return None
        with contextlib.suppress(OSError):
            os.utime(path)
        return compiled

    def _keep(self, path: Path, compiled: Any) -> None:
        try:
            content = serialise(compiled)
            self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            number, temporary = tempfile.mkstemp(dir=self._directory)  # mode 600; two runs may keep the same program at once
            try:
                with os.fdopen(number, "wb") as file:
                    file.write(hashlib.sha256(content).digest() + content)
                os.replace(temporary, path)
            finally:
                Path(temporary).unlink(missing_ok=True)
            self._make_room(path)
        except Exception as error:  # a full disk, or a program that cannot be serialised: the run goes on without
            self._say(f"{path.name.partition('-')[0]} is not kept for the next start: {_text(error)}")

    def _make_room(self, newest: Path) -> None:
        """Delete the entries used longest ago until all together are within the bound."""
        entries = []
        for path in self._directory.iterdir():
            with contextlib.suppress(FileNotFoundError):  # another run's turn
                entries.append((path.stat().st_mtime, path.stat().st_size, path))
        total = sum(size for _, size, _ in entries)
        for _, size, path in sorted(entries):
            if total <= MAX_BYTES:
                break
            if path != newest:
                path.unlink(missing_ok=True)
                total -= size


def serialise(compiled: Any) -> bytes:
    """Return the bytes of a program. Raises, whatever it be, for one that cannot be kept.

    Partitioning rules in Python (cuDNN attention's) leave objects beside the program that only its compile needs and nothing can pickle:
    they are left out. A program that calls Python when it runs needs such objects still, and is refused.
    """
    from jax.experimental.serialize_executable import serialize

    unloaded = compiled._executable._unloaded_executable  # jax 0.10 to 0.12 has no public way to them
    if unloaded.host_callbacks:
        raise ValueError("it calls Python functions")
    beside, unloaded.keepalive = unloaded.keepalive, []
    try:
        return pickle.dumps(serialize(compiled))
    finally:
        unloaded.keepalive = beside


def _text(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
