"""Rules on the run ledger and the metrics: no profile is needed."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable

from ridgeline.configs.format import plural
from ridgeline.explain.diagnosis import remedies
from ridgeline.explain.diagnosis.facts import Facts
from ridgeline.explain.diagnosis.finding import PATTERNS, THRESHOLDS, Finding, ceiling, over


def input_pipeline(facts: Facts) -> Finding | None:
    """The device is idle while the host reads data."""
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
        evidence=(f"{share:.1%} of the step time was spent waiting for the data loader (data.workers={workers})", *_alone(facts)),
        measure_next="throughput of the loader alone (ridge data bench); CPU use of the job",
        action=f"set {more}, enough for one batch per step; or request more CPU cores per task, or tokenize and pack ahead of time",
        overrides=(more,),
    )


def _alone(facts: Facts) -> Iterable[str]:
    """Times of loader and step in a stored benchmark."""
    if facts.bench.get("loader") and facts.bench.get("step"):
        loader_s, step_s = (statistics.median(facts.bench[layer]) for layer in ("loader", "step"))
        yield f"measured alone by ridge bench: loader {loader_s * 1e3:.3g} ms per batch, step {step_s * 1e3:.3g} ms"


def cold_start(facts: Facts) -> Finding | None:
    """Start-up and compilation take a large share of the run."""
    share = facts.share("startup", "compile", "restore")
    all_s = math.fsum(each.duration_s for each in facts.compiles if not each.in_loop)
    compile_s = max(0.0, all_s - facts.cached_s) / max(1, facts.ledger.starts)
    long = over("cold_start_s", share * facts.ledger.wall_s) or over("cold_compile_s", compile_s)
    if not over("cold_start", share) or not long:
        return None
    cache, longer = remedies.cache(facts), remedies.longer(facts, share * facts.ledger.wall_s)
    actions = [f"set {cache} to keep compiled programs"] if cache else []
    actions += [f"set {longer} or more to bring it below {THRESHOLDS['cold_start'][0]:.0%} of the time"] if longer else []
    overrides = tuple(override for override in (cache, longer) if override is not None)
    startup_s, starts = facts.ledger.seconds["startup"], facts.ledger.starts
    return Finding(
        rule="start-up and compilation not amortised",
        confidence="high",
        gain=ceiling(share),
        lens="amortization",
        pattern=PATTERNS["amortization"],
        evidence=(
            f"{share:.1%} of {facts.ledger.wall_s:.0f} s was start-up and compilation",
            f"{compile_s:.1f} s of compilation per start; {startup_s:.1f} s of other start-up in {plural(starts, 'start')}",
        ),
        measure_next="the second start of the same config with the compilation cache",
        action="; ".join(actions) or "run more steps: start-up is a fixed cost",
        overrides=overrides,
        command=None if overrides else remedies.train(facts),
    )


def recompilation(facts: Facts) -> Finding | None:
    """Programs are compiled again during training: a shape or a setting changes."""
    times: dict[tuple[str, int], list[float]] = {}
    for each in facts.compiles:
        if each.in_loop:
            times.setdefault((each.program, each.start), []).append(each.duration_s)
    again = {key: found for key, found in times.items() if over("recompilations", len(found))}
    lost_s = math.fsum(seconds for found in again.values() for seconds in sorted(found)[:-1])
    if not again or not over("recompilation_share", lost_s / facts.ledger.wall_s if facts.ledger.wall_s > 0 else None):
        return None
    (program, start), found = max(again.items(), key=lambda item: len(item[1]))
    reasons = [each for each in facts.recompilations if each.program == program]
    which = f" in start {start + 1} of {facts.ledger.starts}" if facts.ledger.starts > 1 else ""
    return Finding(
        rule="recompilation in steady state",
        confidence="high",
        gain=ceiling(lost_s / facts.ledger.wall_s),
        lens="amortization",
        pattern=PATTERNS["amortization"],
        evidence=(
            f"{program} was compiled {len(found)} times during training{which}, {math.fsum(found):.1f} s in total",
            *(each.describe() for each in reasons[-1:]),
        ),
        measure_next="the argument that changes its shape, and the source line that creates it",
        action="pad every batch of a dataset to one shape [B, T]; JAX logs the source line of each new shape",
        command=f"JAX_LOG_COMPILES=1 JAX_EXPLAIN_CACHE_MISSES=1 {remedies.train(facts)}",
    )


def padding(facts: Facts) -> Finding | None:
    """Positions of a step that have no target."""
    share = facts.padding_share
    if share is None or not over("padding", share):
        return None
    shorter = remedies.shorter_rows(facts, share)
    return Finding(
        rule="padding waste",
        confidence="high",
        gain=ceiling(share * facts.share("productive")),
        lens="amortization",
        pattern=PATTERNS["amortization"],
        evidence=(f"{share:.1%} of the positions of a step have no target",),
        measure_next="document lengths against data.seq_len (ridge data inspect)",
        action="pack several documents into a row (ridge data prepare --pack-length), or "
        + (f"set {shorter}" if shorter else "shorten the rows"),
        overrides=(shorter,) if shorter else (),
    )


def checkpoint_stall(facts: Facts) -> Finding | None:
    """Training waits for saves."""
    share = facts.share("checkpoint")
    if not over("checkpoint", share) or not over("checkpoint_s", share * facts.ledger.wall_s):
        return None
    longest_s = max(facts.saves_s, default=0.0)
    fewer = remedies.fewer_saves(facts, share)
    waiting = facts.config is not None and not facts.config.checkpoint.asynchronous
    overrides = ("checkpoint.asynchronous=true",) if waiting else (fewer,) if fewer else ("checkpoint.every_minutes=60",)
    return Finding(
        rule="checkpoint stalls",
        confidence="high",
        gain=ceiling(share),
        lens="amortization",
        pattern=PATTERNS["amortization"],
        evidence=(f"training waited for saves for {share:.1%} of the time: {len(facts.saves_s)} saves, the longest {longest_s:.1f} s",),
        measure_next="the interval that fits the failure rate (ridge estimate checkpoint); write speed of the file system (ridge doctor)",
        action=f"set {overrides[0]}, or use a faster file system",
        overrides=overrides,
    )


def lost_steps(facts: Facts) -> Finding | None:
    """Steps are repeated after failures."""
    share = facts.share("lost")
    if not over("lost", share):
        return None
    more = remedies.more_saves(facts) or "checkpoint.every_minutes=10"
    return Finding(
        rule="steps lost to failures",
        confidence="high",
        gain=ceiling(share),
        lens="amortization",
        pattern=PATTERNS["amortization"],
        evidence=(f"{facts.ledger.lost_steps} steps were repeated over {facts.ledger.starts} starts: {share:.1%} of the time",),
        measure_next="the cause of the failures (ridge timeline, the job log)",
        action=f"set {more}: it minimizes the time of saves and repeated steps",
        overrides=(more,),
    )


def hang(facts: Facts) -> Finding | None:
    """The run makes no progress until the watchdog ends it."""
    share = facts.share("hang")
    if not over("hang", share):
        return None
    earlier = remedies.shorter_deadline(facts)
    return Finding(
        rule="hang",
        confidence="high",
        gain=ceiling(share),
        lens="balanced pipelines",
        pattern=PATTERNS["bottlenecks move"],
        evidence=(
            f"{facts.ledger.seconds['hang']:.0f} s passed without a step until the watchdog ended the run ({share:.1%} of the time)",
        ),
        measure_next="hang.N.txt in the run directory (start N): the suspect process, and what each process did",
        action=f"exclude the node of the suspect in the hang report; set {earlier} to end the next hang earlier",
        overrides=(earlier,),
    )


def memory_near_limit(facts: Facts) -> Finding | None:
    """Memory in use is near the limit: a longer batch or an evaluation may fail."""
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
        evidence=(f"{used / 1e9:.3g} of {limit / 1e9:.3g} GB of device memory are in use ({share:.1%})",),
        measure_next="the largest buffers (ridge compile)",
        action=f"set {less} to reduce activation memory" if less else "use more devices: accumulation and rematerialization are exhausted",
        overrides=(less,) if less else (),
        command=None if less else remedies.of_run(facts, "plan"),
    )


def loss_spikes(facts: Facts) -> Finding | None:
    """The training loss rises suddenly, far beyond the scatter of the steps before."""
    spikes = [spike for spike in facts.spikes if over("loss_spike", spike.sigmas)]
    if not spikes:
        return None
    worst = max(spikes, key=lambda spike: (spike.ended and not spike.recovered, spike.loss - spike.usual))
    count = f"{len(spikes)} loss spikes; the largest: " if len(spikes) > 1 else ""
    calmer = remedies.calmer(facts)
    return Finding(
        rule="loss spikes",
        confidence="high",
        gain=0.0,
        lens="purpose",
        pattern=PATTERNS["metrics differ"],
        evidence=(f"{count}{worst.describe()}",),
        measure_next=f"gradient norm and learning rate around step {worst.step} (metrics.jsonl); the documents of its batch",
        action=(f"set {calmer}; " if calmer else "")
        + f"restart from a checkpoint before step {worst.step} (--from-step) where the loss has not recovered",
        overrides=(calmer,) if calmer else (),
        command=None if calmer else remedies.of_run(facts, "report"),
    )
