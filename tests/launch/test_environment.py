"""Environment of a run: each setting has a reason, the user's values are kept, flags that jaxlib does not support are dropped."""

from __future__ import annotations

import math
import os
import random
import subprocess
import sys
from collections.abc import Sequence
from importlib.machinery import PathFinder
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ridgeline.configs.cluster import cluster_names, load_cluster
from ridgeline.configs.errors import UserError
from ridgeline.configs.load import load
from ridgeline.configs.schema import MESH_AXES, Config, PrecisionConfig
from ridgeline.launch.cluster import Cluster
from ridgeline.launch.cluster.devices import LocalDevices
from ridgeline.launch.cuda_plugin import has_nvidia_hardware
from ridgeline.launch.environment import (
    DETERMINISTIC_OPS,
    KERNEL_CHOICES,
    PIPELINED_GATHERS,
    PIPELINED_REDUCTIONS,
    Host,
    Setting,
    apply,
    check_cache_dir,
    choose,
    gpu_generation,
    lines,
    overlap_flags,
    prepare,
)
from ridgeline.launch.xla_flags import split_flags, unknown_flags
from ridgeline.models.parallelize import parallelize
from ridgeline.planner.hardware import generation_of
from ridgeline.planner.host_memory import pool_limit_gib
from ridgeline.planner.local import LocalSizes
from ridgeline.sharding.mesh import abstract_mesh
from ridgeline.sharding.partition import Partitioner
from tests.sampling import seed

CONFIG = Config()
WITH_CACHE = Config.model_validate({"runtime": {"compilation_cache": Path("cache")}, "compute": {"remat": {"policy": "full"}}})


def supports_all(flags: Sequence[str]) -> list[str]:
    return []


def chosen(
    generation: str | None, env: dict[str, str] | None = None, config: Config = CONFIG, cores: int | None = None
) -> dict[str, Setting]:
    host = Host(generation, "9.9", cores)
    return {setting.name: setting for setting in choose(host, config, env or {}, supports_all)}


def test_every_setting_has_a_reason_and_a_lone_cpu_process_needs_none() -> None:
    assert chosen(None) == {}
    for generation in ("volta", "ampere", "ada", "hopper", "blackwell", "unknown"):
        settings = chosen(generation, cores=8, config=WITH_CACHE)
        assert all(len(setting.reason) > 20 for setting in settings.values())
        text = lines(list(settings.values()))
        assert len(text) == 1 + len(settings)


def test_the_generation_decides() -> None:
    assert chosen("hopper")["CUDA_DEVICE_MAX_CONNECTIONS"].value == "1"
    assert "CUDA_DEVICE_MAX_CONNECTIONS" not in chosen("blackwell")
    assert "JAX_OPTIMIZATION_LEVEL" in chosen("unknown")


def test_the_memory_of_a_plan_fits_into_the_pool_of_a_run() -> None:
    pool = float(chosen("hopper")["XLA_PYTHON_CLIENT_MEM_FRACTION"].value)
    assert max(load_cluster(name).config.utilisation_cap for name in cluster_names()) <= pool < 1


def test_a_sharded_run_starts_with_the_flags_of_its_overlap() -> None:
    flags = {name: (value, reason) for name, value, reason in overlap_flags(CONFIG)}
    assert len(flags) == 4 and unknown_flags([f"{name}={value}" for name, (value, _) in flags.items()]) == []
    found = chosen("hopper")
    assert {name: (found[name].value, found[name].reason) for name in flags} == flags


def test_8_bit_matmuls_are_not_converted_to_16_bits() -> None:
    flags = {"--xla_gpu_enable_triton_gemm": "false", "--xla_gpu_dot_merger_threshold_mb": "0"}
    narrow = chosen("hopper", config=Config.model_validate({"precision": {"matmul": "fp8"}}))
    assert {name: narrow[name].value for name in flags} == flags
    assert not flags.keys() & chosen("hopper").keys()
    assert unknown_flags([f"{name}={value}" for name, value in flags.items()]) == []


DETERMINISTIC = Config.model_validate({"runtime": {"deterministic": True}, "run_dir": Path("/runs/a b")})


