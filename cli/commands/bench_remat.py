"""`ridge bench remat CONFIG`: what each rematerialisation policy costs on this device, for `ridge plan` to choose by."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ridgeline.cli.options import config_arguments, json_option
from ridgeline.cli.tables import Column, print_json, print_table

if TYPE_CHECKING:
    from ridgeline.configs.schema import Config
    from ridgeline.planner.layer_costs import LayerPoint


@click.command()
@config_arguments
@click.option("--into", type=click.Path(path_type=Path), help="Add the figures to this file of `ridge calibrate`, or begin one.")
@click.option("--rows", type=click.IntRange(min=1), help="Rows to measure with [default: a device's microbatch, up to 16,384 tokens].")
@click.option("--repeats", type=click.IntRange(min=1), default=9, show_default=True, help="Rounds of every policy.")
@json_option
def remat(config: str, overrides: tuple[str, ...], into: Path | None, rows: int | None, repeats: int, as_json: bool) -> None:
    """Measure a layer of CONFIG under each rematerialisation policy on the first device, forward and backward.

    `ridge plan --calibration FILE` then chooses policies for this device and shape of layer by what was measured. mesh.tensor cuts heads
    and MLP as on one device of the mesh; what devices tell each other is not measured. Nothing else should run on the device. Progress
    goes to stderr.
    """
    from ridgeline.configs.errors import UserError
    from ridgeline.configs.load import load
    from ridgeline.planner.calibration import add_layer, read_own

    resolved = load(config, overrides).config
    before = None if into is None else read_own(into)  # an unreadable file is refused before minutes are spent
    if into is not None and not into.parent.is_dir():
        raise UserError(f"{into}: cannot be written: {into.parent} is no directory")
    _set_up(resolved)

    import jax

    from ridgeline.cli.commands.calibrate import device_entry, write
    from ridgeline.measure.remat import measure_layer

    local = jax.local_devices()[0]
    device = device_entry(local.platform, local.device_kind)
    point = measure_layer(
        resolved, device.name, rounds=repeats, rows=rows, report=lambda line: print(f"measuring {line}", file=sys.stderr, flush=True)
    )
    if into is not None and before is not None:
        write(into, add_layer(before, point))
    if as_json:
        print_json(point.model_dump(mode="json"))
        return
    print_table(
        [
            Column("policy"),
            Column("layer_ms", "ms per layer", "{:.3f}".format),
            Column("more", "to none", "{:+.1%}".format),
            Column("kept_mb", "MB kept per layer", "{:,.1f}".format),
            Column("counted_mb", "as planned", "{:,.1f}".format),
        ],
        _rows(point, resolved, rows),
        title=f"a layer on {device.name}, forward and backward, {point.tokens:,} tokens ({point.source}); MB is 1e6 bytes",
    )
    if into is not None:
        print(f"written to {into}: ridge plan {config} --calibration {into} chooses by it")


def _set_up(config: Config) -> None:
    """Set up this process's devices with the flags of a run."""
    from ridgeline.launch import cluster, environment

    environment.prepare(config, cluster.describe(os.environ, flags=cluster.Flags(None, None, None), platform=config.runtime.platform))


def _rows(point: LayerPoint, config: Config, rows: int | None) -> list[dict[str, Any]]:
    """One row per policy, with the bytes that the planner counts for it beside those of the compiled program."""
    from ridgeline.configs.schema import MESH_AXES
    from ridgeline.measure.remat import one_device
    from ridgeline.planner.activations import saved_activations
    from ridgeline.planner.hardware import hardware
    from ridgeline.planner.local import LocalSizes, attention_backend

    layer = one_device(config, rows)
    backend = attention_backend(layer, gpu=hardware(point.device).tensor_cores)
    found = []
    for cost in point.policies:
        of = layer.model_copy(update={"compute": layer.compute.model_copy(update={"remat": cost.remat})})
        counted = saved_activations(LocalSizes.of(of, dict.fromkeys(MESH_AXES, 1)), backend).bytes / of.model.num_layers
        found.append(
            {
                "policy": cost.policy + (f" ({', '.join(cost.names)})" if cost.names else ""),
                "layer_ms": cost.layer_s * 1e3,
                "more": cost.layer_s / point.none_s - 1,
                "kept_mb": cost.kept_bytes / 1e6,
                "counted_mb": counted / 1e6,
            }
        )
    return found
