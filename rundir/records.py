"""The typed JSON records of a run directory: run.json, plan.json, compile.json. File names and keys are part of the file format.

A record written by an older version may lack keys: those have defaults. `trainer.plan_record` writes plan.json and compile.json.
"""

from __future__ import annotations

from collections.abc import Mapping

from ridgeline.rundir.files import Record

RUN_FILE = "run.json"
PLAN_FILE = "plan.json"
COMPILE_FILE = "compile.json"


class Devices(Record):
    """The devices of a start, over all processes."""

    count: int
    platform: str = ""
    kind: str = ""
    """As JAX names it."""


class CodeState(Record):
    """The state of the source tree at a start (rundir.provenance.source_state)."""

    commit: str | None = None
    dirty: bool = False
    """Whether tracked files had uncommitted changes."""
    untracked: list[str] = []
    diff: str | None = None
    """File in the run directory with the uncommitted changes."""


class Start(Record):
    """One start of a run."""

    devices: Devices
    time: str = ""
    """ISO 8601 with time zone."""
    command: tuple[str, ...] = ()
    directory: str = "."
    """Working directory of the command."""
    host: str = ""
    user: str | None = None
    pid: int | None = None
    processes: int = 1
    python: str = ""
    system: str = ""
    git: CodeState = CodeState()
    packages: dict[str, str] = {}
    """Package -> version."""


class RunRecord(Record):
    """run.json: the identity of a run and its starts."""

    format: int = 1
    name: str = ""
    id: str = ""
    """The same over all starts."""
    starts: tuple[Start, ...] = ()
    """Oldest first."""

    def with_start(self, start: Start) -> RunRecord:
        """Return the record with one more start."""
        return self.model_copy(update={"starts": (*self.starts, start)})

    @property
    def last_start(self) -> Start | None:
        """The newest start; None when a killed start left none."""
        return self.starts[-1] if self.starts else None


class StepSizes(Record):
    """Memory of a compiled step per device, bytes (jax's memory analysis)."""

    argument_bytes: int
    temp_bytes: int
    output_bytes: int = 0
    alias_bytes: int = 0

    @property
    def step_bytes(self) -> int:
        """Arguments and temporaries: what donated outputs share with arguments counts once."""
        return self.argument_bytes + self.temp_bytes


class MemoryRow(Record):
    """Planned and compiled bytes of one part of the memory of a device."""

    what: str
    """arguments, temporaries or step."""
    planned_bytes: int
    compiled_bytes: int
    difference_bytes: int = 0
    agrees: bool = True
    explanation: str = ""


class TrafficRow(Record):
    """Planned and compiled bytes per step and device of one kind of collective over one set of mesh axes."""

    kind: str
    axes: tuple[str, ...]
    planned_bytes: float
    compiled_bytes: float
    where: str = ""
    difference_bytes: float = 0
    agrees: bool = True
    explanation: str = ""


class PlannedCollective(Record):
    """A collective the plan contains."""

    what: str
    where: str
    kind: str
    axes: tuple[str, ...]
    bytes: float
    """Per call and device."""
    count: float
    """Calls per step."""


class PlanRecord(Record):
    """plan.json: what was planned, beside what was compiled, at the newest start."""

    mesh: dict[str, int] | None = None
    """Axis -> devices, all axes."""
    devices: int | None = None
    device: str | None = None
    """Device kind as JAX names it."""
    memory_bytes: float | None = None
    components: Mapping[str, float] = {}
    """Component -> planned bytes per device."""
    collectives: tuple[PlannedCollective, ...] = ()
    compiled: StepSizes | None = None
    memory: tuple[MemoryRow, ...] = ()
    communication: tuple[TrafficRow, ...] = ()
    step_s: float | None = None
    breakdown_s: dict[str, float] = {}
    """Term of the step time -> planned seconds."""
    mfu: float | None = None
    cluster: str | None = None
    """Cluster whose links were assumed."""
    no_step_s: str | None = None
    """Why there is no predicted step time."""


class CompiledCollective(Record):
    """A collective of the compiled step."""

    kind: str
    axes: tuple[str, ...] | None
    """None: its groups match no set of mesh axes."""
    bytes: float
    """Per call and device."""
    count: float
    """Calls per step."""
    dtype: str = ""
    overlapped: bool = False
    name: str = ""
    op_name: str = ""
    source: str | None = None
    """file:line."""


class CompileRecord(StepSizes):
    """compile.json: figures of the compiled step at the newest start, or the output of `ridge compile --json`."""

    flops: float | None = None
    mesh: dict[str, int] = {}
    versions: dict[str, str] = {}
    device: str | None = None
    collectives: tuple[CompiledCollective, ...] = ()
    uncounted_loops: tuple[str, ...] = ()
    traffic: tuple[TrafficRow, ...] = ()
    memory: tuple[MemoryRow, ...] = ()
