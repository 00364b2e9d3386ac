"""`ridge init`: writes a commented config for a chosen model, corpus and cluster, with the layout the planner predicts to be fastest."""

from __future__ import annotations

import sys
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ridgeline.cli.options import MEMBERS
from ridgeline.configs.errors import UserError, unknown_name

if TYPE_CHECKING:
    from ridgeline.configs.cluster import ResolvedCluster
    from ridgeline.configs.schema import Config, Section
    from ridgeline.planner.plan import Plan

TOKENS_PER_STEP = 2**19
"""Global batch of a new config on GPUs: half a million tokens, the batch of most published models of 1B to 8B parameters."""
CPU_TOKENS_PER_STEP = 2**11
LONGEST_ROW = 4096
MOST_DEVICES = 8192
"""Largest number of devices that is tried when `--nodes` is missing."""
WIDTH = 110
ALIGNED = 40


@click.command()
@click.option("--model", "-m", help="A shipped model, such as llama-3.2-1b.")
@click.option("--data", "-d", type=click.Path(path_type=Path), help="Directory written by `ridge data prepare`.")
@click.option("--cluster", "-c", help="A shipped cluster, such as dgx-h100, or a YAML file.")
@click.option("--nodes", "-N", type=MEMBERS, help="Nodes of the run [default: the fewest on which the model fits].")
@click.option("-o", "--output", type=click.Path(path_type=Path, dir_okay=False), help="File to write [default: MODEL.yaml].")
def init(model: str | None, data: Path | None, cluster: str | None, nodes: int | None, output: Path | None) -> None:
    """Write a commented config for a model, a corpus and a cluster.

    The file holds the settings that users change most, each with its meaning, and a layout from `ridge plan`. Missing options are prompted
    for on a terminal. An existing file is never overwritten.
    """
    from ridgeline.configs.cluster import cluster_names, load_cluster

    model = _known_model(model or _prompt("--model", "Model", model_names()))
    data = data or Path(_prompt("--data", "Prepared corpus (directory)", []))
    resolved = load_cluster(cluster or _prompt("--cluster", "Cluster", cluster_names()))
    output = output or Path(f"{model}.yaml")
    if output.exists():
        raise UserError(f"--output {output}: exists already; choose another name or remove it")
    settings = base_settings(model, data, output, cpu=_is_cpu(resolved))
    made = fewest_nodes(settings, model, resolved, nodes)
    name = resolved.config.name if cluster is None else cluster
    text = config_text(model, name, add_layout(settings, made), made)
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"--output {output}: cannot be written: {error.strerror}") from error
    count = made.best[0].nodes
    size = f"{count} node{'s' if count != 1 else ''} of {made.cluster.name}"
    print(f"{output}: {model} on {size}; next: ridge plan {output} -c {name} -N {count}")
    if not any(Path(source["path"], "manifest.json").is_file() for source in settings["data"]["train"]):
        print(f"no corpus at {settings['data']['train'][0]['path']} yet: ridge data prepare --help", file=sys.stderr)


def model_names() -> list[str]:
    """Return the shipped models by the name of their file."""
    from ridgeline.configs.compose import shipped_names

    return [name.removeprefix("models/") for name in shipped_names() if name.startswith("models/")]


def _known_model(name: str) -> str:
    """Return the name of a shipped model. Raises UserError with the nearest name."""
    known = model_names()
    short = name.removeprefix("models/").removesuffix(".yaml")
    if short not in known:
        raise unknown_name("model", name, known)
    return short


def _prompt(option: str, text: str, choices: list[str]) -> str:
    """Prompt on a terminal for a missing option. Raises UserError elsewhere."""
    if not _on_terminal():
        raise UserError(f"{option} is missing" + (f" (allowed: {', '.join(choices)})" if choices else ""))
    if choices:
        click.echo(f"{text}: {', '.join(choices)}")
    return str(click.prompt(text))


def _on_terminal() -> bool:
    return sys.stdin.isatty() and sys.stdout.isatty()


def _is_cpu(cluster: ResolvedCluster) -> bool:
    return cluster.config.device.startswith("cpu")


def base_settings(model: str, data: Path, output: Path, *, cpu: bool) -> dict[str, Any]:
    """Return the settings of a new config before its layout is known; paths are those of the command line."""
    from ridgeline.configs.load import load

    shape = load(f"models/{model}").config.model
    seq_len = min(shape.max_seq_len, 256 if cpu else LONGEST_ROW)
    train, validation = corpora(data)
    settings: dict[str, Any] = {
        "name": output.stem,
        "data": {
            "train": [{"path": str(train)}],
            "seq_len": seq_len,
            "batch_size": (CPU_TOKENS_PER_STEP if cpu else TOKENS_PER_STEP) // seq_len,
        },
        "optimizer": {"kind": "adamw", "learning_rate": 3e-4, "weight_decay": 0.1},
        "schedule": {"kind": "cosine", "warmup_steps": 1000},
        "trainer": {"steps": 20000, "log_every": 10},
        "checkpoint": {"every": 1000, "keep_last": 2},
        "precision": {"compute": "float32" if cpu else "bfloat16"},
    }
    if validation is not None:
        settings["evaluation"] = {"sets": {"validation": str(validation)}, "every": 1000, "max_batches": 50}
    return settings


def corpora(data: Path) -> tuple[Path, Path | None]:
    """Return the training and validation corpora of a directory: the corpus itself, or its parts `train` and `validation`."""
    if (data / "manifest.json").is_file():
        return data, None
    validation = data / "validation"
    return data / "train", validation if validation.is_dir() or not data.exists() else None


