"""Compile the train step for GPUs on a machine without them: exact buffers and collectives before a job is submitted.

The compile runs in a separate process (trainer/aot/worker.py). It needs no driver and no GPU, but XLA's CUDA plugin, ptxas with libdevice,
cuBLAS and cuDNN from PyPI: the extra `aot`.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ridgeline import PACKAGE
from ridgeline.configs.cluster import ClusterConfig
from ridgeline.configs.dump import to_yaml
from ridgeline.configs.errors import UserError
from ridgeline.configs.schema import Config
from ridgeline.hlo.heap import Heap, read_heap
from ridgeline.planner.hardware import Hardware, hardware
from ridgeline.trainer.aot.target import target_config

INSTALL = "pip install 'ridgeline[aot]'"
NEEDED = {"nvidia.cuda_nvcc": "nvidia-cuda-nvcc-cu12", "nvidia.cudnn": "nvidia-cudnn-cu12", "nvidia.cublas": "nvidia-cublas-cu12"}
"""Module to package. The CUDA 13 packages share one module, nvidia.cu13."""
TIMEOUT_S = 1800.0
PREFIX, LOCK = "ridge-aot-", "lock"
"""Start of the name of a temporary directory, and the file in it that its owner locks."""
NEW_S = 10.0
END_OF_REQUEST = "---- ridge: end of a request ----\n"
"""The worker writes this line to its log after each request."""


@dataclass(frozen=True)
class Request:
    """A config, and the devices to compile it for."""

    config: Config
    device: Hardware
    nodes: int
    devices_per_node: int
    xla_flags: tuple[str, ...] = ()
    optimization_level: str | None = None
    """JAX_OPTIMIZATION_LEVEL of the run; O1 pipelines collectives over loop iterations, for more memory."""

    @property
    def devices(self) -> int:
        """Devices of the run."""
        return self.nodes * self.devices_per_node

    @staticmethod
    def on(config: Config, cluster: ClusterConfig, nodes: int, **settings: Any) -> Request:
        """Return the request for nodes of a cluster. Raises UserError when its device has no compile target, or it has fewer nodes."""
        device = hardware(cluster.device)
        target_config(device)
        if cluster.nodes is not None and nodes > cluster.nodes:
            raise UserError(f"--nodes {nodes}: {cluster.name} has {cluster.nodes} nodes")
        return Request(config, device, nodes, cluster.devices_per_node, **settings)


@dataclass(frozen=True)
class Compiled:
    """A compiled step. All sizes are per device."""

    argument_bytes: int
    """State and batch."""
    host_argument_bytes: int
    """State in host memory (optimizer.offload)."""
    host_temp_bytes: int
    """Temporaries in host memory."""
    output_bytes: int
    alias_bytes: int
    """Outputs that reuse the memory of donated arguments."""
    temp_bytes: int
    """Buffers that exist only during the step."""
    peak_bytes: int
    """In use at the peak, arguments and outputs included, by XLA: without gaps in the heap of temporaries."""
    trace_s: float
    lower_s: float
    compile_s: float
    mesh: dict[str, int]
    leaves: list[dict[str, Any]]
    """name, shape, local_shape and bytes of every array of the train state."""
    versions: dict[str, str]
    hlo_text: str
    """The optimized, scheduled module."""
    buffers_text: str | None
    """XLA's buffer assignment as text; None if it was not dumped."""
    live_ranges_text: str | None
    warnings: tuple[str, ...] = ()
    """XLA's warnings about memory that rematerialization could not reduce."""

    @property
    def allocated_bytes(self) -> int:
        """What a device allocates for the step: arguments, outputs that reuse none of them, and the heap of temporaries with its gaps.

        XLA's own definition of the least memory that a program needs (CompiledMemoryStats, xla/pjrt/pjrt_executable.h), without its code.
        The heap is one allocation, made before the step begins (GpuExecutable::GenerateBufferAllocations), so its gaps are taken too.
        """
        return self.argument_bytes + self.output_bytes - self.alias_bytes + self.temp_bytes

    @cached_property
    def heap(self) -> Heap | None:
        """The heap of temporaries; None where XLA wrote no buffer assignment, or one without temporaries."""
        if self.buffers_text is None or self.live_ranges_text is None:
            return None
        try:
            return read_heap(self.buffers_text, self.live_ranges_text)
        except ValueError:
            return None

    @property
    def gap_bytes(self) -> int:
        """Part of the heap of temporaries that is not in use at the peak: gaps between buffers of different sizes and lifetimes."""
        if self.heap is not None:
            return self.heap.gap_bytes
        return max(0, self.allocated_bytes - self.peak_bytes)


def compile_ahead(request: Request, *, timeout_s: float = TIMEOUT_S) -> Compiled:
    """Lower and compile the train step of a config for its target.

    Raises:
      UserError: packages are missing; the config does not fit the mesh; the compiler failed or took too long.
    """
    (result,) = compile_many([request], timeout_s=timeout_s)
    if isinstance(result, UserError):
        raise result
    return result


