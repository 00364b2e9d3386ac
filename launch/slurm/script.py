"""Job scripts: `job.sh` and, for training, `supervise.sh`, with their blanks filled. `sbatch job.sh` does the same as `ridge submit`."""

from __future__ import annotations

import re
import shlex
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from ridgeline.configs.cluster import ClusterConfig
from ridgeline.configs.errors import UserError
from ridgeline.launch import exit_codes
from ridgeline.launch.slurm import container
from ridgeline.launch.slurm.elastic import GUARD_S, PROBE_S, Elastic
from ridgeline.launch.slurm.shape import CPU, JobShape, describe
from ridgeline.launch.slurm.units import format_time
from ridgeline.planner.policy import MAX_FAILURES, PAUSE_S, QUICK_S
from ridgeline.rundir import jobs as places
from ridgeline.rundir.provenance import NEVER_RECORDED, RECORDED_NAMES, RECORDED_PREFIXES

KEPT_PREFIXES = ("JAX_", "XLA_", "NCCL_")
"""Prefixes of the submitting shell's variables that are copied into the script, so that the script alone determines the run."""
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_NOT_IN_A_LINE = ("Cc", "Cs", "Zl", "Zp")
"""Unicode categories of control characters, undecodable bytes, and separators of lines."""
_ELSEWHERE = ("setup", "environment", "container")
"""Fields of the software section that are no plain texts; `setup` is shell code."""
_PLAIN = re.compile(r"[\w%@+=:,./-]+", re.ASCII)
COMMENT_COLUMN = 46
WAIT_S = 120
"""Seconds that the other tasks have to exit and report their error after one has ended, before Slurm kills them."""


@dataclass(frozen=True)
class Job:
    """Contents of a job script."""

    name: str
    title: str
    """Purpose, for the first comment line."""
    written: str
    """Version of the code, and the time."""
    root: Path
    """Directory whose slurm/jobs.jsonl records the job: the run directory, or the directory of a sweep."""
    directory: Path
    """Directory of this submission, inside the root."""
    variables: Sequence[str]
    """Bash lines that set JOB (directory of this submission), RUN (run directory), and other variables used in the arguments."""
    workdir: Path
    cluster: ClusterConfig
    shape: JobShape
    arguments: Sequence[str]
    """Arguments of `ridge`, quoted by the caller, as they may contain "$JOB" and other shell variables. For training the last one is the
    config."""
    python: str
    directories: Sequence[Path]
    """Directories to mount in a container."""
    environment: Mapping[str, str]
    """Variables copied from the submitting shell."""
    log: str
    """Log file, as a Slurm filename pattern."""
    preflight: bool = True
    trains: bool = True
    """Whether ranks save on SIGTERM; false: a plain command without supervision."""
    array: str | None = None
    """Value of --array; None: no array."""
    elastic: Elastic | None = None
    """Numbers of nodes on which a start may run; None: all of the shape."""


