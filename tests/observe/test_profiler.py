"""Profile capture, read back with JAX's own reader and TensorBoard's profile plugin."""

import json
import os
import signal
import socket
import subprocess
import sys

import jax
import pytest

from ridgeline.configs.schema import ProfilerConfig
from ridgeline.observe.profiler import Profiler, hlo_module_name
from ridgeline.rundir.captures import profile_root


def events_of(directory):
    (file,) = directory.glob("*.xplane.pb")
    return [e for plane in jax.profiler.ProfileData.from_file(str(file)).planes for line in plane.lines for e in line.events]


def test_a_capture_is_where_tensorboard_reads(run_dir, capture_dir):
    assert capture_dir.parent == profile_root(run_dir) == run_dir / "tensorboard" / "plugins" / "profile"
    names = sorted(p.name for p in capture_dir.iterdir())
    host = socket.gethostname()
    assert names == sorted([f"{host}.xplane.pb", f"{host}.trace.json.gz", f"{host}.frames.json", "capture.json", "jit_toy_step.hlo.txt"])
    assert not [p.name for p in run_dir.iterdir() if p.name.startswith(".profile")]


def test_it_contains_exactly_the_requested_steps_and_their_ops(capture_dir):
    events = events_of(capture_dir)
    steps = [dict(e.stats)["step_num"] for e in events if e.name == "train"]
    assert sorted(steps) == [3, 4]
    stats = [dict(e.stats) for e in events if not e.name.startswith("end: ")]
    ops = {stat["hlo_op"] for stat in stats if stat.get("hlo_module") == "jit_toy_step"}
    hlo = (capture_dir / "jit_toy_step.hlo.txt").read_text()
    assert len(ops) >= 3
    assert [op for op in ops if f"%{op} = " not in hlo] == []


def test_the_capture_describes_itself(capture_dir):
    record = json.loads((capture_dir / "capture.json").read_text())
    assert (record["first_step"], record["num_steps"], record["program"]) == (3, 2, "jit_toy_step")
    assert record["unprofiled_step_time_s"] == 0.001
    assert record["device_kind"] == "cpu"
    assert record["jax"] == jax.__version__


def test_tensorboards_profile_plugin_lists_and_converts_it(run_dir, capture_dir):
    from tensorboard.backend.event_processing import data_provider, plugin_event_multiplexer
    from tensorboard.plugins import base_plugin
    from xprof import profile_plugin
    from xprof.convert import raw_to_tool_data

    logdir = str(run_dir / "tensorboard")
    multiplexer = plugin_event_multiplexer.EventMultiplexer()
    multiplexer.AddRunsFromDirectory(logdir)
    multiplexer.Reload()
    flags = type("Flags", (), {"master_tpu_unsecure_channel": "", "generate_cache_tool": ""})()
    context = base_plugin.TBContext(
        logdir=logdir, multiplexer=multiplexer, data_provider=data_provider.MultiplexerDataProvider(multiplexer, logdir), flags=flags
    )
    plugin = profile_plugin.ProfilePlugin(context)
    assert plugin.is_active()
    assert plugin.runs_imp() == [capture_dir.name]

    (file,) = capture_dir.glob("*.xplane.pb")
    assert {"overview_page", "trace_viewer@"} <= set(raw_to_tool_data.xspace_to_tool_names([str(file)]))
    trace, _ = raw_to_tool_data.xspace_to_tool_data([str(file)], "trace_viewer", {})
    names = [e.get("name") for e in json.loads(trace)["traceEvents"]]
    assert {"train 3", "train 4"} <= set(names)


