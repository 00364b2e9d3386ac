"""Real runs whose checkpoints are repaired, compared and copied: what is left resumes bitwise."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
from orbax.checkpoint import v1 as ocp

from ridgeline.cli import main as cli
from ridgeline.configs.errors import UserError
from ridgeline.configs.schema import Config
from ridgeline.loaders.prepare import PrepareSettings, prepare
from ridgeline.rundir.directory import read_metrics
from ridgeline.rundir.events import event_file, read_events
from ridgeline.trainer.checkpoint import directories as dirs
from ridgeline.trainer.checkpoint import integrity
from ridgeline.trainer.checkpoint.store import Store
from ridgeline.trainer.run import train

STEPS = 6


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("corpus")
    (directory / "texts").mkdir()
    for number in range(16):
        (directory / "texts" / f"{number}.txt").write_text("\n".join(f"line {number * line} of a text" for line in range(100)))
    prepare(PrepareSettings((directory / "texts",), directory / "sets", "bytes", holdouts={"held": 0.25}, shards=2), workers=1)
    return directory / "sets"


def make_config(corpus: Path, run_dir: Path, **checkpoint: Any) -> Config:
    return Config.model_validate(
        {
            "name": "small",
            "run_dir": str(run_dir),
            "model": {"vocab_size": 258, "num_layers": 1, "embed_dim": 16, "num_heads": 2, "mlp_dim": 32, "max_seq_len": 32},
            "precision": {"compute": "float32"},
            "data": {"train": [{"path": str(corpus / "train")}], "seq_len": 32, "batch_size": 8},
            "evaluation": {"sets": {"held": str(corpus / "held")}, "every": 2, "max_batches": 1},
            "trainer": {"steps": STEPS, "log_every": 1},
            "checkpoint": {"every": 2, "keep_last": 3, **checkpoint},
            "logging": {"tensorboard": False},
        }
    )


def arrays(step: Path) -> dict[str, np.ndarray]:
    return {name.strip("'[]"): np.asarray(leaf) for name, leaf in ocp.load(step).items()}


def newest(config: Config) -> Path:
    return dirs.step_dir(config.directory / "checkpoints", dirs.complete_steps(config.directory / "checkpoints")[-1])


def equal(a: Mapping[str, np.ndarray], b: Mapping[str, np.ndarray]) -> bool:
    return a.keys() == b.keys() and all(a[name].tobytes() == b[name].tobytes() for name in a)


@pytest.fixture(scope="module")
def whole(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Config:
    """An undisturbed run with copies in a store."""
    root = tmp_path_factory.mktemp("whole")
    config = make_config(corpus, root / "run", copy_to=f"file://{root}/store")
    train(config, command=["test"])
    return config


def stopped_at_4(config: Config, target: Path) -> Path:
    """A copy of the run as it was after step 4."""
    shutil.copytree(config.directory, target)
    shutil.rmtree(newest(config.model_copy(update={"run_dir": target})))
    return target


def called(capsys: pytest.CaptureFixture[str], *arguments: object, code: int = 0) -> Any:
    found = cli.run(["checkpoint", *map(str, arguments)])
    captured = capsys.readouterr()
    assert found == code, captured.err
    return json.loads(captured.out) if "--json" in arguments else captured.out + captured.err


def damage(step: Path, seed: int) -> None:
    rng = random.Random(seed)
    for name in rng.sample(sorted(integrity.list_files(step)), 3):
        content = bytearray((step / name).read_bytes())
        for _ in range(3):
            content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
        (step / name).write_bytes(content[: rng.choice([len(content), len(content) // 2])])


@pytest.mark.parametrize("with_copy", [False, True])
def test_a_repaired_run_resumes_bitwise(
    whole: Config, corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], with_copy: bool
) -> None:
    run = stopped_at_4(whole, tmp_path / "run")
    damage(dirs.step_dir(run / "checkpoints", 4), seed=with_copy)
    options = ["--from", whole.checkpoint.copy_to] if with_copy else []
    (run / "config.yaml").write_text((run / "config.yaml").read_text().replace("store", "nowhere"))  # its own copies are not used
    report = called(capsys, "repair", run, "--json", *options, code=0 if with_copy else 1)
    assert report["resumes"] == (4 if with_copy else 2)
    assert called(capsys, "verify", run, "--json")["good"]
    config = make_config(corpus, run)
    train(config, command=["test"])
    assert equal(arrays(newest(config)), arrays(newest(whole)))
    restored = [
        event.fields for event in read_events(event_file(run, 0)) if event.kind == "phase_end" and event.fields["phase"] == "restore"
    ]
    assert restored[-1]["step"] == report["resumes"]


def test_the_copies_are_the_checkpoints(whole: Config) -> None:
    store, root = Store(str(whole.checkpoint.copy_to)), whole.directory / "checkpoints"
    assert store.steps() == dirs.complete_steps(root) == [2, 4, 6]
    place = Path(str(whole.checkpoint.copy_to).removeprefix("file://"))
    for path in (path for step in dirs.steps(root) for path in dirs.step_dir(root, step).rglob("*") if path.is_file()):
        assert (place / path.relative_to(root)).read_bytes() == path.read_bytes()
    copied = [event for event in read_events(event_file(whole.directory, 0)) if event.kind == "checkpoint_copied"]
    assert {event.fields["step"] for event in copied} == {2, 4, 6}


def test_a_lost_run_directory_comes_back_from_the_store(
    whole: Config, corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    called(capsys, "copy", whole.checkpoint.copy_to, tmp_path / "run", "--step", 4)
    config = make_config(corpus, tmp_path / "run")
    train(config, command=["test"])
    assert equal(arrays(newest(config)), arrays(newest(whole)))


@pytest.mark.parametrize("place", ["run", "run/checkpoints/", "run/copies", "run/../link", "link/checkpoints", "elsewhere", "elsewhere/a"])
def test_copies_within_the_run_itself_are_refused(
    place: str, whole: Config, corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also through links: there the copy would be the checkpoint itself, or be lost with it."""
    run = stopped_at_4(whole, tmp_path / "run")
    (run / "checkpoints").rename(tmp_path / "elsewhere")
    (run / "checkpoints").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "link").symlink_to(run)
    before = sorted(tmp_path.rglob("*"))
    assert "is in the run directory" in called(capsys, "copy", run, f"file://{tmp_path}/{place}", code=2)
    assert sorted(tmp_path.rglob("*")) == before
    with pytest.raises(UserError, match="is in the run directory"):
        train(make_config(corpus, run, copy_to=f"file://{tmp_path}/{place}"), command=["test"])


