"""Settings of a scaling study: one mesh axis grows; in weak scaling the batch size grows in proportion."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from ridgeline.configs.cluster import ClusterConfig
from ridgeline.configs.errors import UserError
from ridgeline.configs.load import load
from ridgeline.configs.rules import check_devices
from ridgeline.configs.schema import Config
from ridgeline.explain.study.document import Prediction
from ridgeline.launch.trials.study import Setting, setting_of, with_enough_lines
from ridgeline.planner.calibration import Calibration
from ridgeline.planner.hardware import find_hardware
from ridgeline.planner.step_time import step_time

VARIED = ("mesh.", "runtime.cpu_devices")
VARIED_WEAK = (*VARIED, "data.batch_size")


@dataclass(frozen=True)
class ScalingRequest:
    """Request for a scaling study."""

    config: str
    overrides: tuple[str, ...]
    devices: Sequence[int]
    weak: bool = False
    axis: str | None = None
    """The axis that grows; None: the config's own -1 axis, else data where it is used, else fsdp."""

    @property
    def base(self) -> Config:
        """The config without a scale. Raises UserError."""
        return load(self.config, self.overrides).config


def growing_axis(config: Config, wanted: str | None) -> str:
    """Return the mesh axis that grows. Raises UserError if another axis is -1."""
    sizes = config.mesh.sizes
    wild = next((axis for axis, size in sizes.items() if size == -1), None)
    if wanted is None:
        return wild if wild is not None else "data" if sizes["data"] > 1 else "fsdp"
    if wild is not None and wild != wanted:
        raise UserError(f"--axis {wanted}: mesh.{wild}=-1 already takes all remaining devices; add mesh.{wild}=1")
    return wanted


def settings_of(
    request: ScalingRequest,
    *,
    check: Callable[[int], None] = lambda devices: None,
    per_process: Callable[[int], int] | None = None,
    nodes: Mapping[int, int] | None = None,
) -> list[Setting]:
    """Return a setting per scale; a scale that cannot run has its reason in `refusal`.

    Args:
      request: the config and its scales.
      check: raises UserError for a scale that exceeds the machine.
      per_process: devices -> devices per process, for virtual devices (runtime.cpu_devices); raises UserError like `check`.
      nodes: scale -> nodes, for Slurm.

    Raises:
      UserError: the config is invalid at every scale.
    """
    base = request.base
    axis = growing_axis(base, request.axis)
    smallest = min(request.devices)

    def config_at(devices: int) -> Config:
        check(devices)
        others = math.prod(size for name, size in base.mesh.sizes.items() if name != axis)
        if devices % others:
            raise UserError(f"{devices} devices are not a multiple of the other mesh axes ({others} devices)")
        changes = [f"mesh.{axis}={devices // others}"]
        if per_process is not None:
            changes.append(f"runtime.cpu_devices={per_process(devices)}")
        if request.weak:
            batch, rest = divmod(base.data.batch_size * devices, smallest)
            if rest:
                raise UserError(f"data.batch_size={base.data.batch_size} at {smallest} devices cannot be scaled to {devices}")
            changes.append(f"data.batch_size={batch}")
        config = load(request.config, [*request.overrides, *changes]).config
        check_devices(config, devices)
        return with_enough_lines(config)

    return [
        setting_of(f"devices-{devices}", devices, partial(config_at, devices), None if nodes is None else nodes[devices])
        for devices in request.devices
    ]


def prediction(config: Config, devices: int, kind: str, cluster: ClusterConfig | None, calibration: Calibration) -> Prediction:
    """Return the planner's prediction for a scale, or the reason of its absence as `why_none`. `kind`: device kind as JAX names it."""
    if cluster is None:
        return {"why_none": "no cluster file describes the devices (--cluster, or --predict for runs on this machine)"}
    device = find_hardware(kind)
    if (kind.lower() if device is None else device.name) != cluster.device:
        return {"why_none": f"{cluster.name} has {cluster.device} devices, these runs used '{kind}'", "cluster": cluster.name}
    try:
        expected = step_time(config, check_devices(config, devices), cluster, calibration)
    except UserError as error:
        return {"why_none": str(error), "cluster": cluster.name}
    return {
        "tokens_per_s": expected.tokens_per_s,
        "step_s": expected.step_s,
        "breakdown_s": expected.breakdown_s,
        "cluster": cluster.name,
        "rates": calibration.name,
    }


def output_of(base: Config, output: Path | None, what: str) -> Path:
    """Return the directory of a study."""
    return output if output is not None else Path("runs") / f"{base.name}-{what}"
