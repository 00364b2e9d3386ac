"""Flags of XLA for the tests, whose programs run for milliseconds: to compile them takes longer than to run them.

The commands of README and docs, the quickstart and the benchmarks run with XLA's defaults, and so do programs compiled for GPUs.
"""

from importlib.metadata import version

_WITHOUT_MLIR = "--xla_cpu_use_fusion_emitters=false " if version("jaxlib") < "0.11" else ""
"""Later versions do not have the flag, and end a process that sets it."""
QUICK_XLA = f"{_WITHOUT_MLIR}--xla_backend_optimization_level=0 --xla_cpu_max_isa=AVX"
"""A step of a small model compiles in a sixth of the CPU time: LLVM optimizes nothing, and fusions skip MLIR. Without
instructions that multiply and add with one rounding (FMA, newer than AVX), programs that fuse other operations round alike."""
EIGHT_DEVICES = f"--xla_force_host_platform_device_count=8 {QUICK_XLA}"
"""Of the test process and its workers. Processes that need the platform's own number of devices get QUICK_XLA."""
