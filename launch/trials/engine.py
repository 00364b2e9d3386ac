"""The trials of a study on disk: which run each is, what is still to do, and what came of those that were made.

OUTPUT/runs/<trial>        run directories
OUTPUT/configs/<trial>.yaml  the resolved config of each
OUTPUT/logs/<trial>.log    what it printed (on this machine; a Slurm job's log is in its run directory)
OUTPUT/failures/<trial>.json  why it failed

A trial that was interrupted starts anew: a resumed run would measure two starts. Finished and failed ones stay as they are.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ridgeline.configs.diff import diff
from ridgeline.configs.dump import to_yaml
from ridgeline.configs.errors import UserError
from ridgeline.configs.load import from_resolved
from ridgeline.configs.schema import Config
from ridgeline.explain.diagnosis.several import drift
from ridgeline.explain.study.measured import MeasuredRun, read_measured

LEAST_WINDOWS = 8
"""Log lines a trial should have: the first is warm-up, the scatter of the others is its noise."""


@dataclass(frozen=True)
class Setting:
    """One scale or one value of a sweep, before repeats."""

    name: str
    """As in devices-4: the name of its trials."""
    config: Config | None
    """None: it cannot run, `refusal` says why."""
    devices: int
    nodes: int | None = None
    refusal: str | None = None


@dataclass(frozen=True)
class Trial:
    """One run of a setting."""

    name: str
    setting: Setting
    config: Config


@dataclass(frozen=True)
class Outcome:
    """What came of the trials of a setting."""

    runs: tuple[MeasuredRun, ...]
    failures: tuple[str, ...]


class Trials:
    """The trials of a study directory.

    Raises:
      UserError: the directory holds trials of another config.
    """

    def __init__(self, output: Path, settings: Sequence[Setting], repeats: int, varied: Sequence[str]) -> None:
        """`varied`: key prefixes in which settings may differ."""
        self.output, self.settings = output.absolute(), settings
        self._varied = tuple(varied)
        self.trials = [self._trial(s, s.config, repeat) for repeat in range(1, repeats + 1) for s in settings if s.config is not None]
        self._check()

    def _trial(self, setting: Setting, config: Config, repeat: int) -> Trial:
        """Repeats come one after the other over all settings, so that a machine that slows down does not spoil one setting alone."""
        name = f"{setting.name}.{repeat}"
        return Trial(name, setting, with_own(config, f"{config.name}-{name}", self.output / "runs" / name))

    def _check(self) -> None:
        """Refuse what would compare different work: settings that differ in more than what is varied, or a directory of another study."""
        wanted = {trial.name: trial.config for trial in self.trials}
        stored = {file.stem: from_resolved(file) for file in sorted((self.output / "configs").glob("*.yaml"))}
        for name, config in wanted.items():
            if name in stored and (changed := [key for key, *_ in diff(stored[name], config)]):
                raise UserError(f"{self.output} holds {name} with another config ({', '.join(changed)}): choose another --output")
        self._refuse_drift(list(wanted.values()), "the settings of this study")
        self._refuse_drift([*wanted.values(), *stored.values()], f"{self.output} and this study")

    def _refuse_drift(self, configs: Sequence[Config], whose: str) -> None:
        others = [key for key in drift(configs) if not key.startswith(self._varied)] if configs else []
        if others:
            raise UserError(f"{whose} differ in more than {', '.join(self._varied)}: {', '.join(others)}; a study changes one thing")

    def to_do(self) -> list[Trial]:
        """Return the trials that neither finished nor failed."""
        return [trial for trial in self.trials if self.failure(trial) is None and self.measured(trial) is None]

    def prepare(self, trial: Trial) -> Path:
        """Clear what an interrupted trial left, write its config and return that file."""
        shutil.rmtree(trial.config.directory, ignore_errors=True)
        path = self.output / "configs" / f"{trial.name}.yaml"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(to_yaml(trial.config), encoding="utf-8")
        return path

    def log(self, trial: Trial) -> Path:
        """Return the file of what a trial prints."""
        path = self.output / "logs" / f"{trial.name}.log"
        path.parent.mkdir(parents=True, exist_ok=True)
        return path

    def measured(self, trial: Trial, warmup_steps: int | None = None) -> MeasuredRun | None:
        """Return what a finished trial measured; None for one that is not."""
        try:
            return read_measured(trial.config.directory, warmup_steps=warmup_steps)
        except UserError:
            return None

    def why_unmeasured(self, trial: Trial) -> str:
        """Say why a trial that ended well has no figures."""
        try:
            read_measured(trial.config.directory)
        except UserError as error:
            return str(error)
        raise AssertionError(f"{trial.name} is measured")

    def record_failure(self, trial: Trial, reason: str, **facts: Any) -> None:
        """Remember why a trial failed."""
        path = self.output / "failures" / f"{trial.name}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"trial": trial.name, "reason": reason, **facts}, indent=1) + "\n", encoding="utf-8")

    def failure(self, trial: Trial) -> str | None:
        """Return why a trial failed; None for one that did not."""
        path = self.output / "failures" / f"{trial.name}.json"
        try:
            return str(json.loads(path.read_bytes())["reason"])
        except FileNotFoundError:
            return None
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(f"{path} cannot be read: {error}") from None

    def forget_failures(self) -> None:
        """Have failed trials made again."""
        for trial in self.trials:
            (self.output / "failures" / f"{trial.name}.json").unlink(missing_ok=True)

    def outcome(self, setting: Setting, warmup_steps: int | None = None) -> Outcome:
        """Return what came of a setting so far, repeats that an earlier call made included."""
        mine = [trial for trial in self.trials if trial.setting is setting]
        if setting.config is not None:
            more = range(len(mine) + 1, 1 + len(list((self.output / "configs").glob(f"{setting.name}.*.yaml"))))
            mine += [self._trial(setting, setting.config, repeat) for repeat in more]
        runs = [run for trial in mine if (run := self.measured(trial, warmup_steps)) is not None]
        reasons = [] if setting.refusal is None else [setting.refusal]
        reasons += [reason for trial in mine if (reason := self.failure(trial)) is not None]
        return Outcome(tuple(runs), tuple(reasons))


def known_numbers(output: Path, prefix: str) -> list[int]:
    """Return the numbers of the settings PREFIX-NUMBER that a study directory has trials of."""
    stems = [file.stem.rpartition(".")[0] for file in (output / "configs").glob(f"{prefix}-*.yaml")]
    return sorted({int(stem.removeprefix(f"{prefix}-")) for stem in stems if stem.removeprefix(f"{prefix}-").isdecimal()})


def setting_of(name: str, devices: int, make: Callable[[], Config], nodes: int | None = None) -> Setting:
    """Make a setting; a config that breaks a rule at this scale is a setting that cannot run."""
    try:
        return Setting(name, make(), devices, nodes)
    except UserError as error:
        return Setting(name, None, devices, nodes, refusal=" ".join(str(error).split()))


def with_own(config: Config, name: str, run_dir: Path) -> Config:
    """Return the config under another name and run directory."""
    return config.model_copy(update={"name": name, "run_dir": run_dir})


def with_enough_lines(config: Config) -> Config:
    """Return the config with a log line often enough to tell warm-up from the rest: the same at every scale."""
    trainer = config.trainer
    if trainer.steps // trainer.log_every >= LEAST_WINDOWS:
        return config
    every = max(1, trainer.steps // LEAST_WINDOWS)
    return config.model_copy(update={"trainer": trainer.model_copy(update={"log_every": every})})
