"""`ridge convert`: import (from-hf) and export (to-hf) of Hugging Face models, and experts from a dense model (upcycle)."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ridgeline.cli.options import FiniteRange, Int32Range, json_option, parse_set
from ridgeline.configs.errors import UserError

if TYPE_CHECKING:
    import numpy as np

    from ridgeline.configs.model_schema import ModelConfig
    from ridgeline.configs.schema import Config
    from ridgeline.configs.tuning_schema import LoraConfig
    from ridgeline.models.huggingface.compressed import Quantization
    from ridgeline.trainer.checkpoint.param_slices import ParamReader
    from ridgeline.trainer.pretrained import Source

    Slice = tuple[str, int | None, np.ndarray]
    """Path of a parameter, layer (None: the whole parameter), values."""

DTYPES = ("float32", "bfloat16", "float16")


@click.command("from-hf")
@click.argument("directory", metavar="HF_DIR", type=click.Path(path_type=Path))
@click.option("--output", required=True, type=click.Path(path_type=Path), help="Run directory to create; it must not exist, or be empty.")
@click.option("--dtype", type=click.Choice(DTYPES), help="Parameter dtype, of a model without adapters [default: as stored].")
@click.option("--base", type=click.Path(path_type=Path), help="Base model of an adapter directory [default: the one it names].")
@json_option
def from_hf(directory: Path, output: Path, dtype: Any, base: Path | None, as_json: bool) -> None:
    """Import a Hugging Face directory, or an adapter directory of peft, as a run directory with one checkpoint that has the parameters.

    Weights are converted one layer's tensor at a time, so host memory stays small. Use the result with `ridge train ... init_from=OUTPUT`,
    `ridge evaluate` and `ridge generate`.
    """
    os.environ.setdefault("JAX_PLATFORMS", "cpu")  # nothing is computed, so do not occupy a GPU
    from ridgeline.loaders.hf_files import left_behind
    from ridgeline.models.huggingface.convert import open_hf
    from ridgeline.models.huggingface.peft import ADAPTER_CONFIG, base_of, open_adapter
    from ridgeline.models.params import STACKS

    start_s = time.perf_counter()
    adapted = (directory / ADAPTER_CONFIG).is_file()
    if base is not None and not adapted:
        raise UserError(f"--base is for an adapter directory; {directory} has no {ADAPTER_CONFIG}")
    if dtype is not None and adapted:
        raise UserError("--dtype is not supported for an adapter directory: its tensors and those of its base keep their dtypes")
    source = (base or base_of(directory)) if adapted else directory
    checkpoint = open_hf(source)
    adapter = open_adapter(directory, checkpoint.model) if adapted else None
    kept = dtype or checkpoint.stored_dtype
    kind = _numpy_dtype(kept)

    def slices() -> Iterator[Slice]:
        for path, shape in checkpoint.shapes.items():
            for layer in range(shape[0]) if path.startswith(STACKS) else (None,):
                yield path, layer, checkpoint.read_layer(path, layer, kind)
        if adapter is not None:
            for path, shape in adapter.shapes.items():
                for layer in range(shape[0]):
                    yield path, layer, adapter.read_layer(path, layer, _numpy_dtype(adapter.stored_dtype))

    adapters = None if adapter is None else (adapter.lora, adapter.stored_dtype)
    written = _write_run(output, checkpoint.model, kept, slices(), directory, source, checkpoint.config, adapters)
    if lost := left_behind(source):
        click.echo(f"note: not copied: {', '.join(lost)} (tokenizers with their own Python code are not supported)", err=True)
    _report({**written, "seconds": round(time.perf_counter() - start_s, 2)}, as_json)


@click.command("upcycle")
@click.argument("dense", metavar="DENSE", type=click.Path(path_type=Path))
@click.argument("output", metavar="OUTPUT", type=click.Path(path_type=Path))
@click.option("--experts", required=True, type=Int32Range(min=2), help="Experts of each layer.")
@click.option("--experts-per-token", default=2, show_default=True, type=Int32Range(min=1), help="Experts that process each token.")
@click.option(
    "--reinitialize",
    default=0.0,
    show_default=True,
    type=FiniteRange(0, 1),
    help="Share of the hidden dims of each expert that is drawn anew, so that experts differ from the start (drop-upcycling).",
)
@click.option("--seed", default=0, show_default=True, type=Int32Range(min=0), help="Of the routers and of what is drawn anew.")
@click.option("--step", type=Int32Range(), help="Checkpoint of a run [default: the newest valid one].")
@click.option("--dtype", type=click.Choice(DTYPES), help="Parameter dtype [default: as stored].")
@json_option
def upcycle(
    dense: Path,
    output: Path,
    experts: int,
    experts_per_token: int,
    reinitialize: float,
    seed: int,
    step: int | None,
    dtype: Any,
    as_json: bool,
) -> None:
    """Make a model with experts from a dense one: a run directory OUTPUT with one checkpoint of parameters.

    DENSE is a run or a Hugging Face directory of the families llama, mistral (to mixtral) or qwen3 (to qwen3_moe). Every expert is a copy
    of the layer's MLP and the router is new, so that the result computes what DENSE does until it is trained (arXiv 2212.05055). Weights
    are converted one layer's parameter at a time. Train it with `ridge train OUTPUT/config.yaml init_from=OUTPUT run_dir=NEW ...`.
    """
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    from ridgeline.models.upcycle import Upcycling
    from ridgeline.trainer.checkpoint import identity
    from ridgeline.trainer.checkpoint.param_slices import ParamReader
    from ridgeline.trainer.pretrained import open_source

    start_s = time.perf_counter()
    source = open_source(dense)
    if source.config.lora.rank is not None:
        raise UserError(f"{dense} has adapters; write the merged model with `ridge convert to-hf --merge` first")
    plan, model, checkpoint = Upcycling(experts, experts_per_token, reinitialize, seed), source.config.model, source.hf
    upcycled = plan.model(model)
    kept = dtype or source.config.precision.params
    kind = _numpy_dtype(kept)
    if checkpoint is not None:
        if step is not None:
            raise UserError(f"{dense} is a Hugging Face directory: it has no steps")
        slices = plan.slices(model, lambda path, layer: checkpoint.read_layer(path, layer, kind), kind)
    else:
        reader = ParamReader(dense / "checkpoints", step)
        if note := identity.check_config(source.config, reader.metadata, dense):
            click.echo(f"note: {note}", err=True)
        slices = plan.slices(model, reader.read, kind)
    tokenizer = source.tokenizer_dir or source.files_dir
    written = _write_run(output, upcycled, kept, slices, dense, tokenizer, None if checkpoint is None else checkpoint.config)
    _report({**written, "seconds": round(time.perf_counter() - start_s, 2)}, as_json)


@click.command("to-hf")
@click.argument("run", metavar="RUN_DIR", type=click.Path(path_type=Path))
@click.argument("directory", metavar="HF_DIR", type=click.Path(path_type=Path))
@click.option("--step", type=Int32Range(), help="Checkpoint to export [default: the newest valid one].")
@click.option(
    "--dtype", type=click.Choice(DTYPES), help="Dtype of the weights [default: that of the parameters; --merge, --quantize: of compute]."
)
@click.option(
    "--max-shard-gb", type=FiniteRange(), default=5.0, show_default=True, help="Maximum size of a weights file, in GB (1e9 bytes)."
)
@click.option("--adapter", is_flag=True, help="Write the adapters of a run (lora.rank) as an adapter directory of peft.")
@click.option("--merge", is_flag=True, help="Write the model of a run (lora.rank) with its adapters added to the weights.")
@click.option("--without-mtp", is_flag=True, help="Leave out the modules of multi-token prediction (model.mtp_layers).")
@click.option("--quantize", type=click.Choice(["fp8", "int8"]), help="Store the layers' matrices in 8 bits (format: compressed-tensors).")
@click.option(
    "--set",
    "sets",
    multiple=True,
    metavar="NAME=DIR",
    help="With --quantize: measure the loss on this prepared corpus; repeatable [default: the run's evaluation sets].",
)
@click.option("--no-loss", is_flag=True, help="With --quantize: do not measure the loss before and after.")
@json_option
def to_hf(
    run: Path,
    directory: Path,
    step: int | None,
    dtype: Any,
    max_shard_gb: float,
    adapter: bool,
    merge: bool,
    without_mtp: bool,
    quantize: Quantization | None,
    sets: tuple[str, ...],
    no_loss: bool,
    as_json: bool,
) -> None:
    """Export a run's checkpoint as a Hugging Face directory: safetensors, config.json and the tokenizer.

    Weights are converted one tensor at a time, so host memory stays small. A run with adapters needs --adapter or --merge.

    --quantize stores each matrix of the layers in 8 bits with a scale per output channel; embedding, output head, norms and biases keep
    their dtype. The loss of the run and of the export is then measured with the whole model in memory, on the CPU unless
    JAX_PLATFORMS is set.
    """
    if not max_shard_gb > 0:
        raise UserError(f"--max-shard-gb {max_shard_gb} must be greater than 0")
    if quantize is None and (sets or no_loss):
        raise UserError("--set and --no-loss need --quantize")
    if quantize is not None and adapter:
        raise UserError("--quantize is not supported for --adapter; choose --merge")
    if sets and no_loss:
        raise UserError("--set does not go with --no-loss")
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    from ridgeline.loaders.hf_files import special_ids, write_tokenizer
    from ridgeline.models.huggingface.convert import CONFIG_NAME, export_weights, hf_config, quantization_config
    from ridgeline.models.huggingface.peft import merged

    start_s = time.perf_counter()
    source = _source_to_export(run, adapter=adapter, merge=merge, without_mtp=without_mtp)
    tokenizer = source.tokenizer
    place = source.tokenizer_dir or source.files_dir
    kept = dtype or (source.config.precision.compute if merge or quantize else source.config.precision.params)
    model = source.config.model.model_copy(update={"mtp_layers": 0}) if without_mtp else source.config.model
    description = hf_config(model, kept, special_ids(tokenizer, place))
    if quantize is not None:
        description["quantization_config"] = quantization_config(model, quantize)
    reader = _checkpoint_to_export(run, source, step, place)
    description["ridgeline"] = {"run": source.config.name, "step": reader.step, "config_sha256": source.config_sha256}
    measure = None if quantize is None or no_loss else _loss_measurement(run, source.config, reader.step, sets)
    before = None if measure is None else measure(run)
    with _new_directory(directory) as target:
        if adapter:
            count = _export_adapter(source.config, reader, target, kept)
        else:
            read = merged(reader.read, source.config.model, source.config.lora) if merge else reader.read
            count = export_weights(model, read, target, kept, int(max_shard_gb * 1e9), quantize)
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
    }
    if quantize is not None:
        result["quantized"] = quantize
    if measure is not None and before is not None:
        after = measure(directory)
        result["losses"] = [
            {"set": name, "run": loss, "export": after[name], "difference": after[name] - loss} for name, loss in before.items()
        ]
    _report({**result, "seconds": round(time.perf_counter() - start_s, 2)}, as_json)


def _source_to_export(run: Path, *, adapter: bool, merge: bool, without_mtp: bool) -> Source:
    """Open a run, and refuse options of to-hf that do not fit it."""
    from ridgeline.trainer.pretrained import open_source

    source = open_source(run)
    if source.hf is not None:
        raise UserError(f"{run} is a Hugging Face directory; to-hf needs a run directory (`ridge convert from-hf` makes one)")
    adapted = source.config.lora.rank is not None
    if adapted != (adapter or merge) or (adapter and merge):
        has = "adapters; choose one of --adapter and --merge" if adapted else "no adapters; leave out --adapter and --merge"
        raise UserError(f"{run} has {has}")
    if without_mtp and not source.config.model.mtp_layers:
        raise UserError(f"{run} has no modules of multi-token prediction; leave out --without-mtp")
    return source


def _checkpoint_to_export(run: Path, source: Source, step: int | None, tokenizer_dir: Path | None) -> ParamReader:
    """Open the checkpoint of a step, and refuse one of another model or tokenizer."""
    from ridgeline.models.huggingface.convert import parameter_shapes
    from ridgeline.trainer.checkpoint import identity
    from ridgeline.trainer.checkpoint.param_slices import ParamReader

    reader = ParamReader(run / "checkpoints", step)
    if note := identity.check_config(source.config, reader.metadata, run):
        click.echo(f"note: {note}", err=True)
    if tokenizer_dir is not None:
        identity.check_tokenizer_files(reader.metadata, tokenizer_dir)
    if reader.shapes != parameter_shapes(source.config.model, source.config.lora):
        raise UserError(f"the checkpoint of step {reader.step} in {run} does not match the model in its config.yaml")
    return reader


def _export_adapter(config: Config, reader: ParamReader, target: Path, dtype: Any) -> int:
    """Write the adapters of a checkpoint in the format of peft. Return the number of tensors."""
    from ridgeline.models.huggingface.convert import model_from_hf, read_config
    from ridgeline.models.huggingface.peft import export_adapter
    from ridgeline.trainer.pretrained import changed_positions

    base = _base_name(config)
    count = export_adapter(config.model, config.lora, reader.read, target, base, dtype)
    for line in changed_positions(Path(base), model_from_hf(read_config(Path(base))), config.model) if base else ():
        click.echo(f"note: {line}: set it in the base's config.json, or use --merge", err=True)
    return count


def _loss_measurement(run: Path, config: Config, step: int | None, sets: tuple[str, ...]) -> Callable[[Path], dict[str, float]] | None:
    """Return the function that computes the loss (nats/token) of a directory on each set; None, with a note, where there is no set."""
    from ridgeline import api
    from ridgeline.loaders.manifest import read_manifest
    from ridgeline.trainer.evaluation import evaluation_rows

    wanted = dict(map(parse_set, sets)) or {
        name: path for name, path in config.evaluation.sets.items() if not read_manifest(path).has_pairs
    }
    if not wanted:
        click.echo(f"note: {run} has no evaluation set of text: the loss is not measured; name one with --set NAME=DIR", err=True)
        return None
    seq_len, rows = config.data.seq_len, evaluation_rows(config)

    def measure(path: Path) -> dict[str, float]:
        evaluation = api.evaluate(path, wanted, step=step if path == run else None, seq_len=seq_len, batch_size=rows)
        return {name: result.loss for name, result in evaluation.sets.items()}

    return measure


def _base_name(config: Config) -> str | None:
    """Return the Hugging Face directory of the base model of a run; None where the run started from something else."""
    from ridgeline.models.huggingface.peft import ADAPTER_CONFIG, base_of

    start = config.init_from
    if start is not None and (start / ADAPTER_CONFIG).is_file():
        start = base_of(start)
    return str(start.absolute()) if start is not None and (start / "config.json").is_file() else None


def _numpy_dtype(name: str) -> np.dtype:
    from ridgeline.models.huggingface.safetensors_stream import FLOAT_DTYPES

    return next(known for known in FLOAT_DTYPES.values() if known.name == name)


def _write_run(
    output: Path,
    model: ModelConfig,
    dtype: Any,
    slices: Iterable[Slice],
    source: Path,
    tokenizer: Path,
    hf_config: Mapping[str, Any] | None,
    adapters: tuple[LoraConfig, Any] | None = None,
) -> dict[str, Any]:
    """Write a run directory with one checkpoint of parameters; return what to report about it.

    source: where the parameters come from; tokenizer: the directory to copy it from; hf_config: the config.json of a Hugging Face
    directory, None for a run; adapters: of the model, and their dtype.
    """
    import numpy as np

    from ridgeline.configs.dump import to_yaml
    from ridgeline.configs.schema import Config, DataConfig, PrecisionConfig
    from ridgeline.configs.tuning_schema import LoraConfig
    from ridgeline.loaders.hf_files import copy_tokenizer
    from ridgeline.loaders.tokenizers import holds_tokenizer
    from ridgeline.models.huggingface.convert import parameter_shapes
    from ridgeline.trainer.checkpoint import identity
    from ridgeline.trainer.checkpoint.param_slices import write_params_only
    from ridgeline.trainer.start import start_run

    lora, adapter_dtype = adapters or (LoraConfig(), dtype)
    shapes = parameter_shapes(model, lora)
    of_model = parameter_shapes(model)
    dtypes = {path: _numpy_dtype(dtype if path in of_model else adapter_dtype) for path in shapes}
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", output.absolute().name).lstrip("._-") or "imported"
    data = DataConfig(seq_len=min(DataConfig().seq_len, model.max_seq_len))
    precision = PrecisionConfig(params=adapter_dtype, compute=dtype)
    config = Config(name=name, run_dir=output, model=model, lora=lora, precision=precision, data=data)
    with _new_directory(output) as target:
        start = config.model_copy(update={"run_dir": target})
        started = start_run(start, command=sys.argv, log=lambda line: click.echo(line, err=True))
        started.lease.release()
        (target / "config.yaml").write_text(to_yaml(config))
        if hf_config is not None:
            copied = copy_tokenizer(tokenizer, target / "tokenizer", hf_config)
        elif tokenizer.is_dir():  # of a run: any kind of tokenizer
            shutil.copytree(tokenizer, target / "tokenizer", dirs_exist_ok=True)
            copied = sorted(path.name for path in tokenizer.iterdir())
        else:
            copied = []
        bound = identity.describe(config, started.id, None, target / "tokenizer", {})
        metadata = {"source": str(source.absolute()), **bound}
        size_bytes = write_params_only(target / "checkpoints", shapes, dtypes, slices, metadata)
    if not holds_tokenizer(output / "tokenizer"):
        click.echo(f"note: {source} has no tokenizer (tokenizer.json or *.model): `ridge generate` will need one", err=True)
    return {
        "output": str(output),
        "family": model.family,
        "parameters": sum(int(np.prod(shape)) for shape in shapes.values()),
        "dtype": dtype,
        "bytes": size_bytes,
        "tokenizer": copied,
    }


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
    for each in result.pop("losses", ()):
        click.echo(f"loss on {each['set']}: {each['run']:.4f} run, {each['export']:.4f} export, difference {each['difference']:+.4f}")
    for key, value in result.items():
        text = (", ".join(value) or "none") if isinstance(value, list) else f"{value:,}" if isinstance(value, int) else str(value)
        click.echo(f"{key:<13}{text}")
