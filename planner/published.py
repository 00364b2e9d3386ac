"""Predictions for published runs: the error of the cost model against measurements of others.

python -m ridgeline.planner.published            # docs/PLANNED_VS_PUBLISHED.md
python -m ridgeline.planner.published ranges     # planner/ranges.csv: the errors by class, from which planner.ranges takes its ranges
"""

from __future__ import annotations

import csv
import functools
import statistics
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

from ridgeline.configs.cluster import load_cluster
from ridgeline.configs.load import load
from ridgeline.configs.model_schema import ModelConfig
from ridgeline.configs.schema import MESH_AXES, Config, DataConfig, MeshConfig, RematConfig, TrainerConfig
from ridgeline.planner.calibration import load_calibration
from ridgeline.planner.hardware import hardware
from ridgeline.planner.ranges import ANY, FIELDS, precision_class
from ridgeline.planner.software import software, software_names
from ridgeline.planner.step_time import Machine, StepEstimate, step_parts

RUNS = Path(__file__).with_name("published.csv")
SOURCES = Path(__file__).with_name("published.yaml")
LONG = 16_384
"""Tokens of a row from which it counts as long."""
VERY_LONG = 131_072
"""Those from which it counts as very long."""
TO_EXPLAIN = 0.15
"""Error of a held-out run from which the page explains it."""


@dataclass(frozen=True)
class Run:
    """One line of planner/published.csv (columns: planner/published.yaml)."""

    source: str
    model: str
    cluster: str
    device: str
    devices: int
    mesh: str
    rows: int
    accumulation: int
    seq_len: int
    matmul: str
    remat: str
    software: str
    tokens_per_s: float
    """Measured, of one device."""
    sets: bool
    """Whether it set a constant."""
    capacity: float | None = None
    """Capacity factor of experts: 1 where the source forces even loads."""
    lacks: str = ""
    """What of the recipe cannot be predicted, a key of `lacks` in planner/published.yaml; such a run is no part of any error."""

    @property
    def name(self) -> str:
        """The model, without the directory of its preset."""
        return self.model.removeprefix("models/")

    @property
    def dtype(self) -> str:
        """Inputs of the layers' matmuls."""
        return "bfloat16" if self.matmul == "compute" else self.matmul

    @property
    def layout(self) -> str:
        """Mesh, microbatches and recomputation."""
        remat = f"keeps {self.remat.replace('+', ', ')}" if "+" in self.remat else self.remat
        return f"{self.mesh.replace(' ', ' x ')}, {self.accumulation} x {self.rows} rows of {self.seq_len:,}, {remat}"


@dataclass(frozen=True)
class Prediction:
    """One published run and its prediction."""

    run: Run
    step: StepEstimate

    @property
    def predicted(self) -> float:
        """Predicted tokens per second and device."""
        return self.step.tokens_per_s_per_device

    @property
    def error(self) -> float:
        """Relative error: 0.1 is 10 % too fast."""
        return self.predicted / self.run.tokens_per_s - 1


@functools.cache
def published_runs() -> tuple[Run, ...]:
    """Return every run of planner/published.csv."""
    with RUNS.open() as file:
        return tuple(_run(line) for line in csv.DictReader(file))


def _run(line: dict[str, str]) -> Run:
    cluster, _, device = line["cluster"].partition("/")
    device = device or load_cluster(cluster).config.device
    values: dict[str, Any] = {key: line[key] for key in ("source", "model", "mesh", "matmul", "remat", "software", "lacks")}
    values |= {key: int(line[key]) for key in ("devices", "rows", "accumulation", "seq_len")}
    values |= {"tokens_per_s": float(line["tokens_per_s"]), "sets": line["sets"] == "sets"}
    return Run(**values, cluster=cluster, device=device, capacity=float(line["capacity"]) if line["capacity"] else None)


@functools.cache
def _documents() -> dict[str, Any]:
    found: dict[str, Any] = YAML(typ="safe").load(SOURCES)
    return found


def run_config(run: Run) -> tuple[Config, dict[str, int]]:
    """Return the config of a published run and its mesh sizes."""
    base = _base(run.model)
    mesh = {key: int(value) for key, value in (part.split("=") for part in run.mesh.split())}
    sizes = {axis: mesh.get(axis, 1) for axis in MESH_AXES}
    remat = RematConfig(policy="names", names=run.remat.split("+")) if "+" in run.remat else RematConfig(policy=run.remat)
    # All other software sends each token to its experts only.
    experts = base.compute.experts.model_copy(update={"capacity_factor": run.capacity, "exchange": "all_to_all"})
    rows = run.rows * run.accumulation * sizes["data"] * sizes["fsdp"] * sizes["expert"]
    return base.model_copy(
        update={
            "mesh": MeshConfig.model_validate(sizes | mesh),
            "trainer": TrainerConfig(accumulation=run.accumulation),
            "data": DataConfig(seq_len=run.seq_len, batch_size=rows, document_masking=False),
            "compute": base.compute.model_copy(update={"remat": remat, "scan_layers": False, "experts": experts}),
            "precision": base.precision.model_copy(update={"matmul": run.matmul}),
        }
    ), sizes