def fewest_nodes(settings: dict[str, Any], model: str, cluster: ResolvedCluster, nodes: int | None) -> Plan:
    """Plan the run on `nodes`, or on the fewest nodes (1, 2, 4, ...) on which a layout fits. Grows the batch to a row per device.

    Raises UserError: nothing fits.
    """
    from ridgeline.planner.calibration import load_calibration
    from ridgeline.planner.plan import make_plan
    from ridgeline.planner.search import fits

    calibration = load_calibration(None)
    per_node = cluster.config.devices_per_node
    most = max(1, min(cluster.config.nodes or MOST_DEVICES, MOST_DEVICES // per_node))
    count = nodes or 1
    rows = settings["data"]["batch_size"]
    while True:
        settings["data"]["batch_size"] = _multiple(rows, count * per_node)
        config = _config(settings, model)
        if nodes is not None or count * 2 > most or fits(config, cluster.config, calibration, count):
            return make_plan(config, cluster.config, calibration, [count])
        count *= 2


def _multiple(rows: int, devices: int) -> int:
    """Round rows up to a multiple of the devices."""
    return -(-rows // devices) * devices


def _config(settings: dict[str, Any], model: str) -> Config:
    """Return the config that these settings make on top of a model."""
    from ridgeline.configs.dump import value_text
    from ridgeline.configs.load import load

    flat = {
        f"{section}.{key}": value
        for section in ("data", "precision", "optimizer", "trainer")
        for key, value in settings[section].items()
        if key != "train"
    }
    overrides = [f"name={value_text(settings['name'])}", *(f"{key}={value_text(value)}" for key, value in flat.items())]
    return load(f"models/{model}", overrides).config


def add_layout(settings: dict[str, Any], made: Plan) -> dict[str, Any]:
    """Return the settings with mesh, microbatches and rematerialization of the best layout."""
    layout = made.best[0].layout
    remat: dict[str, Any] = {"policy": layout.remat.policy}
    if layout.remat.policy in ("names", "offload"):
        remat["names"] = list(layout.remat.names)
    mesh = {axis: size for axis, size in layout.sizes.items() if size != 1} or {"fsdp": 1}
    mesh |= {"zero_stage": layout.zero_stage} if layout.zero_stage else {}
    return settings | {
        "mesh": {"fsdp": 1} | mesh,
        "compute": {"remat": remat},
        "trainer": settings["trainer"] | {"accumulation": layout.accumulation},
    }


ORDER = ("name", "data", "evaluation", "mesh", "compute", "precision", "optimizer", "schedule", "trainer", "checkpoint")


def config_text(model: str, cluster: str, settings: dict[str, Any], made: Plan) -> str:
    """Return the file: what it is for, the commands to run next, and every setting with its meaning from the schema."""
    from ridgeline.configs.schema import Config

    best = made.best[0]
    step = best.step
    size = f"{best.nodes} node{'s' if best.nodes != 1 else ''} of {made.cluster.name}"
    head = [
        f"{model} on {size} ({step.devices} device{'s' if step.devices != 1 else ''}). Written by ridge init.",
        f"Predicted: {step.step_s:.3g} s per step, {step.tokens_per_s_per_device:,.0f} tokens/s per device, MFU {step.mfu:.0%},"
        f" {best.memory.total_bytes / 1e9:.1f} GB per device.",
        f"  ridge plan FILE --cluster {cluster} --nodes {best.nodes}      other layouts, memory, time and cost",
        f"  ridge submit FILE --cluster {cluster} --nodes {best.nodes} --time 12:00:00 --dry-run",
        "Every other key has a default: ridge config show FILE prints all of them.",
    ]
    lines = [f"# {line}" for line in head] + [f"base: [models/{model}]"]
    ordered = {key: settings[key] for key in ORDER if key in settings}
    lines += _section_lines(ordered, Config, 0)
    return "\n".join(lines) + "\n"


def _section_lines(values: dict[str, Any], section: type[Section], level: int) -> list[str]:
    """Return the YAML lines of one section, with the docstrings of the schema as comments."""
    from ridgeline.configs.dump import scalar_text, value_text
    from ridgeline.configs.fields import Slot

    slot = Slot(section)
    lines: list[str] = []
    for key, value in values.items():
        inner = slot.step(key)
        assert inner is not None, f"{key} is not in the schema"
        meaning = section.model_fields[key].description or ""
        indent = "  " * level
        if inner.section is not None:
            doc = " ".join((inner.section.__doc__ or "").split("\n\n")[0].split())
            lines += _commented(f"{indent}{key}:", doc, indent) + _section_lines(value, inner.section, level + 1)
        elif inner.is_open_mapping:
            lines += _commented(f"{indent}{key}:", meaning, indent)
            lines += [f"{indent}  {scalar_text(name)}: {scalar_text(item)}" for name, item in value.items()]
        elif inner.is_list and value and isinstance(value[0], dict):
            lines += _commented(f"{indent}{key}:", meaning, indent)
            lines += [f"{indent}  - path: {scalar_text(item['path'])}" for item in value]
        else:
            lines += _commented(f"{indent}{key}: {value_text(value)}", meaning, indent)
    return lines


def _commented(line: str, meaning: str, indent: str) -> list[str]:
    """Return a line with its meaning behind it, or above it where that would be too long."""
    meaning = " ".join(meaning.split())
    if not meaning:
        return [line]
    together = f"{line:<{ALIGNED}}  # {meaning}"
    if len(together) <= WIDTH:
        return [together]
    return [*textwrap.wrap(meaning, WIDTH, initial_indent=f"{indent}# ", subsequent_indent=f"{indent}# "), line]
