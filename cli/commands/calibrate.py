"""`ridge calibrate`: measure this machine and write the file that `--calibration` reads."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ridgeline.cli.options import json_option
from ridgeline.cli.tables import Column, print_json, print_table

if TYPE_CHECKING:
    from ridgeline.configs.cluster import LinkLevel
    from ridgeline.planner.calibration import CalibrationFile
    from ridgeline.planner.hardware import Hardware


@click.command()
@click.option("--output", "-o", type=click.Path(path_type=Path), help="Write the calibration file here (default: only show the figures).")
@click.option("--cluster", help="Cluster file this machine belongs to: kind and latency of the links between its devices.")
@click.option(
    "--data", type=click.Path(path_type=Path), help="A prepared corpus on this machine's file system: measures the input pipeline."
)
@json_option
def calibrate(output: Path | None, cluster: str | None, data: Path | None, as_json: bool) -> None:
    """Measure matmuls by shape and dtype, memory, links between local devices and the host, for the planner.

    Takes half a minute on a CPU and a few minutes on a GPU, whose other users would spoil the figures. Progress goes to stderr.
    """
    from ridgeline.configs.cluster import load_cluster
    from ridgeline.configs.errors import UserError
    from ridgeline.planner.calibration import read_own

    site = None if cluster is None else load_cluster(cluster).config
    if output is not None and not output.parent.is_dir():
        raise UserError(f"{output}: cannot be written: {output.parent} is no directory")
    layers = [] if output is None else read_own(output).layers  # of `ridge bench remat`: stay in the file
    import jax

    from ridgeline.measure import calibration

    local = jax.local_devices()[0]
    found = device_entry(local.platform, local.device_kind)
    if site is not None and site.device != found.name:
        raise UserError(f"cluster {site.name} has {site.device} devices, but this machine's are {found.name}")
    level = site.links[0] if site is not None else _usual_link(found)
    measured = calibration.calibrate(
        found.name,
        calibration.CPU if local.platform == "cpu" else calibration.GPU,
        level,
        report=lambda line: print(f"measuring {line}", file=sys.stderr),
    )
    if data is not None:
        print("measuring the input pipeline", file=sys.stderr)
        host = measured.host.model_copy(update={"input_tokens_per_s": calibration.input_tokens_per_s(data)})
        measured = measured.model_copy(update={"host": host})
    if output is not None:
        write(output, measured.model_copy(update={"layers": layers}))
    if as_json:
        print_json(measured.model_dump(mode="json"))
        return
    print_table(
        [Column("what"), Column("figure"), Column("share", "of the datasheet", "{:.0%}".format)],
        _rows(measured, found),
        title=measured.name,
    )
    if output is not None:
        print(f"written to {output}: use it with --calibration {output}")


def device_entry(platform: str, device_kind: str) -> Hardware:
    """Return the catalogue entry of a JAX device: `cpu` for any CPU. Raises UserError for a device that is not listed."""
    from ridgeline.configs.errors import UserError
    from ridgeline.planner.hardware import CATALOGUE, find_hardware, hardware

    found = hardware("cpu") if platform == "cpu" else find_hardware(device_kind)
    if found is None:
        raise UserError(f"'{device_kind}' is not in the hardware catalogue: add it with its datasheet's figures to {CATALOGUE}")
    return found


def _usual_link(device: Hardware) -> LinkLevel:
    """The link between neighbours of a device where no cluster file says: NVLink, or the host's memory."""
    from ridgeline.configs.cluster import LinkLevel

    if device.link_bandwidth_bytes_per_s is None:
        return LinkLevel(name="memory", kind="memory", bandwidth_gb_per_s=device.host_bandwidth_bytes_per_s / 1e9, latency_us=0.0)
    rate, latency = device.link_bandwidth_bytes_per_s / 1e9, device.link_latency_s * 1e6
    return LinkLevel(name="nvlink", kind="nvlink", bandwidth_gb_per_s=rate, latency_us=latency)


def write(path: Path, measured: CalibrationFile) -> None:
    """Write a calibration file. Raises UserError where it cannot be written."""
    from ruamel.yaml import YAML

    from ridgeline.configs.errors import UserError

    yaml = YAML()
    yaml.default_flow_style = None
    yaml.width = 160
    try:
        with path.open("w") as file:
            file.write("# Written by ridge calibrate; laid over the shipped figures by --calibration. See planner/calibration.py.\n")
            yaml.dump(measured.model_dump(mode="json", exclude_defaults=True), file)
    except OSError as error:
        raise UserError(f"{path}: cannot be written: {error.strerror}") from None


def _rows(measured: CalibrationFile, device: Hardware) -> list[dict[str, object]]:
    """One row per figure, with its share of the datasheet where there is one. A nominal entry (cpu) has none."""
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
        of = "MB added up by the switch" if curve.in_switch else "MB sent"
        for size, rate in curve.measured:
            rows.append({"what": f"{curve.kind}, {size / 1e6:,.2f} {of}", "figure": f"{rate:,.2f} GB/s", "share": None})
    host = measured.host
    if host.copy_gb_per_s is not None:
        share = host.copy_gb_per_s * 1e9 / device.host_bandwidth_bytes_per_s
        rows.append({"what": "host to device", "figure": f"{host.copy_gb_per_s:,.1f} GB/s", "share": share})
    rows.append({"what": "dispatch of a program", "figure": f"{host.dispatch_us or 0:,.1f} us", "share": None})
    if host.input_tokens_per_s is not None:
        rows.append({"what": "input pipeline", "figure": f"{host.input_tokens_per_s:,.0f} tokens/s", "share": None})
    return rows
