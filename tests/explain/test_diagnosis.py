"""Every rule on planted facts, and a healthy run without findings. Planted real runs are in tests/explain/test_diagnosis_runs.py."""

import functools
import json
import random
import shlex
import statistics
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from ridgeline.cli.commands.diagnose import _facts
from ridgeline.configs.cluster import load_cluster
from ridgeline.configs.dump import to_yaml
from ridgeline.configs.errors import UserError
from ridgeline.configs.load import load
from ridgeline.explain.diagnosis import remedies
from ridgeline.explain.diagnosis.costs import costs
from ridgeline.explain.diagnosis.expected import Expected, expect
from ridgeline.explain.diagnosis.facts import Compilation, Facts, stored_ladder
from ridgeline.explain.diagnosis.finding import THRESHOLDS, ceiling, gain_text
from ridgeline.explain.diagnosis.ranks import host_of, slowest
from ridgeline.explain.diagnosis.remedies import rescaled, without_nodes
from ridgeline.explain.diagnosis.rules import CATALOG, RULES, diagnose, summary_line
from ridgeline.explain.diagnosis.settings import Setting, SimplerRun
from ridgeline.explain.diagnosis.terms import largest, terms
from ridgeline.explain.diagnosis.throttled import device_samples, most_throttled
from ridgeline.explain.report.page import render
from ridgeline.explain.report.run import read_run
from ridgeline.explain.study.analysis import BATCH_SIZE, Point, analyze
from ridgeline.explain.summary import format_summary, summarize
from ridgeline.rundir.analysis import Analysis, Collective, Component, HostActivity, Sync
from ridgeline.rundir.analysis_times import DeviceStep, DeviceTotal, Step
from ridgeline.rundir.bench_results import RESULTS, write
from ridgeline.rundir.directory import RunDir
from ridgeline.rundir.events import Event, EventLog
from ridgeline.rundir.goodput import CATEGORIES, Ledger
from ridgeline.rundir.loss_spikes import Spike
from ridgeline.rundir.noise import compare
from ridgeline.rundir.progress import run_progress
from ridgeline.rundir.records import Devices, PlanRecord
from tests.explain.made_runs import made_run
from tests.explain.remedies import check_remedies

CONFIG = load("quickstart").config
POSITIONS = CONFIG.data.batch_size * CONFIG.data.seq_len


def ledger(**seconds):
    values = dict.fromkeys(CATEGORIES, 0.0) | {
        "productive": 900.0,
        "startup": 20.0,
        "compile": 20.0,
        "evaluation": 50.0,
        "checkpoint": 10.0,
    }
    values |= seconds
    return Ledger(values, sum(values.values()), 1, 1000, 0, 1e6, ())


def step_record(**values):
    healthy = {
        "restart": 0.0,
        "step": 10.0,
        "tokens_per_s": POSITIONS / 0.9,
        "step_time_p50_s": 0.9,
        "step_time_mean_s": 0.9,
        "data_wait_s": 0.001,
        "target_tokens": POSITIONS * 0.99,
        "peak_bytes": 60e9,
        "limit_bytes": 75e9,
    }
    return healthy | values


def step_records(**values):
    """Five log lines of one start."""
    return [step_record(step=10.0 * line, **values) for line in range(1, 6)]


def times(**values):
    """Parts of a healthy step, seconds."""
    healthy = {
        "total_s": 1.0,
        "compute_s": 0.85,
        "communication_s": 0.03,
        "exposed_communication_s": 0.03,
        "exposed_copy_s": 0.0,
        "idle_s": 0.01,
        "overlapped_communication_s": 0.0,
        "idle_by_cause": {"launch": 0.01},
        "residual_s": 0.0,
    }
    return healthy | values


def device(name="0", **values):
    return DeviceStep(device=name, operations=1, **times(**values))


def step_of(*devices, **values):
    return Step(step=1, devices=list(devices), **times(**values))


def analysis(*, components=(), collectives=(), hosts=(), devices=(), steps=(), **values):
    devices = devices or (device("0", **values), device("1", **values))
    return Analysis(
        profile="capture",
        device_kind="cpu",
        hardware=None,
        step_assignment=[],
        unprofiled_step_time_s=None,
        devices=[_total(d) for d in devices],
        steps=steps or [step_of(*devices)] * 4,
        summary={},
        spread={},
        components=list(components),
        operations=[],
        collectives=list(collectives),
        stragglers=[],
        clock_offsets_s={},
        hosts=list(hosts),
    )


