"""Compare stored benchmark results with a baseline, layer by layer: faster, slower, or cannot tell.

Task, config, devices and processor must be the same. Code, packages and flags may differ; differences are listed in the notes. Several
stored runs of the same code measure the noise between runs, which the rounds of one run cannot show.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from ridgeline.configs.diff import diff
from ridgeline.configs.errors import UserError
from ridgeline.configs.format import plural
from ridgeline.configs.schema import Config
from ridgeline.rundir.bench_results import Stored
from ridgeline.rundir.noise import UNKNOWN_NOISE, Comparison, compare, run_to_run_noise

UNIMPORTANT = ("name", "run_dir", "init_from", "runtime.compilation_cache", "runtime.rendezvous_timeout_s", "runtime.lease_timeout_s")
"""Config keys that do not affect any measured time."""
NAMED_PACKAGES = ("ridgeline", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "numpy", "array-record", "tensorstore")
"""Packages whose changed versions are listed by name, as are GPU libraries; other changed packages are only counted."""
GPU_PREFIXES = ("nvidia-", "jax-cuda", "jax-rocm")
MOST_NAMED = 4
STUDENT_99 = {2: 3.85, 3: 2.27, 4: 1.79, 5: 1.57, 6: 1.44, 7: 1.36, 8: 1.30, 9: 1.26, 10: 1.23, 11: 1.21, 12: 1.19}
"""Degrees of freedom -> quantile of Student's t over that of the normal distribution (two-sided 99 %). Above 12, 1 + 2/freedom is an upper
bound."""
BUSY = 0.05
"""Other programs are mentioned when they use more than this share of the cores."""


@dataclass(frozen=True)
class LayerVerdict:
    """One layer: baseline and new."""

    layer: str
    old_s: float
    new_s: float
    """Both times are medians over all rounds of all runs."""
    comparison: Comparison
    noise_from: str
    """The source of the noise between runs."""


@dataclass(frozen=True)
class Judgment:
    """The result of a comparison."""

    task: str
    old: tuple[Stored, ...]
    """Runs of the baseline's code."""
    new: tuple[Stored, ...]
    layers: tuple[LayerVerdict, ...]
    notes: tuple[str, ...]

    @property
    def slower(self) -> list[str]:
        """The slower layers."""
        return [v.layer for v in self.layers if v.comparison.verdict == "slower"]

    def headline(self) -> str:
        """Return the verdicts in one line."""
        found = {word: [v.layer for v in self.layers if v.comparison.verdict == word] for word in ("slower", "faster", "cannot tell")}
        return "; ".join(f"{word}: {', '.join(layers)}" for word, layers in found.items() if layers)


def judge(baseline: Sequence[Stored], new: Sequence[Stored], changes: Sequence[str] = ()) -> Judgment:
    """Compare stored results with a baseline.

    Args:
      baseline: results to choose from, oldest first. The newest code other than the new result's is used, or its own if there is no
        other.
      new: the newest result is judged, together with other runs of the same code and config.
      changes: config keys that may differ: the change under test.

    Raises UserError listing the differences when no result is comparable.
    """
    assert baseline and new
    reference = new[-1]
    ours = [s for s in new if s.code == reference.code and not differences(s, reference)]
    theirs, left_out = choose(baseline, ours, changes)
    chosen = theirs[-1]
    notes = list(_notes(theirs, ours, left_out))
    layers = []
    for layer in reference.series:
        values = [value for s in (*theirs, *ours) for value in s.series.get(layer, ())]
        if not any(layer in s.series for s in theirs):
            notes.append(f"{layer}: not in the baseline")
        elif not all(value > 0 for value in values):
            notes.append(f"{layer}: a time is 0, so it cannot be compared")
        else:
            layers.append(_layer(layer, theirs, ours))
    notes += [f"{layer}: only in the baseline" for layer in chosen.series if layer not in reference.series]
    if not layers:
        raise UserError(f"{chosen.path} and {reference.path} have no layer in common")
    return Judgment(reference.task, tuple(theirs), tuple(ours), tuple(layers), tuple(notes))