def kept_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of a shell that are copied into a script."""
    return {name: environment[name] for name in sorted(environment) if name.startswith(KEPT_PREFIXES)}


def job_script(job: Job) -> str:
    """Return the script of a job: `job.sh` with its blanks filled. Raises UserError for control characters in what it contains."""
    _refuse_control_characters(job)
    software = job.cluster.software
    return fill(
        "job.sh",
        {
            "login": " -l" * bool(software.modules),  # /etc/profile, which a login shell reads, defines `module`
            "title": job.title,
            "shape": describe(job.cluster, job.shape) + _elastic_comment(job),
            "written": job.written,
            "sbatch": "\n".join(header(job)),
            "variables": "\n".join(job.variables),
            "python": shlex.quote(job.python),
            "software": "\n".join(_software(job)),
            "python_version": '  "$PYTHON" --version' if software.container is None else "",
            "stages": _stages(job),
            "prefixes": "|".join(RECORDED_PREFIXES),
            "names": "|".join(RECORDED_NAMES),
            "never": "|".join(NEVER_RECORDED),
        },
    )


def _refuse_control_characters(job: Job) -> None:
    """Raise UserError for a text that would become more than one line of the script, and for names that no shell variable can have."""
    software, slurm = job.cluster.software, job.cluster.slurm
    box = software.container
    for name in (*job.environment, *software.environment):
        if not _VARIABLE.fullmatch(name):
            raise UserError(f"the environment variable {name!r} cannot be set in a job script (letters, digits and _): unset it")
    texts: dict[str, Sequence[object]] = {
        "name": [job.name, job.title, job.written],
        "working directory": [job.workdir],
        "directory of the job": [job.root, job.directory, job.log, *job.variables, *job.directories],
        "argument": job.arguments,
        "Python interpreter": [job.python],
        **{f"slurm.{key}": value if isinstance(value, list) else [value] for key, value in slurm},
        **{f"software.{key}": value if isinstance(value, list) else [value] for key, value in software if key not in _ELSEWHERE},
        "software.container": [] if box is None else [box.image, *box.mounts, *box.arguments],
        **{f"environment variable {name}": [value] for name, value in (*software.environment.items(), *job.environment.items())},
    }
    for what, values in texts.items():
        for value in values:
            if any(unicodedata.category(character) in _NOT_IN_A_LINE for character in str(value)):
                raise UserError(f"{what} {str(value)!r}: control characters are not allowed in a job script")


def fill(template: str, blanks: Mapping[str, str]) -> str:
    """Return a template of this package with every `@{name}` replaced. A line with only an empty blank is removed."""
    text = (resources.files(__package__) / template).read_text(encoding="utf-8")
    text = re.sub(r"^@\{(\w+)\}\n", lambda line: f"{blanks[line[1]]}\n" if blanks[line[1]] else "", text, flags=re.MULTILINE)
    return re.sub(r"@\{(\w+)\}", lambda blank: blanks[blank[1]], text)


def header(job: Job) -> list[str]:
    """Return the #SBATCH lines."""
    slurm, shape = job.cluster.slurm, job.shape
    per_task = "one process per device" if shape.tasks_per_node == shape.devices_per_node else "processes per node"
    options: list[tuple[str | None, str]] = [
        (_option("job-name", job.name), ""),
        (_option("chdir", str(job.workdir)), "relative paths of the config start here"),
        (_option("output", job.log), "output of this script and all ranks"),
        ("--open-mode=append", "a requeued job appends to its log"),
        (_option("partition", slurm.partition), ""),
        (_option("account", slurm.account), ""),
        (_option("qos", slurm.qos), ""),
        (_option("reservation", slurm.reservation), ""),
        (_option("constraint", slurm.constraint), ""),
        (_option("array", job.array), _array_comment(job)),
        (f"--nodes={_requested(job)}", "" if job.elastic is None or not job.elastic.spares else f"of them {job.elastic.spares} spare"),
        ("--no-kill" if job.elastic else None, "a lost node does not end the job"),
        (f"--ntasks-per-node={shape.tasks_per_node}", per_task if job.trains else ""),
        (f"--cpus-per-task={shape.cpus_per_task}", f"of {job.cluster.cores_per_node} cores per node"),
        (_device_request(job), "all devices of a node"),
        (_option("mem", slurm.memory), "0: all memory of the node" if slurm.memory == "0" else "per node"),
        ("--exclusive" if shape.exclusive else None, "no other jobs on these nodes"),
        (_option("time", None if shape.time_s is None else format_time(shape.time_s)), ""),
        (
            f"--signal=TERM@{slurm.signal_grace_s}" if job.trains else None,
            f"SIGTERM to the ranks {slurm.signal_grace_s} s before the time limit: save and exit",
        ),
        ("--requeue" if slurm.requeue else "--no-requeue", "Slurm may restart it after preemption or a lost node" * slurm.requeue),
        *((option, "") for option in slurm.options),
    ]
    return [commented(f"#SBATCH {option}", comment) for option, comment in options if option is not None]


def _elastic_comment(job: Job) -> str:
    if job.elastic is None:
        return ""
    spares = f", {job.elastic.spares} spare" if job.elastic.spares else ""
    return f"; goes on with {' '.join(map(str, job.elastic.layouts))} nodes{spares}"


def _requested(job: Job) -> int:
    return job.shape.nodes if job.elastic is None else job.elastic.most


def _array_comment(job: Job) -> str:
    limit = ", at most N at once (%N)" if "%" in (job.array or "") else ""
    return f"one task per {'point' if job.trains else 'slice'}{limit}"


def _option(name: str, value: str | None) -> str | None:
    return None if value is None else f"--{name}={_quoted(value)}"


def _quoted(value: str) -> str:
    """Quote a value for sbatch, whose quotes are its own: a backslash escapes in double quotes, # begins a comment outside of them."""
    if _PLAIN.fullmatch(value):
        return value
    escaped = value.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


def _device_request(job: Job) -> str | None:
    slurm = job.cluster.slurm
    if slurm.gpu_request == "none" or not job.shape.devices_per_node:
        return None
    kind = f"{slurm.gpu_type}:" if slurm.gpu_type else ""
    prefix = "--gres=gpu:" if slurm.gpu_request == "gres" else "--gpus-per-node="
    return prefix + _quoted(f"{kind}{job.shape.devices_per_node}")


def commented(line: str, comment: str) -> str:
    return f"{line:<{COMMENT_COLUMN}}  # {comment}" if comment else line


def _software(job: Job) -> list[str]:
    """Return the lines for modules, set-up and variables."""
    software = job.cluster.software
    lines = ["module purge", f"module load {' '.join(map(shlex.quote, software.modules))}"] if software.modules else []
    lines += software.setup
    lines += [f"export {name}={shlex.quote(value)}" for name, value in software.environment.items()]
    return lines + [
        commented(f"export {name}={shlex.quote(value)}", "as in the submitting shell") for name, value in job.environment.items()
    ]


