"""Environment variables and XLA flags of a run, chosen by GPU generation, jaxlib and config, each with its reason.

Values that the user has set are kept. `choose` is a pure function; `prepare` reads the machine, applies the choice, and must run before JAX
is loaded. It also checks the directory of the compilation cache.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import pwd
import re
import stat
import subprocess
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ridgeline.configs.environment import read_number, shortened
from ridgeline.configs.errors import UserError
from ridgeline.configs.mesh import with_mesh
from ridgeline.configs.schema import MESH_AXES, Config
from ridgeline.launch.cluster import Cluster, slurm
from ridgeline.launch.cluster.devices import gpus_present
from ridgeline.launch.preflight.host import memory_bytes
from ridgeline.launch.xla_flags import name_of, split_flags, unknown_flags
from ridgeline.planner.hardware import generation_of, hardware
from ridgeline.planner.host_memory import offloads, pool_limit_gib
from ridgeline.planner.local import LocalSizes
from ridgeline.planner.overlap import POOL_SHARE, WIDEST_TENSOR
from ridgeline.planner.parameters import count_parameters, expert_parameters
from ridgeline.rundir.directory import AUTOTUNE

PINNED_LIMIT = "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"
MEMORY_FRACTION = f"{POOL_SHARE:g}"
"""Share of the device memory that XLA's pool reserves; a cluster's `utilisation_cap` must not exceed it."""
BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
IN_FLIGHT, IN_FLIGHT_TENSOR = 3, 2
"""Collectives in flight: the second where tensor parallelism is above WIDEST_TENSOR devices."""
DETERMINISTIC_OPS = "--xla_gpu_exclude_nondeterministic_ops"
KERNEL_CHOICES = "--xla_gpu_per_fusion_autotune_cache_dir"
DISABLED_PASSES = ("rematerialization", "all-gather-to-collective-permute-simplifier")
PIPELINED_REDUCTIONS, PIPELINED_GATHERS = "collective-pipeliner-forward", "collective-pipeliner-backward"
"""XLA's passes that move reductions of gradients into the next turn of the loop over layers, and gathers of weights into the one before."""


@dataclass(frozen=True)
class Setting:
    """One variable or XLA flag."""

    name: str
    value: str | None
    """None: a flag without `=`."""
    reason: str
    chosen: Literal["ridge", "user", "dropped"] = "ridge"
    """dropped: not passed, because the installed jaxlib does not support it."""

    @property
    def is_flag(self) -> bool:
        """Whether this is an XLA flag, not a variable."""
        return self.name.startswith("--")

    @property
    def text(self) -> str:
        """`NAME=VALUE`, or the name of a flag without `=`."""
        return self.name if self.value is None else f"{self.name}={self.value}"


@dataclass(frozen=True)
class Host:
    """Facts about the machine that the choice depends on."""

    generation: str | None
    """None: no GPU."""
    jaxlib: str
    cores: int | None
    """Cores of this process if several share the node; None: it has the node to itself."""
    pinned_gib: int | None = None
    """Limit of the pinned host memory pool that this process needs, GiB; None: XLA's default suffices."""


def choose(host: Host, config: Config, env: Mapping[str, str], unknown: Callable[[Sequence[str]], Sequence[str]]) -> list[Setting]:
    """Return every setting of a run, those of the user included.

    unknown: returns those of a list of flags that jaxlib does not support; called only if there are flags.
    """
    wanted = [*_threads(host), *_pinned(host, env), *(_gpu(host.generation, config) if host.generation is not None else [])]
    own_flags = {name_of(flag): flag for flag in split_flags(env.get("XLA_FLAGS", ""))}
    settings: list[Setting] = []
    for setting in wanted:
        if setting.is_flag:
            if setting.name not in own_flags:
                settings.append(setting)
        elif setting.name in env:
            settings.append(Setting(setting.name, env[setting.name], "set in the environment", "user"))
        else:
            settings.append(setting)
    for name, flag in own_flags.items():
        settings.append(Setting(name, None if flag == name else flag[len(name) + 1 :], "set in XLA_FLAGS", "user"))
    flags = [_flag(setting) for setting in settings if setting.is_flag]
    refused = set(unknown(flags)) if flags else set()
    if host.generation is not None and config.runtime.deterministic:
        _check_deterministic(host, settings, refused)
    return [
        Setting(setting.name, setting.value, f"jaxlib {host.jaxlib} does not support it", "dropped")
        if _flag(setting) in refused
        else setting
        for setting in settings
    ]


