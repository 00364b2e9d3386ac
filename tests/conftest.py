"""Before anything imports jax: eight virtual CPU devices for every test, and one cache of compiled programs for all of them."""

import atexit
import gc
import os
import shutil
import signal
import tempfile
from pathlib import Path

import pytest

from tests.xla_flags import EIGHT_DEVICES

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ.setdefault("XLA_FLAGS", EIGHT_DEVICES)

# What one test compiled the next one loads, in every worker and every process that a test starts: they inherit this. Each run of the
# suite begins with an empty one.
if "PYTEST_XDIST_WORKER" not in os.environ:
    os.environ["JAX_COMPILATION_CACHE_DIR"] = tempfile.mkdtemp(prefix="ridge-tests-")
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "0"
    atexit.register(shutil.rmtree, os.environ["JAX_COMPILATION_CACHE_DIR"], ignore_errors=True)
    os.environ["RIDGE_CACHE"] = os.path.join(os.environ["JAX_COMPILATION_CACHE_DIR"], "ridge")  # not the user's own

# Most objects of a worker stay: modules, programs, traces. At Python's default of 700 new ones per collection, collecting them takes a
# tenth of the CPU time of tests that trace and compile.
gc.set_threshold(50_000, 20, 50)

# A suite started in the background of a script inherits an ignored Ctrl-C and would hand it on to the commands it tests.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

LONGEST = (
    "docs/test_commands",
    "sharding/test_equality",
    "trainer/test_hang_runs",
    "trainer/test_run",
    "launch/test_doctor",
    "launch/test_launch",
    "planner/test_collectives_gpu",
    "trainer/test_aot",
    "planner/test_memory_live",
    "launch/test_link",
    "sharding/test_collective_budget",
    "trainer/test_nan_search",
    "cli/test_compile",
    "launch/test_overlap_compiled",
    "cli/test_plan",
    "cli/test_scale",
    "trainer/test_fp8_training",
    "trainer/test_gpu_bench",
    "trainer/test_lora",
    "trainer/test_step",
    "trainer/test_preference",
    "trainer/test_rollback",
    "trainer/test_policy",
    "cli/test_recipes",
    "cli/test_init",
    "trainer/test_continued",
    "cli/test_bench",
    "models/test_attention",
    "parity/test_families",
)
"""Files that take longest: begun first, so that no worker waits at the end for one that was begun last."""


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist reads the groups
def pytest_collection_modifyitems(items):
    """Keep each file in one worker, which prepares and compiles its things once, and begin with the longest."""
    root = Path(__file__).parent
    order = {root / f"{name}.py": position for position, name in enumerate(LONGEST)}
    items.sort(key=lambda item: order.get(item.path, len(order)))
    for item in items:
        if item.get_closest_marker("xdist_group") is None:
            item.add_marker(pytest.mark.xdist_group(str(item.path.relative_to(root))))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_logreport(report):
    """Name a test without its group, which pytest-xdist writes behind the name: a second try without xdist looks for what failed."""
    name, at, group = report.nodeid.rpartition("@")
    if at and "]" not in group and "PYTEST_XDIST_WORKER" not in os.environ:
        report.nodeid = name


@pytest.fixture(scope="module")
def quick_compile():
    """A module whose programs run for milliseconds: their machine code stays unoptimized, and does not outlive it in the process."""
    import jax

    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)
    jax.clear_caches()
