"""What `ridge bench` prints: the pieces of a layer, the layers, the ladder."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from ridgeline.cli.tables import Column, print_table
from ridgeline.configs.schema import Config
from ridgeline.measure.ladder import Ladder, ms, spread
from ridgeline.measure.tasks import Outcome

MOST_PIECES = 12
WHAT = {
    "matmul": "products of a step",
    "memory": "passes of a step",
    "collectives": "collectives of a step",
    "loader": "a batch from the loader alone",
    "step": "a step on synthetic data",
    "loop": "a step of the loop on real data",
    "save": "a save, holding training up",
    "save_write": "a save until it is sealed",
    "restore": "a restore, verified",
    "checkpoint": "saves, spread over the steps",
}


def show(outcome: Outcome, config: Config) -> None:
    """Print an outcome for people."""
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
        Column("part", "of" if layer != "collectives" else "axes"),
        Column("size"),
        Column("count", "times", "{:,.4g}".format),
        Column("once_s", "once", ms),
        Column("spread", format="{:.0%}".format),
        Column("shown_rate", "bus rate" if layer == "collectives" else "rate"),
        Column("per_step_s", "per step", ms),
        Column("share", format="{:.0%}".format),
    ]
    left = "" if len(ordered) <= MOST_PIECES else f" (the longest {MOST_PIECES} of {len(ordered)})"
    print_table(columns, shown, title=f"{WHAT[layer]} on each device{left}")


def _groups(groups: dict[str, float]) -> None:
    """Print the sums by part of the model, kind of pass or mesh axes."""
    total_s, ordered = sum(groups.values()), sorted(groups.items(), key=lambda item: -item[1])
    print("in all: " + ", ".join(f"{part} {ms(seconds)} ({seconds / total_s:.0%})" for part, seconds in ordered))


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
        {"what": WHAT[name], "median": statistics.median(values), "spread": spread(values), "rounds": len(values)}
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
            "meaning": rung.meaning if rung.clear else f"{rung.meaning} (no more than noise)",
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
    print_table(columns, rows, title=f"{config.name}: what each layer adds to a step (medians of {len(outcome.series['step'])} rounds)")
    if "loader" in outcome.series:
        batch_s = statistics.median(outcome.series["loader"])
        print(f"beside it, the loader alone: {ms(batch_s)} per batch, {batch_s / ladder.time_s:.1%} of a step")
    print(f"\n{ladder.verdict.sentence}")


def _facts(outcome: Outcome, config: Config) -> list[str]:
    facts, found = outcome.facts, []
    if "matmul_flops_per_s" in facts and outcome.task == "matmul":
        share = facts["datasheet_share"]
        of = f", {share:.1%} of the datasheet" if share else " (no datasheet for this device)"
        found.append(f"all products: {facts['matmul_flops_per_s'] / 1e12:.3g} TFLOP/s per device in {facts['matmul_dtype']}{of}")
    if "loader_tokens_per_s" in facts and outcome.task == "loader":
        found.append(f"{facts['loader_tokens_per_s']:,.0f} tokens/s; first batch after {facts['first_batch_s']:.2f} s")
    if outcome.task in ("step", "loop"):
        tokens = config.data.batch_size * config.data.seq_len / statistics.median(outcome.series[outcome.task])
        found.append(f"{tokens:,.0f} tokens/s; the step compiled in {facts['compile_s']:.1f} s, which is not counted")
    if "data_wait_s" in facts and outcome.task == "loop":
        found.append(f"waiting for data: {ms(facts['data_wait_s'])} per step; {facts['log_lines']} log lines in all rounds")
    if "checkpoint_bytes" in facts and outcome.task == "checkpoint":
        found.append(f"{facts['checkpoint_bytes'] / 1e6:,.1f} MB per checkpoint (MB is 1e6 bytes)")
    return found