def _threads(host: Host) -> list[Setting]:
    if host.cores is None:
        return []
    cores, why = str(host.cores), "cores of this process; several processes share the node"
    settings = [Setting("OMP_NUM_THREADS", cores, why), Setting("RAYON_NUM_THREADS", cores, f"{why} (tokenizers)")]
    return [Setting("NPROC", cores, f"{why} (XLA on CPU)"), *settings] if host.generation is None else settings


def _pinned(host: Host, env: Mapping[str, str]) -> list[Setting]:
    """Return the limit of XLA's pinned memory pool. Raises UserError if the user's value is less than the step needs."""
    if host.pinned_gib is None:
        return []
    own, own_gib = env.get(PINNED_LIMIT), read_number(env, PINNED_LIMIT)
    if own is not None and (own_gib is None or own_gib < host.pinned_gib):
        raise UserError(
            f"{PINNED_LIMIT}={shortened(own)}: compute.remat and optimizer.offload need {host.pinned_gib} for what they keep in host "
            "memory; unset it or set at least that"
        )
    return [
        Setting(
            PINNED_LIMIT,
            str(host.pinned_gib),
            "what compute.remat and optimizer.offload keep in host memory plus a margin; XLA's default is 64",
        )
    ]


def _gpu(generation: str, config: Config) -> list[Setting]:
    """Return the settings for a GPU generation."""
    settings = [
        Setting(
            "XLA_PYTHON_CLIENT_MEM_FRACTION",
            MEMORY_FRACTION,
            "XLA's default is 0.75; the rest is for the CUDA context, NCCL and cuDNN",
        ),
        Setting("JAX_OPTIMIZATION_LEVEL", "O1", "enables the latency-hiding scheduler and pipelined collectives (default: off)"),
        Setting("NCCL_DEBUG", "WARN", "NCCL prints no errors by default"),
    ]
    if generation in ("ampere", "hopper"):
        reason = "one hardware queue: collectives start in launch order, before compute that could delay them"
        settings.append(Setting("CUDA_DEVICE_MAX_CONNECTIONS", "1", f"{reason} (slower on Blackwell)"))
    if config.runtime.compilation_cache is not None:
        settings.append(
            Setting(
                "JAX_REMOVE_CUSTOM_PARTITIONING_PTR_FROM_CACHE_KEY",
                "true",
                "without it, programs with cuDNN attention never hit the compilation cache",
            )
        )
    settings += [Setting(*flag) for flag in overlap_flags(config)]
    if config.precision.eight_bit:
        reason = "8-bit matmuls run in cuBLASLt: Triton's kernels would convert the inputs and multiply in 16 bits"
        settings.append(Setting("--xla_gpu_enable_triton_gemm", "false", reason))
        reason = "8-bit matmuls with a common input are not merged: with several scales they would become 16-bit matmuls"
        settings.append(Setting("--xla_gpu_dot_merger_threshold_mb", "0", reason))
    if config.runtime.deterministic:
        settings += _deterministic(config)
    reason = (
        "compute.remat decides what is rematerialized, XLA would rematerialize more than planned; the other pass puts zeros in place "
        "of what a device gathers and slices back (openxla/xla pull request 45218)"
    )
    disabled: tuple[str, ...] = DISABLED_PASSES
    local = _local_sizes(config)
    if local is not None and local.defers_reductions:
        disabled = (*disabled, PIPELINED_REDUCTIONS)
        reason += "; gradients of layers with experts are reduced in the next layer already: XLA would take layers out of the loop for that"
    if local is not None and local.beside_attention:
        disabled = (*disabled, PIPELINED_GATHERS)
        reason += "; weights of experts are gathered while attention runs: XLA would gather them in the layer before"
    elif local is not None and local.gathers_within_turn:
        disabled = (*disabled, PIPELINED_GATHERS)
        reason += "; a turn of the loop over layers gathers its own weights: XLA would gather those of all its layers in the turn before"
    settings.append(Setting("--xla_disable_hlo_passes", ",".join(disabled), reason))
    return settings