def choose(baseline: Sequence[Stored], ours: Sequence[Stored], changes: Sequence[str] = ()) -> tuple[list[Stored], int]:
    """Return the baseline runs that `judge` compares with, and the number of runs left out. Raises UserError when there are none."""
    reference, paths = ours[-1], {s.path.resolve() for s in ours}
    others = [s for s in baseline if s.path.resolve() not in paths]
    if not others:
        raise UserError(f"nothing to compare with: the baseline contains only {reference.path} itself")
    like = [s for s in others if not differences(s, reference, changes)]
    if changes:
        like = [s for s in like if _changed(s, reference, changes)]
    if not like:
        _refuse(others, reference, changes)
    chosen = next((s for s in reversed(like) if s.code != reference.code), like[-1])
    theirs = [s for s in like if s.code == chosen.code and not differences(s, chosen)]
    return theirs, len(others) - len(theirs)


def _layer(layer: str, theirs: Sequence[Stored], ours: Sequence[Stored]) -> LayerVerdict:
    old_runs, new_runs = ([s.series[layer] for s in side if layer in s.series] for side in (theirs, ours))
    old, new = ([value for run in runs for value in run] for runs in (old_runs, new_runs))
    noise, source = _noise(theirs, ours, old_runs, new_runs)
    return LayerVerdict(layer, statistics.median(old), statistics.median(new), compare(old, new, between_runs=noise), source)


def _noise(
    theirs: Sequence[Stored], ours: Sequence[Stored], old_runs: Sequence[list[float]], new_runs: Sequence[list[float]]
) -> tuple[float, str]:
    """Return the noise between runs and its source: repeated runs, else other load on the machine, and at least the assumed noise.

    Programs that use a share c of the cores on average are assumed to use between 0 and 2c at other times: a deviation of 2c/sqrt(12).
    """
    if unchanged(theirs[-1], ours[-1]):
        runs = [*old_runs, *new_runs]
        deviation = statistics.stdev(math.log(statistics.median(run)) for run in runs)
        old, new = (statistics.median(value for run in side for value in run) for side in (old_runs, new_runs))
        found = abs(math.log(new / old)) / math.sqrt(2)  # the difference between two runs of one code is noise
        return max(UNKNOWN_NOISE, deviation, found), f"{len(runs)} runs of the same code: any difference is noise"
    repeated = [run for run in (old_runs, new_runs) if len(run) >= 3]
    noise = _repeated_noise(repeated, (len(old_runs), len(new_runs))) if repeated else UNKNOWN_NOISE
    if len(repeated) < 2:
        taken = max(s.load_of_others for s in (*theirs, *ours))
        if 2 * taken / math.sqrt(12) > noise:
            return 2 * taken / math.sqrt(12), f"other programs used up to {taken:.0%} of the cores"
    if not repeated:
        return noise, "assumed; three or more stored runs of the same code measure it"
    return noise, f"{' and '.join(str(len(runs)) for runs in repeated)} runs of the same code"


def _repeated_noise(repeated: Sequence[Sequence[list[float]]], runs: tuple[int, int]) -> float:
    """Return the noise of one run for `compare`, from repeated runs: their pooled deviation, reduced for the mean of several runs, and
    increased where few runs measure it (Student's t at 99 % instead of the normal quantile)."""
    freedom = sum(len(side) - 1 for side in repeated)
    deviation = math.sqrt(sum((len(side) - 1) * run_to_run_noise(side) ** 2 for side in repeated) / freedom)
    several = math.sqrt((1 / runs[0] + 1 / runs[1]) / 2)
    return deviation * several * STUDENT_99.get(freedom, 1.0 + 2.0 / freedom)


def unchanged(one: Stored, other: Stored) -> bool:
    """Whether code, config, packages and flags are the same, so that any difference is noise."""
    same = all(one.provenance[key] == other.provenance[key] for key in ("packages", "xla_flags"))
    return same and one.code == other.code and not differences(one, other)


def differences(one: Stored, other: Stored, changes: Sequence[str] = ()) -> list[str]:
    """List the differences that make two results incomparable, each as `what a, b`. `changes`: config keys that may differ."""
    found = [f"{what} {_shown(a)}, {_shown(b)}" for what, a, b in _conditions(one, other) if a != b]
    keys = [(key, a, b) for key, a, b in diff(_completed(one), _completed(other)) if not _covered(key, (*UNIMPORTANT, *changes))]
    return found + [f"config {key} {_shown(a)}, {_shown(b)}" for key, a, b in keys]


def _shown(value: Any) -> str:
    """Return a value on one line, short."""
    text = " ".join(str(value).split())
    return text if len(text) <= 80 else f"{text[:77]}..."


