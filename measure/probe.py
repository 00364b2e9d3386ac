"""The process that measures devices for the preflight (`python -m ridgeline.measure.probe`).

`ridge doctor` starts it in every process of a job. It is a separate process because a broken device can hang or kill the process that uses
it, and the doctor must survive to report that. It reads its plan as JSON from the first line of standard input and writes JSON lines to a
pipe: `begin` before each measurement (with its time limit), then `result` or `error`. It exits when its input is closed, so it never
outlives the doctor.
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
"""Time limit for importing JAX from a slow file system, joining the other processes and opening the devices."""
MEASURE_S = 40.0
"""Time limit for one measurement, including compilation and connection set-up."""


@dataclass(frozen=True)
class ProbePlan:
    """The plan of a probe."""

    together: bool
    """True: links and collectives, by all processes at once. False: this process's own devices."""
    process: int
    processes: int
    """Number of processes of the job."""
    coordinator: str | None
    """HOST:PORT for jax.distributed."""
    local_device_ids: list[int] | None
    nodes: list[str]
    """Node of each process."""
    mesh: dict[str, Any] | None
    """The config's mesh section; None: `data` over nodes, `fsdp` inside them."""
    platform: str
    """As runtime.platform of a config."""
    cpu_devices: int
    dtypes: list[str] | None
    """Dtypes of the measured matmuls; None: the platform's usual ones."""
    quick: bool
    channel: int
    """File descriptor to write results to."""

    def as_line(self) -> bytes:
        """Return the plan as the first line of input."""
        return json.dumps(asdict(self)).encode() + b"\n"


def main() -> None:
    """Read the plan from standard input and run it."""
    plan = ProbePlan(**json.loads(sys.stdin.buffer.readline()))
    parent = threading.Thread(target=_end_with_parent, daemon=True)
    parent.start()
    results = os.fdopen(plan.channel, "w", buffering=1)

    def send(kind: str, name: str, **fields: Any) -> None:
        results.write(json.dumps({"kind": kind, "name": name, **fields}) + "\n")

    def attempt(name: str, budget_s: float, measure: Callable[[], Any]) -> bool:
        send("begin", name, budget_s=budget_s)
        try:
            send("result", name, value=measure())
        except Exception as error:  # any failure is the result of this check
            text = str(error).strip().splitlines() or [""]
            send("error", name, error=f"{type(error).__name__}: {text[0]}"[:400])
            return False
        return True

    if attempt("devices", START_S, lambda: _open_devices(plan)):
        for name, measure in _measurements(plan).items():
            # After a failed collective, the other processes would wait forever for this one in the next.
            if not attempt(name, MEASURE_S, measure) and plan.together:
                break
    send("end", "")
    parent.join()  # the probe of process 0 serves jax.distributed: its end ends the probes that still measure


def _end_with_parent() -> None:
    """Exit when the doctor closes its end of the pipe."""
    sys.stdin.buffer.read()
    os._exit(1)  # a clean shutdown of jax.distributed would wait for processes that may hang


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
    from ridgeline.measure import device_rates

    gpu = device_rates.busy_devices()[0].platform != "cpu"
    dtypes = plan.dtypes or (["bfloat16", "tfloat32"] if gpu else ["float32", "bfloat16"])
    steps: dict[str, Callable[[], Any]] = {"arithmetic": functools.partial(device_rates.arithmetic, plan.quick)}
    for dtype in dtypes:
        steps[f"matmul {dtype}"] = functools.partial(device_rates.matmul_rates, dtype, plan.quick)
    steps["memory bandwidth"] = functools.partial(device_rates.memory_rates, plan.quick)
    return steps


if __name__ == "__main__":
    main()
