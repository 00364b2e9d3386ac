"""`ridge checkpoint list | verify | diff`: the checkpoints of a run, whether they are good, and how two differ. Nothing is changed."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import click

from ridgeline.cli.options import FAILED_CHECK, Int32Range, json_option
from ridgeline.cli.tables import Column, print_json, print_table
from ridgeline.configs.format import format_bytes, plural

RUN = click.argument("run", type=click.Path(path_type=Path))


@click.command("list")
@RUN
@json_option
def list_command(run: Path, as_json: bool) -> None:
    """List the checkpoints of RUN: complete, incomplete and set aside ones.

    A restart resumes from the newest complete checkpoint, unless it is damaged (`ridge checkpoint verify`).
    """
    from ridgeline.rundir.directory import RunDir
    from ridgeline.trainer.checkpoint.listing import entries

    directory = RunDir.open(run)
    found = entries(directory.checkpoints)
    if as_json:
        print_json({"run": directory.name, "directory": str(directory.checkpoints), "checkpoints": [vars(entry) for entry in found]})
        return
    if not found:
        print(f"{directory.name}: no checkpoints in {directory.checkpoints}")
        return
    rows: list[dict[str, Any]] = [
        vars(entry) | {"note": entry.reason or ("a restart begins here" if entry.resumes else None)} for entry in found
    ]
    columns: list[Column | str] = [
        "step",
        "state",
        Column("size_bytes", "size", format_bytes),
        Column("sealed_s", "sealed", lambda value: time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(value)), ""),
        Column("finite", "finite", lambda value: "yes" if value else "not verified", ""),
        Column("note", missing=""),
    ]
    print_table(columns, rows, title=f"{directory.name}: {plural(len(found), 'checkpoint')}")


@click.command("verify")
@RUN
@click.option("--step", type=Int32Range(min=0), help="Only this step [default: all complete ones].")
@json_option
def verify_command(run: Path, step: int | None, as_json: bool) -> int:
    """Read every file of the complete checkpoints of RUN and compare it with the integrity manifest. Exits with code 1 for damage."""
    from ridgeline.rundir.directory import RunDir
    from ridgeline.trainer.checkpoint.listing import entries, verify

    directory = RunDir.open(run)
    root = directory.checkpoints
    sizes = {entry.step: entry.size_bytes for entry in entries(root) if entry.state == "complete"}
    damage = {one: verify(root, one) for one in (sorted(sizes) if step is None else [step])}
    bad = [one for one, found in damage.items() if found]
    if as_json:
        results = [{"step": one, "good": not found, "damage": [vars(item) for item in found]} for one, found in damage.items()]
        print_json({"run": directory.name, "directory": str(root), "good": not bad, "checkpoints": results})
        return FAILED_CHECK if bad else 0
    if not damage:
        print(f"{directory.name}: no complete checkpoints in {root}")
    for one, found in damage.items():
        size = sizes.get(one)
        print(f"step {one}: {'good' if not found else 'damaged'}{'' if size is None else f' ({format_bytes(size)})'}")
        for item in found:
            print(f"  {item}")
    return FAILED_CHECK if bad else 0


@click.command("diff")
@click.argument("a", metavar="A", type=click.Path(path_type=Path))
@click.argument("b", metavar="B", type=click.Path(path_type=Path))
@click.option("--step-a", type=Int32Range(min=0), help="Checkpoint of A [default: the newest good one].")
@click.option("--step-b", type=Int32Range(min=0), help="Checkpoint of B [default: the newest good one].")
@click.option("--all", "show_all", is_flag=True, help="Also list the arrays that are equal.")
@json_option
def diff_command(a: Path, b: Path, step_a: int | None, step_b: int | None, show_all: bool, as_json: bool) -> None:
    """Compare two checkpoints: arrays, data position, config. A and B are run directories, or directories of steps in them.

    Values are compared where the shapes are equal: the largest absolute and relative difference, and the bytes that differ.
    """
    from ridgeline.trainer.checkpoint.diff import compare, find

    path_a, path_b = find(a, step_a), find(b, step_b)
    found = compare(path_a, path_b)
    changed = [array for array in found.arrays if array.change != "equal"]
    if as_json:
        print_json(
            {
                "a": str(path_a),
                "b": str(path_b),
                "equal": found.equal,
                "arrays": [vars(array) for array in found.arrays],
                "facts": [{"key": key, "a": in_a, "b": in_b} for key, in_a, in_b in found.facts],
                "config": [{"key": key, "a": in_a, "b": in_b} for key, in_a, in_b in found.config],
            }
        )
        return
    shown = found.arrays if show_all else changed
    if shown:
        rows: list[dict[str, Any]] = [
            vars(array) | {"share": array.changed / array.elements if array.elements else None} for array in shown
        ]
        columns: list[Column | str] = [
            "name",
            "change",
            Column("a", "A", missing=""),
            Column("b", "B", missing=""),
            Column("max_abs", "max |a-b|", "{:.3g}".format, ""),
            Column("max_rel", "max relative", "{:.3g}".format, ""),
            Column("share", "changed", "{:.1%}".format, ""),
        ]
        print_table(columns, rows)
    for title, rows_of in (("metadata", found.facts), ("config", found.config)):
        if rows_of:
            texts = [{"key": key, "a": _text(in_a), "b": _text(in_b)} for key, in_a, in_b in rows_of]
            print()
            print_table([Column("key"), Column("a", "A"), Column("b", "B")], texts, title=title)
    total = (
        f"{plural(len(changed), 'array')} of {len(found.arrays)} differ" if changed else f"all {len(found.arrays)} arrays are bitwise equal"
    )
    print(f"{path_a} and {path_b}: {total}")


def _text(value: Any) -> str:
    """Return a value of the config or the metadata on one line."""
    from ridgeline.configs.dump import value_text

    nested = (isinstance(value, dict) and value) or (isinstance(value, list) and any(isinstance(item, dict | list) for item in value))
    return json.dumps(value) if nested else value_text(value)
