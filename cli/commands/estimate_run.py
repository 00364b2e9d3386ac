"""`ridge estimate run|budget|pipeline|checkpoint|ridge|batch`: calculators that need no config."""

from __future__ import annotations

import click

from ridgeline.cli.options import BYTES_PER_S, COUNT, FLOP_PER_S, SECONDS, SECONDS_OR_ZERO, SHARE, USD, WATT, WHOLE
from ridgeline.cli.printing.estimate import Result, print_results, result_options

KAPLAN = "Kaplan et al., arXiv 2001.08361, section 2.1"
SCALING_BOOK = "JAX scaling book, chapters Training and GPUs"


@click.command()
@click.option("--params", type=COUNT, required=True, help="Active parameters, such as 70B.")
@click.option("--tokens", type=COUNT, help="Tokens of the whole run, such as 2T. Without it, only rates are printed.")
@click.option("--devices", type=WHOLE, required=True, help="Number of devices.")
@click.option("--peak-flops", type=FLOP_PER_S, required=True, help="Dense datasheet peak of one device for the dtype, such as 989T.")
@click.option("--mfu", type=SHARE, help="Model FLOPs utilization, such as 0.45 or 45%.")
@click.option("--tokens-per-s", type=COUNT, help="Measured tokens/s of all devices, to compute the MFU from.")
@click.option("--device-hours", type=COUNT, help="Device-hours of a past run, to compute the MFU from.")
@click.option("--flops-per-token", type=COUNT, help="Training FLOPs per token [default: 6 * PARAMS].")
@click.option("--price-per-hour", type=USD, help="Price of one device per hour, USD.")
@click.option("--device-power-w", type=WATT, help="Power of one device, for the energy, such as 700.")
@result_options
def run(
    params: float,
    tokens: float | None,
    devices: int,
    peak_flops: float,
    mfu: float | None,
    tokens_per_s: float | None,
    device_hours: float | None,
    flops_per_token: float | None,
    price_per_hour: float | None,
    device_power_w: float | None,
    explain: bool,
    as_json: bool,
) -> None:
    """Estimate duration and cost of a run from its MFU, or its MFU from tokens/s or device-hours."""
    from ridgeline.planner.calculators.run_cost import run_cost

    cost = run_cost(
        params=params,
        tokens=tokens,
        devices=devices,
        peak_flops=peak_flops,
        mfu=mfu,
        tokens_per_s=tokens_per_s,
        device_hours=device_hours,
        flops_per_token=flops_per_token,
        price_per_hour_usd=price_per_hour,
        device_power_w=device_power_w,
    )
    palm = "PaLM, arXiv 2204.02311, appendix B"
    print_results(
        [
            Result("flops_per_token", cost.flops_per_token, "FLOP", "6 * params, unless given", KAPLAN),
            Result("mfu", cost.mfu, "share", "tokens_per_s * flops_per_token / (devices * peak_flops)", palm),
            Result("tokens_per_s", cost.tokens_per_s, "tokens/s", "devices * peak_flops * mfu / flops_per_token", palm),
            Result("tokens_per_s_per_device", cost.tokens_per_s_per_device, "tokens/s", "tokens_per_s / devices"),
            Result("seconds", cost.seconds, "s", "tokens / tokens_per_s"),
            Result("days", cost.days, "days", "seconds / 86400"),
            Result("device_hours", cost.device_hours, "h", "seconds * devices / 3600"),
            Result("cost_usd", cost.cost_usd, "USD", "device_hours * price_per_hour; without restarts and idle time"),
            Result("energy_kwh", cost.energy_kwh, "kWh", "device_hours * device_power_w / 1000; devices only"),
        ],
        as_json=as_json,
        explain=explain,
    )