def _total(each):
    parts = {key: value for key, value in asdict(each).items() if key != "operations"}
    return DeviceTotal(**parts, steps=4, assignment="time")


def collective(kind, axis, *, measured, planned, time_s, exposed_s, wait_s=0.0, size=1e8):
    """Bandwidths in bytes/s."""
    figures = (1.0, size, time_s, exposed_s, wait_s, time_s - wait_s, 2, measured, measured)
    return Collective(kind, (axis,), "mlp", "forward", *figures, (f"{kind}.1",), planned)


def host(*syncs):
    return HostActivity("a", 4.0, 10, 2.5, None, None, 0, 0.0, "none", syncs=list(syncs))


def syncs(idle_after_s):
    return [host(Sync("wait", "loop.py:10", 4, idle_after_s, idle_after_s))]


def traffic(compiled_bytes):
    planned = {"kind": "all-reduce", "axes": ["data"], "planned_bytes": 1e9, "compiled_bytes": 1e9, "agrees": True, "explanation": ""}
    other = {"kind": "all-gather", "axes": ["tensor"], "planned_bytes": 1e8, "compiled_bytes": compiled_bytes}
    other |= {"agrees": compiled_bytes == 1e8, "explanation": "more than planned: the largest is at mlp.py:50"}
    return PlanRecord.model_validate_json(json.dumps({"communication": [planned, other]}))


def component(time_s, phase):
    return Component("mlp", phase, time_s, 1.0, 1.0, None, None, None, None, None, None, None)


HEALTHY = Facts(
    name="healthy",
    ledger=ledger(),
    config=CONFIG,
    steps=step_records(),
    compiles=[Compilation("train_step", 15.0, False), Compilation("evaluation_step", 5.0, True)],
    saves_s=[1.0] * 10,
    analysis=analysis(
        components=[component(0.6, "forward"), component(0.02, "recompute")],
        collectives=[collective("all-gather", "fsdp", measured=300e9, planned=330e9, time_s=0.2, exposed_s=0.03, wait_s=0.01)],
        hosts=[host()],
    ),
    plan=traffic(1e8),
    study=analyze([Point(p, 1000.0 / p + 1.0, 1e5 * p) for p in (1, 2, 4)]),
)

SCALES = (1, 2, 4, 8)
SETTINGS = (
    Setting("compute.scan_unroll", 4, 1),
    Setting("compute.loss_chunk", 512, 1024),
    Setting("--xla_cpu_enable_fast_math", "true", "(absent)"),
)


def batches(*rates):
    """A study of (batch size, tokens/s)."""
    return analyze([Point(batch, rate=rate) for batch, rate in rates], BATCH_SIZE)


def simpler_run(own_s, settings=SETTINGS):
    return SimplerRun("plain", settings, compare([1.0, 1.01, 0.99, 1.0], [own_s, own_s * 1.01, own_s * 0.99, own_s]))