def _local_sizes(config: Config) -> LocalSizes | None:
    """Return the sizes of a step on one device; None before the mesh has its sizes."""
    sizes = {axis: getattr(config.mesh, axis) for axis in MESH_AXES}
    return LocalSizes.of(config, sizes) if min(sizes.values()) > 0 else None


def _deterministic(config: Config) -> list[Setting]:
    """Return the settings of runtime.deterministic.

    Without measurements, as the first flag may have it, XLA takes the first kernel of a matmul: better the choice of cuBLAS than a fixed
    tile of Triton's. JAX would put the kernel choices into the compilation cache, which other runs share.
    """
    own = "runtime.deterministic: "
    gemm = Setting("--xla_gpu_enable_triton_gemm", "false", f"{own}cuBLAS chooses the kernels of matmuls")
    return [
        Setting(DETERMINISTIC_OPS, "true", f"{own}scatters and attention's gradients are summed in a fixed order"),
        Setting(KERNEL_CHOICES, str(config.directory.absolute() / AUTOTUNE), f"{own}a later start takes the same kernels"),
        *([] if config.precision.eight_bit else [gemm]),
        Setting("JAX_PERSISTENT_CACHE_ENABLE_XLA_CACHES", "none", f"{own}kernel choices are stored in the run directory"),
    ]


def _check_deterministic(host: Host, settings: Sequence[Setting], refused: set[str]) -> None:
    """Raise UserError where runtime.deterministic cannot be honoured: jaxlib lacks a flag, or the user's variables contradict it."""
    for setting in settings:
        if setting.name not in (DETERMINISTIC_OPS, KERNEL_CHOICES, "JAX_PERSISTENT_CACHE_ENABLE_XLA_CACHES"):
            continue
        if _flag(setting) in refused:
            raise UserError(f"runtime.deterministic=true: jaxlib {host.jaxlib} does not support {setting.name}; set it to false")
        value = (setting.value or "").lower()
        wanted = {DETERMINISTIC_OPS: ("true", "1", ""), KERNEL_CHOICES: None}.get(setting.name, ("none",))
        if setting.chosen == "user" and (value == "" if wanted is None else value not in wanted):
            where = "in XLA_FLAGS " if setting.is_flag else ""
            raise UserError(f"runtime.deterministic=true: {setting.text} {where}contradicts it; unset one of the two")


def layer_bytes(config: Config, itemsize: int) -> int:
    """Return the bytes of one layer's parameters after the all-gather over fsdp: sharded over tensor, experts over expert too.

    itemsize: of an element.
    """
    model = config.model
    parameters = count_parameters(model).non_embedding
    if model.moe is not None:
        experts = model.moe_layers * model.moe.experts * expert_parameters(model)
        parameters -= experts - experts // max(1, config.mesh.expert)
    return parameters // model.num_layers * itemsize // max(1, config.mesh.tensor)