def test_a_deterministic_run_stores_its_kernel_choices_with_it() -> None:
    found = chosen("hopper", config=DETERMINISTIC)
    ours = {name: setting.value for name, setting in found.items() if setting.reason.startswith("runtime.deterministic: ")}
    assert ours == {
        DETERMINISTIC_OPS: "true",
        KERNEL_CHOICES: "/runs/a b/autotune",
        "--xla_gpu_enable_triton_gemm": "false",
        "JAX_PERSISTENT_CACHE_ENABLE_XLA_CACHES": "none",
    }
    flags = {name: value for name, value in ours.items() if name.startswith("--")}
    assert unknown_flags([f"{name}='{value}'" for name, value in flags.items()]) == []
    after: dict[str, str] = {}
    apply(list(found.values()), after)
    assert f"{KERNEL_CHOICES}=/runs/a b/autotune" in split_flags(after["XLA_FLAGS"])
    assert chosen(None, config=DETERMINISTIC) == {}, "CPUs need nothing"
    assert not flags.keys() & chosen("hopper").keys()
    narrow = DETERMINISTIC.model_copy(update={"precision": PrecisionConfig(matmul="fp8")})
    flags_of = [s for s in choose(Host("hopper", "9.9", None), narrow, {}, supports_all) if s.name == "--xla_gpu_enable_triton_gemm"]
    assert len(flags_of) == 1


def test_a_deterministic_run_is_refused_where_it_would_not_be() -> None:
    def lacks(flags: Sequence[str]) -> list[str]:
        return [flag for flag in flags if flag.startswith(DETERMINISTIC_OPS)]

    with pytest.raises(UserError, match=f"jaxlib 9.9 does not support {DETERMINISTIC_OPS}"):
        choose(Host("hopper", "9.9", None), DETERMINISTIC, {}, lacks)
    for env in ({"XLA_FLAGS": f"{DETERMINISTIC_OPS}=false"}, {"XLA_FLAGS": f"{KERNEL_CHOICES}="}):
        with pytest.raises(UserError, match="contradicts it"):
            chosen("hopper", env, DETERMINISTIC)
    with pytest.raises(UserError, match="JAX_PERSISTENT_CACHE_ENABLE_XLA_CACHES=all contradicts it"):
        chosen("hopper", {"JAX_PERSISTENT_CACHE_ENABLE_XLA_CACHES": "all"}, DETERMINISTIC)
    assert chosen("hopper", {"XLA_FLAGS": f"{KERNEL_CHOICES}=/mine"}, DETERMINISTIC)[KERNEL_CHOICES].value == "/mine"
    with pytest.raises(UserError, match=r"runtime\.deterministic: .* CUDA only"):
        load("quickstart", ["runtime.platform=rocm", "runtime.deterministic=true"])


def test_the_cache_of_the_config_brings_its_setting() -> None:
    name = "JAX_REMOVE_CUSTOM_PARTITIONING_PTR_FROM_CACHE_KEY"
    assert name in chosen("hopper", config=WITH_CACHE)
    assert name not in chosen("hopper")


def test_only_the_config_decides_what_is_rematerialized() -> None:
    for config in (CONFIG, WITH_CACHE):
        assert "rematerialization" in chosen("hopper", config=config)["--xla_disable_hlo_passes"].value.split(",")


def test_the_pass_that_puts_zeros_in_place_of_a_devices_own_shard_does_not_run() -> None:
    assert "all-gather-to-collective-permute-simplifier" in chosen("hopper")["--xla_disable_hlo_passes"].value.split(",")


def moves_itself(config: Config, what: str = PIPELINED_REDUCTIONS) -> bool:
    """Whether XLA's pass that moves reductions into the next layer, or gathers into the one before, does not run."""
    return what in chosen("hopper", config=config)["--xla_disable_hlo_passes"].value.split(",")