@click.command()
@click.option("--device-hours", type=COUNT, help="Device-hours of the run.")
@click.option("--usd", type=USD, help="Money for the run, instead of --device-hours.")
@click.option("--price-per-hour", type=USD, help="Price of one device per hour, USD; with --usd.")
@click.option("--peak-flops", type=FLOP_PER_S, required=True, help="Dense datasheet peak of one device for the dtype, such as 989T.")
@click.option("--mfu", type=SHARE, required=True, help="Model FLOPs utilization, such as 0.45 or 45%: that of `ridge plan` or of a run.")
@click.option("--params", type=COUNT, help="Active parameters of the model [default: those of least loss].")
@result_options
def budget(
    device_hours: float | None,
    usd: float | None,
    price_per_hour: float | None,
    peak_flops: float,
    mfu: float,
    params: float | None,
    explain: bool,
    as_json: bool,
) -> None:
    """Estimate the model size and tokens that a budget buys at the least loss, or the tokens for a given model."""
    from ridgeline.configs.errors import UserError
    from ridgeline.planner.calculators.compute_optimal import ALPHA, BETA, ENTROPY, A, B, budget_flops, purchase

    if (device_hours is None) == (usd is None):
        raise UserError("give exactly one of --device-hours and --usd")
    if (usd is None) != (price_per_hour is None):
        raise UserError("--usd and --price-per-hour need each other")
    hours = device_hours
    if usd is not None and price_per_hour is not None:
        hours = usd / price_per_hour
    assert hours is not None
    found = purchase(budget_flops(device_hours=hours, peak_flops=peak_flops, mfu=mfu), params)
    exponent, law = BETA / (ALPHA + BETA), "Besiroglu et al., arXiv 2404.10102, equation 3"
    hoffmann = "Hoffmann et al., arXiv 2203.15556, section 3.3"
    print_results(
        [
            Result("device_hours", hours, "h", "device_hours, or usd / price_per_hour; without restarts and idle time"),
            Result("flops", found.flops, "FLOP", "device_hours * 3600 * peak_flops * mfu"),
            Result(
                "params",
                found.params,
                "",
                f"G * (flops/6)^{exponent:.4f}, unless given; G = (alpha*A / (beta*B))^(1/(alpha+beta))",
                hoffmann,
            ),
            Result("tokens", found.tokens, "", "flops / (6 * params)", KAPLAN),
            Result("tokens_per_param", found.tokens_per_param, "", "tokens / params"),
            Result("loss", found.loss, "nats/token", f"{ENTROPY} + {A}/params^{ALPHA} + {B}/tokens^{BETA}", law),
            Result("optimal_params", found.optimal_params, "", "params of least loss for these flops", hoffmann),
            Result("optimal_tokens", found.optimal_tokens, "", "flops / (6 * optimal_params)", KAPLAN),
            Result("extra_compute", found.extra_compute, "share", "flops beyond those of an optimal model with this loss"),
        ],
        as_json=as_json,
        explain=explain,
    )


@click.command()
@click.option("--stages", type=WHOLE, required=True, help="Pipeline stages.")
@click.option("--microbatches", type=WHOLE, required=True, help="Microbatches per step.")
@click.option("--interleave", type=WHOLE, default=1, show_default=True, help="Chunks of layers per stage.")
@click.option("--forward-s", type=SECONDS, required=True, help="Forward time of one microbatch in one stage (all its chunks).")
@click.option("--backward-s", type=SECONDS_OR_ZERO, required=True, help="Backward time of one microbatch in one stage.")
@result_options
def pipeline(stages: int, microbatches: int, interleave: int, forward_s: float, backward_s: float, explain: bool, as_json: bool) -> None:
    """Estimate step time and bubble of a pipeline (1F1B or GPipe; interleaved with --interleave)."""
    from ridgeline.planner.calculators.pipeline_schedule import pipeline_estimate

    step = pipeline_estimate(stages=stages, microbatches=microbatches, interleave=interleave, forward_s=forward_s, backward_s=backward_s)
    narayanan = "Narayanan et al., arXiv 2104.04473, section 2.2; GPipe, arXiv 1811.06965, section 2.3"
    print_results(
        [
            Result("seconds", step.seconds, "s", "(m + (p-1)/v) * (forward + backward)", narayanan),
            Result("bubble_fraction", step.bubble_fraction, "share", "(p-1) / (v*m + p-1), of the total time", narayanan),
            Result("efficiency", step.efficiency, "share", "1 - bubble_fraction"),
            Result("bubble_over_ideal", step.bubble_over_ideal, "share", "(p-1) / (v*m), of the time without a bubble", narayanan),
            Result("microbatches_in_flight", step.microbatches_in_flight, "", "min(p, m) with 1F1B; GPipe holds all m", narayanan),
        ],
        as_json=as_json,
        explain=explain,
    )


