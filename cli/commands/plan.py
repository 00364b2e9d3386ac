"""`ridge plan CONFIG --cluster C --nodes 1,2,4`: predicted memory, step time and cost of the best layouts, and their bottleneck."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ridgeline.cli.options import FiniteRange, Int32Range, config_arguments, json_option, parse_counts, parse_member_count, software_option
from ridgeline.cli.tables import print_json
from ridgeline.configs.environment import MOST, shortened
from ridgeline.configs.errors import UserError

if TYPE_CHECKING:
    from ridgeline.configs.cluster import ClusterConfig
    from ridgeline.configs.schema import Config
    from ridgeline.planner.economics import Spot
    from ridgeline.planner.plan import Compiler, Plan
    from ridgeline.planner.search import Candidate
GB = 1e9


@click.command()
@config_arguments
@click.option(
    "--cluster",
    "-c",
    "clusters",
    required=True,
    multiple=True,
    help="Cluster: the name of a shipped one, or a YAML file. Repeat to compare.",
)
@click.option(
    "--nodes",
    "-N",
    default="1",
    show_default=True,
    metavar="N[,N...]|A-B",
    help="Node counts to compare. A-B: those between that divide the batch.",
)
@click.option(
    "--objective",
    type=click.Choice(["time", "cost", "efficiency"]),
    default="time",
    show_default=True,
    help="time: earliest end. cost: least money. efficiency: most tokens/s per device.",
)
@click.option("--budget-usd", type=FiniteRange(min=0, min_open=True), help="Maximum cost in USD, including failures.")
@click.option("--deadline-days", type=FiniteRange(min=0, min_open=True), help="Maximum duration in days, including failures.")
@click.option("--device-hours", type=FiniteRange(min=0, min_open=True), help="Maximum device-hours, including failures.")
@click.option(
    "--spot",
    metavar="USD@RATE",
    help="Price of a device-hour, and interruptions per node and day, of machines that may be taken back, such as 1.2@0.5.",
)
@click.option("--tokens", type=FiniteRange(min=1), help="Tokens of the run [default: trainer.steps x batch size x sequence length].")
@click.option("--top", type=Int32Range(min=1), default=3, show_default=True, help="Number of layouts to print.")
@click.option("--calibration", metavar="FILE", help="Calibration file from `ridge calibrate` [default: published rates].")
@software_option
@click.option("--write", metavar="FILE", type=click.Path(path_type=Path), help="Write a config with the best layout, based on CONFIG.")
@click.option(
    "--compile/--no-compile",
    "compiles",
    default=None,
    help="Compile the best layout, and the next if it does not fit [default: above 90% of the memory, where the extra 'aot' is installed].",
)
@click.option("--explain", is_flag=True, help="Also print the formulas of the best layout's memory, step time and cost.")
@json_option
def plan(
    config: str,
    overrides: tuple[str, ...],
    clusters: tuple[str, ...],
    nodes: str,
    objective: str,
    budget_usd: float | None,
    deadline_days: float | None,
    device_hours: float | None,
    spot: str | None,
    tokens: float | None,
    top: int,
    calibration: str | None,
    software: str,
    write: Path | None,
    compiles: bool | None,
    explain: bool,
    as_json: bool,
) -> None:
    """Find the best layout of CONFIG on a cluster: mesh, number of microbatches and rematerialization policy.

    Begins with three sentences: whether it fits and how, what it costs, and the change that saves most. Tables follow: the best layouts
    with memory, step time and cost; the bottleneck; why common alternatives are slower; and the best layout for each node count with its
    parallel efficiency. The global batch size stays as configured. Needs neither a GPU nor JAX. Where the best layout needs more than 90 %
    of the memory (70 % with trained experts) and the packages of `ridge compile` are installed, it is compiled (10 s to a few minutes).
    """
    from ridgeline.configs.cluster import load_cluster
    from ridgeline.configs.load import load
    from ridgeline.planner.calibration import load_calibration
    from ridgeline.planner.formulas import formulas
    from ridgeline.planner.plan import best_first, make_plan, plan_json
    from ridgeline.planner.search import Limits

    resolved = load(config, overrides).config
    rates = load_calibration(calibration, software)
    sites = {name: load_cluster(_one_cluster(name)).config for name in dict.fromkeys(clusters)}
    machines = None if spot is None else _spot(spot)
    plans: dict[str, Plan] = {}
    refused: dict[str, str] = {}
    for name, site in sites.items():
        try:
            plans[name] = make_plan(
                resolved,
                site,
                rates,
                node_counts(nodes, resolved, site),
                tokens=tokens,
                objective=objective,  # type: ignore[arg-type]  # click.Choice allows only these literals
                limits=Limits(budget_usd, deadline_days, device_hours),
                top=top,
                compiler=None if compiles is False else layout_compiler(resolved, site, required=compiles is True),
                compiled_above=0.0 if compiles else None,
                spot=machines,
            )
        except UserError as error:
            refused[name] = str(error)
    if not plans and len(reasons := set(refused.values())) == 1:
        raise UserError(*reasons)
    if not plans:
        raise UserError("no cluster can run this: " + "; ".join(f"{name}: {reason}" for name, reason in refused.items()))
    order = best_first(plans)
    made = plans[order[0]]
    if write is not None:
        write_layout(write, config, overrides, made)
    explained = formulas(made) if explain else None
    if as_json:
        document = plan_json(made) if len(sites) == 1 else {"plans": [plan_json(plans[name]) for name in order], "refused": refused}
        print_json(document if explained is None else document | {"formulas": explained.to_json()})
        return
    from ridgeline.cli.printing.plan import print_comparison, print_formulas, print_plan

    if len(sites) > 1:
        print_comparison([plans[name] for name in order], refused)
    print_plan(made)
    if explained is not None:
        print_formulas(explained)
    if write is not None:
        print(f"\nwritten: {write} (ridge compile {write} --cluster {order[0]} --nodes {made.best[0].nodes} verifies it)")


def _spot(text: str) -> Spot:
    """Parse --spot. Raises UserError."""
    from ridgeline.planner.economics import Spot

    try:
        price, rate = (float(part) for part in text.split("@"))
    except ValueError:
        price = rate = math.nan
    if not (0 < price < math.inf and 0 <= rate < math.inf):
        raise UserError(f"--spot {text}: must be USD@RATE, such as 1.2@0.5: $1.20 per device-hour, one interruption of a node in two days")
    return Spot(price, rate)


def _one_cluster(name: str) -> str:
    """Return the name of one cluster. Raises UserError for several in one: a run has nodes of one kind."""
    if "," in name and not Path(name).exists():
        first, *others = name.split(",")
        again = " ".join(f"-c {other.strip()}" for other in (first, *others))
        raise UserError(f"--cluster {name}: a run uses nodes of one kind; compare clusters with {again}")
    return name


def layout_compiler(config: Config, cluster: ClusterConfig, *, required: bool) -> Compiler | None:
    """Return what compiles a layout of a config as a run on the cluster would; None where packages are missing.

    Raises UserError for missing packages where it is `required`.
    """
    from dataclasses import replace

    from ridgeline.cli.progress import print_progress
    from ridgeline.launch.environment import run_flags
    from ridgeline.trainer.aot.compile import Request, check_packages, compile_ahead

    try:
        check_packages()
    except UserError:
        if required:
            raise
        return None

    def needed_bytes(candidate: Candidate) -> int:
        layout, memory = candidate.layout, candidate.memory
        planned = f"planned {memory.total_bytes / GB:.1f} GB"
        print_progress(f"compiling {layout.text()}, {layout.accumulation} x, {layout.remat.policy} for {cluster.device} ({planned})")
        chosen = layout.apply(config)
        flags, level = run_flags(chosen, cluster.device)
        compiled = compile_ahead(replace(Request.on(chosen, cluster, candidate.nodes), xla_flags=flags, optimization_level=level))
        return compiled.allocated_bytes + memory.reserve_bytes

    return needed_bytes


def node_counts(text: str, config: Config, cluster: ClusterConfig) -> list[int]:
    """Return the node counts of `--nodes`: a list, or a range A-B, of which those whose devices divide the rows of the batch.

    Raises UserError for anything else, and for a range without such a count.
    """
    from ridgeline.planner.layouts import dividing_nodes

    first, dash, last = text.partition("-")
    if not dash:
        return parse_counts("--nodes", text)
    least, most = parse_member_count(first), parse_member_count(last)
    if least is None or most is None:
        raise UserError(f"--nodes {shortened(text)}: must be A-B with whole numbers from 1 to {MOST}, such as 1-64")
    found = sorted(nodes for nodes in dividing_nodes(config, cluster.devices_per_node, most) if nodes >= least)
    if not found:
        raise UserError(f"--nodes {text}: no number of nodes in this range divides data.batch_size={config.data.batch_size}")
    return found


def write_layout(path: Path, config: str, overrides: tuple[str, ...], made: Plan) -> None:
    """Write a config file with CONFIG as its base, the overrides of the command line, and the best layout."""
    from ridgeline.configs.dump import layout_yaml

    if path.exists():
        raise UserError(f"--write {path}: exists already; choose another name or remove it")
    best = made.best[0]
    layout = best.layout
    settings: dict[str, Any] = {
        "mesh": {**layout.sizes, **({"zero_stage": layout.zero_stage} if layout.zero_stage else {})},
        "trainer": {"accumulation": layout.accumulation},
        "compute": {"remat": {"policy": layout.remat.policy, "names": list(layout.remat.names)}},
    }
    notes = [
        f"Layout for {best.nodes} node{'s' if best.nodes != 1 else ''} of {made.cluster.name} ({best.step.devices} devices),"
        f" planned with {made.calibration.name}.",
        f"Predicted: {best.step.step_s:.4g} s per step, {best.step.tokens_per_s_per_device:,.0f} tokens/s per device,"
        f" MFU {best.step.mfu:.1%}, {best.memory.total_bytes / GB:.1f} GB per device.",
    ]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(layout_yaml(config, path.parent, overrides, settings, notes))
    except OSError as error:
        raise UserError(f"--write {path}: {error.strerror}") from error
