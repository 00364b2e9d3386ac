"""`ridge estimate collective|run|pipeline|checkpoint|ridge|batch`: the calculators that need no config."""

from __future__ import annotations

import click

from ridgeline.cli.answers import Answer, answer_options, print_answers
from ridgeline.cli.quantities import BYTE, BYTES_PER_S, COUNT, FLOP_PER_S, SECONDS, SECONDS_OR_ZERO, SHARE, USD, WATT, WHOLE

KAPLAN = "Kaplan et al., arXiv 2001.08361, section 2.1"
NCCL_TESTS = "NCCL tests, doc/PERFORMANCE.md"
SCALING_BOOK = "JAX scaling book, chapters Training and GPUs"


@click.command()
@click.option("--op", required=True, metavar="OP", help="all-reduce, all-gather, reduce-scatter, all-to-all or point-to-point.")
@click.option("--bytes", "size", type=BYTE, required=True, help="The full tensor (all-to-all, point-to-point: that of one device); 58MB.")
@click.option("--devices", type=WHOLE, required=True, help="Devices that take part.")
@click.option("--latency-s", type=SECONDS_OR_ZERO, help="One hop of a small message.")
@click.option("--bandwidth", type=BYTES_PER_S, help="Bytes/s of one device in ONE direction; 450GB/s.")
@click.option("--algorithm", help="ring (default), tree, recursive-halving. With --cluster: what a library would choose.")
@click.option("--nodes", type=WHOLE, help="Hierarchical over this many nodes of DEVICES/NODES devices.")
@click.option("--node-latency-s", type=SECONDS_OR_ZERO, help="One hop between nodes.")
@click.option("--node-bandwidth", type=BYTES_PER_S, help="Bytes/s between nodes of one DEVICE in one direction.")
@click.option("--cluster", help="Take the links of a cluster file instead, with achieved bandwidths.")
@click.option("--stride", type=WHOLE, default=1, show_default=True, help="With --cluster: places between neighbours in the device order.")
@click.option("--calibration", help="With --cluster: a file of ridge calibrate.")
@answer_options
def collective(
    op: str,
    size: float,
    devices: int,
    latency_s: float | None,
    bandwidth: float | None,
    algorithm: str | None,
    nodes: int | None,
    node_latency_s: float | None,
    node_bandwidth: float | None,
    cluster: str | None,
    stride: int,
    calibration: str | None,
    explain: bool,
    as_json: bool,
) -> None:
    """Time of one collective by the alpha-beta model, on one level of links or over nodes."""
    from ridgeline.cli.estimate_links import cluster_group, two_level_group
    from ridgeline.configs.errors import UserError
    from ridgeline.planner.communication import time_s

    if devices < 2:
        raise UserError(f"--devices {devices}: a collective needs at least 2 devices")
    by_hand = (latency_s, bandwidth, nodes, node_latency_s, node_bandwidth)
    if cluster is not None:
        if any(value is not None for value in by_hand):
            raise UserError("--cluster has its own links: leave out --latency-s, --bandwidth and --node...")
        cost = time_s(op, size, cluster_group(cluster, calibration, stride, devices), algorithm)
    else:
        if calibration is not None or stride != 1:
            raise UserError("--calibration and --stride go with --cluster")
        if latency_s is None or bandwidth is None:
            raise UserError("give --latency-s and --bandwidth, or --cluster")
        group = two_level_group(devices, latency_s, bandwidth, nodes, node_latency_s, node_bandwidth)
        wanted = algorithm or "ring"
        if len(group.spans) > 1 and wanted in PHASES:
            cost = time_s(op, size, group, "hierarchical", phases=wanted)
        else:
            cost = time_s(op, size, group, wanted)
    formula, source = FORMULAS[op, cost.algorithm]
    print_answers(
        [
            Answer("seconds", cost.seconds, "s", formula, source),
            Answer("algorithm_bandwidth", cost.algorithm_bandwidth, "bytes/s", "bytes / seconds", NCCL_TESTS),
            Answer("bus_bandwidth", cost.bus_bandwidth, "bytes/s", BUS.get(op, BUS["all-gather"]), NCCL_TESTS),
            Answer("algorithm", cost.algorithm),
            Answer("bottleneck_link", cost.bottleneck_link),
        ],
        as_json=as_json,
        explain=explain,
        more={"by_link": cost.by_link},
    )