@click.command()
@click.option("--save-s", type=SECONDS, required=True, help="Time a save blocks training.")
@click.option("--mtbf-s", type=SECONDS, help="Mean time between failures of the whole job.")
@click.option("--fleet", metavar="COUNT:MTBF_HOURS[,...]", help="Components whose failure stops the job, such as 128:3692,16:20000.")
@result_options
def checkpoint(save_s: float, mtbf_s: float | None, fleet: str | None, explain: bool, as_json: bool) -> None:
    """Compute the optimal checkpoint interval, and the share of time lost to saves and repeated work."""
    from ridgeline.configs.errors import UserError
    from ridgeline.planner.calculators.failures import checkpoint_plan, fleet_mtbf_s

    if (mtbf_s is None) == (fleet is None):
        raise UserError("give either --mtbf-s or --fleet")
    plan = checkpoint_plan(save_s=save_s, mtbf_s=mtbf_s if mtbf_s is not None else fleet_mtbf_s(_pairs("--fleet", fleet, ":")))
    young = "Young, A first order approximation to the optimum checkpoint interval, CACM 17(9), 1974"
    print_results(
        [
            Result("mtbf_s", plan.mtbf_s, "s", "1 / sum(count / mtbf) over the parts of the fleet; rates add"),
            Result("interval_s", plan.interval_s, "s", "sqrt(2 * save_s * mtbf_s)", young),
            Result("overhead_fraction", plan.overhead_fraction, "share", "save_s/interval_s + interval_s/(2*mtbf_s)", young),
        ],
        as_json=as_json,
        explain=explain,
    )


@click.command()
@click.option("--peak-flops", type=FLOP_PER_S, required=True, help="Dense peak of one device, such as 989T.")
@click.option("--bandwidth", type=BYTES_PER_S, required=True, help="Bandwidth of memory, or of a link in one direction, such as 450GB/s.")
@click.option("--axis", metavar="AXIS", help="Mesh axis: data, tensor or data-tensor [default: none, a plain roofline].")
@click.option("--mlp-width", type=WHOLE, help="MLP width F, for a tensor axis.")
@click.option("--devices", type=WHOLE, help="Size X of the data axis, for the factor (X-1)/X.")
@click.option("--experts", type=WHOLE, default=1, show_default=True, help="Experts of a mixture of experts, for a data axis.")
@click.option("--active-experts", type=WHOLE, default=1, show_default=True, help="Active experts per token.")
@result_options
def ridge(
    peak_flops: float,
    bandwidth: float,
    axis: str | None,
    mlp_width: int | None,
    devices: int | None,
    experts: int,
    active_experts: int,
    explain: bool,
    as_json: bool,
) -> None:
    """Compute where compute and communication balance: arithmetic intensity, tokens per device, size of a tensor axis."""
    from ridgeline.planner.calculators.ridge import ridge_estimate

    found = ridge_estimate(
        peak_flops=peak_flops,
        bandwidth=bandwidth,
        axis=axis,
        mlp_width=mlp_width,
        devices=devices,
        experts=experts,
        active_experts=active_experts,
    )
    formulas = {
        None: "peak_flops / bandwidth",
        "data": "peak_flops / bandwidth * (X-1)/X * experts/active_experts",
        "tensor": "mlp_width * bandwidth / peak_flops",
        "data-tensor": "4 * (peak_flops/bandwidth)^2 / (links per axis squared * mlp_width)",
    }
    print_results(
        [
            Result("intensity", found.intensity, "FLOP/byte", "peak_flops / bandwidth", "Williams et al., Roofline, CACM 52(4), 2009"),
            Result("threshold", found.threshold, "", formulas[axis], SCALING_BOOK),
            Result("meaning", found.meaning),
        ],
        as_json=as_json,
        explain=explain,
    )


