"""Whole runs on a small real corpus: resume, other meshes, stopping, failing, what is written."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from click.testing import CliRunner

from ridgeline.api import generate
from ridgeline.cli.commands.convert import to_hf
from ridgeline.configs.errors import UserError
from ridgeline.configs.schema import Config
from ridgeline.launch.cluster.network import free_port
from ridgeline.launch.exit_codes import INTERRUPTED, NUMERICAL_FAILURE, TAKEN_OVER, USAGE
from ridgeline.loaders.prepare import PrepareSettings, prepare
from ridgeline.rundir.directory import read_metrics
from ridgeline.rundir.events import COMPILED, LOADED, event_file, read_events
from ridgeline.rundir.goodput import run_ledger
from ridgeline.rundir.metrics import metric
from ridgeline.rundir.phases import phases
from ridgeline.rundir.recompilation import recompilations
from ridgeline.rundir.startup import startup_parts
from ridgeline.trainer import run as run_module
from ridgeline.trainer.checkpoint import integrity
from ridgeline.trainer.checkpoint.checkpointer import Checkpointer
from ridgeline.trainer.failures import NumericalFailure
from ridgeline.trainer.loop import Loop
from ridgeline.trainer.pretrained import load_model
from ridgeline.trainer.run import train
from tests.xla_flags import QUICK_XLA

ROOT = Path(__file__).parents[2]
LENGTH, ROWS, STEPS = 32, 8, 6


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Byte tokens of this project's own sources, with a held-out set."""
    directory = tmp_path_factory.mktemp("corpus")
    texts = directory / "texts"
    texts.mkdir()
    for number, source in enumerate(sorted((ROOT / "trainer").glob("*.py"))):
        (texts / f"{number:02d}.txt").write_text(source.read_text()[:1500])
    prepare(PrepareSettings((texts,), directory / "sets", "bytes", holdouts={"held": 0.25}, shards=2, gzip_baseline=True), workers=1)
    return directory / "sets"


def make_config(corpus: Path, run_dir: Path, **sections: Any) -> Config:
    base: dict[str, Any] = {
        "name": "small",
        "run_dir": str(run_dir),
        "model": {"vocab_size": 258, "num_layers": 2, "embed_dim": 16, "num_heads": 2, "mlp_dim": 32, "max_seq_len": LENGTH},
        "precision": {"compute": "float32"},
        "data": {"train": [{"path": str(corpus / "train")}], "seq_len": LENGTH, "batch_size": ROWS},
        "evaluation": {"sets": {"held": str(corpus / "held")}, "every": 4, "max_batches": 2},
        "trainer": {"steps": STEPS, "log_every": 1},
        "checkpoint": {"every": 2},
        "logging": {"tensorboard": False},
    }
    merged = {**base, **{k: {**base[k], **v} if isinstance(v, dict) and k in base else v for k, v in sections.items()}}
    return Config.model_validate(merged)


def run(config: Config) -> dict[int, float]:
    """Train; return step -> loss as a reader of metrics.jsonl finds them."""
    train(config, command=["test"])
    return {r["step"]: r["train/loss"] for r in read_metrics(config.directory / "metrics.jsonl") if "train/loss" in r}


