"""The run directory: what is absent is None or empty, what is damaged is one line that names the file and the key."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ridgeline.configs.cluster import load_cluster
from ridgeline.configs.errors import UserError
from ridgeline.configs.files import read_limited
from ridgeline.rundir import jsonl
from ridgeline.rundir.directory import RunDir
from ridgeline.rundir.files import write_atomically
from ridgeline.rundir.records import RunRecord

START = {"devices": {"platform": "gpu", "kind": "NVIDIA H100 80GB HBM3", "count": 8}, "processes": 2, "time": "2026-01-02T03:00:00+00:00"}
RUN = {"format": 1, "name": "mine", "id": "abc", "starts": [START], "later_version": {"x": 1}}


def run_with(path: Path, **contents: object) -> RunDir:
    """Write files of a run directory: text as it is, other values as JSON."""
    for name, content in {"run.json": RUN, **contents}.items():
        file = path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(content if isinstance(content, str) else json.dumps(content))
    return RunDir(path)


def refusal(read: object) -> str:
    with pytest.raises(UserError) as error:
        read()  # type: ignore[operator]
    assert "\n" not in str(error.value)
    return str(error.value)


def test_the_record_is_typed_and_keeps_unknown_keys(tmp_path: Path) -> None:
    run = run_with(tmp_path)
    assert RunDir.open(tmp_path).name == "mine"
    start = run.require_start()
    assert (start.devices.count, start.devices.kind, start.processes) == (8, "NVIDIA H100 80GB HBM3", 2)
    run.write_record(run.record.with_start(start))
    assert json.loads((tmp_path / "run.json").read_text()) == RUN | {"starts": [START, START]}


def test_a_bare_directory_has_nothing(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    assert (run.config, run.plan, run.compiled, run.analysis, run.cluster, run.price, run.step_bytes) == (None,) * 7
    assert (run.events, run.events_of(0), run.jobs, run.attempts, run.captures) == ([], [], [], [], [])
    assert not run.exists
    assert run.name == tmp_path.name
    assert refusal(lambda: run.record) == f"{tmp_path} is not a run directory: it has no run.json"
    assert "has no config.yaml" in refusal(run.require_config)
    assert "has no events.jsonl" in refusal(run.require_events)


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ("{", "Invalid JSON"),
        ("[]", "must be an object"),
        (RUN | {"name": 7}, "name: must be a valid string, got 7"),
        (RUN | {"starts": [{"devices": {"count": "8"}}]}, "starts.0.devices.count: must be a valid integer, got '8'"),
        (RUN | {"starts": [{}]}, "starts.0.devices is missing"),
        (RUN | {"starts": {}}, "starts: must be a valid array, got {}"),
    ],
)
def test_a_damaged_record_names_file_and_key(tmp_path: Path, content: object, named: str) -> None:
    message = refusal(lambda: run_with(tmp_path, **{"run.json": content}).record)
    assert message.startswith(f"{tmp_path}/run.json is damaged: ")
    assert named in message


@pytest.mark.parametrize(
    ("name", "content", "key"),
    [
        ("plan.json", {"compiled": {"argument_bytes": "1", "temp_bytes": 2}}, "compiled.argument_bytes"),
        ("plan.json", {"memory": [{"what": "step"}]}, "memory.0.planned_bytes is missing"),
        ("compile.json", {"argument_bytes": 1, "temp_bytes": None}, "temp_bytes"),
        ("slurm/jobs.jsonl", '{"job": 7, "time": "x"}\n', "jobs.jsonl:1: job"),
        ("attempts.jsonl", '{"job": 7, "begin": 1, "end": 2, "exit_code": 0}\n{"job": 7}\n', "attempts.jsonl:2: begin is missing"),
        ("events.jsonl", '{"time": 1.0}\n', "events.jsonl:1: event without 'mono'"),
        ("tensorboard/plugins/profile/a/analysis.json", "{", "analysis.json is damaged"),
    ],
)
def test_a_damaged_file_names_its_place(tmp_path: Path, name: str, content: object, key: str) -> None:
    run = run_with(tmp_path, **{name: content})
    whole = {"plan.json": "plan", "compile.json": "compiled", "slurm/jobs.jsonl": "jobs"}.get(name, Path(name).stem)
    assert key in refusal(lambda: getattr(run, whole))


@pytest.mark.parametrize("value", ['"1"', "null", "true", "[]"])
@pytest.mark.parametrize("key", ["duration_s", "id"])
def test_an_event_with_a_value_of_another_type_names_its_line(tmp_path: Path, key: str, value: str) -> None:
    fields = {"phase": '"save"', "id": "1", "parent": "null", "duration_s": "2.0", "outcome": '"ok"'} | {key: value}
    head = '{"time": 1.0, "mono": 1.0, "run": "r", "process": 0, "restart": 0, "kind": '
    line = head + '"phase_end", ' + ", ".join(f'"{name}": {text}' for name, text in fields.items()) + "}\n"
    run = run_with(tmp_path, **{"events.jsonl": head + '"open"}\n' + line})
    assert refusal(lambda: run.events).startswith(f"{tmp_path}/events.jsonl:2: phase_end with a wrong '{key}'")


def test_the_newest_submission_counts(tmp_path: Path) -> None:
    shipped = load_cluster("dgx-h100").path.read_text()
    contents = {f"slurm/{number}/cluster.yaml": shipped.replace("dgx-h100", f"c{number}") for number in (2, 9, 10)}
    run = run_with(tmp_path, **contents)
    assert run.cluster_file == tmp_path / "slurm/10/cluster.yaml"
    assert run.cluster is not None and run.cluster.name == "c10"
    assert run.price == RunDir(tmp_path / "elsewhere").price_on("dgx-h100")


def test_sizes_come_from_the_compile_report_else_the_plan(tmp_path: Path) -> None:
    sizes = {"argument_bytes": 3, "temp_bytes": 4}
    assert run_with(tmp_path / "a", **{"plan.json": {"compiled": sizes}}).step_bytes == 7
    both = {"plan.json": {"compiled": sizes}, "compile.json": {"argument_bytes": 30, "temp_bytes": 40}}
    assert run_with(tmp_path / "b", **both).step_bytes == 70


def test_a_file_beyond_the_limit_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jsonl, "MAX_LOG_BYTES", 10)
    run = run_with(tmp_path, **{"events.jsonl": "x" * 11})
    assert "at most 10 are read" in refusal(lambda: run.events)
    with pytest.raises(UserError, match="at most 5 are read"):
        read_limited(run.record_file, 5)


def test_a_record_that_is_not_utf8_is_damaged(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_bytes(b'{"name": "\xff"}')
    assert "is damaged" in refusal(lambda: RunDir(tmp_path).record)
    with pytest.raises(UserError):
        RunDir.open(tmp_path)


def test_the_run_above_a_capture_is_found(tmp_path: Path) -> None:
    run = run_with(tmp_path)
    found = RunDir.find_above(tmp_path / "tensorboard/plugins/profile/a")
    assert found is not None and found.path.samefile(run.path)
    assert RunDir.find_above(Path("/")) is None
    assert RunRecord().last_start is None


def test_atomic_write_leaves_the_old_content_when_it_fails(tmp_path: Path) -> None:
    target = tmp_path / "file"
    write_atomically(target, b"old")
    (tmp_path / "file.tmp").mkdir()  # the temporary file cannot be created
    with pytest.raises(OSError, match="directory"):
        write_atomically(target, b"new")
    assert target.read_bytes() == b"old"
