"""Training on preference pairs: whole runs, the stored reference, meshes and microbatches, pairs in batches, hostile configs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ridgeline.configs.dump import to_yaml
from ridgeline.configs.errors import UserError
from ridgeline.configs.rules import check_config
from ridgeline.configs.schema import Config
from ridgeline.loaders.documents import PairSource
from ridgeline.loaders.loader import build_loader, open_evaluation_set
from ridgeline.loaders.prepare import PrepareSettings, RecordFields, prepare
from ridgeline.models.preference import REFERENCE
from ridgeline.rundir.directory import REFERENCE_FILE, read_metrics
from ridgeline.rundir.events import event_file, read_events
from ridgeline.rundir.recompilation import recompilations
from ridgeline.sharding.mesh import build_mesh
from ridgeline.sharding.partition import Partitioner
from ridgeline.trainer import reference
from ridgeline.trainer.optimizers import build_optimizer
from ridgeline.trainer.run import train
from ridgeline.trainer.state import abstract_state, init_state, model_spec
from ridgeline.trainer.step import make_evaluation_step, make_train_step, to_global
from tests.loaders.chats import write_chat_tokenizer
from tests.models.tiny import QUICK_COMPILE
from tests.sampling import drawn
from tests.trainer.test_run import ROOT, environment

LENGTH, ROWS, STEPS = 64, 8, 30
ONE = {"data": 1, "fsdp": 1, "tensor": 1}


@pytest.fixture(autouse=True, scope="module")
def _quick(quick_compile: None) -> None:
    """These programs run for milliseconds."""


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pairs of a right and a wrong answer, of which one does not fit a row, with a held-out set; and a corpus of text."""
    directory = tmp_path_factory.mktemp("pairs")
    write_chat_tokenizer(directory / "tokenizer", "chatml")
    records = [{"prompt": f"Is {i} a number?", "chosen": f"Yes, {i} is.", "rejected": "What?"} for i in range(24)]
    records.append({"prompt": "Why?", "chosen": "So. " * LENGTH, "rejected": "No."})
    (directory / "pairs.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    source, tokenizer = directory / "pairs.jsonl", str(directory / "tokenizer")
    settings = PrepareSettings((source,), directory / "sets", tokenizer, fields=RecordFields(chat=True), holdouts={"held": 0.3})
    prepare(settings, workers=1)
    (directory / "text.txt").write_text("text " * 200)
    prepare(PrepareSettings((directory / "text.txt",), directory / "sets" / "text" / "train", tokenizer), workers=1)
    return directory / "sets"


def make_config(corpus: Path | str, run_dir: Path | str, **sections: Any) -> Config:
    base: dict[str, Any] = {
        "name": "pairs",
        "run_dir": str(run_dir),
        "model": {
            "vocab_size": 427,
            "num_layers": 1,
            "embed_dim": 16,
            "num_heads": 2,
            "mlp_dim": 32,
            "max_seq_len": LENGTH,
            "pad_vocab_to": 428,
        },
        "precision": {"compute": "float32"},
        "mesh": {"data": 2, "fsdp": 2, "tensor": 2},
        "data": {"train": [{"path": f"{corpus}/train"}], "seq_len": LENGTH, "batch_size": ROWS},
        "preference": {"loss": "dpo"},
        "evaluation": {"sets": {"held": f"{corpus}/held"}},
        "optimizer": {"learning_rate": 3e-3, "weight_decay": 0.0},
        "trainer": {"steps": STEPS, "log_every": 1},
        "checkpoint": {"every": STEPS // 2},
        "logging": {"tensorboard": False},
    }
    merged = {**base, **{k: {**base[k], **v} if isinstance(v, dict) and k in base else v for k, v in sections.items()}}
    return Config.model_validate(merged)


def logged(config: Config, name: str) -> dict[int, float]:
    return {r["step"]: r[name] for r in read_metrics(config.directory / "metrics.jsonl") if name in r}


def payload(config: Config) -> list[np.ndarray]:
    from orbax.checkpoint import v1 as ocp

    newest = sorted((config.directory / "checkpoints").glob("step_*"))[-1]
    return [np.asarray(leaf) for leaf in jax.tree.leaves(ocp.load(newest))]


@pytest.fixture(scope="module")
def whole(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Config:
    sets = {"held": f"{corpus}/held", "text": f"{corpus}/text/train"}
    config = make_config(corpus, tmp_path_factory.mktemp("whole") / "run", evaluation={"sets": sets})
    outcome = train(config, command=["test"])
    assert outcome is not None and outcome.finished
    return config


def test_the_chosen_answers_win(whole: Config, corpus: Path) -> None:
    losses, accuracy = logged(whole, "train/loss"), logged(whole, "train_preference/accuracy")
    assert losses[1] == pytest.approx(np.log(2), abs=1e-6)  # the model is its reference
    assert logged(whole, "train_preference/margin")[1] == pytest.approx(0, abs=1e-5)
    assert losses[STEPS] < 0.6
    assert accuracy[STEPS] == 1
    held = PairSource(corpus / "held", LENGTH)
    assert logged(whole, "eval/held/pairs") == {STEPS: held.num_pairs}
    assert logged(whole, "eval/held/reward_accuracy")[STEPS] == 1
    note = (whole.directory / "train.log").read_text()
    assert sum(PairSource(corpus / part, LENGTH).too_long for part in ("train", "held")) == 1
    assert "1 of " in note
    assert f"longer than data.seq_len={LENGTH}" in note


@pytest.mark.parametrize("lora", drawn([pytest.param({}, id="all parameters"), pytest.param({"rank": 2}, id="adapters")], 1))
def test_a_stopped_run_continues_bitwise_with_its_reference(corpus: Path, tmp_path: Path, whole: Config, lora: dict[str, int]) -> None:
    if lora:
        whole = make_config(corpus, tmp_path / "whole", lora=lora, trainer={"steps": 4}, checkpoint={"every": 2})
        train(whole, command=["test"])
    half = whole.trainer.steps // 2
    config = whole.model_copy(update={"run_dir": tmp_path / "run"})
    first = config.model_copy(update={"trainer": config.trainer.model_copy(update={"stop_after_s": 1e-9})})
    train(first, command=["test"])  # ends after the first step
    stored = (config.directory / REFERENCE_FILE).read_bytes()
    assert stored == (whole.directory / REFERENCE_FILE).read_bytes()
    train(config, command=["test"])
    assert (config.directory / REFERENCE_FILE).read_bytes() == stored
    assert logged(config, "train/loss") == logged(whole, "train/loss")
    assert all(np.array_equal(a, b) for a, b in zip(payload(config), payload(whole), strict=True))
    assert half in logged(config, "train/loss")


def test_two_processes_train_on_pairs_as_one(whole: Config, tmp_path: Path) -> None:
    """The same mesh over the devices of two processes: reference, losses and evaluations."""
    file, run_dir = tmp_path / "config.yaml", tmp_path / "run"
    file.write_text(to_yaml(whole))
    words = [sys.executable, "-m", "ridgeline", "launch", "--processes", "2", str(file), f"run_dir={run_dir}", "runtime.cpu_devices=4"]
    done = subprocess.run(words, env=environment(), cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=500)
    assert done.returncode == 0, done.stdout
    config = whole.model_copy(update={"run_dir": run_dir})
    stored, wanted = (np.load(each.directory / REFERENCE_FILE) for each in (config, whole))
    assert set(stored) == set(wanted)
    for name in wanted:
        same = stored[name] == wanted[name] if name == "facts" else np.allclose(stored[name], wanted[name], rtol=1e-5)
        assert same, name
    assert len(logged(whole, "train/loss")) == STEPS
    for name in ("train/loss", "train_preference/chosen_log_prob", "eval/held/loss", "eval/text/loss"):
        assert logged(config, name) == pytest.approx(logged(whole, name), rel=1e-4, abs=1e-5), name


def test_sets_of_pairs_and_of_text_are_evaluated_together(whole: Config) -> None:
    assert logged(whole, "eval/text/loss")[STEPS] > 1
    assert logged(whole, "eval/text/tokens")[STEPS] > 0
    assert not logged(whole, "eval/text/pairs")
    assert recompilations(read_events(event_file(whole.directory, 0)), 0) == []


def test_another_reference_is_refused(corpus: Path, tmp_path: Path) -> None:
    config = make_config(corpus, tmp_path / "run", trainer={"steps": 2}, checkpoint={"every": 1}, evaluation={"sets": {}})
    first = config.model_copy(update={"trainer": config.trainer.model_copy(update={"stop_after_s": 1e-9})})
    train(first, command=["test"])
    file = config.directory / REFERENCE_FILE
    stored = file.read_bytes()
    longer = config.model_copy(update={"data": config.data.model_copy(update={"seq_len": LENGTH - 2})})
    added = config.model_copy(update={"evaluation": config.evaluation.model_copy(update={"sets": {"held": corpus / "held"}})})
    for changed, message in ((longer, f"is of seq_len={LENGTH}, not {LENGTH - 2}"), (added, "has no log-probabilities of")):
        with pytest.raises(UserError, match=message):
            train(changed, command=["test"])
    for content, message in ((stored[:-40], "is not the file that the checkpoint was trained with"), (None, "is missing")):
        file.unlink() if content is None else file.write_bytes(content)
        with pytest.raises(UserError, match=message):
            train(config, command=["test"])
    file.write_bytes(stored)
    outcome = train(config, command=["test"])
    assert outcome is not None and outcome.finished


def test_batches_have_whole_pairs_in_every_process(corpus: Path) -> None:
    source = PairSource(corpus / "train", LENGTH)
    source.reference = np.arange(2.0 * source.num_pairs, dtype=np.float32).reshape(-1, 2)
    data = make_config(corpus, "unused").data

    def read(rows: list[int], start: int = 0) -> list[dict[str, np.ndarray]]:
        pairs = {corpus / "train": source}
        loader = build_loader(data, seed=1, vocab_size=427, rows=np.array(rows), start_step=start, pairs=pairs)
        batches = [next(loader) for _ in range(6 - start)]
        loader.close()
        return batches

    steps = read(list(range(ROWS)))
    halves = [read(list(range(half, half + ROWS // 2)), start=2) for half in (0, ROWS // 2)]
    for index, batch in enumerate(steps):
        number = batch[REFERENCE][:, 0].astype(int)
        assert (number[::2] % 2 == 0).all()
        assert (number[1::2] == number[::2] + 1).all()
        if index >= 2:
            for name, values in batch.items():
                np.testing.assert_array_equal(values, np.concatenate([half[index - 2][name] for half in halves]))
    drawn = np.concatenate([batch[REFERENCE][::2, 0] for batch in steps])[: source.num_pairs]
    assert len(set(drawn)) == source.num_pairs  # an epoch has each pair once


def test_the_reference_of_a_row_is_of_that_row_and_each_batch_is_progress(corpus: Path) -> None:
    source, config, batches = PairSource(corpus / "held", LENGTH), make_config(corpus, "unused"), list[None]()

    def sums(params: None, batch: dict[str, jax.Array]) -> jax.Array:
        return jnp.sum(batch["tokens"] * batch["weights"], axis=1)

    reference.compute(config, Partitioner.single(), sums, None, {corpus / "held": source}, lambda: batches.append(None))
    assert source.num_rows % ROWS  # the last batch has padding
    assert len(batches) == -(-source.num_rows // ROWS)
    rows = source.read(np.arange(source.num_rows))
    np.testing.assert_array_equal(rows[REFERENCE][:, 0], np.sum(rows["tokens"] * rows["weights"], axis=1))
    assert len(set(rows[REFERENCE][:, 0])) > 2


def test_rows_past_the_end_of_a_set_are_no_pairs(corpus: Path) -> None:
    source = PairSource(corpus / "held", LENGTH)
    config = make_config(corpus, "unused")
    partitioner = Partitioner.single()
    spec = model_spec(config, partitioner)
    params = jax.jit(spec.build, compiler_options=QUICK_COMPILE)(jax.random.key(0))
    step = jax.jit(make_evaluation_step(spec, config, partitioner), compiler_options=QUICK_COMPILE)
    held = open_evaluation_set(corpus / "held", seq_len=LENGTH, batch_size=64, rows=np.arange(64), pairs=source)
    sums = step(params, {name: jnp.asarray(x) for name, x in held.batch(0).items()})
    assert source.num_pairs < 32
    assert float(sums["pairs"]) == source.num_pairs
    one_by_one = open_evaluation_set(corpus / "held", seq_len=LENGTH, batch_size=2, rows=np.arange(2), pairs=source)
    total = sum(float(step(params, {n: jnp.asarray(x) for n, x in batch.items()})["loss"]) for batch in one_by_one)
    assert float(sums["loss"]) == pytest.approx(total, rel=1e-5)
    empty = {name: jnp.zeros_like(jnp.asarray(x)) for name, x in held.batch(0).items()}
    assert {float(x) for x in step(params, empty).values()} == {0.0}


def stepped(corpus: Path, mesh: dict[str, int], **sections: Any) -> tuple[list[float], list[np.ndarray]]:
    """Losses and gradient norms of two steps, and the parameters after them."""
    config = make_config(corpus, "unused", mesh=ONE | mesh, data={"batch_size": 16}, optimizer={"kind": "sgd"}, **sections)
    devices = jax.devices()[: int(np.prod(list(mesh.values())))]
    partitioner = Partitioner.of(build_mesh(config.mesh, devices), config)
    spec = model_spec(config, partitioner)
    optimizer = build_optimizer(config.optimizer, config.precision, spec.trained_axes, partitioner)
    abstract = abstract_state(config, spec, optimizer, partitioner)
    alone = Partitioner.single()
    whole = model_spec(config, alone)
    first = jax.device_get(init_state(config, whole, optimizer, abstract_state(config, whole, optimizer, alone)))
    state = jax.tree.map(lambda x, leaf: jax.device_put(x, leaf.sharding), first, abstract)
    step = jax.jit(make_train_step(spec, config, optimizer, lambda s: jnp.float32(1e-2), partitioner), compiler_options=QUICK_COMPILE)
    source, found = PairSource(corpus / "train", LENGTH), list[float]()
    source.reference = np.random.default_rng(0).normal(-20, 2, source.reference.shape).astype(np.float32)
    for index in range(2):
        batch = source.read((np.arange(16) + 2 * index) % source.num_rows)
        state, metrics = step(state, to_global(batch, partitioner))
        found += [float(metrics[name]) for name in ("loss", "grad_norm", "preference/margin", "preference/accuracy")]
    return found, [np.asarray(leaf) for leaf in jax.tree.leaves(state.params)]


@pytest.fixture(scope="module")
def alone(corpus: Path) -> tuple[list[float], list[np.ndarray]]:
    return stepped(corpus, {"fsdp": 1}, preference={"loss": "ipo"})


@pytest.mark.parametrize(
    ("mesh", "accumulation"),
    drawn(
        [
            pytest.param({"fsdp": 1}, 4, id="microbatches"),
            pytest.param({"data": 2, "fsdp": 2, "tensor": 2}, 2, id="all axes, microbatches"),
            pytest.param({"fsdp": 2, "context": 2, "tensor": 2}, 1, id="context"),
        ],
        2,
    ),
)
def test_meshes_and_microbatches_train_as_one_device(corpus: Path, alone: Any, mesh: dict[str, int], accumulation: int) -> None:
    found = stepped(corpus, mesh, preference={"loss": "ipo"}, trainer={"accumulation": accumulation})
    np.testing.assert_allclose(found[0], alone[0], rtol=2e-5)
    for ours, expected in zip(found[1], alone[1], strict=True):
        np.testing.assert_allclose(ours, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("sections", "key", "message"),
    [
        ({"data": {"batch_size": 7}}, "data.batch_size", "a pair is 2 rows: must be even, got 7 (6 or 8 works)"),
        (
            {"trainer": {"accumulation": 8}, "mesh": ONE},
            "data.batch_size",
            "do not divide by the 2 rows of a pair (data.batch_size=16 works)",
        ),
        ({"mesh": ONE | {"fsdp": 8}}, "data.batch_size", "do not divide by mesh.fsdp=8 x 2 rows of a pair"),
        (
            {"evaluation": {"batch_size": 3}, "mesh": ONE},
            "evaluation.batch_size",
            "3 rows do not divide by the 2 rows of a pair (2 or 4 works)",
        ),
        ({"loss": {"z_loss": 1e-4}}, "loss.z_loss", "does not support preference pairs; set loss.z_loss=0"),
        (
            {"mesh": ONE | {"pipeline": 2}, "model": {"num_layers": 2}},
            "mesh.pipeline",
            "does not support preference pairs; set mesh.pipeline=1",
        ),
        ({"preference": {"label_smoothing": 0.5}}, "preference.label_smoothing", "must be less than 0.5, got 0.5"),
        ({"preference": {"loss": "ipo", "label_smoothing": 0.1}}, "preference.label_smoothing", "only for dpo and robust"),
        ({"preference": {"loss": None, "beta": 0.5}}, "preference.beta", "there is no loss of pairs; set preference.loss"),
    ],
)
def test_settings_that_do_not_work_are_refused_by_name(sections: dict[str, Any], key: str, message: str) -> None:
    problems = check_config(make_config("c", "r", **sections))
    assert any(problem.keys[0] == key and message in problem.message for problem in problems), problems


def test_data_that_does_not_fit_the_loss_is_refused(corpus: Path, tmp_path: Path) -> None:
    off = make_config(corpus, tmp_path / "run", preference={"loss": None})
    text = make_config(corpus, tmp_path / "run", data={"train": [{"path": f"{corpus}/text/train"}]})
    held = make_config(corpus / "text", tmp_path / "run", preference={"loss": None}, evaluation={"sets": {"held": str(corpus / "held")}})
    for config, message in (
        (off, "data.train: .* has preference pairs; set preference.loss=dpo"),
        (text, "data.train: .* has no preference pairs, which preference.loss=dpo needs"),
        (held, "evaluation.sets.held: .* has preference pairs"),
    ):
        with pytest.raises(UserError, match=message):
            train(config, command=["test"])
    assert not (tmp_path / "run").exists()
