"""The job script: everything that a job does, as one readable bash script. `sbatch job.sh` by hand does the same."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ridgeline.configs.cluster import ClusterConfig
from ridgeline.launch.slurm import container
from ridgeline.launch.slurm.shape import CPU, JobShape, describe
from ridgeline.launch.slurm.supervise import supervised_lines
from ridgeline.launch.slurm.units import format_time
from ridgeline.rundir import jobs as places

KEPT_PREFIXES = ("JAX_", "XLA_", "NCCL_")
"""Variables of the submitting shell that steer a run: written into the script, so that it alone says what runs."""
COMMENT_COLUMN = 46
WAIT_S = 120
"""Once one task of training has ended, the others get this long to end by themselves (they say why) before Slurm kills them."""


@dataclass(frozen=True)
class Job:
    """What a script is written from."""

    name: str
    title: str
    """What it does, for the first line."""
    written: str
    """By which code and when."""
    root: Path
    """Directory whose jobs are recorded: the run directory, for a sweep that of all points."""
    directory: Path
    """Of this submission, inside the root."""
    variables: Sequence[str]
    """Bash lines that set JOB, this submission's directory, RUN, the run directory, and whatever else the arguments use."""
    workdir: Path
    cluster: ClusterConfig
    shape: JobShape
    arguments: Sequence[str]
    """Of `ridge`; "$JOB" and other shell variables of the script may be used, so they are quoted by the caller. Of training, the last one
    is the config."""
    python: str
    directories: Sequence[Path]
    """To be seen inside a container."""
    environment: Mapping[str, str]
    """Kept from the submitting shell."""
    log: str
    """Slurm's pattern of the log file."""
    preflight: bool = True
    trains: bool = True
    """Has ranks that save on SIGTERM; false: a plain command."""
    array: str | None = None
    """--array."""


def kept_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of a shell that steer a run."""
    return {name: environment[name] for name in sorted(environment) if name.startswith(KEPT_PREFIXES)}


def job_script(job: Job) -> str:
    """Write the script of a job."""
    sections = [
        # A login shell where modules are loaded: /etc/profile defines `module`.
        [
            "#!/bin/bash -l" if job.cluster.software.modules else "#!/bin/bash",
            f"# {job.title}",
            f"# {describe(job.cluster, job.shape)}.",
            f"# Written by {job.written}.",
        ],
        header(job),
        _places(job),
        _software(job),
        _record(job),
        *_stages(job),
    ]
    return "\n\n".join("\n".join(lines) for lines in sections) + "\n"


def header(job: Job) -> list[str]:
    """Return the #SBATCH lines."""
    slurm, shape = job.cluster.slurm, job.shape
    per_task = "one process per device" if shape.tasks_per_node == shape.devices_per_node else "processes per node"
    options: list[tuple[str | None, str]] = [
        (f"--job-name={job.name}", ""),
        (f"--chdir={job.workdir}", "relative paths of the config start here"),
        (f"--output={job.log}", "this script and all ranks"),
        ("--open-mode=append", "a requeued job continues its log"),
        (_option("partition", slurm.partition), ""),
        (_option("account", slurm.account), ""),
        (_option("qos", slurm.qos), ""),
        (_option("reservation", slurm.reservation), ""),
        (_option("constraint", slurm.constraint), ""),
        (_option("array", job.array), _array_comment(job)),
        (f"--nodes={shape.nodes}", ""),
        (f"--ntasks-per-node={shape.tasks_per_node}", per_task if job.trains else ""),
        (f"--cpus-per-task={shape.cpus_per_task}", f"of {job.cluster.cores_per_node} cores per node"),
        (_device_request(job), "all devices of a node"),
        (_option("mem", slurm.memory), "0: all memory of the node" if slurm.memory == "0" else "per node"),
        ("--exclusive" if shape.exclusive else None, "no other job on these nodes"),
        (_option("time", None if shape.time_s is None else format_time(shape.time_s)), ""),
        (
            f"--signal=TERM@{slurm.signal_grace_s}" if job.trains else None,
            f"to the ranks, {slurm.signal_grace_s} s before the limit: save and exit",
        ),
        ("--requeue" if slurm.requeue else "--no-requeue", "Slurm may start it again after preemption or a lost node" * slurm.requeue),
        *((option, "") for option in slurm.options),
    ]
    return [commented(f"#SBATCH {option}", comment) for option, comment in options if option is not None]


