"""`ridge shardings CONFIG`: the sharding of every parameter, and the bytes per device."""

from __future__ import annotations

import dataclasses
import math

import click

from ridgeline.cli.options import MEMBERS, config_arguments, json_option
from ridgeline.cli.tables import Column, print_json, print_table


@click.command()
@config_arguments
@click.option(
    "--devices",
    type=MEMBERS,
    help="Number of devices [default: the product of the mesh axes, or the devices of this machine].",
)
@json_option
def shardings(config: str, overrides: tuple[str, ...], devices: int | None, as_json: bool) -> None:
    """Print logical axes, partition spec and bytes per device of every parameter of CONFIG, and totals.

    Nothing is allocated, so this works for any model and number of devices without the hardware.
    """
    from ridgeline.configs.load import load

    resolved = load(config, overrides).config
    import jax

    from ridgeline.configs.schema import ComputeConfig
    from ridgeline.sharding.mesh import abstract_mesh
    from ridgeline.sharding.partition import Partitioner
    from ridgeline.sharding.report import sharding_report
    from ridgeline.trainer.optimizers import build_optimizer
    from ridgeline.trainer.state import model_spec

    sizes = resolved.mesh.sizes.values()
    devices = devices or (math.prod(sizes) if -1 not in sizes else jax.device_count())
    partitioner = Partitioner.of(abstract_mesh(resolved.mesh, devices), resolved)
    # Attention backend and rematerialization may need the real devices, and do not change the parameters.
    spec = model_spec(resolved.model_copy(update={"compute": ComputeConfig()}), partitioner)
    optimizer = build_optimizer(resolved.optimizer, resolved.precision, spec.trained_axes, partitioner, resolved.model.width_ratio)
    trained = spec.split(spec.abstract_params)[0], spec.trained_axes
    opt_state = jax.eval_shape(optimizer.init, trained[0])
    report = sharding_report(partitioner, spec.abstract_params, spec.param_axes, trained, opt_state, resolved.precision.gradients)
    mesh = {axis: size for axis, size in partitioner.mesh.shape.items() if size > 1}
    if as_json:
        values = dataclasses.asdict(report)
        print_json({"mesh": mesh, "devices": devices, **values, "total_bytes_per_device": report.total_bytes_per_device})
        return
    layout = " x ".join(f"{axis}={size}" for axis, size in mesh.items()) or "of one device"
    rows = [dataclasses.asdict(row) for row in report.rows]
    print_table(
        [
            Column("path", "parameter"),
            Column("axes", "logical axes", ", ".join),
            Column("spec", "partition", _spec),
            Column("shape", format=_shape),
            Column("local_shape", "per device", _shape),
            Column("bytes_per_device", "MB/device", lambda n: f"{n / 1e6:,.3f}"),
        ],
        rows,
        title=f"mesh {layout}, {devices:,} devices; MB is 1e6 bytes",
    )
    whole, dtypes = report.parameter_bytes / 1e9, ", ".join(sorted({row.dtype for row in report.rows}))
    print(f"\n{report.parameters:,} parameters, {whole:,.3f} GB ({dtypes}) in total; per device, in GB (1e9 bytes):")
    totals = {
        f"parameters ({dtypes})": report.parameter_bytes_per_device,
        f"gradients ({resolved.precision.gradients})": report.gradient_bytes_per_device,
        f"optimizer ({resolved.optimizer.kind})": report.optimizer_bytes_per_device,
        "total": report.total_bytes_per_device,
    }
    for name, value in totals.items():
        print(f"  {name:24} {value / 1e9:12,.3f}")


def _spec(spec: tuple[str | tuple[str, ...] | None, ...]) -> str:
    return ", ".join("-" if entry is None else entry if isinstance(entry, str) else "+".join(entry) for entry in spec)


def _shape(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape))