PHASES = ("ring", "tree", "recursive-halving")
NCCL = "NCCL, src/graph/tuning.cc; nccl-tests issue 160"
SANDERS = "Sanders, Speck, Träff, Parallel Computing 35, 2009, as in NCCL since 2.4"
MPICH = "Thakur, Rabenseifner, Gropp, Optimization of collective communication operations in MPICH, IJHPCA 19(1), 2005"
_ONE_WAY = "(p-1)*latency + (p-1)/p * bytes/bandwidth"
FORMULAS = {
    **{(op, "ring"): (_ONE_WAY, MPICH) for op in ("all-gather", "reduce-scatter", "all-to-all")},
    **{(op, "recursive-halving"): ("log2(p)*latency + (p-1)/p * bytes/bandwidth", MPICH) for op in ("all-gather", "reduce-scatter")},
    ("all-reduce", "ring"): ("2*(p-1)*latency + 2*(p-1)/p * bytes/bandwidth", MPICH),
    ("all-reduce", "recursive-halving"): ("2*log2(p)*latency + 2*(p-1)/p * bytes/bandwidth", MPICH),
    ("all-reduce", "tree"): ("2*log2(p)*(latency + bytes/bandwidth)", MPICH),
    ("all-reduce", "in-switch"): ("2*latency + bytes/bandwidth: every device sends its tensor once, the switch adds up", "NVLink SHARP"),
    ("all-reduce", "hierarchical"): (
        "reduce-scatter(G, n) + all-reduce(M, n/G) + all-gather(G, n), G devices per node, M nodes, n bytes",
        SCALING_BOOK,
    ),
    ("all-gather", "hierarchical"): ("all-gather(M, n/G) + all-gather(G, n), G devices per node, M nodes, n bytes", SCALING_BOOK),
    ("reduce-scatter", "hierarchical"): ("reduce-scatter(G, n) + reduce-scatter(M, n/G)", SCALING_BOOK),
    **{
        (op, "rail-ring"): ("all hops + max over levels of rounds*(p-1)/p * n/q / bandwidth, q devices inside the level", NCCL)
        for op in ("all-reduce", "all-gather", "reduce-scatter")
    },
    ("all-reduce", "double-tree"): ("2*(G-1) + 2*log2(M) hops + max(transfer inside, 2*n/G / bandwidth outside)", SANDERS),
    ("all-to-all", "hierarchical"): (
        "inside: (G-1)*latency + (G-1)/p * n/bandwidth; outside: (p-G)*latency + (p-G)/p * n/bandwidth",
        "each pair of devices exchanges n/p bytes over the innermost level that joins it",
    ),
    ("point-to-point", "hierarchical"): ("latency + bytes/bandwidth of the outermost link", MPICH),
    ("point-to-point", "ring"): ("latency + bytes/bandwidth", MPICH),
}
BUS = {
    "all-reduce": "algorithm_bandwidth * 2*(p-1)/p",
    "all-gather": "algorithm_bandwidth * (p-1)/p",
    "point-to-point": "algorithm_bandwidth",
}


@click.command()
@click.option("--params", type=COUNT, required=True, help="Active parameters; 70B.")
@click.option("--tokens", type=COUNT, help="Of the whole run; 2T. Without: only rates.")
@click.option("--devices", type=WHOLE, required=True, help="GPUs.")
@click.option("--peak-flops", type=FLOP_PER_S, required=True, help="Dense datasheet peak of ONE device for the dtype used; 989T.")
@click.option("--mfu", type=SHARE, help="Model FLOPs utilisation; 0.45 or 45%.")
@click.option("--tokens-per-s", type=COUNT, help="Measured, of all devices together: gives the MFU instead.")
@click.option("--device-hours", type=COUNT, help="Spent by a past run: gives the MFU instead.")
@click.option("--flops-per-token", type=COUNT, help="In training; default 6 * PARAMS.")
@click.option("--price-per-hour", type=USD, help="Of one device.")
@click.option("--device-power-w", type=WATT, help="Of one device, for the energy; 700.")
@answer_options
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
    """Time and money of a run from its MFU, or its MFU from tokens per second or device-hours."""
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
    print_answers(
        [
            Answer("flops_per_token", cost.flops_per_token, "FLOP", "6 * params, unless given", KAPLAN),
            Answer("mfu", cost.mfu, "share", "tokens_per_s * flops_per_token / (devices * peak_flops)", palm),
            Answer("tokens_per_s", cost.tokens_per_s, "tokens/s", "devices * peak_flops * mfu / flops_per_token", palm),
            Answer("tokens_per_s_per_device", cost.tokens_per_s_per_device, "tokens/s", "tokens_per_s / devices"),
            Answer("seconds", cost.seconds, "s", "tokens / tokens_per_s"),
            Answer("days", cost.days, "days", "seconds / 86400"),
            Answer("device_hours", cost.device_hours, "h", "seconds * devices / 3600"),
            Answer("cost_usd", cost.cost_usd, "USD", "device_hours * price_per_hour; restarts and idle time come on top"),
            Answer("energy_kwh", cost.energy_kwh, "kWh", "device_hours * device_power_w / 1000; devices alone"),
        ],
        as_json=as_json,
        explain=explain,
    )