def test_a_file_in_the_run_directory_requests_a_capture_and_is_checked_at_most_once_a_second(tmp_path, toy_step):
    compiled, x = toy_step
    now_s = [0.0]
    profiler = Profiler(ProfilerConfig(num_steps=1), tmp_path, clock=lambda: now_s[0])
    seen = []
    for number in range(6):
        if number == 1:
            profiler.request_file.touch()
        now_s[0] = number * 0.4  # looked for at 0.0, 1.2, ...
        done = profiler.before_step(number, drain=lambda: None)
        seen.append((profiler.active, profiler.request_file.exists(), done is not None))
        jax.block_until_ready(compiled(x))
    assert seen == [
        (False, False, False),
        (False, True, False),
        (False, True, False),
        (True, False, False),
        (False, False, True),
        (False, False, False),
    ]
    assert [p.name for p in profile_root(tmp_path).iterdir()] == ["steps0000003-0000003"]


def test_a_signal_requests_a_capture_and_its_handler_is_restored(tmp_path, run_steps):
    previous = signal.getsignal(signal.SIGUSR1)
    profiler = Profiler(ProfilerConfig(num_steps=2), tmp_path)
    profiler.install_signal()
    os.kill(os.getpid(), signal.SIGUSR1)
    (directory,) = run_steps(profiler, 4)
    assert directory.name == "steps0000000-0000001"
    assert signal.getsignal(signal.SIGUSR1) is previous


def test_a_capture_still_running_at_the_end_is_saved(tmp_path, run_steps):
    profiler = Profiler(ProfilerConfig(start_step=2, num_steps=10), tmp_path)
    (directory,) = run_steps(profiler, 4)
    assert directory.name == "steps0000002-0000003"
    assert json.loads((directory / "capture.json").read_text())["num_steps"] == 2


def test_processes_of_one_host_share_a_capture_without_overwriting(tmp_path, run_steps):
    for process in (0, 1):
        profiler = Profiler(ProfilerConfig(start_step=1, num_steps=1), tmp_path, process=process, num_processes=2, restart=3)
        (directory,) = run_steps(profiler, 3)
    assert directory.name == "steps0000001-0000001-restart3"
    host = socket.gethostname()
    assert sorted(p.name for p in directory.glob("*.xplane.pb")) == [f"{host}-p00000.xplane.pb", f"{host}-p00001.xplane.pb"]
    assert [p.name for p in profile_root(tmp_path).iterdir()] == [directory.name]


def test_the_device_is_drained_at_both_edges_only(tmp_path, toy_step):
    drained = []
    profiler = Profiler(ProfilerConfig(start_step=1, num_steps=2), tmp_path)
    for number in range(5):
        profiler.before_step(number, drain=lambda n=number: drained.append(n))
        jax.block_until_ready(toy_step[0](toy_step[1]))
    assert drained == [1, 3]


def test_another_profiler_in_the_process_is_left_alone(tmp_path, run_steps, caplog):
    jax.profiler.start_trace(tmp_path / "other")
    try:
        profiler = Profiler(ProfilerConfig(start_step=0, num_steps=1), tmp_path / "run")
        assert run_steps(profiler, 2) == []
    finally:
        jax.profiler.stop_trace()
    assert "no profile at step 0" in caplog.text
    assert list((tmp_path / "other").glob("plugins/profile/*/*.xplane.pb"))


def test_the_module_name_is_read_from_the_hlo(toy_step):
    assert hlo_module_name(toy_step[0].as_text()) == "jit_toy_step"
    with pytest.raises(AssertionError, match="not an HLO text"):
        hlo_module_name("module @jit_f {")


def test_the_process_that_analyzes_a_capture_is_reaped_while_the_run_continues(tmp_path):
    profiler = Profiler(ProfilerConfig(), tmp_path)
    ended = subprocess.Popen([sys.executable, "-c", ""])
    os.waitid(os.P_PID, ended.pid, os.WEXITED | os.WNOWAIT)
    profiler._analyses.append(ended)
    profiler.before_step(1, drain=lambda: None)
    with pytest.raises(ChildProcessError):
        os.waitpid(ended.pid, os.WNOHANG)
    profiler.close()


def test_what_a_killed_start_left_of_a_capture_is_removed(tmp_path):
    (tmp_path / ".profile.0" / "plugins").mkdir(parents=True)
    Profiler(ProfilerConfig(), tmp_path)
    assert not list(tmp_path.iterdir())
