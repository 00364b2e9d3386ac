"""`ridge calibrate`: measure this machine and write a calibration file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from ridgeline.cli.options import json_option
from ridgeline.cli.progress import print_measuring
from ridgeline.cli.tables import Column, print_json, print_table

if TYPE_CHECKING:
    from ridgeline.planner.calibration_file import CalibrationFile
    from ridgeline.planner.hardware import Hardware


@click.command()
@click.option("--output", "-o", type=click.Path(path_type=Path), help="Calibration file to write [default: only print the results].")
@click.option("--cluster", help="Cluster of this machine: gives the kind and latency of the links between its devices.")
@click.option(
    "--data", type=click.Path(path_type=Path), help="A prepared corpus on this machine's file system, to also measure the input pipeline."
)
@json_option
def calibrate(output: Path | None, cluster: str | None, data: Path | None, as_json: bool) -> None:
    """Measure this machine for the planner: matmuls by shape and dtype, memory, links between local devices, host.

    Takes half a minute on a CPU and a few minutes on a GPU. Nothing else should run on the device. Progress goes to stderr. Use the file
    with the --calibration option of `ridge plan`, `ridge estimate step` and others.
    """
    from ridgeline.configs.cluster import load_cluster
    from ridgeline.configs.errors import UserError
    from ridgeline.planner.calibration_file import read_own, write_calibration

    site = None if cluster is None else load_cluster(cluster).config
    if output is not None and not output.parent.is_dir():
        raise UserError(f"{output}: cannot be written: {output.parent} is not a directory")
    layers = [] if output is None else read_own(output).layers  # keep the results of `ridge bench remat`
    import jax

    from ridgeline.measure import calibration

    local = jax.local_devices()[0]
    found = calibration.device_entry(local.platform, local.device_kind)
    if site is not None and site.device != found.name:
        raise UserError(f"cluster {site.name} has {site.device} devices, but this machine's are {found.name}")
    level = site.links[0] if site is not None else calibration.default_link(found)
    measured = calibration.calibrate(
        found.name,
        calibration.CPU if local.platform == "cpu" else calibration.GPU,
        level,
        report=print_measuring,
    )
    if data is not None:
        print_measuring("the input pipeline")
        host = measured.host.model_copy(update={"input_tokens_per_s": calibration.input_tokens_per_s(data)})
        measured = measured.model_copy(update={"host": host})
    if output is not None:
        write_calibration(output, measured.model_copy(update={"layers": layers}))
    if as_json:
        print_json(measured.model_dump(mode="json"))
        return
    print_table(
        [Column("what"), Column("figure", "measured"), Column("share", "of datasheet", "{:.0%}".format)],
        _rows(measured, found),
        title=measured.name,
    )
    if output is not None:
        print(f"written to {output}; use it with --calibration {output}")


def _rows(measured: CalibrationFile, device: Hardware) -> list[dict[str, object]]:
    """Return one row per result, with its share of the datasheet value. A nominal entry (cpu) has no datasheet."""
    rows: list[dict[str, object]] = []
    for matmul in measured.matmul:
        rate = (matmul.tflop_per_s or 0) * 1e12
        peak = None if device.nominal else device.peak_flops.get(matmul.dtype)
        what = f"matmul {matmul.dtype} {matmul.m} x {matmul.k} x {matmul.n}"
        rows.append({"what": what, "figure": f"{rate / 1e12:,.3f} TFLOP/s", "share": peak and rate / peak})
    for attention in measured.attention:
        rate = (attention.tflop_per_s or 0) * 1e12
        what = f"attention T={attention.seq_len} H={attention.head_dim}, forward and backward"
        rows.append({"what": what, "figure": f"{rate / 1e12:,.1f} TFLOP/s", "share": rate / device.peak_flops["bfloat16"]})
    for memory in measured.memory:
        rate = (memory.gb_per_s or 0) * 1e9
        share = None if device.nominal else rate / device.memory_bandwidth_bytes_per_s
        rows.append({"what": "device memory", "figure": f"{rate / 1e9:,.1f} GB/s", "share": share})
    for curve in measured.links:
        of = "MB reduced in the switch" if curve.in_switch else "MB sent"
        for size, rate in curve.measured:
            rows.append({"what": f"{curve.kind}, {size / 1e6:,.2f} {of}", "figure": f"{rate:,.2f} GB/s", "share": None})
    host = measured.host
    if host.copy_gb_per_s is not None:
        share = host.copy_gb_per_s * 1e9 / device.host_bandwidth_bytes_per_s
        rows.append({"what": "host to device", "figure": f"{host.copy_gb_per_s:,.1f} GB/s", "share": share})
    rows.append({"what": "dispatch of one program", "figure": f"{host.dispatch_us or 0:,.1f} us", "share": None})
    if host.input_tokens_per_s is not None:
        rows.append({"what": "input pipeline", "figure": f"{host.input_tokens_per_s:,.0f} tokens/s", "share": None})
    return rows