def _conditions(one: Stored, other: Stored) -> Iterator[tuple[str, Any, Any]]:
    yield "task", one.task, other.task
    a, b = one.provenance["device"], other.provenance["device"]
    for key, what in (("platform", "platform"), ("kind", "device"), ("count", "number of devices"), ("processes", "number of processes")):
        yield what, a.get(key), b.get(key)
    a, b = one.provenance["cpu"], other.provenance["cpu"]
    yield "processor", a.get("model"), b.get("model")
    yield "cores", a.get("cores"), b.get("cores")


def _completed(stored: Stored) -> dict[str, Any]:
    """Return the config with defaults for keys added since; unchanged if the current schema rejects it."""
    try:
        return Config.model_validate(stored.config).model_dump(mode="json")
    except ValidationError:
        return stored.config


def _covered(key: str, keys: Sequence[str]) -> bool:
    return any(key == allowed or key.startswith(f"{allowed}.") for allowed in keys)


def _changed(one: Stored, other: Stored, changes: Sequence[str]) -> bool:
    return any(_covered(key, changes) for key, _, _ in diff(_completed(one), _completed(other)))


def _refuse(others: Sequence[Stored], reference: Stored, changes: Sequence[str]) -> None:
    """Raise UserError with the differences to the most similar candidate."""
    nearest = min(reversed(others), key=lambda s: len(differences(s, reference, changes)))
    found = differences(nearest, reference, changes)
    if not found:
        raise UserError(
            f"{nearest.path} and {reference.path} do not differ in {', '.join(changes)}; use --change with the key under test, or omit it"
        )
    shown = "; ".join(found[:MOST_NAMED]) + (f"; and {len(found) - MOST_NAMED} more" if len(found) > MOST_NAMED else "")
    keys = [text.split()[1] for text in found if text.startswith("config ")]
    hint = f" (if that is the change under test: {' '.join(f'--change {key}' for key in keys)})" if 0 < len(keys) == len(found) <= 3 else ""
    raise UserError(f"{nearest.path} and {reference.path} cannot be compared: {shown}{hint}")


def _notes(theirs: Sequence[Stored], ours: Sequence[Stored], left_out: int) -> Iterator[str]:
    old, new = theirs[-1], ours[-1]
    if old.code == new.code:
        yield f"both sides have the same code: {new.code}"
    busiest = max((*theirs, *ours), key=lambda s: s.load_of_others)
    if busiest.load_of_others > BUSY:
        yield f"other programs used {busiest.load_of_others:.0%} of the cores during {busiest.path}"
    changed = list(_versions(old.provenance["packages"], new.provenance["packages"]))
    if changed:
        yield f"packages differ: {', '.join(changed)}"
    if old.provenance["xla_flags"] != new.provenance["xla_flags"]:
        yield f"XLA_FLAGS differ: '{old.provenance['xla_flags']}', '{new.provenance['xla_flags']}'"
    if old.provenance.get("host") != new.provenance.get("host"):
        yield f"hosts differ: {old.provenance.get('host')}, {new.provenance.get('host')}"
    if left_out:
        yield f"left out of the baseline: {plural(left_out, 'other result')} (other conditions or older code)"


def _versions(old: dict[str, str], new: dict[str, str]) -> Iterator[str]:
    changed = sorted(name for name in old.keys() | new.keys() if old.get(name) != new.get(name))
    named = [name for name in changed if name in NAMED_PACKAGES or name.startswith(GPU_PREFIXES)]
    for name in named:
        yield f"{name} {old.get(name, 'absent')}, {new.get(name, 'absent')}"
    if len(changed) > len(named):
        yield f"{len(changed) - len(named)} others"


def to_json(found: Judgment) -> dict[str, Any]:
    """Return a comparison as JSON values."""
    return {
        "task": found.task,
        "headline": found.headline(),
        "layers": [
            {
                "layer": v.layer,
                "verdict": v.comparison.verdict,
                "baseline_s": v.old_s,
                "new_s": v.new_s,
                "ratio": v.comparison.ratio,
                "low": v.comparison.low,
                "high": v.comparison.high,
                "between_runs": v.comparison.between_runs,
                "noise_from": v.noise_from,
            }
            for v in found.layers
        ],
        "baseline": {"code": found.old[-1].code, "files": [str(s.path) for s in found.old]},
        "new": {"code": found.new[-1].code, "files": [str(s.path) for s in found.new]},
        "notes": list(found.notes),
    }
