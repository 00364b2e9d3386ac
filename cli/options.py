"""Arguments, options and value types shared by several commands.

Values with units: `70B` parameters, `58MiB`, `450GB/s`, `989T`, `45%`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import click
from click.shell_completion import CompletionItem

from ridgeline.configs.environment import MOST, is_number, shortened
from ridgeline.configs.errors import UserError

Function = TypeVar("Function", bound=Callable[..., Any])
FAILED_CHECK = 1
"""Exit code when a check that an option requests fails: --fail-on-slower, --fail-if-memory-above."""


def config_arguments(function: Function) -> Function:
    """Add the arguments `CONFIG [section.key=value]...` as the parameters `config` and `overrides`.

    CONFIG: a shipped config by name, a YAML file, or hf:DIR for the model of a Hugging Face directory.
    """
    function = click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...", shell_complete=complete_key)(function)
    return click.argument("config", metavar="CONFIG", shell_complete=complete_config)(function)


def mesh_argument(function: Function) -> Function:
    """Add the argument `[mesh.AXIS=SIZE]...` as the parameter `overrides`."""
    return click.argument("overrides", nargs=-1, metavar="[mesh.AXIS=SIZE]...", shell_complete=complete_mesh)(function)


def complete_mesh(ctx: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Return the mesh axes that begin with what was typed."""
    from ridgeline.configs.schema import MESH_AXES

    return [CompletionItem(f"mesh.{axis}=") for axis in MESH_AXES if f"mesh.{axis}".startswith(incomplete)]