@pytest.mark.parametrize("exists", [False, True])
def test_a_restore_without_a_checkpoint_fails(exists: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if exists:
        (tmp_path / "store").mkdir()
    assert "has no complete checkpoint" in called(capsys, "copy", f"file://{tmp_path}/store", tmp_path / "run", code=2)
    assert not (tmp_path / "run").exists()


def test_an_interrupted_copy_continues_and_damage_in_the_store_is_replaced(whole: Config, capsys: pytest.CaptureFixture[str]) -> None:
    fsspec.filesystem("memory").store.clear()
    url = "memory://bucket/run"
    first = called(capsys, "copy", whole.directory, url, "--json")
    assert [entry["step"] for entry in first["checkpoints"]] == [2, 4, 6]
    assert all(entry["sent_bytes"] > 0 for entry in first["checkpoints"])
    assert all(entry["sent_bytes"] == 0 for entry in called(capsys, "copy", whole.directory, url, "--json")["checkpoints"])
    # an interruption in step 4: no manifest yet, one file cut, one with another byte
    system = fsspec.filesystem("memory")
    files = sorted(system.find("/bucket/run/step_00000004"), key=lambda name: system.info(name)["size"])
    system.rm_file("/bucket/run/step_00000004/integrity.json")
    cut, flipped = files[-1], files[-2]
    system.pipe_file(cut, system.cat_file(cut)[:-1])
    system.pipe_file(flipped, b"x" + system.cat_file(flipped)[1:])
    assert Store(url).steps() == [2, 6]
    again = {entry["step"]: entry["sent_bytes"] for entry in called(capsys, "copy", whole.directory, url, "--json")["checkpoints"]}
    sizes = integrity.list_files(dirs.step_dir(whole.directory / "checkpoints", 4))
    assert again[2] == again[6] == 0
    assert again[4] == sum(sizes[name.partition("step_00000004/")[2]] for name in (cut, flipped))
    assert Store(url).steps() == [2, 4, 6]
    assert "of another run" in called(capsys, "copy", make_other(whole), url, code=2)


def make_other(whole: Config) -> Path:
    """A run with another id."""
    other = whole.directory.parent / "other"
    shutil.copytree(whole.directory, other, dirs_exist_ok=True)
    record = json.loads((other / "run.json").read_text())
    (other / "run.json").write_text(json.dumps(record | {"id": "another"}))
    return other


def test_a_store_that_fails_is_reported_and_training_goes_on(corpus: Path, whole: Config, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    config = make_config(corpus, tmp_path / "run", copy_to=f"file://{tmp_path}/file/below")
    train(config, command=["test"])
    assert equal(arrays(newest(config)), arrays(newest(whole)))
    failed = [event for event in read_events(event_file(config.directory, 0)) if event.kind == "checkpoint_copy_failed"]
    assert failed and "file/below" in failed[0].fields["error"] + str(config.checkpoint.copy_to)
    assert "checkpoints are not copied to" in (config.directory / "train.log").read_text()


def test_the_best_are_kept_and_copies_follow_retention(corpus: Path, tmp_path: Path) -> None:
    """The learning rate is so high that the loss goes up and down, on each machine differently: of some seeds one is best early."""
    for seed in range(20):
        directory = tmp_path / str(seed)
        config = make_config(corpus, directory / "run", every=1, keep_last=1, keep_best=1, copy_to=f"file://{directory}/store")
        changed = {"optimizer": {"learning_rate": 20.0}, "schedule": {"kind": "constant"}, "evaluation": {"every": 1}}
        sections = {name: getattr(config, name).model_copy(update=keys) for name, keys in changed.items()}
        config = config.model_copy(update=sections | {"seed": seed})
        train(config, command=["test"])
        lines = read_metrics(config.directory / "metrics.jsonl")
        losses = {line["step"]: line["eval/held/loss"] for line in lines if "eval/held/loss" in line}
        best = min(losses, key=lambda step: losses[step])
        if best < STEPS - 1:
            break
    assert best < STEPS - 1
    root = config.directory / "checkpoints"
    assert dirs.complete_steps(root) == [best, STEPS - 1, STEPS]
    assert Store(str(config.checkpoint.copy_to)).steps() == [best, STEPS - 1, STEPS]
    assert json.loads((dirs.step_dir(root, best) / "metadata.json").read_text())["evaluation"]["held"] == losses[best]


def test_diff_finds_exactly_what_differs(whole: Config, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = whole.directory / "checkpoints"
    found = called(capsys, "diff", whole.directory, whole.directory, "--step-a", 4, "--json")
    a, b = (arrays(dirs.step_dir(root, step)) for step in (4, 6))
    assert len(found["arrays"]) == len(a)
    for row in found["arrays"]:
        x, y = a[row["name"]], b[row["name"]]
        differ = x.reshape(-1).view(np.uint8) != y.reshape(-1).view(np.uint8)
        assert row["changed_bytes"] == differ.sum()
        assert (row["change"] == "equal") == (not differ.any())
        distance = np.abs(x.astype(np.float64) - y.astype(np.float64))
        scale = np.maximum(np.abs(x), np.abs(y)).astype(np.float64)
        assert row["max_abs"] == distance.max()
        assert row["max_rel"] == np.divide(distance, scale, out=np.zeros_like(distance), where=scale > 0).max()
    assert {entry["key"] for entry in found["facts"]} >= {"step", "data_position"}
    same = called(capsys, "diff", dirs.step_dir(root, 4), dirs.step_dir(root, 4), "--json")
    assert same["equal"] and not same["facts"] and not same["config"]
    assert "bitwise equal" in called(capsys, "diff", dirs.step_dir(root, 4), dirs.step_dir(root, 4))
    # another model: names, shapes and config
    other = tmp_path / "other"
    shutil.copytree(whole.directory, other)
    path = dirs.step_dir(other / "checkpoints", 6)
    metadata = json.loads((path / "metadata.json").read_text())
    name = next(iter(metadata["arrays"]))
    metadata["arrays"]["params.new"] = metadata["arrays"].pop(name)
    metadata["config"]["optimizer"]["learning_rate"] = 7.0
    from ridgeline.trainer.agreement import Agreement
    from ridgeline.trainer.checkpoint.seal import seal

    (path / "integrity.json").unlink()
    seal(path, metadata, Agreement("test"))
    found = called(capsys, "diff", whole.directory, other, "--json")
    changes = {row["name"]: row["change"] for row in found["arrays"]}
    assert changes[name] == "only in A" and changes["params.new"] == "only in B"
    assert [entry["key"] for entry in found["config"]] == ["optimizer.learning_rate"]