PLANTED = {
    "input pipeline": {"steps": step_records(data_wait_s=0.3)},
    "start-up and compilation not amortised": {"ledger": ledger(compile=300.0)},
    "recompilation in steady state": {"compiles": [Compilation("train_step", 30.0, True)] * 4},
    "host-bound steps": {"analysis": analysis(idle_by_cause={"launch": 0.3, "other": 0.1})},
    "host synchronisation in the step": {"analysis": analysis(idle_by_cause={"launch": 0.01, "other": 0.3}, hosts=syncs(1.2))},
    "straggler": {
        "analysis": analysis(devices=(device("0", exposed_communication_s=0.5), device("1"), device("2", exposed_communication_s=0.5)))
    },
    "exposed communication": {"analysis": analysis(exposed_communication_s=0.4)},
    "accidental resharding": {"plan": traffic(9e8), "analysis": analysis(exposed_communication_s=0.14)},
    "padding waste": {"steps": step_records(target_tokens=POSITIONS * 0.5)},
    "needless rematerialisation": {
        "config": load("quickstart", ["compute.remat.policy=full"]).config,
        "steps": step_records(peak_bytes=30e9),
        "analysis": analysis(components=[component(0.6, "forward"), component(0.3, "recompute")]),
    },
    "checkpoint stalls": {"ledger": ledger(checkpoint=200.0), "saves_s": [20.0] * 10},
    "steps lost to failures": {"ledger": ledger(lost=200.0)},
    "hang": {"ledger": ledger(hang=600.0)},
    "memory near the limit": {"steps": step_records(peak_bytes=74e9)},
    "loss spikes": {"spikes": [Spike(120, 11.1, 0.02, 0.003, steps=9, ended=True), Spike(300, 2.0, 0.02, 0.003)]},
    "clocks throttled": {
        "analysis": analysis(devices=(device("0"), device("1", compute_s=0.2, exposed_communication_s=0.7), device("2", compute_s=0.2)))
    },
    "link slower than planned": {
        "analysis": analysis(
            exposed_communication_s=0.3,
            collectives=[collective("all-reduce", "data", measured=5e9, planned=45e9, time_s=0.3, exposed_s=0.3)],
        )
    },
    "throughput flat as the batch grows": {"batch_study": batches((8, 90.0), (16, 100.0), (32, 101.0))},
    "batch too small": {"batch_study": batches((CONFIG.data.batch_size, 50.0), (2 * CONFIG.data.batch_size, 90.0))},
    "fixed overheads at scale": {"study": analyze([Point(p, 300.0 + 240.0 / p, 240.0 * p) for p in (*SCALES, 16, 32)])},
    "parallel efficiency falls": {"study": analyze([Point(p, rate=100.0 * p**0.6) for p in SCALES])},
    "large models scale better than small": {
        "size_studies": {
            size: analyze([Point(p, rate=100.0 * p**slope) for p in SCALES]) for size, slope in ((1_000_000, 0.4), (100_000_000, 0.95))
        }
    },
    "faster but fragile": {"simpler": simpler_run(0.98)},
    "best configuration is also the dearest": {"study": analyze([Point(1, 100.0, 10.0), Point(2, 80.0, 20.0)])},
    "the verdict depends on the metric": {
        "study": analyze([Point(1, 100.0, 10.0), Point(2, 54.0, 19.9), Point(4, 36.0, 36.0), Point(8, 29.0, 52.0), Point(16, 24.0, 70.0)])
    },
}


def test_a_healthy_run_has_no_findings():
    assert diagnose(HEALTHY) == []


@pytest.mark.parametrize("rule", PLANTED)
def test_the_planted_constraint_is_named_first(rule):
    found = [finding.rule for finding in diagnose(replace(HEALTHY, **PLANTED[rule]))]
    assert found[:1] == [rule]


@pytest.mark.parametrize("other", ["steps lost to failures", "exposed communication", "memory near the limit"])
def test_a_training_that_fails_comes_before_every_loss_of_time(other):
    found = [finding.rule for finding in diagnose(replace(HEALTHY, **PLANTED[other], **PLANTED["loss spikes"]))]
    assert found[0] == "loss spikes"
    assert other in found[1:]


def test_every_rule_has_a_planted_case():
    firing = {rule.__name__ for case in PLANTED.values() for rule in RULES if rule(replace(HEALTHY, **case)) is not None}
    assert firing == {rule.__name__ for rule in RULES}


@pytest.mark.parametrize("rule", PLANTED)
def test_findings_carry_figures_an_action_and_what_comes_next(rule):
    finding = next(f for f in diagnose(replace(HEALTHY, **PLANTED[rule])) if f.rule == rule)
    assert any(character.isdigit() for character in " ".join(finding.evidence))
    assert finding.action
    assert finding.measure_next
    assert finding.next_bottleneck
    assert finding.gain >= 0
    check_remedies(asdict(finding), "quickstart")


def test_a_run_without_a_profile_is_diagnosed_by_its_ledger():
    bare = Facts(name="bare", ledger=ledger(checkpoint=500.0))
    assert [f.rule for f in diagnose(bare)] == ["checkpoint stalls"]


def test_loading_programs_that_a_cache_had_is_no_compilation_to_amortise():
    drawn_out = replace(HEALTHY, ledger=ledger(productive=60.0, compile=12.0), compiles=[Compilation("train_step", 12.0, False)])
    assert [finding.rule for finding in diagnose(drawn_out)][:1] == ["start-up and compilation not amortised"]
    assert "start-up and compilation not amortised" not in {finding.rule for finding in diagnose(replace(drawn_out, cached_s=12.0))}


def test_every_start_may_compile_each_program_once():
    """Three starts with an evaluation compile its step three times; so does a step that each start loads."""
    once = [Compilation(name, 20.0, in_loop=True, start=start) for start in range(3) for name in ("evaluation_step", "all_finite")]
    starts = replace(HEALTHY, compiles=once, ledger=replace(HEALTHY.ledger, starts=3))
    assert diagnose(starts) == []
    again = replace(starts, compiles=[*once, Compilation("evaluation_step", 30.0, in_loop=True, start=1)])
    (finding,) = diagnose(again)
    assert finding.rule == "recompilation in steady state"
    assert finding.gain == pytest.approx(ceiling(20.0 / again.ledger.wall_s))  # the longest is the one that was needed
    assert "evaluation_step was compiled 2 times during training in start 2 of 3, 50.0 s" in finding.evidence[0]


