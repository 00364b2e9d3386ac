"""Read a capture. One function reads everything the analysis needs; what comes after it computes and reads no file.

It reads the traces, the compiled programs and the sampled frames beside them, and from the run directory the event logs, the mesh and the
cluster, for its links.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ridgeline.configs.errors import UserError
from ridgeline.configs.files import read_limited
from ridgeline.explain.trace.capture import Capture, mesh_sizes
from ridgeline.explain.trace.graphs import name_instructions
from ridgeline.explain.trace.program import Programs, read_programs
from ridgeline.explain.trace.read import Host, read_hosts
from ridgeline.planner.calibration import load_calibration
from ridgeline.planner.hardware import Hardware, find_by_size, find_hardware, unlisted
from ridgeline.planner.links import Fabric
from ridgeline.rundir.analysis import DeviceFacts
from ridgeline.rundir.captures import FRAMES_SUFFIX, TRACE_SUFFIX
from ridgeline.rundir.directory import known_cluster
from ridgeline.rundir.events import Event
from ridgeline.rundir.phases import phases
from ridgeline.rundir.recompilation import Recompilation, recompilations

_CAUSES = {"save": "checkpoint", "compile": "compile"}
"""Phase of the event log -> cause of idle devices."""


@dataclass(frozen=True)
class Frames:
    """Samples of the source line that the main thread was at (observe.frames), as stretches in order of time."""

    stretches: list[tuple[int, int, str]]
    """(first sample, last sample, `file:line`), nanoseconds since 1970."""

    def most_often(self, low_ns: int, high_ns: int) -> str | None:
        """Return the line where the thread spent the most time between two moments; None without a sample in between."""
        spent = Counter[str]()
        for begin_ns, end_ns, line in self.stretches:
            inside_ns = min(end_ns, high_ns) - max(begin_ns, low_ns)
            if inside_ns >= 0:
                spent[line] += inside_ns + 1
        return spent.most_common(1)[0][0] if spent else None


@dataclass(frozen=True)
class HostProfile:
    """What was recorded of one process."""

    host: Host
    """Its trace."""
    frames: Frames | None = None
    """Samples of its main thread during the capture."""
    phases: Mapping[str, Sequence[tuple[float, float]]] = field(default_factory=dict)
    """Cause of idle devices -> (start, end) in seconds since 1970, from its event log."""
    recompilations: Sequence[Recompilation] = ()
    """From its event log."""


@dataclass(frozen=True)
class Profile:
    """Everything that is read of a capture."""

    capture: Capture
    hosts: Sequence[HostProfile]
    """One per process."""
    programs: Programs
    device_kind: str | None
    facts: DeviceFacts | None
    """What the traces contain of the devices."""
    hardware: Hardware | None
    """Datasheet of the devices; of devices that are not in the catalog, what the trace contains; None: nothing is known."""
    mesh: Mapping[str, int] | None
    """Axis -> devices; None where it is unknown."""
    fabric: Fabric | None
    """Links of the cluster; None where no cluster is known."""


def load_profile(
    capture: Capture, *, hardware: Hardware | None = None, cluster: str | None = None, calibration: Path | None = None
) -> Profile:
    """Read everything of a capture.

    Args:
      capture: from find_capture.
      hardware: datasheet of the devices; None: looked up by the name in the capture.
      cluster: file or name of the cluster, for the planned bandwidth of collectives; None: the cluster that the run was submitted to, or
        that its plan.json was made for.
      calibration: file of `ridge calibrate`; None: published rates.

    Raises:
      UserError: a file is damaged, the traces contain no device work, or there is no such cluster or calibration.
    """
    links = known_cluster(capture.run, cluster)
    rates = load_calibration(calibration)
    hosts = read_hosts(capture.traces)
    active = sum(1 for host in hosts for device in host.devices if len(device.ops))
    devices = capture.record.num_devices or active
    mesh = mesh_sizes(capture, devices)
    facts = _facts(hosts)
    device_kind = _device_kind(capture, hosts, facts)
    programs = read_programs(hosts, capture.directory, devices, mesh)
    for host in hosts:
        name_instructions(host, programs)
    return Profile(
        capture=capture,
        hosts=[_host_profile(capture, host) for host in hosts],
        programs=programs,
        device_kind=device_kind,
        facts=facts,
        hardware=hardware or _hardware(device_kind, facts),
        mesh=mesh,
        fabric=None if links is None else Fabric.from_cluster(links, rates, num_devices=devices),
    )


def read_frames(trace: Path) -> Frames | None:
    """Read the samples beside a trace; None without any. Raises UserError when the file is damaged."""
    file = trace.with_name(trace.name.removesuffix(TRACE_SUFFIX) + FRAMES_SUFFIX)
    if not file.is_file():
        return None
    try:
        return Frames([(int(begin), int(end), str(line)) for begin, end, line in json.loads(read_limited(file))])
    except UserError:
        raise
    except (ValueError, TypeError, OverflowError, RecursionError) as error:
        raise UserError(f"{file} cannot be read: {error}") from None


def _host_profile(capture: Capture, host: Host) -> HostProfile:
    events = [] if capture.run is None else capture.run.events_of(host.process)
    return HostProfile(host, read_frames(host.path), _phases(events), recompilations(events, host.process))


def _phases(events: Sequence[Event]) -> dict[str, list[tuple[float, float]]]:
    """Cause of idle devices -> (start, end) in seconds since 1970."""
    found: dict[str, list[tuple[float, float]]] = {}
    for phase in phases(events):
        if phase.name in _CAUSES and not phase.summed:
            found.setdefault(_CAUSES[phase.name], []).append((phase.start_s, phase.start_s + phase.duration_s))
    return found


def _facts(hosts: Sequence[Host]) -> DeviceFacts | None:
    """What the traces contain of their devices; of the first device with facts."""
    return next((device.facts for host in hosts for device in host.devices if device.facts is not None), None)


def _device_kind(capture: Capture, hosts: Sequence[Host], facts: DeviceFacts | None) -> str | None:
    named = None if facts is None else facts.model
    if named is not None and facts is not None and facts.vendor and not named.startswith(facts.vendor):
        named = f"{facts.vendor} {named}"
    return capture.record.device_kind or named or ("cpu" if hosts[0].kind == "cpu" else None)


def _hardware(kind: str | None, facts: DeviceFacts | None) -> Hardware | None:
    """Return the datasheet of the devices; else what the trace contains of them: enough for the ceilings of what memory limits."""
    found = None if kind is None else find_hardware(kind)
    if found is not None or facts is None:
        return found
    if facts.vendor == "AMD" and (facts.model is None or facts.model.startswith("gfx")):  # ROCm records no product name
        found = find_by_size("AMD", facts.cores, facts.memory_bytes)
    if found is not None or facts.memory_bandwidth_bytes_per_s is None:
        return found
    return unlisted(
        kind or "unnamed device",
        memory_bytes=facts.memory_bytes or 0,
        memory_bandwidth_bytes_per_s=facts.memory_bandwidth_bytes_per_s,
        cores=facts.cores or 0,
        clock_hz=facts.clock_hz or 0.0,
        peak_flops=facts.peak_flops,
    )