@click.command()
@click.option("--s-min", type=COUNT, help="Minimum steps, at unlimited batch size.")
@click.option("--b-crit", type=COUNT, help="Critical batch size, in the unit of --batch.")
@click.option("--batch", "size", type=COUNT, help="Batch size.")
@click.option("--fit", metavar="STEPS@BATCH,...", help="Runs that reached the same loss; fit the critical batch size to them.")
@result_options
def batch(s_min: float | None, b_crit: float | None, size: float | None, fit: str | None, explain: bool, as_json: bool) -> None:
    """Estimate steps and examples at a batch size, or fit the critical batch size to measured runs."""
    from ridgeline.configs.errors import UserError
    from ridgeline.planner.calculators.batch_size import batch_estimate, fit_critical_batch

    mccandlish = "McCandlish et al., arXiv 1812.06162, sections 2.3 and 2.4"
    law = {"s-min": s_min, "b-crit": b_crit, "batch": size}
    if fit is not None:
        extra = [f"--{name}" for name, value in law.items() if value is not None]
        if extra:
            raise UserError(f"--fit excludes {', '.join(extra)}")
        fitted = fit_critical_batch(_pairs("--fit", fit, "@"))
        print_results(
            [
                Result("b_crit", fitted.b_crit, "", "slope / s_min of steps over 1/batch", mccandlish),
                Result("s_min", fitted.s_min, "steps", "fit of steps = s_min * (1 + b_crit/batch), least relative squares", mccandlish),
                Result("residuals", list(fitted.residuals), "", "measured - fitted steps"),
                Result("relative_residuals", list(fitted.relative_residuals), "share", "residual / measured steps"),
                Result("misfit", fitted.misfit, "", "a relative residual above 5 %, or steps that do not fall with the batch"),
            ],
            as_json=as_json,
            explain=explain,
        )
        return
    if s_min is None or b_crit is None or size is None:
        missing = [f"--{name}" for name, value in law.items() if value is None]
        raise UserError(f"give --fit, or all of --s-min, --b-crit and --batch (missing: {', '.join(missing)})")
    found = batch_estimate(s_min=s_min, b_crit=b_crit, batch=size)
    print_results(
        [
            Result("steps", found.steps, "", "s_min * (1 + b_crit/batch)", mccandlish),
            Result("examples", found.examples, "", "steps * batch = s_min * (batch + b_crit)", mccandlish),
            Result("steps_over_min", found.steps_over_min, "", "1 + b_crit/batch", mccandlish),
            Result("examples_over_min", found.examples_over_min, "", "1 + batch/b_crit", mccandlish),
        ],
        as_json=as_json,
        explain=explain,
    )


def _pairs(option: str, text: str | None, separator: str) -> list[tuple[float, float]]:
    """Read `A<separator>B,...` as pairs of numbers. Raises UserError."""
    from ridgeline.configs.errors import UserError

    pairs = []
    for part in (text or "").split(","):
        left, found, right = part.partition(separator)
        try:
            pairs.append((float(COUNT.convert(left, None, None)), float(COUNT.convert(right, None, None))))
        except click.BadParameter:
            form = "COUNT:MTBF_HOURS" if separator == ":" else "STEPS@BATCH"
            problem = "must be of the form" if not found else "needs two finite numbers greater than 0:"
            raise UserError(f"{option} '{part}': {problem} {form}") from None
    return pairs