def test_the_padding_is_that_of_the_newest_start():
    """An earlier start with half the batch size has half the targets and no padding."""
    half = step_records(target_tokens=POSITIONS / 2)
    assert diagnose(replace(HEALTHY, steps=[*half, *step_records(restart=1.0)])) == []


def test_clocks_are_compared_within_one_start():
    """A restart on devices with another clock throttles nobody; a start of few log lines does not hide the one before it."""

    def lines(start, mhz, count):
        for _ in range(count):
            rows = [{"device": f"gpu:{i}", "clock_mhz": clock} for i, clock in enumerate(mhz)]
            yield Event("device_state", 0.0, 0.0, "r", 0, start, {"devices": rows})

    host = [Event("device_states", 0.0, 0.0, "r", 0, start, {"host": f"node{start}"}) for start in range(2)]
    moved = device_samples([host[0], *lines(0, (1980.0,) * 4, 9), host[1], *lines(1, (1410.0,) * 4, 5)])
    assert set(moved) == {f"node1-p00000/gpu:{i}" for i in range(4)}
    assert most_throttled(moved) is None
    slow = most_throttled(device_samples([host[0], *lines(0, (1980.0, 1980.0, 990.0), 9), host[1], *lines(1, (1980.0,) * 3, 1)]))
    assert slow is not None and slow.device == "node0-p00000/gpu:2"


@pytest.mark.parametrize(
    ("own_s", "settings", "fires"), [(1.0, SETTINGS, True), (1.3, SETTINGS, True), (0.5, SETTINGS, False), (1.0, SETTINGS[:1], False)]
)
def test_settings_are_fragile_when_many_of_them_gain_little(own_s, settings, fires):
    found = diagnose(replace(HEALTHY, simpler=simpler_run(own_s, settings)))
    assert [f.rule for f in found] == (["faster but fragile"] if fires else [])
    if fires:
        assert "compute.scan_unroll=1 compute.loss_chunk=1024; unset --xla_cpu_enable_fast_math" in found[0].action
        assert found[0].gain == pytest.approx(max(0.0, own_s - 1), rel=0.1)


def test_models_that_scale_alike_or_well_give_no_finding():
    for slopes in ((0.5, 0.53), (0.95, 1.0)):
        studies = {10**i: analyze([Point(p, rate=100.0 * p**slope) for p in SCALES]) for i, slope in enumerate(slopes)}
        assert diagnose(replace(HEALTHY, size_studies=studies)) == []


def test_the_ceiling_of_a_gain_is_that_of_removing_a_share():
    assert ceiling(0.5) == pytest.approx(1.0)
    assert ceiling(0.0) == 0.0
    (finding,) = diagnose(replace(HEALTHY, ledger=ledger(checkpoint=1000.0)))
    assert finding.gain == pytest.approx(1000.0 / 990.0)


def test_a_large_gain_is_formatted_as_a_factor():
    assert [gain_text(gain) for gain in (0.0, 0.25, 0.994, 1.0, 7.44)] == [
        "no gain in speed",
        "gain at most 25%",
        "gain at most 99%",
        "gain up to 2x",
        "gain up to 8.4x",
    ]


@pytest.mark.parametrize("seed", range(20))
def test_the_next_bottleneck_is_the_largest_cost_without_the_one_that_is_named(seed):
    """Brute force: the ledger with the seconds of the finding set to 0."""
    draw = random.Random(seed)
    removed = {"checkpoint stalls": ["checkpoint"], "steps lost to failures": ["lost"], "hang": ["hang"]}
    removed |= {"start-up and compilation not amortised": ["startup", "compile", "restore"]}
    seconds = dict.fromkeys(CATEGORIES, 0.0) | {name: draw.uniform(0, 400.0) for name in CATEGORIES}
    facts = Facts(name="drawn", ledger=ledger(**seconds), saves_s=[1.0])
    names = {"productive": "training steps", "startup": "start-up and compilation", "compile": "start-up and compilation"}
    names |= {"restore": "start-up and compilation", "checkpoint": "saves", "lost": "repeated steps", "hang": "hangs"}
    findings = [finding for finding in diagnose(facts) if finding.rule in removed]
    assert findings
    for finding in findings:
        left = dict.fromkeys(costs(facts), 0.0)
        for name, value_s in seconds.items():
            if name not in removed[finding.rule]:
                cost = names.get(name) or next(
                    cost for cost, share in costs(facts).items() if share * sum(seconds.values()) == pytest.approx(value_s)
                )
                left[cost] += value_s
        largest_left = max(left, key=lambda name: left[name])
        share = left[largest_left] / sum(left.values())
        assert finding.next_bottleneck.startswith(f"{largest_left} ({share:.0%} of the remaining time), then ")