def payload(config: Config) -> dict[str, Any]:
    """Every array of the newest checkpoint."""
    from orbax.checkpoint import v1 as ocp

    newest = sorted((config.directory / "checkpoints").glob("step_*"))[-1]
    return {str(path): np.asarray(leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(ocp.load(newest))}


@pytest.fixture(scope="module")
def whole(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Config, dict[int, float]]:
    """An uninterrupted run on eight devices."""
    config = make_config(corpus, tmp_path_factory.mktemp("runs") / "whole")
    return config, run(config)


def test_a_run_resumed_after_every_step_is_bitwise_the_uninterrupted_one(
    corpus: Path, tmp_path: Path, whole: tuple[Config, dict[int, float]]
) -> None:
    reference, losses = whole
    halting = make_config(corpus, tmp_path / "run", trainer={"stop_after_s": 1e-9})
    for step in range(1, STEPS):
        run(halting)
        newest = sorted((halting.directory / "checkpoints").glob("step_*"))[-1].name
        assert newest == f"step_{step:08d}"
    resumed = make_config(corpus, tmp_path / "run")
    assert run(resumed) == losses
    one, other = payload(reference), payload(resumed)
    assert one.keys() == other.keys()
    assert len(one) > 20
    for name, values in one.items():
        np.testing.assert_array_equal(values, other[name], err_msg=name)


@pytest.mark.parametrize("mesh", [{"data": 2, "fsdp": 2, "tensor": 2}, {"fsdp": 2, "context": 4}], ids=str)
def test_a_run_goes_on_bitwise_in_data_and_closely_in_loss_on_another_mesh(
    corpus: Path, tmp_path: Path, whole: tuple[Config, dict[int, float]], mesh: dict[str, int]
) -> None:
    source, losses = whole
    shutil.copytree(source.directory, tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "checkpoints" / f"step_{STEPS:08d}")
    again = run(make_config(corpus, tmp_path / "run", mesh=mesh))
    assert again.keys() == losses.keys()
    for step, loss in losses.items():
        assert again[step] == pytest.approx(loss, rel=1e-5)


def test_a_run_goes_on_with_and_without_its_state_sharded_over_data_and_its_layers_over_stages(
    corpus: Path, tmp_path: Path, whole: tuple[Config, dict[int, float]]
) -> None:
    """Saved with ZeRO stage 2, restored on stages and without it; saved there, restored with it and without stages."""
    source, losses = whole
    own = make_config(corpus, tmp_path / "run")
    zero = {"data": 4, "fsdp": 2, "zero_stage": 2}
    for halts, mesh, trainer in (
        (True, zero, {"stop_after_s": 1e-9}),
        (True, {"pipeline": 2, "fsdp": 4}, {"stop_after_s": 1e-9, "accumulation": 2}),
        (False, zero, {}),
    ):
        found = run(make_config(corpus, tmp_path / "run", mesh=mesh, trainer=trainer))
        assert (max(found) < STEPS) == halts
    assert found.keys() == losses.keys()
    for step, loss in losses.items():
        assert found[step] == pytest.approx(loss, rel=1e-5)
    expected, saved = payload(source), payload(own)
    assert expected.keys() == saved.keys()
    for name, values in expected.items():
        np.testing.assert_allclose(values, saved[name], rtol=1e-3, atol=1e-5, err_msg=name)


def contents(directory: Path) -> dict[str, tuple[int, bytes]]:
    """Time of change and bytes of every file, and the time of every directory."""
    return {str(p): (p.stat().st_mtime_ns, p.read_bytes() if p.is_file() else b"") for p in (directory, *directory.rglob("*"))}


def test_a_command_that_trains_nothing_writes_nothing(
    corpus: Path, whole: tuple[Config, dict[int, float]], capsys: pytest.CaptureFixture
) -> None:
    """A complete run, with its own or an older config, and every refusal: no counted start, config, event or metric."""
    own = whole[0]
    before = contents(own.directory)
    older: list[dict[str, Any]] = [
        {},
        {"trainer": {"steps": STEPS - 1}},
        {"optimizer": {"learning_rate": 1e-5}, "evaluation": {"every": 0}, "trainer": {"steps": 2}},
        {"data": {"batch_size": 2 * ROWS}, "mesh": {"data": 4, "fsdp": 2}},
        {"checkpoint": {"keep_last": 1, "every": 1}, "logging": {"tensorboard": True}, "profiler": {"start_step": 1, "num_steps": 1}},
    ]
    for sections in older:
        assert train(make_config(corpus, own.directory, **sections), command=["test"]) is None, sections
        assert f"complete at step {STEPS}" in capsys.readouterr().out
        assert contents(own.directory) == before, sections
    assert train(own, command=["test"], from_step=STEPS) is None
    for changed, from_step in (({"model": {"embed_dim": 32}}, None), ({"name": "another"}, None), ({}, STEPS + 1)):
        with pytest.raises(UserError):
            train(make_config(corpus, own.directory, **changed), command=["test"], from_step=from_step)
    assert contents(own.directory) == before


def sealed(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    """Return what changes the metadata of a step and seals it again, as a start with another config or another version would have."""

    def apply(step: Path) -> None:
        metadata = json.loads((step / "metadata.json").read_text())
        change(metadata)
        (step / "metadata.json").write_text(json.dumps(metadata))
        sizes = integrity.list_files(step)
        integrity.write_manifest(step, {name: integrity.FileDigest(sizes[name], integrity.sha256_file(step / name)) for name in sizes})

    return apply


def cut_payload(step: Path) -> None:
    largest = max((path for path in step.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)
    os.truncate(largest, largest.stat().st_size - 1)


def rename_run(step: Path) -> None:
    record = step.parents[1] / "run.json"
    record.write_text(json.dumps({**json.loads(record.read_text()), "id": "another"}))


def replace_by_another_directory(step: Path) -> None:
    shutil.rmtree(step)
    (step.parent / "ridge-checkpoints.json").unlink(missing_ok=True)
    (step.parent / "thesis.tex").write_text("mine")


DAMAGE: list[tuple[Callable[[Path], object], str]] = [
    (sealed(lambda metadata: next(iter(metadata["arrays"].values()))["shape"].append(3)), r"step_00000006 does not fit this config"),
    (sealed(lambda metadata: metadata["config"]["model"].update(norm_eps=0.5)), r"with the changed config: model\.norm_eps"),
    (sealed(lambda metadata: metadata.update(tokenizer="0" * 64)), "the data's tokenizer"),
    (sealed(lambda metadata: metadata.update(step=3)), "no good checkpoint in .*of step 3"),
    (cut_payload, "no good checkpoint in .*step 6 is damaged: .* bytes, not .*step 4 is damaged"),
    (lambda step: (step / "integrity.json").write_text("{}"), "no good checkpoint in .*was altered"),
    (lambda step: (step / "metadata.json").write_text("{}"), r"no good checkpoint in .*metadata\.json"),
    (rename_run, "no good checkpoint in .*it is of the run"),
    (lambda step: step.rename(f"{step}.bad-sha256"), "no good checkpoint in .*set aside earlier"),
    (replace_by_another_directory, "is not a checkpoint directory of ridge"),
]
"""What is done to every step, and how the start is refused."""


def test_a_refused_start_writes_nothing(corpus: Path, tmp_path: Path, whole: tuple[Config, dict[int, float]]) -> None:
    """Refused by the checkpoints, the config, or the model that it starts from: bytes and times of all files and directories stay."""

    def refused(match: str, run_dir: Path, **sections: Any) -> None:
        before = contents(run_dir) if run_dir.exists() else None
        with pytest.raises(UserError, match=match) as error:
            train(make_config(corpus, run_dir, **{"trainer": {"steps": STEPS + 2}, **sections}), command=["test"])
        assert "\n" not in str(error.value)
        assert (contents(run_dir) if run_dir.exists() else None) == before, match

    source = whole[0].directory
    for number, (damage, match) in enumerate(DAMAGE):
        shutil.copytree(source, tmp_path / str(number))
        for step in sorted((tmp_path / str(number) / "checkpoints").glob("step_*")):
            damage(step)
        refused(match, tmp_path / str(number))
    refused(r"model\.embed_dim: 16 -> 32", source, model={"embed_dim": 32})
    refused("belongs to the run", source, name="another")
    refused(r"the config differs from the model in .*model\.embed_dim", tmp_path / "new", init_from=str(source), model={"embed_dim": 32})
    refused("contains no model", tmp_path / "new", init_from=str(corpus))
    refused("no good checkpoint in .* bytes, not", tmp_path / "new", init_from=str(tmp_path / "4"))


def kept_lines(config: Config) -> list[str]:
    """The lines of train.log without their times."""
    return [line.partition("  ")[2] for line in (config.directory / "train.log").read_text().splitlines()]


def test_train_log_keeps_what_was_printed(whole: tuple[Config, dict[int, float]]) -> None:
    config, losses = whole
    lines = kept_lines(config)
    assert [line for line in lines if line.startswith("start ")] == [f"start 1, process {os.getpid()} on {socket.gethostname()}: test"]
    assert "compiling the train step ..." in lines
    for step, loss in losses.items():
        assert any(line.startswith(f"step {step}/{STEPS}  loss {loss:.4f}") for line in lines)
    assert any(line.startswith(f"step {STEPS}: held ") for line in lines)
    assert lines[-1] == f"finished at step {STEPS}"


def test_a_run_writes_documented_metrics_and_evaluations(whole: tuple[Config, dict[int, float]]) -> None:
    config, losses = whole
    assert list(losses) == list(range(1, STEPS + 1))
    assert losses[STEPS] < losses[1]
    records = read_metrics(config.directory / "metrics.jsonl")
    names = {name for record in records for name in record} - {"step", "time"}
    assert all(metric(name) for name in names)
    wanted = {"loss", "grad_norm", "param_norm", "learning_rate", "tokens", "skipped_steps"}
    assert {f"train/{name}" for name in wanted} <= names
    final = next(record for record in reversed(records) if "eval/held/bits_per_byte" in record)
    assert final["step"] == STEPS
    assert 0 < final["eval/held/bits_per_byte"] < 12
    partial = [record for record in records if "eval/held/loss" in record and record["step"] == 4]
    assert partial
    assert "eval/held/bits_per_byte" not in partial[0]


def test_a_run_directory_tells_what_was_run(whole: tuple[Config, dict[int, float]]) -> None:
    directory = whole[0].directory
    record = json.loads((directory / "run.json").read_text())
    start = record["starts"][0]
    assert start["packages"]["jax"] == jax.__version__
    assert start["devices"]["count"] == 8
    assert (directory / "tokenizer").is_dir()
    assert (directory / "config.yaml").is_file()
    plan = json.loads((directory / "plan.json").read_text())
    assert plan["memory_bytes"] > 0 and plan["communication"] and all(row["explanation"] for row in plan["memory"])
    compiled = json.loads((directory / "compile.json").read_text())
    assert compiled["flops"] > 0 and compiled["compile_s"] > 0 and compiled["collectives"]
    assert compiled["traffic"] == plan["communication"]
    told = [event.fields for event in read_events(event_file(directory, 0)) if event.kind == "device_states"]
    assert all((fields["source"] is None) != (fields["missing"] is None) for fields in told) and told


def test_events_account_for_the_phases_of_a_run(whole: tuple[Config, dict[int, float]]) -> None:
    events = read_events(event_file(whole[0].directory, 0))
    first = [event for event in events if event.restart == 0]
    ended = {event.fields["phase"] for event in first if event.kind in ("phase_end", "phase_total")}
    assert {"launch", "init", "setup", "compile", "first_step", "train", "data_wait", "evaluation", "save", "teardown"} <= ended
    assert [event.fields["step"] for event in first if event.kind == "step"] == list(range(1, STEPS + 1))
    assert {event.fields["step"] for event in first if event.kind == "checkpoint_saved"} == {2, 4, 6}
    assert recompilations(first, 0) == []
    parts = startup_parts(events, 0)
    assert parts is not None
    assert {"launch", "init", "trace", "lower", "compile", "first_step"} <= parts.keys()
    records = [r for r in read_metrics(whole[0].directory / "metrics.jsonl") if "train_startup/total_s" in r]
    assert len(records) == 1, "written once"
    for name, seconds in parts.items():
        assert records[0][f"train_startup/{name}_s"] == pytest.approx(seconds)
    assert records[0]["train_startup/total_s"] == pytest.approx(sum(parts.values()))
    programs = {"init", "train_step", "param_norm", "evaluation_step", "all_finite"}
    assert {p.fields["program"] for p in phases(first) if p.name == "compile"} == programs


def test_what_is_slow_before_the_first_step_is_in_a_phase(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine or storage anything may take seconds: the ledger must not leave them unexplained."""
    wait_s, waited = 0.7, list[str]()

    def slow(owner: Any, name: str) -> None:
        real = getattr(owner, name)

        def after_a_while(*args: Any, **settings: Any) -> Any:
            waited.append(name)
            time.sleep(wait_s)
            return real(*args, **settings)

        monkeypatch.setattr(owner, name, after_a_while)

    config = make_config(corpus, tmp_path / "runs", trainer={"steps": 2, "log_every": 1})
    run(config)
    places = [
        "open_program_cache",
        "Checkpointer",
        "check_restored",
        "keep_tokenizer",
        "describe_mesh",
        "build_loader",
        "watch_loss_spikes",
        "Loop",
    ]
    for name in places:
        slow(run_module, name)
    slow(Checkpointer, "has_checkpoints")
    run(config.model_copy(update={"trainer": config.trainer.model_copy(update={"steps": 4})}))
    ledger = run_ledger(read_events(event_file(config.directory, 0)))
    assert {*places, "has_checkpoints"} == set(waited)
    assert ledger.seconds["unexplained"] < wait_s


def test_a_second_start_compiles_nothing_and_trains_bitwise_as_the_first(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(name: str) -> tuple[dict[int, float], list[Any], dict[str, Any], Config]:
        config = make_config(
            corpus,
            tmp_path / name,
            model={"vocab_size": 258, "num_layers": 2, "embed_dim": 16, "num_heads": 2, "mlp_dim": 40, "max_seq_len": LENGTH},
            runtime={"compilation_cache": str(tmp_path / "cache")},
        )
        losses = run(config)
        events = read_events(event_file(config.directory, 0))
        return (
            losses,
            [p for p in phases(events) if p.name == "compile"],
            json.loads((config.directory / "compile.json").read_text()),
            config,
        )

    heard: list[str] = []

    def hear(event: str, duration_secs: float, **details: Any) -> None:
        heard.append(str(details.get("fun_name"))) if event.startswith("/jax/core/compile/") else None

    losses, compiles, compiled, config = start("first")
    jax.monitoring.register_event_duration_secs_listener(hear)
    try:
        again, loads, loaded, other = start("second")
    finally:
        jax.monitoring.unregister_event_duration_listener(hear)
    assert {p.fields["source"] for p in compiles} == {COMPILED}
    assert [(p.fields["program"], p.fields["source"]) for p in loads] == [(p.fields["program"], LOADED) for p in compiles]
    assert len(loads) == 5
    assert not [name for name in heard if "train_step" in name or "evaluation_step" in name or "param_norm" in name]
    assert again == losses
    one, two = payload(config), payload(other)
    assert all(np.array_equal(values, two[name]) for name, values in one.items()) and one.keys() == two.keys()
    from_xla = ("argument_bytes", "output_bytes", "alias_bytes", "temp_bytes", "flops", "memory", "mesh")
    assert {name: compiled[name] for name in from_xla} == {name: loaded[name] for name in from_xla}
    assert [(c["kind"], c["bytes"], c["count"]) for c in compiled["collectives"]] == [
        (c["kind"], c["bytes"], c["count"]) for c in loaded["collectives"]
    ]
    assert (compiled["source"], loaded["source"]) == (COMPILED, LOADED)

    def failing(*_: Any) -> None:
        raise jax.errors.JaxRuntimeError("NOT_FOUND: Function broadcast_fusion not found")

    with monkeypatch.context() as patch:
        patch.setattr(Loop, "run", failing)
        with pytest.raises(jax.errors.JaxRuntimeError):
            start("third")
    left = {file.name.partition("-")[0] for file in (tmp_path / "cache" / "programs").iterdir()}
    assert left == {"evaluation_step", "all_finite"}, "what was loaded is not trusted again; these were not"


def test_a_restored_run_makes_no_first_state(corpus: Path, tmp_path: Path, whole: tuple[Config, dict[int, float]]) -> None:
    shutil.copytree(whole[0].directory, tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "checkpoints" / f"step_{STEPS:08d}")
    config = make_config(corpus, tmp_path / "run")
    run(config)
    events = read_events(event_file(config.directory, 0))
    last = max(event.restart for event in events)
    found = phases(event for event in events if event.restart == last)
    assert "init" not in {p.name for p in found} | {p.fields.get("program") for p in found}
    parts = startup_parts(events, last)
    assert parts is not None and parts["restore"] > 0


def test_goodput_written_during_a_run_is_that_of_its_log(whole: tuple[Config, dict[int, float]]) -> None:
    directory = whole[0].directory
    first = [event for event in read_events(event_file(directory, 0)) if event.restart == 0]
    for record in read_metrics(directory / "metrics.jsonl"):
        if "train_goodput/goodput" in record:
            (end,) = (i for i, event in enumerate(first) if event.kind == "step" and event.fields["step"] == record["step"])
            ledger = run_ledger(first[: end + 1])
            assert record["train_goodput/wall_s"] == pytest.approx(ledger.wall_s, abs=1e-4)
            for name, seconds in ledger.seconds.items():
                assert record.get(f"train_goodput/{name}_s", 0.0) == pytest.approx(seconds, abs=1e-4), (record["step"], name)


def test_a_profile_is_captured_where_asked_with_the_program_beside_it(corpus: Path, tmp_path: Path) -> None:
    config = make_config(corpus, tmp_path / "run", profiler={"start_step": 3, "num_steps": 2})
    run(config)
    (capture,) = (config.directory / "tensorboard" / "plugins" / "profile").iterdir()
    assert list(capture.glob("*.xplane.pb"))
    (program,) = capture.glob("*.hlo.txt")
    assert "train_step" in program.name
    described = json.loads((capture / "capture.json").read_text())
    assert (described["first_step"], described["num_steps"]) == (3, 2)
    assert described["unprofiled_step_time_s"] > 0


def test_a_batch_whose_shape_drifts_is_compiled_for_and_named(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from ridgeline.trainer import run as module

    put, count = module.to_global, [0]

    def drifting(rows: Any, partitioner: Any) -> Any:
        count[0] += 1
        return put({name: values[:, : LENGTH // 2] if count[0] == 3 else values for name, values in rows.items()}, partitioner)

    monkeypatch.setattr(module, "to_global", drifting)
    config = make_config(corpus, tmp_path / "run", evaluation={"every": 0, "sets": {}}, checkpoint={"every": 0, "final": False})
    assert len(run(config)) == STEPS
    events = read_events(event_file(config.directory, 0))
    (again,) = [found for found in recompilations(events, 0) if found.program == "train_step"]
    assert again.step == 3
    tokens = next(change for change in again.arguments if change.argument == "batch['tokens']")
    assert (tokens.before.split()[0], tokens.after.split()[0]) == (f"int32[{ROWS},{LENGTH}]", f"int32[{ROWS},{LENGTH // 2}]")
    assert run_ledger(events).seconds["compile"] > again.duration_s  # its time is no step's


def test_many_bad_steps_in_a_row_stop_the_run_and_leave_the_checkpoint(corpus: Path, tmp_path: Path) -> None:
    config = make_config(corpus, tmp_path / "run", trainer={"steps": 3, "max_bad_steps": 3}, checkpoint={"every": 1})
    run(config)
    wild = make_config(
        corpus,
        tmp_path / "run",
        trainer={"steps": 50, "max_bad_steps": 3},
        checkpoint={"every": 0},
        optimizer={"learning_rate": 1e12, "weight_decay": 1e12, "clip_norm": None},
        evaluation={"every": 0},
    )
    with pytest.raises(NumericalFailure, match="3 non-finite steps in a row"):
        run(wild)
    skipped = [e for e in read_events(event_file(config.directory, 0)) if e.kind == "skipped_step"]
    assert [event.fields["in_a_row"] for event in skipped[-3:]] == [1, 2, 3]
    assert (config.directory / "checkpoints" / "step_00000003" / "integrity.json").is_file()
    assert kept_lines(config)[-1].startswith("stopped: 3 non-finite steps in a row")


def test_a_resume_refuses_another_model_and_names_it(corpus: Path, whole: tuple[Config, dict[int, float]]) -> None:
    config, _ = whole
    with pytest.raises(UserError, match=r"model\.mlp_dim: 32 -> 48"):
        run(make_config(corpus, config.directory, model={"mlp_dim": 48}))


def environment() -> dict[str, str]:
    return {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": QUICK_XLA, "PYTHONUNBUFFERED": "1"}


def command(config: Config, directory: Path, *arguments: str) -> list[str]:
    from ridgeline.configs.dump import to_yaml

    file = directory / "config.yaml"
    file.write_text(to_yaml(config))
    return [sys.executable, "-m", "ridgeline", "train", str(file), *arguments]


def test_ctrl_c_saves_and_the_same_command_resumes(corpus: Path, tmp_path: Path) -> None:
    config = make_config(corpus, tmp_path / "run", trainer={"steps": 100_000, "log_every": 5}, evaluation={"every": 0, "sets": {}})
    words = command(config, tmp_path)
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment(), cwd=ROOT)
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        lines.append(line)
        if line.startswith("step 10/"):
            process.send_signal(signal.SIGINT)
    assert process.wait(60) == INTERRUPTED, "".join(lines)
    text = "".join(lines)
    assert "SIGINT received: saving" in text
    assert "Traceback" not in text
    stopped = int(text.split("stopped at step ")[1].split(";")[0])
    again = subprocess.run(
        [*words, f"trainer.steps={stopped + 5}"], capture_output=True, text=True, env=environment(), cwd=ROOT, timeout=120, check=False
    )
    assert again.returncode == 0, again.stdout + again.stderr
    assert f"resuming from the checkpoint of step {stopped}" in again.stdout


def test_numerical_failure_has_its_own_exit_code(corpus: Path, tmp_path: Path) -> None:
    config = make_config(
        corpus,
        tmp_path / "run",
        trainer={"steps": 50, "max_bad_steps": 2},
        optimizer={"learning_rate": 1e12, "weight_decay": 1e12, "clip_norm": None},
        evaluation={"every": 0, "sets": {}},
    )
    done = subprocess.run(command(config, tmp_path), capture_output=True, text=True, env=environment(), cwd=ROOT, timeout=120, check=False)
    assert done.returncode == NUMERICAL_FAILURE, done.stdout + done.stderr
    assert done.stderr.strip().splitlines()[-1].startswith("ridge: stopped: 2 non-finite steps in a row")


def steps_of(config: Config) -> list[str]:
    """The steps in a run's checkpoint directory, those set aside with their reason."""
    return sorted(path.name.removeprefix("step_").lstrip("0") for path in (config.directory / "checkpoints").glob("step_*"))


CRASH = ["trainer.steps=60", "optimizer.learning_rate=1e12"]


def test_a_learning_rate_that_ruins_a_run_costs_no_checkpoint_and_the_run_goes_on(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    quiet = {"evaluation": {"every": 0, "sets": {}}, "checkpoint": {"every": 2, "keep_last": 2}, "schedule": {"kind": "constant"}}
    config = make_config(corpus, tmp_path / "run", trainer={"steps": 10}, **quiet)
    run(config)
    assert steps_of(config) == ["10", "8"]
    words = command(config, tmp_path)
    done = subprocess.run([*words, *CRASH], capture_output=True, text=True, env=environment(), cwd=ROOT, timeout=120, check=False)
    assert done.returncode == NUMERICAL_FAILURE, done.stdout + done.stderr
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("ridge: stopped: 10 non-finite steps in a row (steps 12 to 21); "), last
    assert f"'ridge train {words[-1]}' " in last and "step 10" in last and last.endswith("--from-step 8"), last
    assert steps_of(config) == ["10", "8"]
    capsys.readouterr()
    losses = run(make_config(corpus, tmp_path / "run", trainer={"steps": 12}, **quiet))
    assert "resuming from the checkpoint of step 10" in capsys.readouterr().out
    assert max(losses) == 12 and all(np.isfinite(loss) for loss in losses.values())


def test_a_preemption_within_a_streak_leaves_the_last_good_step(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    from ridgeline.trainer import run as module

    put, count = module.to_global, [0]

    def poisoned(rows: Any, partitioner: Any) -> Any:
        count[0] += 1
        if count[0] == 6:
            os.kill(os.getpid(), signal.SIGTERM)
        return put({**rows, "weights": rows["weights"] * np.float32(np.nan if count[0] > 4 else 1)}, partitioner)

    monkeypatch.setattr(module, "to_global", poisoned)
    config = make_config(corpus, tmp_path / "run", trainer={"steps": 50}, evaluation={"every": 0, "sets": {}}, checkpoint={"every": 4})
    outcome = train(config, command=["test"])
    assert outcome is not None and outcome.stopped_by == signal.SIGTERM and outcome.steps == 5
    assert steps_of(config) == ["4"]
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("step 5: not saved")]
    assert line.endswith("the newest checkpoint is step 4")
    assert kept_lines(config)[-1] == "stopped at step 5 by SIGTERM"


def test_a_run_restarted_from_an_earlier_step_is_bitwise_the_original_and_keeps_the_later_ones(
    corpus: Path, tmp_path: Path, whole: tuple[Config, dict[int, float]]
) -> None:
    source, losses = whole
    shutil.copytree(source.directory, tmp_path / "run")
    config = make_config(corpus, tmp_path / "run")
    assert steps_of(config) == ["4", "6"]
    brief = make_config(corpus, tmp_path / "run", trainer={"stop_after_s": 1e-9}, checkpoint={"every": 0, "final": False})
    train(brief, command=["test"], from_step=4)
    assert steps_of(config) == ["4", "6.bad-superseded"], "at once: the next start must not take it"
    train(config, command=["test"])
    assert steps_of(config) == ["4", "6", "6.bad-superseded"]
    records = read_metrics(config.directory / "metrics.jsonl")
    assert {r["step"]: r["train/loss"] for r in records if "train/loss" in r} == losses
    assert [event.fields["step"] for event in read_events(event_file(config.directory, 0)) if event.kind == "step"].count(5) == 3
    shutil.rmtree(config.directory / "checkpoints" / "step_00000006.bad-superseded")
    one, other = payload(source), payload(config)
    assert one.keys() == other.keys()
    for name, values in one.items():
        np.testing.assert_array_equal(values, other[name], err_msg=name)


def test_a_step_to_restart_from_that_is_not_there_is_refused_before_anything_is_touched(
    corpus: Path, tmp_path: Path, whole: tuple[Config, dict[int, float]]
) -> None:
    config, _ = whole
    shutil.copytree(config.directory, tmp_path / "run")
    words = command(make_config(corpus, tmp_path / "run"), tmp_path)
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "run").rglob("*")}
    done = subprocess.run(
        [*words, "--from-step", "5"], capture_output=True, text=True, env=environment(), cwd=ROOT, timeout=120, check=False
    )
    assert done.returncode == USAGE, done.stdout + done.stderr
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("ridge: ")]
    assert str(tmp_path / "run" / "checkpoints") in line and "step 5" in line and "4, 6" in line
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "run").rglob("*")} == before


