"""`ridge bench sweep CONFIG --batch 1,2,4,8`: train a config with several values of one setting."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import click

from ridgeline.cli.options import Int32Range, config_arguments, json_option
from ridgeline.cli.progress import print_progress
from ridgeline.configs.errors import UserError

if TYPE_CHECKING:
    from ridgeline.configs.schema import Config
    from ridgeline.explain.study.sweep import SweepObjective


@click.command()
@config_arguments
@click.option("--batch", metavar="N[,N...]", help="Batch sizes (data.batch_size).")
@click.option("--remat", metavar="POLICY[,POLICY...]", help="Rematerialization policies (compute.remat.policy).")
@click.option("--set", "setting", metavar="KEY=A[,B...]", help="Values of any config key.")
@click.option(
    "--objective",
    type=click.Choice(["time", "memory"]),
    default="time",
    show_default=True,
    help="time: highest tokens/s. memory: least memory within 10% of the highest tokens/s.",
)
@click.option("--repeats", type=Int32Range(min=1), default=1, show_default=True, help="Runs of each value; three or more show the noise.")
@click.option("--warmup", "warmup_steps", type=Int32Range(min=0), help="Steps to exclude from the speed [default: the first log line].")
@click.option("--retry", is_flag=True, help="Run failed trials again.")
@click.option("--output", "-o", type=click.Path(path_type=Path), help="Directory of the sweep [default: runs/NAME-sweep-KEY].")
@json_option
def sweep(
    config: str,
    overrides: tuple[str, ...],
    batch: str | None,
    remat: str | None,
    setting: str | None,
    objective: str,
    repeats: int,
    warmup_steps: int | None,
    retry: bool,
    output: Path | None,
    as_json: bool,
) -> None:
    """Train CONFIG with several values of one setting on this machine, and recommend a value.

    Prints throughput, memory and gain per doubling. A value that fails (out of memory, invalid config) is a row with its reason. The same
    command runs only what is missing. `ridge diagnose OUTPUT` reads the result.
    """
    from ridgeline.cli.printing.study import print_study
    from ridgeline.explain.report.study import findings_of
    from ridgeline.explain.study.document import write_study
    from ridgeline.explain.study.sweep import Value, sweep_study
    from ridgeline.launch.trials import local
    from ridgeline.launch.trials.scales import output_of
    from ridgeline.launch.trials.study import Trials, setting_of

    key, values = chosen_values(batch, remat, setting)
    base = _loaded(config, overrides)
    cpu = local.on_cpu(base, os.environ)
    devices = base.runtime.cpu_devices if cpu else local.gpus_present() or 1
    settings = [
        setting_of(_name(key, value), devices, partial(_loaded, config, (*overrides, f"{key}={value}"), devices)) for value in values
    ]
    output = output_of(base, output, f"sweep-{key}")
    trials = Trials(output, settings, repeats, (key,))
    if retry:
        trials.forget_failures()
    try:
        local.run_all(trials, processes=lambda trial: 1, cpu=cpu, log=print_progress)
    except KeyboardInterrupt:
        finished = len(trials.trials) - len(trials.to_do())
        print_progress(f"interrupted: {finished} of {len(trials.trials)} runs are finished; run the same command again to continue")
        raise
    outcomes = [trials.outcome(one, warmup_steps) for one in settings]
    found = [Value(_plain(value), outcome.runs, outcome.failures) for value, outcome in zip(values, outcomes, strict=True)]
    study = sweep_study(base.name, key, found, cast("SweepObjective", objective), devices=devices)
    study["findings"] = findings_of([run for outcome in outcomes for run in outcome.runs])
    write_study(study, output, {})
    print_study(study, output, as_json=as_json)


def chosen_values(batch: str | None, remat: str | None, setting: str | None) -> tuple[str, list[str]]:
    """Return the config key and its values. Raises UserError unless exactly one option is given, with distinct values."""
    given = {"--batch": batch, "--remat": remat, "--set": setting}
    used = [name for name, text in given.items() if text is not None]
    if len(used) != 1:
        raise UserError(f"give exactly one of --batch, --remat, --set (got {', '.join(used) or 'none'})")
    key, text = {"--batch": "data.batch_size", "--remat": "compute.remat.policy"}.get(used[0]), given[used[0]] or ""
    if key is None:
        key, equals, text = text.partition("=")
        if not equals:
            raise UserError(f"--set {key}: must be KEY=A,B,C, such as compute.loss_chunk=256,1024")
    values = [value.strip() for value in text.split(",")]
    if not all(values) or len(set(values)) < len(values):
        raise UserError(f"{used[0]} {given[used[0]]}: must be distinct values, separated by commas")
    return key, values


def _loaded(config: str, overrides: tuple[str, ...], devices: int | None = None) -> Config:
    from ridgeline.configs.load import load
    from ridgeline.configs.rules import check_devices
    from ridgeline.launch.trials.study import with_enough_lines

    loaded = load(config, overrides).config
    if devices is not None:
        check_devices(loaded, devices)
    return with_enough_lines(loaded)


def _name(key: str, value: str) -> str:
    kept = "".join(character if character.isalnum() or character in "._-" else "-" for character in value)
    return f"{key.rpartition('.')[2]}-{kept}"


def _plain(value: str) -> Any:
    for kind in (int, float):
        try:
            return kind(value)
        except ValueError:
            continue
    return value
