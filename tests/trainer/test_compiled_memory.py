"""What a compiled step needs is what a device allocates for it, the gaps in XLA's heap included; over the saved compiled steps."""

import json
from pathlib import Path

import pytest

from ridgeline.configs.cluster import load_cluster
from ridgeline.configs.mesh import resolve_sizes
from ridgeline.planner.config_changes import fitting_changes
from ridgeline.trainer.aot.compile import Compiled
from ridgeline.trainer.aot.report import build_report, report_json, smallest_change
from tests.planner.compile_table import SIZES, request
from tests.sampling import drawn

TABLES = [
    json.loads((Path(__file__).parents[1] / "planner" / f"compiled_steps{name}.json").read_text()) for name in ("", "_overlap", "_long")
]
STEPS = [(case, table["how"]) for table in TABLES for case in table["cases"] if "peak_bytes" in case]
PROGRAM = "HloModule step, is_scheduled=true\n\nENTRY %main (a: f32[4]) -> f32[4] {\n  ROOT %a = f32[4]{0} parameter(0)\n}\n"


def allocated(case):
    """Bytes of a step's arguments, its own outputs and its heap."""
    return case["argument_bytes"] + case["output_bytes"] - case["alias_bytes"] + case["temp_bytes"]


def gap(case):
    return allocated(case) - case["peak_bytes"]


def compiled(case, mesh):
    """A saved step; its program is not saved."""
    rest = {"host_argument_bytes": 0, "host_temp_bytes": 0, "trace_s": 0.0, "lower_s": 0.0, "compile_s": 0.0, "leaves": [], "versions": {}}
    sizes = {name: case[name] for name in SIZES}
    return Compiled(**sizes, **rest, mesh=mesh, hlo_text=PROGRAM, buffers_text=None, live_ranges_text=None)


def report(case, how, capacity_bytes):
    """The report of a saved step on devices of which this many bytes may be used."""
    asked = request(case, how)
    share = (capacity_bytes + 0.5) / asked.device.memory_bytes
    cluster = load_cluster("dgx-h100").config.model_copy(update={"utilisation_cap": share})
    mesh = resolve_sizes(asked.config.mesh, asked.devices)
    return asked, cluster, build_report(asked, cluster, compiled(case, mesh))


def test_saved_steps_have_gaps():
    shares = [gap(case) / case["temp_bytes"] for case, _ in STEPS]
    assert min(shares) > -1e-5 and sum(share > 0.02 for share in shares) > 10 and max(shares) > 0.04


@pytest.mark.parametrize("number", drawn([n for n, (case, _) in enumerate(STEPS) if gap(case) > 0.02 * case["temp_bytes"]], 3))
def test_a_step_fits_only_where_its_heap_with_gaps_does(number):
    case, how = STEPS[number]
    _, _, roomy = report(case, how, 10**12)
    needed = allocated(case) + roomy.reserve_bytes
    assert roomy.fits and report_json(roomy)["needed_bytes"] == needed
    assert report(case, how, needed)[2].fits
    for short in (1, gap(case) // 2, gap(case) - 1):
        asked, cluster, found = report(case, how, needed - short)
        assert not found.fits, "more than the peak that is in use is not enough"
    made = report_json(found)
    assert (made["peak_bytes"], made["gap_bytes"]) == (case["peak_bytes"], gap(case))
    room = found.capacity_bytes - (allocated(case) - found.estimate.compiled_bytes)
    assert smallest_change(asked, cluster, found) == fitting_changes(asked.config, found.compiled.mesh, room)
