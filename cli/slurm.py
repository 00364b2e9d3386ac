"""What the commands that submit or show Slurm jobs share: reading the cluster file, printing lint findings, the table of a sweep."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ridgeline.cli.tables import Column, print_json, print_table
from ridgeline.configs.errors import UserError

if TYPE_CHECKING:
    from ridgeline.configs.cluster import ClusterConfig
    from ridgeline.launch.slurm.lint import Finding
    from ridgeline.launch.trials.sweep import Result


def read_cluster(name: str, overrides: Iterable[str], **given: str | None) -> ClusterConfig:
    """Load a cluster file. Precedence: options of the command line, then the file, then SBATCH_* variables."""
    from ridgeline.configs.cluster import load_cluster
    from ridgeline.launch.slurm.submit import with_environment

    options = [f"slurm.{key}={value}" for key, value in given.items() if value is not None]
    return with_environment(load_cluster(name, [*overrides, *options]).config, os.environ)


def print_findings(findings: list[Finding]) -> None:
    """Print the warnings, and one line per error. Raises UserError with the last error."""
    for finding in findings:
        if not finding.error:
            click.echo(f"ridge: {finding}", err=True)
    *others, last = [None, *(finding.message for finding in findings if finding.error)]
    for error in others[1:]:
        click.echo(f"ridge: error: {error}", err=True)
    if last is not None:
        raise UserError(last)


def print_sweep(directory: Path, *, as_json: bool) -> None:
    """Print the results of a sweep, one row per point."""
    from ridgeline.launch.trials.sweep import results

    found = results(directory)
    if as_json:
        print_json([_json(result) for result in found])
        return
    keys = list(dict.fromkeys(key for result in found for key in result.point.overrides))
    sets = list(dict.fromkeys(name for result in found for name in result.evaluations or {}))
    columns = [
        Column("point"),
        *(Column(f"override:{key}", key) for key in keys),
        Column("state"),
        Column("step"),
        Column("steps", "of"),
        Column("loss", format="{:.4f}".format),
        *(Column(f"evaluation:{name}", f"{name} loss", "{:.4f}".format) for name in sets),
        Column("tokens_per_s", "tokens/s", "{:,.0f}".format),
        Column("restarts"),
    ]
    print_table(columns, [_row(result) for result in found])
    for result in found:
        if result.problem is not None:
            click.echo(f"{result.point.directory.name}: {result.problem}")
    counts = {state: sum(result.state == state for result in found) for state in dict.fromkeys(result.state for result in found)}
    click.echo(f"{directory}: " + ", ".join(f"{count} {state}" for state, count in counts.items()))


def _row(result: Result) -> dict[str, Any]:
    overrides = {f"override:{key}": value for key, value in result.point.overrides.items()}
    evaluations = {f"evaluation:{name}": loss for name, loss in (result.evaluations or {}).items()}
    state = result.state if result.exit_code in (None, 0) else f"{result.state} ({result.exit_code})"
    return {**_json(result), **overrides, **evaluations, "point": result.point.directory.name, "state": state}


def _json(result: Result) -> dict[str, Any]:
    names = ("state", "step", "steps", "loss", "evaluations", "tokens_per_s", "restarts", "exit_code", "problem")
    fields = {name: getattr(result, name) for name in names}
    return {"point": result.point.index, "run_dir": str(result.point.directory), "overrides": dict(result.point.overrides), **fields}
