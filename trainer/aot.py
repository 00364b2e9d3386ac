"""Compile the actual train step for GPUs that are not here: exact buffers and collectives, before the queue.

The compile runs in a process of its own (trainer/aot_child.py). It needs no driver and no GPU, but XLA's CUDA plugin, ptxas with libdevice,
cuBLAS and cuDNN from PyPI: the extra `aot`.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from configs.cluster import ClusterConfig
from configs.dump import to_yaml
from configs.errors import UserError
from configs.schema import Config
from planner.hardware import Hardware, hardware
from trainer.gpu_target import target_config

INSTALL = "pip install 'ridgeline[aot]'"
NEEDED = ("nvidia.cuda_nvcc", "nvidia.cudnn", "nvidia.cublas")
TIMEOUT_S = 1800.0


@dataclass(frozen=True)
class Request:
    """What to compile for."""

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
        """Ask for a config on nodes of a cluster. Raises UserError when its device cannot be compiled for, or it has fewer nodes."""
        device = hardware(cluster.device)
        target_config(device)
        if cluster.nodes is not None and nodes > cluster.nodes:
            raise UserError(f"--nodes {nodes}: {cluster.name} has {cluster.nodes} nodes")
        return Request(config, device, nodes, cluster.devices_per_node, **settings)


@dataclass(frozen=True)
class Compiled:
    """What came out, all sizes per device."""

    argument_bytes: int
    """State and batch."""
    output_bytes: int
    alias_bytes: int
    """Outputs that take the place of donated arguments."""
    temp_bytes: int
    """Everything that lives only within the step."""
    peak_bytes: int
    """The most at one time, arguments and outputs included."""
    lower_s: float
    compile_s: float
    mesh: dict[str, int]
    leaves: list[dict[str, Any]]
    """name, shape, local_shape and bytes of every array of the train state."""
    versions: dict[str, str]
    hlo_text: str
    """The scheduled, optimised module."""
    buffers_text: str | None
    """XLA's buffer assignment as text; None where it was not dumped."""
    live_ranges_text: str | None
    warnings: tuple[str, ...] = ()
    """What XLA said of memory it could not save."""


def compile_ahead(request: Request, *, timeout_s: float = TIMEOUT_S) -> Compiled:
    """Lower and compile the train step of a config for its target.

    Raises:
      UserError: packages are missing; the config does not fit the mesh; the compiler failed or took too long.
    """
    check_packages()
    with _directory() as directory:
        (directory / "config.yaml").write_text(to_yaml(request.config))
        asked = {"device": request.device.name, "nodes": request.nodes, "devices_per_node": request.devices_per_node}
        (directory / "request.json").write_text(json.dumps(asked))
        with (directory / "log").open("wb") as log:
            try:
                child = subprocess.run(
                    [sys.executable, "-m", "trainer.aot_child", str(directory)],
                    env=child_environment(os.environ, request, directory),
                    cwd=directory,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    timeout=timeout_s,
                )
            except subprocess.TimeoutExpired:
                raise UserError(f"the compile took longer than {timeout_s:.0f} s and was ended") from None
        text = (directory / "log").read_text(errors="replace")
        if not (directory / "result.json").exists():
            raise UserError(f"the compiler failed ({_ending(child.returncode)}): {_last_words(text)}")
        result = json.loads((directory / "result.json").read_bytes())
        if "error" in result:
            raise UserError(result["error"])
        return Compiled(
            **result,
            hlo_text=(directory / "step.hlo.txt").read_text(),
            buffers_text=_dumped(directory, "*buffer-assignment.txt"),
            live_ranges_text=_dumped(directory, "*live-range.txt"),
            warnings=tuple(line.split("] ", 1)[-1] for line in text.splitlines() if "Can't reduce memory use below" in line),
        )


def check_packages() -> None:
    """Refuse to start without what XLA needs: without ptxas and libdevice it would crash instead of saying so. Raises UserError."""
    missing = [] if any(_found(f"jax_cuda{major}_plugin") for major in (12, 13)) else ["jax-cuda12-plugin"]
    missing += [name for name in NEEDED if not _found(name) and not _found("nvidia.cu13")]
    if not missing and tool_directory() is None:
        missing = ["ptxas"]
    if missing:
        raise UserError(f"compiling for GPUs without one needs {', '.join(missing)}: {INSTALL}")


def tool_directory() -> Path | None:
    """Return the directory that holds bin/ptxas and nvvm/libdevice, from the installed CUDA wheels; None where there is none."""
    for name in ("nvidia.cuda_nvcc", "nvidia.cu13"):
        spec = find_spec(name) if _found(name) else None
        for place in (spec.submodule_search_locations or []) if spec is not None else []:
            if (Path(place) / "bin" / "ptxas").is_file():
                return Path(place)
    return None


def child_environment(environment: Mapping[str, str], request: Request, directory: Path) -> dict[str, str]:
    """Return the child's environment: CPU as JAX's platform, the flags of the target, XLA's dump of this one module."""
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
    code = str(Path(__file__).resolve().parent.parent)
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
    path = Path(tempfile.mkdtemp(prefix="ridge-aot-"))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def _dumped(directory: Path, pattern: str) -> str | None:
    files = sorted((directory / "dump").glob(pattern), key=lambda path: path.stat().st_size)
    return files[-1].read_text() if files else None


def _found(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:
        return False


def _ending(code: int) -> str:
    return f"signal {-code}" if code < 0 else f"exit code {code}"


def _last_words(log: str) -> str:
    """Return the line of a crashed compiler that says most: an error of Python or XLA, else the last line."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    telling: Sequence[str] = [line for line in lines if "Error" in line or line.startswith("F0") or "Check failed" in line]
    return (telling or lines or ["no output"])[-1][:400]
