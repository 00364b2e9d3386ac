"""Several runs as one set of facts: what differs between them decides which comparison they are.

    devices (and with them the batch: weak scaling)      -> facts.study
    batch size                                           -> facts.batch_study
    model and devices                                    -> facts.size_studies
    performance settings                                 -> facts.simpler: the run with the most against the one with the fewest

Runs that differ in nothing are repeats. Runs that differ in anything else are refused with the keys: a comparison changes one thing.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from ridgeline.configs.diff import diff
from ridgeline.configs.errors import UserError
from ridgeline.configs.schema import Config
from ridgeline.explain.diagnosis.facts import Facts, read_facts
from ridgeline.explain.diagnosis.settings import SECTIONS, SimplerRun, extra_settings, performance_settings
from ridgeline.explain.study.analysis import BATCH_SIZE, Point, Study, analyze
from ridgeline.explain.study.measured import MeasuredRun, read_measured
from ridgeline.planner.parameters import count_parameters
from ridgeline.rundir.directory import RunDir
from ridgeline.rundir.noise import compare, median, spread

OWN = (
    "name",
    "run_dir",
    "logging.",
    "checkpoint.",
    "profiler.",
    "runtime.compilation_cache",
    "runtime.rendezvous_timeout_s",
    "runtime.lease_timeout_s",
)
"""Keys that may differ between runs: they do not change the work."""
SCALE = ("mesh.pipeline", "mesh.data", "mesh.fsdp", "mesh.context", "mesh.tensor", "mesh.expert", "runtime.cpu_devices")
"""Keys that set the number of devices and their layout."""
K = TypeVar("K", bound=Hashable)


def read_several(
    runs: Sequence[Path], *, price_usd: float | None = None, warmup_steps: int | None = None, tokens: float | None = None
) -> Facts:
    """Gather the facts of several finished runs of the same work; the facts of a single run are those of the first.

    Args:
      runs: their directories.
      price_usd: of one device and hour.
      warmup_steps: see explain.study.measured.read_measured.
      tokens: training tokens for the time to solution; None: those of the runs.

    Raises:
      UserError: a run is missing, damaged, unfinished or too short; or they differ in more than one thing, or in nothing.
    """
    measured = [read_measured(run, warmup_steps=warmup_steps) for run in runs]
    return facts_of(measured, price_usd=price_usd, tokens=tokens)


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
            raise UserError("runs of several models: at least two models must have run at two or more numbers of devices")
        more["size_studies"] = {size: scaling_study(group, price) for size, group in several.items()}
    elif scales and (not rest or (rest == {"data.batch_size"} and is_weak(measured))):
        more["study"] = scaling_study(measured, price, tokens)
    elif rest == {"data.batch_size"} and not mesh:
        more["batch_study"] = batch_study(measured)
    elif not mesh and (rest or _flags_differ(measured)) and all(key.startswith(SECTIONS) for key in rest):
        subject, more["simpler"] = _with_and_without(measured)
    else:
        differing = ", ".join(sorted(keys)) or "nothing: they are repeats of one run"
        raise UserError(
            f"these {len(measured)} runs differ in {differing}. A comparison changes one thing: the devices (mesh), data.batch_size, "
            "the model at several scales, or performance settings (compute, precision)"
        )
    return read_facts(RunDir(subject.path), **more)


def differing_keys(measured: Sequence[MeasuredRun]) -> list[str]:
    """Return the config keys in which any run differs from the first, without keys that do not change the work."""
    return drift([run.config for run in measured])


def drift(configs: Sequence[Config]) -> list[str]:
    """Return the config keys in which any config differs from the first, in their order, without keys that do not change the work."""
    keys = dict.fromkeys(key for config in configs[1:] for key, *_ in diff(configs[0], config))
    return [key for key in keys if not key.startswith(OWN)]


def is_weak(measured: Sequence[MeasuredRun]) -> bool:
    """Whether every run has the same batch per device."""
    return len({run.config.data.batch_size / run.devices for run in measured}) == 1


def scaling_study(measured: Sequence[MeasuredRun], price: float = 1.0, tokens: float | None = None) -> Study:
    """Analyze runs at several numbers of devices; several runs at one are repeats. `tokens`: see `read_several`."""
    grows = tokens is None and len({run.tokens for run in measured}) > 1  # weak scaling: the work grows with the devices
    points = [point(devices, group, grows, tokens) for devices, group in _grouped(measured, lambda run: run.devices).items()]
    return analyze(points, price_per_device_hour=price)


def batch_study(measured: Sequence[MeasuredRun]) -> Study:
    """Analyze runs at several batch sizes; only their rates compare, since the work differs."""
    groups = _grouped(measured, lambda run: run.config.data.batch_size)
    points = [
        Point(batch, rate=median([r.tokens_per_s for r in g]), spread=spread([r.tokens_per_s for r in g])) for batch, g in groups.items()
    ]
    return analyze(points, BATCH_SIZE)


def point(devices: int, repeats: Sequence[MeasuredRun], grows: bool, tokens: float | None) -> Point:
    """Return the point of repeated runs at one scale: medians, and the larger spread of time and rate."""
    times_s, rates = [run.solution_s(tokens) for run in repeats], [run.tokens_per_s for run in repeats]
    return Point(devices, median(times_s), median(rates), max(spread(times_s), spread(rates)), work=repeats[0].tokens if grows else None)


def _with_and_without(measured: Sequence[MeasuredRun]) -> tuple[MeasuredRun, SimplerRun]:
    """Return the run with the most performance settings, and the one with the fewest compared with it."""
    groups = _grouped(measured, lambda run: tuple(sorted((k, str(v)) for k, v in performance_settings(run.config, run.own_flags).items())))
    ordered = sorted(groups, key=len)
    simple, complex_ = groups[ordered[0]], groups[ordered[-1]]
    subject, simpler = complex_[0], simple[0]
    windows = [[s for run in group for s in run.windows_s] for group in (simple, complex_)]
    extra = extra_settings(subject.config, subject.own_flags, simpler.config, simpler.own_flags)
    return subject, SimplerRun(simpler.path.name, extra, compare(*windows))


def _flags_differ(measured: Sequence[MeasuredRun]) -> bool:
    return any(run.own_flags != measured[0].own_flags for run in measured)


def _grouped(runs: Sequence[MeasuredRun], key: Callable[[MeasuredRun], K]) -> dict[K, list[MeasuredRun]]:
    groups: dict[K, list[MeasuredRun]] = {}
    for run in runs:
        groups.setdefault(key(run), []).append(run)
    return groups
