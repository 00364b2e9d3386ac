"""Bandwidth of collectives beside what the links of the run's cluster promise."""

import json
import subprocess
import sys

import pytest

from ridgeline.configs.cluster import load_cluster
from ridgeline.configs.dump import to_yaml
from ridgeline.configs.errors import UserError
from ridgeline.configs.schema import Config
from ridgeline.explain.trace.analysis import analyze
from ridgeline.explain.trace.capture import find_capture
from ridgeline.explain.trace.load import load_profile
from ridgeline.planner.calibration import load_calibration
from ridgeline.planner.communication import time_s
from ridgeline.planner.links import Fabric
from ridgeline.rundir.analysis import to_json
from tests.explain.xspace import gpu, host, kernel, step, write

HLO = """HloModule jit_train_step, is_scheduled=true, num_partitions=4

%add (x: f32[], y: f32[]) -> f32[] {
  %x = f32[] parameter(0)
  %y = f32[] parameter(1)
  ROOT %sum = f32[] add(%x, %y)
}

ENTRY %main (p: f32[1048576]) -> f32[1048576] {
  %p = f32[1048576]{0} parameter(0)
  ROOT %all-reduce.1 = f32[1048576]{0} all-reduce(%p), channel_id=1, replica_groups={{0,1,2,3}}, to_apply=%add
}
"""
SIZE_BYTES = 4 * 2**20


@pytest.fixture
def run(tmp_path):
    """Two steps of one all-reduce over four GPUs of a mesh whose fsdp axis takes what is left."""
    (tmp_path / "run.json").write_text("{}")
    (tmp_path / "config.yaml").write_text(to_yaml(Config.model_validate({"mesh": {"fsdp": -1}})))
    directory = tmp_path / "tensorboard" / "plugins" / "profile" / "steps0000007-0000008"
    planes = [gpu(n, {"Stream #1": [kernel("ncclKernel", 100 * s, 100 * s + 80, "all-reduce.1") for s in range(2)]}) for n in range(4)]
    write(directory / "node.xplane.pb", [*planes, host({"python": [step(7, 0, 100), step(8, 100, 200)]})])
    (directory / "jit_train_step.hlo.txt").write_text(HLO)
    (directory / "capture.json").write_text(json.dumps({"num_devices": 4}))
    return tmp_path


def collective(run):
    (found,) = to_json(analyze(load_profile(find_capture(run))))["collectives"]
    return found


def test_without_a_cluster_there_is_nothing_to_compare_with(run):
    found = collective(run)
    assert found["axes"] == ("fsdp",)  # a size of -1 is what the other axes leave
    assert found["bus_bandwidth"] == pytest.approx(SIZE_BYTES / 80e-6 * 2 * 3 / 4)
    assert found["planned_bus_bandwidth"] is None


@pytest.mark.parametrize("source", ["plan", "submission"])
def test_the_links_of_the_runs_own_cluster_give_the_plan(run, source):
    if source == "plan":
        (run / "plan.json").write_text(json.dumps({"cluster": "dgx-h100"}))
    else:
        (run / "slurm" / "1").mkdir(parents=True)
        (run / "slurm" / "1" / "cluster.yaml").write_text(load_cluster("dgx-h100").path.read_text())
    fabric = Fabric.from_cluster(load_cluster("dgx-h100").config, load_calibration(None), num_devices=4)
    sizes = {"pipeline": 1, "data": 1, "fsdp": 4, "context": 1, "tensor": 1, "expert": 1}
    seconds = time_s("all-reduce", SIZE_BYTES, fabric.axes_group(sizes, ("fsdp",))).seconds
    planned = SIZE_BYTES / seconds * 2 * 3 / 4
    assert 5e10 < planned < 4.5e11  # NVLink 4, latency and bandwidth
    assert collective(run)["planned_bus_bandwidth"] == pytest.approx(planned)
    if source == "plan":  # as a run does by itself
        directory = find_capture(run).directory
        subprocess.run([sys.executable, "-m", "ridgeline.explain.trace.background", str(directory), "1"], check=True)
        saved = json.loads((directory / "analysis.json").read_text())
        assert saved["collectives"][0]["planned_bus_bandwidth"] == pytest.approx(planned)


def test_a_cluster_that_does_not_exist_is_refused_and_one_that_is_gone_is_not(run):
    with pytest.raises(UserError, match="cluster 'dgx-h1' not found"):
        load_profile(find_capture(run), cluster="dgx-h1")
    (run / "plan.json").write_text(json.dumps({"cluster": "of-another-machine"}))
    assert collective(run)["planned_bus_bandwidth"] is None