def test_the_next_bottleneck_of_a_profiled_run_is_a_part_of_its_step():
    facts = replace(HEALTHY, analysis=analysis(exposed_communication_s=0.3, compute_s=0.5, idle_s=0.2, idle_by_cause={"launch": 0.2}))
    found = {finding.rule: finding.next_bottleneck for finding in diagnose(facts)}
    # 900 of 1,000 s are steps: 450 s of compute, 270 s of exposed communication, 180 s idle
    assert found["exposed communication"] == "compute (62% of the remaining time), then idle devices (25%)"
    assert found["host-bound steps"] == "compute (55% of the remaining time), then exposed communication (33%)"
    memory = replace(facts, steps=step_records(peak_bytes=74e9))
    assert {f.rule: f for f in diagnose(memory)}["memory near the limit"].next_bottleneck.startswith("compute (45% of the time), then")


def test_overrides_follow_from_the_figures():
    def overrides(**planted):
        return diagnose(replace(HEALTHY, **planted))[0].overrides

    assert overrides(steps=step_records(data_wait_s=0.63)) == ("data.workers=4",)  # 0.7 of a step of 0.9 s
    batch = CONFIG.data.batch_size
    assert overrides(analysis=analysis(idle_by_cause={"launch": 0.5})) == (f"data.batch_size={8 * batch}",)  # 0.5 to 0.15 of the step
    assert overrides(ledger=ledger(checkpoint=200.0)) == (f"checkpoint.every={4 * CONFIG.checkpoint.every}",)  # 17 to 5 % of the time
    sync = load("quickstart", ["checkpoint.asynchronous=false"]).config
    assert overrides(ledger=ledger(checkpoint=200.0), config=sync) == ("checkpoint.asynchronous=true",)
    own_rules = load("quickstart", ["mesh.rules={act_mlp: []}"]).config
    assert overrides(plan=traffic(9e8), config=own_rules) == ("mesh.rules={}",)
    two = load("quickstart", ["mesh.data=2", "mesh.fsdp=4"]).config
    assert rescaled(replace(HEALTHY, config=two), 12) == ("mesh.data=3",)
    assert rescaled(replace(HEALTHY, config=two), 6) == ()


def test_the_deadline_of_the_phase_that_hung_is_shortened():
    """The limit of a step is the larger of trainer.hang_timeout_s and step_factor usual steps; other phases have deadlines of their own."""

    def override(phase, *settings, step_s=0.9):
        facts = replace(HEALTHY, ledger=ledger(hang=600.0), hangs=["compile", phase], config=load("quickstart", list(settings)).config)
        (found,) = remedies.shorter_deadline(replace(facts, steps=step_records(step_time_p50_s=step_s))).split()
        return found

    assert override("a step") == "trainer.hang_timeout_s=60"
    assert override("a step", step_s=7.0) == "trainer.hang_timeout_s=140"
    assert override("a step", "trainer.hang_timeout_s=50") == "trainer.hang_timeout_s=25"
    assert override("a step", "trainer.hang_timeout_s=50", step_s=7.0) == "trainer.deadlines.step_factor=10"
    for phase, key in {"save": "save_s", "teardown": "save_s", "evaluation": "evaluation_s", "start-up": "startup_s"}.items():
        assert override(phase, f"trainer.deadlines.{key}=300") == f"trainer.deadlines.{key}=150"
    assert override("waiting for the other processes to compile") == "trainer.deadlines.compile_s=3600"


