"""Clocks, power and quotas: sysfs and NVML from made files and a made library; the control groups of this machine are read too."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from ridgeline.explain.diagnosis.throttled import device_samples, most_throttled
from ridgeline.observe.clocks import AmdGpus, ClockWatch, Cpu, amd_cards, device_metrics, find_source, visible
from ridgeline.rundir.device_state import QUOTA, DeviceState
from ridgeline.rundir.events import EventLog, read_events


def write(root, **files):
    for name, text in files.items():
        path = root / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


class Clock:
    now_s = 0.0

    def __call__(self):
        return self.now_s


@pytest.mark.parametrize(
    ("membership", "top", "stopped"),
    [
        ("0::/job/step", "sys/fs/cgroup", lambda s: f"nr_periods 10\nthrottled_usec {int(s * 1e6)}\n"),
        ("3:cpu,cpuacct:/job/step", "sys/fs/cgroup/cpu,cpuacct", lambda s: f"throttled_time {int(s * 1e9)}\n"),
        ("1:cpu:/job/step\n0::/", "sys/fs/cgroup/cpu", lambda s: f"throttled_time {int(s * 1e9)}\n"),
    ],
)
def test_a_quota_of_a_control_group_or_of_one_above_it_is_seen(tmp_path, membership, top, stopped):
    clock = Clock()
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text(membership + "\n")
    (tmp_path / top / "job/step").mkdir(parents=True)
    stat = tmp_path / top / "job" / "cpu.stat"
    stat.write_text(stopped(5.0))
    cpu = Cpu(tmp_path, cores=[0, 1], clock=clock)
    assert cpu.available
    clock.now_s = 10.0
    (state,) = cpu.sample()
    assert (state.stopped_share, state.reasons) == (0.0, ())
    clock.now_s = 20.0
    stat.write_text(stopped(13.0))  # 8 s of both cores together, in 10 s
    (state,) = cpu.sample()
    assert state.stopped_share == pytest.approx(0.4)
    assert state.reasons == (QUOTA,)


def test_clocks_of_the_cores_a_process_may_use_are_averaged(tmp_path):
    for core, khz in ((0, 1_000_000), (1, 2_000_000), (2, 9_000_000)):
        write(tmp_path / f"sys/devices/system/cpu/cpu{core}/cpufreq", scaling_cur_freq=f"{khz}\n", base_frequency="3000000\n")
    (state,) = Cpu(tmp_path, cores=[0, 1]).sample()
    assert (state.clock_mhz, state.rated_mhz, state.stopped_share) == (1500.0, 3000.0, None)


def test_this_machine_has_either_states_or_a_reason_for_none():
    source, description = find_source("cpu", "cpu", [0], os.environ)
    assert description
    if source is not None:
        (state,) = source.sample()
        assert state.stopped_share is None or 0 <= state.stopped_share <= 1


def test_amd_gpus_are_read_from_sysfs(tmp_path):
    for card, level in ((1, "2100Mhz"), (0, "500Mhz")):
        device = tmp_path / f"pci/0000:{card}1:00.0"
        write(
            device,
            pp_dpm_sclk=f"0: 500Mhz {'*' * (level == '500Mhz')}\n1: 2100Mhz {'*' * (level == '2100Mhz')}\n",
            hwmon__hwmon3__power1_average="300000000\n",
            hwmon__hwmon3__power1_cap="500000000\n",
            hwmon__hwmon3__temp1_input="65000\n",
        )
        (tmp_path / f"sys/class/drm/card{card}").mkdir(parents=True)
        (tmp_path / f"sys/class/drm/card{card}/device").symlink_to(device)
    source, description = find_source("gpu", "AMD Instinct MI300X", [1, 0], {}, tmp_path)
    assert isinstance(source, AmdGpus)
    assert "amdgpu" in description
    fast, slow = source.sample()
    assert (fast.clock_mhz, fast.rated_mhz, slow.clock_mhz) == (2100.0, 2100.0, 500.0)
    assert (fast.power_w, fast.power_limit_w, fast.power_default_w, fast.temperature_c) == (300.0, 500.0, None, 65.0)
    assert len(amd_cards(tmp_path)) == 2


def test_a_gpu_without_a_source_is_reported(tmp_path):
    assert find_source("gpu", "Abacus 9", [0], {}, tmp_path) == (None, "no source of clocks for Abacus 9")


def test_visible_devices_are_those_of_cuda():
    gpus = {0: "GPU-aa", 1: "GPU-ab", 2: "GPU-c"}
    assert visible(gpus, None) == [0, 1, 2]
    assert visible(gpus, "2,0") == [2, 0]
    assert visible(gpus, "GPU-ab,nonsense,0") == [1]
    assert visible(gpus, "") == []


NVML = """
#include <stdio.h>
#include <string.h>
typedef int R; typedef void *D;
R nvmlInitWithFlags(unsigned f) { return 0; }
R nvmlInit_v2(void) { return 0; }
R nvmlDeviceGetCount_v2(unsigned *n) { *n = 2; return 0; }
R nvmlDeviceGetHandleByIndex_v2(unsigned i, D *d) { *d = (D)(long)(i + 1); return 0; }
R nvmlDeviceGetUUID(D d, char *text, unsigned n) { snprintf(text, n, "GPU-%ld", (long)d - 1); return 0; }
R nvmlDeviceGetClockInfo(D d, unsigned t, unsigned *v) { *v = (long)d == 1 ? 1900 : 600; return t == 1 ? 0 : 2; }
R nvmlDeviceGetMaxClockInfo(D d, unsigned t, unsigned *v) { *v = 1980; return t == 1 ? 0 : 2; }
R nvmlDeviceGetPowerUsage(D d, unsigned *v) { *v = 650000; return 0; }
R nvmlDeviceGetPowerManagementLimit(D d, unsigned *v) { *v = 700000; return 0; }
R nvmlDeviceGetPowerManagementDefaultLimit(D d, unsigned *v) { return 3; }
R nvmlDeviceGetCurrentClocksThrottleReasons(D d, unsigned long long *v) { *v = (long)d == 1 ? 0x4 : 0x44; return 0; }
R nvmlDeviceGetCurrentClocksEventReasons(D d, unsigned long long *v) { return nvmlDeviceGetCurrentClocksThrottleReasons(d, v); }
R nvmlDeviceGetTemperature(D d, unsigned t, unsigned *v) { *v = 60 + (long)d; return 0; }
const char *nvmlErrorString(R r) { return "no such thing"; }
"""
ASK = """
import json, sys
from dataclasses import asdict
from ridgeline.observe.clocks import find_source
source, description = find_source("gpu", "NVIDIA H100", json.loads(sys.argv[1]), json.loads(sys.argv[2]))
states = [asdict(s) for s in source.sample()] if source else None
print(json.dumps({"description": description, "states": states, "jax": "jax" in sys.modules}))
"""


@pytest.fixture(scope="module")
def ask(tmp_path_factory):
    """Ask for states in a process that finds a made libnvidia-ml.so.1, or none."""
    directory = tmp_path_factory.mktemp("nvml")
    (directory / "nvml.c").write_text(NVML)
    library = directory / "lib" / "libnvidia-ml.so.1"
    library.parent.mkdir()
    subprocess.run(["cc", "-shared", "-fPIC", "-w", "-o", str(library), str(directory / "nvml.c")], check=True)

    def ask(ids, environment, *, driver=True):
        path = {"LD_LIBRARY_PATH": str(library.parent)} if driver else {}
        command = [sys.executable, "-c", ASK, json.dumps(ids), json.dumps(environment)]
        root = Path(__file__).parents[2]
        done = subprocess.run(command, env={**os.environ, **path}, cwd=root, check=True, capture_output=True, text=True)
        return json.loads(done.stdout)

    return ask


def test_nvidia_gpus_are_read_through_nvml(ask):
    found = ask([0, 1], {})
    good, hot = found["states"]
    assert found["description"] == "NVML"
    assert not found["jax"]
    assert (good["clock_mhz"], good["rated_mhz"], good["power_w"], good["power_limit_w"]) == (1900, 1980, 650.0, 700.0)
    assert good["power_default_w"] is None  # not offered
    assert good["reasons"] == ["power cap"]
    assert hot["reasons"] == ["hardware thermal slowdown", "power cap"]
    assert hot["temperature_c"] == 62
    assert [state["clock_mhz"] for state in ask([0], {"CUDA_VISIBLE_DEVICES": "GPU-1"})["states"]] == [600]


def test_without_a_driver_there_is_a_reason_and_no_state(ask):
    found = ask([0], {}, driver=False)
    assert found["states"] is None
    assert found["description"].startswith("no NVIDIA driver: ")


class Slow:
    """A source that answers when it is let."""

    def __init__(self, states):
        import threading

        self.states, self.may, self.queried = states, threading.Event(), threading.Event()

    def sample(self):
        self.queried.set()
        assert self.may.wait(60)
        return self.states


def test_a_sample_never_holds_up_the_loop_and_becomes_an_event_and_metrics(tmp_path):
    states = [DeviceState("gpu:0", 1900.0, 1980.0, 600.0, temperature_c=60.0), DeviceState("gpu:1", 1700.0, power_w=650.0)]
    log, source = EventLog(tmp_path / "events.jsonl"), Slow(states)
    watch = ClockWatch(source, "made", log)
    assert watch.tick(10) == {}
    assert source.queried.wait(60)
    assert watch.tick(20) == {}  # the first is still being taken
    source.may.set()
    watch.close()
    assert watch.tick(30) == {"train_device/clock_mhz": 1700.0, "train_device/power_w": 1250.0, "train_device/temperature_c": 60.0}
    log.close()
    events = read_events([tmp_path / "events.jsonl"])
    assert [e.fields["step"] for e in events if e.kind == "device_state"] == [10, 20]
    rows = device_samples(events)
    assert rows[f"{socket.gethostname()}-p00000/gpu:1"] == [DeviceState("gpu:1", 1700.0, power_w=650.0)] * 2


def test_a_missing_source_is_reported_once(tmp_path):
    log = EventLog(tmp_path / "events.jsonl")
    watch = ClockWatch(None, "no source", log)
    assert watch.tick(1) == {}
    watch.close()
    log.close()
    assert [e.fields["missing"] for e in read_events([tmp_path / "events.jsonl"]) if e.kind == "device_states"] == ["no source"]
    assert device_metrics([]) == {}


def gpu(mhz, **more):
    return DeviceState("gpu:0", mhz, 1980.0, **more)


@pytest.mark.parametrize(
    ("devices", "seen", "share"),
    [
        ({"a-p00000/gpu:0": [gpu(1400, reasons=["power cap"])] * 4}, None, 0),  # what a full load does
        ({"a-p00000/gpu:0": [gpu(990, reasons=["hardware thermal slowdown"])] * 4}, "thermal", 0.5),
        ({"a-p00000/gpu:0": [gpu(990, reasons=["hardware thermal slowdown"]), *[gpu(1900)] * 3]}, None, 0),  # for a moment
        ({f"a-p0000{p}/gpu:0": [gpu(1800 if p else 900)] * 4 for p in range(3)}, "a-p00000/gpu:0 runs at 900 MHz, 50%", 0.5),
        ({"a-p00000/gpu:0": [gpu(1386, reasons=["power cap"], power_limit_w=500.0, power_default_w=700.0)] * 4}, "500 of 700 W", 0.3),
        ({"a-p00001/cpu": [DeviceState("cpu", stopped_share=0.8)] * 4, "a-p00000/cpu": [DeviceState("cpu")]}, "CPU quota", 0.8),
        ({"a-p00001/cpu": [DeviceState("cpu", stopped_share=0.01)] * 4}, None, 0),
        ({"a-p00000/cpu": [DeviceState("cpu", 1200.0, 2400.0)] * 4}, "base clock", 0.5),
        ({}, None, 0),
    ],
)
def test_a_device_is_throttled_when_most_samples_show_it(devices, seen, share):
    found = most_throttled(devices)
    if seen is None:
        assert found is None
    else:
        assert found is not None
        assert seen in found.reason
        assert found.share == pytest.approx(share)