def test_a_run_whose_checkpoints_vanished_is_refused_until_they_are_back(
    corpus: Path, tmp_path: Path, whole: tuple[Config, dict[int, float]]
) -> None:
    shutil.copytree(whole[0].directory, tmp_path / "run")
    config, checkpoints = make_config(corpus, tmp_path / "run", trainer={"steps": STEPS + 1}), tmp_path / "run" / "checkpoints"
    checkpoints.rename(tmp_path / "elsewhere")
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "run").rglob("*")}
    for _ in range(2):  # gone, and an empty mount point
        with pytest.raises(UserError, match=rf"checkpoints has no checkpoint, but one of step {STEPS} was saved there: bring"):
            run(config)
        assert {path: path.stat().st_mtime_ns for path in (tmp_path / "run").rglob("*") if path != checkpoints} == before
        checkpoints.mkdir(exist_ok=True)
    checkpoints.rmdir()
    (tmp_path / "elsewhere").rename(checkpoints)
    assert max(run(config)) == STEPS + 1


def test_a_run_whose_directory_vanishes_ends_with_its_own_code(corpus: Path, tmp_path: Path) -> None:
    config = make_config(corpus, tmp_path / "run", trainer={"steps": 100_000}, checkpoint={"every": 0, "final": False})
    words = [*command(config, tmp_path), "runtime.lease_timeout_s=4", "evaluation.every=0"]
    read, write = os.pipe2(os.O_DIRECT)  # each read returns what one write wrote
    process = subprocess.Popen(words, stdout=write, stderr=write, env=environment(), cwd=ROOT)
    os.close(write)
    writes = []
    while text := os.read(read, 4096).decode():
        writes.append(text)
        if text.startswith("step 20/"):
            (tmp_path / "run").rename(tmp_path / "elsewhere")
    os.close(read)
    lines = "".join(writes).splitlines(keepends=True)
    assert process.wait(60) == TAKEN_OVER, "".join(lines)
    assert [text for text in writes if not text.endswith("\n")] == [], "lines of several threads mix"
    (said,) = [line for line in lines if line.startswith("ridge: ")]
    assert "lease" in said or "run directory" in said, said
    assert "Traceback" not in "".join(lines)
    assert not (tmp_path / "run").exists()


