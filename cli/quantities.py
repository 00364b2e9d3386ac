"""Numbers with units on the command line: `70B` parameters, `58MiB`, `450GB/s`, `989T`, `45%`."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

import click

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
SECONDS = Quantity("SECONDS", PLAIN)
SECONDS_OR_ZERO = Quantity("SECONDS", PLAIN, zero=True)
USD = Quantity("USD", PLAIN, zero=True)
WATT = Quantity("WATT", PLAIN)
