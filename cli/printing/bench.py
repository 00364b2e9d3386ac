"""Print the result of `ridge bench`: the pieces of a layer, the layers, the ladder."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from ridgeline.cli.tables import Column, print_table
from ridgeline.configs.schema import Config
from ridgeline.measure.ladder import Ladder, ms
from ridgeline.measure.tasks import Outcome
from ridgeline.rundir.noise import spread

MOST_PIECES = 12
TITLES = {
    "matmul": "matmuls of a step",
    "memory": "memory traffic of a step",
    "collectives": "collectives of a step",
    "loader": "batch from the loader alone",
    "step": "step on synthetic data",
    "loop": "step of the loop on real data",
    "save": "save: time training is blocked",
    "save_write": "save: time until complete",
    "restore": "restore with verification",
    "checkpoint": "saves, per step",
}


def print_outcome(outcome: Outcome, config: Config) -> None:
    """Print the tables, the results and the notes of a task."""
    for layer in ("matmul", "memory", "collectives"):
        rows = [row for row in outcome.rows if row["layer"] == layer]
        if rows and (outcome.task != "all"):
            _pieces(layer, rows)
            _groups(outcome.groups[layer])
            print()
    if outcome.ladder is not None:
        _ladder(outcome.ladder, outcome, config)
    else:
        _layers(outcome)
    for line in _facts(outcome, config):
        print(line)
    for note in outcome.notes:
        print(note)


def _pieces(layer: str, rows: Sequence[dict[str, Any]]) -> None:
    ordered = sorted(rows, key=lambda row: -row["per_step_s"])
    shown = [{**row, "size": _size(row), "shown_rate": _rate(row)} for row in ordered[:MOST_PIECES]]
    columns = [
        Column("what"),
        Column("part", "part" if layer != "collectives" else "axes"),
        Column("size"),
        Column("count", "count", "{:,.4g}".format),
        Column("once_s", "once", ms),
        Column("spread", format="{:.0%}".format),
        Column("shown_rate", "bus rate" if layer == "collectives" else "rate"),
        Column("per_step_s", "per step", ms),
        Column("share", format="{:.0%}".format),
    ]
    left = "" if len(ordered) <= MOST_PIECES else f" ({MOST_PIECES} of {len(ordered)}, longest first)"
    print_table(columns, shown, title=f"{TITLES[layer]} on each device{left}")


def _groups(groups: dict[str, float]) -> None:
    """Print the sums by part of the model, kind of memory traffic or mesh axes."""
    total_s, ordered = sum(groups.values()), sorted(groups.items(), key=lambda item: -item[1])
    print("total: " + ", ".join(f"{part} {ms(seconds)} ({seconds / total_s:.0%})" for part, seconds in ordered))


def _size(row: dict[str, Any]) -> str:
    if row["layer"] == "matmul":
        m, n, k = row["shape"]
        batch = f"{row['batch']} x " if row["batch"] > 1 else ""
        return f"{batch}[{m} x {k}] [{k} x {n}] {row['dtype']}"
    if row["layer"] == "memory":
        return f"{row['array_bytes'] / 1e6:,.3g} MB arrays, {row['bytes_per_step'] / 1e6:,.4g} MB"
    return f"{row['kind']}, {row['bytes'] / 1e6:,.3g} MB"


def _rate(row: dict[str, Any]) -> str:
    return f"{row['rate'] / 1e12:.3g} TFLOP/s" if row["unit"] == "FLOP/s" else f"{row['rate'] * row.get('bus_factor', 1.0) / 1e9:,.3g} GB/s"


def _layers(outcome: Outcome) -> None:
    rows = [
        {"what": TITLES[name], "median": statistics.median(values), "spread": spread(values), "rounds": len(values)}
        for name, values in outcome.series.items()
    ]
    print_table([Column("what"), Column("median", format=ms), Column("spread", format="{:.0%}".format), Column("rounds")], rows)


def _ladder(ladder: Ladder, outcome: Outcome, config: Config) -> None:
    rows = [
        {
            "layer": rung.name,
            "time": rung.time_s,
            "adds": rung.adds_s,
            "share": rung.share,
            "spread": rung.spread,
            "meaning": rung.meaning if rung.clear else f"{rung.meaning} (within the noise)",
        }
        for rung in ladder.rungs
    ]
    columns: list[Column | str] = [
        "layer",
        Column("time", "time/step", ms),
        Column("adds", format=ms),
        Column("share", format="{:.1%}".format),
        Column("spread", format="{:.0%}".format),
        Column("meaning", ""),
    ]
    print_table(
        columns, rows, title=f"{config.name}: time that each layer adds to a step (medians of {len(outcome.series['step'])} rounds)"
    )
    if "loader" in outcome.series:
        batch_s = statistics.median(outcome.series["loader"])
        print(f"the loader alone: {ms(batch_s)} per batch, {batch_s / ladder.time_s:.1%} of a step")
    print(f"\n{ladder.verdict.sentence}")


def _facts(outcome: Outcome, config: Config) -> list[str]:
    facts, found = outcome.facts, []
    if "matmul_flops_per_s" in facts and outcome.task == "matmul":
        share = facts["datasheet_share"]
        of = f", {share:.1%} of the datasheet peak" if share else " (no datasheet for this device)"
        found.append(f"all matmuls: {facts['matmul_flops_per_s'] / 1e12:.3g} TFLOP/s per device in {facts['matmul_dtype']}{of}")
    if "loader_tokens_per_s" in facts and outcome.task == "loader":
        found.append(f"{facts['loader_tokens_per_s']:,.0f} tokens/s; first batch after {facts['first_batch_s']:.2f} s")
    if outcome.task in ("step", "loop"):
        tokens = config.data.batch_size * config.data.seq_len / statistics.median(outcome.series[outcome.task])
        found.append(f"{tokens:,.0f} tokens/s; compilation took {facts['compile_s']:.1f} s (not counted)")
    if "data_wait_s" in facts and outcome.task == "loop":
        found.append(f"data wait: {ms(facts['data_wait_s'])} per step; {facts['log_lines']} log lines in all rounds")
    if "checkpoint_bytes" in facts and outcome.task == "checkpoint":
        found.append(f"{facts['checkpoint_bytes'] / 1e6:,.1f} MB per checkpoint (MB is 1e6 bytes)")
    return found