def srun(job: Job, arguments: Sequence[str], options: Sequence[str]) -> str:
    """Return the srun command of `ridge ARGUMENTS`, over several lines."""
    software = job.cluster.software
    inner = container.command_prefix(software.container, job.directories, job.workdir, gpus=job.cluster.device != CPU)
    parts = [
        " ".join(["srun", *options, f"--cpus-per-task={job.shape.cpus_per_task}", *job.cluster.slurm.srun_options]),
        *container.srun_options(software.container, job.directories, job.workdir),
        *inner,
        " ".join(['"$PYTHON" -m ridgeline', *arguments]),
    ]
    return " \\\n    ".join(parts)


def _stages(job: Job) -> str:
    """Return the part of the script that runs something: a function per stage, then `supervise.sh`, which calls them."""
    if not job.trains:
        return srun(job, job.arguments, [])
    slurm = job.cluster.slurm
    minutes = slurm.preflight_minutes if job.preflight else 0
    functions = {}
    layout, place = (['"${LAYOUT[@]}"'], ['"${PLACE[@]}"']) if job.elastic else ([], [])
    if minutes:
        doctor = ["doctor", job.arguments[-1], *layout, f'--cluster "$JOB/{places.CLUSTER}"', '--run-dir "$RUN"', "--job"]
        comment = f"Preflight: check the nodes, within {minutes} minutes."
        functions["preflight"] = _function("preflight", comment, srun(job, doctor, [*place, f"--time={minutes}"]))
    comment = "Training. --label prefixes each line with its rank."
    functions["train"] = _function("train", comment, srun(job, [*job.arguments, *layout], [*place, "--label", f"--wait={WAIT_S}"]))
    return "\n\n".join([*functions.values(), _supervise(job, list(functions))])


def _function(name: str, comment: str, body: str) -> str:
    return "\n".join([f"# {comment}", f"{name}() {{", *(f"    {line}" for line in body.splitlines()), "}"])


def _supervise(job: Job, stages: Sequence[str]) -> str:
    """Return the end of a script: run the stages, then exit or requeue by their exit code and the job's state in Slurm."""
    slurm, elastic = job.cluster.slurm, job.elastic
    final = (exit_codes.USAGE, exit_codes.NUMERICAL_FAILURE, exit_codes.SAVE_FAILURE, exit_codes.TAKEN_OVER, exit_codes.INTERRUPTED)
    lost = (exit_codes.HANG, exit_codes.LOST_PEER, exit_codes.BAD_NODE, exit_codes.CORRUPTION)
    blanks = {
        "exit_codes": "\n".join(f"#   {line}" for line in exit_codes.table()),
        "grace_s": slurm.signal_grace_s,
        "stages": " && ".join([*(["placed"] if elastic else []), *stages]),
        "final": "|".join(map(str, final)),
        "preempted": exit_codes.PREEMPTED,
        "lost": "|".join(map(str, lost)),
        "max_restarts": slurm.max_restarts,
        "max_failures": MAX_FAILURES,
        "quick_s": QUICK_S,
        "pause_s": PAUSE_S,
    }
    texts = {name: str(value) for name, value in blanks.items()}
    return fill("supervise.sh", texts | _elastic(job, texts)).rstrip("\n")


_ELASTIC = {
    "each_start": "while :; do",
    "watch": "start_guard\ngrow &\nWATCH=$!",
    "until_done": 'kill "$WATCH" 2>/dev/null\nagain || break\ndone',
    "count_nodes": "COUNT=$(available)",
    "request_nodes": 'request_nodes "$COUNT"',
}
"""Lines of supervise.sh that only elastic jobs have; the functions are in elastic.sh."""
_NO_GROWTH = {"watch": "start_guard", "until_done": "again || break\ndone"}
"""With elastic.grow_minutes=0."""


def _elastic(job: Job, texts: Mapping[str, str]) -> dict[str, str]:
    if job.elastic is None:
        return {"elastic": "", **dict.fromkeys(_ELASTIC, "")}
    layouts = [f'        {nodes}) echo "{" ".join(overrides)}" ;;' for nodes, overrides in job.elastic.layouts.items()]
    blanks = {
        "layouts": "\n".join(layouts),
        "sizes": " ".join(map(str, job.elastic.layouts)),
        "nodes": str(max(job.elastic.layouts)),
        "most": str(job.elastic.most),
        "tasks": str(job.shape.tasks_per_node),
        "cpus": str(job.shape.cpus_per_task),
        "grow_s": str(job.elastic.grow_s),
        "probe_s": str(PROBE_S),
        "guard_s": str(GUARD_S),
        "bad_node": str(exit_codes.BAD_NODE),
    }
    return {"elastic": fill("elastic.sh", {**texts, **blanks}).rstrip("\n"), **_ELASTIC, **({} if job.elastic.grow_s else _NO_GROWTH)}
