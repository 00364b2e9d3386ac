"""Studies: runs of one config at several scales or values, each repeated (`ridge scale`, `ridge bench sweep`).

OUTPUT/runs/<trial>            run directories
OUTPUT/configs/<trial>.yaml    resolved configs
OUTPUT/logs/<trial>.log        output of trials on this machine (a Slurm job's log is in its run directory)
OUTPUT/failures/<trial>.json   why a trial failed

An interrupted trial starts from the beginning: a resumed run would measure two starts. Finished and failed trials do not run again.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ridgeline.configs.dump import to_yaml
from ridgeline.configs.errors import UserError
from ridgeline.configs.schema import Config
from ridgeline.explain.diagnosis.several import drift
from ridgeline.explain.study.measured import MeasuredRun, read_measured
from ridgeline.launch.trials.engine import STUDY, TrialFiles

LEAST_WINDOWS = 8
"""Least number of log lines of a trial: the first is warm-up, the spread of the others is its noise."""


@dataclass(frozen=True)
class Setting:
    """One scale or one value of a study; its repeats are trials."""

    name: str
    """Such as devices-4; the trials are devices-4.1, devices-4.2, ..."""
    config: Config | None
    """None: it cannot run; the reason is in `refusal`."""
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
    """Results of the trials of a setting."""

    runs: tuple[MeasuredRun, ...]
    failures: tuple[str, ...]


class Trials:
    """The trials of a study directory."""

    def __init__(self, output: Path, settings: Sequence[Setting], repeats: int, varied: Sequence[str]) -> None:
        """Name the trials and check them against those in the directory.

        Args:
          varied: key prefixes in which settings may differ.

        Raises:
          UserError: settings differ in another key, or the directory holds trials of another config.
        """
        self.output, self.settings = output.absolute(), settings
        self.files = TrialFiles(self.output, STUDY)
        self._varied = tuple(varied)
        self.trials = [self._trial(s, s.config, repeat) for repeat in range(1, repeats + 1) for s in settings if s.config is not None]
        self._check()

    def _trial(self, setting: Setting, config: Config, repeat: int) -> Trial:
        """Return a trial. All settings run before the next repeat, so that a machine that slows down does not affect one setting only."""
        name = f"{setting.name}.{repeat}"
        own = {"name": f"{config.name}-{name}", "run_dir": self.files.run_dir(name)}
        return Trial(name, setting, config.model_copy(update=own))

    def _check(self) -> None:
        stored = {name: self.files.config(name) for name in self.files.names()}
        for trial in self.trials:
            if trial.name in stored and (changed := self.files.changes(trial.name, trial.config)):
                raise UserError(f"{self.output} holds {trial.name} with another config ({', '.join(changed)}): choose another --output")
        wanted = [trial.config for trial in self.trials]
        self._refuse_drift(wanted, "the settings of this study")
        self._refuse_drift([*wanted, *stored.values()], f"{self.output} and this study")

    def _refuse_drift(self, configs: Sequence[Config], subject: str) -> None:
        others = [key for key in drift(configs) if not key.startswith(self._varied)] if configs else []
        if others:
            raise UserError(f"{subject} differ in {', '.join(others)}; a study may vary only {', '.join(self._varied)}")

    def to_do(self) -> list[Trial]:
        """Return the trials that neither finished nor failed."""
        return [trial for trial in self.trials if self.failure(trial) is None and self.measured(trial) is None]

    def prepare(self, trial: Trial) -> Path:
        """Remove the files of an interrupted trial, write its config and return that file."""
        shutil.rmtree(trial.config.directory, ignore_errors=True)
        path = self.files.config_file(trial.name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(to_yaml(trial.config), encoding="utf-8")
        return path

    def measured(self, trial: Trial, warmup_steps: int | None = None) -> MeasuredRun | None:
        """Return the measurements of a finished trial; None for any other."""
        try:
            return read_measured(trial.config.directory, warmup_steps=warmup_steps)
        except UserError:
            return None

    def record_failure(self, trial: Trial, reason: str | None, **facts: object) -> str:
        """Store and return why a trial failed. None: it exited without error, and the reason is why it has no measurements."""
        if reason is None:
            try:
                read_measured(trial.config.directory)
                raise AssertionError(f"{trial.name} is measured")
            except UserError as error:
                reason = str(error)
        self.files.record_failure(trial.name, reason, **facts)
        return reason

    def failure(self, trial: Trial) -> str | None:
        """Return why a trial failed; None for one that did not."""
        return self.files.failure(trial.name)

    def forget_failures(self) -> None:
        """Remove stored failures, so that failed trials run again."""
        for trial in self.trials:
            self.files.forget_failure(trial.name)

    def outcome(self, setting: Setting, warmup_steps: int | None = None) -> Outcome:
        """Return the results of a setting so far, including repeats from earlier calls."""
        mine = [trial for trial in self.trials if trial.setting is setting]
        if setting.config is not None:
            more = range(len(mine) + 1, 1 + len(self.files.names(f"{setting.name}.*")))
            mine += [self._trial(setting, setting.config, repeat) for repeat in more]
        runs = [run for trial in mine if (run := self.measured(trial, warmup_steps)) is not None]
        reasons = [] if setting.refusal is None else [setting.refusal]
        reasons += [reason for trial in mine if (reason := self.failure(trial)) is not None]
        return Outcome(tuple(runs), tuple(reasons))


def known_numbers(output: Path, prefix: str) -> list[int]:
    """Return the numbers of the settings PREFIX-NUMBER that have trials in a study directory."""
    names = [name.rpartition(".")[0].removeprefix(f"{prefix}-") for name in TrialFiles(output, STUDY).names(f"{prefix}-*")]
    return sorted({int(name) for name in names if name.isdecimal()})


def setting_of(name: str, devices: int, make: Callable[[], Config], nodes: int | None = None) -> Setting:
    """Return a setting; if its config is invalid at this scale, the setting is one that cannot run."""
    try:
        return Setting(name, make(), devices, nodes)
    except UserError as error:
        return Setting(name, None, devices, nodes, refusal=" ".join(str(error).split()))


def with_enough_lines(config: Config) -> Config:
    """Return the config with at least LEAST_WINDOWS log lines, so that warm-up can be separated."""
    trainer = config.trainer
    if trainer.steps // trainer.log_every >= LEAST_WINDOWS:
        return config
    every = max(1, trainer.steps // LEAST_WINDOWS)
    return config.model_copy(update={"trainer": trainer.model_copy(update={"log_every": every})})
