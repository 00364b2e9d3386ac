"""The run ledger kept during the run, against the one made from the log afterwards."""

import dataclasses
import json
import math

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ridgeline.configs.cluster import load_cluster
from ridgeline.observe.goodput import begin, watch
from ridgeline.rundir import earlier_starts
from ridgeline.rundir.directory import RunDir
from ridgeline.rundir.events import EventLog, event_file, read_events
from ridgeline.rundir.goodput import CATEGORIES, queue_waits, run_ledger
from ridgeline.rundir.metrics import METRICS
from tests.rundir.test_goodput import Clock, Script

PRICE_PER_S = 0.5
TIMES = st.integers(0, 40).map(lambda n: n / 8)  # exact in binary: nothing is lost to rounding
HAPPENINGS = st.one_of(
    st.tuples(st.just("log"), TIMES, TIMES),
    st.tuples(st.sampled_from(["evaluation", "save", "profile", "overtaken"]), TIMES, TIMES),
)


def start(run_dir, wall_s, start_step, happenings, how="killed"):
    """One start; yields (live metrics, ledger of the log) at every log record."""
    script = Script(run_dir, wall_s)
    script.log.total("launch", 3.0)
    script.phase("restore" if start_step else "init", 2.0)
    script.phase("compile", 1.5)
    script.wait(0.25)
    with script.log.phase("setup"):
        script.wait(0.5)
        live = watch(script.log, run_dir, start_step, devices=1)
        live.usd_per_s = PRICE_PER_S
        script.wait(0.25)
    script.begin_training(start_step)
    script.wait(1.0)
    script.log.total("data_wait", 0.25, step=start_step + 1)
    script.log.emit("step", step=start_step + 1, loss=1.0, tokens=start_step * 10.0 + 10.0)
    script.log.total("first_step", 1.0)
    step = start_step + 1
    for what, time_s, inside_s in happenings:
        step += 1
        script.wait(time_s)
        if what == "evaluation":
            with script.log.phase("evaluation", step=step):
                script.phase("compile", inside_s, program="evaluation_step")
                script.wait(0.5)
        elif what == "save":
            script.phase("save", inside_s, step=step)
        elif what == "overtaken":  # a phase starts and ends before events that another thread has written
            emit_ahead(script, inside_s)
            with script.log.phase("save", step=step):
                script.wait(inside_s + time_s)
                emit_ahead(script, time_s)
            script.wait(time_s)
        elif what == "profile":
            script.log.total("profile", min(inside_s, time_s), step=step)
        else:
            script.log.total("data_wait", min(inside_s, time_s), step=step)
            script.log.emit("step", step=step, loss=1.0, tokens=step * 10.0)
            yield live.metrics(), whole_ledger(run_dir)
    script.wait(0.5)
    if how == "closed":
        script.end_training()
        script.phase("teardown", 1.0)
    script.kill()
    end_s = int(script.clock.now_s) + 3
    with (run_dir / "attempts.jsonl").open("a") as file:
        file.write(json.dumps({"job": 7, "begin": int(wall_s) - 5, "end": end_s, "exit_code": 0}) + "\n")


def whole_ledger(run_dir):
    """The ledger made from the whole log."""
    events = read_events(event_file(run_dir, 0))
    return run_ledger(events, queue_waits(RunDir(run_dir), events))


def emit_ahead(script, ahead_s):
    """Write an event of a later time."""
    script.wait(ahead_s)
    script.log.emit("device_state", devices=[])
    script.wait(-ahead_s)


def agrees(metrics, ledger):
    seconds = {name: metrics.get(f"train_goodput/{name}_s", 0.0) for name in CATEGORIES}
    assert seconds == pytest.approx(ledger.seconds, abs=1e-6)
    assert metrics["train_goodput/wall_s"] == pytest.approx(ledger.wall_s)
    assert metrics["train_goodput/goodput"] == pytest.approx(ledger.goodput)
    assert metrics["train_goodput/usd"] == pytest.approx(ledger.wall_s * PRICE_PER_S)
    assert metrics.keys() <= METRICS.keys()


STARTS = st.lists(
    st.tuples(st.integers(0, 12), st.lists(HAPPENINGS, max_size=8), st.sampled_from(["killed", "closed"])), min_size=1, max_size=5
)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(starts=STARTS, saves=st.integers(0, 3))
def test_at_every_log_record_it_is_the_ledger_of_the_log_up_to_there(tmp_path_factory, starts, saves):
    """Over several starts, each from a step that an earlier one saved, or did not; of all but the last only a summary is read."""
    run_dir = tmp_path_factory.mktemp("run")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(earlier_starts, "MOST_SAVES", saves)
        for number, (resumed, happenings, how) in enumerate(starts):
            for metrics, ledger in start(run_dir, 1000.0 + 1000.0 * number, resumed if number else 0, happenings, how):
                agrees(metrics, ledger)


SAVES = [("save", 2.0, 0.5), ("log", 4.0, 0.0), ("save", 1.0, 0.25), ("log", 3.0, 1.0)]