@functools.cache
def _base(model: str) -> Config:
    own = _documents()["models"].get(model)
    return Config(model=ModelConfig(**own)) if own else load(model).config


@functools.cache
def predictions() -> tuple[Prediction, ...]:
    """Predict every published run."""
    return tuple(Prediction(run, _predict(run)) for run in published_runs())


def _predict(run: Run) -> StepEstimate:
    config, sizes = run_config(run)
    cluster = load_cluster(run.cluster, [f"device={run.device}"]).config
    return step_parts(config, sizes, Machine(cluster, load_calibration(None, run.software), run.devices)).assemble()


def held_out() -> list[Prediction]:
    """Return the runs that set no constant and whose whole recipe is predicted."""
    return [found for found in predictions() if not found.run.sets and not found.run.lacks]


# Errors by class.


@dataclass(frozen=True)
class Errors:
    """The relative errors of some runs."""

    runs: int
    median: float
    p90: float
    worst: float

    @classmethod
    def of(cls, found: Iterable[Prediction]) -> Errors:
        """Summarize the absolute errors of runs, of which there is at least one."""
        errors = sorted(abs(each.error) for each in found)
        return cls(len(errors), statistics.median(errors), errors[min(len(errors) - 1, int(0.9 * len(errors)))], errors[-1])

    def cells(self) -> str:
        """Return the cells of a Markdown table."""
        return f"{self.runs} | {self.median:.1%} | {self.p90:.1%} | {self.worst:.1%} |"


def ranges_csv() -> str:
    """Return planner/ranges.csv: errors of the held-out runs by software, generation of the device and precision, and of all together."""
    classes: dict[tuple[str, str, str], list[Prediction]] = {}
    for found in held_out():
        generation, precision = hardware(found.run.device).generation or ANY, precision_class(run_config(found.run)[0])
        for key in (
            (found.run.software, generation, precision),
            (found.run.software, ANY, precision),
            (ANY, generation, precision),
            (ANY, ANY, ANY),
        ):
            classes.setdefault(key, []).append(found)
    lines = [",".join(FIELDS)]
    for key, members in sorted(classes.items()):
        errors = Errors.of(members)
        longest = max(each.run.seq_len for each in members)
        lines.append(f"{','.join(key)},{errors.runs},{longest},{errors.median:.4f},{errors.p90:.4f},{errors.worst:.4f}")
    return "\n".join(lines) + "\n"


# The page.

INTRODUCTION = """\
# Predictions for published runs

Generated by `python -m ridgeline.planner.published > docs/PLANNED_VS_PUBLISHED.md`; a test compares the two. The runs are in
`planner/published.csv`, their models and sources in `planner/published.yaml`. No run has a setting of its own: the same formulas and the
shipped calibration predict all. Each training software has one entry in `planner/software.yaml` (`--software` of `ridge plan` and
`ridge estimate step`), whose constants were fitted to the runs marked *sets*. All other runs are held out: they set nothing.

Tokens/s are per GPU. A positive error is a prediction that is too fast.
"""


def markdown() -> str:
    """Return docs/PLANNED_VS_PUBLISHED.md."""
    found, tests = predictions(), held_out()
    sources = len({_documents()["sources"][each.run.source]["project"] for each in found})
    devices = [each.run.devices for each in found]
    errors = Errors.of(tests)
    lacking = sum(bool(each.run.lacks) for each in found)
    lines = [
        INTRODUCTION,
        f"{len(found)} runs from {sources} projects, 1 to {max(devices):,} GPUs. Of the {errors.runs} held out, the median error is"
        f" {errors.median:.1%}, the 90th percentile {errors.p90:.1%}, the largest {errors.worst:.1%}. {lacking} runs have a"
        " recipe of which a part cannot be predicted; they are listed below and in no error.",
        *_classes(tests),
        *_scaling(found),
        *_worst(tests),
        *_lacking(found),
        *_table(found),
        *_left_out(),
    ]
    return "\n".join(lines) + "\n"


