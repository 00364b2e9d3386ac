"""Before anything imports jax: eight virtual CPU devices for every test, and one cache of compiled programs for all of them."""

import atexit
import gc
import os
import shutil
import signal
import tempfile
from pathlib import Path

import pytest

from tests.sampling import LONGEST, of_commit
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


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist reads the groups
def pytest_collection_modifyitems(config, items):
    """Of the longest files keep the tests that are drawn for the commit; keep each file in one worker, which prepares and compiles its
    things once, and begin with the longest. A file that the command line names runs as a whole."""
    root = Path(__file__).parent
    order = {root / f"{name}.py": position for position, name in enumerate(LONGEST)}
    named = {(config.invocation_params.dir / argument.partition("::")[0]).resolve() for argument in config.args}
    kept = of_commit([None if item.path in named else order.get(item.path) for item in items])
    config.hook.pytest_deselected(items=[item for item, keep in zip(items, kept, strict=True) if not keep])
    items[:] = [item for item, keep in zip(items, kept, strict=True) if keep]
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
