"""The regression guard: stored results against a baseline, layer by layer: faster, slower, or cannot tell.

Only like is compared with like: the same task and config on the same devices and processor; the code, its packages and flags may differ,
and are told. Several stored runs of one code give the noise between runs that no number of rounds in one run can show.
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
from ridgeline.configs.schema import Config
from ridgeline.rundir.bench_results import Stored
from ridgeline.rundir.noise import UNKNOWN_NOISE, Comparison, compare, run_to_run_noise

UNIMPORTANT = ("name", "run_dir", "init_from", "runtime.compilation_cache", "runtime.rendezvous_timeout_s")
"""Config keys that change no time that is measured."""
TELLING = ("ridgeline", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "numpy", "array-record", "tensorstore")
"""Packages whose versions are told apart by name; of the others only how many differ (and GPU libraries by their prefix)."""
GPU_PREFIXES = ("nvidia-", "jax-cuda", "jax-rocm")
MOST_NAMED = 4
STUDENT_99 = {2: 3.85, 3: 2.27, 4: 1.79, 5: 1.57, 6: 1.44, 7: 1.36, 8: 1.30, 9: 1.26, 10: 1.23, 11: 1.21, 12: 1.19}
"""Degrees of freedom -> quantile of Student's t over that of the normal distribution (two-sided 99 %); beyond, 1 + 2/freedom covers it."""
BUSY = 0.05
"""Neighbours that take more of the cores than this are mentioned."""


@dataclass(frozen=True)
class LayerVerdict:
    """One layer, old against new."""

    layer: str
    old_s: float
    new_s: float
    """Medians over all rounds of all runs."""
    comparison: Comparison
    noise_from: str
    """Where the noise between runs comes from."""


@dataclass(frozen=True)
class Judgement:
    """The guard's answer."""

    task: str
    old: tuple[Stored, ...]
    """Runs of the baseline's code."""
    new: tuple[Stored, ...]
    layers: tuple[LayerVerdict, ...]
    notes: tuple[str, ...]

    @property
    def slower(self) -> list[str]:
        """Layers that are slower."""
        return [v.layer for v in self.layers if v.comparison.verdict == "slower"]

    def headline(self) -> str:
        """Say it in one line."""
        found = {word: [v.layer for v in self.layers if v.comparison.verdict == word] for word in ("slower", "faster", "cannot tell")}
        return "; ".join(f"{word}: {', '.join(layers)}" for word, layers in found.items() if layers)


def judge(baseline: Sequence[Stored], new: Sequence[Stored], changes: Sequence[str] = ()) -> Judgement:
    """Compare stored results with a baseline.

    Args:
      baseline: results to choose from, oldest first: those like the new one, of the newest code that is not its own (its own where there
        is no other).
      new: the newest is what is judged, with other runs of the same code and config.
      changes: config keys that are meant to differ: the change under test.

    Raises UserError naming what differs when nothing comparable is there.
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
            notes.append(f"{layer}: takes no time, so there is nothing to compare")
        else:
            layers.append(_layer(layer, theirs, ours))
    notes += [f"{layer}: only in the baseline" for layer in chosen.series if layer not in reference.series]
    if not layers:
        raise UserError(f"{chosen.path} and {reference.path} have no layer in common")
    return Judgement(reference.task, tuple(theirs), tuple(ours), tuple(layers), tuple(notes))


def choose(baseline: Sequence[Stored], ours: Sequence[Stored], changes: Sequence[str] = ()) -> tuple[list[Stored], int]:
    """Return the baseline's runs that `judge` compares with, and how many it leaves out. Raises UserError when there is none."""
    reference, paths = ours[-1], {s.path.resolve() for s in ours}
    others = [s for s in baseline if s.path.resolve() not in paths]
    if not others:
        raise UserError(f"nothing to compare with: the baseline holds only {reference.path} itself")
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
    """Return the noise between runs and where it comes from: repeated runs, else the neighbours on the machine, and no less than assumed.

    Neighbours that took a share c of the cores on average take anything between 0 and 2c at another time: a deviation of 2c/sqrt(12).
    """
    if unchanged(theirs[-1], ours[-1]):
        runs = [*old_runs, *new_runs]
        deviation = statistics.stdev(math.log(statistics.median(run)) for run in runs)
        old, new = (statistics.median(value for run in side for value in run) for side in (old_runs, new_runs))
        found = abs(math.log(new / old)) / math.sqrt(2)  # of two runs: what is between them is noise, however many others agree
        return max(UNKNOWN_NOISE, deviation, found), f"{len(runs)} runs of one code: any difference is noise"
    repeated = [run for run in (old_runs, new_runs) if len(run) >= 3]
    noise = _repeated_noise(repeated, (len(old_runs), len(new_runs))) if repeated else UNKNOWN_NOISE
    if len(repeated) < 2:
        taken = max(s.neighbours for s in (*theirs, *ours))
        if 2 * taken / math.sqrt(12) > noise:
            return 2 * taken / math.sqrt(12), f"other programs took up to {taken:.0%} of the cores"
    if not repeated:
        return noise, "assumed: three or more stored runs of unchanged code measure it"
    return noise, f"{' and '.join(str(len(runs)) for runs in repeated)} runs of one code"