def overlap_flags(config: Config) -> list[tuple[str, str, str]]:
    """Return XLA's flags for combining and overlapping a sharded step's collectives, as (flag, value, reason). The mesh has sizes.

    Empty for pure data parallelism: XLA's defaults combine and overlap its gradients. The values were chosen by simulating compiled
    schedules (`benchmarks/overlap.py`; figures in docs/PERFORMANCE.md):
    * A collective covers one layer. Smaller ones overlap less and pay more latency (8B on 512 H100, single parameters: 0.294 s instead of
      0.252 s); larger ones wait for a layer whose compute has not started.
    * Three collectives may be in flight: the all-gather of the next layer, the reduce-scatter of the previous one, and the small
      all-reduces of norms, which would otherwise delay the all-gather (8B on 64 H100: 3.19 s instead of 3.39 s with two). With tensor
      parallelism over more than two devices a third all-gather delays the activations' collectives, which run in start order, so two
      (70B, tensor=8: 10.30 s instead of 10.43 s). The same holds for the transfers of a ring (405B on 64 H100, fsdp=32 x tensor=2: 170 s
      instead of 190 s).
    """
    flags = []
    fsdp, tensor = config.mesh.fsdp != 1, config.mesh.tensor != 1
    if fsdp:
        reason = "FSDP: combine the collectives of one layer only, so that they overlap with the previous layer"
        precision = config.precision
        in_gather = 1 if precision.gathers_8_bit else BYTES[precision.compute]
        gathered, reduced = (str(layer_bytes(config, itemsize)) for itemsize in (in_gather, BYTES[precision.gradients]))
        for kind, size in (("all_gather", gathered), ("reduce_scatter", reduced), ("all_reduce", reduced)):
            flags.append((f"--xla_gpu_{kind}_combine_threshold_bytes", size, reason))
    if fsdp or tensor:
        reason = "collectives in flight: the next layer's all-gather does not wait for the previous reduce-scatter"
        few = config.mesh.tensor > WIDEST_TENSOR or (tensor and config.compute.tensor_overlap == "ring")
        limit = IN_FLIGHT_TENSOR if few else IN_FLIGHT
        flags.append(("--xla_gpu_experimental_parallel_collective_overlap_limit", str(limit), reason))
    return flags


def apply(settings: Sequence[Setting], env: MutableMapping[str, str]) -> None:
    """Set the chosen variables and flags in `env`. The user's variables stay; flags that jaxlib does not support are removed."""
    for setting in settings:
        if setting.chosen == "ridge" and not setting.is_flag:
            assert setting.value is not None
            env[setting.name] = setting.value
    if any(setting.is_flag for setting in settings):
        env["XLA_FLAGS"] = " ".join(_flag(setting) for setting in settings if setting.is_flag and setting.chosen != "dropped")


def prepare(config: Config, cluster: Cluster, env: MutableMapping[str, str] = os.environ) -> list[Setting]:
    """Choose and apply the settings of this process; return them. Raises UserError for an unsafe compilation cache or invalid flags."""
    if config.runtime.compilation_cache is not None:
        check_cache_dir(config.runtime.compilation_cache)
    platform = config.runtime.platform if config.runtime.platform != "auto" else env.get("JAX_PLATFORMS", "auto")
    generation = gpu_generation() if platform.split(",")[0] in ("auto", "", "cuda", "gpu") else None
    pinned = None
    if generation is not None:
        local = len(cluster.devices.ids) if cluster.devices.ids is not None else gpus_present() or 1
        try:
            config = with_mesh(config, local * cluster.processes)
        except UserError:
            pass  # the run refuses this mesh when it knows its devices
        else:
            pinned = _pinned_gib(config, cluster, local) if offloads(config) else None
    host = Host(generation, importlib.metadata.version("jaxlib"), _own_cores(cluster, env), pinned)
    settings = choose(host, config, env, unknown_flags)
    apply(settings, env)
    return settings


def run_flags(config: Config, device: str, user_flags: Sequence[str] = ()) -> tuple[tuple[str, ...], str | None]:
    """Return the XLA flags and JAX_OPTIMIZATION_LEVEL of a run of this config on a device of the catalog, for compiling without it.

    config: with the sizes of its mesh (`with_mesh`). user_flags: flags of the user, which replace those of the same name.
    """
    settings = settings_on(config, device)
    own = {KERNEL_CHOICES, *(name_of(flag) for flag in user_flags)}  # there are no choices without a GPU
    flags = [_flag(setting) for setting in settings if setting.is_flag and setting.chosen != "dropped" and setting.name not in own]
    return (*flags, *user_flags), next((s.value for s in settings if s.name == "JAX_OPTIMIZATION_LEVEL"), None)