@pytest.mark.parametrize("model", ["mixtral-8x7b", "gpt-oss-20b", "deepseek-v2-lite", "llama-3.1-8b"])
def test_xla_moves_no_reduction_and_no_gather_where_the_program_does(model: str) -> None:
    """It would take layers out of the loop for the small reductions that are left, and keep the unreduced gradients of these layers; and
    move the gathers that wait for attention's queries into the layer before."""
    draw, found, gathers = random.Random(f"{seed()} {model}"), set(), set()
    for _ in range(60):
        axes = {axis: draw.choice([1, 1, 2]) for axis in ("data", "context", "tensor")} | {"fsdp": draw.choice([1, 8])}
        axes["pipeline"] = draw.choice([1, 1, 2]) if model == "mixtral-8x7b" else 1
        axes["expert"] = 1 if model.startswith("llama") else draw.choice([1, 2, 8])
        mesh = [f"mesh.{axis}={size}" for axis, size in axes.items()]
        rows = 8 * axes["data"] * axes["fsdp"] * axes["expert"]
        adapters = draw.choice([[], [], ["lora.rank=8"]]) if axes["pipeline"] == 1 else []
        remat = [f"compute.remat.policy={draw.choice(['full', 'none'])}"]
        config = load(f"models/{model}", [*mesh, *remat, f"data.batch_size={rows}", "trainer.accumulation=4", *adapters]).config
        partitioner = Partitioner(abstract_mesh(config.mesh, math.prod(axes.values())))
        program = parallelize(config.model, config.compute, config.precision, partitioner, config.lora)
        local = LocalSizes.of(config, axes)
        assert moves_itself(config) == program.defers == local.defers_reductions, (axes, adapters)
        assert program.beside_attention == local.beside_attention
        assert moves_itself(config, PIPELINED_GATHERS) == program.beside_attention, (axes, adapters, remat)
        assert not (program.defers and adapters), "adapters have small gradients"
        found.add(program.defers)
        gathers.add(program.beside_attention)
    assert found == ({False} if model.startswith("llama") else {True, False})
    assert gathers == ({True, False} if model.startswith("deepseek") else {False})


@pytest.mark.parametrize(
    ("model", "settings", "within"),
    [
        ("gemma3-12b", (), True),
        ("olmo3-7b", (), True),
        ("llama-4-scout-17b-16e", (), True),
        ("gemma3-12b", ("compute.scan_layers=false",), False),  # no turns
        ("gemma2-9b", (), False),
        ("gpt-oss-20b", (), False),
        ("gpt-oss-20b", ("compute.scan_unroll=3",), True),  # whole turns of two layers: four
        ("llama-3.1-8b", ("compute.scan_unroll=2",), False),
        ("llama-3.1-8b", ("compute.scan_unroll=4",), True),
    ],
)
def test_turns_of_more_than_two_layers_gather_their_own_weights(model: str, settings: tuple[str, ...], within: bool) -> None:
    """XLA would gather those of all layers of the next turn at the end of a turn."""
    sized = ["mesh.fsdp=8", "data.batch_size=256", "data.seq_len=1024"]
    assert moves_itself(load(f"models/{model}", [*sized, *settings]).config, PIPELINED_GATHERS) == within


def test_xla_moves_reductions_while_the_mesh_has_no_sizes() -> None:
    sized = ["mesh.fsdp=8", "data.batch_size=256", "data.seq_len=8192"]
    assert moves_itself(load("models/mixtral-8x7b", sized).config)
    for axis in MESH_AXES:
        assert not moves_itself(load("models/mixtral-8x7b", [*sized, f"mesh.{axis}=-1"]).config), axis


def test_threads_follow_the_cores_of_a_process_that_shares_its_node() -> None:
    assert {name: setting.value for name, setting in chosen(None, cores=3).items()} == {
        "NPROC": "3",
        "OMP_NUM_THREADS": "3",
        "RAYON_NUM_THREADS": "3",
    }
    assert "NPROC" not in chosen("hopper", cores=3)


def test_the_users_settings_are_kept() -> None:
    env = {"JAX_OPTIMIZATION_LEVEL": "O2", "XLA_FLAGS": "--xla_gpu_all_gather_combine_threshold_bytes=7 --xla_dump_to=/tmp/x"}
    settings = chosen("hopper", env)
    assert settings["JAX_OPTIMIZATION_LEVEL"] == Setting("JAX_OPTIMIZATION_LEVEL", "O2", "set in the environment", "user")
    after = dict(env)
    apply(list(settings.values()), after)
    assert after["JAX_OPTIMIZATION_LEVEL"] == "O2"
    flags = split_flags(after["XLA_FLAGS"])
    assert "--xla_gpu_all_gather_combine_threshold_bytes=7" in flags
    assert "--xla_dump_to=/tmp/x" in flags
    assert sum("all_gather_combine" in flag for flag in flags) == 1
    assert any("reduce_scatter_combine" in flag for flag in flags)


