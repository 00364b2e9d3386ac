"""The run ledger kept during the run, against the one made from the log afterwards."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ridgeline.configs.cluster import load_cluster
from ridgeline.observe.goodput import begin, watch
from ridgeline.rundir.events import event_file, read_events
from ridgeline.rundir.goodput import CATEGORIES, run_ledger
from ridgeline.rundir.metrics import METRICS
from tests.rundir.test_goodput import Script, ledger_of

PRICE_PER_S = 0.5
TIMES = st.integers(0, 40).map(lambda n: n / 8)  # exact in binary: nothing is lost to rounding
HAPPENINGS = st.one_of(
    st.tuples(st.just("log"), TIMES, TIMES),
    st.tuples(st.sampled_from(["evaluation", "save", "profile", "overtaken"]), TIMES, TIMES),
)


def start(run_dir, wall_s, start_step, happenings):
    """One start; yields (live metrics, ledger of the log) at every log record."""
    script = Script(run_dir, wall_s)
    script.log.total("launch", 3.0)
    script.phase("restore" if start_step else "init", 2.0)
    script.phase("compile", 1.5)
    script.wait(0.25)
    log = read_events(event_file(run_dir, 0))
    live = begin(log, (), start_step, PRICE_PER_S)
    script.log.observer = live.observe
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
            yield live.metrics(), ledger_of(run_dir)
    script.kill()


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


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(first=st.lists(HAPPENINGS, max_size=8), second=st.lists(HAPPENINGS, max_size=8), resumed=st.integers(0, 3))
def test_at_every_log_record_it_is_the_ledger_of_the_log_up_to_there(tmp_path_factory, first, second, resumed):
    run_dir = tmp_path_factory.mktemp("run")
    for metrics, ledger in start(run_dir, 1000.0, 0, first):
        agrees(metrics, ledger)
    for metrics, ledger in start(run_dir, 5000.0, resumed, second):
        agrees(metrics, ledger)


def test_the_window_since_the_last_record_has_a_goodput_of_its_own(tmp_path):
    happenings = [("log", 4.0, 0.0), ("evaluation", 0.0, 3.5), ("log", 4.0, 1.0)]
    found = [metrics["train_goodput/goodput_now"] for metrics, _ in start(tmp_path, 1000.0, 0, happenings)]
    # the first window: nothing 0.25, first step 0.75, waiting 0.25, steps 4; the second: evaluation 4, steps 3, waiting 1
    assert found == pytest.approx([4 / 5.25, 3 / 8])


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
