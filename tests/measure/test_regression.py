"""Stored results and the guard over them: like with like, faster, slower or cannot tell; and the experiment made from them."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ridgeline.configs.errors import UserError
from ridgeline.configs.schema import Config
from ridgeline.measure.experiment import BLANK, append, experiment
from ridgeline.measure.regression import judge
from ridgeline.rundir.bench_results import Device, Stored, config_sha256, default_path, provenance, read, read_all, write

NOW = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
Store = Callable[..., Path]


@pytest.fixture(scope="module")
def made_here() -> dict[str, Any]:
    """The provenance of a measurement by this very code."""
    device = Device("gpu", "NVIDIA H100", 8, 1)
    return provenance(Config(), command=["ridge", "bench", "loop"], overrides=[], device=device, now=NOW)


@pytest.fixture
def store(tmp_path: Path, made_here: dict[str, Any]) -> Store:
    """Store a result: steps that take `step_s` seconds with a little scatter; keyword arguments change the provenance."""
    written = iter(range(1000))

    def make(step_s: float = 1.0, *, code: str = "a" * 40, config: Config | None = None, at: int | None = None, **changed: Any) -> Path:
        number, config = next(written), config or Config()
        made_with = {**made_here, "config_sha256": config_sha256(config)}
        made_with |= {"time": f"2026-01-02T03:04:{at if at is not None else number:02d}+00:00", "neighbours": 0.0}
        made_with |= {"code": {"commit": code, "dirty": False, "untracked": [], "diff_sha256": None}, **changed}
        rng = np.random.default_rng(number)
        series = {name: list(scale * step_s * np.exp(rng.normal(0, 0.003, 5))) for name, scale in (("step", 1.0), ("loop", 1.1))}
        return write(tmp_path / "results" / f"{number:03d}.json", {"task": "loop", "series": series}, config, made_with)

    return make


def verdicts(baseline: Path, new: Path, *changes: str) -> dict[str, str]:
    return {v.layer: v.comparison.verdict for v in judge(read_all(baseline), read_all(new), changes).layers}


# -- storing ----------------------------------------------------------------------------------------------------------------------------


def test_a_result_records_how_it_was_measured(tmp_path: Path) -> None:
    config = Config()
    made_with = provenance(
        config, command=["ridge", "bench", "all", "x.yaml"], overrides=["seed=1"], device=Device("cpu", "cpu", 8, 1), now=NOW
    )
    path = write(default_path(tmp_path, "all", "mine", NOW), {"task": "all", "series": {"step": [1.0, 1.1, 1.0]}}, config, made_with)
    assert path == tmp_path / "all" / "20260102T030405-mine.json"
    stored = read(path)
    assert stored.series == {"step": [1.0, 1.1, 1.0]}
    assert stored.config == config.model_dump(mode="json")
    found = stored.provenance
    assert found["time"] == "2026-01-02T03:04:05+00:00"
    assert found["command"] == ["ridge", "bench", "all", "x.yaml"]
    assert found["overrides"] == ["seed=1"]
    assert found["config_sha256"] == config_sha256(config) != config_sha256(Config(seed=1))
    assert found["device"] == {"platform": "cpu", "kind": "cpu", "count": 8, "processes": 1}
    assert {"jax", "jaxlib", "numpy"} <= found["packages"].keys()
    assert found["cpu"]["model"]
    assert found["cpu"]["cores"] >= 1
    assert "xla_force_host_platform_device_count" in found["xla_flags"]  # tests/conftest.py
    assert found["environment"]["JAX_PLATFORMS"] == "cpu"
    assert {"commit", "diff_sha256"} <= found["code"].keys()
    assert {"host", "user", "directory", "python", "system"} <= found.keys()


def test_uncommitted_changes_are_other_code(store: Store) -> None:
    clean, again, other = (read(store(code=letter * 40)) for letter in "bbc")
    assert clean.code == again.code == "bbbbbbbbbbbb" != other.code
    changed = {"commit": "b" * 40, "dirty": True, "untracked": [], "diff_sha256": "d" * 64}
    path = store()
    content = json.loads(path.read_text())
    path.write_text(json.dumps({**content, "provenance": {**content["provenance"], "code": changed}}))
    assert read(path).code == "bbbbbbbbbbbb with changes dddddddd"


def test_a_stored_result_is_never_overwritten(store: Store) -> None:
    path = store()
    stored = read(path)
    with pytest.raises(UserError, match="exists already"):
        write(path, {"task": "loop", "series": {}}, Config(), stored.provenance)
    assert read(path) == stored


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", "not JSON"),
        ('{"format": 1, "task": "st', "not JSON"),
        ("[1, 2]", "not a result of ridge bench"),
        ('{"rows": []}', "not a result of ridge bench"),
        ({"format": 99}, "has format 99; this version of ridge reads format 1"),
        ({"series": {"step": [1.0, "x"]}}, r"damaged: series\.step\.1"),
        ({"series": {"step": [1.0, float("nan")]}}, r"damaged: .*(series\.step\.1|NaN)"),
        ({"provenance": {"time": "now"}}, r"damaged: provenance\.code is missing"),
    ],
)
def test_what_is_no_result_is_one_clear_line(store: Store, content: str | dict[str, Any], words: str) -> None:
    path = store()
    path.write_text(content if isinstance(content, str) else json.dumps({**json.loads(path.read_text()), **content}))
    with pytest.raises(UserError, match=words) as refused:
        read(path)
    assert str(path) in str(refused.value)
    assert "\n" not in str(refused.value)


def test_nothing_to_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="nowhere not found"):
        read_all(tmp_path / "nowhere")
    with pytest.raises(UserError, match="contains no result"):
        read_all(tmp_path)


# -- judging ----------------------------------------------------------------------------------------------------------------------------


def test_twice_as_slow_is_slower_and_half_is_faster(store: Store) -> None:
    old, slow = store(1.0), store(2.0, code="b" * 40)
    assert verdicts(old, slow) == {"step": "slower", "loop": "slower"}
    assert verdicts(slow, old) == {"step": "faster", "loop": "faster"}
    found = judge(read_all(old), read_all(slow))
    assert found.slower == ["step", "loop"]
    assert found.headline() == "slower: step, loop"


def test_one_percent_is_not_reported_and_neither_is_zero(store: Store) -> None:
    assert set(verdicts(store(1.0), store(1.01, code="b" * 40)).values()) == {"cannot tell"}
    assert set(verdicts(store(1.0), store(1.0, code="b" * 40)).values()) == {"cannot tell"}


def test_runs_of_unchanged_code_set_the_noise(store: Store, tmp_path: Path) -> None:
    for step_s in (0.9, 1.0, 1.12, 0.95, 1.08):
        store(step_s)
    new = store(1.3, code="b" * 40)
    found = judge(read_all(tmp_path / "results"), read_all(new))
    assert len(found.old) == 5
    # deviation 0.09 over five runs against one, with four degrees of freedom
    assert found.layers[0].comparison.between_runs == pytest.approx(0.09 * math.sqrt((1 / 5 + 1) / 2) * 1.79, rel=0.1)
    assert found.layers[0].noise_from == "5 runs of the same code"
    assert {v.comparison.verdict for v in found.layers} == {"cannot tell"}  # 30 % is within such noise
    assert set(verdicts(tmp_path / "results", store(2.6, code="c" * 40)).values()) == {"slower"}


@pytest.mark.parametrize("counts", [(3, 1), (5, 1), (3, 3), (1, 3)])
def test_other_code_of_the_same_speed_is_called_different_once_in_a_hundred_times(store: Store, counts: tuple[int, int]) -> None:
    """However few runs tell the noise, which is 10 % here."""
    old, new = read(store()), read(store(code="b" * 40))
    rng = np.random.default_rng(1)

    def runs(like: Stored, count: int) -> list[Stored]:
        steps = [float(np.exp(rng.normal(0, 0.1))) for _ in range(count)]
        return [dataclasses.replace(like, path=Path(f"{like.code}{i}"), series={"step": [s, s, s]}) for i, s in enumerate(steps)]

    verdicts = [judge(runs(old, counts[0]), runs(new, counts[1])).headline() for _ in range(100)]
    assert verdicts.count("cannot tell: step") >= 96


def test_more_runs_tell_a_smaller_difference(store: Store) -> None:
    old, new = read(store()), read(store(code="b" * 40))

    def headline(count: int) -> str:
        def runs(like: Stored, step_s: float) -> list[Stored]:
            noisy = [step_s * factor for factor in np.exp(np.linspace(-0.05, 0.05, count))]
            return [dataclasses.replace(like, path=Path(f"{like.code}{i}"), series={"step": [s, s, s]}) for i, s in enumerate(noisy)]

        return judge(runs(old, 1.0), runs(new, 1.12)).headline()

    assert headline(3) == "cannot tell: step"
    assert headline(12) == "slower: step"


def test_two_runs_of_the_same_code_never_differ(store: Store) -> None:
    """However far apart: the machine was busy, nothing else can have changed."""
    found = judge(read_all(store(1.0)), read_all(store(3.0)))
    assert {v.comparison.verdict for v in found.layers} == {"cannot tell"}
    assert any("same code" in note for note in found.notes)


def test_other_load_on_the_machine_widens_the_interval(store: Store) -> None:
    old = store(1.0)
    quiet, busy = store(1.5, code="b" * 40), store(1.5, code="b" * 40, neighbours=0.6)
    assert set(verdicts(old, quiet).values()) == {"slower"}
    found = judge(read_all(old), [read(busy)])
    assert {v.comparison.verdict for v in found.layers} == {"cannot tell"}
    assert any("60% of the cores" in note for note in found.notes)


def test_the_newest_other_code_is_the_baseline(store: Store, tmp_path: Path) -> None:
    store(5.0, code="0" * 40)
    old = [store(1.0, code="a" * 40) for _ in range(3)]
    new = [store(2.0, code="b" * 40) for _ in range(3)]
    found = judge(read_all(tmp_path / "results"), read_all(new[-1]))
    assert [s.path for s in found.old] == old
    assert found.slower == ["step", "loop"]
    assert any("left out of the baseline: 3 other results" in note for note in found.notes)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"device": {"platform": "gpu", "kind": "NVIDIA A100", "count": 8, "processes": 1}}, "device NVIDIA A100, NVIDIA H100"),
        ({"device": {"platform": "gpu", "kind": "NVIDIA H100", "count": 4, "processes": 1}}, "number of devices 4, 8"),
        ({"device": {"platform": "gpu", "kind": "NVIDIA H100", "count": 8, "processes": 2}}, "number of processes 2, 1"),
        ({"cpu": {"model": "Other CPU", "cores": 4}}, "processor Other CPU, "),
        (
            {"config": Config.model_validate({"data": {"batch_size": 16}})},
            r"config data.batch_size 16, 8 \(if that is the change under test: ",
        ),
    ],
)
def test_what_cannot_be_compared_is_one_line_naming_the_difference(store: Store, changed: dict[str, Any], words: str) -> None:
    old, new = store(1.0, **changed), store(1.0, code="b" * 40)
    with pytest.raises(UserError, match=words) as refused:
        judge(read_all(old), read_all(new))
    assert "\n" not in str(refused.value)
    assert str(old) in str(refused.value)


def test_the_change_under_test_may_differ_when_it_is_named(store: Store) -> None:
    larger = Config.model_validate({"data": {"batch_size": 16}})
    old, new = store(1.0), store(2.0, config=larger)
    assert set(verdicts(old, new, "data.batch_size").values()) == {"slower"}
    assert set(verdicts(old, new, "data").values()) == {"slower"}
    with pytest.raises(UserError, match=r"config data.batch_size"):
        judge(read_all(old), read_all(new), ["trainer"])
    with pytest.raises(UserError, match=r"do not differ in data.batch_size"):
        judge(read_all(old), read_all(store(1.0, code="b" * 40)), ["data.batch_size"])


def test_another_task_or_only_itself_is_refused(store: Store) -> None:
    old, new = store(1.0), store(1.0, code="b" * 40)
    old.write_text(json.dumps({**json.loads(old.read_text()), "task": "all"}))
    with pytest.raises(UserError, match="task all, loop"):
        judge(read_all(old), read_all(new))
    with pytest.raises(UserError, match=r"only .*itself"):
        judge(read_all(new), read_all(new))


def test_names_and_paths_may_differ_and_versions_are_reported(store: Store) -> None:
    old = store(1.0, config=Config(name="one"), packages={"jax": "0.10.2", "click": "8"}, xla_flags="--a")
    new = store(1.0, config=Config(name="two"), packages={"jax": "0.12.0", "click": "9"}, xla_flags="--b", host="elsewhere")
    notes = judge(read_all(old), read_all(new)).notes
    assert "packages differ: jax 0.10.2, 0.12.0, 1 others" in notes
    assert "XLA_FLAGS differ: '--a', '--b'" in notes
    assert any(note.startswith("hosts differ") for note in notes)


# -- the experiment ---------------------------------------------------------------------------------------------------------------------


def test_an_experiment_begins_with_everything_to_be_filled_in() -> None:
    text = experiment("A larger batch", date(2026, 1, 2))
    assert text.startswith("### 2026-01-02 A larger batch\n")
    parts = ["**Hypothesis.**", "**Predicted effect.**", "**Change.**", "**Measured effect.**", "**Decision.**"]
    assert [part for part in parts if part in text] == parts
    assert sorted(parts, key=text.index) == parts
    assert all(blank in text for blank in BLANK.values())


def test_two_results_fill_in_the_change_and_the_effect(store: Store) -> None:
    old, new = store(1.0), store(0.5, code="b" * 40, config=Config.model_validate({"data": {"batch_size": 4}}))
    found = judge(read_all(old), read_all(new), ["data.batch_size"])
    text = experiment("Half", date(2026, 1, 2), judgment=found, hypothesis="It is large.", predicted="Half the time.", decision="Kept.")
    assert not any(blank in text for blank in BLANK.values())
    assert "* **Change.** code aaaaaaaaaaaa -> bbbbbbbbbbbb; `data.batch_size` 8 -> 4\n" in text
    assert "* **Measured effect.** faster: step, loop (`ridge bench loop`, 8 x NVIDIA H100, 1 and 1 run)." in text
    rows = [line for line in text.splitlines() if line.startswith("  | step |")]
    assert len(rows) == 1
    assert "| faster by " in rows[0]
    assert text.endswith("* **Decision.** Kept.\n")


def test_a_section_is_added_at_the_end(tmp_path: Path) -> None:
    log = tmp_path / "LOG.md"
    append(log, "first\n")
    append(log, "second\n")
    assert log.read_text() == "first\n\nsecond\n"
    with pytest.raises(UserError, match="cannot be written"):
        append(tmp_path / "no" / "LOG.md", "third\n")