def compile_many(requests: Sequence[Request], *, timeout_s: float = TIMEOUT_S) -> list[Compiled | UserError]:
    """Compile several requests in one process, which loads JAX once. They must have the same flags.

    Returns one result or error per request. Raises UserError when packages are missing or all together take longer than timeout_s.
    """
    assert len({(request.xla_flags, request.optimization_level) for request in requests}) == 1, "requests with different flags"
    check_packages()
    with _directory() as directory:
        for number, request in enumerate(requests):
            place = directory / str(number)
            place.mkdir()
            (place / "config.yaml").write_text(to_yaml(request.config))
            fields = {"device": request.device.name, "nodes": request.nodes, "devices_per_node": request.devices_per_node}
            (place / "request.json").write_text(json.dumps(fields))
        with (directory / "log").open("wb") as log:
            try:
                worker = subprocess.run(
                    [sys.executable, "-m", "ridgeline.trainer.aot.worker", str(directory), str(len(requests)), str(os.getpid())],
                    env=worker_environment(os.environ, requests[0], directory),
                    cwd=directory,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    timeout=timeout_s,
                )
            except subprocess.TimeoutExpired:
                raise UserError(f"the compilation took longer than {timeout_s:g} s and was killed") from None
        text = (directory / "log").read_text(errors="replace")
        logs = text.split(END_OF_REQUEST)
        return [_collect(directory / str(n), worker.returncode, logs[n] if n < len(logs) else logs[-1]) for n in range(len(requests))]


def _collect(place: Path, exit_code: int, log: str) -> Compiled | UserError:
    """Read the result of one request."""
    if not (place / "result.json").exists():
        return UserError(f"the compiler failed ({_ending(exit_code)}): {_error_line(log)}")
    result = json.loads((place / "result.json").read_bytes())
    if "error" in result:
        return UserError(result["error"])
    return Compiled(
        **result,
        hlo_text=(place / "step.hlo.txt").read_text(),
        buffers_text=_dumped(place, "*buffer-assignment.txt"),
        live_ranges_text=_dumped(place, "*live-range.txt"),
        warnings=tuple(line.split("] ", 1)[-1] for line in log.splitlines() if "Can't reduce memory use below" in line),
    )


def check_packages() -> None:
    """Raise UserError when packages that XLA needs are missing. Without ptxas and libdevice it would crash."""
    missing = [] if any(_found(f"jax_cuda{major}_plugin") for major in (12, 13)) else ["jax-cuda12-plugin"]
    missing += [package for name, package in NEEDED.items() if not _found(name) and not _found("nvidia.cu13")]
    if not missing and tool_directory() is None:
        missing = ["ptxas"]
    if missing:
        raise UserError(f"compiling for GPUs without one needs {', '.join(missing)}: {INSTALL}")


def tool_directory() -> Path | None:
    """Return the directory with bin/ptxas and nvvm/libdevice of the installed CUDA wheels; None if there is none."""
    for name in ("nvidia.cuda_nvcc", "nvidia.cu13"):
        spec = find_spec(name) if _found(name) else None
        for place in (spec.submodule_search_locations or []) if spec is not None else []:
            if (Path(place) / "bin" / "ptxas").is_file():
                return Path(place)
    return None


def worker_environment(environment: Mapping[str, str], request: Request, directory: Path) -> dict[str, str]:
    """Return the worker's environment: JAX on CPU, the flags of the target, and XLA's dump of the train step."""
    tools = tool_directory()
    assert tools is not None, "check_packages comes first"
    flags = [
        *request.xla_flags,
        f"--xla_gpu_cuda_data_dir={tools}",
        f"--xla_dump_to={directory / 'dump'}",
        "--xla_dump_hlo_module_re=.*train_step.*",
        "--xla_dump_hlo_as_text",
    ]
    env = {name: value for name, value in environment.items() if name not in ("XLA_FLAGS", "JAX_OPTIMIZATION_LEVEL", "JAX_NUM_CPU_DEVICES")}
    code = str(PACKAGE.parent)
    env |= {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": " ".join(flags),
        "PATH": os.pathsep.join([str(tools / "bin"), environment.get("PATH", "")]),
        "PYTHONPATH": os.pathsep.join([code, *([environment["PYTHONPATH"]] if environment.get("PYTHONPATH") else [])]),
        "JAX_COMPILATION_CACHE_DIR": "",
    }
    if request.optimization_level is not None:
        env["JAX_OPTIMIZATION_LEVEL"] = request.optimization_level
    return env


@contextmanager
def _directory() -> Iterator[Path]:
    """Yield a temporary directory. It is locked while its owner lives, so the next compile removes those that a kill left behind."""
    _remove_leftovers()
    path = Path(tempfile.mkdtemp(prefix=PREFIX))
    with (path / LOCK).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            yield path
        finally:
            shutil.rmtree(path, ignore_errors=True)


def _remove_leftovers() -> None:
    """Remove the directories whose owner is dead, but none that may still be locked for the first time."""
    for path in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError), (path / LOCK).open() as lock:
            if time.time() - os.fstat(lock.fileno()).st_mtime > NEW_S:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path, ignore_errors=True)


def _dumped(directory: Path, pattern: str) -> str | None:
    files = sorted(directory.glob(pattern), key=lambda path: path.stat().st_size)
    return files[-1].read_text() if files else None


def _found(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:
        return False


def _ending(code: int) -> str:
    return f"signal {-code}" if code < 0 else f"exit code {code}"


def _error_line(log: str) -> str:
    """Return the most informative line of a crashed compiler's log: an error of Python or XLA, else the last line."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    errors: Sequence[str] = [line for line in lines if "Error" in line or "Unknown flag" in line or "Check failed" in line]
    unknown = [line for line in errors if "Unknown flag" in line]  # the lines after it only repeat that flags could not be parsed
    return (unknown or errors or lines or ["no output"])[-1][:400]
