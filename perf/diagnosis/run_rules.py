"""Rules on the run ledger and the metrics: no profile is needed."""

from __future__ import annotations

import math

from perf.diagnosis.facts import Facts
from perf.diagnosis.finding import PATTERNS, THRESHOLDS, Finding, ceiling, over


def input_pipeline(facts: Facts) -> Finding | None:
    """Device idle while the host is busy reading."""
    share = facts.data_wait_share
    if share is None or not over("data_wait", share):
        return None
    workers = facts.config.data.workers if facts.config is not None else 0
    return Finding(
        rule="input pipeline",
        confidence="high",
        gain=ceiling(share * facts.share("productive", "data_wait")),
        lens="balanced pipelines",
        pattern=PATTERNS["bottlenecks move"],
        evidence=(f"{share:.1%} of the step time waited for the loader", f"data.workers={workers}"),
        measure_next="ridge data bench: tokens/s of the loader alone, and CPU use of the job",
        action=f"data.workers={max(2, 2 * workers)}, or more cores per task; pack and tokenise ahead of time",
        next_bottleneck="the device: its matmul rate or memory bandwidth",
    )


def cold_start(facts: Facts) -> Finding | None:
    """First steps much slower: start-up and compilation are not amortised."""
    share = facts.share("startup", "compile", "restore")
    compile_s = math.fsum(seconds for _, seconds, in_loop in facts.compiles if not in_loop) / max(1, facts.ledger.starts)
    long = over("cold_start_s", share * facts.ledger.wall_s) or over("cold_compile_s", compile_s)
    if not over("cold_start", share) or not long:
        return None
    cached = facts.config is not None and facts.config.runtime.compilation_cache is not None
    action = _longer(facts, share * facts.ledger.wall_s)
    if not cached:
        action = f"runtime.compilation_cache=<directory on the shared file system>; {action}"
    startup_s, starts = facts.ledger.seconds["startup"], facts.ledger.starts
    return Finding(
        rule="start-up and compilation not amortised",
        confidence="high",
        gain=ceiling(share),
        lens="amortisation",
        pattern=PATTERNS["amortisation"],
        evidence=(
            f"{share:.1%} of {facts.ledger.wall_s:.0f} s passed before steps that count",
            f"per start {compile_s:.1f} s of compilation; {startup_s:.1f} s of other start-up in {starts} start(s)",
        ),
        measure_next="the second start of the same config, with the compilation cache",
        action=action,
        next_bottleneck="the steps themselves",
    )


def _longer(facts: Facts, before_s: float) -> str:
    """Say from how many steps on the time before them is amortised."""
    limit = THRESHOLDS["cold_start"][0]
    if not facts.step_s:
        return "run longer: nothing else repays the rest"
    return f"run longer: from trainer.steps={math.ceil(before_s * (1 / limit - 1) / facts.step_s)} on it is below {limit:.0%} of the time"


def recompilation(facts: Facts) -> Finding | None:
    """Programs compiled again in steady state: a shape or a setting drifts."""
    again: dict[str, list[float]] = {}
    for program, duration_s, in_loop in facts.compiles:
        if in_loop:
            again.setdefault(program, []).append(duration_s)
    worst = max(again.items(), key=lambda item: len(item[1]), default=None)
    if worst is None or not over("recompilations", len(worst[1])):
        return None
    program, times = worst
    lost_s = math.fsum(seconds for found in again.values() for seconds in sorted(found)[:-1])
    if not over("recompilation_share", lost_s / facts.ledger.wall_s):
        return None
    return Finding(
        rule="recompilation in steady state",
        confidence="high",
        gain=ceiling(lost_s / facts.ledger.wall_s),
        lens="amortisation",
        pattern=PATTERNS["amortisation"],
        evidence=(
            f"{program} was compiled {len(times)} times during the loop, {math.fsum(times):.1f} s in all",
            *(line for line in facts.changed[-1:]),
        ),
        measure_next="JAX_LOG_COMPILES=1: which argument changes its shape",
        action="pad to one shape: every batch of a set must have the same [B, T]",
        next_bottleneck="the steps themselves",
    )