def test_a_node_is_left_out_by_the_command_that_submitted_the_run(tmp_path):
    cluster = tmp_path / "cluster.yaml"
    cluster.write_text(Path("configs/clusters/local.yaml").read_text().replace("slurm:\n", "slurm:\n  options: [--mail-type=END]\n"))
    submitted = replace(HEALTHY, path=tmp_path, submitted=str(cluster), nodes=4)
    command = without_nodes(submitted, ["node7"])
    assert command.startswith(f"ridge submit {tmp_path}/config.yaml --cluster {cluster} --nodes 4")
    assert "slurm.options=[--mail-type=END, --exclude=node7]" in command
    assert load_cluster(str(cluster), [shlex.split(command)[-1]]).config.slurm.options == ["--mail-type=END", "--exclude=node7"]
    assert without_nodes(replace(submitted, submitted=None), ["a", "b"]) == f"srun --exclude=a,b ridge train {tmp_path}/config.yaml"
    assert [host_of(device) for device in ("node7-p00001/gpu:0", "node7/gpu:3")] == ["node7", "node7"]


def test_a_stored_benchmark_of_the_same_work_is_found_and_shown(tmp_path):
    devices = Devices(platform="cpu", kind="cpu", count=1)
    made_with = {"time": "", "code": {}, "device": devices.model_dump() | {"processes": 1}, "cpu": {}, "packages": {}, "xla_flags": ""}
    results = tmp_path / RESULTS / "all"
    other = CONFIG.model_copy(update={"data": CONFIG.data.model_copy(update={"batch_size": 99})})
    for day, (config, step_s) in enumerate(((CONFIG, 0.3), (CONFIG, 0.4), (other, 0.5)), 1):
        series = {"loader": [0.8, 0.9, 1.0], "step": [step_s] * 3, "matmul": [0.25] * 3}
        write(results / f"2026110{day}T000000-x.json", {"task": "all", "series": series}, config, made_with)
    (results / "20261109T000000-torn.json").write_text("{")
    found = stored_ladder(tmp_path, CONFIG, devices)
    assert found["step"] == [0.4] * 3  # the newest of the same work
    assert stored_ladder(tmp_path, CONFIG, devices.model_copy(update={"count": 2})) == {}
    (finding,) = diagnose(replace(HEALTHY, bench=found, steps=step_records(data_wait_s=0.3)))
    (alone,) = (line for line in finding.evidence if "ridge bench" in line)
    assert "900 ms" in alone
    assert "400 ms" in alone


def test_thresholds_are_declared_with_their_meaning():
    assert all(value > 0 and meaning for value, meaning in THRESHOLDS.values())
    used = " ".join(Path(module.__file__).read_text() for module in _rule_modules())
    assert [name for name in THRESHOLDS if f'"{name}"' not in used] == []


def _rule_modules():
    from ridgeline.explain.diagnosis import run_rules, step_rules, study_rules, throttled

    return run_rules, step_rules, study_rules, throttled


def test_the_facts_are_figures_of_the_steps_after_warm_up():
    slow_first = [step_record(step=1.0, step_time_p50_s=9.0), *step_records()]
    assert replace(HEALTHY, steps=slow_first).step_s == pytest.approx(0.9)
    assert replace(HEALTHY, steps=[]).data_wait_share is None


def test_the_catalog_names_each_rule_as_its_findings_do():
    for rule, case in PLANTED.items():
        (row,) = (row for row in CATALOG if row.name == rule)
        finding = row.check(replace(HEALTHY, **case))
        assert finding is not None
        assert finding.rule == rule


def synchronous(own, compute, shared_s=0.01):
    """Steps of devices that wait for the slowest at their collectives: `own` and `compute` hold seconds by step and device."""
    steps = []
    for mine, work in zip(own, compute, strict=True):
        total_s = max(mine) + shared_s
        parts = [
            {"total_s": total_s, "compute_s": c, "exposed_communication_s": total_s - o, "idle_s": o - c}
            for o, c in zip(mine, work, strict=True)
        ]
        steps.append(step_of(*(device(str(i), **each) for i, each in enumerate(parts))))
    return analysis(steps=steps)


def gain_without(own, slowest, shared_s=0.01):
    """The median share of the step times that is saved if one device needs what the median other one does."""
    shares = []
    for mine in own:
        others = [seconds for i, seconds in enumerate(mine) if i != slowest]
        shares.append((max(mine) - max(statistics.median_low(others), 0.0)) / (max(mine) + shared_s))
    return statistics.median(shares)


