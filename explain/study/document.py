"""The study document: its keys and types, its table, and its files (study.json, study.md and one picture per plot).

`explain.study.scaling` and `explain.study.sweep` build it; `ridge report` and `ridge diagnose` read it back. A row of a scale or value that
failed has `failure` and none of the measured keys.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NotRequired, TypeGuard  # pydantic needs this TypedDict before Python 3.12

from pydantic import ConfigDict, TypeAdapter, ValidationError, with_config
from typing_extensions import TypedDict

from ridgeline.configs.errors import UserError
from ridgeline.configs.files import read_limited
from ridgeline.configs.format import format_count, format_seconds
from ridgeline.explain.study.ladder_document import FittedLossLaw, LadderCheck, LadderModel, LadderRow
from ridgeline.rundir.files import first_problem, write_atomically

FORMAT = 1
FILE = "study.json"
_CONFIG = ConfigDict(extra="allow", strict=True)


class Prediction(TypedDict, total=False):
    """The planner's prediction for one scale."""

    tokens_per_s: float
    step_s: float
    breakdown_s: Mapping[str, float]
    """Term of the step time -> seconds."""
    cluster: str
    rates: str
    """Name of the calibration."""
    why_none: str
    """Why there is no prediction."""


@with_config(_CONFIG)
class Row(TypedDict):
    """What every row holds."""

    runs: list[str]
    """Run directories of the finished repeats."""
    repeats: int
    failures: list[str]
    failure: str | None
    """Why no repeat finished; None when one did."""
    tokens_per_s: NotRequired[float]
    """Over all devices, after the warm-up; median of the repeats."""
    spread: NotRequired[float]
    """Of tokens_per_s (rundir.noise.spread)."""
    step_s: NotRequired[float]
    compile_s: NotRequired[float]
    peak_bytes: NotRequired[int | None]


@with_config(_CONFIG)
class ScalingRow(Row):
    """One scale of a scaling study."""

    devices: int
    nodes: int | None
    mesh: str
    """Sizes of the mesh axes larger than 1, as in fsdp=4."""
    batch_size: int | None
    prediction: Prediction
    tokens_per_s_per_device: NotRequired[float]
    steps: NotRequired[int]
    warmup_steps: NotRequired[int]
    speedup: NotRequired[float | None]
    efficiency: NotRequired[float | None]
    marginal_gain: NotRequired[float | None]
    """Relative gain in tokens/s over the previous scale."""
    time_s: NotRequired[float]
    """Time to solution."""
    time_spread: NotRequired[float]
    time_speedup: NotRequired[float | None]
    marginal_time: NotRequired[float | None]
    startup_s: NotRequired[float]
    queue_s: NotRequired[float]
    goodput: NotRequired[float]
    tokens: NotRequired[float]
    """Of the run that `time_s` is for."""
    device_hours: NotRequired[float]
    usd: NotRequired[float | None]
    tokens_per_device_hour: NotRequired[float]
    tokens_per_usd: NotRequired[float | None]
    predicted_tokens_per_s: NotRequired[float | None]
    measured_over_predicted: NotRequired[float | None]


@with_config(_CONFIG)
class SweepRow(Row):
    """One value of a sweep."""

    value: Any
    gain: NotRequired[float | None]
    """Relative gain in tokens/s over the previous value."""
    gain_per_doubling: NotRequired[float | None]
    memory_change: NotRequired[float | None]


class FittedLaw(TypedDict):
    """The law of explain/study/law.py: fixed_s + work_s / devices + sync_s * log2(devices)."""

    fixed_s: float
    work_s: float
    sync_s: float
    worst_error: float
    fastest_devices: NotRequired[float | None]
    """Number of devices from which on more devices are slower; None: no such number."""


class NextScale(TypedDict):
    """The forecast for twice the largest scale."""

    devices: int
    time_s: float
    time_low_s: float
    time_high_s: float
    marginal_time: float | None
    tokens_per_s: NotRequired[float]
    tokens_per_s_low: NotRequired[float]
    tokens_per_s_high: NotRequired[float]
    efficiency: NotRequired[float]


class Stop(TypedDict):
    """The scale at which to stop for one objective."""

    devices: int
    why: str


class Choice(TypedDict):
    """The value to choose for one objective."""

    value: Any
    why: str


