"""The formulas behind a plan (`--explain`): each with its value, and the symbols it uses.

Those of the memory are not written down a second time: planner/memory.py computes with numbers that record how they were computed, and
tests/planner/test_formulas.py evaluates what they recorded. Those of the run are text, which the same test evaluates.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cached_property, partialmethod
from typing import Any, ClassVar

from ridgeline.configs.cluster import ClusterConfig
from ridgeline.configs.schema import Config
from ridgeline.planner.calculators.failures import DEFAULT_NODE_MTBF_HOURS
from ridgeline.planner.economics import RESTART_S, RunEstimate, price_usd, state_bytes
from ridgeline.planner.hardware import Hardware, hardware
from ridgeline.planner.local import LocalSizes
from ridgeline.planner.memory import memory_of
from ridgeline.planner.plan import Plan
from ridgeline.planner.policy import LEAST_INTERVAL_S
from ridgeline.planner.search import Candidate

STEP_TERMS = {
    "compute": "FLOPs of matmuls and attention / their calibrated rates",
    "hbm": "bytes of elementwise operations / achieved device memory bandwidth",
    "optimizer": "bytes of gradients, parameters and moments / achieved device memory bandwidth",
    "bubble": "idle pipeline stages",
    "host_launch": "waiting for the host to launch kernels",
    "host_input": "waiting for rows from the host",
}
"""Term of the step time -> formula; any other term is a kind of link."""
LINK_TERM = "time of the collectives on this kind of link, less what overlaps with computation"
_PRECEDENCE = {"+": 1, "-": 1, "*": 2, "//": 2, "": 3}


class Traced(int):
    """An integer that records how it was computed."""

    text: str
    operator: str
    """The last one; '' for a symbol or a number."""

    @staticmethod
    def of(value: int, text: str, operator: str = "") -> Traced:
        """Return a value with the text of its formula."""
        made = Traced(value)
        made.text, made.operator = text, operator
        return made

    def _with(self, other: object, operator: str, *, left: bool = True) -> Any:
        if type(other) is not int and not isinstance(other, Traced):
            return NotImplemented
        a, b = (self, other) if left else (other, self)
        x, y = int(a), int(b)
        value = {"+": x + y, "-": x - y, "*": x * y}[operator] if operator != "//" else x // y
        neutral = 0 if operator in "+-" else 1
        if type(b) is int and y == neutral:
            return a
        if type(a) is int and x == neutral and operator in "+*":
            return b
        if operator == "*" and 0 in (x if type(a) is int else 1, y if type(b) is int else 1):
            return 0
        return Traced.of(value, f"{_operand(a, operator)} {operator} {_operand(b, operator, right=True)}", operator)

    __add__ = partialmethod(_with, operator="+")
    __radd__ = partialmethod(_with, operator="+", left=False)
    __sub__ = partialmethod(_with, operator="-")
    __rsub__ = partialmethod(_with, operator="-", left=False)
    __mul__ = partialmethod(_with, operator="*")
    __rmul__ = partialmethod(_with, operator="*", left=False)
    __floordiv__ = partialmethod(_with, operator="//")
    __rfloordiv__ = partialmethod(_with, operator="//", left=False)


def _operand(value: Any, operator: str, *, right: bool = False) -> str:
    if not isinstance(value, Traced):
        return str(value)
    mine, other = _PRECEDENCE[value.operator], _PRECEDENCE[operator]
    same = mine == other and ((right and operator != "+") or "//" in (operator, value.operator))
    return f"({value.text})" if mine < other or same else value.text


class _Model:
    """The sizes of a model as symbols."""

    def __init__(self, model: object) -> None:
        self._model = model

    def __getattr__(self, name: str) -> Any:
        return _symbol(getattr(self._model, name), name)


class _Sizes(LocalSizes):
    """Sizes on one device as symbols."""

    prefix: ClassVar[str] = ""

    def __getattribute__(self, name: str) -> Any:
        return _symbol(super().__getattribute__(name), super().__getattribute__("prefix") + name)

    @property
    def model(self) -> Any:
        return _Model(self.config.model)

    @property
    def of_state(self) -> LocalSizes:
        if not self.config.mesh.zero_stage:
            return self
        own = LocalSizes(self.config, *(int(getattr(self, field.name)) for field in fields(self)[1:])).of_state
        return _StateSizes(*(getattr(own, field.name) for field in fields(own)))


class _StateSizes(_Sizes):
    """Those of gradients and optimizer state, where they are sharded over more devices."""

    prefix: ClassVar[str] = "state_"


def _symbol(value: Any, name: str) -> Any:
    return Traced.of(int(value), name) if isinstance(value, int) and not isinstance(value, bool) else value


@dataclass(frozen=True)
class Formula:
    """One value of a plan."""

    name: str
    value: float
    unit: str
    text: str
    """A formula of symbols and numbers; '' for a constant, its name for a symbol."""
    meaning: str = ""


@dataclass(frozen=True)
class Formulas:
    """The formulas of a layout, and the symbols in them."""

    memory: list[Formula]
    """Bytes of one device by component at the peak; planner/memory.py."""
    symbols: list[Formula]
    """Symbols of the formulas above, with their meaning."""
    step: list[Formula]
    run: list[Formula]

    def to_json(self) -> dict[str, Any]:
        """Return lists of objects."""
        return {field.name: [vars(formula) for formula in getattr(self, field.name)] for field in fields(self)}


def memory_formulas(
    config: Config, sizes: Mapping[str, int], *, gpu: bool, device: Hardware | None = None
) -> tuple[list[Formula], list[Formula]]:
    """Return the formula of every component of the memory of one device, and the symbols in them."""
    local = LocalSizes.of(config, sizes)
    traced = memory_of(_Sizes(*(getattr(local, field.name) for field in fields(local))), sizes, gpu=gpu, device=device)
    found = [
        Formula(name, int(part.bytes), "bytes", getattr(part.bytes, "text", ""), part.assumption)
        for name, part in traced.components.items()
    ]
    names = dict.fromkeys(name for formula in found for name in re.findall(r"[a-z_]+", formula.text))
    return found, [_meaning(name, local) for name in names]


def _meaning(name: str, local: LocalSizes) -> Formula:
    if name.startswith(_StateSizes.prefix):
        same = _meaning(name.removeprefix(_StateSizes.prefix), local.of_state)
        return Formula(name, same.value, "", name, f"{same.meaning} For gradients and optimizer state, sharded over data too.")
    described = LocalSizes.__dict__.get(name)
    if isinstance(described, property | cached_property):
        function = described.fget if isinstance(described, property) else described.func
        return Formula(name, getattr(local, name), "", name, inspect.getdoc(function) or "")
    if hasattr(local, name):
        return Formula(name, getattr(local, name), "", name, f"devices of the mesh axis {name}")
    return Formula(name, getattr(local.model, name), "", name, f"model.{name}")


RUN = {
    "steps": ("", "ceil(run_tokens / (batch_size * seq_len))", ""),
    "days": ("days", "steps * step_s / 86400", "without saves, failures and restarts"),
    "mtbf_hours": ("h", "node_mtbf_hours / nodes", "time between failures of any node"),
    "write_s": ("s", "state_bytes / write_bytes_per_s", "time of a write"),
    "save_s": ("s", "state_bytes / shards / host_bytes_per_s", "time that a save blocks training: the copy to the host"),
    "checkpoint_interval_s": (
        "s",
        f"max(sqrt(2 * save_s * mtbf_hours * 3600), write_s, {LEAST_INTERVAL_S:g})",
        "Young's interval (Young 1974), at least the time of a write and ten minutes",
    ),
    "restart_s": ("s", f"{RESTART_S:g} + state_bytes / read_bytes_per_s", "from a failure to the next step"),
    "goodput": (
        "share",
        "(1 - save_s / (checkpoint_interval_s + save_s))"
        " * max(0, 1 - (checkpoint_interval_s / 2 + restart_s) / (mtbf_hours * 3600 + restart_s))",
        "share of the time in new steps; a failure loses half an interval and a restart (planner/calculators/failures.py)",
    ),
    "wall_days": ("days", "days / goodput", ""),
    "expected_failures": ("", "wall_days * 24 / mtbf_hours", ""),
    "wall_device_hours": ("device-hours", "wall_days * 24 * devices", ""),
    "wall_cost_usd": ("USD", "wall_device_hours * price_usd", ""),
    "device_energy_kwh": ("kWh", "wall_device_hours * device_watts / 1000", "devices at their power limit"),
    "energy_kwh": ("kWh", "device_energy_kwh * power_usage_effectiveness", "with the facility's overhead"),
}
"""Value of a run -> unit, formula, meaning."""


def run_formulas(run: RunEstimate, symbols: Mapping[str, float], *, asynchronous: bool) -> list[Formula]:
    """Return the formulas of a run. symbols: the values of `run_symbols`. asynchronous: as checkpoint.asynchronous."""
    write_s, read_s = (symbols["state_bytes"] / symbols[rate] for rate in ("write_bytes_per_s", "read_bytes_per_s"))
    more = {"write_s": write_s, "restart_s": RESTART_S + read_s}
    made = []
    for name, (unit, text, meaning) in RUN.items():
        if name == "save_s" and not asynchronous:
            text, meaning = "write_s", "time that a save blocks training: the write"
        value = more[name] if name in more else getattr(run, name)
        if value is not None:  # without a price, no cost
            made.append(Formula(name, value, unit, text, meaning))
    return made


def run_symbols(candidate: Candidate, config: Config, cluster: ClusterConfig, device: Hardware) -> list[Formula]:
    """Return the symbols of the formulas of a run."""
    layout = candidate.layout
    price = price_usd(cluster, device)
    symbols = {
        "run_tokens": (candidate.run.tokens, "", "tokens of the run"),
        "batch_size": (config.data.batch_size, "rows", "data.batch_size"),
        "seq_len": (config.data.seq_len, "tokens", "data.seq_len"),
        "step_s": (candidate.step.step_s, "s", "step time"),
        "nodes": (candidate.nodes, "", "nodes of the run"),
        "devices": (layout.devices, "", "devices of the run"),
        "shards": (layout.fsdp * layout.tensor, "", "devices that share one copy of the state"),
        "state_bytes": (state_bytes(config), "bytes", "parameters and optimizer state of the whole model"),
        "node_mtbf_hours": (cluster.node_mtbf_hours or DEFAULT_NODE_MTBF_HOURS, "h", "time between failures of one node (cluster file)"),
        "write_bytes_per_s": (cluster.storage.write_bytes_per_s(candidate.nodes), "bytes/s", "storage (cluster file)"),
        "read_bytes_per_s": (cluster.storage.read_bytes_per_s(candidate.nodes), "bytes/s", "storage (cluster file)"),
        "host_bytes_per_s": (device.host_bandwidth_bytes_per_s, "bytes/s", "from a device to its host (catalog)"),
        "device_watts": (device.tdp_w, "W", "power limit of a device (catalog)"),
        "power_usage_effectiveness": (cluster.power_usage_effectiveness, "", "facility (cluster file)"),
        **({} if price is None else {"price_usd": (price, "USD", "price of a device-hour")}),
    }
    return [Formula(name, value, unit, name, meaning) for name, (value, unit, meaning) in symbols.items()]


def formulas(plan: Plan) -> Formulas:
    """Return the formulas of the best layout of a plan."""
    best, device = plan.best[0], hardware(plan.cluster.device)
    chosen = best.layout.apply(plan.config)
    memory, symbols = memory_formulas(chosen, best.layout.sizes, gpu=device.tensor_cores, device=device)
    step = [Formula(f"{name}_s", seconds, "s", STEP_TERMS.get(name, LINK_TERM)) for name, seconds in best.step.breakdown_s.items()]
    of_run = run_symbols(best, chosen, plan.cluster, device)
    run = run_formulas(best.run, {symbol.name: symbol.value for symbol in of_run}, asynchronous=chosen.checkpoint.asynchronous)
    return Formulas(memory, [*symbols, *of_run], step, run)
