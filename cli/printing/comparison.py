"""Print a comparison of stored benchmark results."""

from __future__ import annotations

from ridgeline.cli.tables import Column, print_table
from ridgeline.configs.format import plural
from ridgeline.measure.ladder import ms
from ridgeline.measure.regression import Judgment


def print_comparison(found: Judgment) -> None:
    """Print the verdict on each layer, the notes and the headline."""
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
    sides = " against ".join(f"{side[-1].code} ({plural(len(side), 'run')})" for side in (found.new, found.old))
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
