"""The process that compiles ahead of time: `python -m ridgeline.trainer.aot.worker DIRECTORY COUNT PARENT`, started by
trainer.aot.compile in the process PARENT.

In each of DIRECTORY/0, 1, ... it reads request.json and config.yaml, and writes result.json, step.hlo.txt and (by XLA's dump) the buffer
assignment. It is a separate process because XLA aborts on errors (an unknown flag, no ptxas), and because its platform and flags must be
set before JAX is imported.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

from ridgeline.configs.errors import UserError
from ridgeline.configs.load import from_resolved
from ridgeline.planner.hardware import hardware
from ridgeline.trainer.aot.compile import END_OF_REQUEST


def main(directory: Path, count: int) -> int:
    """Compile each request. Return 0, or 2 when at least one failed; its result.json has the reason."""
    worst = 0
    for place in (directory / str(number) for number in range(count)):
        request = json.loads((place / "request.json").read_bytes())
        try:
            result = _compile(request, place)
        except UserError as error:
            result = {"error": str(error)}
        for dumped in (directory / "dump").glob("*"):
            dumped.rename(place / dumped.name)
        (place / "result.json").write_text(json.dumps(result, indent=1))
        os.write(2, END_OF_REQUEST.encode())  # unbuffered, as XLA's own lines
        worst = max(worst, 2 if "error" in result else 0)
    return worst


def _compile(request: dict[str, Any], directory: Path) -> dict[str, Any]:
    import jax
    from jax.experimental import topologies

    from ridgeline.trainer.aot.target import compute_capability, target_config
    from ridgeline.trainer.prepare import prepare
    from ridgeline.trainer.step import abstract_batch

    config = from_resolved(directory / "config.yaml")
    device = hardware(request["device"])
    _set_attention_target(compute_capability(device))
    _set_pallas_target(compute_capability(device))
    _keep_host_memory()
    topology = topologies.get_topology_desc(
        platform="cuda",
        topology_name="",
        target_config=target_config(device),
        topology=f"1x{request['nodes']}x{request['devices_per_node']}",
    )
    # Every device of such a topology has slice 0; its process index is that of its node.
    parts = prepare(config, topology.devices, lambda d: d.process_index)
    start_s = time.perf_counter()
    traced = parts.train_step.trace(parts.abstract, abstract_batch(config, parts.partitioner))
    traced_s = time.perf_counter()
    lowered = traced.lower(lowering_platforms=("cuda",))
    lowered_s = time.perf_counter()
    compiled = lowered.compile()
    compiled_s = time.perf_counter()
    (directory / "step.hlo.txt").write_text(compiled.as_text())
    sizes = compiled.memory_analysis()
    on_device = sizes.argument_size_in_bytes + sizes.output_size_in_bytes - sizes.alias_size_in_bytes + sizes.temp_size_in_bytes
    return {
        "argument_bytes": sizes.argument_size_in_bytes,
        "host_argument_bytes": sizes.host_argument_size_in_bytes,
        "host_temp_bytes": sizes.host_temp_size_in_bytes,
        "output_bytes": sizes.output_size_in_bytes,
        "alias_bytes": sizes.alias_size_in_bytes,
        "temp_bytes": sizes.temp_size_in_bytes,
        "peak_bytes": min(sizes.peak_memory_in_bytes, on_device),  # XLA reports the peak of host memory if that is larger
        "trace_s": traced_s - start_s,
        "lower_s": lowered_s - traced_s,
        "compile_s": compiled_s - lowered_s,
        "mesh": dict(parts.mesh.shape),
        "leaves": _leaves(parts.abstract),
        "versions": {"jax": jax.__version__, "jaxlib": jax.lib.__version__},
    }


def _leaves(abstract: Any) -> list[dict[str, Any]]:
    """Return path, shape and bytes per device of every array of the train state, in argument order."""
    import jax

    found = []
    for path, leaf in jax.tree_util.tree_leaves_with_path(abstract):
        local = leaf.sharding.shard_shape(leaf.shape)
        count = 1
        for dim in local:
            count *= dim
        name = "".join(_key(key) for key in path).lstrip(".")
        found.append({"name": name, "shape": list(leaf.shape), "local_shape": list(local), "bytes": count * leaf.dtype.itemsize})
    return found


def _key(key: Any) -> str:
    for attribute in ("key", "name", "idx"):
        if hasattr(key, attribute):
            return f".{getattr(key, attribute)}"
    return f".{key}"


def _set_attention_target(capability: tuple[int, int]) -> None:
    """Set the target of JAX's cuDNN attention: its checks query the GPU of this process, which has none (jax 0.10 to 0.12)."""
    import jax._src.cudnn.fused_attention_stablehlo as attention

    from ridgeline.trainer.aot.target import CUDNN_VERSION

    def at_least(wanted: str) -> bool:
        return capability >= tuple(int(part) for part in wanted.split("."))

    def equal(wanted: str) -> bool:
        return capability == tuple(int(part) for part in wanted.split("."))

    major, minor, patch = CUDNN_VERSION
    attention.check_cudnn_version = lambda: major * 10000 + minor * 100 + patch
    attention.check_compute_capability = at_least
    attention.is_cuda_compute_capability_equal = equal


def _set_pallas_target(capability: tuple[int, int]) -> None:
    """Set the target of Pallas kernels: from jax 0.11 on their lowering queries the GPU of this process, which has none."""
    if importlib.util.find_spec("jax._src.pallas.triton.gpu_info") is None:
        return
    target = importlib.import_module("jax._src.pallas.triton.gpu_info")
    major, minor = capability
    found = target.GpuInfo(gpu_version=None, arch_name=f"{major}.{minor}", compute_capability=10 * major + minor)
    vars(target)["get_gpu_info"] = lambda: found


def _keep_host_memory() -> None:
    """Skip JAX's comparison of the memory kinds of results with the executable's: that of a topology has none (sharding/host.py)."""
    import jax._src.interpreters.pxla as pxla

    vars(pxla)["_maybe_get_and_check_out_shardings"] = lambda executable, shardings, *rest: shardings


def end_with_parent(parent: int) -> None:
    """Exit soon after the process that started this one has ended, even by SIGKILL: nothing would read the result."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


if __name__ == "__main__":
    end_with_parent(int(sys.argv[3]))
    sys.exit(main(Path(sys.argv[1]), int(sys.argv[2])))
