"""`ridge estimate model|memory|step CONFIG`: parameters and FLOPs, memory per device, and step time of a config."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

import click

from ridgeline.cli.options import COUNT, WHOLE, Int32Range, complete_key, config_arguments, software_option
from ridgeline.cli.printing.estimate import Result, formula_results, print_results, print_symbols, result_options

if TYPE_CHECKING:
    from ridgeline.configs.cluster import ClusterConfig
    from ridgeline.configs.schema import Config

KAPLAN = "Kaplan et al., arXiv 2001.08361, section 2.1"
OWN = "planner/flops.py; a test compares it with the dot operations in XLA's program"


@click.command()
@config_arguments
@result_options
def model(config: str, overrides: tuple[str, ...], explain: bool, as_json: bool) -> None:
    """Count the parameters of CONFIG's model and the FLOPs of training on a token, by component.

    The sequence length is data.seq_len. Of a mixture of experts, active parameters and FLOPs are those that process one token.
    """
    from ridgeline.configs.load import load
    from ridgeline.planner.adapters import adapter_parameters
    from ridgeline.planner.flops import CONVENTION, config_flops_per_token, flops_per_token_6n
    from ridgeline.planner.parameters import count_parameters

    resolved = load(config, overrides).config
    counted, flops, adapters = count_parameters(resolved.model), config_flops_per_token(resolved), adapter_parameters(resolved)
    formulas = {
        "qkv_projections": "6*L*D*(N + 2*K)*H",
        "query_key_products": "6*L*S*N*H, S: mean keys per query (causal T/2; window W: W - W*W/(2T))",
        "attention_value_products": "6*L*S*N*H",
        "output_projection": "6*L*N*H*D",
        "mlp": "18*L*D*F gated, 12*L*D*F otherwise; of experts those of one token, and the router 6*L*D*E",
        "unembedding": "6*D*V",
        "mtp": "of each module of multi-token prediction: 12*D*D, 6*D*V, and a layer",
    }
    if adapters:
        less = " (with adapters 2/3 of it: frozen weights have no gradient)"
        formulas = {name: text + (less if "products" not in name else "") for name, text in formulas.items()}
        formulas["adapters"] = "6*Z*(I + O) of each matrix with an adapter, of I inputs and O outputs"
    print_results(
        [
            Result("params", counted.total, "", "embedding + positions + attention + mlp + norms + unembedding (once when tied)", OWN),
            Result(
                "active_params",
                counted.active,
                "",
                "without the experts a token does not choose" if resolved.model.moe else "all: no experts",
            ),
            *(Result(f"params_{name}", value) for name, value in counted.components().items() if value),
            *([Result("params_adapters", adapters, "", "trained; all other parameters are frozen", OWN)] if adapters else []),
            Result("flops_per_token", flops.total, "FLOP", "the sum of its components", OWN),
            *(Result(f"flops_{name}", value, "FLOP", formulas[name], OWN) for name, value in flops.components().items()),
            Result(
                "flops_per_token_every_pair",
                flops.total_full_attention,
                "FLOP",
                "with S = T: all pairs of tokens",
                "PaLM, nanoGPT, Torres",
            ),
            Result("flops_per_token_6n", flops_per_token_6n(resolved.model), "FLOP", "6 * active_params", KAPLAN),
            Result("seq_len", resolved.data.seq_len),
            Result("convention", CONVENTION),
        ],
        as_json=as_json,
        explain=explain,
        more={"params_by_component": counted.components(), "flops_by_component": flops.components()},
    )


@click.command()
@click.argument("config", required=False)
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...", shell_complete=complete_key)
@click.option("--devices", type=WHOLE, help="Devices of the mesh [default: the product of the mesh axes].")
@click.option("--cluster", help="Cluster, for the memory capacity, and with --nodes the number of devices.")
@click.option("--nodes", type=WHOLE, help="With --cluster: number of nodes.")
@click.option("--params", type=COUNT, help="Without CONFIG: number of parameters, such as 70B.")
@click.option(
    "--policy",
    metavar="POLICY",
    help="With --params: precision policy adamw-mixed (default), adamw-float32, lion-mixed, sgd-momentum-mixed.",
)
@click.option("--zero", type=Int32Range(), help="With --params: ZeRO stage 0, 1, 2 or 3.")
@click.option("--shards", type=WHOLE, help="With --params: number of devices that shard the state.")
@result_options
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
    """Estimate the memory of one device for a train step of CONFIG, by component; or, with --params, the ZeRO state bytes."""
    from ridgeline.configs.errors import UserError

    classic = {"params": params, "policy": policy, "zero": zero, "shards": shards}
    placed = {"devices": devices, "cluster": cluster, "nodes": nodes}
    if config is None:
        _refuse(placed, "needs CONFIG")
        if params is None:
            raise UserError("give a CONFIG, or --params, --zero and --shards")
        _classic_state(params, policy or "adamw-mixed", zero, shards, explain, as_json)
        return
    _refuse(classic, "cannot be used with CONFIG, which defines precision, optimizer and mesh")
    _config_memory(config, overrides, devices, cluster, nodes, explain, as_json)


def _refuse(options: Mapping[str, object], why: str) -> None:
    from ridgeline.configs.errors import UserError

    given = next((name for name, value in options.items() if value is not None), None)
    if given is not None:
        raise UserError(f"--{given} {why}")


def _classic_state(params: float, policy: str, zero: int | None, shards: int | None, explain: bool, as_json: bool) -> None:
    from ridgeline.configs.errors import UserError
    from ridgeline.planner.calculators.state_memory import state_bytes

    if zero is None or (shards is None and zero > 0):
        missing = [name for name, value in (("--zero", zero), ("--shards", shards)) if value is None]
        raise UserError(f"--params needs {' and '.join(missing)}")
    held = state_bytes(params=params, policy=policy, zero=zero, shards=shards or 1)
    formula = "w*P + g*P + o*P with the optimizer's o (stage 1), the gradients' g (2) and the weights' w (3) divided by SHARDS"
    results = [
        Result("state_bytes", held, "bytes", formula, "ZeRO, arXiv 1910.02054, section 3.1 and figure 1"),
        Result("bytes_per_parameter", held / params, "", "state_bytes / params"),
    ]
    print_results(results, as_json=as_json, explain=explain)


def _config_memory(
    config: str, overrides: tuple[str, ...], devices: int | None, cluster: str | None, nodes: int | None, explain: bool, as_json: bool
) -> None:
    from ridgeline.planner.formulas import memory_formulas
    from ridgeline.planner.hardware import hardware
    from ridgeline.planner.memory import memory_per_device

    resolved, site, sizes = _place(config, overrides, devices, cluster, nodes)
    device = None if site is None else hardware(site.device)
    need = memory_per_device(resolved, sizes, gpu=device is None or device.tensor_cores, device=device)
    capacity = None if site is None or device is None else int(device.memory_bytes * site.utilisation_cap)
    components, symbols = memory_formulas(resolved, sizes, gpu=device is None or device.tensor_cores, device=device)
    results = [
        Result("per_device_bytes", need.total_bytes, "bytes", "sum of the components at peak memory", "planner/memory.py"),
        *formula_results(components),
        Result("fullest_moment", need.peak_at, "", "the point of the step with the largest sum of components"),
        Result("mesh", " x ".join(f"{axis}={size}" for axis, size in sizes.items() if size > 1) or "one device"),
    ]
    if capacity is not None:
        results += [
            Result(
                "capacity_bytes",
                capacity,
                "bytes",
                "the device's memory * utilisation_cap of the cluster file",
                device.sources["memory"] if device else "",
            ),
            Result("fits", need.total_bytes <= capacity),
        ]
    if as_json:
        results = [a for a in results if a.key not in need.components] + [
            Result("components", need.bytes_by_component()),
            Result("assumptions", {name: part.assumption for name, part in need.components.items()}),
        ]
        if explain:
            results += [Result("formulas", {formula.name: formula.text or formula.meaning for formula in components})]
            results += [Result("symbols", {symbol.name: {"value": symbol.value, "meaning": symbol.meaning} for symbol in symbols})]
    print_results(results, as_json=as_json, explain=explain)
    if explain and not as_json:
        print()
        print_symbols(symbols)


@click.command()
@config_arguments
@click.option("--cluster", required=True, help="Cluster: the name of a shipped one, or a YAML file.")
@click.option("--nodes", type=WHOLE, help="Number of nodes [default: as many as the mesh needs].")
@click.option("--calibration", help="Calibration file from `ridge calibrate` [default: published rates].")
@software_option
@result_options
def step(
    config: str,
    overrides: tuple[str, ...],
    cluster: str,
    nodes: int | None,
    calibration: str | None,
    software: str,
    explain: bool,
    as_json: bool,
) -> None:
    """Estimate the time of one train step of CONFIG with its own layout, by the resource that limits each part."""
    from ridgeline.planner.calibration import load_calibration
    from ridgeline.planner.formulas import LINK_TERM, STEP_TERMS
    from ridgeline.planner.hardware import hardware
    from ridgeline.planner.memory import memory_per_device
    from ridgeline.planner.ranges import step_range
    from ridgeline.planner.step_time import step_time

    resolved, site, sizes = _place(config, overrides, None, cluster, nodes)
    assert site is not None
    factors = load_calibration(calibration, software)
    found = step_time(resolved, sizes, site, factors)
    device = hardware(site.device)
    need = memory_per_device(resolved, sizes, gpu=device.tensor_cores, device=device)
    capacity = int(device.memory_bytes * site.utilisation_cap)
    if need.total_bytes > capacity:
        click.echo(
            f"WARNING: this layout does not fit: it needs {need.total_bytes / 1e9:.1f} GB of the {capacity / 1e9:.1f} GB that a run may use"
            " (ridge estimate memory); the time is that of a device with enough memory",
            err=True,
        )
    around = step_range(resolved, device, factors.software)
    low_s, high_s = around.around(found.step_s)
    low_rate, high_rate = around.around_rate(found.tokens_per_s_per_device)
    mfu = None if device.nominal else found.mfu
    flops = "model FLOPs (planner.flops) / (step_s * devices * datasheet peak)"
    print_results(
        [
            Result(
                "step_s",
                found.step_s,
                "s",
                "compute + device memory + exposed communication + optimizer, or host input",
                "planner/step_time.py",
            ),
            Result("step_s_low", low_s, "s", "step_s * (1 - range)", around.basis),
            Result("step_s_high", high_s, "s", "step_s * (1 + range)", around.basis),
            *(Result(f"{name}_s", seconds, "s", STEP_TERMS.get(name, LINK_TERM)) for name, seconds in found.breakdown_s.items()),
            Result("mfu", mfu, "share", flops, "PaLM, arXiv 2204.02311, appendix B"),
            Result("tokens_per_s", found.tokens_per_s, "tokens/s", "batch_size * seq_len / step_s"),
            Result("tokens_per_s_per_device", found.tokens_per_s_per_device, "tokens/s", "tokens_per_s / devices"),
            Result("tokens_per_s_per_device_low", low_rate, "tokens/s", "tokens_per_s_per_device / (1 + range)", around.basis),
            Result("tokens_per_s_per_device_high", high_rate, "tokens/s", "tokens_per_s_per_device / (1 - range)", around.basis),
            Result("range", around.share, "share", around.basis),
            Result("devices", found.devices),
            Result("mesh", " x ".join(f"{axis}={size}" for axis, size in sizes.items() if size > 1) or "one device"),
            Result("fits", need.total_bytes <= capacity, "", "memory per device (ridge estimate memory) <= usable memory"),
            Result("calibration", factors.name),
            Result("software", factors.software.name),
        ],
        as_json=as_json,
        explain=explain,
        more={"breakdown_s": found.breakdown_s},
    )


def _place(
    config: str, overrides: tuple[str, ...], devices: int | None, cluster: str | None, nodes: int | None
) -> tuple[Config, ClusterConfig | None, dict[str, int]]:
    """Load a config and a cluster; return them with the mesh axis sizes on the requested devices. Raises UserError."""
    from ridgeline.configs.cluster import load_cluster
    from ridgeline.configs.errors import UserError
    from ridgeline.configs.load import load
    from ridgeline.configs.rules import check_devices

    resolved = load(config, overrides).config
    site = None if cluster is None else load_cluster(cluster).config
    if nodes is not None:
        if site is None or devices is not None:
            raise UserError("--nodes needs --cluster and excludes --devices")
        if site.nodes is not None and nodes > site.nodes:
            raise UserError(f"--nodes {nodes}: {site.name} has only {site.nodes} nodes")
        devices = nodes * site.devices_per_node
    if devices is None:
        wild = [axis for axis, size in resolved.mesh.sizes.items() if size == -1]
        if wild:
            how = "--nodes" if site is not None else "--devices, or --cluster and --nodes"
            raise UserError(f"mesh.{wild[0]} is -1 (all remaining devices): give the number of devices with {how}")
        devices = math.prod(resolved.mesh.sizes.values())
    return resolved, site, check_devices(resolved, devices)
