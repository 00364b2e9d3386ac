"""Several runs as one set of facts: what differs between them says which comparison they are.

    devices (and with them the batch: weak scaling)      -> facts.study
    batch size                                           -> facts.batch_study
    model and devices                                    -> facts.size_studies
    performance settings                                 -> facts.simpler: the run with the most against the one with the fewest

Runs that differ in nothing are repeats. Runs that differ in anything else are refused, with the keys: a comparison changes one thing.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Hashable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from ridgeline.configs.diff import diff
from ridgeline.configs.errors import UserError
from ridgeline.configs.schema import Config
from ridgeline.explain.diagnosis.facts import Facts, read_facts
from ridgeline.explain.diagnosis.knobs import SECTIONS, Rival, beyond, knobs
from ridgeline.explain.study.measured import MeasuredRun, read_measured
from ridgeline.explain.study.scaling import Point, Study, analyse
from ridgeline.planner.parameters import count_parameters
from ridgeline.rundir.noise import compare, median, spread

OWN = ("name", "run_dir", "logging.", "checkpoint.", "profiler.", "runtime.compilation_cache", "runtime.rendezvous_timeout_s")
"""Keys that every run may have to itself: they are not the work."""
SCALE = ("mesh.pipeline", "mesh.data", "mesh.fsdp", "mesh.context", "mesh.tensor", "mesh.expert", "runtime.cpu_devices")
"""Keys that say how many devices there are, and how they are arranged."""
STUDY_FILE = "study.json"
K = TypeVar("K", bound=Hashable)


def read_several(
    runs: Sequence[Path], *, price_usd: float | None = None, warmup_steps: int | None = None, tokens: float | None = None
) -> Facts:
    """Gather the facts of several finished runs of the same work; the facts of a single run are those of the first.

    Args:
      runs: their directories.
      price_usd: of one device and hour.
      warmup_steps: see explain.study.measured.read_measured.
      tokens: of the run whose time to solution is asked for; None: of the runs that were made.

    Raises:
      UserError: a run is missing, damaged, unfinished or too short; or they differ in more than one thing, or in nothing.
    """
    measured = [read_measured(run, warmup_steps=warmup_steps) for run in runs]
    return facts_of(measured, price_usd=price_usd, tokens=tokens)


def study_runs(directory: Path) -> list[Path] | None:
    """Return the finished runs of a study's directory (`ridge scale`, `ridge bench sweep`); None for a directory that is none.

    Raises UserError when its file is damaged.
    """
    if not (directory / STUDY_FILE).is_file():
        return None
    recorded = [Path(run) for row in read_study(directory)["rows"] for run in row["runs"]]
    moved = [directory / "runs" / run.name for run in recorded]  # a study that was copied brings its runs along
    return [there if there.is_dir() else run for run, there in zip(recorded, moved, strict=True)]


def read_study(directory: Path) -> dict[str, Any]:
    """Return the study.json of a study's directory. Raises UserError when there is none, or it is damaged."""
    file = directory / STUDY_FILE
    try:
        study: dict[str, Any] = json.loads(file.read_bytes())
        _ = study["kind"], study["verdict"], [row["runs"] for row in study["rows"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{file} cannot be read: {error}") from None
    return study


def facts_of(measured: Sequence[MeasuredRun], *, price_usd: float | None = None, tokens: float | None = None) -> Facts:
    """Build the facts of several measured runs (arguments and errors as of `read_several`)."""
    keys = differing_keys(measured)
    mesh = any(key in SCALE for key in keys) or len({run.devices for run in measured}) > 1
    scales = len({run.devices for run in measured}) > 1
    rest = {key for key in keys if key not in SCALE}
    grown = max(measured, key=lambda run: run.devices).config.mesh.sizes
    axis = max((name for name in grown if f"mesh.{name}" in keys), key=lambda name: grown[name], default=None)
    more: dict[str, Any] = {"price_usd": price_usd, "axis": axis}
    price = price_usd or 1.0  # without one, or where devices are free, device-hours
    subject = measured[0]
    if rest and all(key.startswith("model.") for key in rest) and scales:
        groups = _grouped(measured, lambda run: count_parameters(run.config.model).total)
        several = {size: group for size, group in groups.items() if len({run.devices for run in group}) > 1}
        if len(several) < 2:
            raise UserError("runs of several models say how each scales when at least two models ran at two numbers of devices or more")
        more["size_studies"] = {size: scaling_study(group, price) for size, group in several.items()}
    elif scales and (not rest or (rest == {"data.batch_size"} and is_weak(measured))):
        more["study"] = scaling_study(measured, price, tokens)
    elif rest == {"data.batch_size"} and not mesh:
        more["batch_study"] = batch_study(measured, price)
    elif not mesh and (rest or _flags_differ(measured)) and all(key.startswith(SECTIONS) for key in rest):
        subject, more["simpler"] = _rivals(measured)
    else:
        told = ", ".join(sorted(keys)) or "nothing: they are repeats of one run"
        raise UserError(
            f"these {len(measured)} runs differ in {told}. A comparison changes one thing: the devices (mesh), data.batch_size, the model "
            "at several scales, or performance settings (compute, precision)"
        )
    return read_facts(subject.path, **more)


def differing_keys(measured: Sequence[MeasuredRun]) -> list[str]:
    """Return the config keys in which any run differs from the first, without those every run may have to itself."""
    return drift([run.config for run in measured])


def drift(configs: Sequence[Config]) -> list[str]:
    """Return the config keys in which any config differs from the first, without those every run may have to itself, in their order."""
    keys = dict.fromkeys(key for config in configs[1:] for key, *_ in diff(configs[0], config))
    return [key for key in keys if not key.startswith(OWN)]


def is_weak(measured: Sequence[MeasuredRun]) -> bool:
    """Whether every run has the same batch per device."""
    return len({run.config.data.batch_size / run.devices for run in measured}) == 1


def scaling_study(measured: Sequence[MeasuredRun], price: float = 1.0, tokens: float | None = None) -> Study:
    """Analyse runs at several numbers of devices; several runs at one are repeats. `tokens`: see `read_several`."""
    grows = tokens is None and len({run.tokens for run in measured}) > 1  # weak scaling: the work grows with the devices
    points = [point(devices, group, grows, tokens) for devices, group in _grouped(measured, lambda run: run.devices).items()]
    return analyse(points, price_per_device_hour=price)


def batch_study(measured: Sequence[MeasuredRun], price: float = 1.0) -> Study:
    """Analyse runs at several batch sizes, which take the place of devices; only rates compare, since the work differs."""
    groups = _grouped(measured, lambda run: run.config.data.batch_size)
    points = [
        Point(batch, rate=median([r.tokens_per_s for r in g]), spread=spread([r.tokens_per_s for r in g])) for batch, g in groups.items()
    ]
    return analyse(points, price_per_device_hour=price)


def point(devices: int, repeats: Sequence[MeasuredRun], grows: bool, tokens: float | None) -> Point:
    """Return the point of repeated runs at one scale: medians, and the larger spread of time and rate."""
    times_s, rates = [run.solution_s(tokens) for run in repeats], [run.tokens_per_s for run in repeats]
    return Point(devices, median(times_s), median(rates), max(spread(times_s), spread(rates)), work=repeats[0].tokens if grows else None)


def _rivals(measured: Sequence[MeasuredRun]) -> tuple[MeasuredRun, Rival]:
    """Return the run with the most performance settings, and the one with the fewest against it."""
    groups = _grouped(measured, lambda run: tuple(sorted((k, str(v)) for k, v in knobs(run.config, run.own_flags).items())))
    ordered = sorted(groups, key=len)
    simple, complex_ = groups[ordered[0]], groups[ordered[-1]]
    subject, rival = complex_[0], simple[0]
    windows = [[s for run in group for s in run.windows_s] for group in (simple, complex_)]
    extra = beyond(subject.config, subject.own_flags, rival.config, rival.own_flags)
    return subject, Rival(rival.path.name, extra, compare(*windows))


def _flags_differ(measured: Sequence[MeasuredRun]) -> bool:
    return any(run.own_flags != measured[0].own_flags for run in measured)


def _grouped(runs: Sequence[MeasuredRun], key: Callable[[MeasuredRun], K]) -> dict[K, list[MeasuredRun]]:
    groups: dict[K, list[MeasuredRun]] = {}
    for run in runs:
        groups.setdefault(key(run), []).append(run)
    return groups
