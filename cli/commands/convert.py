"""`ridge convert from-hf DIR --output RUN` and `ridge convert to-hf RUN DIR`: import and export Hugging Face models."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from ridgeline.cli.options import json_option
from ridgeline.configs.errors import UserError

DTYPES = ("float32", "bfloat16", "float16")


@click.command("from-hf")
@click.argument("directory", metavar="HF_DIR", type=click.Path(path_type=Path))
@click.option("--output", required=True, type=click.Path(path_type=Path), help="Run directory to create; it must not exist, or be empty.")
@click.option("--dtype", type=click.Choice(DTYPES), help="Parameter dtype [default: as stored].")
@json_option
def from_hf(directory: Path, output: Path, dtype: Any, as_json: bool) -> None:
    """Import a Hugging Face directory as a run directory with one checkpoint that contains the parameters.

    Weights are converted one layer's tensor at a time, so host memory stays small. Use the result with `ridge train ... init_from=OUTPUT`,
    `ridge evaluate` and `ridge generate`.
    """
    import numpy as np

    os.environ.setdefault("JAX_PLATFORMS", "cpu")  # nothing is computed, so do not occupy a GPU
    from ridgeline.configs.dump import to_yaml
    from ridgeline.configs.schema import Config, DataConfig, PrecisionConfig
    from ridgeline.loaders.hf_files import copy_tokenizer, left_behind
    from ridgeline.loaders.tokenizers import holds_tokenizer
    from ridgeline.models.huggingface.convert import open_hf
    from ridgeline.models.huggingface.safetensors_stream import FLOAT_DTYPES
    from ridgeline.models.params import STACKS
    from ridgeline.trainer.checkpoint import identity
    from ridgeline.trainer.checkpoint.param_slices import write_params_only
    from ridgeline.trainer.start import start_run

    start_s = time.perf_counter()
    checkpoint = open_hf(directory)
    kept = dtype or checkpoint.stored_dtype
    kind = next(known for known in FLOAT_DTYPES.values() if known.name == kept)
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", output.absolute().name).lstrip("._-") or "imported"
    data = DataConfig(seq_len=min(DataConfig().seq_len, checkpoint.model.max_seq_len))
    config = Config(name=name, run_dir=output, model=checkpoint.model, precision=PrecisionConfig(params=kept, compute=kept), data=data)

    def slices() -> Iterator[tuple[str, int | None, np.ndarray]]:
        for path, shape in checkpoint.shapes.items():
            for layer in range(shape[0]) if path.startswith(STACKS) else (None,):
                yield path, layer, checkpoint.read_layer(path, layer, kind)

    with _new_directory(output) as target:
        start = config.model_copy(update={"run_dir": target})
        started = start_run(start, command=sys.argv, log=lambda line: click.echo(line, err=True))
        started.lease.release()
        (target / "config.yaml").write_text(to_yaml(config))
        copied = copy_tokenizer(directory, target / "tokenizer", checkpoint.config)
        bound = identity.describe(config, started.id, None, target / "tokenizer", {})
        metadata = {"source": str(directory.absolute()), **bound}
        size_bytes = write_params_only(target / "checkpoints", checkpoint.shapes, kind, slices(), metadata)
    if lost := left_behind(directory):
        click.echo(f"note: not copied: {', '.join(lost)} (tokenizers with their own Python code are not supported)", err=True)
    if not holds_tokenizer(output / "tokenizer"):
        click.echo(f"note: {directory} has no tokenizer (tokenizer.json or *.model): `ridge generate` will need one", err=True)
    parameters = sum(int(np.prod(shape)) for shape in checkpoint.shapes.values())
    result = {
        "output": str(output),
        "family": checkpoint.model.family,
        "parameters": parameters,
        "dtype": kept,
        "bytes": size_bytes,
        "tokenizer": copied,
        "seconds": round(time.perf_counter() - start_s, 2),
    }
    _report(result, as_json)


@click.command("to-hf")
@click.argument("run", metavar="RUN_DIR", type=click.Path(path_type=Path))
@click.argument("directory", metavar="HF_DIR", type=click.Path(path_type=Path))
@click.option("--step", type=int, help="Checkpoint to export [default: the newest valid one].")
@click.option("--dtype", type=click.Choice(DTYPES), help="Dtype of the weights [default: the parameter dtype].")
@click.option("--max-shard-gb", type=float, default=5.0, show_default=True, help="Maximum size of a weights file, in GB (1e9 bytes).")
@json_option
def to_hf(run: Path, directory: Path, step: int | None, dtype: Any, max_shard_gb: float, as_json: bool) -> None:
    """Export a run's checkpoint as a Hugging Face directory: safetensors, config.json and the tokenizer.

    Weights are converted one tensor at a time, so host memory stays small.
    """
    if not max_shard_gb > 0:
        raise UserError(f"--max-shard-gb {max_shard_gb} must be greater than 0")
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    from ridgeline.loaders.hf_files import special_ids, write_tokenizer
    from ridgeline.models.huggingface.convert import CONFIG_NAME, export_weights, hf_config, parameter_shapes
    from ridgeline.trainer.checkpoint import identity
    from ridgeline.trainer.checkpoint.param_slices import ParamReader
    from ridgeline.trainer.pretrained import open_source

    start_s = time.perf_counter()
    source = open_source(run)
    if source.hf is not None:
        raise UserError(f"{run} is a Hugging Face directory; to-hf needs a run directory")
    tokenizer = source.tokenizer
    place = source.tokenizer_dir or source.files_dir
    kept = dtype or source.config.precision.params
    description = hf_config(source.config.model, kept, special_ids(tokenizer, place))
    reader = ParamReader(run / "checkpoints", step)
    if note := identity.check_config(source.config, reader.metadata, run):
        click.echo(f"note: {note}", err=True)
    if place is not None:
        identity.check_tokenizer_files(reader.metadata, place)
    if reader.shapes != parameter_shapes(source.config.model):
        raise UserError(f"the checkpoint of step {reader.step} in {run} does not match the model in its config.yaml")
    description["ridgeline"] = {"run": source.config.name, "step": reader.step, "config_sha256": source.config_sha256}
    with _new_directory(directory) as target:
        count = export_weights(source.config.model, reader.read, target, kept, int(max_shard_gb * 1e9))
        (target / CONFIG_NAME).write_text(json.dumps(description, indent=2) + "\n")
        written = write_tokenizer(tokenizer, place, target)
    if tokenizer is None:
        click.echo(f"note: {run} has no tokenizer; the export contains none", err=True)
    elif len(written) < 2:
        click.echo(
            f"note: Hugging Face has no file format for a tokenizer of kind {tokenizer.kind}; the export contains no tokenizer", err=True
        )
    result = {
        "output": str(directory),
        "architecture": description["architectures"][0],
        "step": reader.step,
        "config_sha256": source.config_sha256,
        "tensors": count,
        "dtype": kept,
        "tokenizer": written,
        "seconds": round(time.perf_counter() - start_s, 2),
    }
    _report(result, as_json)


@contextlib.contextmanager
def _new_directory(path: Path) -> Iterator[Path]:
    """Yield a temporary directory that is renamed to `path` on success and removed on failure. Raises UserError."""
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise UserError(f"{path} exists and is not empty; choose another output directory")
    partial = path.with_name(f".{path.name}.partial-{os.getpid()}")
    try:
        partial.mkdir(parents=True)
        yield partial
        os.replace(partial, path)
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror or error}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _report(result: dict[str, Any], as_json: bool) -> None:
    from ridgeline.cli.tables import print_json

    if as_json:
        print_json(result)
        return
    for key, value in result.items():
        text = (", ".join(value) or "none") if isinstance(value, list) else f"{value:,}" if isinstance(value, int) else str(value)
        click.echo(f"{key:<13}{text}")
