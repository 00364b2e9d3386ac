"""The variables and XLA flags a run starts with: chosen by GPU generation, jaxlib and config, each with its reason; the user's own win.

`choose` is a pure function; `prepare` looks at the machine, applies the choice, and must run before JAX is loaded.
"""

from __future__ import annotations

import importlib.metadata
import os
import re
import subprocess
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ridgeline.configs.errors import UserError
from ridgeline.configs.mesh import resolve_sizes
from ridgeline.configs.schema import Config
from ridgeline.launch import xla_flags
from ridgeline.launch.cache_dir import check_cache_dir
from ridgeline.launch.cluster import Cluster, slurm
from ridgeline.launch.cluster.devices import gpus_present
from ridgeline.launch.overlap_flags import overlap_flags
from ridgeline.launch.preflight.host import memory_bytes
from ridgeline.planner.host_memory import pool_limit_gib
from ridgeline.planner.overlap import POOL_SHARE

Generation = Literal["volta", "ampere", "ada", "hopper", "blackwell", "unknown"]
GENERATIONS: tuple[tuple[Generation, str], ...] = (
    ("blackwell", r"\bG?B[123]00\b|RTX PRO \d000 Blackwell|RTX 50\d0"),
    ("hopper", r"\bG?H[128]00\b|\bH20\b|\bGH200\b"),
    ("ada", r"\bL4\b|\bL40S?\b|RTX \d000 Ada|RTX 40\d0"),
    ("ampere", r"\bA(100|800|30|40|10|16|2)\w?\b|RTX A\d000|RTX 30\d0"),
    ("volta", r"\bV100\b"),
)
"""By the model name the driver gives; the first that matches."""
PINNED_LIMIT = "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"
MEMORY_FRACTION = f"{POOL_SHARE:g}"
"""Share of a device's memory in XLA's pool: what plans may use (`utilisation_cap`) must fit into it."""


@dataclass(frozen=True)
class Setting:
    """One variable or XLA flag."""

    name: str
    value: str
    reason: str
    chosen: Literal["ridge", "user", "dropped"] = "ridge"
    """dropped: not passed, since the installed jaxlib does not know it."""

    @property
    def is_flag(self) -> bool:
        """Whether it is one of XLA_FLAGS."""
        return self.name.startswith("--")


@dataclass(frozen=True)
class Host:
    """What the choice depends on, beside the config."""

    generation: Generation | None
    """None: no GPU."""
    jaxlib: str
    cores: int | None
    """Cores of this process where several share the node; None: all are its own."""
    pinned_gib: int | None = None
    """Limit that this process's pool of pinned host memory needs; None: XLA's own is enough."""


def choose(host: Host, config: Config, env: Mapping[str, str], unknown: Callable[[Sequence[str]], Sequence[str]]) -> list[Setting]:
    """Return every setting of a run, the user's own included, XLA flags by their names.

    unknown: tells which of some flags jaxlib does not know; it is asked only when there are flags.
    """
    wanted = [*_threads(host), *_pinned(host, env), *(_gpu(host.generation, config) if host.generation is not None else [])]
    own_flags = {xla_flags.name_of(flag): flag for flag in xla_flags.split_flags(env.get("XLA_FLAGS", ""))}
    settings: list[Setting] = []
    for setting in wanted:
        if setting.is_flag:
            if setting.name not in own_flags:
                settings.append(setting)
        elif setting.name in env:
            settings.append(Setting(setting.name, env[setting.name], "set in the environment", "user"))
        else:
            settings.append(setting)
    settings += [Setting(name, flag[len(name) + 1 :], "set in XLA_FLAGS", "user") for name, flag in own_flags.items()]
    flags = [_flag(setting) for setting in settings if setting.is_flag]
    refused = set(unknown(flags)) if flags else set()
    return [
        Setting(setting.name, setting.value, f"jaxlib {host.jaxlib} does not know it", "dropped") if _flag(setting) in refused else setting
        for setting in settings
    ]


def _threads(host: Host) -> list[Setting]:
    if host.cores is None:
        return []
    cores, why = str(host.cores), "processes share this node: threads of the cores this one was given"
    settings = [Setting("OMP_NUM_THREADS", cores, why), Setting("RAYON_NUM_THREADS", cores, f"{why} (tokenizers)")]
    return [Setting("NPROC", cores, f"{why} (XLA on CPU)"), *settings] if host.generation is None else settings


def _pinned(host: Host, env: Mapping[str, str]) -> list[Setting]:
    """The limit of XLA's pool of pinned memory. Raises UserError where the user's own is less than what the step keeps there."""
    if host.pinned_gib is None:
        return []
    own = env.get(PINNED_LIMIT)
    if own is not None and not (own.isdecimal() and int(own) >= host.pinned_gib):
        raise UserError(
            f"{PINNED_LIMIT}={own}: the activations that compute.remat offloads need {host.pinned_gib}; unset it, or set it to that or more"
        )
    return [Setting(PINNED_LIMIT, str(host.pinned_gib), "activations that compute.remat offloads, with a margin; XLA takes 64 by default")]