@click.command()
@click.option("--stages", type=WHOLE, required=True, help="Pipeline stages.")
@click.option("--microbatches", type=WHOLE, required=True, help="Per step.")
@click.option("--interleave", type=WHOLE, default=1, show_default=True, help="Chunks of layers per stage.")
@click.option("--forward-s", type=SECONDS, required=True, help="One microbatch through one stage (all its chunks).")
@click.option("--backward-s", type=SECONDS_OR_ZERO, required=True, help="The same backward.")
@answer_options
def pipeline(stages: int, microbatches: int, interleave: int, forward_s: float, backward_s: float, explain: bool, as_json: bool) -> None:
    """Step time and bubble of a pipeline (1F1B, GPipe; interleaved with --interleave)."""
    from ridgeline.planner.calculators.pipeline_schedule import pipeline_estimate

    step = pipeline_estimate(stages=stages, microbatches=microbatches, interleave=interleave, forward_s=forward_s, backward_s=backward_s)
    narayanan = "Narayanan et al., arXiv 2104.04473, section 2.2; GPipe, arXiv 1811.06965, section 2.3"
    print_answers(
        [
            Answer("seconds", step.seconds, "s", "(m + (p-1)/v) * (forward + backward)", narayanan),
            Answer("bubble_fraction", step.bubble_fraction, "share", "(p-1) / (v*m + p-1), of the total time", narayanan),
            Answer("efficiency", step.efficiency, "share", "1 - bubble_fraction"),
            Answer("bubble_over_ideal", step.bubble_over_ideal, "share", "(p-1) / (v*m), of the time without a bubble", narayanan),
            Answer("microbatches_in_flight", step.microbatches_in_flight, "", "min(p, m) with 1F1B; GPipe holds all m", narayanan),
        ],
        as_json=as_json,
        explain=explain,
    )


@click.command()
@click.option("--save-s", type=SECONDS, required=True, help="Time training stands still for a save.")
@click.option("--mtbf-s", type=SECONDS, help="Mean time between failures of the whole job.")
@click.option("--fleet", metavar="COUNT:MTBF_HOURS[,...]", help="Parts that can each stop the job, as in 128:3692,16:20000.")
@answer_options
def checkpoint(save_s: float, mtbf_s: float | None, fleet: str | None, explain: bool, as_json: bool) -> None:
    """Best interval between checkpoints, and the share of time that saves and repeated work cost."""
    from ridgeline.configs.errors import UserError
    from ridgeline.planner.calculators.failures import checkpoint_plan, fleet_mtbf_s

    if (mtbf_s is None) == (fleet is None):
        raise UserError("give either --mtbf-s or --fleet")
    plan = checkpoint_plan(save_s=save_s, mtbf_s=mtbf_s if mtbf_s is not None else fleet_mtbf_s(_pairs("--fleet", fleet, ":")))
    young = "Young, A first order approximation to the optimum checkpoint interval, CACM 17(9), 1974"
    print_answers(
        [
            Answer("mtbf_s", plan.mtbf_s, "s", "1 / sum(count / mtbf) over the parts of the fleet; rates add"),
            Answer("interval_s", plan.interval_s, "s", "sqrt(2 * save_s * mtbf_s)", young),
            Answer("overhead_fraction", plan.overhead_fraction, "share", "save_s/interval_s + interval_s/(2*mtbf_s)", young),
        ],
        as_json=as_json,
        explain=explain,
    )


