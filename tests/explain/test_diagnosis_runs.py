"""Real runs with one planted fault each (tests/explain/injections.py): the right rule comes first; healthy controls have no findings.

They measure time, so they need the machine to themselves: `make test-injections`, not `make test`. Each commit draws a third of the rules;
`make test-injections FULL=1` plants the faults of all.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from ridgeline.explain.diagnosis.finding import THRESHOLDS, TITLES
from ridgeline.explain.diagnosis.rules import CATALOG, RULES, rules_table
from ridgeline.rundir.events import event_file, read_events
from tests.explain.injections import BROKEN, CASES, COMPUTING, PAIRS, WAITING, Bench, Case
from tests.explain.magnitudes import FAULTS, Fault
from tests.explain.remedies import check_remedies
from tests.sampling import drawn

ROOT = Path(__file__).parents[2]
pytestmark = [pytest.mark.slow, pytest.mark.timeout(2400)]


LOOKED_AT = {
    "test_a_run_ends_with_a_line_of_its_diagnosis": ("healthy", "padded", "pair", "killed"),
    "test_the_terms_of_the_plan_stand_beside_the_measured_ones": ("slow-link", "pair"),
    "test_recompilations_are_compile_time_of_the_ledger_with_what_changed": ("drifting",),
    "test_idle_time_of_a_real_capture_falls_to_compiling_and_to_a_save": ("drifting",),
    "test_a_fault_laid_over_a_healthy_run_is_named_from_some_size_on": ("healthy", "pair"),
    "test_a_throttled_rank_shows_its_quota_where_there_is_one": ("slow-rank",),
}
"""Runs of the tests that are not about a case."""


@pytest.fixture(scope="module")
def bench(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Bench:
    """The runs that the selected tests look at, made once."""
    made = Bench(tmp_path_factory.mktemp("injections"))
    made.prepare()
    names: set[str] = set()
    for item in request.session.items:
        if isinstance(item, pytest.Function) and item.module is request.module:
            case = item.callspec.params.get("case") if hasattr(item, "callspec") else None
            names |= set(case.needs if isinstance(case, Case) else LOOKED_AT.get(item.originalname, ()))
    made.run(names)
    return made


@pytest.mark.parametrize("case", drawn([case for case in CASES if case.rule is not None], 6), ids=lambda case: case.rule)
def test_the_planted_fault_of_a_real_run_is_named_first(bench: Bench, case: Case) -> None:
    findings = bench.diagnose(case)
    assert [finding["rule"] for finding in findings][:1] == [case.rule], findings
    assert all(findings[0][key] for key in ("confidence", "lens", "pattern", "evidence", "measure_next", "action", "next_bottleneck"))
    for finding in findings:
        check_remedies(finding, bench.directory / "runs" / case.runs[0] / "config.yaml")


@pytest.mark.parametrize("case", [case for case in CASES if case.rule is None], ids=lambda case: case.planted)
def test_a_healthy_run_has_no_findings(bench: Bench, case: Case) -> None:
    assert bench.diagnose(case) == []


def test_every_rule_has_an_injection_and_every_run_a_case() -> None:
    assert {case.rule for case in CASES} - {None} == {row.name for row in CATALOG}
    assert len(RULES) == len(CATALOG)
    runs = [run.name for group in (COMPUTING, WAITING, PAIRS, BROKEN) for run in group]
    assert set(runs) == {run for case in CASES for run in case.runs}
    assert len(set(runs)) == len(runs)


def test_a_run_ends_with_a_line_of_its_diagnosis(bench: Bench) -> None:
    lines = [line for log in bench.directory.glob("*.log") for line in log.read_text().splitlines() if line.startswith("diagnosis: ")]
    word = {name: next(line for line in lines if line.endswith(f"/{name}")) for name in ("healthy", "padded", "pair", "killed")}
    assert "no findings" in word["healthy"]
    assert TITLES["padding waste"] in word["padded"]
    assert "gain at most" in word["padded"]
    assert TITLES["steps lost to failures"] in word["killed"]
    assert word["pair"].endswith(f"ridge diagnose {bench.directory / 'runs' / 'pair'}")


def test_the_terms_of_the_plan_stand_beside_the_measured_ones(bench: Bench) -> None:
    (case,) = (case for case in CASES if case.runs == ("slow-link",))
    command = [sys.executable, "-m", "ridgeline", "diagnose", str(bench.directory / "runs" / "slow-link"), *bench.promise(case), "--json"]
    found = json.loads(subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout)
    terms = {term["name"]: term for term in found["predicted"]}
    assert {"step", "compute", "exposed communication", "copies and idle", "data wait", "memory: step"} <= set(terms)
    assert all(term["explanation"] for term in terms.values())
    assert terms["step"]["planned"] == pytest.approx(
        sum(terms[name]["planned"] for name in ("compute", "exposed communication", "copies and idle", "data wait"))
    )
    worst = found["largest_disagreement"]
    assert worst["name"] in {"compute", "exposed communication", "copies and idle"}
    exchanged = terms["bus bandwidth: all-reduce over data"]
    assert exchanged["planned"] > 2 * exchanged["measured"]


def test_recompilations_are_compile_time_of_the_ledger_with_what_changed(bench: Bench) -> None:
    (case,) = (case for case in CASES if case.rule == "recompilation in steady state")
    (finding, *_) = bench.diagnose(case)
    assert any("[119]" in line for line in finding["evidence"])
    events = read_events(event_file(bench.directory / "runs" / "drifting", 0))
    assert sum(event.kind == "phase_total" and event.fields["phase"] == "compile" for event in events) >= 18


def test_idle_time_of_a_real_capture_falls_to_compiling_and_to_a_save(bench: Bench) -> None:
    (file,) = (bench.directory / "runs" / "drifting").glob("tensorboard/plugins/profile/*/analysis.json")
    (device,) = json.loads(file.read_bytes())["devices"]
    causes = device["idle_by_cause"]
    assert causes["compile"] > 0.1
    assert causes["checkpoint"] > 0.01
    assert sum(causes.values()) == pytest.approx(device["idle_s"])
    saved = [e for e in read_events(event_file(file.parents[4], 0)) if e.kind == "phase_end" and e.fields["phase"] == "save"]
    assert causes["checkpoint"] <= 1.1 * saved[0].fields["duration_s"]  # the only save of the capture


def test_a_throttled_rank_shows_its_quota_where_there_is_one(bench: Bench) -> None:
    (case,) = (case for case in CASES if case.rule == "clocks throttled")
    (finding, *_) = bench.diagnose(case)
    evidence = " ".join(finding["evidence"])
    assert ("CPU quota of its control group" in evidence) == bench.quota, evidence
    assert finding["confidence"] == ("high" if bench.quota else "medium")


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.rule)
def test_a_fault_laid_over_a_healthy_run_is_named_from_some_size_on(bench: Bench, fault: Fault) -> None:
    named = [fault.rule in rules for rules in bench.sizes()[fault.what]]
    assert not named[0], "half of the smallest threshold, and less"
    assert named[-1]
    assert named == sorted(named), "what is named at one size is named at every larger one"


def test_thresholds_of_the_catalog_are_those_rules_use() -> None:
    assert {name for row in CATALOG for name in row.thresholds} == set(THRESHOLDS)


def test_the_page_on_the_diagnosis_holds_the_rules_and_every_case() -> None:
    text = (ROOT / "docs" / "DIAGNOSIS.md").read_text()
    assert rules_table() in text
    rows = [
        row.split(" | ")
        for row in text.split("## Injections")[1].split("## Smallest")[0].splitlines()
        if row.startswith("| ") and " | " in row
    ][1:]
    assert [(row[0].removeprefix("| "), row[1]) for row in rows] == [(case.planted, case.rule or "nothing") for case in CASES]
    assert all(row[3] == "right |" for row in rows)
    assert all(f"| {fault.what} | {fault.rule} |" in text for fault in FAULTS)