def _classes(tests: Sequence[Prediction]) -> list[str]:
    """Return the tables of errors by class, and those of the runs that set constants."""
    head = ["| {} | held out | median | p90 | worst | set constants | worst of these |", "|---|---:|---:|---:|---:|---:|---:|"]
    groups: dict[str, Callable[[Run], str]] = {
        "software": lambda run: run.software,
        "device": lambda run: run.device,
        "model": lambda run: "with experts" if _base(run.model).model.moe else "dense",
        "matmuls": lambda run: run.dtype.removesuffix("_delayed"),
        "tokens a row": lambda run: (
            "131,072 to 1,048,576" if run.seq_len >= VERY_LONG else "16,384 to 65,536" if run.seq_len >= LONG else "up to 8,192"
        ),
        "GPUs": lambda run: "1 to 8" if run.devices <= 8 else "9 to 128" if run.devices <= 128 else "129 to 2,048",
    }
    lines = ["", "## Errors by class", ""]
    for title, key in groups.items():
        lines += [head[0].format(title), head[1]]
        for name in sorted({key(each.run) for each in tests}, key=lambda name: (name[0].isdigit() and len(name), name)):
            setting = [each for each in predictions() if each.run.sets and key(each.run) == name]
            fitted = f"{len(setting)} | {max(abs(each.error) for each in setting):.1%} |" if setting else "0 | |"
            lines.append(f"| {name} | {Errors.of(each for each in tests if key(each.run) == name).cells()} {fitted}")
        lines.append("")
    lines += ["| software | what | constants set by |", "|---|---|---|"]
    return lines + [f"| {each.name} | {each.description} | {each.source} |" for each in map(software, software_names())]


def _scaling(found: Sequence[Prediction]) -> list[str]:
    """Return how throughput per GPU falls with their number, published and predicted."""
    lines = ["", "## What scale costs", "", *_documents()["scale"], ""]
    lines += ["| run | GPUs | published, % of the fewest GPUs | predicted |", "|---|---|---|---|"]
    for series in _documents()["series"]:
        members = [each for each in found if all(getattr(each.run, key) == value for key, value in series.items())]
        members.sort(key=lambda each: each.run.devices)
        first = members[0]
        published = " / ".join(f"{each.run.tokens_per_s / first.run.tokens_per_s:.0%}".rstrip("%") for each in members)
        predicted = " / ".join(f"{each.predicted / first.predicted:.0%}".rstrip("%") for each in members)
        counts = " / ".join(f"{each.run.devices:,}" for each in members)
        lines.append(f"| {first.run.name} {first.run.dtype} ({first.run.source}) | {counts} | {published} | {predicted} |")
    return lines


def _worst(tests: Sequence[Prediction]) -> list[str]:
    """Return the held-out runs with the largest errors, with what their recipes explain."""
    lines = ["", f"## Held-out runs off by more than {TO_EXPLAIN:.0%}", ""]
    for each in sorted(tests, key=lambda each: -abs(each.error)):
        if abs(each.error) > TO_EXPLAIN:
            run = each.run
            lines.append(f"* {each.error:+.0%} {run.name}, {run.devices} {run.device}, {run.layout} ({run.source}): {explanation(run)}.")
    return lines


def _lacking(found: Sequence[Prediction]) -> list[str]:
    """Return the runs whose recipe cannot be predicted as a whole, by what is missing."""
    lines = ["", "## Runs whose recipe is not predicted as a whole", ""]
    for key, why in _documents()["lacks"].items():
        lines += [f"{why}", ""]
        for each in found:
            run = each.run
            if run.lacks == key:
                lines.append(f"* {each.error:+.0%} {run.name}, {run.devices} {run.device}, {run.layout}, {run.dtype} ({run.source})")
        lines.append("")
    return lines[:-1]


def explanation(run: Run) -> str:
    """Return what explains the error of a run: the first entry of `explained` whose keys it meets."""
    for entry in _documents()["explained"]:
        if all(getattr(run, key) == value for key, value in entry.items() if key != "why"):
            return str(entry["why"])
    return "not explained"


def _table(found: Sequence[Prediction]) -> list[str]:
    """Return every run by source."""
    lines = ["", "## Runs", ""]
    for name, source in _documents()["sources"].items():
        lines += [f"### {name}", "", f"{source['address']}. {source['differs']}.", ""]
        lines += [
            "| run | GPUs | layout | matmuls | software | published | predicted | error | MFU | |",
            "|---|---|---|---|---|---:|---:|---:|---:|---|",
        ]
        for each in found:
            run = each.run
            if run.source == name:
                lines.append(
                    f"| {run.name} | {run.devices} {run.device} | {run.layout} | {run.dtype} | {run.software} |"
                    f" {run.tokens_per_s:,.0f} | {float(f'{each.predicted:.3g}'):,.0f} | {each.error:+.0%} | {each.step.mfu:.0%} |"
                    f" {'sets' if run.sets else 'not whole' if run.lacks else ''} |"
                )
        lines.append("")
    return lines[:-1]


def _left_out() -> list[str]:
    items = [f"* {item['what']}: {item['why']}." for item in _documents()["left_out"]]
    return ["", "## Published figures left out", "", *items]


if __name__ == "__main__":
    print(ranges_csv() if sys.argv[1:] == ["ranges"] else markdown(), end="")