@with_config(_CONFIG)
class Document(TypedDict):
    """What every study document holds."""

    format: int
    kind: str
    """`scaling`, `ladder`, or `sweep of <key>`."""
    name: str
    objective: str
    verdict: list[str]
    """Sentences, the most important first."""
    findings: NotRequired[list[dict[str, Any]]]
    """Of the diagnosis rules on several runs."""


@with_config(_CONFIG)
class ScalingStudy(Document):
    """A scaling study."""

    mode: Literal["strong", "weak"]
    price_usd: float | None
    """Of one device and hour."""
    tokens: float | None
    """Of the run whose time to solution was requested; None: of the measured runs."""
    rows: list[ScalingRow]
    """Smallest scale first."""
    law: FittedLaw | None
    """Of the times to solution."""
    step_law: FittedLaw | None
    """Of the times of a step."""
    next: NextScale | None
    stop: dict[str, Stop]
    """By objective."""
    doubts: list[str]
    where: NotRequired[str]
    """Where the runs ran."""
    axis: NotRequired[str | None]
    """Mesh axis that grows."""
    cores: NotRequired[int | None]
    """CPU cores that all virtual devices share; None for real devices."""


@with_config(_CONFIG)
class SweepStudy(Document):
    """A sweep of one config key."""

    key: str
    rows: list[SweepRow]
    """In the order of the values given."""
    flat_from: Any
    """Value from which on throughput is flat; None: not flat, or the values are not numbers."""
    choice: dict[str, Choice]
    """By objective."""
    devices: NotRequired[int]


@with_config(_CONFIG)
class LadderStudy(Document):
    """A scaling-law ladder."""

    rows: list[LadderRow]
    """Least compute first."""
    loss_of: str
    """`training`, or the name of an evaluation set."""
    tokens_per_parameter: float
    law: FittedLossLaw
    check: LadderCheck | None
    """None: two sizes."""
    target: LadderModel
    recommendation: LadderModel
    """The size with the proportions of the config whose run takes the budget."""
    budget_flops: float
    doubts: list[str]
    where: NotRequired[str]


Study = ScalingStudy | SweepStudy | LadderStudy
Column = tuple[str, str, Callable[[Any], str]]
"""Key of a row, heading, and the format of its values."""


def _percent(value: float) -> str:
    return f"{value:.1%}"


def _change(value: float) -> str:
    return f"{value:+.1%}"


def _figure(value: float) -> str:
    return f"{value:,.4g}"


_SCALING_COLUMNS: tuple[Column, ...] = (
    ("devices", "devices", str),
    ("nodes", "nodes", str),
    ("mesh", "mesh", str),
    ("batch_size", "batch", str),
    ("tokens_per_s", "tokens/s", format_count),
    ("spread", "+-", _percent),
    ("predicted_tokens_per_s", "planned", format_count),
    ("measured_over_predicted", "of plan", _percent),
    ("speedup", "speed-up", lambda value: f"{value:.2f}"),
    ("efficiency", "efficiency", _percent),
    ("marginal_gain", "gain", _change),
    ("step_s", "step", format_seconds),
    ("time_s", "time s", lambda value: f"{value:,.1f}"),
    ("time_spread", "+-", _percent),
    ("startup_s", "start-up s", lambda value: f"{value:.1f}"),
    ("compile_s", "compile s", lambda value: f"{value:.1f}"),
    ("queue_s", "queue s", lambda value: f"{value:.1f}"),
    ("device_hours", "device-hours", _figure),
    ("usd", "USD", _figure),
    ("tokens_per_device_hour", "tokens/device-hour", format_count),
    ("tokens_per_usd", "tokens/USD", format_count),
    ("failure", "failed because", str),
)
_SWEEP_COLUMNS: tuple[Column, ...] = (
    ("value", "value", str),
    ("tokens_per_s", "tokens/s", format_count),
    ("spread", "+-", _percent),
    ("step_s", "step", format_seconds),
    ("gain", "gain", _change),
    ("gain_per_doubling", "per doubling", _change),
    ("peak_bytes", "memory GB", lambda value: f"{value / 1e9:.3f}"),
    ("memory_change", "memory", _change),
    ("compile_s", "compile s", lambda value: f"{value:.1f}"),
    ("failure", "failed because", str),
)
_LADDER_COLUMNS: tuple[Column, ...] = (
    ("size", "size", str),
    ("params", "parameters", format_count),
    ("tokens", "tokens", format_count),
    ("steps", "steps", str),
    ("flops", "FLOP", lambda value: f"{value:.2e}"),
    ("loss", "loss", lambda value: f"{value:.4f}"),
    ("spread", "+-", lambda value: f"{value:.2%}"),
    ("fitted", "law", lambda value: f"{value:.4f}"),
    ("failure", "failed because", str),
)
_ONLY_WITH_VALUES: frozenset[str] = frozenset(
    {"nodes", "predicted_tokens_per_s", "measured_over_predicted", "usd", "tokens_per_usd", "failure", "queue_s", "spread", "time_spread"}
)
"""Columns that are left out when no row has a value other than 0 in them."""
_STYLE = '<svg style="background:#fff;font:12px system-ui,sans-serif" '
"""Style of a picture outside the report page, which has a style sheet."""