@pytest.mark.parametrize("seed", range(60))
def test_a_straggler_is_named_from_its_threshold_on_whatever_makes_it_late(seed):
    """Drawn delays of 0 to 30 % of the step, in compute or outside of it, against the time that the step would take without the device."""
    draw = random.Random(seed)
    devices, steps, delay = draw.randint(2, 8), draw.randint(4, 24), draw.uniform(0.0, 0.45)
    late, in_compute, noise = draw.randrange(devices), draw.random(), draw.choice((0.0, 0.002, 0.005))
    compute = [[draw.gauss(0.85, noise) + in_compute * delay * (i == late) for i in range(devices)] for _ in range(steps)]
    own = [[c + 0.1 + (1 - in_compute) * delay * (i == late) for i, c in enumerate(work)] for work in compute]
    share = gain_without(own, late)
    found = {finding.rule: finding for finding in diagnose(replace(HEALTHY, analysis=synchronous(own, compute)))}
    threshold = THRESHOLDS["straggler"][0]
    if abs(share - threshold) > 0.015:
        assert ("straggler" in found or "clocks throttled" in found) == (share > threshold), (share, delay, in_compute)
    if "straggler" in found and "clocks throttled" not in found:
        assert found["straggler"].gain == pytest.approx(ceiling(share * HEALTHY.share("productive")), rel=0.15)
        assert found["straggler"].evidence[0].startswith(f"{late} needs")


@pytest.mark.parametrize(
    ("names", "named"), [(("a-p00000/gpu:0", "a-p00000/gpu:1"), True), (("a/cpu:0", "a/cpu:1"), False), (("a/cpu", "b/cpu"), True)]
)
def test_longer_compute_of_cpu_devices_that_share_cores_makes_no_straggler(names, named):
    longer = {"compute_s": 0.97, "exposed_communication_s": 0.01}
    usual = {"compute_s": 0.82, "exposed_communication_s": 0.16}
    found = diagnose(replace(HEALTHY, analysis=analysis(devices=(device(names[0], **usual), device(names[1], **longer)))))
    assert ("straggler" in {finding.rule for finding in found}) == named


def test_scatter_alone_is_rarely_a_straggler():
    """Two devices whose steps scatter by 7 %: no one is late, and at most one profile in twenty names one."""
    draw = random.Random(5)
    named = 0
    for _ in range(200):
        own = [[draw.gauss(0.95, 0.07) for _ in range(2)] for _ in range(8)]
        named += slowest(synchronous(own, [[0.8, 0.8]] * 8)).late_s > 0.1
    assert named <= 10


def test_noise_of_single_steps_makes_no_device_slow():
    even = (device("0"), device("1"))
    odd = (device("0"), device("1", compute_s=0.4, exposed_communication_s=0.5))
    steps = [step_of(*even), step_of(*odd), step_of(*even), step_of(*even)]
    assert diagnose(replace(HEALTHY, analysis=analysis(steps=steps))) == []
    found = slowest(analysis(steps=steps[1:2] * 3 + steps[:1]))
    assert found is not None
    assert found.device == "0"
    assert found.slow_s > 0.1


def test_parts_of_a_late_device_are_its_compute_and_the_rest():
    found = slowest(analysis(devices=(device("a", compute_s=0.2, exposed_communication_s=0.7), device("b", compute_s=0.6))))
    assert found is not None
    assert found.device == "b"
    assert found.slow_s == pytest.approx(0.4)
    assert found.late_s == pytest.approx(0.67 - 0.4)
    assert slowest(analysis(devices=(device("a"),))) is None
    assert slowest(None) is None


MESH = {"pipeline": 1, "data": 2, "fsdp": 1, "context": 1, "tensor": 1, "expert": 1}


def test_planned_terms_stand_beside_measured_ones_and_the_largest_is_explained():
    assert terms(Facts(name="bare", ledger=ledger())) == []
    cluster = load_cluster("local").config
    breakdown = {"compute": 0.5, "hbm": 0.1, "optimizer": 0.05, "network": 0.05, "bubble": 0.0, "host_input": 0.0}
    steps = [replace(step, idle_by_cause={"launch": 0.01}, **SUMS) for step in analysis().steps]
    facts = replace(HEALTHY, expected=Expected(cluster, MESH, breakdown), analysis=replace(HEALTHY.analysis, steps=steps))
    found = {term.name: term for term in terms(facts)}
    assert found["step"].planned == pytest.approx(0.7)
    assert found["step"].measured == pytest.approx(0.9)
    assert found["compute"].planned == pytest.approx(0.65)
    assert found["exposed communication"].ratio == pytest.approx(4.0)
    assert found["data wait"].explanation == "as planned"
    assert found["bus bandwidth: all-gather over fsdp"].explanation == "as planned"
    worst = largest(list(found.values()))
    assert worst is not None
    assert worst.name == "exposed communication"
    assert "all-gather over fsdp" in worst.explanation


