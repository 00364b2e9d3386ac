"""`ridge bench compare` and `ridge bench template`: compare stored results; write an experiment for a lab notebook. Without JAX."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ridgeline.cli.options import FAILED_CHECK, change_option, fail_option, json_option
from ridgeline.cli.tables import print_json
from ridgeline.configs.errors import UserError

if TYPE_CHECKING:
    from ridgeline.measure.regression import Judgment

PATH = click.Path(path_type=Path)


@click.command()
@click.argument("baseline", type=PATH)
@click.argument("new", type=PATH)
@change_option
@fail_option
@json_option
def compare(baseline: Path, new: Path, changes: tuple[str, ...], fail_on_slower: bool, as_json: bool) -> int:
    """Compare stored results: for each layer, whether NEW is faster or slower than BASELINE, or the difference is within the noise.

    BASELINE and NEW are results of `ridge bench`, or directories of results. Three or more runs of the same code measure the noise between
    runs; otherwise it is assumed. Results of other devices, tasks or configs are rejected. Use --change for a config key under test.
    """
    from ridgeline.cli.printing.comparison import print_comparison
    from ridgeline.measure.regression import to_json

    found = judgment_of(baseline, new, changes)
    if as_json:
        print_json(to_json(found))
    else:
        print_comparison(found)
    return FAILED_CHECK if fail_on_slower and found.slower else 0


@click.command()
@click.argument("title")
@click.option("--hypothesis", help="The bottleneck and its evidence.")
@click.option("--predicted", help="The expected effect, written before measuring.")
@click.option("--decision", help="Kept, dropped or measured again, and why.")
@click.option("--baseline", type=PATH, help="Stored result before the change, or a directory of results.")
@click.option("--new", type=PATH, help="Stored result after the change.")
@change_option
@click.option("--append", "target", type=PATH, help="Append the section to this file instead of printing it.")
def template(
    title: str,
    hypothesis: str | None,
    predicted: str | None,
    decision: str | None,
    baseline: Path | None,
    new: Path | None,
    changes: tuple[str, ...],
    target: Path | None,
) -> None:
    """Write a Markdown section for a lab notebook: hypothesis, predicted effect, change, measured effect, decision.

    --baseline and --new fill in the change and the measured effect from stored results.
    """
    from ridgeline.measure.experiment import append, experiment

    if (baseline is None) != (new is None):
        raise UserError("--baseline and --new must be given together")
    found = judgment_of(baseline, new, changes) if baseline is not None and new is not None else None
    text = experiment(title, datetime.now(UTC).date(), judgment=found, hypothesis=hypothesis, predicted=predicted, decision=decision)
    if target is None:
        print(text, end="")
    else:
        append(target, text)
        print(f"appended to {target}")


def judgment_of(baseline: Path, new: Path, changes: tuple[str, ...]) -> Judgment:
    """Read and compare stored results. Raises UserError."""
    from ridgeline.measure.regression import judge
    from ridgeline.rundir.bench_results import read_all

    return judge(read_all(baseline), read_all(new), changes)
