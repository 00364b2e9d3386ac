"""`ridge bench compare` and `ridge bench template`: stored results against each other, and an experiment for the lab notebook. No JAX."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ridgeline.cli.options import json_option
from ridgeline.cli.tables import Column, print_json, print_table
from ridgeline.configs.errors import UserError

if TYPE_CHECKING:
    from ridgeline.measure.guard import Judgement

SLOWER = 1
"""Exit code of --fail-on-slower, as other commands that answer no (`ridge compile --fail-if-memory-above`)."""
PATH = click.Path(path_type=Path)
change_option = click.option("--change", "changes", multiple=True, metavar="KEY", help="Config key that is meant to differ; repeatable.")
fail_option = click.option("--fail-on-slower", is_flag=True, help=f"Exit with {SLOWER} when a layer is slower.")


@click.command()
@click.argument("baseline", type=PATH)
@click.argument("new", type=PATH)
@change_option
@fail_option
@json_option
def compare(baseline: Path, new: Path, changes: tuple[str, ...], fail_on_slower: bool, as_json: bool) -> int:
    """Compare stored results: each layer of NEW against BASELINE is faster, slower, or cannot be told from noise.

    Both are results of `ridge bench` or directories of them. Three or more runs of one code measure the noise between runs, which is
    otherwise assumed. Other devices, tasks or configs are refused; a config key that is the change under test is named with --change.
    """
    found = judgement_of(baseline, new, changes)
    if as_json:
        print_json(to_json(found))
    else:
        show(found)
    return SLOWER if fail_on_slower and found.slower else 0


@click.command()
@click.argument("title")
@click.option("--hypothesis", help="What holds it back, and how that is known.")
@click.option("--predicted", help="The effect that is expected, said before measuring.")
@click.option("--decision", help="Kept, dropped or measured again, and why.")
@click.option("--baseline", type=PATH, help="Stored result before the change (or a directory).")
@click.option("--new", type=PATH, help="Stored result after it.")
@change_option
@click.option("--append", "target", type=PATH, help="Add the section to this file instead of printing it.")
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
    """Write an experiment for the lab notebook: hypothesis, predicted effect, change, measured effect, decision.

    With --baseline and --new the change and the measured effect are filled in from the stored results.
    """
    from ridgeline.measure.template import append, experiment

    if (baseline is None) != (new is None):
        raise UserError("--baseline and --new belong together: the measured effect is a comparison")
    found = judgement_of(baseline, new, changes) if baseline is not None and new is not None else None
    text = experiment(title, datetime.now(UTC).date(), judgement=found, hypothesis=hypothesis, predicted=predicted, decision=decision)
    if target is None:
        print(text, end="")
    else:
        append(target, text)
        print(f"added to {target}")


def judgement_of(baseline: Path, new: Path, changes: tuple[str, ...]) -> Judgement:
    """Read both sides and compare them."""
    from ridgeline.measure.guard import judge
    from ridgeline.rundir.bench_results import read_all

    return judge(read_all(baseline), read_all(new), changes)


def show(found: Judgement) -> None:
    """Print a comparison for people."""
    from ridgeline.measure.ladder import ms

    rows = [
        {
            "layer": v.layer,
            "old": v.old_s,
            "new": v.new_s,
            "verdict": v.comparison.describe(),
            "noise": v.noise_from,
        }
        for v in found.layers
    ]
    sides = " against ".join(f"{side[-1].code} ({len(side)} run(s))" for side in (found.new, found.old))
    columns: list[Column | str] = [
        "layer",
        Column("old", "baseline", ms),
        Column("new", format=ms),
        "verdict",
        Column("noise", "noise between runs"),
    ]
    print_table(columns, rows, title=f"ridge bench {found.task}, {found.new[-1].name}: {sides}")
    for note in found.notes:
        print(note)
    print(f"\n{found.headline()}")


def to_json(found: Judgement) -> dict[str, Any]:
    """Return a comparison as plain data."""
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