def _array_comment(job: Job) -> str:
    limit = ", at most so many at once (%)" if "%" in (job.array or "") else ""
    return f"one task per {'point' if job.trains else 'slice'}{limit}"


def _option(name: str, value: str | None) -> str | None:
    return None if value is None else f"--{name}={value}"


def _device_request(job: Job) -> str | None:
    slurm = job.cluster.slurm
    if slurm.gpu_request == "none" or not job.shape.devices_per_node:
        return None
    kind = f"{slurm.gpu_type}:" if slurm.gpu_type else ""
    prefix = "--gres=gpu:" if slurm.gpu_request == "gres" else "--gpus-per-node="
    return f"{prefix}{kind}{job.shape.devices_per_node}"


def commented(line: str, comment: str) -> str:
    return f"{line:<{COMMENT_COLUMN}}  # {comment}" if comment else line


def _places(job: Job) -> list[str]:
    return [*job.variables, f"PYTHON={shlex.quote(job.python)}"]


def _software(job: Job) -> list[str]:
    """Return modules, set-up lines and variables. A line that fails ends the job: nothing runs in half an environment."""
    software = job.cluster.software
    lines = ["set -e  # software: whatever fails here ends the job"]
    if software.modules:
        lines += ["module purge", f"module load {' '.join(map(shlex.quote, software.modules))}"]
    lines += software.setup
    lines += [f"export {name}={shlex.quote(value)}" for name, value in software.environment.items()]
    lines += [commented(f"export {name}={shlex.quote(value)}", "as in the submitting shell") for name, value in job.environment.items()]
    lines += [
        commented('export PYTHONPATH="$JOB/code${PYTHONPATH:+:$PYTHONPATH}"', "the code as it was when submitted"),
        commented("export PYTHONSAFEPATH=1", "and not what lies in the working directory"),
        "set +e -uo pipefail",
    ]
    return lines


def _record(job: Job) -> list[str]:
    host = job.cluster.software.container is None
    return [
        "# What this job found, for the record; values that look like secrets are masked.",
        "{",
        '  echo "job $SLURM_JOB_ID restart ${SLURM_RESTART_COUNT:-0} on $SLURM_JOB_NODELIST at $(date --iso-8601=seconds)"',
        *(['  "$PYTHON" --version'] if host else []),
        "  ulimit -a",
        "  type module >/dev/null 2>&1 && module list 2>&1",
        r"  env -0 | sort -z | sed -z -E 's/^([^=]*(KEY|TOKEN|SECRET|PASS|CREDENTIAL)[^=]*)=.*/\1=***/I' | tr '\0' '\n'",
        '} > "$JOB/environment-$SLURM_JOB_ID-${SLURM_RESTART_COUNT:-0}.txt"',
    ]


def srun(job: Job, arguments: Sequence[str], options: Sequence[str]) -> str:
    """Return the srun command of `ridge ARGUMENTS`, over several lines."""
    software = job.cluster.software
    inner = container.command_prefix(software.container, job.directories, job.workdir, gpus=job.cluster.device != CPU)
    parts = [
        " ".join(["srun", *options, f"--cpus-per-task={job.shape.cpus_per_task}", *job.cluster.slurm.srun_options]),
        *container.srun_options(software.container, job.directories, job.workdir),
        *inner,
        " ".join(['"$PYTHON" -m launch', *arguments]),
    ]
    return " \\\n    ".join(parts)


def _stages(job: Job) -> list[list[str]]:
    """Return the sections that run something: each stage a function of its own, and the line that calls them."""
    if not job.trains:
        return [[srun(job, job.arguments, [])]]
    minutes = job.cluster.slurm.preflight_minutes if job.preflight else 0
    doctor = ["doctor", job.arguments[-1], f'--cluster "$JOB/{places.CLUSTER}"', '--run-dir "$RUN"', "--job"]
    preflight = _function(
        f"Preflight: are these nodes fit? At most {minutes} minutes.", "preflight", srun(job, doctor, [f"--time={minutes}"])
    )
    options = ["--label", f"--wait={WAIT_S}"]
    train = _function("The run. --label puts the rank before each line.", "train", srun(job, job.arguments, options))
    stages = ["preflight", "train"] if minutes else ["train"]
    return [*([preflight] if minutes else []), train, supervised_lines(stages, job.cluster.slurm)]


def _function(comment: str, name: str, body: str) -> list[str]:
    return [f"# {comment}", f"{name}() {{", *(f"    {line}" for line in body.splitlines()), "}"]