VALUES = {
    "none": ("", None),
    "empty": ("=", ""),
    "empty in quotes": ("=''", ""),
    "a word": ("=true", "true"),
    "another =": ("=a=b", "a=b"),
    "only =": ("==", "="),
    "spaces in single quotes": ("='a  b'", "a  b"),
    "spaces in double quotes": ('="a b"', "a b"),
    "a tab": ("='a\tb'", "a\tb"),
    "a single quote between spaces": ('="it\'s it"', "it's it"),
    "double quotes between spaces": ("='say \"a b\"'", 'say "a b"'),
    "both quotes, a backslash and spaces": (r"""="a'b \"c\" \\d" """.rstrip(), r"""a'b "c" \d"""),
    "quotes inside a word": ('={"a":1}', '{"a":1}'),
    "an apostrophe inside a word": ("=it's", "it's"),
    "a quote at the beginning": ('="\'a"', "'a"),
    "a backslash": (r"=a\b", r"a\b"),
}
"""What is written behind the name of a flag, and its value as XLA reads it (xla/parse_flags_from_env.cc); None: no value."""


@pytest.mark.parametrize(("written", "value"), VALUES.values(), ids=VALUES.keys())
@pytest.mark.parametrize("generation", [None, "hopper"])
def test_a_users_flag_keeps_its_value_whatever_it_is(written: str, value: str | None, generation: str | None) -> None:
    name = "--xla_gpu_enable_command_buffer"
    env = {"XLA_FLAGS": f"--xla_first=1 {name}{written}\n --xla_last"}
    settings = choose(Host(generation, "9.9", None), CONFIG, env, supports_all)
    assert next(setting.value for setting in settings if setting.name == name) == value
    apply(settings, env)
    argument = name if value is None else f"{name}={value}"
    assert {argument, "--xla_first=1", "--xla_last"} <= set(split_flags(env["XLA_FLAGS"]))
    assert split_flags(env["XLA_FLAGS"]).count(argument) == 1
    assert any(line.startswith(f"  {argument} ") for line in lines(settings))