def settings_on(config: Config, device: str) -> list[Setting]:
    """Return the settings of a run of this config on a device of the catalog, without variables of the user."""
    return choose(Host(hardware(device).generation or "unknown", importlib.metadata.version("jaxlib"), None), config, {}, unknown_flags)


def lines(settings: Sequence[Setting]) -> list[str]:
    """Return the lines to print: each setting with its reason."""
    if not settings:
        return []
    width = max(len(setting.text) for setting in settings)
    verb = {"ridge": "", "user": "", "dropped": "NOT PASSED: "}
    return ["environment:", *(f"  {s.text:<{width}}  {verb[s.chosen]}{s.reason}" for s in settings)]


def _flag(setting: Setting) -> str:
    """Return a flag as split_flags reads it."""
    value = setting.value
    if value is None or not re.search(r"^['\"]|[ \t\r\n]", value):
        return setting.text
    if "'" not in value:
        return f"{setting.name}='{value}'"
    escaped = re.sub(r'(["\\])', r"\\\1", value)
    return f'{setting.name}="{escaped}"'


def _pinned_gib(config: Config, cluster: Cluster, local_devices: int) -> int | None:
    """Return the limit of this process's pinned memory pool, GiB, from the mesh, which has sizes, and the memory of this node."""
    return pool_limit_gib(
        config,
        config.mesh.sizes,
        local_devices=local_devices,
        local_processes=cluster.local_processes or 1,
        node_bytes=memory_bytes(),
    )


def _own_cores(cluster: Cluster, env: Mapping[str, str]) -> int | None:
    """Return the cores of this process if it shares the node with others of the run or its launcher assigned a part; else None."""
    here = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)
    assigned = slurm.cpus_per_task(env) if cluster.source == "Slurm step" else None
    if assigned is not None:
        return min(assigned, here)
    if cluster.local_processes is None or cluster.local_processes == 1:
        return None
    return max(1, here // cluster.local_processes)


def gpu_generation(proc: Path = Path("/proc/driver/nvidia/gpus")) -> str | None:
    """Return the generation of this machine's NVIDIA GPUs without opening them; None without GPUs."""
    models = [_model(file) for file in sorted(proc.glob("*/information"))]
    if not models:
        models = _from_nvidia_smi()
    return generation_of(models[0]) if models else None


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


def check_cache_dir(path: Path, *, user: int | None = None) -> None:
    """Create the compilation cache directory (mode 700) if missing; raise UserError if other users can write to it or replace it.

    Compiled programs are loaded from it and run, so a writer controls what the devices execute. A world-writable parent is accepted with
    the sticky bit (/tmp): then only the owner can replace its entries. Members of a group with write access to a parent can replace the
    directory, but then another user owns it, and the next start refuses it.
    """
    me = os.geteuid() if user is None else user
    key = f"runtime.compilation_cache={path}"
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = path.resolve(strict=True)
        own = found.stat()
    except OSError as error:
        raise UserError(f"{key}: {error.strerror or error}") from None
    if not stat.S_ISDIR(own.st_mode):
        raise UserError(f"{key}: not a directory")
    danger = "programs in it are executed"
    if own.st_uid not in (me, 0):
        raise UserError(f"{key} belongs to {_user_name(own.st_uid)}, and {danger}: use a directory of your own")
    if own.st_mode & 0o022:
        raise UserError(f"{key} is writable by other users (mode {stat.S_IMODE(own.st_mode):o}), and {danger}: chmod go-w {path}")
    for parent in found.parents:
        mode = parent.stat().st_mode
        if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
            raise UserError(
                f"{key}: any user can replace it, because {parent} has mode {stat.S_IMODE(mode):o}, and {danger}: chmod o-w {parent}"
            )


def _user_name(user: int) -> str:
    try:
        return pwd.getpwuid(user).pw_name
    except KeyError:
        return f"user {user}"
