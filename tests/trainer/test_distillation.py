"""Distillation: the stored predictions of a teacher, runs of a student, resumes, meshes and microbatches, what is refused."""

from __future__ import annotations

import json
import math
import pickle
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from click.testing import CliRunner

from ridgeline.cli.commands.data_teacher import teacher as teacher_command
from ridgeline.configs.errors import UserError
from ridgeline.configs.load import load
from ridgeline.configs.rules import check_config
from ridgeline.configs.schema import Config
from ridgeline.configs.tuning_schema import DistillationConfig
from ridgeline.loaders import teacher as stored
from ridgeline.loaders.manifest import CorpusError
from ridgeline.loaders.prepare import PrepareSettings, prepare
from ridgeline.loaders.rows import RowSource
from ridgeline.loaders.teacher import TeacherReader, read_teacher
from ridgeline.planner.memory import memory_per_device
from ridgeline.rundir.directory import read_metrics
from ridgeline.sharding.mesh import build_mesh
from ridgeline.sharding.partition import Partitioner
from ridgeline.trainer.optimizers import build_optimizer
from ridgeline.trainer.run import train
from ridgeline.trainer.state import abstract_state, init_state, model_spec
from ridgeline.trainer.step import abstract_batch, make_train_step, to_global
from tests.models.tiny import QUICK_COMPILE
from tests.parity.hugging_face import LLAMA, Variant, load_theirs, save_random_model
from tests.sampling import drawn

ROOT = Path(__file__).parents[2]
LENGTH, ROWS, STEPS, TOP, TEMPERATURE = 16, 8, 6, 12, 1.5
MODEL = {"vocab_size": 258, "num_layers": 1, "embed_dim": 16, "num_heads": 2, "mlp_dim": 32, "max_seq_len": LENGTH, "pad_vocab_to": 260}
ONE = {"data": 1, "fsdp": 1, "tensor": 1}


@pytest.fixture(autouse=True, scope="module")
def _quick(quick_compile: None) -> None:
    """These programs run for milliseconds."""


