"""The measuring process: `python -m ridgeline.measure.probe`, started by the doctor on every process of a job.

A process of its own, because a broken device can hang or kill whoever touches it: the doctor must live to say so. It takes its plan as
JSON on its first line of input and answers with JSON lines on a pipe: `begin` before each measurement (with the seconds it may take), then
`result` or `error`. It ends when its input is closed, so it never outlives the doctor.
"""

from __future__ import annotations

import functools
import json
import os
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

START_S = 90.0
"""For importing JAX from a slow file system, joining the other processes and opening the devices."""
MEASURE_S = 40.0
"""For one measurement, its compilation and the library's set-up of connections included."""


@dataclass(frozen=True)
class ProbePlan:
    """What a probe is to do."""

    together: bool
    """Measure links and collectives, all processes at once; false: this process's own devices."""
    process: int
    processes: int
    """Of the job."""
    coordinator: str | None
    """HOST:PORT of jax.distributed."""
    local_device_ids: list[int] | None
    nodes: list[str]
    """Node of each process."""
    mesh: dict[str, Any] | None
    """The config's mesh section; None: `data` over nodes, `fsdp` inside them."""
    platform: str
    """As runtime.platform of a config."""
    cpu_devices: int
    dtypes: list[str] | None
    """To measure matmuls in; None: what suits the platform."""
    quick: bool
    channel: int
    """File descriptor to answer on."""

    def as_line(self) -> bytes:
        """Return the plan as the line of input."""
        return json.dumps(asdict(self)).encode() + b"\n"


def main() -> None:
    """Carry out the plan on standard input."""
    plan = ProbePlan(**json.loads(sys.stdin.buffer.readline()))
    threading.Thread(target=_end_with_parent, daemon=True).start()
    answers = os.fdopen(plan.channel, "w", buffering=1)

    def answer(kind: str, name: str, **fields: Any) -> None:
        answers.write(json.dumps({"kind": kind, "name": name, **fields}) + "\n")

    def attempt(name: str, budget_s: float, measure: Callable[[], Any]) -> bool:
        answer("begin", name, budget_s=budget_s)
        try:
            answer("result", name, value=measure())
        except Exception as error:  # whatever goes wrong is this check's result
            text = str(error).strip().splitlines() or [""]
            answer("error", name, error=f"{type(error).__name__}: {text[0]}"[:400])
            return False
        return True

    if attempt("devices", START_S, lambda: _open_devices(plan)):
        for name, measure in _measurements(plan).items():
            # A rank that has left a collective early would let the others wait for it in the next one.
            if not attempt(name, MEASURE_S, measure) and plan.together:
                break
    answer("end", "")
    answers.flush()
    os._exit(0)  # leaving jax.distributed properly would wait for processes that may be stuck


def _end_with_parent() -> None:
    """End this process once the doctor's end of the pipe is closed."""
    sys.stdin.buffer.read()
    os._exit(1)


def _open_devices(plan: ProbePlan) -> dict[str, Any]:
    """Join the other processes and open the devices."""
    if plan.platform != "auto":
        os.environ["JAX_PLATFORMS"] = plan.platform
    import jax

    if plan.cpu_devices > 1:
        jax.config.update("jax_num_cpu_devices", plan.cpu_devices)
    if plan.together and plan.processes > 1:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(
            plan.coordinator,
            plan.processes,
            plan.process,
            local_device_ids=plan.local_device_ids,
            coordinator_bind_address=plan.coordinator,
            cluster_detection_method="deactivate",
            initialization_timeout=int(START_S),
        )
    elif plan.local_device_ids is not None:
        jax.config.update("jax_cuda_visible_devices", ",".join(map(str, plan.local_device_ids)))
    local = jax.local_devices()
    return {
        "platform": local[0].platform,
        "kinds": sorted({device.device_kind for device in local}),
        "count": len(local),
        "ids": [device.id for device in local],
    }


def _measurements(plan: ProbePlan) -> Mapping[str, Callable[[], Any]]:
    """Return the measurements in order."""
    if plan.together:
        from ridgeline.measure import collectives

        return collectives.measurements(plan.mesh, plan.nodes, plan.quick)
    from ridgeline.measure import node as measure

    gpu = measure.busy_devices()[0].platform != "cpu"
    dtypes = plan.dtypes or (["bfloat16", "tfloat32"] if gpu else ["float32", "bfloat16"])
    steps: dict[str, Callable[[], Any]] = {"arithmetic": functools.partial(measure.arithmetic, plan.quick)}
    for dtype in dtypes:
        steps[f"matmul {dtype}"] = functools.partial(measure.matmul_rates, dtype, plan.quick)
    steps["memory bandwidth"] = functools.partial(measure.memory_rates, plan.quick)
    return steps


if __name__ == "__main__":
    main()
