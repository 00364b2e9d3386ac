"""Real compiles for GPUs that are not here: sizes that must add up, every GPU of the catalog, and each way it can fail."""

import contextlib
import math
import os
import re
import subprocess
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from ridgeline.configs.errors import UserError
from ridgeline.hlo.parse import parse
from ridgeline.hlo.roofline import total_flops
from ridgeline.launch.environment import run_flags
from ridgeline.planner.hardware import catalog, hardware
from ridgeline.planner.parameters import matmul_weights
from ridgeline.trainer.aot import compile as aot
from ridgeline.trainer.aot.compile import Compiled, Request, compile_ahead, compile_many
from ridgeline.trainer.aot.report import build_report
from ridgeline.trainer.aot.simulated import matmul_shape
from ridgeline.trainer.aot.target import compute_capability, target_config
from tests.sampling import drawn
from tests.trainer.gpu_models import QUICK, cluster, small

pytestmark = pytest.mark.xdist_group("aot")  # the steps are compiled once
GPUS = [device.name for device in catalog() if device.target is not None]
STEPS = ("a100-80gb", "h200-sxm", "b200", "b300")
"""One GPU of each generation: the whole step is compiled for these."""
FSDP8 = ("mesh.fsdp=8", "compute.attention.backend=auto")


@cache
def compiled():
    """The same small step on one device of every generation, what is refused, and last the step over eight H100s, in one process."""
    config = small("llama", "model.num_layers=1", "data.document_masking=false")
    requests = {name: Request.on(config, cluster(name, 1), 1) for name in STEPS}
    requests["indivisible"] = Request.on(small("llama", "mesh.fsdp=16"), cluster(), 1)
    requests["no such products"] = Request.on(small("llama", "precision.matmul=mxfp8", "mesh.fsdp=4"), cluster("h200-sxm", 4), 1)
    requests["eight"] = Request.on(small("llama", *FSDP8), cluster(), 1)
    requests["offloaded"] = Request.on(small("llama", *FSDP8, "optimizer.offload=true"), cluster(), 1)
    return dict(zip(requests, compile_many([replace(request, xla_flags=QUICK) for request in requests.values()]), strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("name", STEPS)
def test_the_step_is_compiled_for_every_generation(name):
    result = compiled()[name]
    assert isinstance(result, Compiled), result
    assert result.peak_bytes > result.argument_bytes > 0
    assert "is_scheduled=true" in result.hlo_text.splitlines()[0]


def test_the_generations_are_all_there_are():
    assert sorted(map(compute_capability, map(hardware, STEPS))) == sorted({compute_capability(hardware(name)) for name in GPUS})


EVERY_GPU = """
import sys
import jax, jax.numpy as jnp
from jax.experimental import topologies
from ridgeline.planner.hardware import hardware
from ridgeline.trainer.aot.target import target_config

for name in sys.argv[1:]:
    target = target_config(hardware(name))
    (device,) = topologies.get_topology_desc(platform="cuda", topology_name="", target_config=target, topology="1x1x1").devices
    x = jax.ShapeDtypeStruct((64, 64), jnp.bfloat16, sharding=jax.sharding.SingleDeviceSharding(device))
    text = jax.jit(lambda x: jnp.tanh(x @ x)).trace(x).lower(lowering_platforms=("cuda",)).compile().as_text()
    print(name, "is_scheduled=true" in text.splitlines()[0])
"""


@pytest.mark.slow
def test_every_gpu_of_the_catalog_can_be_compiled_for(tmp_path):
    """A product on each: within a generation only figures differ, and XLA takes all of them."""
    request = replace(Request.on(small("llama"), cluster(), 1), xla_flags=QUICK)
    env = aot.worker_environment(os.environ, request, tmp_path)
    done = subprocess.run([sys.executable, "-c", EVERY_GPU, *GPUS], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.splitlines() == [f"{name} True" for name in GPUS]


@pytest.mark.slow
def test_arguments_are_the_leaves_of_the_state_and_the_batch():
    result = compiled()["eight"]
    batch = 5 * 16 * 512 * 4 // 8
    assert result.argument_bytes == sum(leaf["bytes"] for leaf in result.leaves) + batch
    assert any(math.prod(leaf["local_shape"]) * 8 == math.prod(leaf["shape"]) for leaf in result.leaves)
    assert result.output_bytes >= result.alias_bytes > 0.99 * sum(leaf["bytes"] for leaf in result.leaves)


@pytest.mark.slow
def test_an_offloaded_optimizer_state_is_in_host_memory_and_that_of_two_parameters_at_most_on_the_device():
    plain, offloaded = compiled()["eight"], compiled()["offloaded"]
    assert isinstance(offloaded, Compiled), offloaded
    state = sum(leaf["bytes"] for leaf in offloaded.leaves if leaf["name"].startswith("opt_state") and leaf["shape"])
    assert offloaded.host_argument_bytes == plain.argument_bytes - offloaded.argument_bytes == state
    assert plain.host_argument_bytes == plain.host_temp_bytes == offloaded.host_temp_bytes == 0
    to_device, to_host = r"\S+ = \(\S+\}, \S+:S\(5\)\}", r"\S+ = \(\S+:S\(5\)\}, \S+\}"
    copies = re.findall(rf"^ +%?({to_device}|{to_host}), u32\[\]\) copy-start\(", offloaded.hlo_text, re.MULTILINE)
    into = [bool(re.match(to_device, copy)) for copy in copies]
    moments = sum(leaf["name"].startswith("opt_state") and bool(leaf["shape"]) for leaf in offloaded.leaves)
    assert into.count(True) == into.count(False) == moments
    on_device = [sum(1 if start else -1 for start in into[:end]) for end in range(len(into))]
    assert max(on_device) <= 2 * 2, "both moments of two parameters"


@pytest.mark.slow
def test_what_is_allocated_is_what_is_in_use_at_the_peak_and_the_gaps_of_the_heap():
    """Read from the buffer assignment; XLA's own peak has no gaps either."""
    result = compiled()["eight"]
    assert result.heap is not None and result.heap.bytes == result.temp_bytes
    assert 0 <= result.gap_bytes < 0.1 * result.temp_bytes
    assert result.allocated_bytes - result.gap_bytes == pytest.approx(result.peak_bytes, abs=0.001 * result.temp_bytes)


@pytest.mark.slow
def test_buffers_are_dumped_for_each_request_of_a_process():
    texts = [result.live_ranges_text for result in compiled().values() if isinstance(result, Compiled)]
    assert all(texts) and len(set(texts)) > 1


@pytest.mark.slow
@pytest.mark.parametrize("name", STEPS)
def test_attention_to_rows_of_one_document_is_cudnns_on_every_generation(name):
    calls = set(re.findall(r'custom_call_target="__cudnn\$fmha(\w+)"', compiled()[name].hlo_text))
    assert len(calls) == 2 and sum(call.endswith("Backward") for call in calls) == 1


TOKENS = 2**15
"""Of a row below."""
ROW = ("model.num_layers=1", f"model.max_seq_len={TOKENS}", f"data.seq_len={TOKENS}", "data.batch_size=2")
ATTENTION = {
    "cudnn": ("data.document_masking=false",),
    "cudnn, window": ("data.document_masking=false", "model.sliding_window=256", "model.head_dim=128"),
    "pallas, packed": (),
    "pallas, width of no kernel": ("model.head_dim=80", "compute.remat.policy=full"),
    "pallas, tensor": ("mesh.fsdp=2", "mesh.tensor=4"),
    "chunked": ("model.head_dim=256",),
}
"""What auto chooses on a GPU, and settings for which it does."""
CHOSEN = drawn(list(ATTENTION), 3)


@cache
def attention():
    """One layer for an H100 (or for eight) with each backend that auto chooses."""
    configs = {name: small("llama", *ROW, *ATTENTION[name]) for name in CHOSEN}
    places = [cluster("h100-sxm", config.mesh.fsdp * config.mesh.tensor) for config in configs.values()]
    requests = [Request.on(config, place, 1, xla_flags=QUICK) for config, place in zip(configs.values(), places, strict=True)]
    return dict(zip(configs, compile_many(requests), strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("name", CHOSEN)
def test_attention_is_a_fused_kernel_where_one_exists_and_nothing_in_the_step_has_the_size_of_scores_or_a_mask(name):
    result = attention()[name]
    assert isinstance(result, Compiled), result
    targets = re.findall(r'custom_call_target="([^"]*)"', result.hlo_text)
    fused = [target for target in targets if target.startswith(("__cudnn$fmha", "__gpu$xla.gpu.triton"))]
    kernels = {"cudnn": 2, "pallas": 4 if "compute.remat.policy=full" in ATTENTION[name] else 3, "chunked": 0}
    assert len(fused) == kernels[name.split(",")[0]]  # Pallas: gradients of queries and of keys apart
    elements = [math.prod(map(int, dims.split(","))) for dims in re.findall(r"\w\[(\d[\d,]*)\]", result.hlo_text)]
    assert max(elements) < TOKENS**2 / 4


LAYERS_IN_BLOCKS, BLOCKS, BLOCK = 5, 8, 128
"""Of the model whose attention runs in blocks; blocks of a row, and tokens of a block."""
AROUND_BLOCKS = [
    ("mesh.fsdp=8",),
    ("mesh.fsdp=4", "mesh.context=2", "compute.attention.context=ring"),
    ("mesh.data=8", "optimizer.kind=muon", "trainer.accumulation=2"),
]
"""Meshes, and an optimizer whose loops over layers are the last of the step, outside of its loop over microbatches."""


@cache
def in_blocks(*around):
    """A model whose attention runs in blocks, by the flags of a run: what to compile, and the compiled step."""
    settings = (f"model.num_layers={LAYERS_IN_BLOCKS}", f"data.seq_len={BLOCKS * BLOCK}", "compute.remat.policy=full")
    config = small("llama", *around, "compute.attention.backend=chunked", f"compute.attention.chunk={BLOCK}", *settings)
    flags, level = run_flags(config, "h100-sxm")
    request = Request.on(config, cluster(), 1, xla_flags=(*flags, *QUICK), optimization_level=level)
    return request, compile_many([request])[0]


@pytest.mark.slow
@pytest.mark.parametrize("settings", drawn(AROUND_BLOCKS, 1))
def test_attention_in_blocks_compiles_inside_of_a_loop_over_layers_that_xla_unrolls(settings):
    """By the flags of a run XLA runs two layers per turn; their loops over blocks then share bodies, and it ended with a failed check."""
    _, result = in_blocks(*settings)
    assert isinstance(result, Compiled), result
    loops = re.findall(r"body=%?([\w.-]+)", result.hlo_text)
    assert len(loops) == len(set(loops)) > 3, "no two loops share a body"
    assert parse(result.hlo_text).unknown_loops == [], "hidden counts are derived"


@pytest.mark.slow
def test_readers_of_a_compiled_step_count_the_blocks_of_attention():
    """Forward, recomputed and backward."""
    request, result = in_blocks("mesh.fsdp=8")
    assert isinstance(result, Compiled), result
    report = build_report(request, cluster(), result)
    assert report.uncounted_loops == ()
    model, rows, visited = request.config.model, request.config.data.batch_size // 8, BLOCKS * (BLOCKS + 1) / 2
    matmuls = [k for k in report.kernels if k.flops and re.search("attention/while/body/", k.op_name)]
    expected = LAYERS_IN_BLOCKS * rows * visited * (2 + 2 + 5) * 2 * model.num_heads * BLOCK**2 * model.head_width
    assert total_flops(matmuls) == expected
    assert all(2 * math.prod(matmul_shape(k)) == k.flops for k in matmuls), "heads and rows of a batch fill the device together"


@pytest.mark.slow
def test_the_zeros_of_attention_in_blocks_are_written_for_each_layer_apart():
    """XLA made one operation of those of all layers outside of the loop over layers, and kept them from the first to the last layer."""
    _, result = in_blocks("mesh.fsdp=8")
    assert isinstance(result, Compiled), result
    written = re.findall(r" = \(([^=]*)\) fusion\(\), kind=kLoop", result.hlo_text)
    stacks = [shapes for shapes in (re.findall(r"\w+\[(?:\d+,){4,}\d+\]", each) for each in written) if shapes]
    assert all(len(shapes) == len(set(shapes)) for shapes in stacks), stacks


def narrow(matmul, device, *mesh):
    """The step with one kind of narrow products, compiled by the flags of a run, with its request."""
    config = small("llama", f"precision.matmul={matmul}", *mesh, "compute.attention.backend=auto")
    flags, level = run_flags(config, device)
    request = Request.on(config, cluster(device, 4), 1, xla_flags=flags, optimization_level=level)
    return request, compile_many([request])[0]


def products_with_parameters(report):
    """The kernels of a layer that multiply, without those of attention."""
    return [k for k in report.kernels if k.dtype and k.component != "loss" and not k.name.startswith("pallas_call")]


@pytest.mark.slow
@pytest.mark.parametrize("matmul", drawn(["fp8", "fp8_delayed"], 1))
def test_every_product_of_a_layer_is_an_8_bit_kernel_in_fp8_and_none_is_in_bf16(matmul):
    """Seven matrices, forward and both gradients, by the run's own flags; on a small model XLA would merge what reads the same input.

    With the activation that XLA fuses into a matmul: where nothing is recomputed, it could not compile that kernel in float8.
    """
    activation = ("model.activation=gelu_tanh", "compute.remat.policy=none")
    request, result = narrow(matmul, "h200-sxm", "mesh.fsdp=2", "mesh.tensor=2", *activation)
    assert isinstance(result, Compiled), result
    config, report = request.config, build_report(request, cluster("h200-sxm", 4), result)
    products = products_with_parameters(report)
    assert {k.dtype[:2] for k in products} == {"f8"}, [(k.name, k.dtype, k.op_name) for k in products if k.dtype[:2] != "f8"]
    assert math.fsum(k.count for k in products) == 7 * 3 * config.model.num_layers
    assert all(report.rates(k)[0] == hardware("h200-sxm").peak_flops["float8"] for k in products)
    assert all(row.agrees for row in report.traffic), "parameters are gathered in 8 bits"
    small_sums = [c for c in report.collectives if c.kind == "all-reduce" and "fsdp" in (c.axes or ()) and c.bytes < 128]
    assert math.fsum(c.count for c in small_sums) <= 5, "of the step (loss, parameters, history): no layer waits for other rows' magnitudes"
    assert "f8e" not in compiled()["h200-sxm"].hlo_text


@pytest.mark.slow
@pytest.mark.parametrize("matmul", drawn(["mxfp8", "nvfp4"], 1))
def test_every_product_of_a_layer_is_a_block_scaled_kernel_where_the_gpu_has_them(matmul):
    """Rows and parameters cut; the gradients of nvfp4 read mxfp8."""
    request, result = narrow(matmul, "b200", "mesh.data=2", "mesh.fsdp=2")
    assert isinstance(result, Compiled), result
    config, report = request.config, build_report(request, cluster("b200", 4), result)
    products = products_with_parameters(report)
    count = {kind: math.fsum(k.count for k in products if k.dtype.startswith(kind)) for kind in ("f8", "f4")}
    forward = 7 * config.model.num_layers
    assert count == ({"f8": 2 * forward, "f4": forward} if matmul == "nvfp4" else {"f8": 3 * forward, "f4": 0})
    assert sum(count.values()) == math.fsum(k.count for k in products)
    tokens = config.data.batch_size * config.data.seq_len // 4
    weights = sum(matmul_weights(config.model).values()) * config.model.num_layers
    assert math.fsum(k.flops * k.count for k in products) == 6.0 * tokens * weights
    whole = tokens * config.model.mlp_dim
    results = re.findall(r"^ +(?:ROOT )?%?\S+ = (.+?) fusion\(", result.hlo_text, re.MULTILINE)
    wide = [dims for each in results for dims in re.findall(r"f32\[([\d,]+)\]", each) if math.prod(map(int, dims.split(","))) == whole]
    assert not wide, "activations of the MLP are quantized before they are transposed"
    gathered = {c.dtype[:2] for c in report.collectives if c.kind == "all-gather"}
    assert gathered == ({"f8", "bf"} if matmul == "mxfp8" else {"bf"}), "the tables of the vocabulary stay in 16 bits"
    assert all(row.agrees for row in report.traffic if row.where == "all"), "gathered in 8 or 16 bits, reduced in float32"


@pytest.mark.slow
def test_block_scaled_products_are_refused_where_there_are_none():
    error = compiled()["no such products"]
    assert isinstance(error, UserError)
    assert re.search(r"precision.matmul=mxfp8: h200-sxm .*has no block-scaled tensor cores \(.*b200.*use precision.matmul=fp8", str(error))


def test_targets_carry_the_figures_of_their_gpu():
    for device in catalog():
        if device.target is None:
            continue
        text = target_config(device)
        limit = int(re.search(r"device_memory_size: (\d+)", text)[1])  # type: ignore[index]
        assert 0.8 * limit == pytest.approx(0.95 * device.memory_bytes) and f"core_count: {device.cores}" in text  # XLA takes 80 % of it
    assert [compute_capability(hardware(name)) for name in ("a100-80gb", "h100-sxm", "b200", "b300")] == [(8, 0), (9, 0), (10, 0), (10, 3)]


def test_a_cluster_of_cpus_cannot_be_compiled_for():
    with pytest.raises(UserError, match=r"'cpu' cannot be compiled for ahead of time .*h100"):
        Request.on(small("llama"), cluster("cpu", 1), 1)


def test_more_nodes_than_the_cluster_has_are_refused():
    with pytest.raises(UserError, match="--nodes 3: test has 2 nodes"):
        Request.on(small("llama"), cluster(nodes=2), 3)


@pytest.mark.slow
def test_a_mesh_that_does_not_divide_is_an_error_and_affects_no_other_request():
    error = compiled()["indivisible"]
    assert isinstance(error, UserError) and "16" in str(error) and "8 devices" in str(error) and "\n" not in str(error)
    after = list(compiled().values())[list(compiled()).index("indivisible") + 1 :]
    assert any(isinstance(result, Compiled) for result in after)


@pytest.mark.slow
def test_a_crash_of_the_compiler_is_one_line_with_its_last_words():
    request = replace(Request.on(small("llama", *FSDP8), cluster(), 1), xla_flags=("--xla_no_such_flag=1",))
    with pytest.raises(UserError, match=r"the compiler failed \(.*xla_no_such_flag") as caught:
        compile_ahead(request)
    assert "\n" not in str(caught.value)


def test_a_compile_that_takes_too_long_is_ended():
    with pytest.raises(UserError, match=r"longer than 0\.5 s"):
        compile_ahead(Request.on(small("llama", *FSDP8), cluster(), 1), timeout_s=0.5)


@pytest.mark.parametrize(
    ("hidden", "named"),
    [
        (("jax_cuda12_plugin", "jax_cuda13_plugin"), "jax-cuda12-plugin"),
        (("nvidia.cudnn",), "nvidia-cudnn"),
        (("nvidia.cublas", "nvidia.cuda_nvcc"), "nvidia-cublas"),
    ],
)
def test_missing_packages_are_named_with_the_way_to_install_them(monkeypatch, hidden, named):
    found = aot.find_spec
    monkeypatch.setattr(aot, "find_spec", lambda name: None if name in (*hidden, "nvidia.cu13") else found(name))
    with pytest.raises(UserError, match=rf"{named}.*ridgeline\[aot\]"):
        aot.check_packages()


def test_without_ptxas_nothing_is_started(monkeypatch):
    monkeypatch.setattr(aot, "tool_directory", lambda: None)
    with pytest.raises(UserError, match="ptxas"):
        compile_ahead(Request.on(small("llama", *FSDP8), cluster(), 1))


def test_the_childs_flags_are_the_requests_and_not_those_of_the_user(tmp_path):
    request = replace(Request.on(small("llama"), cluster(), 1), xla_flags=("--xla_a=1",), optimization_level="O1")
    env = aot.worker_environment({"XLA_FLAGS": "--xla_b=1", "JAX_OPTIMIZATION_LEVEL": "O3", "PATH": "/bin"}, request, tmp_path)
    assert "--xla_a=1" in env["XLA_FLAGS"] and "--xla_b" not in env["XLA_FLAGS"]
    assert env["JAX_OPTIMIZATION_LEVEL"] == "O1" and env["JAX_PLATFORMS"] == "cpu"
    assert Path(env["PATH"].split(":")[0], "ptxas").is_file()


def test_the_parent_never_loads_jax():
    code = "import sys, trainer.aot.compile, trainer.aot.report; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


OWNER = """
import os, subprocess, sys, time
from ridgeline.trainer.aot.compile import _directory
code = "import sys, time; from ridgeline.trainer.aot.worker import end_with_parent; end_with_parent(int(sys.argv[1])); time.sleep(600)"
with _directory() as path:
    child = subprocess.Popen([sys.executable, "-c", code, str(os.getpid())])
    print(path, child.pid, flush=True)
    time.sleep(600)
"""


def test_a_killed_compile_leaves_no_process_and_no_directory(tmp_path, monkeypatch):
    """Its worker exits with it; the next compile removes its directory, and none of a living owner."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(aot.tempfile, "tempdir", None)
    owner = subprocess.Popen([sys.executable, "-c", OWNER], stdout=subprocess.PIPE, text=True)
    directory, child = owner.stdout.readline().split()
    os.utime(Path(directory) / aot.LOCK, (0, 0))
    with aot._directory() as other:
        assert Path(directory).exists()
        assert other.exists()
    owner.kill()
    owner.communicate(timeout=60)  # the worker holds the pipe too: it ends when the last of them has
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # init takes it away at any moment
        assert not Path(f"/proc/{child}/cmdline").read_bytes()
    with aot._directory():
        assert not Path(directory).exists()
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setattr(aot.tempfile, "tempdir", None)