def _gpu(generation: Generation, config: Config) -> list[Setting]:
    """Return the settings of a GPU generation."""
    settings = [
        Setting(
            "XLA_PYTHON_CLIENT_MEM_FRACTION",
            MEMORY_FRACTION,
            "XLA takes 75 % of the memory by default; the rest is for the CUDA context, NCCL and cuDNN",
        ),
        Setting("JAX_OPTIMIZATION_LEVEL", "O1", "turns on the latency-hiding scheduler and pipelined collectives, off by default"),
        Setting("NCCL_DEBUG", "WARN", "NCCL is silent about its errors by default"),
    ]
    if generation in ("ampere", "hopper"):
        reason = "one hardware queue: collectives start in the order of their launch, before the compute that could starve them"
        settings.append(Setting("CUDA_DEVICE_MAX_CONNECTIONS", "1", f"{reason} (slower on Blackwell)"))
    if config.runtime.compilation_cache is not None:
        settings.append(
            Setting(
                "JAX_REMOVE_CUSTOM_PARTITIONING_PTR_FROM_CACHE_KEY",
                "true",
                "without it a program with cuDNN attention is never found in the cache",
            )
        )
    settings += [Setting(*flag) for flag in overlap_flags(config)]
    if config.precision.eight_bit:
        reason = "8-bit products are cuBLASLt's: Triton's kernels would take them, widen their inputs and multiply in 16 bits"
        settings.append(Setting("--xla_gpu_enable_triton_gemm", "false", reason))
        reason = "products that read the same input stay apart: merged ones read several scales, and become 16-bit products"
        settings.append(Setting("--xla_gpu_dot_merger_threshold_mb", "0", reason))
    reason = "compute.remat decides what is recomputed: XLA's own pass adds to it unasked, and what was planned is not what runs"
    settings.append(Setting("--xla_disable_hlo_passes", "rematerialization", reason))
    return settings


def apply(settings: Sequence[Setting], env: MutableMapping[str, str]) -> None:
    """Set the chosen variables and flags. The user's own stay; flags that jaxlib does not know go."""
    for setting in settings:
        if setting.chosen == "ridge" and not setting.is_flag:
            env[setting.name] = setting.value
    if any(setting.is_flag for setting in settings):
        env["XLA_FLAGS"] = " ".join(_flag(setting) for setting in settings if setting.is_flag and setting.chosen != "dropped")


def prepare(config: Config, cluster: Cluster, env: MutableMapping[str, str] = os.environ) -> list[Setting]:
    """Choose and apply the settings of this process; return them. Raises UserError for an unsafe compilation cache or unreadable flags."""
    if config.runtime.compilation_cache is not None:
        check_cache_dir(config.runtime.compilation_cache)
    platform = config.runtime.platform if config.runtime.platform != "auto" else env.get("JAX_PLATFORMS", "auto")
    generation = gpu_generation() if platform.split(",")[0] in ("auto", "", "cuda", "gpu") else None
    pinned = _pinned_gib(config, cluster) if generation is not None and config.compute.remat.policy == "offload" else None
    host = Host(generation, importlib.metadata.version("jaxlib"), _own_cores(cluster, env), pinned)
    settings = choose(host, config, env, xla_flags.unknown_flags)
    apply(settings, env)
    return settings


def lines(settings: Sequence[Setting]) -> list[str]:
    """Say each setting with its reason."""
    if not settings:
        return []
    width = max(len(f"{setting.name}={setting.value}") for setting in settings)
    verb = {"ridge": "", "user": "", "dropped": "NOT PASSED: "}
    return ["environment:", *(f"  {f'{s.name}={s.value}':<{width}}  {verb[s.chosen]}{s.reason}" for s in settings)]


def _flag(setting: Setting) -> str:
    if not setting.value:
        return setting.name
    return f"{setting.name}='{setting.value}'" if " " in setting.value else f"{setting.name}={setting.value}"


def _pinned_gib(config: Config, cluster: Cluster) -> int | None:
    """Return the limit of this process's pool of pinned memory, from the mesh and the memory of this node."""
    local = len(cluster.devices.ids) if cluster.devices.ids is not None else gpus_present() or 1
    return pool_limit_gib(
        config,
        resolve_sizes(config.mesh, local * cluster.processes),
        local_devices=local,
        local_processes=cluster.local_processes or 1,
        node_bytes=memory_bytes(),
    )


def _own_cores(cluster: Cluster, env: Mapping[str, str]) -> int | None:
    """Return the cores of this process when others of the run are on its node, or its launcher gave it a part of the node."""
    here = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)
    given = slurm.cpus_per_task(env) if cluster.source == "Slurm step" else None
    if given is not None:
        return min(given, here)
    if cluster.local_processes is None or cluster.local_processes == 1:
        return None
    return max(1, here // cluster.local_processes)


def gpu_generation(proc: Path = Path("/proc/driver/nvidia/gpus")) -> Generation | None:
    """Return the generation of this machine's NVIDIA GPUs without touching them; None without any."""
    models = [_model(file) for file in sorted(proc.glob("*/information"))]
    if not models:
        models = _from_nvidia_smi()
    return generation_of(models[0]) if models else None


def generation_of(model: str) -> Generation:
    """Return the generation of a GPU by its model name."""
    return next((name for name, pattern in GENERATIONS if re.search(pattern, model, re.I)), "unknown")


def _model(file: Path) -> str:
    try:
        match = re.search(r"^Model:\s*(.+)$", file.read_text(), re.M)
    except OSError:
        return ""
    return match.group(1).strip() if match else ""


def _from_nvidia_smi() -> list[str]:
    try:
        done = subprocess.run(
            ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"], capture_output=True, text=True, timeout=20, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return []
    return done.stdout.split("\n")[:-1] if done.returncode == 0 else []