def make_config(run_dir: Path | str, train: list[dict[str, Any]], **sections: Any) -> Config:
    base: dict[str, Any] = {
        "name": "student",
        "run_dir": str(run_dir),
        "model": MODEL,
        "precision": {"compute": "float32"},
        "mesh": {"data": 2, "fsdp": 2, "tensor": 2},
        "data": {"train": train, "seq_len": LENGTH, "batch_size": ROWS},
        "optimizer": {"learning_rate": 1e-2, "weight_decay": 0.0},
        "trainer": {"steps": STEPS, "log_every": 1},
        "checkpoint": {"every": STEPS // 2},
        "logging": {"tensorboard": False},
    }
    merged = {**base, **{k: {**base[k], **v} if isinstance(v, dict) and k in base else v for k, v in sections.items()}}
    return Config.model_validate(merged)


def run_teacher(*arguments: object) -> str:
    done = CliRunner().invoke(teacher_command, [str(argument) for argument in arguments])
    if isinstance(done.exception, UserError):
        raise done.exception
    assert done.exit_code == 0, done.output
    return done.output


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A stream and a packed corpus of bytes, a random teacher, and its predictions of both."""
    directory = tmp_path_factory.mktemp("distillation")
    for name, packed in (("stream", None), ("packed", LENGTH)):
        texts = directory / f"{name}-texts"
        texts.mkdir()
        for number, source in enumerate(sorted((ROOT / "loaders").glob("*.py"))[:8]):
            (texts / f"{number}.txt").write_text(source.read_text()[200 : 200 + (500 if packed is None else 12)])
        prepare(PrepareSettings((texts,), directory / name, "bytes", pack_length=packed), workers=1)
    shape = {"vocab_size": MODEL["vocab_size"], "num_hidden_layers": 2, "num_key_value_heads": 2}
    save_random_model(Variant("llama", LLAMA | shape), directory / "teacher")
    options = ["--top-k", TOP, "--temperature", TEMPERATURE, "--batch-size", 3, "--dtype", "float32"]
    run_teacher(directory / "teacher", directory / "stream", "-o", directory / "of-stream", "--seq-len", LENGTH, *options)
    run_teacher(directory / "teacher", directory / "packed", "-o", directory / "of-packed", *options)
    return directory


def sources(base: Path) -> list[dict[str, Any]]:
    return [{"path": str(base / name), "teacher": str(base / f"of-{name}"), "weight": w} for name, w in (("stream", 3.0), ("packed", 1.0))]


def settings(**changes: Any) -> dict[str, Any]:
    return {"weight": 0.6, "temperature": TEMPERATURE, "top_k": 8, **changes}


@pytest.mark.parametrize("name", ["stream", "packed"])
def test_stored_predictions_are_those_of_the_teacher(base: Path, name: str) -> None:
    source = RowSource(base / name, LENGTH)
    rows = np.arange(source.num_rows)
    read = source.read(rows)
    with torch.no_grad():
        logits = load_theirs(base / "teacher")(torch.from_numpy(read["tokens"]).long()).logits
    log_p = (logits / TEMPERATURE).log_softmax(-1)
    reader = pickle.loads(pickle.dumps(TeacherReader(base / f"of-{name}", DistillationConfig(weight=1, top_k=TOP))))
    found = reader.read(rows)
    ids = torch.from_numpy(found["teacher_ids"]).long()
    expected = log_p.gather(-1, ids)
    counted = read["segment_ids"] == 1  # transformers sees one document per row
    np.testing.assert_allclose(found["teacher_log_probs"][..., :-1][counted], expected[counted], atol=2e-5)
    np.testing.assert_allclose(expected[counted], log_p.topk(TOP, -1).values[counted], atol=2e-5)
    np.testing.assert_allclose(np.exp(found["teacher_log_probs"]).sum(-1)[counted], 1, rtol=1e-5)
    assert counted.sum() > 50
    fewer = TeacherReader(base / f"of-{name}", DistillationConfig(weight=1, top_k=3)).read(rows)["teacher_log_probs"]
    assert fewer.shape[-1] == 4
    np.testing.assert_allclose(np.exp(fewer).sum(-1)[counted], 1, rtol=1e-5)
    other = DistillationConfig(weight=1, top_k=3, rest="renormalize", temperature=0.5)
    sharper = TeacherReader(base / f"of-{name}", other).read(rows)["teacher_log_probs"]
    want = (logits / 0.5).log_softmax(-1).gather(-1, ids[..., :3]).log_softmax(-1)
    np.testing.assert_allclose(torch.from_numpy(sharper).log_softmax(-1)[counted], want[counted], atol=1e-4)


def test_an_interrupted_command_and_slices_write_the_same_bytes(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored, "FILE_BYTES", 5 * LENGTH * 14)
    arguments = [
        base / "teacher",
        base / "stream",
        "--seq-len",
        LENGTH,
        "--top-k",
        2,
        "--dtype",
        "bfloat16",
        "--batch-size",
        4,
        "mesh.fsdp=1",
    ]
    whole = ["-o", tmp_path / "whole"]
    printed = run_teacher(*arguments, *whole)
    manifest = read_teacher(tmp_path / "whole")
    assert len(manifest.shards) > 3
    assert "2 tokens at each of" in printed
    writes, write = list[int](), stored.TeacherWriter.write

    def failing(self: Any, number: int, blocks: Any) -> None:
        if len(writes) == 2:
            raise KeyboardInterrupt
        writes.append(number)
        write(self, number, blocks)

    monkeypatch.setattr(stored.TeacherWriter, "write", failing)
    stopped = CliRunner().invoke(teacher_command, [str(x) for x in (*arguments, "-o", tmp_path / "cut")])
    assert stopped.exit_code == 1
    assert writes == [0, 1]
    with pytest.raises(CorpusError, match=r"it is not finished: run `ridge data teacher` again"):
        read_teacher(tmp_path / "cut")
    writes[:] = [-1] * 3
    run_teacher(*arguments, "-o", tmp_path / "cut")
    assert writes == [-1, -1, -1, *range(2, len(manifest.shards))]
    for part in ("1/2", "0/2"):
        assert "is written" in run_teacher(*arguments, "-o", tmp_path / "sliced", "--slice", part)
    run_teacher(*arguments, "-o", tmp_path / "sliced")
    for name in ("cut", "sliced"):
        assert {f.name: f.read_bytes() for f in (tmp_path / name).iterdir()} == {
            f.name: f.read_bytes() for f in (tmp_path / "whole").iterdir()
        }
    with pytest.raises(UserError, match="another model, corpus or settings; replace them with --overwrite"):
        run_teacher(*arguments, *whole, "--temperature", 2)
    run_teacher(*arguments, *whole, "--temperature", 2, "--overwrite")
    assert read_teacher(tmp_path / "whole").predictions.temperature == 2
    file = tmp_path / "cut" / "predictions-00000.bin"
    file.write_bytes(bytes(file.stat().st_size))
    source = {"path": str(base / "stream"), "teacher": str(tmp_path / "cut")}
    with pytest.raises(CorpusError, match=r"damaged shard: .*predictions-00000\.bin does not have the sha256"):
        train(make_config(tmp_path / "run", [source], distillation={"weight": 0.5, "top_k": 2}), command=["test"])


def logged(config: Config, name: str) -> dict[int, float]:
    return {r["step"]: r[name] for r in read_metrics(config.directory / "metrics.jsonl") if name in r}


def payload(config: Config) -> list[np.ndarray]:
    from orbax.checkpoint import v1 as ocp

    newest = sorted((config.directory / "checkpoints").glob("step_*"))[-1]
    return [np.asarray(leaf) for leaf in jax.tree.leaves(ocp.load(newest))]


def test_a_student_learns_and_a_stopped_run_continues_bitwise(base: Path, tmp_path: Path) -> None:
    meshed = {
        "trainer": {"accumulation": 2},
        "evaluation": {"sets": {"same": str(base / "packed")}},
    }
    whole = make_config(tmp_path / "whole", sources(base), distillation=settings(), **meshed)
    train(whole, command=["test"])
    loss, nats, kl = (logged(whole, f"train{name}") for name in ("/loss", "_distillation/cross_entropy", "_distillation/divergence"))
    assert kl[STEPS] < kl[1]
    for step in loss:
        assert loss[step] == pytest.approx(0.4 * nats[step] + 0.6 * TEMPERATURE**2 * kl[step], rel=1e-5)
    assert logged(whole, "eval/same/loss")[STEPS] == pytest.approx(nats[STEPS], rel=0.3)
    config = whole.model_copy(update={"run_dir": tmp_path / "run"})
    first = config.model_copy(update={"trainer": config.trainer.model_copy(update={"stop_after_s": 1e-9})})
    train(first, command=["test"])  # ends after the first step
    train(config, command=["test"])
    assert logged(config, "train/loss") == loss
    assert all(np.array_equal(a, b) for a, b in zip(payload(config), payload(whole), strict=True))
    metadata = json.loads(next((config.directory / "checkpoints").glob("step_*6/metadata.json")).read_text())
    assert metadata["corpora"][str(base / "of-stream")] == read_teacher(base / "of-stream").sha256


def stepped(base: Path, mesh: dict[str, int], **sections: Any) -> tuple[list[float], list[np.ndarray]]:
    """Two steps on 16 rows: metrics, and parameters."""
    sections = {"distillation": settings()} | sections
    config = make_config("unused", sources(base), mesh=ONE | mesh, data={"batch_size": 16}, optimizer={"kind": "sgd"}, **sections)
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
    reader = TeacherReader(base / "of-stream", config.distillation)
    source, found = RowSource(base / "stream", LENGTH, teacher=reader), list[float]()
    for index in range(2):
        state, metrics = step(state, to_global(source.read(np.arange(16) + 16 * index), partitioner))
        found += [float(metrics[name]) for name in ("loss", "grad_norm", "distillation/divergence", "distillation/cross_entropy")]
    return found, [np.asarray(leaf) for leaf in jax.tree.leaves(state.params)]


EXPERTS = {"moe": {"experts": 4, "experts_per_token": 2, "expert_dim": 16}}


@pytest.mark.parametrize(
    ("mesh", "sections"),
    drawn(
        [
            ({"data": 2, "fsdp": 2, "tensor": 2}, {"trainer": {"accumulation": 2}}),
            ({"fsdp": 2, "context": 2, "tensor": 2}, {}),
            ({"data": 2, "fsdp": 2, "tensor": 2}, {"lora": {"rank": 2}, "distillation": settings(rest="renormalize")}),
            ({"fsdp": 2, "expert": 2}, {"model": EXPERTS}),
        ],
        1,
    ),
    ids=str,
)
def test_meshes_and_microbatches_train_as_one_device(base: Path, mesh: dict[str, int], sections: dict[str, Any]) -> None:
    alone = stepped(base, {"fsdp": 1}, **{key: value for key, value in sections.items() if key != "trainer"})
    found = stepped(base, mesh, **sections)
    np.testing.assert_allclose(found[0], alone[0], rtol=2e-5)
    for ours, expected in zip(found[1], alone[1], strict=True):
        np.testing.assert_allclose(ours, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("sections", "key", "message"),
    [
        ({"distillation": {"top_k": 3}}, "distillation.top_k", "there is no distillation; set distillation.weight"),
        ({"distillation": {}, "data": {"train": [{"path": "a", "teacher": "b"}]}}, "data.train.0.teacher", "there is no distillation"),
        ({"data": {"train": [{"path": "a"}]}}, "data.train.0.teacher", "has no teacher; write its predictions with `ridge data teacher"),
        ({"distillation": settings(top_k=300)}, "distillation.top_k", "must be at most model.vocab_size=258, got 300"),
        ({"mesh": {"pipeline": 2}, "model": {"num_layers": 2}}, "mesh.pipeline", "does not support distillation; set mesh.pipeline=1"),
        ({"preference": {"loss": "dpo"}}, "preference.loss", "a run has one loss"),
    ],
)
def test_settings_that_do_not_work_are_refused_by_name(sections: dict[str, Any], key: str, message: str) -> None:
    problems = check_config(make_config("r", [{"path": "a", "teacher": "b"}], **({"distillation": settings()} | sections)))
    assert any(problem.keys[0] == key and message in problem.message for problem in problems), problems


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"distillation": settings(top_k=TOP + 1)}, f"distillation.top_k must be at most {TOP}"),
        (
            {"distillation": settings(temperature=2)},
            "distillation.temperature must be 1.5, that of .*, where distillation.rest=bucket; got 2",
        ),
        ({"data": {"seq_len": LENGTH // 2}}, "has the predictions of other rows, those of data.seq_len=16 data.document_masking=true"),
        ({"train": "packed"}, "has the predictions of another corpus than"),
        ({"teacher": "nowhere"}, "no teacher's predictions in"),
    ],
)
def test_predictions_that_do_not_fit_are_refused_before_anything_is_written(base: Path, tmp_path: Path, changes: Any, message: str) -> None:
    corpus, teacher = changes.pop("train", "stream"), changes.pop("teacher", "of-stream")
    source = {"path": str(base / corpus), "teacher": str(base / teacher)}
    with pytest.raises(UserError, match=message):
        train(make_config(tmp_path / "run", [source], **({"distillation": settings()} | changes)), command=["test"])
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("rest", ["bucket", "renormalize"])
def test_the_planned_batch_is_that_of_the_step(rest: str) -> None:
    mesh = {"data": 2, "fsdp": 1, "tensor": 2, "context": 2}
    config = make_config("r", [{"path": "a", "teacher": "b"}], mesh=mesh, distillation=settings(rest=rest))
    partitioner = Partitioner.of(build_mesh(config.mesh, jax.devices()), config)
    arrays = abstract_batch(config, partitioner).values()
    sizes = [math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in arrays]
    planned = memory_per_device(config, config.mesh.sizes, gpu=False)
    assert planned.components["batch"].bytes == sum(sizes)
    plain = memory_per_device(config.model_copy(update={"distillation": DistillationConfig()}), config.mesh.sizes, gpu=False)
    assert planned.components["loss"].bytes > plain.components["loss"].bytes


def test_the_example_of_the_guide_fits_the_quickstart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    quickstart, example = (load(f"configs/{name}.yaml", []).config for name in ("quickstart", "examples/distill-tiny"))
    assert example.model.vocab_size == quickstart.model.vocab_size
    assert example.data.train[0].path == quickstart.data.train[0].path
    assert example.data.seq_len == quickstart.data.seq_len
    guide = (ROOT / "docs/guides/distillation.md").read_text()
    top_k, where = example.distillation.top_k, example.data.train[0].teacher
    assert (
        f"{quickstart.directory} {quickstart.data.train[0].path} --seq-len {example.data.seq_len} --top-k {top_k} --output {where}" in guide
    )