def padding(facts: Facts) -> Finding | None:
    """Tokens paid for and masked."""
    share = facts.padding_share
    if share is None or not over("padding", share):
        return None
    return Finding(
        rule="padding waste",
        confidence="high",
        gain=ceiling(share * facts.share("productive")),
        lens="amortisation",
        pattern=PATTERNS["amortisation"],
        evidence=(f"{share:.1%} of the positions of a step hold no target",),
        measure_next="ridge data inspect: lengths of the documents against data.seq_len",
        action="pack several documents into a row (ridge data prepare --pack-length), or shorter rows"
        + (f": data.seq_len={max(1, facts.config.data.seq_len // 2)}" if facts.config is not None else ""),
        next_bottleneck="compute on the tokens that count",
    )


def checkpoint_stall(facts: Facts) -> Finding | None:
    """Saves that hold up the loop."""
    share = facts.share("checkpoint")
    if not over("checkpoint", share) or not over("checkpoint_s", share * facts.ledger.wall_s):
        return None
    longest_s = max(facts.saves_s, default=0.0)
    every = facts.config.checkpoint.every if facts.config is not None else 0
    waiting = facts.config is not None and not facts.config.checkpoint.asynchronous
    return Finding(
        rule="checkpoint stalls",
        confidence="high",
        gain=ceiling(share),
        lens="amortisation",
        pattern=PATTERNS["amortisation"],
        evidence=(f"saves held up the loop for {share:.1%} of the time; {len(facts.saves_s)} saves, the longest {longest_s:.1f} s",),
        measure_next="ridge estimate checkpoint: the interval that fits the failures; the write speed of the file system (ridge doctor)",
        action="checkpoint.asynchronous=true" if waiting else f"checkpoint.every={max(2, 4 * every)}, or a faster file system",
        next_bottleneck="steps lost after a failure, as saves become rarer",
    )


def lost_steps(facts: Facts) -> Finding | None:
    """Steps done again after failures."""
    share = facts.share("lost")
    if not over("lost", share):
        return None
    every = facts.config.checkpoint.every if facts.config is not None else 0
    return Finding(
        rule="steps lost to failures",
        confidence="high",
        gain=ceiling(share),
        lens="amortisation",
        pattern=PATTERNS["amortisation"],
        evidence=(f"{facts.ledger.lost_steps} steps were done again over {facts.ledger.starts} starts: {share:.1%} of the time",),
        measure_next="why it failed: ridge timeline, the job log",
        action=f"checkpoint.every={max(1, every // 4)}, and checkpoint.every_minutes",
        next_bottleneck="the time saves take",
    )


def hang(facts: Facts) -> Finding | None:
    """Time without a sign of life."""
    share = facts.share("hang")
    if not over("hang", share):
        return None
    return Finding(
        rule="hang",
        confidence="high",
        gain=ceiling(share),
        lens="balanced pipelines",
        pattern=PATTERNS["bottlenecks move"],
        evidence=(f"{facts.ledger.seconds['hang']:.0f} s passed without a step until the watchdog ended the run",),
        measure_next="the stacks in the run directory: which rank stood where",
        action="exclude the node it names; the next one ends earlier with " + _earlier(facts),
        next_bottleneck="whatever was bound before",
    )


def _earlier(facts: Facts) -> str:
    """The override that halves the watchdog's bound."""
    bound_s = facts.config.trainer.hang_timeout_s if facts.config is not None else None
    return "a shorter trainer.hang_timeout_s" if bound_s is None else f"trainer.hang_timeout_s={bound_s / 2:g}"


def memory_near_limit(facts: Facts) -> Finding | None:
    """No room for what changes from step to step."""
    used, limit, share = facts.memory_bytes, facts.memory_limit_bytes, facts.memory_share
    if used is None or limit is None or share is None or not over("memory", share):
        return None
    return Finding(
        rule="memory near the limit",
        confidence="high",
        gain=0.0,
        lens="co-design",
        pattern=PATTERNS["complexity"],
        evidence=(f"{used / 1e9:.3g} GB in use are {share:.1%} of the {limit / 1e9:.3g} GB there are",),
        measure_next="ridge compile: the largest buffers",
        action=f"trainer.accumulation={2 * (facts.config.trainer.accumulation if facts.config is not None else 1)}, or a stronger "
        "compute.remat.policy (dots, then full)",
        next_bottleneck="compute, by recomputation or smaller kernels",
    )