def test_two_processes_train_as_one_and_one_goes_on_for_two(corpus: Path, tmp_path: Path, whole: tuple[Config, dict[int, float]]) -> None:
    _, losses = whole
    config = make_config(corpus, tmp_path / "run", runtime={"platform": "cpu", "cpu_devices": 4})
    half = STEPS // 2
    words = command(config, tmp_path, "--coordinator", f"127.0.0.1:{free_port()}", "--processes", "2")
    asked = {"prompts": "[def]", "max_tokens": 4, "temperature": 0}
    limit = ["checkpoint.every=1", "schedule.kind=constant", *(f"evaluation.samples.{key}={value}" for key, value in asked.items())]
    single = run(make_config(corpus, tmp_path / "single", schedule={"kind": "constant"}))
    processes = [
        subprocess.Popen(
            [*words, "--process", str(index), f"trainer.steps={half}", *limit],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment(),
            cwd=ROOT,
        )
        for index in range(2)
    ]
    output = [process.communicate(timeout=180)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], "\n".join(output)
    assert "step 1/" in output[0]
    assert "step 1/" not in output[1], "only process 0 speaks"
    written = [[e for e in read_events(event_file(config.directory, index)) if "samples" in e.fields] for index in range(2)]
    assert [len(events) for events in written] == [1, 1]
    [sample], [same] = (events[0].fields["samples"] for events in written)
    assert sample == same
    trained = generate(config.directory, ["def"], max_tokens=4, temperature=0)
    assert sample["text"] == trained[0].text
    continued = run(make_config(corpus, tmp_path / "run", schedule={"kind": "constant"}, evaluation={"every": 0}))
    assert continued.keys() == losses.keys()
    for step, loss in single.items():
        assert continued[step] == pytest.approx(loss, rel=1e-5), step