def is_scaling(study: Study) -> TypeGuard[ScalingStudy]:
    """Whether a document is a scaling study, not a sweep."""
    return study["kind"] == "scaling"


def is_ladder(study: Study) -> TypeGuard[LadderStudy]:
    """Whether a document is a scaling-law ladder."""
    return study["kind"] == "ladder"


def columns(study: Study) -> list[Column]:
    """Return the columns of the table of a study."""
    everything = _SCALING_COLUMNS if is_scaling(study) else _LADDER_COLUMNS if is_ladder(study) else _SWEEP_COLUMNS
    rows: Sequence[Mapping[str, Any]] = study["rows"]
    return [column for column in everything if column[0] not in _ONLY_WITH_VALUES or any(row.get(column[0]) for row in rows)]


def cells(study: Study, shown: Sequence[Column]) -> list[list[str]]:
    """Return the cells of the table of a study, a list per row."""
    rows: Sequence[Mapping[str, Any]] = study["rows"]
    return [["n/a" if row.get(key) is None else write(row[key]) for key, _, write in shown] for row in rows]


def markdown(study: Study, pictures: Sequence[str] = ()) -> str:
    """Return a study as a Markdown page: verdict, table, pictures by file name."""
    shown = columns(study)
    lines = [f"# {study['name']}: {study['kind']} study", ""]
    lines += [f"* {sentence}" for sentence in study["verdict"]]
    lines += ["", f"| {' | '.join(heading for _, heading, _ in shown)} |", f"|{'---|' * len(shown)}"]
    lines += [f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |" for row in cells(study, shown)]
    lines += ["", *(f"![{name}]({name})" for name in pictures), ""]
    return "\n".join(lines)


def write_study(study: Study, output: Path, pictures: Mapping[str, str]) -> None:
    """Write a study into its directory.

    Args:
      study: the document.
      output: directory, created when absent.
      pictures: name -> SVG.

    Raises:
      UserError: a file cannot be written.
    """
    try:
        output.mkdir(parents=True, exist_ok=True)
        for name, picture in pictures.items():
            (output / f"{name}.svg").write_text(picture.replace("<svg ", _STYLE, 1), encoding="utf-8")
        (output / "study.md").write_text(markdown(study, [f"{name}.svg" for name in pictures]), encoding="utf-8")
        write_atomically(output / FILE, (json.dumps(study, indent=1) + "\n").encode())
    except OSError as error:
        raise UserError(f"{output}: the study cannot be written: {error.strerror}") from error


def read_study(directory: Path) -> Study | None:
    """Return the study in a directory, its types checked; None for a directory without study.json. Raises UserError when damaged."""
    file = directory / FILE
    if not file.is_file():
        return None
    data = read_limited(file)
    try:
        TypeAdapter(Document).validate_json(data)
        study: Study = json.loads(data)
        kind: type = ScalingStudy if is_scaling(study) else LadderStudy if is_ladder(study) else SweepStudy
        TypeAdapter(kind).validate_json(data)
    except ValidationError as error:
        raise UserError(f"{file} is damaged: {first_problem(error)}") from None
    return study


def study_runs(study: Study, directory: Path) -> list[Path]:
    """Return the run directories of a study, in the order of its rows. Runs inside a directory that was moved are found there."""
    recorded = [Path(run) for row in study["rows"] for run in row["runs"]]
    moved = [directory / run.name if is_ladder(study) else directory / "runs" / run.name for run in recorded]
    return [there if there.is_dir() else run for run, there in zip(recorded, moved, strict=True)]
