"""Actions of findings: config overrides computed from the figures of a run, and command lines where no config key helps.

An override is `key=value` of the config. A command begins with environment variables or `srun` where needed, then `ridge`. Values are
those that bring the cause below its threshold, if everything that does not depend on them stays the same.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Sequence

from ridgeline.configs.cluster import load_cluster
from ridgeline.configs.errors import UserError
from ridgeline.configs.schema import DeadlinesConfig
from ridgeline.explain.diagnosis.facts import Facts
from ridgeline.explain.diagnosis.finding import THRESHOLDS

MOST_WORKERS = 32
MOST_TIMES = 64
"""Largest proposed batch, in multiples of the present one."""
LEAST_HANG_S = 60.0
STEP = "a step"
DEADLINES = {"compile": "compile_s", "evaluation": "evaluation_s", "save": "save_s", "teardown": "save_s", "start-up": "startup_s"}
"""Word in the phase of a hang, other than a step (trainer/watchdog.py) -> key of trainer.deadlines."""


def workers(facts: Facts, waiting: float) -> str:
    """Return the number of loader workers that deliver one batch per step at the present rate per worker. `waiting`: share of the step."""
    config = facts.config
    now = max(1, config.data.workers) if config is not None else 1
    return f"data.workers={min(MOST_WORKERS, max(2, math.ceil(now / max(1 - waiting, 1e-3))))}"


def batch(facts: Facts, overhead: float, limit: str) -> str | None:
    """Return the batch size at which a fixed part of the step falls to a threshold: a power of two times the present one.

    Args:
      facts: of the run.
      overhead: share of the step of the fixed part.
      limit: key of THRESHOLDS.

    Returns None where the config is unknown.
    """
    if facts.config is None:
        return None
    share = THRESHOLDS[limit][0]
    times = overhead / max(1 - overhead, 1e-3) * (1 - share) / share
    return f"data.batch_size={facts.config.data.batch_size * min(MOST_TIMES, 2 ** max(1, math.ceil(math.log2(max(times, 1e-9)))))}"


def longer(facts: Facts, before_s: float) -> str | None:
    """Return the number of steps from which the time before them is below its threshold; None where no step was timed."""
    share = THRESHOLDS["cold_start"][0]
    return f"trainer.steps={math.ceil(before_s * (1 / share - 1) / facts.step_s)}" if facts.step_s else None


def cache(facts: Facts) -> str | None:
    """Return a compilation cache beside the run directory; None where the config has one."""
    if facts.config is None or facts.config.runtime.compilation_cache is not None:
        return None
    return f"runtime.compilation_cache={facts.config.directory.parent / 'compilation-cache'}"


def fewer_saves(facts: Facts, share: float) -> str | None:
    """Return the save interval at which saves take their threshold of the time; None where the interval is not in steps."""
    every = facts.config.checkpoint.every if facts.config is not None else 0
    return f"checkpoint.every={every * max(2, math.ceil(share / THRESHOLDS['checkpoint'][0]))}" if every else None


def more_saves(facts: Facts) -> str | None:
    """Return the save interval in steps that minimizes the time of saves and repeated steps; None without a step time.

    The interval is sqrt(2 * time of a save * time between failures) (Young 1974), at most half of the present one.
    """
    if facts.config is None or not facts.step_s:
        return None
    save_s = max(sorted(facts.saves_s)[len(facts.saves_s) // 2] if facts.saves_s else 0.0, 0.01 * facts.step_s)
    between_s = facts.ledger.wall_s / max(1, facts.ledger.starts - 1)
    best = math.sqrt(2 * save_s * between_s) / facts.step_s
    every = facts.config.checkpoint.every or facts.config.trainer.steps
    return f"checkpoint.every={max(1, min(every // 2, round(best)))}"


def shorter_deadline(facts: Facts) -> str:
    """Return a shorter deadline for the phase of the newest hang.

    Of a step: trainer.deadlines.step_factor usual steps, at least a minute; half of the present limit if that is lower, and half the
    factor where the factor is the limit. Of another phase: half of its deadline.
    """
    trainer = None if facts.config is None else facts.config.trainer
    phase = facts.hangs[-1] if facts.hangs else STEP
    key = next((key for word, key in DEADLINES.items() if word in phase), None)
    if trainer is not None and key is not None:
        return f"trainer.deadlines.{key}={getattr(trainer.deadlines, key) / 2:g}"
    factor = DeadlinesConfig().step_factor if trainer is None else trainer.deadlines.step_factor
    by_steps_s = factor * (facts.step_s or 0.0)
    wanted_s, bound_s = max(LEAST_HANG_S, math.ceil(by_steps_s)), None if trainer is None else trainer.hang_timeout_s
    if bound_s is None or bound_s > wanted_s:
        return f"trainer.hang_timeout_s={wanted_s:g}"
    return f"trainer.deadlines.step_factor={max(1.0, factor / 2):g}" if by_steps_s > bound_s else f"trainer.hang_timeout_s={bound_s / 2:g}"


def less_memory(facts: Facts) -> str | None:
    """Return the next of: microbatches of half the size, then more rematerialization; None where both are exhausted."""
    if facts.config is None:
        return None
    rows, parts = facts.config.data.batch_size, facts.config.trainer.accumulation
    shards = facts.config.mesh.data * facts.config.mesh.fsdp
    if rows % (2 * parts * abs(shards)) == 0:
        return f"trainer.accumulation={2 * parts}"
    policy = {"none": "dots", "attention-only": "dots", "dots": "full"}.get(facts.config.compute.remat.policy)
    return None if policy is None else f"compute.remat.policy={policy}"


def calmer(facts: Facts) -> str | None:
    """Return gradient clipping, or half of the learning rate where gradients are clipped."""
    if facts.config is None:
        return None
    clipped, rate = facts.config.optimizer.clip_norm is not None, facts.config.optimizer.learning_rate
    return f"optimizer.learning_rate={rate / 2:g}" if clipped else "optimizer.clip_norm=1.0"


def shorter_rows(facts: Facts, padding: float) -> str | None:
    """Return the row length that fits the targets of a present row, a multiple of 8."""
    return None if facts.config is None else f"data.seq_len={max(8, 8 * math.ceil(facts.config.data.seq_len * (1 - padding) / 8))}"


def rescaled(facts: Facts, devices: int) -> tuple[str, ...]:
    """Return the mesh for this many devices: the axis of the study changes, else data or fsdp; () where the sizes do not divide."""
    if facts.config is None:
        return ()
    sizes = facts.config.mesh.sizes
    axis = facts.axis or ("data" if sizes["data"] > 1 else "fsdp")
    others = math.prod(size for name, size in sizes.items() if name != axis and size > 0)
    return (f"mesh.{axis}={devices // others}",) if devices % others == 0 else ()


def train(facts: Facts, *settings: str) -> str:
    """Return the command that continues the run."""
    return shlex.join(["ridge", "train", _config(facts), *settings])


def of_run(facts: Facts, command: str) -> str:
    """Return a `ridge` command on the run directory."""
    return shlex.join(["ridge", command, str(facts.path or facts.name)])


def without_nodes(facts: Facts, hosts: Sequence[str]) -> str:
    """Return the command that runs it without some nodes: its submission with an option added, or srun with the option."""
    option = f"--exclude={','.join(hosts)}"
    if facts.submitted is None:
        return shlex.join(["srun", option, "ridge", "train", _config(facts)])
    try:
        before = load_cluster(facts.submitted).config.slurm.options
    except UserError:
        before = []
    options = ", ".join([*before, option])
    command = ["ridge", "submit", _config(facts), "--cluster", facts.submitted, "--nodes", str(facts.nodes)]
    return shlex.join([*command, "--cluster-set", f"slurm.options=[{options}]"])


def with_variables(facts: Facts, **variables: str) -> str:
    """Return the command that runs it with environment variables set."""
    if facts.submitted is None:
        return " ".join([*(f"{name}={shlex.quote(value)}" for name, value in variables.items()), train(facts)])
    command = ["ridge", "submit", _config(facts), "--cluster", facts.submitted, "--nodes", str(facts.nodes)]
    sets = [word for name, value in variables.items() for word in ("--cluster-set", f"software.environment.{name}={value}")]
    return shlex.join([*command, *sets])


def compared(facts: Facts, scales: Sequence[int], *options: str) -> str:
    """Return the command of a scaling study of the same work."""
    return shlex.join(["ridge", "scale", _config(facts), "--devices", ",".join(map(str, scales)), *options])


def _config(facts: Facts) -> str:
    return str(facts.path / "config.yaml") if facts.path is not None else facts.name