def test_what_a_checkpoint_is_bound_to_is_compared_where_it_is_used(
    corpus: Path, tmp_path: Path, whole: tuple[Config, dict[int, float]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    shutil.copytree(whole[0].directory, tmp_path / "run")
    load_model(tmp_path / "run")
    config_file, tokenizer = tmp_path / "run" / "config.yaml", tmp_path / "run" / "tokenizer"
    text = config_file.read_text()
    config_file.write_text(re.sub(r"norm_eps:\s+[^,}\s]+", "norm_eps: 0.25", text))
    for read in (lambda: load_model(tmp_path / "run"), lambda: call(to_hf, tmp_path / "run", tmp_path / "hf")):
        with pytest.raises(UserError, match=r"config\.yaml differs .* \(model\.norm_eps: .* -> 0\.25\): change it back"):
            read()
    config_file.write_text(text)
    damaged = next(path for path in sorted(tokenizer.iterdir()) if path.is_file())
    content = damaged.read_bytes()
    damaged.write_bytes(content + b" ")
    for read in (lambda: load_model(tmp_path / "run"), lambda: call(to_hf, tmp_path / "run", tmp_path / "hf")):
        with pytest.raises(UserError, match=f"{damaged} is missing or damaged"):
            read()
    shutil.rmtree(tmp_path / "run" / "checkpoints" / f"step_{STEPS:08d}")
    path = str(corpus / "train")
    monkeypatch.setattr("ridgeline.trainer.checkpoint.identity.corpora_of", lambda config: {path: "another"})
    run(make_config(corpus, tmp_path / "run"))
    said = capsys.readouterr().out
    assert f"WARNING: {path} is not the corpus that step 4 was trained on" in said
    assert f"WARNING: {damaged} is missing or damaged: the tokenizer is copied again" in said
    assert damaged.read_bytes() == content


def call(command: Any, *arguments: Any) -> None:
    result = CliRunner().invoke(command, [str(argument) for argument in arguments])
    if result.exception is not None:
        raise result.exception


def suspend_between_saves(process: subprocess.Popen[str], run: Path) -> None:
    """Stop a process while none of its saves is in flight: the threads of one go on, before any check, into a temporary directory."""
    end_s = time.monotonic() + 60
    while time.monotonic() < end_s:
        process.send_signal(signal.SIGSTOP)
        events = read_events(event_file(run, 0))
        begun = sum(event.kind == "phase_start" and event.fields["phase"] == "save" for event in events)
        if begun and begun == sum(event.kind in ("checkpoint_saved", "checkpoint_failed") for event in events):
            return
        process.send_signal(signal.SIGCONT)
        time.sleep(0.05)
    raise AssertionError("no moment without a save")


def test_two_runs_never_write_one_directory(corpus: Path, tmp_path: Path) -> None:
    """A second start is refused; a suspended holder is taken over, and ends without another write when it continues."""
    sections = {"evaluation": {"every": 0, "sets": {}}, "schedule": {"kind": "constant"}, "runtime": {"lease_timeout_s": 3}}
    endless = make_config(corpus, tmp_path / "run", trainer={"steps": 10**8, "log_every": 1}, checkpoint={"every": 40}, **sections)
    words = command(endless, tmp_path)
    first = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment(), cwd=ROOT)
    try:
        assert first.stdout is not None
        assert any(line.startswith("step 4/") for line in first.stdout)
        threading.Thread(target=first.stdout.read, daemon=True).start()
        with pytest.raises(UserError, match=rf"{tmp_path}/run is in use: process {first.pid} on ") as refused:
            train(endless, command=["test"])
        assert "\n" not in str(refused.value)
        suspend_between_saves(first, tmp_path / "run")
        second = subprocess.run(
            [*words, "trainer.stop_after_s=0.1"], env=environment(), cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
        )
        assert second.returncode == 0, second.stdout + second.stderr
        assert f"taking over {tmp_path}/run from process {first.pid} on " in second.stdout
        before = contents(tmp_path / "run")
        first.send_signal(signal.SIGCONT)
        assert first.wait(10) == TAKEN_OVER
    finally:
        first.kill()
    assert contents(tmp_path / "run") == before
    assert first.stderr is not None
    (line,) = [line for line in first.stderr.read().splitlines() if line.startswith("ridge: ")]
    assert f"stopped: {tmp_path}/run is no longer this start's" in line


def test_a_run_stops_at_its_time_and_keeps_its_work(corpus: Path, tmp_path: Path) -> None:
    start_s = time.monotonic()
    config = make_config(
        corpus, tmp_path / "run", trainer={"steps": 10**8, "stop_after_s": 0.5, "log_every": 1000}, checkpoint={"every": 0}
    )
    train(config, command=["test"])
    assert time.monotonic() - start_s < 120
    assert list((config.directory / "checkpoints").glob("step_*"))