def complete_key(ctx: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Return the config keys that begin with what was typed."""
    from ridgeline.configs.fields import schema_keys

    keys = [key for key, slot in schema_keys() if slot.section is None and "[]" not in key and "<" not in key]
    return [CompletionItem(f"{key}=") for key in keys if key.startswith(incomplete)]


def complete_config(ctx: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Return the shipped configs that begin with what was typed; the shell adds the files."""
    from ridgeline.configs.compose import shipped_names

    shipped = [name for name in shipped_names() if name.startswith(incomplete)]
    return [*(CompletionItem(name) for name in shipped), CompletionItem(incomplete, type="file")]


def json_option(function: Function) -> Function:
    """Add `--json` as the parameter `as_json`."""
    return click.option("--json", "as_json", is_flag=True, help="Print JSON instead of text.")(function)


def software_option(function: Function) -> Function:
    """Add `--software` as the parameter `software`."""
    return click.option(
        "--software",
        default="ridgeline",
        show_default=True,
        metavar="NAME",
        help="Training software whose step time is predicted (planner/software.yaml): ridgeline, maxtext, megatron, torch-compile, ...",
        shell_complete=complete_software,
    )(function)


def complete_software(ctx: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Return the names that `--software` takes and that begin with what was typed."""
    from ridgeline.planner.software import software_names

    return [CompletionItem(name) for name in software_names() if name.startswith(incomplete)]


def made_with(devices: str, step: int | None, config_sha256: str | None) -> str:
    """Return the line that names the devices, the checkpoint and the config of a result."""
    of = "" if step is None else f", step {step}"
    return f"{devices}{of}" + ("" if config_sha256 is None else f", config sha256 {config_sha256[:12]}")


def change_option(function: Function) -> Function:
    """Add `--change KEY` as the parameter `changes`."""
    return click.option("--change", "changes", multiple=True, metavar="KEY", help="Config key under test, which may differ; repeatable.")(
        function
    )


def fail_option(function: Function) -> Function:
    """Add `--fail-on-slower`."""
    return click.option("--fail-on-slower", is_flag=True, help="Exit with code 1 if a layer is slower.")(function)


def job_options(*, cluster_required: bool = True) -> Callable[[Function], Function]:
    """Add the options that determine where and how a Slurm job runs."""
    options = (
        click.option("--cluster", "-c", required=cluster_required, help="Cluster: the name of a shipped one, or a YAML file."),
        click.option("--time", help="Time limit in Slurm's format: 90, 12:00:00, 2-00:00:00."),
        click.option("--account", help="Account to charge."),
        click.option("--qos", help="Quality of service."),
        click.option("--partition", help="Partition."),
        click.option(
            "--cluster-set",
            multiple=True,
            metavar="KEY=VALUE",
            help="Override a key of the cluster file, such as slurm.max_restarts=3; repeatable.",
        ),
        click.option("--dry-run", is_flag=True, help="Print the job script; write and submit nothing."),
    )

    def add(function: Function) -> Function:
        for option in reversed(options):
            function = option(function)
        return function

    return add


_INT32_MAX = 2**31 - 1


class Int32Range(click.IntRange):
    """A whole number within bounds, at most 2**31 - 1, as in the config."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Return the number."""
        number: int = super().convert(value, param, ctx)
        if abs(number) > _INT32_MAX:
            self.fail(f"{value} is above {_INT32_MAX}", param, ctx)
        return number


class FiniteRange(click.FloatRange):
    """A finite number within bounds."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Return the number."""
        number: float = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value} is not a finite number", param, ctx)
        return number


MEMBERS = click.IntRange(min=1, max=MOST)
"""Nodes, devices, processes or tasks of a job."""


def parse_member_count(text: str) -> int | None:
    """Return a number of nodes or devices, 1 to MOST; None for anything else."""
    digits = text.strip().lstrip("0")
    return int(digits) if is_number(digits) and len(digits) <= len(str(MOST)) and int(digits) <= MOST else None


def parse_counts(option: str, text: str, *, distinct: bool = False) -> list[int]:
    """Read `1,2,4`, the value of `option`. With `distinct`, sort the numbers and reject duplicates. Raises UserError."""
    counts = [count for count in map(parse_member_count, text.split(",")) if count is not None]
    if len(counts) < text.count(",") + 1:
        raise UserError(f"{option} {shortened(text)}: must be whole numbers from 1 to {MOST}, separated by commas, such as 1,2,4,8")
    if not distinct:
        return counts
    if len(set(counts)) < len(counts):
        raise UserError(f"{option} {text}: a number is given twice; use --repeats to repeat runs")
    return sorted(counts)


COUNTS = {"": 1.0, "k": 1e3, "K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}
"""B is a billion here, as in 70B parameters; T a trillion, as in 2T tokens."""
BYTES = {"": 1.0, "B": 1.0} | {
    f"{prefix}{infix}B": base**power
    for power, prefix in enumerate(("k", "M", "G", "T", "P"), start=1)
    for infix, base in (("", 1000.0), ("i", 1024.0))
} | {"KB": 1e3, "KiB": 1024.0}  # fmt: skip
RATES = {unit + per: size for unit, size in BYTES.items() for per in ("", "/s")}
FLOPS = {"": 1.0} | {
    prefix + unit: 1000.0**power
    for power, prefix in enumerate(("", "k", "M", "G", "T", "P", "E"))
    for unit in ("", "FLOP/s", "FLOPS")
    if prefix + unit
}
SHARES = {"": 1.0, "%": 0.01}
PLAIN = {"": 1.0}

_FORM = re.compile(r"([+-]?(?:\d[\d_]*\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)\s*([A-Za-z%/]*)")


class Quantity(click.ParamType):
    """A finite number with an optional unit, within bounds."""

    def __init__(self, name: str, units: Mapping[str, float], *, zero: bool = False, whole: bool = False, most: float = math.inf) -> None:
        self.name, self.units, self.zero, self.whole, self.most = name, units, zero, whole, most

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> float | int:
        """Return the number in base units."""
        if isinstance(value, (int, float)):
            return value
        found = _FORM.fullmatch(str(value).strip())
        if found is None or found.group(2) not in self.units:
            units = ", ".join(unit for unit in self.units if unit)
            self.fail(f"'{value}' is not a number{f' with one of the units {units}' if units else ''}", param, ctx)
        number = float(found.group(1).replace("_", "")) * self.units[found.group(2)]
        least = "at least 0" if self.zero else "greater than 0"
        if not math.isfinite(number) or number < 0 or (number == 0 and not self.zero):
            self.fail(f"{value}: must be a finite number {least}", param, ctx)
        if number > self.most:
            hint = f" ({number:g} % is written {number:g}% or {number / 100:g})" if self.units is SHARES and number <= 100 else ""
            self.fail(f"{value}: must be at most {self.most:g}{hint}", param, ctx)
        if self.whole:
            if round(number) != number:
                self.fail(f"{value}: must be a whole number", param, ctx)
            return round(number)
        return number


COUNT = Quantity("COUNT", COUNTS)
WHOLE = Quantity("N", COUNTS, whole=True)
BYTE = Quantity("BYTES", BYTES)
BYTES_PER_S = Quantity("BYTES/S", RATES)
FLOP_PER_S = Quantity("FLOP/S", FLOPS)
SHARE = Quantity("SHARE", SHARES, most=1.0)
TIMES = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
DURATION = Quantity("DURATION", TIMES)
"""A number of seconds, or with a unit, such as 90, 10m, 24h."""
DURATION_OR_ZERO = Quantity("DURATION", TIMES, zero=True)
COUNT_OR_ZERO = Quantity("COUNT", COUNTS, zero=True)
DAYS = Quantity("DAYS", PLAIN)
SECONDS = Quantity("SECONDS", PLAIN)
SECONDS_OR_ZERO = Quantity("SECONDS", PLAIN, zero=True)
USD = Quantity("USD", PLAIN, zero=True)
WATT = Quantity("WATT", PLAIN)


def parse_set(text: str) -> tuple[str, Path]:
    """Return name and directory of --set NAME=DIR. Raises UserError."""
    name, equals, path = text.partition("=")
    if not equals or not name or not path:
        raise UserError(f"--set '{text}' must be NAME=DIR")
    return name, Path(path)
