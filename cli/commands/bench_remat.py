"""`ridge bench remat CONFIG`: the cost of each rematerialization policy on this device, for `ridge plan`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ridgeline.cli.options import Int32Range, config_arguments, json_option
from ridgeline.cli.progress import print_measuring
from ridgeline.cli.tables import Column, print_json, print_table

if TYPE_CHECKING:
    from ridgeline.configs.schema import Config
    from ridgeline.planner.layer_costs import LayerPoint


@click.command()
@config_arguments
@click.option("--into", type=click.Path(path_type=Path), help="Add the results to this calibration file, which is created if needed.")
@click.option("--rows", type=Int32Range(min=1), help="Rows per batch [default: a device's microbatch, up to 16,384 tokens].")
@click.option("--repeats", type=Int32Range(min=1), default=9, show_default=True, help="Rounds of every policy.")
@json_option
def remat(config: str, overrides: tuple[str, ...], into: Path | None, rows: int | None, repeats: int, as_json: bool) -> None:
    """Time a layer of CONFIG under each rematerialization policy, forward and backward, on the first device.

    `ridge plan --calibration FILE` then uses the results to choose a policy for this device and layer shape. Heads and MLP are sharded as
    mesh.tensor shards them; communication is not measured. Nothing else should run on the device. Progress goes to stderr.
    """
    from ridgeline.configs.errors import UserError
    from ridgeline.configs.load import load
    from ridgeline.planner.calibration_file import add_layer, read_own, write_calibration

    resolved = load(config, overrides).config
    before = None if into is None else read_own(into)  # reject an unreadable file before measuring for minutes
    if into is not None and not into.parent.is_dir():
        raise UserError(f"{into}: cannot be written: {into.parent} is not a directory")
    _set_up(resolved)

    import jax

    from ridgeline.measure.calibration import device_entry
    from ridgeline.measure.remat import measure_layer

    local = jax.local_devices()[0]
    device = device_entry(local.platform, local.device_kind)
    point = measure_layer(resolved, device.name, rounds=repeats, rows=rows, report=print_measuring)
    if into is not None and before is not None:
        write_calibration(into, add_layer(before, point))
    if as_json:
        print_json(point.model_dump(mode="json"))
        return
    print_table(
        [
            Column("policy"),
            Column("layer_ms", "ms per layer", "{:.3f}".format),
            Column("more", "against none", "{:+.1%}".format),
            Column("kept_mb", "MB kept per layer", "{:,.1f}".format),
            Column("counted_mb", "MB planned", "{:,.1f}".format),
        ],
        _rows(point, resolved, rows),
        title=f"a layer on {device.name}, forward and backward, {point.tokens:,} tokens ({point.source}); MB is 1e6 bytes",
    )
    if into is not None:
        print(f"written to {into}; next: ridge plan {config} --calibration {into} --cluster CLUSTER")


def _set_up(config: Config) -> None:
    """Set up this process's devices with the flags of a training run."""
    from ridgeline.launch import cluster, environment

    environment.prepare(config, cluster.describe(os.environ, flags=cluster.Flags(None, None, None), platform=config.runtime.platform))


def _rows(point: LayerPoint, config: Config, rows: int | None) -> list[dict[str, Any]]:
    """Return one row per policy, with the bytes of the compiled program and those the planner estimates."""
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