def test_xla_reads_the_flags_as_they_are_read_and_written_here(tmp_path: Path) -> None:
    """XLA lists the flags that it does not know, as it read them."""
    script = "from jaxlib import xla_client; xla_client.make_cpu_client()"
    values = {f"--xla_never_was_{number}": found for number, found in enumerate(VALUES.values())}
    env = {"XLA_FLAGS": " ".join(name + written for name, (written, _) in values.items())}
    arguments = [name if value is None else f"{name}={value}" for name, (_, value) in values.items()]
    given = env["XLA_FLAGS"]
    apply(choose(Host(None, "9.9", None), CONFIG, env, supports_all), env)
    for flags in (given, env["XLA_FLAGS"]):
        assert split_flags(flags) == arguments
        variables = {**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
        done = subprocess.run([sys.executable, "-c", script], env=variables, capture_output=True, text=True, timeout=60, check=False)
        (listed,) = [line for line in done.stderr.splitlines() if "Unknown flag" in line]
        assert listed.partition("XLA_FLAGS: ")[2].endswith(" ".join(arguments))


@pytest.mark.parametrize("flags", ["--xla_a='b", '--xla_a="b c', "--xla_b='c' --xla_a='"])
def test_an_unbalanced_quote_in_a_flag_is_refused(flags: str) -> None:
    with pytest.raises(UserError, match="quot"):
        split_flags(flags)


def test_a_flag_that_jaxlib_does_not_support_is_dropped_and_reported() -> None:
    env = {"XLA_FLAGS": "--xla_gone=true --xla_dump_to=/tmp/x"}
    host = Host("hopper", "9.9", None)
    settings = choose(host, CONFIG, env, lambda flags: [flag for flag in flags if "gone" in flag or "all_reduce" in flag])
    apply(settings, env)
    assert "gone" not in env["XLA_FLAGS"]
    assert "all_reduce" not in env["XLA_FLAGS"]
    assert "--xla_dump_to=/tmp/x" in env["XLA_FLAGS"]
    text = "\n".join(lines(settings))
    assert "--xla_gone=true" in text
    assert any("--xla_gone=true" in line and "NOT PASSED" in line and "jaxlib 9.9" in line for line in text.splitlines())


def test_the_installed_jaxlib_supports_every_chosen_flag() -> None:
    ours = [f"{s.name}={s.value}" for s in chosen("hopper", config=WITH_CACHE).values() if s.is_flag]
    assert unknown_flags([*ours, "--xla_gpu_enable_async_collectives=true", "--xla_never_was"]) == [
        "--xla_gpu_enable_async_collectives=true",
        "--xla_never_was",
    ]
    with pytest.raises(UserError, match="--xla_gpu_enable_latency_hiding_scheduler=maybe"):
        unknown_flags(["--xla_gpu_enable_latency_hiding_scheduler=maybe"])


def test_flags_that_all_are_supported_are_remembered_for_the_installed_jaxlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No process can be started any more: what was asked before has its answer, and every other question starts one."""
    supported, never_was, invalid = ["--xla_dump_to=/tmp/x"], ["--xla_never_was"], ["--xla_gpu_enable_latency_hiding_scheduler=maybe"]
    env = {**os.environ, "RIDGE_CACHE": str(tmp_path / "cache")}
    assert unknown_flags(supported, env) == []
    assert unknown_flags([*supported, *never_was], env) == never_was
    with pytest.raises(UserError, match="maybe"):
        unknown_flags(invalid, env)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "nowhere"))
    assert unknown_flags(supported, env) == []
    elsewhere = env | {"RIDGE_CACHE": str(tmp_path / "other")}
    others = ([*supported, *never_was], env), (never_was, env), (invalid, env), (["--xla_dump_to=/tmp/y"], env), (supported, elsewhere)
    for flags, place in others:
        with pytest.raises(FileNotFoundError):
            unknown_flags(flags, place)


def test_flags_in_a_file_and_a_cache_that_cannot_be_written_are_asked_each_time(tmp_path: Path) -> None:
    (tmp_path / "flags").write_text("--xla_dump_to=/tmp/x\n")
    (tmp_path / "file").touch()
    for flags, cache in (([str(tmp_path / "flags")], tmp_path / "cache"), (["--xla_dump_to=/tmp/x"], tmp_path / "file")):
        assert unknown_flags(flags, {**os.environ, "RIDGE_CACHE": str(cache)}) == []
    assert {path.name for path in tmp_path.iterdir()} == {"flags", "file"}


@pytest.mark.parametrize(
    ("model", "generation"),
    [
        ("NVIDIA H100 80GB HBM3", "hopper"),
        ("NVIDIA H200", "hopper"),
        ("NVIDIA GH200 480GB", "hopper"),
        ("NVIDIA A100-SXM4-40GB", "ampere"),
        ("NVIDIA A10G", "ampere"),
        ("NVIDIA B200", "blackwell"),
        ("NVIDIA GB200", "blackwell"),
        ("NVIDIA L40S", "ada"),
        ("NVIDIA GeForce RTX 4090", "ada"),
        ("Tesla V100-SXM2-16GB", "volta"),
        ("NVIDIA X900", "unknown"),
    ],
)
def test_a_model_name_determines_the_generation(model: str, generation: str, tmp_path: Path) -> None:
    assert generation_of(model) == generation
    (tmp_path / "0000:1b:00.0").mkdir()
    (tmp_path / "0000:1b:00.0" / "information").write_text(f"Model: \t\t {model}\nIRQ:   \t\t 16\n")
    assert gpu_generation(tmp_path) == generation


def test_a_cache_that_others_can_write_to_is_refused(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    check_cache_dir(cache)
    assert cache.stat().st_mode & 0o777 == 0o700
    for mode in (0o770, 0o707, 0o777):
        cache.chmod(mode)
        with pytest.raises(UserError, match=rf"runtime\.compilation_cache={cache}.*mode {mode:o}.*chmod go-w {cache}"):
            check_cache_dir(cache)
    cache.chmod(0o755)
    check_cache_dir(cache)
    if os.geteuid() == 0:
        os.chown(cache, 1234, -1)
    with pytest.raises(UserError, match=r"runtime\.compilation_cache=.* belongs to "):
        check_cache_dir(cache, user=5678)


def test_a_cache_that_anybody_can_replace_is_refused(tmp_path: Path) -> None:
    parent = tmp_path / "open"
    parent.mkdir()
    parent.chmod(0o777)
    with pytest.raises(UserError, match=r"/open has mode 777.*chmod o-w .*/open"):
        check_cache_dir(parent / "cache")
    parent.chmod(0o1777)
    check_cache_dir(parent / "cache")
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="file"):
        check_cache_dir(tmp_path / "file")


def test_a_run_with_flags_of_another_jaxlib_starts(tmp_path: Path) -> None:
    code = (
        "import sys; from ridgeline.configs.schema import Config; from ridgeline.launch import cluster, environment\n"
        "here = cluster.describe({}, platform='cpu')\n"
        "settings = environment.prepare(Config.model_validate({'runtime': {'platform': 'cpu'}}), here)\n"
        "assert 'jax' not in sys.modules\n"
        "import jax; print(jax.device_count(), *environment.lines(settings), sep='\\n')"
    )
    env = {**os.environ, "XLA_FLAGS": "--xla_gpu_graph_level=0 --xla_force_host_platform_device_count=3", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("3\n")
    assert "NOT PASSED" in done.stdout


def offloading(*overrides: str) -> Config:
    """405B with its block inputs in host memory: 126 layers x 8,192 tokens x 16,384 x 2 bytes = 33.8 GB for every row of a microbatch."""
    names = "compute.remat.names=[block_input]"
    shared = ("data.seq_len=8192", "data.batch_size=256", "compute.remat.policy=offload", names, "trainer.accumulation=1")
    return load("models/llama-3.1-405b", [*shared, *overrides]).config


def test_pinned_memory_for_offloaded_activations_is_set_from_the_plan_and_shown() -> None:
    rows = 33.8e9  # of four rows per device, one process per device
    limit = pool_limit_gib(offloading(), {"fsdp": 64}, local_devices=1, local_processes=8, node_bytes=2 * 10**12)
    assert limit is not None and 4 * rows < limit * 2**30 < 1.3 * 4 * rows
    (setting,) = (s for s in choose(Host("hopper", "9.9", None, limit), CONFIG, {}, supports_all) if "HOST_MEMORY" in s.name)
    assert setting.value == str(limit) and any(f"{setting.name}={limit}" in line for line in lines([setting]))


def test_what_fits_into_xlas_own_pool_and_what_is_not_offloaded_sets_nothing() -> None:
    few = offloading("trainer.accumulation=4")
    assert pool_limit_gib(few, {"fsdp": 64}, local_devices=1, local_processes=8, node_bytes=2 * 10**12) is None
    assert pool_limit_gib(few, {"fsdp": 64}, local_devices=8, local_processes=1, node_bytes=2 * 10**12) is not None  # all of a node's
    kept = offloading("compute.remat.policy=full", "compute.remat.names=[]")
    assert pool_limit_gib(kept, {"fsdp": 64}, local_devices=8, local_processes=1, node_bytes=10**9) is None


def test_the_processes_of_a_node_do_not_exceed_its_memory_and_too_little_is_refused() -> None:
    limit = pool_limit_gib(offloading(), {"fsdp": 64}, local_devices=1, local_processes=8, node_bytes=1100 * 2**30)
    assert limit == 138  # an eighth of the node, less than the margin asks for
    with pytest.raises(UserError, match=r"keeps 1082 GB of activations.*which has 1000 GB.*trainer\.accumulation") as caught:
        pool_limit_gib(offloading(), {"fsdp": 64}, local_devices=1, local_processes=8, node_bytes=10**12)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("own", ["64", "lots"])
def test_a_users_limit_that_is_too_small_is_refused_and_a_larger_one_kept(own: str) -> None:
    name = "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"
    with pytest.raises(UserError, match=f"{name}={own}: .* need 158"):
        choose(Host("hopper", "9.9", None, 158), CONFIG, {name: own}, supports_all)
    kept = {s.name: s for s in choose(Host("hopper", "9.9", None, 158), CONFIG, {name: "400"}, supports_all)}
    assert kept[name].value == "400" and kept[name].chosen == "user"


def test_the_limit_of_a_run_follows_its_mesh_and_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ridgeline.launch.environment.gpu_generation", lambda: "hopper")
    monkeypatch.setattr("ridgeline.launch.environment.memory_bytes", lambda: 2 * 10**12)
    here = Cluster("test", 64, 0, "id", local_processes=8, devices=LocalDevices((0,), "given"))
    env: dict[str, str] = {"JAX_PLATFORMS": "cuda"}
    prepare(offloading("mesh.fsdp=64"), here, env)
    assert env["XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"] == "158"


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_an_axis_of_the_remaining_devices_has_the_settings_of_its_size(seed: int) -> None:
    draw = random.Random(seed)
    sizes = {axis: draw.choice((1, 2, 4)) for axis in ("data", "fsdp", "tensor", "context")}
    here = Cluster("test", math.prod(sizes.values()), 0, "id", local_processes=1, devices=LocalDevices((0,), "given"))
    mesh, rest = [f"mesh.{axis}={size}" for axis, size in sizes.items()], draw.choice(list(sizes))
    env: list[dict[str, str]] = [{"JAX_PLATFORMS": "cuda"}, {"JAX_PLATFORMS": "cuda"}]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ridgeline.launch.environment.gpu_generation", lambda: "hopper")
        for overrides, into in zip((mesh, [*mesh, f"mesh.{rest}=-1"]), env, strict=True):
            prepare(load("models/llama-3.1-8b", ["mesh.fsdp=1", "data.batch_size=64", *overrides]).config, here, into)
    assert env[0] == env[1]
    assert ("combine_threshold" in env[0]["XLA_FLAGS"]) == (sizes["fsdp"] > 1)


def test_a_mesh_that_does_not_fit_is_left_to_the_run_that_refuses_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ridgeline.launch.environment.gpu_generation", lambda: "hopper")
    here = Cluster("test", 6, 0, "id", local_processes=1, devices=LocalDevices((0,), "given"))
    assert prepare(load("models/llama-3.1-8b", ["mesh.data=4"]).config, here, {"JAX_PLATFORMS": "cuda"})


LAYER_8B = 2 * 4096 * (32 + 8) * 128 + 3 * 4096 * 14336 + 2 * 4096 + 4096 // 32
"""Attention, MLP, norms, and a layer's share of the final norm."""
LIMIT = "--xla_gpu_experimental_parallel_collective_overlap_limit"


def flags(*overrides: str) -> dict[str, str]:
    base = ("precision.compute=bfloat16", "mesh.fsdp=1", "data.batch_size=64")
    return {name: value for name, value, _ in overlap_flags(load("models/llama-3.1-8b", [*base, *overrides]).config)}


@pytest.mark.parametrize(("mesh", "pieces"), [(("mesh.fsdp=64",), 1), (("mesh.fsdp=-1",), 1), (("mesh.fsdp=16", "mesh.tensor=4"), 4)])
def test_what_is_combined_is_one_layer_in_the_dtype_that_moves(mesh: tuple[str, ...], pieces: int) -> None:
    found = flags(*mesh)
    assert int(found["--xla_gpu_all_gather_combine_threshold_bytes"]) == LAYER_8B * 2 // pieces
    assert int(found["--xla_gpu_reduce_scatter_combine_threshold_bytes"]) == LAYER_8B * 4 // pieces
    narrow = flags(*mesh, "precision.gradients=bfloat16")
    assert int(narrow["--xla_gpu_reduce_scatter_combine_threshold_bytes"]) == LAYER_8B * 2 // pieces
    for matmul in ("fp8", "fp8_delayed", *(("mxfp8",) if pieces == 1 else ())):  # quantized before they are gathered
        assert int(flags(*mesh, f"precision.matmul={matmul}")["--xla_gpu_all_gather_combine_threshold_bytes"]) == LAYER_8B // pieces
    assert pieces > 1 or flags(*mesh, "precision.matmul=nvfp4") == found


@pytest.mark.parametrize("model", ["mixtral-8x7b", "qwen3-30b-a3b", "gpt-oss-20b", "llama-4-scout-17b-16e"])
@pytest.mark.parametrize(("tensor", "expert"), [(1, 1), (1, 2), (2, 4), (1, 8)])
def test_what_is_combined_are_the_experts_of_a_device_in_one_layer(model: str, tensor: int, expert: int) -> None:
    """Not those of other devices: the weights of several layers would be gathered at once."""
    axes = {"fsdp": 4, "tensor": tensor, "expert": expert}
    config = load(f"models/{model}", ["data.batch_size=64", *(f"mesh.{axis}={size}" for axis, size in axes.items())]).config
    found = {name: value for name, value, _ in overlap_flags(config)}
    weights = LocalSizes.of(config, axes).gathered_layer_weights
    assert int(found["--xla_gpu_all_gather_combine_threshold_bytes"]) == pytest.approx(2 * weights, rel=0.01)


@pytest.mark.parametrize(
    ("mesh", "limit"),
    [
        (("mesh.fsdp=64",), "3"),
        (("mesh.fsdp=32", "mesh.tensor=2"), "3"),
        (("mesh.fsdp=8", "mesh.tensor=8"), "2"),
        (("mesh.tensor=8",), "2"),
        (("mesh.fsdp=32", "mesh.tensor=2", "compute.tensor_overlap=ring"), "2"),
        (("mesh.fsdp=64", "compute.tensor_overlap=ring"), "3"),
    ],
)
def test_a_wide_tensor_axis_leaves_room_for_fewer_collectives_at_once(mesh: tuple[str, ...], limit: str) -> None:
    assert flags(*mesh)[LIMIT] == limit


def test_data_parallelism_alone_changes_nothing() -> None:
    assert flags("mesh.data=8") == {}


# The CUDA plugin on machines without a GPU.

PROBE = """
import os, sys
from ridgeline.launch.cuda_plugin import hide_unusable_cuda_plugin
hide_unusable_cuda_plugin()
print("hidden" if "jax_plugins.xla_cuda12" in sys.modules else "as it is")
"""


def probe(more: str = "", **variables: str) -> subprocess.CompletedProcess[str]:
    env = {name: value for name, value in os.environ.items() if name not in ("JAX_PLATFORMS", "XLA_FLAGS")} | variables
    return subprocess.run([sys.executable, "-c", PROBE + more], env=env, capture_output=True, text=True, check=True)


@pytest.mark.skipif(has_nvidia_hardware(), reason="this machine has a GPU")
@pytest.mark.skipif(PathFinder.find_spec("jax_cuda12_plugin") is None, reason="the extra `aot` is not installed")
def test_jax_starts_without_a_word_about_cuda_where_the_plugin_cannot_work() -> None:
    done = probe("import jax\nprint(jax.devices())\nfrom ridgeline.trainer.aot.compile import check_packages\ncheck_packages()")
    assert done.stderr == ""
    assert done.stdout.splitlines() == ["hidden", "[CpuDevice(id=0)]"], "and compiling ahead of time still finds the plugin"
    assert probe(JAX_PLATFORMS="cuda,cpu").stdout == "as it is\n"


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("sys/bus/pci/devices/0000:17:00.0/vendor", "0x10de\n"),  # a GPU without a driver: its error must be seen
        ("proc/driver/nvidia/version", ""),
        ("dev/nvidia0", ""),
        ("dev/nvidiactl", ""),
        ("dev/nvhost-gpu", ""),
        ("dev/dxg", ""),
    ],
)
def test_nvidia_hardware_is_found_with_and_without_a_driver(tmp_path: Path, file: str, content: str) -> None:
    for other in ("sys/bus/pci/devices/0000:00:01.0/vendor", "dev/nvme0"):
        (tmp_path / other).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / other).write_text("0x8086\n")
    assert not has_nvidia_hardware(tmp_path)
    (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / file).write_text(content)
    assert has_nvidia_hardware(tmp_path)
