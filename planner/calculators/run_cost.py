"""Time and money of a training run, from tokens, FLOPs per token, devices, MFU and price.

FLOP = tokens * flops_per_token           flops_per_token = 6*P by default (Kaplan et al., arXiv 2001.08361, section 2.1)
tokens_per_s = devices * peak * MFU / flops_per_token          (MFU: PaLM, arXiv 2204.02311, appendix B)
seconds = tokens / tokens_per_s,  device_hours = seconds * devices / 3600,  cost = device_hours * price
energy = device_hours * power * facility overhead
"""

from __future__ import annotations

from dataclasses import dataclass

from ridgeline.configs.errors import UserError
from ridgeline.planner.calculators.checks import count, not_negative, positive, share

SECONDS_PER_DAY = 86_400


@dataclass(frozen=True)
class RunCost:
    """Time and money of a run. None: unknown without the tokens or the price."""

    flops_per_token: float
    """Training FLOPs per token."""
    mfu: float
    """Model FLOPs over the peak of the devices."""
    tokens_per_s: float
    """Throughput of all devices together."""
    tokens_per_s_per_device: float
    seconds: float | None
    days: float | None
    device_hours: float | None
    cost_usd: float | None
    energy_kwh: float | None


def run_cost(
    *,
    params: float,
    devices: float,
    peak_flops: float,
    tokens: float | None = None,
    mfu: float | None = None,
    tokens_per_s: float | None = None,
    device_hours: float | None = None,
    flops_per_token: float | None = None,
    price_per_hour_usd: float | None = None,
    device_power_w: float | None = None,
    power_usage_effectiveness: float = 1.0,
) -> RunCost:
    """Return the cost of a run from exactly one of `mfu`, `tokens_per_s` (all devices together) and `device_hours`.

    Args:
      params: active parameters, for the 6*P rule; ignored when `flops_per_token` is given.
      peak_flops: dense datasheet peak of ONE device in FLOP/s for the dtype of the matmuls.
      tokens: of the whole run; required with `device_hours`.

    Raises UserError for values that are not positive, more or fewer than one rate, or a rate above the devices' peak.
    """
    per_token = positive("flops-per-token", flops_per_token) if flops_per_token is not None else 6 * positive("params", params)
    devices, peak = count("devices", devices), positive("peak-flops", peak_flops)
    tokens = None if tokens is None else positive("tokens", tokens)
    given = [name for name, value in (("mfu", mfu), ("tokens-per-s", tokens_per_s), ("device-hours", device_hours)) if value is not None]
    if len(given) != 1:
        what = f"got {' and '.join(given)}" if given else "got none"
        raise UserError(f"give exactly one of mfu, tokens-per-s and device-hours; {what}")
    if mfu is not None:
        rate = devices * peak * share("mfu", mfu) / per_token
    elif tokens_per_s is not None:
        rate = positive("tokens-per-s", tokens_per_s)
    else:
        assert device_hours is not None
        if tokens is None:
            raise UserError("device-hours needs tokens: the rate is tokens over time")
        rate = tokens / (positive("device-hours", device_hours) * 3600 / devices)
    used = rate * per_token / (devices * peak)
    if used > 1 + 1e-9:
        raise UserError(
            f"{rate:.4g} tokens/s x {per_token:.4g} FLOP/token = {rate * per_token:.4g} FLOP/s, above the peak of {devices}"
            f" device{'s' * (devices > 1)}, {devices * peak:.4g} (MFU {used:.0%}): is the rate that of all devices,"
            " and the peak that of the dtype used?"
        )
    seconds = None if tokens is None else tokens / rate
    hours = None if seconds is None else seconds * devices / 3600
    price = None if price_per_hour_usd is None else not_negative("price-per-hour", price_per_hour_usd)
    power = None if device_power_w is None else positive("device-power-w", device_power_w) * power_usage_effectiveness / 1000
    return RunCost(
        flops_per_token=per_token,
        mfu=used,
        tokens_per_s=rate,
        tokens_per_s_per_device=rate / devices,
        seconds=seconds,
        days=None if seconds is None else seconds / SECONDS_PER_DAY,
        device_hours=hours,
        cost_usd=None if hours is None or price is None else hours * price,
        energy_kwh=None if hours is None or power is None else hours * power,
    )