def _repeated_noise(repeated: Sequence[Sequence[list[float]]], runs: tuple[int, int]) -> float:
    """Return what `compare` takes as the noise of one run, from repeated runs: their pooled deviation, less for the mean of several, and
    more where few runs tell it (Student's t at 99 % instead of the normal quantile)."""
    freedom = sum(len(side) - 1 for side in repeated)
    deviation = math.sqrt(sum((len(side) - 1) * run_to_run_noise(side) ** 2 for side in repeated) / freedom)
    several = math.sqrt((1 / runs[0] + 1 / runs[1]) / 2)
    return deviation * several * STUDENT_99.get(freedom, 1.0 + 2.0 / freedom)


def unchanged(one: Stored, other: Stored) -> bool:
    """Whether code, config, packages and flags are the same, so that only noise can tell the two apart."""
    same = all(one.provenance[key] == other.provenance[key] for key in ("packages", "xla_flags"))
    return same and one.code == other.code and not differences(one, other)


def differences(one: Stored, other: Stored, changes: Sequence[str] = ()) -> list[str]:
    """Name what makes two results incomparable, `what a, b` each; empty for like ones. `changes`: config keys that may differ."""
    found = [f"{what} {a}, {b}" for what, a, b in _conditions(one, other) if a != b]
    keys = [(key, a, b) for key, a, b in diff(_completed(one), _completed(other)) if not _covered(key, (*UNIMPORTANT, *changes))]
    return found + [f"config {key} {a}, {b}" for key, a, b in keys]


def _conditions(one: Stored, other: Stored) -> Iterator[tuple[str, Any, Any]]:
    yield "task", one.task, other.task
    a, b = one.provenance["device"], other.provenance["device"]
    for key, what in (("platform", "platform"), ("kind", "device"), ("count", "number of devices"), ("processes", "number of processes")):
        yield what, a.get(key), b.get(key)
    a, b = one.provenance["cpu"], other.provenance["cpu"]
    yield "processor", a.get("model"), b.get("model")
    yield "cores", a.get("cores"), b.get("cores")


def _completed(stored: Stored) -> dict[str, Any]:
    """Return the config with today's defaults for keys that came later; as it is where today's schema refuses it."""
    try:
        return Config.model_validate(stored.config).model_dump(mode="json")
    except ValidationError:
        return stored.config


def _covered(key: str, keys: Sequence[str]) -> bool:
    return any(key == allowed or key.startswith(f"{allowed}.") for allowed in keys)


def _changed(one: Stored, other: Stored, changes: Sequence[str]) -> bool:
    return any(_covered(key, changes) for key, _, _ in diff(_completed(one), _completed(other)))


def _refuse(others: Sequence[Stored], reference: Stored, changes: Sequence[str]) -> None:
    """Raise with the differences of the nearest candidate."""
    nearest = min(reversed(others), key=lambda s: len(differences(s, reference, changes)))
    found = differences(nearest, reference, changes)
    if not found:
        raise UserError(f"{nearest.path} and {reference.path} do not differ in {', '.join(changes)}: name the change under test, or none")
    shown = "; ".join(found[:MOST_NAMED]) + (f"; and {len(found) - MOST_NAMED} more" if len(found) > MOST_NAMED else "")
    keys = [text.split()[1] for text in found if text.startswith("config ")]
    hint = f" (if that is the change under test: {' '.join(f'--change {key}' for key in keys)})" if 0 < len(keys) == len(found) <= 3 else ""
    raise UserError(f"{nearest.path} and {reference.path} cannot be compared: {shown}{hint}")


def _notes(theirs: Sequence[Stored], ours: Sequence[Stored], left_out: int) -> Iterator[str]:
    old, new = theirs[-1], ours[-1]
    if old.code == new.code:
        yield f"the code is the same on both sides: {new.code}"
    busiest = max((*theirs, *ours), key=lambda s: s.neighbours)
    if busiest.neighbours > BUSY:
        yield f"other programs took {busiest.neighbours:.0%} of the cores during {busiest.path}"
    changed = list(_versions(old.provenance["packages"], new.provenance["packages"]))
    if changed:
        yield f"packages differ: {', '.join(changed)}"
    if old.provenance["xla_flags"] != new.provenance["xla_flags"]:
        yield f"XLA_FLAGS differ: '{old.provenance['xla_flags']}', '{new.provenance['xla_flags']}'"
    if old.provenance.get("host") != new.provenance.get("host"):
        yield f"hosts differ: {old.provenance.get('host')}, {new.provenance.get('host')}"
    if left_out:
        yield f"{left_out} other result(s) of the baseline were left out: other conditions, or older code"


def _versions(old: dict[str, str], new: dict[str, str]) -> Iterator[str]:
    changed = sorted(name for name in old.keys() | new.keys() if old.get(name) != new.get(name))
    named = [name for name in changed if name in TELLING or name.startswith(GPU_PREFIXES)]
    for name in named:
        yield f"{name} {old.get(name, 'absent')}, {new.get(name, 'absent')}"
    if len(changed) > len(named):
        yield f"{len(changed) - len(named)} others"