SUMS = {"compute_s": 0.66, "exposed_communication_s": 0.2, "exposed_copy_s": 0.01, "idle_s": 0.01}


def test_what_to_expect_comes_from_the_cluster_a_run_was_submitted_to(tmp_path):
    (tmp_path / "plan.json").write_text(json.dumps({"mesh": MESH}))
    (tmp_path / "config.yaml").write_text(to_yaml(CONFIG))
    assert expect(RunDir(tmp_path)) is None
    (tmp_path / "slurm" / "1").mkdir(parents=True)
    (tmp_path / "slurm" / "1" / "cluster.yaml").write_text(Path("configs/clusters/local.yaml").read_text())
    found = expect(RunDir(tmp_path))
    assert found is not None
    assert found.capacity_bytes == 8 * 2**30
    assert found.step_s is not None
    assert found.bus_bandwidth("all-reduce", 1e8, ["data"]) == pytest.approx(1e9, rel=0.5)
    assert found.bus_bandwidth("send", 1e8, ["data"]) is None
    assert found.bus_bandwidth("all-reduce", 1e8, ["elsewhere"]) is None
    rates = tmp_path / "rates.yaml"
    rates.write_text("links: [{kind: network, device: cpu, measured: [[1.0e+8, 0.25]], source: measured}]")
    calibrated = expect(RunDir(tmp_path), calibration=rates)
    assert calibrated is not None
    assert calibrated.bus_bandwidth("all-reduce", 1e8, ["data"]) == pytest.approx(0.25e9, rel=0.01)
    with pytest.raises(UserError, match="did you mean 'local'"):
        expect(RunDir(tmp_path), "locl")


def test_the_summary_line_of_a_run_never_fails(tmp_path):
    assert summary_line(tmp_path).startswith("diagnosis: none (")
    (tmp_path / "events.jsonl").write_bytes(b'{"broken\n{}\n')
    line = summary_line(tmp_path)
    assert "UserError" in line
    assert line.endswith(f"ridge diagnose {tmp_path}")
    assert "\n" not in line


def test_a_cluster_is_refused_for_several_runs(tmp_path):
    with pytest.raises(UserError, match="--cluster and --calibration"):
        _facts((tmp_path / "a", tmp_path / "b"), "local")


DAMAGE = (None, "x", -1, 0, 1e308, "NaN", [], {}, [1], {"a": 1}, True, 2**70, [[]], [None])


def fields_of(value, path=()):
    """Return the paths of all fields in an event."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [found for key, each in inner for found in ((*path, key), *fields_of(each, (*path, key)))]


def test_damaged_events_are_left_out_or_refused_in_one_line(tmp_path):
    """A field of another type, or without it: no rule, ledger, page or summary raises anything but a line of text."""
    path = made_run(tmp_path / "run", steps=24, flags=(("--xla_x", "1"),))
    log = EventLog(path / "events.jsonl", run="r")
    log.emit("device_states", host="a")
    log.emit("device_state", devices=[{"device": "gpu:0", "clock_mhz": 900.0, "rated_mhz": 1980.0, "reasons": ["power cap"]}])
    log.emit("recompilation", program="f", step=3, duration_s=1.0, arguments=[{"argument": "x", "before": "a", "after": "b"}], source=None)
    log.emit("loss_spike", step=4, loss=9.0, usual=2.0, sigma=0.1, steps=3, recovered=False)
    log.emit("hang", silent_s=0.5)
    with log.phase("train", start_step=0), log.phase("evaluation", step=4) as record:
        log.total("compile", 1.0, program="f", trace_s=0.1)
        record["results"] = {"held": 2.0}
    with log.phase("save", step=4):
        pass
    log.close()
    whole = [json.loads(line) for line in (path / "events.jsonl").read_text().splitlines()]
    draw, refused = random.Random(0), list[str]()
    for _ in range(60):
        damaged = json.loads(json.dumps(whole))
        event = draw.choice(damaged)
        *outer, last = draw.choice(fields_of(event))
        place = functools.reduce(lambda value, key: value[key], outer, event)
        if draw.random() < 0.25 and isinstance(place, dict):
            del place[last]
        else:
            place[last] = draw.choice(DAMAGE)
        (path / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in damaged))
        try:
            run = read_run(path)
            assert render([run]) and terms(run.facts) is not None
            assert format_summary(summarize(run.events)) and run_progress(path)
        except UserError as error:
            refused.append(str(error))
    assert refused
    assert all(("events.jsonl" in line or "never started" in line) and "\n" not in line for line in refused)
