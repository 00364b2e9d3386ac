"""Several runs as one set of facts: what differs between them decides what they are compared by; anything else is refused."""

import pytest

from ridgeline.configs.errors import UserError
from ridgeline.explain.diagnosis.rules import STUDY_RULES, diagnose
from ridgeline.explain.diagnosis.several import read_several
from ridgeline.explain.study.measured import read_measured
from tests.explain.made_runs import made_run

WIDE = "model.mlp_dim=4096"


def rules(facts):
    return [finding.rule for finding in diagnose(facts, STUDY_RULES)]


def test_the_first_window_is_warm_up_and_waiting_in_the_queue_is_not_time_to_solution(tmp_path):
    run = read_measured(made_run(tmp_path / "a", step_s=0.1))
    assert run.step_s == pytest.approx(0.1, rel=0.01)
    assert run.tokens_per_s == pytest.approx(8 * 256 / 0.1, rel=0.01)
    assert run.warmup_steps == 4
    assert run.time_s == pytest.approx(5 + 4 * 0.3 + 36 * 0.1, rel=0.01)
    assert run.tokens == 40 * 8 * 256
    with pytest.raises(UserError, match="0 steps were logged after the warm-up of 40"):
        read_measured(tmp_path / "a", warmup_steps=40)


def test_runs_that_differ_in_devices_are_a_scaling_study_and_repeats_are_one_point(tmp_path):
    runs = [
        made_run(tmp_path / f"{p}{i}", devices=p, step_s=t) for p, i, t in ((1, "a", 0.4), (2, "a", 0.19), (2, "b", 0.23), (4, "a", 0.2))
    ]
    facts = read_several(runs)
    assert [row.value for row in facts.study.rows] == [1, 2, 4]
    assert facts.study.rows[1].rate == pytest.approx(8 * 256 * (1 / 0.19 + 1 / 0.23) / 2, rel=0.01)
    assert "parallel efficiency falls" in rules(facts)
    row = read_several(runs, tokens=1e9).study.rows[2]  # the same measurements, asked about a longer run
    assert row.time_s == pytest.approx(1e9 / row.rate + 5 + 4 * 2 * 0.2, rel=0.001)


def test_runs_that_differ_in_the_batch_are_a_batch_study(tmp_path):
    runs = [made_run(tmp_path / str(b), step_s=t, overrides=[f"data.batch_size={b}"]) for b, t in ((8, 0.1), (16, 0.11), (32, 0.2))]
    assert rules(read_several(runs)) == ["batch too small"]
    assert "data.batch_size=32" in diagnose(read_several(runs), STUDY_RULES)[0].action


def test_runs_of_several_models_at_several_scales_say_which_scales_better(tmp_path):
    runs = [made_run(tmp_path / f"small{p}", devices=p, step_s=0.1) for p in (1, 2)]
    runs += [made_run(tmp_path / f"large{p}", devices=p, step_s=2.0 / p, overrides=[WIDE]) for p in (1, 2)]
    (finding,) = diagnose(read_several(runs), STUDY_RULES)
    assert finding.rule == "large models scale better than small"
    assert "efficiency 50%, 1.0 s of compute" in finding.evidence[0]
    with pytest.raises(UserError, match="at least two models"):
        read_several([runs[0], runs[3]])


def test_settings_that_buy_nothing_are_named_with_what_restores_the_simpler_run(tmp_path):
    many = ["compute.scan_unroll=2", "compute.loss_chunk=256", "precision.gradients=bfloat16"]
    runs = [made_run(tmp_path / "plain"), made_run(tmp_path / "tuned", overrides=many, flags=[("--xla_cpu_enable_fast_math", "true")])]
    for order in (runs, runs[::-1]):
        facts = read_several(order)
        (finding,) = diagnose(facts, STUDY_RULES)
        assert facts.name == "tuned"
        assert finding.rule == "faster but fragile"
        assert "4 performance settings beyond plain" in finding.evidence[0]
        assert "precision.gradients=float32; unset --xla_cpu_enable_fast_math" in finding.action
    faster = [runs[0], made_run(tmp_path / "fast", step_s=0.05, overrides=many)]
    assert rules(read_several(faster)) == []


def test_a_comparison_that_changes_something_else_is_refused_with_the_keys(tmp_path):
    base = made_run(tmp_path / "base")
    other = made_run(tmp_path / "other", devices=2, overrides=["optimizer.learning_rate=1e-3", "data.seq_len=128"])
    with pytest.raises(UserError, match=r"differ in data.seq_len, optimizer.learning_rate\. A comparison changes one thing"):
        read_several([base, other])
    with pytest.raises(UserError, match="they are repeats of one run"):
        read_several([base, made_run(tmp_path / "again")])


def test_a_run_that_is_not_finished_is_refused(tmp_path):
    run = made_run(tmp_path / "run")
    (run / "config.yaml").write_text((run / "config.yaml").read_text().replace("steps: 40", "steps: 400"))
    with pytest.raises(UserError, match="is not finished: step 40 of 400"):
        read_several([run, made_run(tmp_path / "whole")])
