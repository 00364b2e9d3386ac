"""`ridge estimate model|memory|step CONFIG`: what a config holds, needs and takes on each device."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

import click

from ridgeline.cli.answers import Answer, answer_options, print_answers
from ridgeline.cli.options import config_arguments
from ridgeline.cli.quantities import COUNT, WHOLE

if TYPE_CHECKING:
    from ridgeline.configs.cluster import ClusterConfig
    from ridgeline.configs.schema import Config

KAPLAN = "Kaplan et al., arXiv 2001.08361, section 2.1"
OWN = "planner/flops.py; tests hold it to the dots XLA sees"


@click.command()
@config_arguments
@answer_options
def model(config: str, overrides: tuple[str, ...], explain: bool, as_json: bool) -> None:
    """Count the parameters of CONFIG's model and the FLOPs of training on a token, by component.

    The sequence length is data.seq_len. Experts: no model has any, so that all parameters are active.
    """
    from ridgeline.configs.load import load
    from ridgeline.planner.flops import CONVENTION, flops_per_token_6n, train_flops_per_token
    from ridgeline.planner.parameters import count_parameters

    resolved = load(config, overrides).config
    counted, flops = count_parameters(resolved.model), train_flops_per_token(resolved.model, resolved.data.seq_len)
    formulas = {
        "qkv_projections": "6*L*D*(N + 2*K)*H",
        "query_key_products": "6*L*S*N*H, S keys a query sees on average (causal T/2; window W: W - W*W/(2T))",
        "attention_value_products": "6*L*S*N*H",
        "output_projection": "6*L*N*H*D",
        "mlp": "18*L*D*F gated, 12*L*D*F otherwise",
        "unembedding": "6*D*V",
    }
    print_answers(
        [
            Answer("params", counted.total, "", "embedding + positions + attention + mlp + norms + unembedding (once when tied)", OWN),
            Answer("active_params", counted.total, "", "all: no experts"),
            *(Answer(f"params_{name}", value) for name, value in counted.components().items() if value),
            Answer("flops_per_token", flops.total, "FLOP", "the sum of its components", OWN),
            *(Answer(f"flops_{name}", value, "FLOP", formulas[name], OWN) for name, value in flops.components().items()),
            Answer(
                "flops_per_token_every_pair",
                flops.total_full_attention,
                "FLOP",
                "with S = T: every pair of tokens",
                "PaLM, nanoGPT, Torres",
            ),
            Answer("flops_per_token_6n", flops_per_token_6n(resolved.model), "FLOP", "6 * params", KAPLAN),
            Answer("seq_len", resolved.data.seq_len),
            Answer("convention", CONVENTION),
        ],
        as_json=as_json,
        explain=explain,
        more={"params_by_component": counted.components(), "flops_by_component": flops.components()},
    )


@click.command()
@click.argument("config", required=False)
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...")
@click.option("--devices", type=WHOLE, help="Devices of the mesh (default: the product of the mesh's axes).")
@click.option("--cluster", help="Cluster file: capacity, and devices with --nodes.")
@click.option("--nodes", type=WHOLE, help="With --cluster: nodes of the job.")
@click.option("--params", type=COUNT, help="Without CONFIG: parameters; 70B.")
@click.option("--policy", metavar="POLICY", help="With --params: adamw-mixed (default), adamw-float32, lion-mixed, sgd-momentum-mixed.")
@click.option("--zero", type=int, help="With --params: ZeRO stage 0, 1, 2 or 3.")
@click.option("--shards", type=WHOLE, help="With --params: devices the state is sharded over.")
@answer_options
def memory(
    config: str | None,
    overrides: tuple[str, ...],
    devices: int | None,
    cluster: str | None,
    nodes: int | None,
    params: float | None,
    policy: str | None,
    zero: int | None,
    shards: int | None,
    explain: bool,
    as_json: bool,
) -> None:
    """Memory of one device for a step of CONFIG, by component; or, with --params, the classic table of state bytes."""
    from ridgeline.configs.errors import UserError

    classic = {"params": params, "policy": policy, "zero": zero, "shards": shards}
    placed = {"devices": devices, "cluster": cluster, "nodes": nodes}
    if config is None:
        _refuse(placed, "goes with CONFIG")
        if params is None:
            raise UserError("name a CONFIG, or give --params, --zero and --shards")
        _classic_state(params, policy or "adamw-mixed", zero, shards, explain, as_json)
        return
    _refuse(classic, "goes without CONFIG (whose own precision, optimizer and mesh count)")
    _config_memory(config, overrides, devices, cluster, nodes, explain, as_json)


def _refuse(options: Mapping[str, object], why: str) -> None:
    from ridgeline.configs.errors import UserError

    given = next((name for name, value in options.items() if value is not None), None)
    if given is not None:
        raise UserError(f"--{given} {why}")


def _classic_state(params: float, policy: str, zero: int | None, shards: int | None, explain: bool, as_json: bool) -> None:
    from ridgeline.configs.errors import UserError
    from ridgeline.planner.state_memory import state_bytes

    if zero is None or (shards is None and zero > 0):
        missing = [name for name, value in (("--zero", zero), ("--shards", shards)) if value is None]
        raise UserError(f"--params needs {' and '.join(missing)}")
    held = state_bytes(params=params, policy=policy, zero=zero, shards=shards or 1)
    formula = "w*P + g*P + o*P with the optimiser's o (stage 1), the gradients' g (2) and the weights' w (3) divided by SHARDS"
    answers = [
        Answer("state_bytes", held, "bytes", formula, "ZeRO, arXiv 1910.02054, section 3.1 and figure 1"),
        Answer("bytes_per_parameter", held / params, "", "state_bytes / params"),
    ]
    print_answers(answers, as_json=as_json, explain=explain)


def _config_memory(
    config: str, overrides: tuple[str, ...], devices: int | None, cluster: str | None, nodes: int | None, explain: bool, as_json: bool
) -> None:
    from ridgeline.planner.hardware import hardware
    from ridgeline.planner.memory import memory_per_device

    resolved, site, sizes = _place(config, overrides, devices, cluster, nodes)
    device = None if site is None else hardware(site.device)
    need = memory_per_device(resolved, sizes, gpu=device is None or device.tensor_cores)
    capacity = None if site is None or device is None else int(device.memory_bytes * site.utilisation_cap)
    answers = [
        Answer(
            "per_device_bytes", need.total_bytes, "bytes", "the sum of the components at the fullest moment of a step", "planner/memory.py"
        ),
        *(Answer(name, part.bytes, "bytes", part.assumption) for name, part in need.components.items()),
        Answer("fullest_moment", need.moment),
        Answer("mesh", " x ".join(f"{axis}={size}" for axis, size in sizes.items() if size > 1) or "one device"),
    ]
    if capacity is not None:
        answers += [
            Answer(
                "capacity_bytes",
                capacity,
                "bytes",
                "the device's memory * utilisation_cap of the cluster file",
                device.sources["memory"] if device else "",
            ),
            Answer("fits", need.total_bytes <= capacity),
        ]
    if as_json:
        answers = [a for a in answers if a.key not in need.components] + [
            Answer("components", need.bytes_by_component()),
            Answer("assumptions", {name: part.assumption for name, part in need.components.items()}),
        ]
    print_answers(answers, as_json=as_json, explain=explain)


@click.command()
@config_arguments
@click.option("--cluster", required=True, help="Cluster name or file.")
@click.option("--nodes", type=WHOLE, help="Nodes of the job (default: what the mesh needs).")
@click.option("--calibration", help="File of ridge calibrate (default: published measurements).")
@answer_options
def step(
    config: str, overrides: tuple[str, ...], cluster: str, nodes: int | None, calibration: str | None, explain: bool, as_json: bool
) -> None:
    """Time of one optimiser step of CONFIG as it stands, split by the ceiling that holds each part."""
    from ridgeline.planner.calibration import load_calibration
    from ridgeline.planner.hardware import hardware
    from ridgeline.planner.step_time import step_time

    resolved, site, sizes = _place(config, overrides, None, cluster, nodes)
    assert site is not None
    factors = load_calibration(calibration)
    found = step_time(resolved, sizes, site, factors)
    mfu = None if hardware(site.device).nominal else found.mfu
    flops = "model FLOPs (planner.flops) / (step_s * devices * datasheet peak)"
    print_answers(
        [
            Answer(
                "step_s",
                found.step_s,
                "s",
                "compute + device memory + exposed communication + optimiser, or host input",
                "planner/step_time.py",
            ),
            *(
                Answer(f"{name}_s", seconds, "s", CEILINGS.get(name, "exposed communication on this kind of link"))
                for name, seconds in found.breakdown_s.items()
            ),
            Answer("mfu", mfu, "share", flops, "PaLM, arXiv 2204.02311, appendix B"),
            Answer("tokens_per_s", found.tokens_per_s, "tokens/s", "batch_size * seq_len / step_s"),
            Answer("tokens_per_s_per_device", found.tokens_per_s_per_device, "tokens/s", "tokens_per_s / devices"),
            Answer("devices", found.devices),
            Answer("mesh", " x ".join(f"{axis}={size}" for axis, size in sizes.items() if size > 1) or "one device"),
            Answer("calibration", factors.name),
        ],
        as_json=as_json,
        explain=explain,
        more={"breakdown_s": found.breakdown_s},
    )


CEILINGS = {
    "compute": "matmuls and attention at their calibrated rates",
    "hbm": "elementwise work: bytes over the device memory bandwidth reached",
    "optimizer": "gradients, parameters and moments through device memory",
    "bubble": "idle pipeline stages",
    "host_input": "rows the host delivers later than the device could take them",
}


def _place(
    config: str, overrides: tuple[str, ...], devices: int | None, cluster: str | None, nodes: int | None
) -> tuple[Config, ClusterConfig | None, dict[str, int]]:
    """Load a config and a cluster, and put the mesh on the devices asked for."""
    from ridgeline.configs.cluster import load_cluster
    from ridgeline.configs.errors import UserError
    from ridgeline.configs.load import load
    from ridgeline.configs.rules import check_devices

    resolved = load(config, overrides).config
    site = None if cluster is None else load_cluster(cluster).config
    if nodes is not None:
        if site is None or devices is not None:
            raise UserError("--nodes goes with --cluster, and without --devices")
        if site.nodes is not None and nodes > site.nodes:
            raise UserError(f"--nodes {nodes}: {site.name} has {site.nodes}")
        devices = nodes * site.devices_per_node
    if devices is None:
        wild = [axis for axis, size in resolved.mesh.sizes.items() if size == -1]
        if wild:
            how = "--nodes" if site is not None else "--devices, or --cluster and --nodes"
            raise UserError(f"mesh.{wild[0]} is -1, all devices that are left: say how many there are with {how}")
        devices = math.prod(resolved.mesh.sizes.values())
    return resolved, site, check_devices(resolved, devices)