@click.command()
@click.option("--peak-flops", type=FLOP_PER_S, required=True, help="Dense peak of one device; 989T.")
@click.option("--bandwidth", type=BYTES_PER_S, required=True, help="Of a memory, or of a link in ONE direction; 450GB/s.")
@click.option("--axis", metavar="AXIS", help="data, tensor or data-tensor; without: a plain roofline.")
@click.option("--mlp-width", type=WHOLE, help="F, for a tensor axis.")
@click.option("--devices", type=WHOLE, help="Of the data axis, for its factor (X-1)/X.")
@click.option("--experts", type=WHOLE, default=1, show_default=True, help="Of a mixture of experts, for a data axis.")
@click.option("--active-experts", type=WHOLE, default=1, show_default=True, help="Experts a token uses.")
@answer_options
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
    """Where computing and moving balance: intensity of a roofline, tokens per device, size of a tensor axis."""
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
    print_answers(
        [
            Answer("intensity", found.intensity, "FLOP/byte", "peak_flops / bandwidth", "Williams et al., Roofline, CACM 52(4), 2009"),
            Answer("threshold", found.threshold, "", formulas[axis], SCALING_BOOK),
            Answer("meaning", found.meaning),
        ],
        as_json=as_json,
        explain=explain,
    )


@click.command()
@click.option("--s-min", type=COUNT, help="Fewest steps, at a batch without bound.")
@click.option("--b-crit", type=COUNT, help="Critical batch size, in the unit of --batch.")
@click.option("--batch", "size", type=COUNT, help="Batch size.")
@click.option("--fit", metavar="STEPS@BATCH,...", help="Runs that reached the same goal: fit the critical batch size to them.")
@answer_options
def batch(s_min: float | None, b_crit: float | None, size: float | None, fit: str | None, explain: bool, as_json: bool) -> None:
    """Steps and examples at a batch size, or the critical batch size from measured runs."""
    from ridgeline.configs.errors import UserError
    from ridgeline.planner.calculators.batch_size import batch_estimate, fit_critical_batch

    mccandlish = "McCandlish et al., arXiv 1812.06162, sections 2.3 and 2.4"
    law = {"s-min": s_min, "b-crit": b_crit, "batch": size}
    if fit is not None:
        extra = [f"--{name}" for name, value in law.items() if value is not None]
        if extra:
            raise UserError(f"--fit works out the law itself: leave out {', '.join(extra)}")
        fitted = fit_critical_batch(_pairs("--fit", fit, "@"))
        print_answers(
            [
                Answer("b_crit", fitted.b_crit, "", "slope / s_min of steps over 1/batch", mccandlish),
                Answer("s_min", fitted.s_min, "steps", "least relative squares of steps = s_min * (1 + b_crit/batch)", mccandlish),
                Answer("residuals", list(fitted.residuals), "", "measured - fitted steps"),
                Answer("relative_residuals", list(fitted.relative_residuals), "share", "residual / measured steps"),
                Answer("misfit", fitted.misfit, "", "a relative residual above 5 %, or steps that do not fall with the batch"),
            ],
            as_json=as_json,
            explain=explain,
        )
        return
    if s_min is None or b_crit is None or size is None:
        missing = [f"--{name}" for name, value in law.items() if value is None]
        raise UserError(f"give --fit, or all of --s-min, --b-crit and --batch (missing: {', '.join(missing)})")
    found = batch_estimate(s_min=s_min, b_crit=b_crit, batch=size)
    print_answers(
        [
            Answer("steps", found.steps, "", "s_min * (1 + b_crit/batch)", mccandlish),
            Answer("examples", found.examples, "", "steps * batch = s_min * (batch + b_crit)", mccandlish),
            Answer("steps_over_min", found.steps_over_min, "", "1 + b_crit/batch", mccandlish),
            Answer("examples_over_min", found.examples_over_min, "", "1 + batch/b_crit", mccandlish),
        ],
        as_json=as_json,
        explain=explain,
    )


def _pairs(option: str, text: str | None, separator: str) -> list[tuple[float, float]]:
    """Read `A<separator>B,...` as pairs of numbers."""
    from ridgeline.configs.errors import UserError

    pairs = []
    for part in (text or "").split(","):
        left, found, right = part.partition(separator)
        try:
            pairs.append((float(COUNT.convert(left, None, None)), float(COUNT.convert(right, None, None))))
        except click.BadParameter:
            form = "COUNT:MTBF_HOURS" if separator == ":" else "STEPS@BATCH"
            problem = "is not of the form" if not found else "needs two finite numbers greater than 0:"
            raise UserError(f"{option} '{part}': {problem} {form}") from None
    return pairs