def several_starts(run_dir, starts=3):
    for number in range(starts):
        for _ in start(run_dir, 1000.0 + 1000.0 * number, 2 if number else 0, SAVES):
            pass


def test_a_start_reads_the_log_of_the_start_before_it_only(tmp_path):
    several_starts(tmp_path)
    log = event_file(tmp_path, 0)
    whole = log.read_bytes()
    covered = json.loads((tmp_path / "ledger.json").read_text())
    assert (covered["starts"], covered["log_bytes"]) == (
        2,
        whole.index(b'"restart":2') - whole[: whole.index(b'"restart":2')][::-1].index(b"\n"),
    )
    log.write_bytes(b"x" * (covered["log_bytes"] - 1) + whole[covered["log_bytes"] - 1 :])  # what is not read may be damaged
    script = Script.__new__(Script)  # the writer of a new log numbers its start by the whole of it: here the number is given
    script.clock, script.mono = Clock(9000.0), Clock(5.0)
    script.log = EventLog(log, 0, run="r", restart=3, clock=script.clock, monotonic=script.mono)
    live = watch(script.log, tmp_path, 2, devices=1)
    log.write_bytes(whole + log.read_bytes()[len(whole) :])
    events = read_events(log)
    train = {"phase": "train", "id": 0, "parent": None, "start_step": 2}
    about = dataclasses.replace(events[-1], kind="phase_start", fields=train)
    assert live.seconds == pytest.approx(run_ledger([*events, about], queue_waits(RunDir(tmp_path), events)).seconds, abs=1e-6)


DAMAGE = {
    "absent": lambda record: None,
    "not JSON": lambda record: b"{",
    "of another run": lambda record: {**record, "run": "other"},
    "of later starts": lambda record: {**record, "starts": 9},
    "of fewer starts": lambda record: {**record, "starts": 3},
    "within a line": lambda record: {**record, "log_bytes": record["log_bytes"] - 7},
    "beyond the log": lambda record: {**record, "log_bytes": 1 << 40},
    "of another category": lambda record: {**record, "stretches": [[1000.0, 1001.0, "other", 0, True]]},
    "not finite": lambda record: {**record, "stretches": [[1000.0, math.inf, "productive", 0, True]]},
    "of another type": lambda record: {**record, "saves": [["2", 0, 1.0]]},
}


@pytest.mark.parametrize("how", DAMAGE)
def test_a_file_that_does_not_fit_the_log_is_not_used(tmp_path, how):
    several_starts(tmp_path)
    path = tmp_path / "ledger.json"
    found = DAMAGE[how](json.loads(path.read_text()))
    path.unlink()
    if found is not None:
        path.write_bytes(found if isinstance(found, bytes) else json.dumps(found).encode())
    for metrics, ledger in start(tmp_path, 9000.0, 2, SAVES):
        agrees(metrics, ledger)
    assert json.loads(path.read_text())["starts"] == 3


def test_the_window_since_the_last_record_has_a_goodput_of_its_own(tmp_path):
    happenings = [("log", 4.0, 0.0), ("evaluation", 0.0, 3.5), ("log", 4.0, 1.0)]
    found = [metrics["train_goodput/goodput_now"] for metrics, _ in start(tmp_path, 1000.0, 0, happenings)]
    # the first window: setup 0.75, first step 0.75, waiting 0.25, steps 4; the second: evaluation 4, steps 3, waiting 1
    assert found == pytest.approx([4 / 5.75, 3 / 8])


def test_the_price_is_that_of_the_cluster_the_run_was_submitted_to(tmp_path):
    script = Script(tmp_path, 1000.0)
    assert watch(script.log, tmp_path, 0, devices=8).usd_per_s is None
    (tmp_path / "slurm/1").mkdir(parents=True)
    shipped = load_cluster("generic").path.read_text()
    (tmp_path / "slurm/1/cluster.yaml").write_text(f"{shipped}\nprice_per_device_hour_usd: 3.6\n")
    live = watch(script.log, tmp_path, 0, devices=8)
    script.begin_training(0)
    script.wait(100.0)
    script.log.emit("step", step=1, loss=1.0)
    assert live.metrics()["train_goodput/usd"] == pytest.approx(100 * 8 * 3.6 / 3600)


def test_the_log_is_not_read_again_during_the_run(tmp_path):
    script = Script(tmp_path, 1000.0)
    live = watch(script.log, tmp_path, 0, devices=1)
    event_file(tmp_path, 0).unlink()
    script.begin_training(0)
    script.steps(0, 4, 1.0, wait_s=1.0)
    assert {k: v for k, v in live.metrics().items() if k.endswith("_s")} == {
        "train_goodput/wall_s": 4.0,
        "train_goodput/productive_s": 3.0,
        "train_goodput/data_wait_s": 1.0,
    }


def test_an_empty_base_is_the_run_ledgers(tmp_path):
    script = Script(tmp_path, 1000.0)
    script.phase("compile", 5.0)
    log = read_events(event_file(tmp_path, 0))
    assert begin(log, (), 0, None).seconds == run_ledger(log).seconds
