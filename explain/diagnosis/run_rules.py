"""Rules on the run ledger and the metrics: no profile is needed."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable

from ridgeline.explain.diagnosis import remedies
from ridgeline.explain.diagnosis.facts import Facts
from ridgeline.explain.diagnosis.finding import PATTERNS, THRESHOLDS, Finding, ceiling, over


def input_pipeline(facts: Facts) -> Finding | None:
    """Device idle while the host is busy reading."""
    share = facts.data_wait_share
    if share is None or not over("data_wait", share):
        return None
    workers = facts.config.data.workers if facts.config is not None else 0
    more = remedies.workers(facts, share)
    return Finding(
        rule="input pipeline",
        confidence="high",
        gain=ceiling(share * facts.share("productive", "data_wait")),
        lens="balanced pipelines",
        pattern=PATTERNS["bottlenecks move"],
        evidence=(f"{share:.1%} of the step time waited for the loader", f"data.workers={workers}", *_alone(facts)),
        measure_next="ridge data bench: tokens/s of the loader alone, and CPU use of the job",
        action=f"{more}: as many as deliver a batch per step; or more cores per task; pack and tokenise ahead of time",
        next_bottleneck="the device: its matmul rate or memory bandwidth",
        overrides=(more,),
    )


def _alone(facts: Facts) -> Iterable[str]:
    """What a stored benchmark says of the loader and the step."""
    if facts.bench.get("loader") and facts.bench.get("step"):
        loader_s, step_s = (statistics.median(facts.bench[layer]) for layer in ("loader", "step"))
        yield f"alone, the loader takes {loader_s * 1e3:.3g} ms for a batch and the step {step_s * 1e3:.3g} ms (ridge bench)"


def cold_start(facts: Facts) -> Finding | None:
    """First steps much slower: start-up and compilation are not amortised."""
    share = facts.share("startup", "compile", "restore")
    all_s = math.fsum(seconds for _, seconds, in_loop in facts.compiles if not in_loop)
    compile_s = max(0.0, all_s - facts.cached_s) / max(1, facts.ledger.starts)
    long = over("cold_start_s", share * facts.ledger.wall_s) or over("cold_compile_s", compile_s)
    if not over("cold_start", share) or not long:
        return None
    overrides = tuple(o for o in (remedies.cache(facts), remedies.longer(facts, share * facts.ledger.wall_s)) if o is not None)
    below = f"; from that many steps on it is below {THRESHOLDS['cold_start'][0]:.0%} of the time"
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
        action=f"{', '.join(overrides)}{below}" if overrides else "run longer: nothing else repays the rest",
        next_bottleneck="the steps themselves",
        overrides=overrides,
        command=None if overrides else remedies.train(facts),
    )


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
            *(again.describe() for again in facts.recompilations[-1:]),
        ),
        measure_next="which argument changes its shape, and the line that makes it",
        action="pad to one shape: every batch of a set must have the same [B, T]; JAX names the line that asks for each new shape",
        next_bottleneck="the steps themselves",
        command=f"JAX_LOG_COMPILES=1 JAX_EXPLAIN_CACHE_MISSES=1 {remedies.train(facts)}",
    )


def padding(facts: Facts) -> Finding | None:
    """Tokens paid for and masked."""
    share = facts.padding_share
    if share is None or not over("padding", share):
        return None
    shorter = remedies.shorter_rows(facts, share)
    return Finding(
        rule="padding waste",
        confidence="high",
        gain=ceiling(share * facts.share("productive")),
        lens="amortisation",
        pattern=PATTERNS["amortisation"],
        evidence=(f"{share:.1%} of the positions of a step hold no target",),
        measure_next="ridge data inspect: lengths of the documents against data.seq_len",
        action="pack several documents into a row (ridge data prepare --pack-length), or shorter rows"
        + (f": {shorter}" if shorter else ""),
        next_bottleneck="compute on the tokens that count",
        overrides=(shorter,) if shorter else (),
    )


def checkpoint_stall(facts: Facts) -> Finding | None:
    """Saves that hold up the loop."""
    share = facts.share("checkpoint")
    if not over("checkpoint", share) or not over("checkpoint_s", share * facts.ledger.wall_s):
        return None
    longest_s = max(facts.saves_s, default=0.0)
    rarer = remedies.rarer_saves(facts, share)
    waiting = facts.config is not None and not facts.config.checkpoint.asynchronous
    overrides = ("checkpoint.asynchronous=true",) if waiting else (rarer,) if rarer else ("checkpoint.every_minutes=60",)
    return Finding(
        rule="checkpoint stalls",
        confidence="high",
        gain=ceiling(share),
        lens="amortisation",
        pattern=PATTERNS["amortisation"],
        evidence=(f"saves held up the loop for {share:.1%} of the time; {len(facts.saves_s)} saves, the longest {longest_s:.1f} s",),
        measure_next="ridge estimate checkpoint: the interval that fits the failures; the write speed of the file system (ridge doctor)",
        action="; ".join([*overrides, "or a faster file system"]),
        next_bottleneck="steps lost after a failure, as saves become rarer",
        overrides=overrides,
    )


def lost_steps(facts: Facts) -> Finding | None:
    """Steps done again after failures."""
    share = facts.share("lost")
    if not over("lost", share):
        return None
    oftener = remedies.oftener_saves(facts) or "checkpoint.every_minutes=10"
    return Finding(
        rule="steps lost to failures",
        confidence="high",
        gain=ceiling(share),
        lens="amortisation",
        pattern=PATTERNS["amortisation"],
        evidence=(f"{facts.ledger.lost_steps} steps were done again over {facts.ledger.starts} starts: {share:.1%} of the time",),
        measure_next="why it failed: ridge timeline, the job log",
        action=f"{oftener}: what saves take and failures lose is least there",
        next_bottleneck="the time saves take",
        overrides=(oftener,),
    )


def hang(facts: Facts) -> Finding | None:
    """Time without a sign of life."""
    share = facts.share("hang")
    if not over("hang", share):
        return None
    earlier = remedies.earlier_verdict(facts)
    return Finding(
        rule="hang",
        confidence="high",
        gain=ceiling(share),
        lens="balanced pipelines",
        pattern=PATTERNS["bottlenecks move"],
        evidence=(f"{facts.ledger.seconds['hang']:.0f} s passed without a step until the watchdog ended the run",),
        measure_next="the stacks in the run directory: which rank stood where",
        action=f"exclude the node it names; the next one ends earlier with {earlier}",
        next_bottleneck="whatever was bound before",
        overrides=(earlier,),
    )


def memory_near_limit(facts: Facts) -> Finding | None:
    """No room for what changes from step to step."""
    used, limit, share = facts.memory_bytes, facts.memory_limit_bytes, facts.memory_share
    if used is None or limit is None or share is None or not over("memory", share):
        return None
    less = remedies.less_memory(facts)
    return Finding(
        rule="memory near the limit",
        confidence="high",
        gain=0.0,
        lens="co-design",
        pattern=PATTERNS["complexity"],
        evidence=(f"{used / 1e9:.3g} GB in use are {share:.1%} of the {limit / 1e9:.3g} GB there are",),
        measure_next="ridge compile: the largest buffers",
        action=f"{less}: less is alive at once" if less else "more devices: nothing is left to recompute or to cut",
        next_bottleneck="compute, by recomputation or smaller kernels",
        overrides=(less,) if less else (),
        command=None if less else remedies.of_run(facts, "plan"),
    )
